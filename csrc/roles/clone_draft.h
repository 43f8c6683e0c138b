// One construction of a plan, by a warp. Alias (after Walker, Vose): fill the most idle rank to the aim from the
// hottest expert of the most loaded one, which may itself become idle; each clone settles one rank for good. Best fit:
// move no more than the excess, to the tightest place that holds it. Alias wins where single experts are large, best
// fit where a rank has many small ones. Both spend the large experts of the fullest rank first; about one load in a
// hundred then lacks a large one at the end, and the third rule, the largest expert of any overloaded rank, levels it.
//
// All lanes know what a fold found. What a step changes, lane 0 writes between two meetings.
#pragma once
#include "roles/clone_nearest.h"

namespace hep {

enum class CloneRule : uint8_t { kAlias, kBestFit, kLargest };

template <Lanes A>
class CloneDraft {
 public:
  HEP_DEVICE CloneDraft(const CloneTables<A>& tables, WarpFold<A>& fold, uint32_t draft)
      : a(tables.a),
        t(tables),
        s(tables.shape),
        fold_(fold),
        begin_(t.layout.drafts_at + draft * t.layout.draft_bytes) {}

  HEP_DEVICE int64_t* load() const { return t.template at<int64_t>(begin_ + t.layout.draft_load); }
  HEP_DEVICE int64_t* tokens() const { return t.template at<int64_t>(begin_ + t.layout.draft_tokens); }
  HEP_DEVICE int32_t* experts() const { return t.template at<int32_t>(begin_ + t.layout.draft_experts); }
  HEP_DEVICE int32_t* used() const { return t.template at<int32_t>(begin_ + t.layout.draft_used); }

  // Clones until no rank is above the aim, or none can be made.
  HEP_DEVICE CloneOutcome construct(CloneRule rule, int64_t aim, bool near = false) {
    aim_ = aim, rule_ = rule, near_ = near, copies_ = 0;
    begin();
    while (copies_ < s.most_copies()) {
      const int donor = next_donor();
      if (donor < 0) break;
      if (step(donor)) continue;
      a.warp_sync();
      if (a.lane() == 0) a.st_shared(giver() + donor, int64_t(-1));  // nothing more to give: out of the race
      a.warp_sync();
    }
    return {fold_.largest(load(), s.num_ranks), copies_};
  }

