// Kernels of spare slots of several nodes: weights of clones to them, gradients home. Some blocks do what the kernels
// of one node do (kernels/spares.h), which say as well that slots are free, or gradients there; the others go along the
// rails meanwhile. Between nodes a push is over when this rank's slots hold their weights, a collection when owners'
// sums are complete and this rank's gradients have been read: so nothing else waits for either.
#pragma once
#include "kernels/spares.h"
#include "roles/add_rails.h"
#include "roles/feed_rails.h"
#include "roles/forward_rails.h"
#include "roles/gather_rails.h"
#include "roles/store_rails.h"

namespace hep {

// A warp's place in the channels: the first of a block is the middle, of the others so many are at each end. An owner
// may have to fill, or empty, the rails of its whole node, whoever holds clones only its own.
template <Arch A>
inline constexpr int kRailOwnerWarps = A::kLanes < 32 ? 1 : 4;
template <Arch A>
inline constexpr int kRailHolderWarps = A::kLanes < 32 ? 1 : 2;
template <Arch A>
inline constexpr int kRailWarps = 1 + kRailOwnerWarps<A> + kRailHolderWarps<A>;
// How many of them have stages in a push: those at the ends, and over mapped rails the middle.
template <Arch A, class Net>
inline constexpr int kRailStaging = kRailWarps<A> - 1 + kIsMapped<Net>;

// In how many groups the warps at an end, or in the middle, share the channels. At an end a group has as many warps as
// a ring has slots, or more, if there are so many: no more chunks of a channel are on their way. In the middle four
// lanes post faster than a NIC takes chunks.
HEP_HOST_DEVICE uint32_t rail_groups(const SpareRailParams& p, uint32_t workers, bool middle) {
  const uint32_t groups = workers / (middle ? 4 : p.channels.slots), most = p.channels.number();
  return groups < 1 ? 1 : groups < most ? groups : most;
}

// Shared memory of a block: the table of copies, what goes through the channels, cursors of the middle's warp and of
// those at the ends; behind them, the stages of a push.
template <Arch A>
struct RailSmem {
  uint64_t facts, middle, ends, each_end, bytes;

  HEP_HOST_DEVICE RailSmem(const SpareRailParams& p, uint32_t blocks) {
    const auto cursors = [&](uint32_t groups) { return sizeof(ChannelCursor) * uint64_t(rail_cursors(p, groups)); };
    facts = RailTable<A>::bytes(p);
    middle = facts + RailFacts<A>::bytes(p);
    ends = middle + cursors(rail_groups(p, blocks, true));
    each_end = cursors(rail_groups(p, blocks * uint32_t(std::min(kRailOwnerWarps<A>, kRailHolderWarps<A>)), false));
    bytes = align_up(ends + each_end * (kRailWarps<A> - 1), 128);
  }
};

// The parameters that follow from the others, of so many blocks. Returns the bytes of shared
// memory of a block, more than the budget where stages of the least size do not fit.
template <Arch A, class Net>
inline uint64_t plan_push_nodes(SpareRailParams& p, uint64_t budget) {
  const uint64_t within = plan_push<A>(p.node, kRailWarps<A>, budget), begin = RailSmem<A>(p, p.blocks.number).bytes;
  p.stage_bytes = p.node.chunk_bytes;
  const uint64_t between = lay_out_stages<A>(begin, kRailStaging<A, Net>, budget, p.stage_bytes, p.fifo, p.fifo_stride);
  return std::max(within, between);
}
template <Arch A>
uint64_t collect_nodes_bytes(const SpareRailParams& p) {
  return std::max(SpareTable<A>::bytes(p.node), RailSmem<A>(p, p.blocks.number).bytes);
}

// What a warp knows when its role begins.
template <Arch A>
struct RailWarp {
  using C = SpareChannels;

  C::Place place;
  RailTable<A> table;
  RailFacts<A> facts;
  RailChannels<A> channels;

  HEP_DEVICE RailWarp(A& a, const SpareRailParams& p, C::Direction d, std::byte* smem)
      : RailWarp(a, p, d, smem, RailSmem<A>(p, p.blocks.number)) {}
  HEP_DEVICE bool fill() const { return table.fill() && facts.fill(table); }

