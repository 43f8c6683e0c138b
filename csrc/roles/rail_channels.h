// The channels that a warp serves, as they can move: one that has to wait never holds up another, or ranks could wait
// for each other in a ring. Of a channel's chunks each warp of a group has every so many-th. Where a warp is in each of
// its channels, is in shared memory.
#pragma once
#include "pipeline/node_gate.h"
#include "roles/rail_facts.h"

namespace hep {

struct alignas(16) ChannelCursor {
  int32_t channel;       // -1: behind the last
  uint32_t done, total;  // chunks: the next that is this warp's, of all that go through
  // At an end: the slot that leads with that chunk's expert. In the middle: this warp's next chunk to be given back.
  int32_t at;
};

// Which of the grid's warps with the same place in the channels this one is, and in how many groups they share those.
struct RailWorker {
  uint32_t number, of, groups;
};

// Cursors of a warp: of a group's channels, or, where an owner adds gradients, of the other nodes; and one behind them.
HEP_HOST_DEVICE uint32_t rail_cursors(const SpareRailParams& p, uint32_t groups) {
  const uint32_t channels = (p.channels.number() + groups - 1) / groups, nodes = uint32_t(p.world.num_nodes - 1);
  return (channels > nodes ? channels : nodes) + 1;
}

template <Arch A>
class RailChannels {
 public:
  using C = SpareChannels;

  HEP_DEVICE RailChannels(A& arch, const SpareRailParams& params, const RailTable<A>& table, const RailFacts<A>& facts,
                          C::Direction direction, C::Place place, const RailWorker& worker, std::byte* smem)
      : a(arch),
        p(params),
        table_(table),
        facts_(facts),
        direction_(direction),
        place_(place),
        worker_(worker),
        members_((worker.of - group() + worker.groups - 1) / worker.groups),
        at_(reinterpret_cast<Vec16*>(smem)) {}

  HEP_DEVICE const RailWorker& worker() const { return worker_; }
  HEP_DEVICE uint32_t members() const { return members_; }  // warps that share its channels
  HEP_DEVICE ChannelCursor get(uint32_t i) const { return std::bit_cast<ChannelCursor>(a.ld_shared(at_ + i)); }
  HEP_DEVICE void set(uint32_t i, const ChannelCursor& c) const { a.st_shared(at_ + i, std::bit_cast<Vec16>(c)); }
  HEP_DEVICE ChannelFacts facts(uint32_t channel) const { return facts_.get(place_, channel); }
  // By one lane, before it serves them. Groups take channels that anything goes through in turn, so that all of them
  // have their share wherever clones are; chunks of small experts begin at another warp in each channel.
  HEP_DEVICE void begin() const {
    uint32_t number = 0, busy = 0;
    for (uint32_t c = 0; c < p.channels.number(); ++c) {
      const ChannelFacts known = facts(c);
      if (known.total() == 0 || busy++ % worker_.groups != group()) continue;
      const uint32_t first = (member() + c) % members_;
      if (first >= known.total()) continue;
      set(number++, {int32_t(c), first, known.total(),
                     place_ == C::kMiddle ? int32_t(first) : lead(c, -1, 1 + first / known.chunks)});
    }
    set(number, {-1, 0, 0, 0});
  }
  // By one lane, or by all lanes of a warp that go the same way. through(cursor): the channel needs no more.
  // step(i, cursor, waiting): whether anything moved, else what it waits for; it sets cursor i.
  template <class Through, class Step>
  HEP_DEVICE void serve(const Through& through, const Step& step) const {
    for (bool more = true; more;) {
      more = false;
      bool moved = false;
      WaitInfo waiting{}, last{};
      for (uint32_t i = 0;; ++i) {
        const ChannelCursor cursor = get(i);
        if (cursor.channel < 0) break;
        if (through(cursor)) continue;
        more = true;
        if (step(i, cursor, waiting))
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
  // At an end: the chunk that a cursor is at is this warp's first of its expert.
  HEP_DEVICE bool begins_expert(const ChannelCursor& c) const {
    return c.done % facts(uint32_t(c.channel)).chunks < (injected(Bug::kExpertAwaitedByOneWarp) ? 1 : members_);
  }
  // At an end: to this warp's next chunk. By one lane.
  HEP_DEVICE void pass(uint32_t i, ChannelCursor c) const {
    const uint32_t chunks = facts(uint32_t(c.channel)).chunks, expert = c.done / chunks;
    c.done += members_;
    if (c.done < c.total) c.at = lead(uint32_t(c.channel), c.at, c.done / chunks - expert);
    set(i, c);
  }
  // By one lane of every warp: whether it is the last of the grid's with this place, for which what went through is
  // counted.
  HEP_DEVICE bool end() const {
    if (!last_of(a.add_acq_rel_sys(p.leaving + place_, 1), p.leaving + place_, worker_.of)) return false;
    facts_.count(place_);
    return true;
  }

 private:
  HEP_DEVICE uint32_t group() const { return worker_.number % worker_.groups; }
  HEP_DEVICE uint32_t member() const { return worker_.number / worker_.groups; }
  HEP_DEVICE int lead(uint32_t channel, int slot, uint32_t experts) const {
    const ChannelRoute route = ChannelRoute::of(p, direction_, place_, channel);
    for (; experts; --experts) slot = table_.lead(route.owner, route.node, slot);
    return slot;
  }

  A& a;
  const SpareRailParams& p;
  // By value: a warp's own object that pointed into itself could not lie in registers.
  const RailTable<A> table_;
  const RailFacts<A> facts_;
  const C::Direction direction_;
  const C::Place place_;
  const RailWorker worker_;
  const uint32_t members_;  // warps of this one's group
  Vec16* at_;
};

}  // namespace hep
