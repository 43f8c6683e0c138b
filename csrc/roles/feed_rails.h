// An owner's end of the channels of weights: stripe j of an expert into the ring of its node's rank j, chunk by chunk,
// node after node. By one lane of a warp. It may wait for a channel while another has room: room comes as chunks are
// stored behind the rail, which waits for nothing but slots, and these are free as soon as their ranks have entered the
// push.
#pragma once
#include "roles/rail_channels.h"
#include "roles/staged_copy.h"

namespace hep {

template <Arch A>
class FeedRailsRole {
 public:
  using C = SpareChannels;

  HEP_DEVICE FeedRailsRole(A& arch, const SpareRailParams& params, const RailTable<A>& table,
                           const StageFifo<A, SpareHead>& fifo)
      : a(arch), p(params), table_(table), copy_(arch, fifo) {}

  // worker: of so many warps of the grid that have the role.
  HEP_DEVICE void run(uint32_t worker, uint32_t workers) {
    for (int j = int(worker); j < p.world.num_local_ranks; j += int(workers))
      for (int step = 1; step < p.world.num_nodes; ++step) channel((p.world.node() + step) % p.world.num_nodes, j);
  }

 private:
  HEP_DEVICE void channel(int node, int j) {
    const SpareStripe stripe(p, j, C::kWeights);
    uint64_t* const count = p.count(C::kWeights, ChannelEnd::kFirst, p.channel(node, j));
    uint64_t q = *count;
    for (int slot = table_.first_lead(p.world.rank, node); slot >= 0;
         slot = table_.lead(p.world.rank, node, slot + 1)) {
      const uint32_t owned = uint32_t(table_[slot].column % p.node.width());
      for (uint32_t i = 0; i < stripe.chunks(); ++i) feed(node, j, owned, stripe.chunk(i), q++);
    }
    *count = q;
  }
  HEP_DEVICE void feed(int node, int j, uint32_t owned, const SpareStripe::Chunk& chunk, uint64_t q) {
    if (q >= C::kSlots && !injected(Bug::kChunkFedUnasked))
      a.wait_ge_sys(p.own_flag(p.channels.flag(C::kWeights, p.channel(node, j), C::kNodeFree)), q + 1 - C::kSlots,
                    {Site::kRailSlotFree, p.world.rank_of(p.world.node(), j), int64_t(q)});
    const uint32_t there = p.channel(node, p.world.local_rank());
    const uint64_t from = a.ld_global(p.node.experts + uint64_t(owned) * p.node.num_matrices + chunk.matrix);
    unsigned char* const to = p.ring(j, C::kWeights, C::kBefore, there, q);
    copy_.run(reinterpret_cast<const unsigned char*>(from) + uint64_t(chunk.begin) * sizeof(Vec16), chunk.bytes(),
              [&](const unsigned char* stage, uint32_t offset, uint32_t n) { a.bulk_s2g(to + offset, stage, n); });
    a.st_release_sys(p.flag(j, p.channels.flag(C::kWeights, there, C::kNodeFull)), q + 1);
  }

  A& a;
  const SpareRailParams& p;
  const RailTable<A>& table_;
  StagedCopy<A> copy_;
};

}  // namespace hep