 private:
  HEP_DEVICE static bool is_owners(A& a) { return a.warp_idx() <= kRailOwnerWarps<A>; }  // where it is not the middle
  HEP_DEVICE static C::Place place_of(A& a, C::Direction d) {
    if (a.warp_idx() == 0) return C::kMiddle;
    return is_owners(a) == (d == C::kWeights) ? C::kFirst : C::kLast;
  }
  HEP_DEVICE RailWarp(A& a, const SpareRailParams& p, C::Direction d, std::byte* smem, const RailSmem<A>& at)
      : place(place_of(a, d)),
        table(a, p, smem),
        facts(a, p, d, smem + at.facts),
        channels(a, p, table, facts, d, place, worker_of(a, p), smem + cursors_at(a, at, place)) {}
  HEP_DEVICE static uint64_t cursors_at(A& a, const RailSmem<A>& at, C::Place place) {
    return place == C::kMiddle ? at.middle : at.ends + uint64_t(a.warp_idx() - 1) * at.each_end;
  }
  HEP_DEVICE static RailWorker worker_of(A& a, const SpareRailParams& p) {
    const uint32_t block = uint32_t(a.block_idx()) - p.blocks.first, blocks = p.blocks.number,
                   warp = uint32_t(a.warp_idx());
    if (warp == 0) return {block, blocks, rail_groups(p, blocks, true)};
    const uint32_t before = is_owners(a) ? 1 : 1 + kRailOwnerWarps<A>,
                   each = is_owners(a) ? kRailOwnerWarps<A> : kRailHolderWarps<A>;
    return {block * each + warp - before, blocks * each, rail_groups(p, blocks * each, false)};
  }
};

template <Arch A, Transport<A> Net>
HEP_DEVICE void push_along_rails(A& a, Net& net, const SpareRailParams& p, std::byte* smem) {
  const RailWarp<A> warp(a, p, SpareChannels::kWeights, smem);
  const bool middle = warp.place == SpareChannels::kMiddle;
  const int stages = (a.warp_idx() + kRailWarps<A> - 1) % kRailWarps<A>;  // the middle's behind the others'
  const bool staging = stages < kRailStaging<A, Net>;
  const StageFifo<A, SpareHead> fifo(smem + uint64_t(staging ? stages : 0) * p.fifo_stride, p.fifo);
  if (staging && a.lane() == 0) fifo.init(a, 1);
  if (!warp.fill() || !a.elect_one()) return;
  if (middle)
    ForwardRailsRole<A, Net, SpareChannels::kWeights>(a, net, p, warp.table, warp.channels, fifo).run();
  else if (warp.place == SpareChannels::kFirst)
    FeedRailsRole<A>(a, p, warp.table, warp.channels, fifo).run();
  else
    StoreRailsRole<A, Net>(a, net, p, warp.table, warp.channels, fifo).run();
  end_push(a, p.node);
}

template <Arch A, Transport<A> Net>
HEP_DEVICE void collect_along_rails(A& a, Net& net, const SpareRailParams& p, std::byte* smem) {
  const RailWarp<A> warp(a, p, SpareChannels::kGradients, smem);
  if (!warp.fill()) return;
  bool whole = true;  // no lane has left in its wait
  if (warp.place == SpareChannels::kFirst)
    whole = GatherRailsRole<A, Net>(a, net, p, warp.table, warp.channels).run();
  else if (warp.place == SpareChannels::kLast)
    whole = AddRailsRole<A>(a, p, warp.table, warp.channels).run();
  else if (a.elect_one())
    ForwardRailsRole<A, Net, SpareChannels::kGradients>(a, net, p, warp.table, warp.channels).run();
  if (whole && a.elect_one()) end_collection(a, p.node);
}

template <Arch A, Transport<A> Net>
HEP_DEVICE void push_nodes_kernel(A& a, Net& net, const SpareRailParams& p, std::byte* smem) {
  if (!enter_kernel(a)) return;
  a.set_role(Role::kPushWeights);
  if (uint32_t(a.block_idx()) < p.blocks.first)
    push_within_node(a, p.node, smem);
  else
    push_along_rails(a, net, p, smem);
}

template <Arch A, Transport<A> Net>
HEP_DEVICE void collect_nodes_kernel(A& a, Net& net, const SpareRailParams& p, std::byte* smem) {
  if (!enter_kernel(a)) return;
  a.set_role(Role::kCollectGradients);
  if (uint32_t(a.block_idx()) < p.blocks.first)
    collect_within_node(a, p.node, smem);
  else
    collect_along_rails(a, net, p, smem);
}

}  // namespace hep
