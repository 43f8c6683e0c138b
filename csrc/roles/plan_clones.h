// The plan of one micro-batch: which experts are cloned to which spare slots, and how many tokens each clone takes,
// from the tokens of each expert. By all lanes of a block; a warp makes a construction (clone_draft.h), and those that
// do not build on each other are made side by side. Integers only and fixed tie-breaks, so that every rank, on any
// machine and with any number of warps, makes the same plan. hybrid_ep/balance/twin_microbatch.py is it to read.
//
// Two constructions, the better kept, and a third rule when both miss. Where even that misses, mostly because no plan
// exists (hybrid_ep/balance/bounds.py), it levels to more than the target, as little as bisection finds, and a search
// (clone_search.h) has the last word. All of it is bounded in steps.
#pragma once
#include "roles/clone_search.h"

namespace hep {

struct ClonePlan {
  int64_t max_cost_before = 0, max_cost = 0, target = 0;  // of the fullest rank, in tokens
  int copies = 0;
  int draft = -1;  // where it lies, -1: nothing is cloned
};

template <Lanes A>
class PlanClonesRole {
 public:
  // shared: CloneLayout::bytes; total, owner, by_owner and first are there. log: flow_bytes of the rank's memory.
  HEP_DEVICE PlanClonesRole(A& arch, const CloneShape& shape, const CloneLayout& layout, std::byte* shared,
                            CloneFlow* log)
      : a(arch), s(shape), t{arch, shape, layout, shared}, fold_(arch, shared + layout.scratch_at), log_(log) {}

  HEP_DEVICE ClonePlan run() {
    t.weigh();
    const CloneTargets targets = t.targets();
    exact_ = targets.exact;
    plan_.target = targets.target;
    plan_.max_cost_before = plan_.max_cost = targets.before;
    if (!s.spare_slots || targets.before <= targets.least) return plan_;
    const bool alias = s.strategy != CloneStrategy::kBestFit, best_fit = s.strategy != CloneStrategy::kAlias;
    const int first = alias ? 0 : 1;
    side_by_side(int(alias) + int(best_fit), [&](int i) {
      construct(first + i, first + i == 0 ? CloneRule::kAlias : CloneRule::kBestFit, plan_.target);
    });
    if (alias) offer(0);
    if (best_fit) offer(1);
    if (s.strategy == CloneStrategy::kBest && best_.max_cost > plan_.target) {
      offer(retry());
      if (s.searchable() && worth_a_search()) search();
    }
    if (best_.max_cost >= plan_.max_cost_before) return plan_;
    plan_.max_cost = best_.max_cost;
    plan_.copies = int(best_.copies);
    plan_.draft = draft_;
    return plan_;
  }
  // By all lanes of the block, behind run(): expert [R][S] of each spare slot, -1 for an empty one, and tokens [R][S].
  HEP_DEVICE void store(int32_t* slot_expert, int64_t* slot_tokens) {
    const CloneDraft<A> draft(t, fold_, uint32_t(plan_.draft < 0 ? 0 : plan_.draft));
    for (int r = a.warp_idx() * A::kLanes + a.lane(); r < s.num_ranks; r += a.num_warps() * A::kLanes) {
      const int used = plan_.draft < 0 ? 0 : a.ld_shared(draft.used() + r);
      for (int i = r * s.spare_slots, slot = 0; slot < s.spare_slots; ++slot, ++i) {
        a.st_global(slot_expert + i, slot < used ? a.ld_shared(draft.experts() + i) : -1);
        a.st_global(slot_tokens + i, slot < used ? a.ld_shared(draft.tokens() + i) : 0);
      }
    }
  }

 private:
  static constexpr int kAimRounds = 8;

  // A warp each; all see what came of them behind it. What lanes read before, warps may write.
  template <class Make>
  HEP_DEVICE void side_by_side(int n, const Make& make) {
    a.block_sync();
    for (int i = a.warp_idx(); i < n; i += a.num_warps()) make(i);
    if (!injected(Bug::kDraftsUnmet)) a.block_sync();
  }
  HEP_DEVICE CloneOutcome* outcomes() const { return t.template at<CloneOutcome>(t.layout.outcomes_at); }
  HEP_DEVICE CloneOutcome outcome(int draft) const { return a.ld_shared(outcomes() + draft); }
  HEP_DEVICE void construct(int draft, CloneRule rule, int64_t aim) {
    const CloneOutcome made = CloneDraft<A>(t, fold_, uint32_t(draft)).construct(rule, aim);
    if (a.lane() == 0) a.st_shared(outcomes() + draft, made);
  }
  // Below the target all is equal, and fewer clones are better; the first of equals stays.
  HEP_DEVICE void offer(int draft) {
    const CloneOutcome made = outcome(draft);
    const int64_t cost = made.max_cost > plan_.target ? made.max_cost : plan_.target,
                  best = best_.max_cost > plan_.target ? best_.max_cost : plan_.target;
    if (draft_ >= 0 && (cost > best || (cost == best && made.copies >= best_.copies))) return;
    best_ = made;
    draft_ = draft;
  }
  // Levelling to less than is allowed gives other constructions: five aims, from the target down to epsilon 0; of those
  // up to the first that reaches the target, the lowest. Behind them more than is allowed, between the target and the
  // best so far. Returns where it lies.
  HEP_DEVICE int retry() {
    constexpr int kHeld = 2;
    const int64_t slack = plan_.target - exact_;
    const int num_aims = slack ? int(CloneLayout::kAims) : 1, width = int(t.layout.aims_at_once);
    int held = kHeld;
    CloneOutcome best{WarpFold<A>::kNever, 0};
    const auto place = [&](int i) { return kHeld + i + (kHeld + i >= held); };  // those that are not held
    for (int done = 0; done < num_aims && best.max_cost > plan_.target; done += width) {
      const int n = num_aims - done < width ? num_aims - done : width;
      side_by_side(n, [&](int i) { construct(place(i), CloneRule::kLargest, exact_ + slack * (4 - done - i) / 4); });
      int lowest = -1;
      for (int i = 0; i < n && best.max_cost > plan_.target; ++i)
        if (outcome(place(i)).max_cost < best.max_cost) best = outcome(place(lowest = i));
      if (lowest >= 0) held = place(lowest);
    }
    int64_t low = plan_.target;  // where levelling failed; it needs some slack, so it succeeds above some aim
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
  // A search levels only what constructions nearly level, the nearer the more ranks there are: of 4,000 plans that it
  // found from anywhere, none began more than 0.45 / ranks of the target above it.
  HEP_DEVICE bool worth_a_search() const {
    const int64_t above = best_.max_cost - plan_.target;
    return above > 0 && above * 2 * s.num_ranks <= plan_.target;
  }
  HEP_DEVICE void search() {
    const int draft = draft_ == 0 ? 1 : 0;  // of the first two one is not the best so far
    side_by_side(1, [&](int) {
      CloneSearch<A> search(t, fold_, log_, plan_.target);
      const bool found = search.run();
      const CloneOutcome made =
          found ? search.take_clones(CloneDraft<A>(t, fold_, uint32_t(draft))) : CloneOutcome{WarpFold<A>::kNever, 0};
      if (a.lane() == 0) a.st_shared(outcomes() + draft, made);
    });
    offer(draft);
  }

  A& a;
  const CloneShape& s;
  const CloneTables<A> t;
  WarpFold<A> fold_;
  CloneFlow* const log_;
  ClonePlan plan_;
  CloneOutcome best_{};
  int64_t exact_ = 0;  // the target at epsilon 0
  int draft_ = -1;
};

}  // namespace hep
