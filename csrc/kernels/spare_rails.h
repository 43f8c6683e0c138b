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

// Warp 0 of a block forwards; of the others every second one has the role at each end of the channels.
template <Arch A>
inline constexpr int kRailWarps = A::kLanes < 32 ? 3 : 7;
inline constexpr uint32_t kLeastRailStage = 1024;
template <Arch A>
inline constexpr int kRailEndWarps = (kRailWarps<A> - 1) / 2;

// Where a block has what.
template <Arch A>
struct RailSmem {
  uint64_t forward, own, other, fifos, bytes;  // cursors of the middle, of owners, of clones' nodes; stages of a push
};

template <Arch A>
HEP_HOST_DEVICE RailSmem<A> rail_smem(const SpareRailParams& p) {
  const uint64_t table = RailTable<A>::bytes(p), cursors = RailChannels<A>::bytes(p);
  return {table, table + cursors, table + 2 * cursors, table + 3 * cursors, table + 3 * cursors};
}

// The parameters that follow from the others: stages that fit into the budget beside the table. Returns the bytes of
// shared memory of a block, more than the budget where none do.
template <Arch A>
inline uint64_t plan_push_rails(SpareRailParams& p, uint64_t budget) {
  if (!p.node.chunk_bytes || p.node.chunk_bytes > kSpareChunk<A>) p.node.chunk_bytes = kSpareChunk<A>;
  const uint64_t begin = rail_smem<A>(p).fifos;
  for (;; p.node.chunk_bytes = p.node.chunk_bytes / 2 / 16 * 16) {
    p.node.fifo = StageFifo<A, SpareHead>::layout(begin, kSpareStages, p.node.chunk_bytes);
    p.node.fifo_stride = p.node.fifo.end - begin;
    const uint64_t bytes = begin + 2 * kRailEndWarps<A> * p.node.fifo_stride;
    if (bytes <= budget || p.node.chunk_bytes <= kLeastRailStage) return bytes;
  }
}

// Which of the warps of its role in the grid a warp is.
struct RailWorker {
  uint32_t number, of;
  template <Arch A>
  HEP_DEVICE static RailWorker here(A& a) {
    const uint32_t block = uint32_t(a.block_idx()), blocks = uint32_t(a.num_blocks());
    if (a.warp_idx() == 0) return {block, blocks};
    return {block * kRailEndWarps<A> + uint32_t(a.warp_idx() - 1) / 2, blocks * kRailEndWarps<A>};
  }
};

template <Arch A, Transport<A> Net>
HEP_DEVICE void push_rails_kernel(A& a, Net& net, const SpareRailParams& p, std::byte* smem) {
  if (!enter_kernel(a)) return;
  a.set_role(Role::kPushWeights);
  const RailSmem<A> at = rail_smem<A>(p);
  const int warp = a.warp_idx(), end = warp ? warp - 1 : 0;
  const RailWorker worker = RailWorker::here(a);
  const RailTable<A> table(a, p, smem);
  const uint64_t cursors = warp == 0 ? at.forward : end % 2 ? at.other : at.own;
  const RailChannels<A> channels(a, p, smem + cursors, worker.number, worker.of);
  const StageFifo<A, SpareHead> fifo(smem + uint64_t(end) * p.node.fifo_stride, p.node.fifo);
  if (warp && a.lane() == 0) fifo.init(a, 1);
  if (!table.fill() || !a.elect_one()) return;
  if (warp == 0)
    ForwardRailsRole<A, Net, SpareChannels::kWeights>(a, net, p, table, channels).run();
  else if (end % 2)
    StoreRailsRole<A, Net>(a, net, p, table, channels, fifo).run();
  else
    FeedRailsRole<A>(a, p, table, channels, fifo).run();
}

template <Arch A, Transport<A> Net>
HEP_DEVICE void collect_rails_kernel(A& a, Net& net, const SpareRailParams& p, std::byte* smem) {
  if (!enter_kernel(a)) return;
  a.set_role(Role::kCollectGradients);
  const RailSmem<A> at = rail_smem<A>(p);
  const int warp = a.warp_idx(), end = warp ? warp - 1 : 0;
  const RailWorker worker = RailWorker::here(a);
  const RailTable<A> table(a, p, smem);
  const uint64_t cursors = warp == 0 ? at.forward : end % 2 ? at.own : at.other;
  const RailChannels<A> channels(a, p, smem + cursors, worker.number, worker.of);
  if (!table.fill()) return;
  if (warp && end % 2)
    AddRailsRole<A>(a, p, table, channels).run();
  else if (warp)
    GatherRailsRole<A, Net>(a, net, p, table, channels).run();
  else if (a.elect_one())
    ForwardRailsRole<A, Net, SpareChannels::kGradients>(a, net, p, table, channels).run();
}

}  // namespace hep
