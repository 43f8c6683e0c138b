// The middle of the channels, at the rail's end where the owners are. It moves no bytes itself: weights that an owner
// has put into this rank's ring are put along the rail, out of it; of gradients that came along the rail the owner is
// told, who reads them here. What the last end is done with goes back the other way. Chunks pass in any order, for each
// has its place and flags. Over a mapped rail weights go by way of the warp's stages, into the peer's ring. By one lane
// of a warp; the first of the grid also waits for what it may not leave without.
#pragma once
#include <type_traits>

#include "roles/rail_channels.h"
#include "roles/staged_copy.h"
#include "transport/concept.h"

namespace hep {

template <Arch A, Transport<A> Net, SpareChannels::Direction kDirection>
class ForwardRailsRole {
 public:
  using C = SpareChannels;

  // fifo: of a push.
  template <class... Fifo>
  HEP_DEVICE ForwardRailsRole(A& arch, Net& rail, const SpareRailParams& params, const RailTable<A>& table,
                              const RailChannels<A>& channels, const Fifo&... fifo)
      : a(arch),
        net(rail),
        p(params),
        table_(table),
        channels_(channels),
        stripe_(params, params.world.local_rank(), kDirection),
        copy_(arch, fifo...) {}

  HEP_DEVICE void run() {
    channels_.begin();
    channels_.serve([](const ChannelCursor& c) { return uint32_t(c.at) >= c.total; },
                    [this](uint32_t i, const ChannelCursor& c, WaitInfo& waiting) { return step(i, c, waiting); });
    channels_.end();
    if (channels_.worker().number) return;
    if constexpr (kPush)
      await_slots();
    else
      await_read();
  }

 private:
  static constexpr bool kPush = kDirection == C::kWeights;
  struct NoCopy {
    HEP_DEVICE NoCopy(A&) {}
    HEP_DEVICE NoCopy(A&, const StageFifo<A, SpareHead>&) {}
  };

  HEP_DEVICE bool step(uint32_t i, const ChannelCursor& at, WaitInfo& waiting) {
    const uint32_t c = uint32_t(at.channel), credited = uint32_t(at.at);
    const ChannelPeer peer = ChannelPeer::of(p, c);
    const uint64_t base = channels_.facts(c).before, q = base + at.done, behind = base + credited;
    const bool comes = at.done < at.total && has_come(c, q), goes = at.done > credited && is_done_with(c, behind);
    if (goes) give_back(peer, behind);
    if (comes) hand_on(c, peer, q, stripe_.chunk(at.done % stripe_.chunks()).bytes());
    if (comes || goes) {
      const uint32_t step = channels_.members();
      channels_.set(i, {at.channel, at.done + comes * step, at.total, int32_t(credited + goes * step)});
      return true;
    }
    // With the chunk's place taken still, or all handed on, it is the last end that is late; else the first.
    const uint32_t slots = p.channels.slots;
    const bool lacks = at.done < at.total && (q < slots || is_done_with(c, q - slots)), near = lacks == kPush;
    waiting = {kPush ? Site::kCloneWeights : Site::kCloneGradients,
               near ? p.world.rank_of(p.world.node(), peer.local) : p.world.rail_peer(peer.node),
               int64_t(lacks ? q : behind)};
    return false;
  }
  HEP_DEVICE bool has_come(uint32_t c, uint64_t q) {
    if constexpr (kPush) return a.ld_acquire_sys(own(c, C::kNodeFull, q)) > q;
    return net.test_signal(a, own(c, C::kRailFull, q), q + 1);
  }
  HEP_DEVICE bool is_done_with(uint32_t c, uint64_t q) {
    if constexpr (kPush) return net.test_signal(a, own(c, C::kRailFree, q), q + 1);
    return a.ld_acquire_sys(own(c, C::kNodeFree, q)) > q;
  }
  HEP_DEVICE void give_back(const ChannelPeer& peer, uint64_t q) {
    if constexpr (kPush)
      a.st_release_sys(of_owner(peer, C::kNodeFree, q), q + 1);
    else
      net.signal(a, peer.node, there(peer, C::kRailFree, q), q + 1);
  }
  HEP_DEVICE void hand_on(uint32_t c, const ChannelPeer& peer, uint64_t q, uint32_t bytes) {
    if constexpr (kPush)
      put(peer, p.ring(p.world.local_rank(), C::kWeights, C::kBefore, c, q), q, bytes);
    else
      a.st_release_sys(of_owner(peer, C::kNodeFull, q), q + 1);
  }
  HEP_DEVICE void put(const ChannelPeer& peer, const unsigned char* from, uint64_t q, uint32_t bytes) {
    const uint64_t full = there(peer, C::kRailFull, q);
    const uint64_t to = p.ring_there(C::kWeights, p.channel_there(peer.node, peer.local), q);
    if constexpr (kIsMapped<Net>) {
      unsigned char* const ring = net.mapped(peer.node) + to;
      copy_.run(from, bytes, [&](auto* stage, uint32_t at, uint32_t n) { a.bulk_s2g(ring + at, stage, n); });
      net.signal(a, peer.node, full, q + 1);
    } else {
      net.put_signal(a, peer.node, to, from, bytes, full, q + 1);
    }
  }
  HEP_DEVICE uint64_t* own(uint32_t c, C::Flag flag, uint64_t q) const {
    return p.own_flag(p.channels.flag(kDirection, c, flag, q));
  }
  HEP_DEVICE uint64_t* of_owner(const ChannelPeer& peer, C::Flag flag, uint64_t q) const {
    return p.flag(peer.local, p.channels.flag(kDirection, p.channel(peer.node, p.world.local_rank()), flag, q));
  }
  HEP_DEVICE uint64_t there(const ChannelPeer& peer, C::Flag flag, uint64_t q) const {
    return p.flag_there(p.channels.flag(kDirection, p.channel_there(peer.node, peer.local), flag, q));
  }

