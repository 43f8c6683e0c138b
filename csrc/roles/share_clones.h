// From quotas to one source: how many of its tokens go to which clone, and which tokens. Local clones first; then
// sources and instances of a node, then all that are left, each in rank order, take from one another what they can (the
// north-west corner rule), so that all ranks find the same answer without talking.
//
// What a source gives an instance by that rule is where two intervals overlap: of the tokens that sources before it
// have left, and of the room that instances before it have. So a lane takes an expert and needs sums, but no memory for
// them.
#pragma once
#include "roles/clone_instances.h"

namespace hep {

// Count: count(source, expert) -> tokens; count.sum(begin, end, expert) -> those of sources from begin to end.
template <Lanes A, class Count>
class ShareClonesRole {
 public:
  // owner: [E] in shared memory. slot_expert, slot_tokens: the plan [R][S], visible to all lanes.
  HEP_DEVICE ShareClonesRole(A& arch, const CloneShape& shape, const int32_t* owner, CloneLinks links, Count count,
                             const int32_t* slot_expert, const int64_t* slot_tokens)
      : a(arch), s(shape), owner_(owner), links_(links), count_(count), expert_(slot_expert), tokens_(slot_tokens) {}

  // By all lanes of the block, which meet.
  HEP_DEVICE void run(int source, const CloneShare& share) {
    const int me = a.warp_idx() * A::kLanes + a.lane(), width = a.num_warps() * A::kLanes;
    const int experts = s.num_experts, slots = s.num_ranks * s.spare_slots;
    for (int i = me; i < slots; i += width) {
      a.st_global(share.take + i, int64_t(0));
      a.st_global(share.first + i, int64_t(0));
    }
    link_clones(a, s, links_, expert_);
    for (int e = me; e < experts; e += width)
      if (a.ld_shared(links_.head + e) >= 0) share_expert(e, source, share);
    a.block_sync();
  }
  // Behind run().
  HEP_DEVICE int slot_of(int expert, int64_t number, const CloneShare& share) const {
    return clone_slot(a, links_, share, expert, number);
  }

 private:
  // What sources and instances of a node have left when local tokens are placed, and where those of `source` lie.
  struct Left {
    int64_t supply = 0, room = 0;
    Span mine;
  };
  // Only ranks with an instance keep tokens to themselves.
  HEP_DEVICE Left left_in(int node, int expert, int source, CloneInstances<A>& instances) const {
    const int per_node = s.num_ranks / s.num_nodes, begin = node * per_node, end = begin + per_node;
    const bool here = source >= begin && source < end;
    Left left;
    const int at = here ? source : begin;  // sums up to there and from there on
    left.mine.begin = count_.sum(begin, at, expert);
    left.supply = left.mine.begin + count_.sum(at, end, expert);
    int64_t of_source = here ? count_(source, expert) : 0;
    while (instances.rank() < end) {
      const int rank = instances.rank();
      const int64_t has = count_(rank, expert);
      int64_t room = 0;
      for (; instances.rank() == rank; instances.go_on()) room += instances.tokens();
      const int64_t kept = room < has ? room : has;
      left.supply -= kept;
      left.room += room - kept;
      if (rank < source) left.mine.begin -= here ? kept : 0;
      if (rank == source) of_source -= kept;
    }
    left.mine.end = left.mine.begin + of_source;
    return left;
  }
  HEP_DEVICE void share_expert(int expert, int source, const CloneShare& share) const {
    const int per_node = s.num_ranks / s.num_nodes, source_node = source / per_node;
    const int head = a.ld_shared(links_.head + expert);
    int64_t at_owner = count_.sum(0, s.num_ranks, expert);
    for (int i = head; i >= 0; i = a.ld_shared(links_.next + i)) at_owner -= a.ld_global(tokens_ + i);
    const CloneInstances<A> all(a, s, links_, tokens_, head, a.ld_shared(owner_ + expert), at_owner);
    CloneInstances<A> at = all;
    Span in_node, outside;  // tokens of the source that are left in its node, and those that leave it
    int64_t leave = 0, rooms = 0, taken = 0;
    for (int node = 0; node <= source_node; ++node) {
      const Left left = left_in(node, expert, source, at);
      in_node = left.mine;
      outside = left.mine.behind(left.room).moved(leave);
      leave += Span::above(left.supply, left.room);
    }
    at = all;
    for (int node = 0; node < s.num_nodes; ++node) {
      const int end = (node + 1) * per_node;
      if (at.rank() >= end) continue;
      CloneInstances<A> ahead = at;
      // Of one node that is all there is, nothing leaves.
      const int64_t supply = s.num_nodes == 1 ? INT64_MAX : left_in(node, expert, source, ahead).supply;
      int64_t room = 0, has = 0;
      for (int rank = -1; at.rank() < end; at.go_on()) {
        if (at.rank() != rank) has = count_(rank = at.rank(), expert);
        const int64_t local = at.tokens() < has ? at.tokens() : has;
        const Span open{room, room + at.tokens() - local};
        int64_t mine = rank == source && !injected(Bug::kShareNotLocalFirst) ? local : 0;
        if (node == source_node) mine += open.shared_with(in_node);
        mine += open.behind(supply).moved(rooms).shared_with(outside);
        has -= local;
        room = open.end;
        if (at.slot() < 0) continue;
        a.st_global(share.take + at.slot(), mine);
        taken += mine;
      }
      rooms += Span::above(room, supply);
    }
    int64_t number = count_(source, expert) - taken;
    for (int i = head; i >= 0; i = a.ld_shared(links_.next + i)) {
      a.st_global(share.first + i, number);
      number += a.ld_global(share.take + i);
    }
  }

  A& a;
  const CloneShape& s;
  const int32_t* const owner_;
  const CloneLinks links_;
  const Count count_;
  const int32_t* const expert_;
  const int64_t* const tokens_;
};

}  // namespace hep
