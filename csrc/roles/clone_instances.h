// The instances of an expert in the order that shares its tokens out: by rank, on the owner's rank the owner first.
#pragma once
#include "roles/clone_params.h"
#include "roles/clone_tables.h"

namespace hep {

// Clones by expert, in shared memory: the first of an expert [E], and behind each the next one [R][S]; -1 ends.
struct CloneLinks {
  int32_t *head, *next;
  HEP_HOST_DEVICE static uint32_t bytes(const CloneShape& s) {
    return 4 * uint32_t(s.num_experts + s.num_ranks * s.spare_slots);
  }
  HEP_HOST_DEVICE static CloneLinks at(std::byte* shared, const CloneShape& s) {
    auto* words = reinterpret_cast<int32_t*>(shared);
    return {words, words + s.num_experts};
  }
};

// By all lanes of the block, which meet: links of the experts cloned in slot_expert [R][S].
template <Lanes A>
HEP_DEVICE void link_clones(A& a, const CloneShape& s, CloneLinks links, const int32_t* slot_expert) {
  const int me = a.warp_idx() * A::kLanes + a.lane(), width = a.num_warps() * A::kLanes;
  for (int e = me; e < s.num_experts; e += width) a.st_shared(links.head + e, -1);
  a.block_sync();
  for (int i = me == 0 ? s.num_ranks * s.spare_slots - 1 : -1; i >= 0; --i) {
    const int e = a.ld_global(slot_expert + i);
    if (e < 0) continue;
    a.st_shared(links.next + i, a.ld_shared(links.head + e));
    a.st_shared(links.head + e, i);
  }
  a.block_sync();
}

// The slot to which the source's token with that number among those for the expert goes, -1: its owner.
template <Lanes A>
HEP_DEVICE int clone_slot(A& a, CloneLinks links, const CloneShare& share, int expert, int64_t number) {
  int slot = -1;
  for (int i = a.ld_shared(links.head + expert); i >= 0; i = a.ld_shared(links.next + i))
    if (a.ld_global(share.take + i) > 0 && number >= a.ld_global(share.first + i)) slot = i;
  return slot;
}

template <Lanes A>
class CloneInstances {
 public:
  HEP_DEVICE CloneInstances(A& arch, const CloneShape& shape, CloneLinks links, const int64_t* slot_tokens, int head,
                            int owner, int64_t at_owner)
      : a_(&arch), s_(&shape), links_(links), slot_tokens_(slot_tokens), owner_(owner), at_owner_(at_owner) {
    look_at(head);
  }

  // The rank of this one; behind the last as many as there are.
  HEP_DEVICE int rank() const { return owner_ <= rank_ ? owner_ : rank_; }
  HEP_DEVICE int slot() const { return owner_ <= rank_ ? -1 : slot_; }  // -1: the owner
  HEP_DEVICE int64_t tokens() const { return owner_ <= rank_ ? at_owner_ : tokens_; }
  HEP_DEVICE void go_on() {
    if (owner_ <= rank_)
      owner_ = INT32_MAX;
    else
      look_at(a_->ld_shared(links_.next + slot_));
  }

 private:
  HEP_DEVICE void look_at(int slot) {
    slot_ = slot;
    rank_ = slot < 0 ? s_->num_ranks : s_->spare_slots == 1 ? slot : slot / s_->spare_slots;
    tokens_ = slot < 0 ? 0 : a_->ld_global(slot_tokens_ + slot);
  }

  A* a_;
  const CloneShape* s_;
  CloneLinks links_;
  const int64_t* slot_tokens_;
  int slot_ = -1, rank_ = 0, owner_;
  int64_t tokens_ = 0, at_owner_;
};

// A stretch of tokens, or of room for tokens, in their order.
struct Span {
  int64_t begin = 0, end = 0;

  HEP_DEVICE static int64_t above(int64_t x, int64_t least) { return x > least ? x - least : 0; }
  HEP_DEVICE int64_t shared_with(Span o) const {
    const int64_t from = begin > o.begin ? begin : o.begin, to = end < o.end ? end : o.end;
    return to > from ? to - from : 0;
  }
  // What is left of it behind the first n.
  HEP_DEVICE Span behind(int64_t n) const { return {above(begin, n), above(end, n)}; }
  HEP_DEVICE Span moved(int64_t by) const { return {begin + by, end + by}; }
};

}  // namespace hep
