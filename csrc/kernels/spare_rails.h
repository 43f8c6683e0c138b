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
inline constexpr uint32_t kLeastRailStage = 1024;

// Shared memory of a block: the table of copies, what goes through the channels, each warp's cursors; stages of a push.
template <Arch A>
HEP_HOST_DEVICE uint64_t rail_facts_at(const SpareRailParams& p) {
  return RailTable<A>::bytes(p);
}
template <Arch A>
HEP_HOST_DEVICE uint64_t rail_cursors_at(const SpareRailParams& p, uint32_t warp) {
  return rail_facts_at<A>(p) + RailFacts<A>::bytes(p) + warp * RailChannels<A>::bytes(p);
}
template <Arch A>
HEP_HOST_DEVICE uint64_t rail_smem_bytes(const SpareRailParams& p) {  // without stages
  return rail_cursors_at<A>(p, kRailWarps<A>);
}

// The parameters that follow from the others: stages that fit into the budget beside the table. Returns the bytes of
// shared memory of a block, more than the budget where none do.
template <Arch A>
inline uint64_t plan_push_rails(SpareRailParams& p, uint64_t budget) {
  if (!p.node.chunk_bytes || p.node.chunk_bytes > kSpareChunk<A>) p.node.chunk_bytes = kSpareChunk<A>;
  const uint64_t begin = rail_smem_bytes<A>(p);
  for (;; p.node.chunk_bytes = p.node.chunk_bytes / 2 / 16 * 16) {
    p.node.fifo = StageFifo<A, SpareHead>::layout(begin, kSpareStages, p.node.chunk_bytes);
    p.node.fifo_stride = p.node.fifo.end - begin;
    const uint64_t bytes = begin + 2 * kRailEndWarps<A> * p.node.fifo_stride;
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
      : place(place_of(a)),
        table(a, p, smem),
        facts(a, p, d, smem + rail_facts_at<A>(p)),
        channels(a, p, table, facts, d, place, worker_of(a, p, place),
                 smem + rail_cursors_at<A>(p, uint32_t(a.warp_idx()))) {}
  RailWarp(const RailWarp&) = delete;
  HEP_DEVICE bool fill() const { return table.fill() && facts.fill(table); }

 private:
  HEP_DEVICE static C::Place place_of(A& a) {
    const int warp = a.warp_idx();
    return warp == 0 ? C::kMiddle : warp % 2 ? C::kFirst : C::kLast;
  }
  // Of a channel's chunks no more are on their way than a ring has slots: as many warps are a group at its ends. In the
  // middle four lanes post faster than a NIC takes chunks.
  HEP_DEVICE static RailWorker worker_of(A& a, const SpareRailParams& p, C::Place place) {
    const uint32_t block = uint32_t(a.block_idx()), blocks = uint32_t(a.num_blocks()), ends = kRailEndWarps<A>;
    const bool middle = place == C::kMiddle;
    const uint32_t workers = middle ? blocks : blocks * ends, number = uint32_t(a.warp_idx() - 1) / 2;
    const uint32_t groups = workers / (middle ? 4 : p.channels.slots), most = p.channels.number();
    return {middle ? block : block * ends + number, workers, groups < 1 ? 1 : groups < most ? groups : most};
  }
};

template <Arch A, Transport<A> Net>
HEP_DEVICE void push_rails_kernel(A& a, Net& net, const SpareRailParams& p, std::byte* smem) {
  if (!enter_kernel(a)) return;
  a.set_role(Role::kPushWeights);
  const RailWarp<A> warp(a, p, SpareChannels::kWeights, smem);
  const bool middle = warp.place == SpareChannels::kMiddle;
  const StageFifo<A, SpareHead> fifo(smem + uint64_t(middle ? 0 : a.warp_idx() - 1) * p.node.fifo_stride, p.node.fifo);
  if (!middle && a.lane() == 0) fifo.init(a, 1);
  if (!warp.fill() || !a.elect_one()) return;
  if (middle)
    ForwardRailsRole<A, Net, SpareChannels::kWeights>(a, net, p, warp.table, warp.channels).run();
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
