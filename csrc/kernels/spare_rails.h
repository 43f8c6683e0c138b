// Kernels of spare slots between nodes: weights of clones to them, gradients home. Each follows the kernel of its kind
// within the node (kernels/spares.h) on the same stream, which says that a rank's slots are free, or its gradients
// there. A push is over when this rank's slots hold their weights, a collection when the owners' sums are complete and
// this rank's gradients have been read: so nothing else waits for either.
#pragma once
#include "kernels/spares.h"
#include "roles/add_rails.h"
#include "roles/feed_rails.h"
#include "roles/forward_rails.h"
#include "roles/gather_rails.h"
#include "roles/store_rails.h"

namespace hep {

// A warp's place in the channels: the first of a block is the middle, of the others every second one is at either end.
template <Arch A>
inline constexpr int kRailWarps = A::kLanes < 32 ? 3 : 7;
template <Arch A>
inline constexpr int kRailEndWarps = (kRailWarps<A> - 1) / 2;
// How many of them have stages in a push: those at the ends, and over mapped rails the middle.
template <Arch A, class Net>
inline constexpr int kRailStaging = 2 * kRailEndWarps<A> + kIsMapped<Net>;
inline constexpr uint32_t kLeastRailStage = 1024;

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
    each_end = cursors(rail_groups(p, blocks * kRailEndWarps<A>, false));
    bytes = align_up(ends + each_end * (kRailWarps<A> - 1), 128);
  }
};
template <Arch A>
uint64_t rail_smem_bytes(const SpareRailParams& p, int blocks) {
  return RailSmem<A>(p, uint32_t(blocks)).bytes;
}

// The parameters that follow from the others: stages that fit into the budget beside the rest. Returns the bytes of
// shared memory of a block, more than the budget where none do.
template <Arch A, class Net>
inline uint64_t plan_push_rails(SpareRailParams& p, int blocks, uint64_t budget) {
  if (!p.node.chunk_bytes || p.node.chunk_bytes > kSpareChunk<A>) p.node.chunk_bytes = kSpareChunk<A>;
  const uint64_t begin = rail_smem_bytes<A>(p, blocks);
  for (;; p.node.chunk_bytes = p.node.chunk_bytes / 2 / 16 * 16) {
    p.node.fifo = StageFifo<A, SpareHead>::layout(begin, kSpareStages, p.node.chunk_bytes);
    p.node.fifo_stride = p.node.fifo.end - begin;
    const uint64_t bytes = begin + kRailStaging<A, Net> * p.node.fifo_stride;
    if (bytes <= budget || p.node.chunk_bytes <= kLeastRailStage) return bytes;
  }
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
      : RailWarp(a, p, d, smem, RailSmem<A>(p, uint32_t(a.num_blocks()))) {}
  HEP_DEVICE bool fill() const { return table.fill() && facts.fill(table); }

 private:
  HEP_DEVICE static C::Place place_of(A& a) {
    const int warp = a.warp_idx();
    return warp == 0 ? C::kMiddle : warp % 2 ? C::kFirst : C::kLast;
  }
  HEP_DEVICE RailWarp(A& a, const SpareRailParams& p, C::Direction d, std::byte* smem, const RailSmem<A>& at)
      : place(place_of(a)),
        table(a, p, smem),
        facts(a, p, d, smem + at.facts),
        channels(a, p, table, facts, d, place, worker_of(a, p, place), smem + cursors_at(a, at, place)) {}
  HEP_DEVICE static uint64_t cursors_at(A& a, const RailSmem<A>& at, C::Place place) {
    return place == C::kMiddle ? at.middle : at.ends + uint64_t(a.warp_idx() - 1) * at.each_end;
  }
  HEP_DEVICE static RailWorker worker_of(A& a, const SpareRailParams& p, C::Place place) {
    const uint32_t block = uint32_t(a.block_idx()), blocks = uint32_t(a.num_blocks()), ends = kRailEndWarps<A>;
    if (place == C::kMiddle) return {block, blocks, rail_groups(p, blocks, true)};
    return {block * ends + uint32_t(a.warp_idx() - 1) / 2, blocks * ends, rail_groups(p, blocks * ends, false)};
  }
};

template <Arch A, Transport<A> Net>
HEP_DEVICE void push_rails_kernel(A& a, Net& net, const SpareRailParams& p, std::byte* smem) {
  if (!enter_kernel(a)) return;
  a.set_role(Role::kPushWeights);
  const RailWarp<A> warp(a, p, SpareChannels::kWeights, smem);
  const bool middle = warp.place == SpareChannels::kMiddle;
  const int stages = (a.warp_idx() + kRailWarps<A> - 1) % kRailWarps<A>;  // the middle's behind the others'
  const bool staging = stages < kRailStaging<A, Net>;
  const StageFifo<A, SpareHead> fifo(smem + uint64_t(staging ? stages : 0) * p.node.fifo_stride, p.node.fifo);
  if (staging && a.lane() == 0) fifo.init(a, 1);
  if (!warp.fill() || !a.elect_one()) return;
  if (middle)
    ForwardRailsRole<A, Net, SpareChannels::kWeights>(a, net, p, warp.table, warp.channels, fifo).run();
  else if (warp.place == SpareChannels::kFirst)
    FeedRailsRole<A>(a, p, warp.table, warp.channels, fifo).run();
  else
    StoreRailsRole<A, Net>(a, net, p, warp.table, warp.channels, fifo).run();
}

template <Arch A, Transport<A> Net>
HEP_DEVICE void collect_rails_kernel(A& a, Net& net, const SpareRailParams& p, std::byte* smem) {
  if (!enter_kernel(a)) return;
  a.set_role(Role::kCollectGradients);
  const RailWarp<A> warp(a, p, SpareChannels::kGradients, smem);
  if (!warp.fill()) return;
  if (warp.place == SpareChannels::kFirst)
    GatherRailsRole<A, Net>(a, net, p, warp.table, warp.channels).run();
  else if (warp.place == SpareChannels::kLast)
    AddRailsRole<A>(a, p, warp.table, warp.channels).run();
  else if (a.elect_one())
    ForwardRailsRole<A, Net, SpareChannels::kGradients>(a, net, p, warp.table, warp.channels).run();
}

}  // namespace hep
