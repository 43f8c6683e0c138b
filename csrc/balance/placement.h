// Where experts and their replicas live until the next placement: for offline plans and for the slow loop. Even split
// of an expert's load over its replicas, no two replicas of an expert on one rank. Integers and fixed tie-breaks.
// hybrid_ep/balance/twin_placement.py is the same algorithm to read.
#pragma once
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace hep::balance {

// num_groups == 0: experts go anywhere. Otherwise each group of experts stays on one node (hierarchical).
struct PlacementShape {
  int num_experts = 1, num_slots = 1, num_groups = 0, num_nodes = 1, num_ranks = 1;

  void validate() const;  // std::invalid_argument
};

// EPLB's placement of one layer. load[E]; group_load: sums of its groups, [1] without groups.
void eplb(const PlacementShape& shape, const float* load, const float* group_load, int32_t* phy2log);

// One layer at a time; scratch is kept between layers.
class Placer {
 public:
  explicit Placer(const PlacementShape& shape);

  // load[E] >= 0 with a sum of at most 2^40, fixed point as the caller scales it.
  // phy2log[slots]: expert of each slot, slots / ranks consecutive ones a rank.
  void fresh(const int64_t* load, int32_t* phy2log);

  // Compares two placements by their fullest rank: below 0 if a's is lower, above 0 if b's is, 0 if they are as good as
  // equal: closer than what rounding of shares can do.
  int compare(const int64_t* load, const int32_t* a, const int32_t* b) const;

  // Changes a legal placement by few slots until no rank is more than target_ppm above the mean, or 1 % of the mean
  // above the fullest rank of `fresh`, a legal placement too; or as far as max_moves changed slots go.
  void improve(const int64_t* load, const int32_t* fresh, int64_t target_ppm, int64_t max_moves, int32_t* phy2log);

 private:
  struct Move {
    int64_t gain = 0;
    int fetched = 1, slot = -1, other = -1, expert = -1;  // a replica of `expert` into slot, or slot <-> other
  };

  // Loads of the fullest rank: where levelling stops, where no other numbers of replicas are tried, EPLB's, what no
  // placement beats, and where that is far.
  struct Marks {
    int64_t good = 0, enough = 0, eplb = 0, floor = 0, far = 0;
  };

  using GroupsOfNodes = std::vector<std::vector<int>>;

  struct State {
    std::vector<int32_t> slots, count;
    std::vector<int64_t> share, load;
    std::vector<unsigned char> has;
  };

  void spread(const std::vector<int>& experts, int first_rank, int num_ranks, bool twins, const Marks& m);
  void restore(const State& s);
  int64_t mean_of(const std::vector<int>& experts, int num_ranks) const;
  void clear(int first_rank, int num_ranks);
  void replicate(const std::vector<int>& experts, int num_slots, int max_replicas, int64_t cap, bool smallest = false);
  bool pack(const std::vector<int>& experts, int first_rank, int num_ranks, bool twice);
  bool greedy(const std::vector<int>& experts, int first_rank, int num_ranks);
  bool part_twins(int first_rank, int num_ranks);
  int64_t fullest(int first_rank, int num_ranks) const;
  void make_room(int expert, int first_rank, int num_ranks);
  void refine(int first_rank, int num_ranks, int64_t good);
  bool swap_down(int hot, int first_rank, int num_ranks, int64_t below, int64_t good);
  bool replica_down(int hot, int first_rank, int num_ranks);
  int64_t fullest_with(int slot, int expert) const;
  void index_ranks();
  void spread_hottest(const std::vector<std::vector<int>>& nodes, int64_t far);
  void place(const std::vector<std::vector<int>>& nodes);
  int64_t group_weight(int group) const;
  int64_t heaviest(const GroupsOfNodes& groups) const;  // node's load
  GroupsOfNodes greedy_groups() const;
  GroupsOfNodes even_groups(const GroupsOfNodes& greedy) const;
  std::vector<std::vector<int>> experts_of(const GroupsOfNodes& groups) const;
  void put(int rank, int slot, int expert);
  void swap(int slot, int other);
  void adopt(const int32_t* phy2log);
  bool may_host(int slot, int expert) const;
  int64_t share(int expert) const { return share_[expert]; }
  void set_count(int expert, int count) {
    count_[expert] = count;
    share_[expert] = share_of(expert, count);
  }
  int64_t share_of(int expert, int count) const { return weight_[expert] / count; }
  int64_t excess(int64_t load) const { return load > limit_ ? load - limit_ : 0; }
  int rank_of(int slot) const { return slot / per_rank_; }
  int64_t relief(int expert) const;
  int64_t burden(int expert, int but) const;
  int64_t gain_on_rank(int slot, int expert) const;
  int64_t gain_of_replica(int slot, int expert, int64_t relief) const;
  int64_t gain_of_swap(int slot, int other) const;
  Move best_move(int64_t below);
  Move best_move_from(const std::vector<int>& givers, int64_t below);
  int fetched(int rank, int out, int in) const;
  Move way_back(int slot);
  int64_t lower(int64_t left, State* lowest = nullptr);
  int64_t top() const;  // of the fullest rank
  void polish(const Marks& m, int num_nodes);
  int64_t reconsider(int64_t spent);
  std::vector<int32_t> renamed(const int32_t* fresh) const;
  int64_t fetched_in_all() const;
  void settle(int32_t* phy2log) const;
  void apply(const Move& move);
  bool holds(int rank, int expert) const { return has_[std::size_t(rank) * shape_.num_experts + expert]; }

  PlacementShape shape_;
  int per_rank_;
  int64_t limit_ = 0;
  int64_t steps_ = 0, budget_ = 0;                     // moves weighed, and at most
  std::vector<int64_t> weight_, share_, load_, size_;  // size_: share of the expert in each slot, for swaps
  std::vector<int32_t> count_, slots_, used_, heap_, first_slots_;
  std::vector<unsigned char> had_, has_;        // [ranks, experts]
  std::vector<std::vector<int32_t>> where_;     // ranks of each expert, ascending; for replica moves
  std::vector<std::pair<int64_t, int>> order_;  // (share, expert), largest first
};

}  // namespace hep::balance
