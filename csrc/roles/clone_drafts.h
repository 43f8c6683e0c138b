// Constructions of a plan that lie beside one another in a block's shared memory, a warp each, and those that try
// again at other aims where the first ones miss.
#pragma once
#include "roles/clone_draft.h"

namespace hep {

template <Lanes A>
class CloneDrafts {
 public:
  HEP_DEVICE CloneDrafts(const CloneTables<A>& tables, WarpFold<A>& fold) : a(tables.a), t(tables), fold_(fold) {}

  // A warp each; all see what came of them behind it. What lanes read before, warps may write.
  template <class Make>
  HEP_DEVICE void side_by_side(int n, const Make& make) {
    a.block_sync();
    for (int i = a.warp_idx(); i < n; i += a.num_warps()) make(i);
    if (!injected(Bug::kDraftsUnmet)) a.block_sync();
  }
  HEP_DEVICE CloneOutcome outcome(int draft) const { return a.ld_shared(outcomes() + draft); }
  HEP_DEVICE void set(int draft, const CloneOutcome& made) const {  // by the lanes of the warp that made it
    if (a.lane() == 0) a.st_shared(outcomes() + draft, made);
  }
  HEP_DEVICE void construct(int draft, CloneRule rule, int64_t aim, bool near = false) {
    const CloneOutcome made = CloneDraft<A>(t, fold_, uint32_t(draft)).construct(rule, aim, near);
    set(draft, made);
  }
  // Levelling to less than is allowed gives other constructions: five aims, from the target down to that at epsilon 0;
  // of those up to the first that reaches the target, the lowest. Behind them more than is allowed, between the target
  // and the best so far. Returns where it lies.
  HEP_DEVICE int retry(int64_t target, int64_t exact) {
    constexpr int kHeld = 2;
    const int64_t slack = target - exact;
    const int num_aims = slack ? int(CloneLayout::kAims) : 1, width = int(t.layout.aims_at_once);
    int held = kHeld;
    CloneOutcome best{WarpFold<A>::kNever, 0};
    const auto place = [&](int i) { return kHeld + i + (kHeld + i >= held); };  // those that are not held
    for (int done = 0; done < num_aims && best.max_cost > target; done += width) {
      const int n = num_aims - done < width ? num_aims - done : width;
      side_by_side(n, [&](int i) { construct(place(i), CloneRule::kLargest, exact + slack * (4 - done - i) / 4); });
      int lowest = -1;
      for (int i = 0; i < n && best.max_cost > target; ++i)
        if (outcome(place(i)).max_cost < best.max_cost) best = outcome(place(lowest = i));
      if (lowest >= 0) held = place(lowest);
    }
    int64_t low = target;  // where levelling failed; it needs some slack, so it succeeds above some aim
    for (int round = 0; round < kAimRounds && best.max_cost > low + 1; ++round) {
      const int64_t aim = low + (best.max_cost - low) / 2;
      side_by_side(1, [&](int) { construct(place(0), CloneRule::kLargest, aim); });
      const CloneOutcome made = outcome(place(0));
      if (made.max_cost > aim) low = aim;
      if (made.max_cost >= best.max_cost) continue;
      best = made;
      held = place(0);
    }
    return held;
  }

 private:
  static constexpr int kAimRounds = 8;

  HEP_DEVICE CloneOutcome* outcomes() const { return t.template at<CloneOutcome>(t.layout.outcomes_at); }

  A& a;
  const CloneTables<A>& t;
  WarpFold<A>& fold_;
};

}  // namespace hep
