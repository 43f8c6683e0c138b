// Exact replication for one micro-batch of one layer, on a host: which experts are cloned to which spare slots, and how
// many tokens each clone takes, from the counts every rank holds after the router.
#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "balance/one_lane.h"
#include "layout/clone_shape.h"
#include "roles/clone_flows.h"

namespace hep::balance {

using Strategy = CloneStrategy;

struct MicrobatchShape : CloneShape {
  void validate() const;  // std::invalid_argument
};

struct MicrobatchResult {
  int num_copies = 0;
  int64_t max_cost_before = 0, max_cost = 0, target = 0;
};

// What no plan of one micro-batch beats, by what clones can hold.
class ClonesFit {
 public:
  // load[E]: tokens of each expert, owner[E]: its rank.
  ClonesFit(int num_ranks, int spare_slots, const int64_t* load, int num_experts, const int32_t* owner);

  int64_t least();  // tokens of the fullest rank, at least

 private:
  bool slots_hold(int64_t limit, int k, size_t first, int64_t below);
  bool drained_ranks_fill(int64_t limit, int cold, int64_t cold_load, int hot, int64_t hot_load);
  int64_t raised_by_slots(int64_t limit);
  int64_t raised_by_drained_ranks(int64_t limit);
  void cut(int64_t limit);
  template <class Holds>
  int64_t least_that(int64_t limit, const Holds& holds) const;
  int64_t most_priced(int64_t cold_slots, int64_t hot_slots, int64_t price) const;

  int spare_slots_;
  int64_t sum_ = 0, cut_at_ = -1;
  std::vector<int64_t> rank_load_, rest_;                   // ascending; scratch
  std::vector<std::pair<int, int64_t>> by_place_, pieces_;  // experts, or parts of them: place of the owner, tokens
  std::vector<int64_t> of_hot_, of_others_;                 // tokens of the n largest pieces, from n = 0
};

// Runs the planning role (roles/plan_clones.h) with one lane. Its memory is kept between calls; one planner a thread.
class MicrobatchPlanner {
 public:
  explicit MicrobatchPlanner(const MicrobatchShape& shape);

  // counts[R, E]: tokens of each source for each logical expert. owner[E]: rank. slot_expert[R, S]: expert cloned
  // there or -1. slot_tokens[R, S]: tokens that this clone takes; the owner takes the rest.
  MicrobatchResult plan(const int64_t* counts, const int32_t* owner, int32_t* slot_expert, int64_t* slot_tokens);

  const MicrobatchShape& shape() const { return shape_; }

 private:
  void read(const int64_t* counts, const int32_t* owner);
  void read_owners(const CloneTables<OneLane>& t, const int32_t* owner);
  std::byte* shared() { return reinterpret_cast<std::byte*>(memory_.data()); }

  MicrobatchShape shape_;
  CloneLayout layout_;
  std::vector<Vec16> memory_;
  std::unique_ptr<CloneFlow[]> log_;
};

// How one source's tokens spread over the clones (roles/share_clones.h): of its tokens for the expert in a slot, in
// order, take[R, S] go there from number first[R, S] on; the rest of each expert goes to its owner.
void share_of_source(const MicrobatchShape& shape, const int64_t* counts, const int32_t* owner,
                     const int32_t* slot_expert, const int64_t* slot_tokens, int source, int64_t* take, int64_t* first);

// One rank's part in a plan.
struct RankPart {
  // Of the rank's tokens for an expert, in order, those from number `first` on go to a column of the map over physical
  // slots that is `step` further than that of those before. By expert, then by first.
  struct Redirect {
    int64_t expert, first, step;
  };
  // A clone of or on this rank, by rank and slot; nth: so many clones of its owner's experts come before it.
  struct Push {
    int64_t expert, owner, rank, slot, nth;
  };
  std::vector<Redirect> redirects;
  std::vector<Push> pushes;
};

// columns[E]: of each expert's owner. A rank has num_experts / num_ranks columns for its owners, then its spare slots;
// std::invalid_argument where that is not whole.
RankPart part_of_rank(const MicrobatchShape& shape, const int64_t* counts, const int32_t* owner, const int64_t* columns,
                      const int32_t* slot_expert, const int64_t* slot_tokens, int rank);

}  // namespace hep::balance