  // The stripes of this rank's own clones, by slot and the local rank that stores them. Of others it takes a flag that
  // the launch's first block raises when it begins: its own, that slots are free.
  HEP_DEVICE void await_slots() {
    if (injected(Bug::kWeightsUnawaited)) return;
    const int ranks = p.world.num_local_ranks, first = p.world.rank * int(p.node.spare_slots);
    const auto flag = [&](int i) {
      const bool comes = table_[first + i / ranks].crosses && SpareStripe(p, i % ranks, C::kWeights).chunks();
      return comes ? p.own_flag(p.channels.stored(uint32_t(i / ranks), i % ranks))
                   : p.node.flag(p.world.local_rank(), p.node.free, p.world.local_rank());
    };
    a.wait_ge_sys_each(int(p.node.spare_slots) * ranks, flag, p.node.progress->pushes + 1, [&](int i) {
      // Who stores it, or, where that is this rank itself, who sends it.
      const bool own = i % ranks == p.world.local_rank();
      const int owner = own ? p.owner_of(table_[first + i / ranks].column) : 0;
      const int late = own ? p.world.rail_peer(owner / ranks) : p.world.rank_of(p.world.node(), i % ranks);
      return WaitInfo{Site::kCloneWeights, late, i / ranks};
    });
  }
  // This rank's gradients have been read by all that sum them.
  HEP_DEVICE void await_read() {
    if (injected(Bug::kCloneGradientsNotTaken)) return;
    a.wait_ge_sys_each(
        p.world.num_local_ranks, [this](int l) { return p.own_flag(p.channels.read(l)); },
        p.node.progress->collected + 1,
        [this](int l) { return WaitInfo{Site::kCloneGradientsTaken, p.world.rank_of(p.world.node(), l)}; });
  }

  A& a;
  Net& net;
  const SpareRailParams& p;
  const RailTable<A>& table_;
  const RailChannels<A>& channels_;
  const SpareStripe stripe_;
  std::conditional_t<kPush && kIsMapped<Net>, StagedCopy<A>, NoCopy> copy_;
};

}  // namespace hep
