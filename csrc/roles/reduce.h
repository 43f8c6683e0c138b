// Reduce: adds staged rows in FP32 in the order they come, rounds once, and stores the tile. Every warp of a group owns
// a slice of the tile. They meet only where a chunk for a rail peer, or a group of partial rows, is complete.
#pragma once
#include "roles/out_slices.h"
#include "roles/partial_groups.h"
#include "roles/rail_tally.h"
#include "roles/slice_tiles.h"
#include "roles/whole_tiles.h"

namespace hep {

// kWarps warps from `first_warp` on; `group` names their barrier and slices.
template <Arch A, Transport<A> Net, int kWarps>
struct ReduceRole {
  using Machine = A;
  using Sum = SliceSum<A, kWarps>;
  using Slice = typename Sum::Slice;
  static constexpr bool kWholeTiles = TileMath<A>::kOffered && kWarps * A::kLanes == 1;
  static_assert(kWholeTiles || !TileMath<A>::kReadsRows);  // stages without rows are for whole tiles
  using Tiles = std::conditional_t<kWholeTiles, WholeTiles<ReduceRole>, SliceTiles<ReduceRole>>;

  A& a;
  Net& net;
  const CombineParams& p;
  WarpConsumer<A, SumHead> from;
  RailTally<A, Net> tally;
  std::byte* const smem;
  const int group;
  Sum sum;
  const bool leader;  // the elected lane of the first warp: speaks for the group
  OutSlices<A> slices;

  HEP_DEVICE ReduceRole(A& arch, Net& n, const CombineParams& params, const StageFifo<A, SumHead>& fifo,
                        std::byte* smem_, int group_, int first_warp)
      : a(arch),
        net(n),
        p(params),
        from(arch, fifo),
        tally{arch, n, params.rail, reinterpret_cast<Vec16*>(smem_ + params.rail_tally_at)},
        smem(smem_),
        group(group_),
        sum(arch.warp_idx() - first_warp, arch.lane()),
        leader(from.elected && sum.warp == 0),
        slices(arch, reinterpret_cast<unsigned char*>(smem_) + params.out_stage_at[group_],
               params.out_slice_bytes[group_], sum.warp, from.elected) {}

  // `parties`: reduce groups of the grid, before whose end the node is not told that its rows are done with; 0: none.
  HEP_DEVICE void run(Role role, uint32_t parties) {
    a.set_role(role);
    for (Tiles tiles{*this};;) {
      SumHead head = tiles.wait();
      if (head.is(SumHead::kStop)) break;
      tiles.sum(head);
      if (leader) tally.tell(head.is(SumHead::kSettle));
      if (head.is(SumHead::kChunkEnd | SumHead::kGroupEnd)) complete(head);
    }
    from.pass(a);
    bool last = false;
    if (from.elected) {
      if (!injected(Bug::kResultsBeforeStores)) a.template bulk_wait<0>();
      if (parties) last = last_of(a.add_acq_rel_sys(p.exit_counter, 1), p.exit_counter, uint64_t(parties) * kWarps);
    }
    if (a.warp_any(last)) p.gate.announce_done(a);
  }

  HEP_DEVICE void store(const SumHead& head, const Slice& s) {
    const uint32_t size = dtype_bytes(head.out());
    slices.store(head.dst + uint64_t(s.begin) * size, s.elems * size);
  }
  HEP_DEVICE void taken(const SumHead& head) {
    if (leader && head.is(SumHead::kRing)) tally.count(head);
  }

 private:
  // A slot of the rail or a group of partial rows: by the stores of all warps, before anybody reads it.
  HEP_DEVICE void complete(const SumHead& head) {
    const bool sends = head.is(SumHead::kChunkEnd);
    if (from.elected && !injected(sends ? Bug::kSumPutBeforeStored : Bug::kPartialsBeforeStores))
      a.template bulk_wait<0>();
    if (!injected(sends ? Bug::kSumPutBeforeAllWarps : Bug::kPartialsBeforeAllWarps)) a.group_sync(1 + group, kWarps);
    if (!leader) return;
    if (sends)
      send(head);
    else
      PartialGroups<A>(a, p, smem).tell(PartialFlags::kPayload, head.chunk, head.peer, p.gate.epoch());
  }
  HEP_DEVICE void send(const SumHead& head) {
    const uint64_t bytes = uint64_t(head.chunk_stages) * p.partial.row_bytes();
    RailSender::commit(a, net, p.rail.geometry, p.rail.peers[head.peer], head.chunk, bytes);
    a.count_rank(&p.traffic->rail_rows, head.chunk_stages);
    a.count_rank(&p.traffic->rail_bytes, bytes);
  }
};

}  // namespace hep
