// The plan of one micro-batch: which experts are cloned to which spare slots, and how many tokens each clone takes,
// from the tokens of each expert. By all lanes of a block; a warp makes a construction (clone_draft.h), and those that
// do not build on each other are made side by side. Integers only and fixed tie-breaks, so that every rank, on any
// machine and with any number of warps, makes the same plan. hybrid_ep/balance/twin_microbatch.py is it to read.
//
// Two constructions, the better kept, and a third rule when both miss; where there are nodes, near ones before all of
// them (clone_nearest.h). Where even that misses, mostly because no plan exists (hybrid_ep/balance/bounds.py), it
// levels to more than the target, as little as bisection finds, and a search (clone_search.h) has the last word. All of
// it is bounded in steps.
#pragma once
#include "roles/clone_drafts.h"
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
    plan_.target = targets.target;
    plan_.max_cost_before = plan_.max_cost = targets.before;
    if (!s.spare_slots || targets.before <= targets.least) return plan_;
    first_constructions();
    if (s.strategy == CloneStrategy::kBest && best_.max_cost > plan_.target) {
      offer(drafts().retry(plan_.target, targets.exact));
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
  HEP_DEVICE CloneDrafts<A> drafts() { return {t, fold_}; }
  // Near ones, of which the first that reaches the target is the plan, then any, of which the better is kept. Two warps
  // make two at once; one makes no more than it must.
  HEP_DEVICE void first_constructions() {
    constexpr int kAny = 2;
    const auto rule = [](int i) {
      return i % 2 == 0 ? CloneRule::kAlias : i < kAny ? CloneRule::kLargest : CloneRule::kBestFit;
    };
    const int begin = s.prefers_near()                        ? 0
                      : s.strategy == CloneStrategy::kBestFit ? kAny + 1
                                                              : kAny,
              end = s.strategy == CloneStrategy::kAlias ? kAny + 1 : kAny + 2;
    for (int i = begin, n = 0; i < end && (draft_ < 0 || i > kAny); i += n) {
      n = a.num_warps() > 1 && i % 2 == 0 && i + 1 < end ? 2 : 1;
      drafts().side_by_side(n, [&](int k) { drafts().construct((i + k) % 2, rule(i + k), plan_.target, i < kAny); });
      for (int k = i; k < i + n; ++k)
        if (k >= kAny || (draft_ < 0 && drafts().outcome(k).max_cost <= plan_.target)) offer(k % 2);
    }
  }
  // Below the target all is equal, and fewer clones are better; the first of equals stays.
  HEP_DEVICE void offer(int draft) {
    const CloneOutcome made = drafts().outcome(draft);
    const int64_t cost = made.max_cost > plan_.target ? made.max_cost : plan_.target,
                  best = best_.max_cost > plan_.target ? best_.max_cost : plan_.target;
    if (draft_ >= 0 && (cost > best || (cost == best && made.copies >= best_.copies))) return;
    best_ = made;
    draft_ = draft;
  }
  // A search levels only what constructions nearly level, the nearer the more ranks there are: of 4,000 plans that it
  // found from anywhere, none began more than 0.45 / ranks of the target above it.
  HEP_DEVICE bool worth_a_search() const {
    const int64_t above = best_.max_cost - plan_.target;
    return above > 0 && above * 2 * s.num_ranks <= plan_.target;
  }
  HEP_DEVICE void search() {
    const int draft = draft_ == 0 ? 1 : 0;  // of the first two one is not the best so far
    drafts().side_by_side(1, [&](int) {
      CloneSearch<A> search(t, fold_, log_, plan_.target);
      const bool found = search.run();
      const CloneOutcome made =
          found ? search.take_clones(CloneDraft<A>(t, fold_, uint32_t(draft))) : CloneOutcome{WarpFold<A>::kNever, 0};
      drafts().set(draft, made);
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
  int draft_ = -1;
};

}  // namespace hep
