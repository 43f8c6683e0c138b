// The first end of the channels of gradients, on the clones' node: this rank's stripe of the sum of an expert's copies
// on the node, in the order of their slots, chunk by chunk into a ring and along the rail. By all lanes of a warp.
#pragma once
#include "roles/rail_channels.h"
#include "roles/vector_sum.h"
#include "transport/concept.h"

namespace hep {

template <Arch A, Transport<A> Net>
class GatherRailsRole {
 public:
  using C = SpareChannels;

  HEP_DEVICE GatherRailsRole(A& arch, Net& rail, const SpareRailParams& params, const RailTable<A>& table,
                             const RailChannels<A>& channels)
      : a(arch),
        net(rail),
        p(params),
        table_(table),
        channels_(channels),
        stripe_(params, params.world.local_rank(), C::kGradients),
        epoch_(params.node.progress->collected + 1),
        elected_(arch.elect_one()) {}

  // False: a lane has left in its wait.
  HEP_DEVICE bool run() {
    if (elected_) channels_.begin();
    if (!a.warp_whole()) return false;
    bool left = false;  // a lane, in a wait
    channels_.serve([&](const ChannelCursor& c) { return left || c.done >= c.total; },
                    [&](uint32_t i, const ChannelCursor& c, WaitInfo& waiting) {
                      const bool moved = step(i, c, waiting);
                      left = !a.warp_whole();
                      return moved;
                    });
    if (left) return false;
    if (!elected_ || !channels_.end()) return true;
    const auto flag = [this](int l) { return p.flag(l, p.channels.read(p.world.local_rank())); };
    a.st_release_sys_each(p.world.num_local_ranks, flag, epoch_);
    return true;
  }

 private:
  // Copies, and vectors of each, that a lane reads together.
  static constexpr int kCopies = A::kLanes < 32 ? 1 : 2, kVectors = A::kLanes < 32 ? 1 : 8;

  HEP_DEVICE bool step(uint32_t i, const ChannelCursor& at, WaitInfo& waiting) {
    const uint32_t c = uint32_t(at.channel);
    const ChannelPeer peer = ChannelPeer::of(p, c);
    const uint64_t q = channels_.facts(c).before + at.done;
    if (!a.warp_any(elected_ && has_room(c, q))) {
      waiting = {Site::kRailSlotFree, p.world.rail_peer(peer.node), int64_t(q)};
      return false;
    }
    if (elected_ && channels_.begins_expert(at)) await_copies(at.at);
    if (!a.warp_whole()) return true;
    unsigned char* const to = place_of(c, peer, q);
    const SpareStripe::Chunk chunk = stripe_.chunk(at.done % stripe_.chunks());
    fold(chunk, at.at, reinterpret_cast<Vec16*>(to));
    a.warp_sync();  // what all lanes have stored, one sends
    if (elected_) {
      send(peer, q, to, chunk.bytes());
      channels_.pass(i, at);
    }
    return true;
  }
  // In this rank's ring, whence a NIC takes it; over a mapped rail in the peer's own.
  HEP_DEVICE unsigned char* place_of(uint32_t c, const ChannelPeer& peer, uint64_t q) const {
    if constexpr (kIsMapped<Net>)
      return net.mapped(peer.node) + p.ring_there(C::kGradients, p.channel_there(peer.node, peer.local), q);
    else
      return p.ring(p.world.local_rank(), C::kGradients, C::kBefore, c, q);
  }
  HEP_DEVICE bool has_room(uint32_t c, uint64_t q) {
    if (q < p.channels.slots || injected(Bug::kChunkFedUnasked)) return true;
    return net.test_signal(a, p.own_flag(p.channels.flag(C::kGradients, c, C::kRailFree, q)), q + 1 - p.channels.slots);
  }
  HEP_DEVICE void send(const ChannelPeer& peer, uint64_t q, const unsigned char* from, uint32_t bytes) {
    const uint32_t there = p.channel_there(peer.node, peer.local);
    const uint64_t full = p.flag_there(p.channels.flag(C::kGradients, there, C::kRailFull, q));
    if constexpr (kIsMapped<Net>)
      net.signal(a, peer.node, full, q + 1);
    else
      net.put_signal(a, peer.node, p.ring_there(C::kGradients, there, q), from, bytes, full, q + 1);
  }
  HEP_DEVICE void await_copies(int lead) {
    if (injected(Bug::kCloneGradientsUnawaited)) return;
    const auto holder = [&](int i) { return p.local_of_slot(table_.copy(lead, i)); };
    a.wait_ge_sys_each(
        table_.copies(lead), [&](int i) { return p.node.flag(p.world.local_rank(), p.node.ready, holder(i)); }, epoch_,
        [&](int i) {
          return WaitInfo{Site::kCloneGradients, p.world.rank_of(p.world.node(), holder(i)), table_.copy(lead, i)};
        });
  }
  // The sum of the copies from slot `first` on.
  HEP_DEVICE void fold(const SpareStripe::Chunk& chunk, int first, Vec16* to) {
    const auto next = [this](int j) { return injected(Bug::kOneCopyOfANode) ? -1 : table_[j].next; };
    const auto source = [&](int j) {
      return reinterpret_cast<const Vec16*>(p.node.gradients_of(j - p.world.node() * p.slots_of_node(), chunk.matrix));
    };
    for (uint32_t i = chunk.begin + uint32_t(a.lane()); i < chunk.end; i += A::kLanes * kVectors) {
      Vec16 total[kVectors]{};
      const auto at = [&](int w) { return i + uint32_t(w) * A::kLanes; };
      sum_copies<kCopies>(a, total, first, next, source, [&](int w) { return at(w) < chunk.end ? at(w) : i; });
      HEP_UNROLL
      for (int w = 0; w < kVectors; ++w)
        if (at(w) < chunk.end) a.st_global(to + (at(w) - chunk.begin), total[w]);
    }
  }

  A& a;
  Net& net;
  const SpareRailParams& p;
  const RailTable<A>& table_;
  const RailChannels<A>& channels_;
  const SpareStripe stripe_;
  const uint64_t epoch_;
  const bool elected_;
};

}  // namespace hep
