// The middle of the channels, at the rail's end where the owners are. It moves no bytes itself: weights that an owner
// has put into this rank's ring are put along the rail, out of it; of gradients that came along the rail the owner is
// told, who reads them here. What the last end is done with goes back the other way. By one lane of a warp; the grid's
// first also waits for what this rank must not leave without.
#pragma once
#include "roles/rail_channels.h"
#include "transport/concept.h"

namespace hep {

template <Arch A, Transport<A> Net, SpareChannels::Direction kDirection>
class ForwardRailsRole {
 public:
  using C = SpareChannels;

  HEP_DEVICE ForwardRailsRole(A& arch, Net& rail, const SpareRailParams& params, const RailTable<A>& table,
                              const RailChannels<A>& channels)
      : a(arch),
        net(rail),
        p(params),
        table_(table),
        channels_(channels),
        stripe_(params, params.world.local_rank(), kDirection) {}

  HEP_DEVICE void run() {
    channels_.begin_there(table_, stripe_);
    channels_.serve([](const ChannelCursor& at) { return at.credited == at.total; },
                    [this](uint32_t c, const ChannelCursor& at, WaitInfo& waiting) { return step(c, at, waiting); });
    channels_.end(kDirection, ChannelEnd::kMiddle);
    if (channels_.worker()) return;
    if constexpr (kPush)
      await_slots();
    else
      await_read();
  }

 private:
  static constexpr bool kPush = kDirection == C::kWeights;

  HEP_DEVICE bool step(uint32_t c, ChannelCursor at, WaitInfo& waiting) {
    const ChannelPeer peer = ChannelPeer::of(p, c);
    const uint64_t base = *p.count(kDirection, ChannelEnd::kMiddle, c);
    const bool before = at.done < at.total && has_come(c, base + at.done);
    const uint64_t through = at.done > at.credited ? done_with(c, base + at.credited + 1) : 0;
    if (through > base + at.credited) give_back(peer, through);
    if (before) hand_on(c, peer, base + at.done, stripe_.chunk(at.done % stripe_.chunks()).bytes());
    if (!before && through <= base + at.credited) {
      const bool lacks = at.done < at.total, near = lacks == kPush;  // from this node, or along the rail
      const int rank = near ? p.world.rank_of(p.world.node(), peer.local) : p.world.rail_peer(peer.node);
      waiting = {kPush ? Site::kCloneWeights : Site::kCloneGradients, rank,
                 int64_t(base + (lacks ? at.done : at.credited))};
      return false;
    }
    at.done += before;
    if (through > base + at.credited) at.credited = uint32_t(through - base);
    channels_.set(c, at);
    return true;
  }
  HEP_DEVICE bool has_come(uint32_t c, uint64_t q) {
    if constexpr (kPush) return a.ld_acquire_sys(own(c, C::kNodeFull)) > q;
    return net.test_signal(a, own(c, C::kRailFull + uint32_t(q % C::kSlots)), q + 1);
  }
  HEP_DEVICE uint64_t done_with(uint32_t c, uint64_t least) {
    return kPush ? net.read_signal(a, own(c, C::kRailFree), least) : a.ld_acquire_sys(own(c, C::kNodeFree));
  }
  HEP_DEVICE void give_back(const ChannelPeer& peer, uint64_t chunks) {
    if constexpr (kPush)
      a.st_release_sys(of_owner(peer, C::kNodeFree), chunks);
    else
      net.signal(a, peer.node, there(peer, C::kRailFree), chunks);
  }
  HEP_DEVICE void hand_on(uint32_t c, const ChannelPeer& peer, uint64_t q, uint32_t bytes) {
    if constexpr (kPush)
      net.put_signal(a, peer.node, p.ring_there(C::kWeights, p.channel_there(peer.node, peer.local), q),
                     p.ring(p.world.local_rank(), C::kWeights, C::kBefore, c, q), bytes,
                     there(peer, C::kRailFull + uint32_t(q % C::kSlots)), q + 1);
    else
      a.st_release_sys(of_owner(peer, C::kNodeFull), q + 1);
  }
  HEP_DEVICE uint64_t* own(uint32_t c, uint32_t flag) const { return p.own_flag(p.channels.flag(kDirection, c, flag)); }
  HEP_DEVICE uint64_t* of_owner(const ChannelPeer& peer, uint32_t flag) const {
    return p.flag(peer.local, p.channels.flag(kDirection, p.channel(peer.node, p.world.local_rank()), flag));
  }
  HEP_DEVICE uint64_t there(const ChannelPeer& peer, uint32_t flag) const {
    return p.flag_there(p.channels.flag(kDirection, p.channel_there(peer.node, peer.local), flag));
  }

  // The stripes of this rank's own clones, by slot and the local rank that stores them. Of others it has a flag that is
  // up already: its own, that slots are free.
  HEP_DEVICE void await_slots() {
    if (injected(Bug::kWeightsUnawaited)) return;
    const int ranks = p.world.num_local_ranks, first = p.world.rank * int(p.node.spare_slots);
    const auto flag = [&](int i) {
      const bool comes = table_[first + i / ranks].crosses && SpareStripe(p, i % ranks, C::kWeights).chunks();
      return comes ? p.own_flag(p.channels.stored(uint32_t(i / ranks), i % ranks))
                   : p.node.flag(p.world.local_rank(), p.node.free, p.world.local_rank());
    };
    a.wait_ge_sys_each(int(p.node.spare_slots) * ranks, flag, p.node.progress->pushes, [&](int i) {
      return WaitInfo{Site::kCloneWeights, p.world.rank_of(p.world.node(), i % ranks), i / ranks};
    });
  }
  // This rank's gradients have been read by all that sum them.
  HEP_DEVICE void await_read() {
    if (injected(Bug::kCloneGradientsNotTaken)) return;
    a.wait_ge_sys_each(
        p.world.num_local_ranks, [this](int l) { return p.own_flag(p.channels.read(l)); }, p.node.progress->collected,
        [this](int l) { return WaitInfo{Site::kCloneGradientsTaken, p.world.rank_of(p.world.node(), l)}; });
  }

  A& a;
  Net& net;
  const SpareRailParams& p;
  const RailTable<A>& table_;
  const RailChannels<A>& channels_;
  const SpareStripe stripe_;
};

}  // namespace hep
