// An owner's end of the channels of weights: stripe j of an expert into the ring of its node's rank j, chunk by chunk,
// to all nodes side by side. By one lane of a warp.
#pragma once
#include "roles/rail_channels.h"
#include "roles/staged_copy.h"

namespace hep {

template <Arch A>
class FeedRailsRole {
 public:
  using C = SpareChannels;

  HEP_DEVICE FeedRailsRole(A& arch, const SpareRailParams& params, const RailTable<A>& table,
                           const RailChannels<A>& channels, const StageFifo<A, SpareHead>& fifo)
      : a(arch), p(params), table_(table), channels_(channels), copy_(arch, fifo) {}

  HEP_DEVICE void run() {
    channels_.begin();
    channels_.serve([](const ChannelCursor& c) { return c.done >= c.total; },
                    [this](uint32_t i, const ChannelCursor& c, WaitInfo& waiting) { return chunk(i, c, waiting); });
    channels_.end();
  }

 private:
  HEP_DEVICE bool chunk(uint32_t i, const ChannelCursor& at, WaitInfo& waiting) {
    const uint32_t c = uint32_t(at.channel);
    const ChannelPeer peer = ChannelPeer::of(p, c);
    const uint64_t q = channels_.facts(c).before + at.done;
    if (!has_room(c, q)) {  // who passes it on, or, where that is this rank itself, who stores it
      const bool own = peer.local == p.world.local_rank();
      const int late = own ? p.world.rail_peer(peer.node) : p.world.rank_of(p.world.node(), peer.local);
      waiting = {Site::kRailSlotFree, late, int64_t(q)};
      return false;
    }
    const SpareStripe stripe(p, peer.local, C::kWeights);
    const SpareStripe::Chunk chunk = stripe.chunk(at.done % stripe.chunks());
    const uint32_t owned = uint32_t(table_[at.at].column % p.node.width());
    const uint32_t there = p.channel(peer.node, p.world.local_rank());
    const uint64_t from = a.ld_global(p.node.experts + uint64_t(owned) * p.node.num_matrices + chunk.matrix);
    unsigned char* const to = p.ring(peer.local, C::kWeights, C::kBefore, there, q);
    copy_.run(reinterpret_cast<const unsigned char*>(from) + uint64_t(chunk.begin) * sizeof(Vec16), chunk.bytes(),
              [&](const unsigned char* stage, uint32_t offset, uint32_t n) { a.bulk_s2g(to + offset, stage, n); });
    a.st_release_sys(p.flag(peer.local, p.channels.flag(C::kWeights, there, C::kNodeFull, q)), q + 1);
    channels_.pass(i, at);
    return true;
  }
  HEP_DEVICE bool has_room(uint32_t c, uint64_t q) {
    if (q < p.channels.slots || injected(Bug::kChunkFedUnasked)) return true;
    return a.ld_acquire_sys(p.own_flag(p.channels.flag(C::kWeights, c, C::kNodeFree, q))) >= q + 1 - p.channels.slots;
  }

  A& a;
  const SpareRailParams& p;
  const RailTable<A>& table_;
  const RailChannels<A>& channels_;
  StagedCopy<A> copy_;
};

}  // namespace hep
