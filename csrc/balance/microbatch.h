// Exact replication for one micro-batch of one layer: which experts are cloned to which spare slots, and how many
// tokens each clone takes, from the counts every rank holds after the router. Integers only and fixed tie-breaks, so
// that every rank computes the same plan. hybrid_ep/balance/twin_microbatch.py is the same algorithm to read.
//
// Inputs and outputs have shapes known before the counts are: a device kernel can take this interface as it is.
#pragma once
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace hep::balance {

enum class Strategy : uint8_t { kBest, kAlias, kBestFit };

// What does not change between micro-batches. Fractions are in parts per million.
struct MicrobatchShape {
  int num_ranks = 1, num_experts = 1, spare_slots = 1, num_nodes = 1;
  bool within_node = false;         // clones only on ranks of the owner's node
  int64_t epsilon_ppm = 10'000;     // a rank may end this far above the mean
  int64_t skip_below_ppm = 30'000;  // imbalance under which nothing is cloned
  int64_t min_chunk = 1;            // tokens, the least worth a clone
  int64_t instance_cost = 0;        // fixed cost of an expert with tokens, in tokens
  int64_t tile = 1;                 // tokens to which the expert's GEMM is padded
  int64_t fan_out = 0;              // most clones one rank pushes; 0: no limit
  int search_nodes = 1000;          // most work of the search where constructions miss the target; 0: no search
  Strategy strategy = Strategy::kBest;

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

  bool allows(int64_t limit);  // false: no plan leaves every rank at `limit` tokens or below
  int64_t least();             // the least limit that it allows

 private:
  bool slots_hold(int64_t limit);
  bool drained_ranks_fill(int64_t limit);
  int64_t most_priced(int64_t cold_slots, int64_t hot_slots, int64_t price) const;

  int spare_slots_;
  int64_t sum_ = 0;
  std::vector<int64_t> rank_load_, rest_;                   // ascending; scratch
  std::vector<std::pair<int, int64_t>> by_place_, pieces_;  // experts, or parts of them: place of the owner, tokens
  std::vector<int64_t> of_hot_, of_others_;                 // tokens of the n largest pieces, from n = 0
};

// Scratch is kept between calls; one planner a thread.
class MicrobatchPlanner {
 public:
  explicit MicrobatchPlanner(const MicrobatchShape& shape);

  // counts[R, E]: tokens of each source for each logical expert. owner[E]: rank. slot_expert[R, S]: expert cloned
  // there or -1. slot_tokens[R, S]: tokens that this clone takes; the owner takes the rest.
  MicrobatchResult plan(const int64_t* counts, const int32_t* owner, int32_t* slot_expert, int64_t* slot_tokens);

  const MicrobatchShape& shape() const { return shape_; }

 private:
  struct Clone {
    int32_t expert, rank, slot;
    int64_t tokens;
  };
  // One construction under way.
  struct Draft {
    std::vector<int64_t> load, donor_key, receiver_key, left;
    std::vector<int32_t> used, pushed;
    std::vector<Clone> clones;
    int64_t aim = 0, max_cost = 0;  // where ranks are levelled to; what came of it
  };
  enum class Rule : uint8_t { kAlias, kBestFit, kLargest };
  // A search under way; search.cpp has the words.
  struct Search {
    std::vector<int64_t> deficit, left, moved;       // by rank; by expert; tokens of each rank's clone
    std::vector<int32_t> clone;                      // expert on each rank, -1 for none yet
    std::vector<std::pair<int32_t, int64_t>> flows;  // (rank, tokens) in order, to be taken back
    int64_t slack = 0;
    int nodes = 0;
  };

  void read(const int64_t* counts, const int32_t* owner);
  int64_t cost(int64_t tokens) const;
  void construct(Draft& d, Rule rule, int64_t aim) const;
  bool step(Draft& d, int donor, Rule rule) const;
  int next_donor(const Draft& d, Rule rule) const;
  void retry(Draft& d);
  bool searchable() const;
  void search(Draft& d, const int32_t* owner);
  bool descend(Search& s, const int32_t* owner) const;
  void flow(Search& s, const int32_t* owner, int rank) const;
  void take_back(Search& s, const int32_t* owner, size_t mark) const;
  int hottest(const Draft& d, int donor) const;
  int smallest_cover(const Draft& d, int donor, int64_t want) const;
  int least_loaded(const Draft& d, int donor) const;
  void refresh(Draft& d, int rank) const;
  int64_t room(const Draft& d, int rank) const;

  MicrobatchShape shape_;
  int max_copies_ = 0, ranks_per_node_ = 1;
  int64_t exact_ = 0, target_ = 0, mean_ = 0;  // exact_: the target at epsilon 0
  std::vector<int64_t> total_, load_;
  std::vector<int32_t> first_, by_owner_;  // experts of rank r: by_owner_[first_[r] .. first_[r + 1])
  Draft alias_, best_fit_, retry_, spare_;
  Search search_;
};

// How one source's tokens spread over the clones: local first, then inside the node, then by rank.
// take[R, S]: this source's tokens for the clone in that slot; the rest of each expert goes to its owner.
void share_of_source(const MicrobatchShape& shape, const int64_t* counts, const int32_t* owner,
                     const int32_t* slot_expert, const int64_t* slot_tokens, int source, int64_t* take);

}  // namespace hep::balance
