// The last end of the channels of weights: chunks that came along this rank's rail, into all slots of its node that
// hold their expert. By one lane of a warp.
#pragma once
#include "roles/rail_channels.h"
#include "roles/staged_copy.h"
#include "transport/concept.h"

namespace hep {

template <Arch A, Transport<A> Net>
class StoreRailsRole {
 public:
  using C = SpareChannels;

  HEP_DEVICE StoreRailsRole(A& arch, Net& rail, const SpareRailParams& params, const RailTable<A>& table,
                            const RailChannels<A>& channels, const StageFifo<A, SpareHead>& fifo)
      : a(arch),
        net(rail),
        p(params),
        table_(table),
        channels_(channels),
        stripe_(params, params.world.local_rank(), C::kWeights),
        copy_(arch, fifo),
        epoch_(params.node.progress->pushes) {}

  HEP_DEVICE void run() {
    channels_.begin_here(table_, stripe_);
    channels_.serve([](const ChannelCursor& at) { return at.done == at.total; },
                    [this](uint32_t c, const ChannelCursor& at, WaitInfo& waiting) { return chunk(c, at, waiting); });
    channels_.end(C::kWeights, C::kLast);
  }

 private:
  HEP_DEVICE bool chunk(uint32_t c, ChannelCursor at, WaitInfo& waiting) {
    const ChannelPeer peer = ChannelPeer::of(p, c);
    const uint64_t q = *p.count(C::kWeights, C::kLast, c) + at.done;
    const uint32_t full = p.channels.flag(C::kWeights, c, C::kRailFull + uint32_t(q % C::kSlots));
    if (!net.test_signal(a, p.own_flag(full), q + 1)) {
      waiting = {Site::kCloneWeights, p.world.rail_peer(peer.node), int64_t(q)};
      return false;
    }
    if (at.done % stripe_.chunks() == 0) await_free(at.slot);
    store(at.slot, stripe_.chunk(at.done % stripe_.chunks()),
          p.ring(p.world.local_rank(), C::kWeights, C::kBehind, c, q));
    const uint32_t there = p.channel_there(peer.node, peer.local);
    const uint32_t free = p.channels.flag(C::kWeights, there, C::kRailFree + uint32_t(q % C::kSlots));
    net.signal(a, peer.node, p.flag_there(free), q + 1);
    if (++at.done % stripe_.chunks() == 0) {
      tell(at.slot);
      at.slot = table_.lead(p.world.rank_of(peer.node, peer.local), p.world.node(), at.slot);
    }
    channels_.set(c, at);
    return true;
  }
  HEP_DEVICE void store(int lead, const SpareStripe::Chunk& chunk, const unsigned char* from) {
    copy_.run(from, chunk.bytes(), [&](const unsigned char* stage, uint32_t offset, uint32_t n) {
      for (int j = lead; j >= 0; j = injected(Bug::kOneCopyOfANode) ? -1 : table_[j].next) {
        const uint64_t to = p.node.weights_of(j - p.world.node() * p.slots_of_node(), chunk.matrix) +
                            uint64_t(chunk.begin) * sizeof(Vec16) + offset;
        a.bulk_s2g(reinterpret_cast<void*>(to), stage, n);
      }
    });
  }
  HEP_DEVICE void await_free(int lead) {
    if (injected(Bug::kSlotNotAwaitedFree)) return;
    const auto holder = [&](int i) { return p.local_of_slot(table_.copy(lead, i)); };
    a.wait_ge_sys_each(
        table_.copies(lead), [&](int i) { return p.node.flag(p.world.local_rank(), p.node.free, holder(i)); }, epoch_,
        [&](int i) {
          return WaitInfo{Site::kSlotsFree, p.world.rank_of(p.world.node(), holder(i)), table_.copy(lead, i)};
        });
  }
  // The copies have this rank's stripe.
  HEP_DEVICE void tell(int lead) {
    const auto stored = [&](int i) {
      const int j = table_.copy(lead, i);
      return p.flag(p.local_of_slot(j), p.channels.stored(uint32_t(j) % p.node.spare_slots, p.world.local_rank()));
    };
    a.st_release_sys_each(table_.copies(lead), stored, epoch_);
  }

  A& a;
  Net& net;
  const SpareRailParams& p;
  const RailTable<A>& table_;
  const RailChannels<A>& channels_;
  const SpareStripe stripe_;
  StagedCopy<A> copy_;
  const uint64_t epoch_;
};

}  // namespace hep
