// Where the constructions miss the target with one spare slot a rank: who clones what, searched in depth by a warp.
// What a rank lacks below the target flows along clones (clone_flows.h); what finds no way is stuck, and all that is
// stuck must fit the slack, ranks * target - tokens. The rank that lacks most goes first, and each has two tries: the
// two experts that leave least stuck and make their owners lack least. hybrid_ep/balance/one_clone.py tries all
// experts, which proves what no plan can do, and takes longer.
#pragma once
#include "roles/clone_draft.h"
#include "roles/clone_flows.h"

namespace hep {

template <Lanes A>
class CloneSearch {
 public:
  HEP_DEVICE CloneSearch(const CloneTables<A>& tables, WarpFold<A>& fold, CloneFlow* log, int64_t target)
      : a(tables.a), t(tables), s(tables.shape), fold_(fold), state_(tables, log), target_(target) {}

  // Whether the nodes suffice to bring every rank to the target; then take_clones().
  HEP_DEVICE bool run() {
    state_.begin(target_);
    int64_t slack = target_ * s.num_ranks;
    for (int r = 0; r < s.num_ranks; ++r) slack -= a.ld_shared(t.load() + r);
    for (int node = 0; node < s.search_nodes; ++node) {
      const View view = survey();
      if (view.stuck == kLevel) return true;
      const int rank = CloneKeys::fullest_rank(view.largest);
      Way ways[2] = {kNoWay, kNoWay};
      if (view.largest >= 0 && view.stuck <= slack) look_for_ways(rank, slack - view.stuck, ways);
      if (a.lane() == 0) {
        if (ways[0].expert() >= 0)
          state_.choose(rank, ways[0].expert(), ways[1].expert());
        else
          state_.turn_back();
      }
      a.warp_sync();
      if (a.ld_shared(state_.depth()) < 0) return false;
    }
    return false;
  }
  // What was found, as a construction; more clones than there may be are none.
  HEP_DEVICE CloneOutcome take_clones(const CloneDraft<A>& draft) {
    View mine{-1, 0};  // the largest cost, the number of clones
    for (int r = a.lane(); r < s.num_ranks; r += A::kLanes) {
      const int64_t tokens = a.ld_shared(state_.moved() + r), cost = target_ - a.ld_shared(state_.deficit() + r);
      a.st_shared(draft.used() + r, int32_t(tokens > 0));
      a.st_shared(draft.experts() + r, a.ld_shared(state_.clone() + r));
      a.st_shared(draft.tokens() + r, tokens);
      mine.stuck += tokens > 0;
      mine.largest = cost > mine.largest ? cost : mine.largest;
    }
    const View found = fold_.all(mine, View::both);
    if (found.stuck > s.most_copies()) return {WarpFold<A>::kNever, 0};
    return {found.largest, found.stuck};
  }

 private:
  static constexpr int64_t kLevel = -1, kAbove = int64_t(1) << 56, kMostTokens = int64_t(1) << 40;

  struct alignas(16) View {
    int64_t largest;  // key of the rank that waits for a clone and lacks most, -1: none
    int64_t stuck;    // kLevel: no rank is above the target. While it is folded, and kAbove for each lane that saw one
    HEP_DEVICE static View both(View x, View y) {
      return {x.largest > y.largest ? x.largest : y.largest, x.stuck + y.stuck};
    }
  };
  HEP_DEVICE View survey() {
    View mine{-1, 0};
    bool above = false;
    for (int r = a.lane(); r < s.num_ranks; r += A::kLanes) {
      const int64_t lacks = a.ld_shared(state_.deficit() + r), key = CloneKeys::fullest(lacks, r);
      const bool has_clone = a.ld_shared(state_.clone() + r) >= 0;
      above |= lacks < 0;
      if (lacks > 0 && has_clone) mine.stuck += lacks;
      if (lacks > 0 && !has_clone && key > mine.largest) mine.largest = key;
    }
    mine.stuck += above ? kAbove : 0;
    View all = fold_.all(mine, View::both);
    all.stuck = all.stuck < kAbove ? kLevel : all.stuck & (kAbove - 1);
    return all;
  }

  // By price, then the larger expert, then the lower number.
  struct alignas(16) Way {
    int64_t price, order;
    HEP_DEVICE bool before(Way o) const { return price < o.price || (price == o.price && order < o.order); }
    HEP_DEVICE int expert() const { return price == WarpFold<A>::kNever ? -1 : int(order & CloneKeys::kExpertMask); }
    HEP_DEVICE static Way first(Way x, Way y) { return y.before(x) ? y : x; }
  };
  static constexpr Way kNoWay{WarpFold<A>::kNever, WarpFold<A>::kNever};

  // The two best, in their order. Each lane keeps its two best; the one whose first was taken offers its second.
  HEP_DEVICE void look_for_ways(int rank, int64_t may_stick, Way (&ways)[2]) {
    const int64_t lacks = a.ld_shared(state_.deficit() + rank);
    Way best = kNoWay, next = kNoWay;
    for (int e = a.lane(); e < s.num_experts; e += A::kLanes) {
      const int64_t has = a.ld_shared(state_.left() + e), flows = has < lacks ? has : lacks, sticks = lacks - flows;
      const int at = a.ld_shared(t.owner() + e);
      if (flows == 0 || at == rank || sticks > may_stick) continue;
      const int64_t there = a.ld_shared(state_.deficit() + at);
      const int64_t opens = (there + flows > 0 ? there + flows : 0) - (there > 0 ? there : 0);
      const Way way{2 * sticks + opens, (kMostTokens - has) << CloneKeys::kExpertBits | e};
      if (way.before(best)) {
        next = best;
        best = way;
      } else if (way.before(next)) {
        next = way;
      }
    }
    ways[0] = fold_.all(best, Way::first);
    if (ways[0].order == best.order) best = next;
    ways[1] = fold_.all(best, Way::first);
  }

  A& a;
  const CloneTables<A>& t;
  const CloneShape& s;
  WarpFold<A>& fold_;
  CloneFlows<A> state_;
  const int64_t target_;
};

}  // namespace hep
