// What the lanes of a warp find together: each brings a value, and every lane gets the fold of all. By way of shared
// memory, unless the machine has instructions for it.
#pragma once
#include <cstddef>

#include "arch/concept.h"
#include "common/bugs.h"
#include "layout/clone_shape.h"

namespace hep {

template <Lanes A>
class WarpFold {
 public:
  // scratch: kScratch bytes a lane, of all warps of the block.
  HEP_DEVICE WarpFold(A& arch, std::byte* scratch)
      : a_(arch), slots_(scratch + uint64_t(arch.warp_idx()) * A::kLanes * CloneLayout::kScratch) {}

  // By all lanes of the warp: fold(fold(x, y), ...) over their values, in any order. Two rounds take turns with the
  // slots: who stores in the next but one has met everybody behind their loads of this one. So it is a meeting as well:
  // what a lane read before, others may write behind it.
  template <class T, class Fold>
  HEP_DEVICE T all(T mine, Fold fold) {
    if constexpr (A::kLanes > 1) {
      T* slots = reinterpret_cast<T*>(slots_ + (round_++ & 1) * (A::kLanes * CloneLayout::kScratch / 2));
      a_.st_shared(slots + a_.lane(), mine);
      if (!injected(Bug::kFoldUnmet)) a_.warp_sync();
      mine = a_.ld_shared(slots);
      HEP_UNROLL
      for (int i = 1; i < A::kLanes; ++i) mine = fold(mine, a_.ld_shared(slots + i));
    }
    return mine;
  }

  // The same of the largest.
  HEP_DEVICE int64_t largest(int64_t mine) {
    if constexpr (WarpMath<A>::kOffered) {
      a_.warp_sync();
      return WarpMath<A>::largest(mine);
    } else {
      return all(mine, [](int64_t x, int64_t y) { return x > y ? x : y; });
    }
  }

  // The largest of key[i] ^ flip among those of at most `limit`, -1 without one. No key is below -1.
  HEP_DEVICE int64_t largest_below(const int64_t* key, int n, int64_t limit, int64_t flip) {
    if constexpr (KeyMath<A>::kOffered) {
      return KeyMath<A>::largest_below(key, n, limit, flip);
    } else {
      int64_t best = -1;
      for (int i = a_.lane(); i < n; i += A::kLanes) {
        const int64_t k = a_.ld_shared(key + i);
        if (k <= limit && (k ^ flip) > best) best = k ^ flip;
      }
      return largest(best);
    }
  }
  HEP_DEVICE int64_t largest(const int64_t* key, int n) { return largest_below(key, n, kNever, 0); }
  // Of keys that are not negative: the largest of their complements, which are negative, lifted above -1.
  HEP_DEVICE int64_t smallest(const int64_t* key, int n) { return kNever - largest_below(key, n, kNever, kNever); }

  static constexpr int64_t kNever = INT64_MAX;

 private:
  A& a_;
  std::byte* const slots_;
  uint32_t round_ = 0;
};

}  // namespace hep
