// Kernel: combine. Warps: feed 0 | feed 1 | the reduce group of each | pack weights. The first blocks of the grid feed
// links: feed 0 has the node sums for the rail peers, feed 1 the final sum for this rank. Those behind them do the
// local work, unpermute: this rank's experts' outputs -> partials in its receive rows, told group by group to the sums
// that read them, on all ranks of the node. Without such blocks feed 1 of the first does it before its final sum. Local
// work waits for nobody, so whoever waits for partials gets them. Without rail peers both feeds have final sums.
#pragma once
#include "common/bugs.h"
#include "roles/enter.h"
#include "roles/final_sum.h"
#include "roles/leave.h"
#include "roles/node_sum.h"
#include "roles/pack_weights.h"
#include "roles/reduce.h"
#include "roles/unpermute.h"

namespace hep {

template <Arch A>
inline constexpr int kReduceWarps = A::kLanes == 1   ? 1
                                    : A::kLanes < 32 ? 2
                                                     : 4;

namespace combine_warp {
enum : int { kFeed0, kFeed1, kReduce };  // from kReduce on: feed 0's reduce group, feed 1's
template <Arch A>
inline constexpr int kPackWeights = kReduce + 2 * kReduceWarps<A>;
}  // namespace combine_warp
template <Arch A>
inline constexpr int kCombineWarps = combine_warp::kPackWeights<A> + 1;

// Whether both groups of a link block have final sums: where there are no node sums, two warps on each of an SM's
// schedulers, whose waits hide behind each other. A machine that reads rows where they lie waits for no stage.
template <Arch A>
HEP_HOST_DEVICE bool sums_twice(const CombineParams& p) {
  return p.rail.num_peers == 0 && !TileMath<A>::kReadsRows;
}

// What a block of a combine does, by warp. `group` is 0 or 1.
template <Arch A, Transport<A> Net>
struct CombineBlock {
  static constexpr int kWarps = kReduceWarps<A>;
  static constexpr int kPackWarp = combine_warp::kPackWeights<A>;
  static constexpr bool kTogether = !kRailIsNic<Net>;

  A& a;
  Net& net;
  const CombineParams& p;
  std::byte* const smem;
  const bool links, local, elected;
  const bool alike;  // both groups do the same

  HEP_DEVICE CombineBlock(A& arch, Net& n, const CombineParams& params, std::byte* shared)
      : a(arch),
        net(n),
        p(params),
        smem(shared),
        links(params.blocks.feeds_links(uint32_t(arch.block_idx()))),
        local(params.blocks.works_locally(uint32_t(arch.block_idx()))),
        elected(arch.elect_one()),
        alike(!links || sums_twice<A>(params)) {}

  // Before the block meets.
  HEP_DEVICE void begin(int warp) {
    if (warp == kPackWarp && local)
      GroupWalk<A>::begin(a, reinterpret_cast<uint32_t*>(smem + p.source_begins_at), p.plan.source_rows,
                          uint32_t(p.world.num_ranks()), p.plan.numbers->recv_rows);
    if (warp != combine_warp::kFeed0 || !elected) return;
    for (int group = 0; group < 2; ++group) {
      fifo(group).init(a, kWarps);
      if (links) typename RecordWindow<A>::Fifo(smem, p.records[group]).init(a, 1);
      if (local) GroupRecords<A>::init(a, p, smem, group);
    }
    if (links) RailTally<A, Net>::clear(a, reinterpret_cast<Vec16*>(smem + p.rail_tally_at), p.rail.num_peers);
  }
  // By all lanes of a warp, of which one does the work. Over NICs by that one alone: where all waited for the ranks of
  // the node, the calls of NVSHMEM's functions kept words of the loops over rows in memory.
  HEP_DEVICE void feed(int group) {
    if (!kTogether && !elected) return;
    SumFeed<A> to(a, p, fifo(group), smem, group);
    const bool second = group == 1 || alike;
    const uint32_t block = uint32_t(a.block_idx());
    if (elected && local && second)
      UnpermuteRole<A>(a, p, to, smem).run(worker(p.blocks.worker(block), group), worker(p.blocks.workers(), 0));
    if (links && second) {
      FinalSumRole<A, Net> sums(a, net, p, to, smem);
      if (!sums.run(elected, worker(block, group), worker(p.blocks.link, 0))) return;
    } else if (links) {
      if (!NodeSumRole<A, Net>(a, net, p, to, smem).run(elected, smem)) return;
    }
    if (elected) to.stop();
    const bool waits = !injected(Bug::kLeftWhileRowsAreRead) || p.reading.from == SumFrom::kPartials;
    if (links && group == 1 && waits && !p.gate.template wait_all_done<kTogether>(a)) return;
    if (elected) leave();
  }
  HEP_DEVICE void reduce(int group) {
    ReduceRole<A, Net, kWarps> role(a, net, p, fifo(group), smem, group, combine_warp::kReduce + group * kWarps);
    const Role sum = group == 1 || alike ? Role::kFinalSumReduce : Role::kNodeSumReduce;
    role.run(links ? sum : Role::kUnpermuteReduce, links ? 2 * p.blocks.link : 0);
    if (elected) leave();
  }
  HEP_DEVICE void pack() {
    if (!local) return;
    PackWeightsRole<A>(a, p, smem).run(p.blocks.worker(uint32_t(a.block_idx())), p.blocks.workers(), elected);
    if (elected) leave();
  }

