// The instances of an expert in the order that shares its tokens out: by rank, on the owner's rank the owner first.
#pragma once
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
