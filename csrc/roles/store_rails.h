// The last end of the channels of weights: chunks that came along this rank's rail, into all slots of its node that
// hold their expert; the last warp to store a chunk of its stripe tells the holders. By one lane of a warp.
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
        epoch_(params.node.progress->pushes + 1) {}

  HEP_DEVICE void run() {
    channels_.begin();
    channels_.serve([](const ChannelCursor& c) { return c.done >= c.total; },
                    [this](uint32_t i, const ChannelCursor& c, WaitInfo& waiting) { return chunk(i, c, waiting); });
    channels_.end();
  }

 private:
  HEP_DEVICE bool chunk(uint32_t i, const ChannelCursor& at, WaitInfo& waiting) {
    const uint32_t c = uint32_t(at.channel);
    const int lead = at.at;
    const ChannelPeer peer = ChannelPeer::of(p, c);
    const uint64_t q = channels_.facts(c).before + at.done;
    const uint32_t full = p.channels.flag(C::kWeights, c, C::kRailFull, q);
    if (!net.test_signal(a, p.own_flag(full), q + 1)) {
      waiting = {Site::kCloneWeights, p.world.rail_peer(peer.node), int64_t(q)};
      return false;
    }
    if (channels_.begins_expert(at)) await_free(lead);
    store(lead, stripe_.chunk(at.done % stripe_.chunks()), p.ring(p.world.local_rank(), C::kWeights, C::kBehind, c, q));
    const uint32_t there = p.channel_there(peer.node, peer.local);
    net.signal(a, peer.node, p.flag_there(p.channels.flag(C::kWeights, there, C::kRailFree, q)), q + 1);
    uint64_t* const stored = p.stored + (lead - p.world.node() * p.slots_of_node());
    const bool last = last_of(a.add_acq_rel_sys(stored, 1), stored, stripe_.chunks());
    if (last || injected(Bug::kSlotFullByEveryWarp)) tell(lead);
    channels_.pass(i, at);
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