 private:
  HEP_DEVICE StageFifo<A, SumHead> fifo(int group) const {
    return {smem, !links ? p.local_sum[group] : group ? p.final_sum : p.node_sum};
  }
  // Groups that do the same are workers of their own; of block n the first is the number of those before it.
  HEP_DEVICE uint32_t worker(uint32_t block, int group) const { return alike ? 2 * block + uint32_t(group) : block; }
  // By every lane that may read the operation's number: of feeds, reduce warps and packing warps.
  HEP_DEVICE void leave() {
    leave_operation(a, p, p.plan.rail_count, p.plan.node_count,
                    uint64_t(p.blocks.all()) * kPackWarp + p.blocks.workers());
  }
};

template <Arch A, Transport<A> Net>
HEP_DEVICE void combine_kernel(A& a, Net& net, const CombineParams& p, std::byte* smem) {
  CombineBlock<A, Net> block(a, net, p, smem);
  const int warp = a.warp_idx();
  block.begin(warp);
  if (!enter_kernel(a)) return;
  if (warp == combine_warp::kFeed0 && a.block_idx() == 0) p.gate.announce_ready(a, p.reading);
  if (warp < combine_warp::kReduce) {
    block.feed(warp);
  } else if (warp == block.kPackWarp) {
    block.pack();
  } else {
    block.reduce((warp - combine_warp::kReduce) / block.kWarps);
  }
}

template <Arch A>
uint64_t plan_combine_smem(CombineParams& p, uint64_t budget) {
  using Fifo = StageFifo<A, SumHead>;
  p.tile_elems = p.hidden < kSumTileElems ? p.hidden : kSumTileElems;
  // Weights tiles share the stages; they are fp32 and padded to a multiple of four.
  const uint32_t floats = p.partial.weight_bytes / 4;
  if (p.tile_elems < floats) p.tile_elems = floats < kSumTileElems ? floats : kSumTileElems;
  // A stage holds a tile of the widest payload, or of weights, which are fp32.
  const uint32_t in_bytes =
      dtype_bytes(p.dtype) > dtype_bytes(p.partial_dtype) ? dtype_bytes(p.dtype) : dtype_bytes(p.partial_dtype);
  const uint64_t tile = uint64_t(in_bytes) * p.tile_elems,
                 weights = 4ull * (floats < p.tile_elems ? floats : p.tile_elems);
  const uint64_t stage_bytes = tile > weights ? tile : weights;
  // Where rows are read where they lie, a stage holds an address.
  const uint64_t stage_holds = TileMath<A>::kReadsRows ? 16 : stage_bytes;
  // First what all blocks have: words, and the slices, which hold a warp's share of a tile as it is stored.
  const auto words = [](uint64_t n) { return align_up(4 * n, 128); };
  const uint64_t peers = p.rail.num_peers;
  p.credit_cursors_at = 0;
  p.rail_tally_at = words(peers);
  p.source_begins_at = p.rail_tally_at + rail_tally_bytes(peers);
  p.node_rows_at[0] = p.source_begins_at + GroupWalk<A>::bytes(uint64_t(p.world.num_ranks()));
  p.node_rows_at[1] = p.node_rows_at[0] + RankRows<A>::bytes(p);
  p.sum_rows_at[0] = p.node_rows_at[1] + RankRows<A>::bytes(p);
  p.sum_rows_at[1] = p.sum_rows_at[0] + SumFeed<A>::rows_bytes(p);
  using Sum = SliceSum<A, kReduceWarps<A>>;
  const uint32_t weight_share = 4 * Sum::share_of(floats < p.tile_elems ? floats : p.tile_elems);
  auto slice_bytes = [&](uint32_t element_bytes) {
    const uint32_t payload_share = element_bytes * Sum::share_of(p.tile_elems);
    return uint32_t(align_up(payload_share > weight_share ? payload_share : weight_share, 128));
  };
  p.out_slice_bytes[0] = slice_bytes(sums_twice<A>(p) ? in_bytes : dtype_bytes(p.partial_dtype));
  p.out_slice_bytes[1] = slice_bytes(in_bytes);
  constexpr uint64_t kSlices = 2 * kReduceWarps<A>;
  p.out_stage_at[0] = p.sum_rows_at[1] + SumFeed<A>::rows_bytes(p);
  p.out_stage_at[1] = p.out_stage_at[0] + kSlices * p.out_slice_bytes[0];
  p.records[0] = RecordWindow<A>::layout(p.out_stage_at[1] + kSlices * p.out_slice_bytes[1], p);
  p.records[1] = RecordWindow<A>::layout(p.records[0].end, p);
  p.group_barriers_at = p.records[1].end;
  const uint64_t fifos_at = p.group_barriers_at + GroupRecords<A>::kBarrierBytes;
  const bool both = peers != 0 || sums_twice<A>(p);  // groups of a link block have something to sum
  const auto fifo_bytes = [&](uint32_t stages) { return Fifo::layout(0, stages, stage_holds).end; };
  const uint64_t empty = both ? 0 : Fifo::layout(0, 2, 16).end;
  const auto stages_of = [&](uint64_t fifos) {  // as many as fit, in each of so many
    uint32_t n = 24;
    while (n > 2 && fifos_at + fifos * fifo_bytes(n) + empty > budget) --n;
    return n;
  };
  const uint32_t stages = stages_of(both ? 2 : 1), local_stages = stages_of(2);
  p.node_sum = Fifo::layout(fifos_at, both ? stages : 2, both ? stage_holds : 16);
  p.final_sum = Fifo::layout(p.node_sum.end, stages, stage_holds);
  p.local_sum[0] = Fifo::layout(fifos_at, local_stages, stage_holds);
  p.local_sum[1] = Fifo::layout(p.local_sum[0].end, local_stages, stage_holds);
  const uint64_t apart_end = p.blocks.is_apart() ? p.local_sum[1].end : 0;
  return p.smem_bytes = apart_end > p.final_sum.end ? apart_end : p.final_sum.end;
}

}  // namespace hep
