// The channels that a warp serves, as they can move: one that has to wait never holds up another, or ranks could wait
// for each other in a ring. Where each of them is, is in shared memory.
#pragma once
#include "roles/rail_stripe.h"
#include "roles/rail_table.h"

namespace hep {

struct alignas(16) ChannelCursor {
  uint32_t done, credited, total;  // chunks
  int32_t slot;                    // the copy that it is at, where that is of this node
};

// worker: of so many warps of the grid that have the role.
template <Arch A>
class RailChannels {
 public:
  HEP_DEVICE RailChannels(A& arch, const SpareRailParams& params, std::byte* smem, uint32_t worker, uint32_t workers)
      : a(arch), p(params), at_(reinterpret_cast<Vec16*>(smem)), worker_(worker), workers_(workers) {}

  HEP_HOST_DEVICE static uint64_t bytes(const SpareRailParams& p) {
    return align_up(sizeof(ChannelCursor) * uint64_t(p.channels.number()), 128);
  }
  HEP_DEVICE uint32_t worker() const { return worker_; }
  HEP_DEVICE uint32_t workers() const { return workers_; }
  HEP_DEVICE ChannelCursor get(uint32_t channel) const {
    return std::bit_cast<ChannelCursor>(a.ld_shared(at_ + channel));
  }
  HEP_DEVICE void set(uint32_t channel, const ChannelCursor& c) const {
    a.st_shared(at_ + channel, std::bit_cast<Vec16>(c));
  }
  // At the rail's end where the clones are: channels with owners elsewhere. By one lane.
  HEP_DEVICE void begin_here(const RailTable<A>& table, const SpareStripe& stripe) const {
    for (uint32_t c = worker_; c < p.channels.number(); c += workers_) {
      const ChannelPeer peer = ChannelPeer::of(p, c);
      const int owner = p.world.rank_of(peer.node, peer.local), node = p.world.node();
      set(c, {0, 0, stripe.chunks() * table.leads(owner, node), table.lead(owner, node, -1)});
    }
  }
  // At its other end: channels of owners on this node. By one lane.
  HEP_DEVICE void begin_there(const RailTable<A>& table, const SpareStripe& stripe) const {
    for (uint32_t c = worker_; c < p.channels.number(); c += workers_) {
      const ChannelPeer peer = ChannelPeer::of(p, c);
      const int owner = p.world.rank_of(p.world.node(), peer.local);
      set(c, {0, 0, stripe.chunks() * table.leads(owner, peer.node), -1});
    }
  }
  // At an owner: one of this rank's. By one lane.
  HEP_DEVICE void begin_own(const RailTable<A>& table, SpareChannels::Direction d, uint32_t c) const {
    const ChannelPeer peer = ChannelPeer::of(p, c);
    const uint32_t chunks = SpareStripe(p, peer.local, d).chunks();
    set(c, {0, 0, chunks * table.leads(p.world.rank, peer.node), table.lead(p.world.rank, peer.node, -1)});
  }
  // By one lane, or by all lanes of a warp that go the same way. through(cursor): the channel needs no more.
  // step(channel, cursor, waiting): whether anything moved, else what it waits for; it sets the cursor.
  template <class Through, class Step>
  HEP_DEVICE void serve(const Through& through, const Step& step) const {
    for (bool more = true; more;) {
      more = false;
      bool moved = false;
      WaitInfo waiting{}, last{};
      for (uint32_t c = worker_; c < p.channels.number(); c += workers_) {
        const ChannelCursor at = get(c);
        if (through(at)) continue;
        more = true;
        if (step(c, at, waiting))
          moved = true;
        else
          last = waiting;
      }
      if (moved)
        a.poll_reset();
      else if (more)
        a.poll_idle(last, uint64_t(last.chunk) + 1, uint64_t(last.chunk));
    }
  }
  // What is through is counted. By one lane.
  HEP_DEVICE void end(SpareChannels::Direction d, SpareChannels::Place place) const {
    for (uint32_t c = worker_; c < p.channels.number(); c += workers_) *p.count(d, place, c) += get(c).total;
  }

 private:
  A& a;
  const SpareRailParams& p;
  Vec16* at_;
  const uint32_t worker_, workers_;
};

}  // namespace hep
