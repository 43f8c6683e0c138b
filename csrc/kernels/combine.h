// Kernels of combine. unpermute: this rank's experts' outputs -> partials in its receive rows. combine: node
// sums for the rail peers and the final sum for this rank, side by side. Two launches.
#pragma once
#include "common/bugs.h"
#include "roles/enter.h"
#include "roles/leave.h"
#include "roles/pull.h"
#include "roles/reduce.h"
#include "roles/unpermute.h"

namespace hep {

template <Arch A>
inline constexpr int kReduceWarps = A::kLanes == 1   ? 1
                                    : A::kLanes < 32 ? 2
                                                     : 4;

template <Arch A>
inline constexpr int kUnpermuteWarps = 2 + kReduceWarps<A>;
template <Arch A>
inline constexpr int kCombineWarps = 2 + 2 * kReduceWarps<A>;

// Warps: unpermute | pack weights | reduce group.
template <Arch A, Transport<A> Net>
HEP_DEVICE void unpermute_kernel(A& a, Net& net, const CombineParams& p, std::byte* smem) {
  const StageFifo<A, SumHead> fifo(smem, p.final_sum);
  const int warp = a.warp_idx();
  const bool elected = a.elect_one();
  if (warp == 0 && elected) fifo.init(a, kReduceWarps<A>);
  if (!enter_kernel(a)) return;
  if (warp == 0) {
    if (elected) UnpermuteRole<A>(a, p, fifo).run();
  } else if (warp == 1) {
    PackWeightsRole<A>::run(a, p);
  } else {
    ReduceRole<A, Net, kReduceWarps<A>, SumOf::kExperts>(a, net, p, fifo, smem, 1, 1, 2, p.dtype, p.partial_dtype)
        .run("unpermute_reduce", 0);
  }
}

// Warps: node sum | final sum | the reduce group of each.
template <Arch A, Transport<A> Net>
HEP_DEVICE void combine_kernel(A& a, Net& net, const CombineParams& p, std::byte* smem) {
  constexpr int kWarps = kReduceWarps<A>;
  const StageFifo<A, SumHead> node_sum(smem, p.node_sum), final_sum(smem, p.final_sum);
  const int warp = a.warp_idx(), parties = a.num_blocks() * 2;
  const bool elected = a.elect_one();
  if (warp == 0 && elected) {
    node_sum.init(a, kWarps);
    final_sum.init(a, kWarps);
    RailTally<A, Net>::clear(a, reinterpret_cast<Vec16*>(smem + p.rail_tally_at), p.rail.num_peers);
  }
  if (!enter_kernel(a)) return;
  if (warp == 0) {
    if (!elected) return;
    if (a.block_idx() == 0) p.gate.announce_ready(a);
    NodeSumRole<A, Net>(a, net, p, node_sum).run(smem);
  } else if (warp == 1) {
    if (!elected) return;
    FinalSumRole<A, Net>(a, net, p, final_sum).run();
    p.gate.wait_all_done(a);
  } else if (warp < 2 + kWarps) {
    ReduceRole<A, Net, kWarps, SumOf::kNode> role(a, net, p, node_sum, smem, 0, 1, 2, p.partial_dtype, p.partial_dtype);
    role.run("node_sum_reduce", parties);
    if (!role.from.elected) return;
  } else {
    ReduceRole<A, Net, kWarps, SumOf::kToken> role(a, net, p, final_sum, smem, 1, 2, 2 + kWarps, p.partial_dtype,
                                                   p.dtype);
    role.run("final_sum_reduce", parties);
    if (!role.from.elected) return;
  }
  leave_operation(a, p, p.plan.rail_count, p.plan.node_count, uint64_t(a.num_blocks()) * (2 + 2 * kWarps));
}

template <Arch A, uint32_t kTileElems = kSumTileElems>
uint64_t plan_combine_smem(CombineParams& p, uint64_t budget) {
  using Fifo = StageFifo<A, SumHead>;
  p.tile_elems = p.hidden < kTileElems ? p.hidden : kTileElems;
  // Weights tiles share the stages; they are fp32 and padded to a multiple of four.
  const uint32_t floats = p.partial.weight_bytes / 4;
  if (p.tile_elems < floats) p.tile_elems = floats < kTileElems ? floats : kTileElems;
  // A stage holds a tile of the widest payload, or of weights, which are fp32.
  const uint32_t in_bytes =
      dtype_bytes(p.dtype) > dtype_bytes(p.partial_dtype) ? dtype_bytes(p.dtype) : dtype_bytes(p.partial_dtype);
  const uint64_t tile = uint64_t(in_bytes) * p.tile_elems,
                 weights = 4ull * (floats < p.tile_elems ? floats : p.tile_elems);
  const uint64_t stage_bytes = tile > weights ? tile : weights;
  const uint64_t stage = align_up(stage_bytes, 128) + sizeof(SumHead) + 2 * sizeof(typename A::Mbarrier);
  p.credit_cursors_at = 0;
  p.rail_tally_at = align_up(4ull * p.rail.num_peers, 128);
  const uint64_t fifos_at = p.rail_tally_at + align_up(sizeof(Vec16) * p.rail.num_peers, 128);
  // A slice holds a warp's share of a tile of payload as it is stored, or of weights.
  using Sum = SliceSum<A, kReduceWarps<A>, kTileElems>;
  const uint32_t weight_share = 4 * Sum::share_of(floats < p.tile_elems ? floats : p.tile_elems);
  auto slice_bytes = [&](uint32_t element_bytes) {
    const uint32_t payload_share = element_bytes * Sum::share_of(p.tile_elems);
    return uint32_t(align_up(payload_share > weight_share ? payload_share : weight_share, 128));
  };
  p.out_slice_bytes[0] = slice_bytes(dtype_bytes(p.partial_dtype));
  p.out_slice_bytes[1] = slice_bytes(in_bytes);
  constexpr uint64_t kSlices = 2 * kReduceWarps<A>;
  const uint64_t out = kSlices * (p.out_slice_bytes[0] + p.out_slice_bytes[1]);
  const uint64_t aside = fifos_at + out + 1024;  // the last: alignment
  const uint64_t left = budget > aside ? budget - aside : 0;
  // Without rail peers nothing is summed for them: the final sum has all the stages.
  const bool rail = p.rail.num_peers != 0;
  const uint32_t stages = stages_that_fit(rail ? left / 2 : left, stage, 2, 24);
  p.node_sum = Fifo::layout(fifos_at, rail ? stages : 2, rail ? stage_bytes : 16);
  p.final_sum = Fifo::layout(p.node_sum.end, stages, stage_bytes);
  p.out_stage_at[0] = p.final_sum.end;
  p.out_stage_at[1] = p.out_stage_at[0] + kSlices * p.out_slice_bytes[0];
  return p.smem_bytes = p.out_stage_at[1] + kSlices * p.out_slice_bytes[1];
}

}  // namespace hep