 private:
  HEP_DEVICE int64_t* giver() const { return t.template at<int64_t>(begin_ + t.layout.draft_giver); }
  HEP_DEVICE int64_t* receiver() const { return t.template at<int64_t>(begin_ + t.layout.draft_receiver); }
  HEP_DEVICE int64_t* hot() const { return t.template at<int64_t>(begin_ + t.layout.draft_hot); }
  HEP_DEVICE int64_t* left() const { return t.template at<int64_t>(begin_ + t.layout.draft_left); }
  HEP_DEVICE int32_t* pushed() const { return t.template at<int32_t>(begin_ + t.layout.draft_pushed); }
  HEP_DEVICE CloneNearest<A> nearest() const { return {t, fold_, receiver(), experts(), used(), aim_}; }
  HEP_DEVICE void begin() {
    const int ranks = s.num_ranks, experts = s.num_experts;  // stores of int32 might change those of the shape
    for (int e = a.lane(); e < experts; e += A::kLanes) a.st_shared(left() + e, a.ld_shared(t.total() + e));
    for (int r = a.lane(); r < ranks; r += A::kLanes) {
      a.st_shared(hot() + r, a.ld_shared(t.hot() + r));
      a.st_shared(used() + r, 0);
      a.st_shared(pushed() + r, 0);
      enter(r, a.ld_shared(t.load() + r), 0);
    }
    a.warp_sync();
  }
  // A rank with that cost and so many slots used.
  HEP_DEVICE void enter(int rank, int64_t cost, int slots) const {
    a.st_shared(load() + rank, cost);
    a.st_shared(giver() + rank, CloneKeys::fullest(cost, rank));
    const bool takes = slots < s.spare_slots && t.room(cost, aim_) > 0;
    a.st_shared(receiver() + rank, takes ? CloneKeys::emptiest(cost, rank) : WarpFold<A>::kNever);
  }
  // The rank above the aim that gives next, -1 when there is none.
  HEP_DEVICE int next_donor() {
    if (rule_ != CloneRule::kLargest) {
      const int64_t top = fold_.largest(giver(), s.num_ranks);
      return top < 0 || CloneKeys::load(top) <= aim_ ? -1 : CloneKeys::fullest_rank(top);
    }
    int64_t top = -1;
    for (int r = a.lane(); r < s.num_ranks; r += A::kLanes) {
      const int64_t key = a.ld_shared(giver() + r), most = a.ld_shared(hot() + r);
      if (key < 0 || CloneKeys::load(key) <= aim_ || most < 0) continue;
      const int64_t candidate = CloneKeys::fullest(CloneKeys::tokens(most), r);
      top = candidate > top ? candidate : top;
    }
    top = fold_.largest(top);
    return top < 0 ? -1 : CloneKeys::fullest_rank(top);
  }
  // One clone away from `donor`; false when there is none to make.
  HEP_DEVICE bool step(int donor) {
    if (s.fan_out && a.ld_shared(pushed() + donor) >= s.fan_out) return false;
    const int64_t hottest = a.ld_shared(hot() + donor), has = CloneKeys::tokens(hottest);
    if (hottest < 0 || has < s.min_chunk) return false;
    const int64_t excess = CloneKeys::load(a.ld_shared(giver() + donor)) - aim_;
    int64_t want = t.whole_tiles((excess > s.min_chunk ? excess : s.min_chunk) + s.tile - 1);
    if (rule_ != CloneRule::kBestFit || want > has) want = has;
    const int base = s.within_node ? donor / s.domain() * s.domain() : 0;
    const int64_t key = near_ ? nearest().receiver(donor, CloneKeys::hottest_expert(hottest)) : receiver_of(base, want);
    if (key == WarpFold<A>::kNever || CloneKeys::emptiest_rank(key) == donor) return false;
    ++copies_;
    if (a.lane() == 0) move(donor, CloneKeys::emptiest_rank(key), CloneKeys::hottest_expert(hottest), has, want);
    a.warp_sync();
    look_for_hottest(donor);
    return true;
  }
  // The key of the emptiest rank that takes tokens; under best fit that of the fullest one which takes `want`, if any.
  HEP_DEVICE int64_t receiver_of(int base, int64_t want) {
    if (rule_ == CloneRule::kBestFit) {
      // room >= want, said of the load: whole tiles of room cover `want` when they cover it rounded up.
      const int64_t limit = aim_ - t.cost(want), keys = CloneKeys::emptiest(limit, int(CloneKeys::kRankMask));
      const int64_t flip = CloneKeys::kRankMask;
      const int64_t best = fold_.largest_below(receiver() + base, s.domain(), limit < 0 ? -1 : keys, flip);
      if (best >= 0) return best ^ flip;
    }
    return fold_.smallest(receiver() + base, s.domain());
  }
  // By one lane.
  HEP_DEVICE void move(int donor, int to, int expert, int64_t has, int64_t want) const {
    const int64_t given = a.ld_shared(load() + donor), taken = a.ld_shared(load() + to);
    const int64_t fits = t.room(taken, aim_), piece = want < fits ? want : fits;
    const int slot = a.ld_shared(used() + to);
    a.st_shared(experts() + to * s.spare_slots + slot, expert);
    a.st_shared(tokens() + to * s.spare_slots + slot, piece);
    a.st_shared(used() + to, slot + 1);
    a.st_shared(pushed() + donor, a.ld_shared(pushed() + donor) + 1);
    a.st_shared(left() + expert, has - piece);
    enter(to, taken + t.cost(piece), slot + 1);
    enter(donor, given - (t.cost(has) - t.cost(has - piece)), a.ld_shared(used() + donor));
  }
  HEP_DEVICE void look_for_hottest(int rank) {
    int64_t most = -1;
    const int end = a.ld_shared(t.first() + rank + 1);
    for (int i = a.ld_shared(t.first() + rank) + a.lane(); i < end; i += A::kLanes) {
      const int expert = a.ld_shared(t.by_owner() + i);
      const int64_t key = CloneKeys::hottest(a.ld_shared(left() + expert), expert);
      most = key > most ? key : most;
    }
    most = fold_.largest(most);
    if (a.lane() == 0) a.st_shared(hot() + rank, most);
    if (rule_ == CloneRule::kLargest) a.warp_sync();  // under the others a fold comes before the next look at it
  }

  A& a;
  const CloneTables<A>& t;
  const CloneShape& s;
  WarpFold<A>& fold_;
  const uint32_t begin_;
  int64_t aim_ = 0, copies_ = 0;
  CloneRule rule_ = CloneRule::kAlias;
  bool near_ = false;
};

}  // namespace hep
