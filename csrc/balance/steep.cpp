// Where few experts are so hot that a fresh placement ends far above the bound: steps of one replica or swap stick
// there, because an expert with three replicas may have to come down to one before anything is gained.
#include <algorithm>

#include "balance/placement.h"

namespace hep::balance {
namespace {

constexpr int kHottestTries = 8;  // numbers of replicas of a node's hottest expert
// Of the first of these, replicas that one of the next hottest gets as well; of few ranks, for each try costs by rank.
constexpr int kNextTries = 3, kNextHottest = 3, kNextReplicas = 3, kFewRanks = 16;

}  // namespace

// As many replicas of the fullest node's hottest expert as bring its share just below the fullest rank, and more. Then
// other hot experts share the ranks that it leaves, some of them perhaps with replicas; what replicas remain are of the
// smallest experts, which fit anywhere.
void Placer::spread_hottest(const std::vector<std::vector<int>>& nodes, int64_t far) {
  const int ranks = shape_.num_ranks / int(nodes.size()), slots = ranks * per_rank_;
  const int most = std::min(ranks, slots - int(nodes[0].size()) + 1);  // replicas of an expert
  std::vector<bool> tried(nodes.size());
  for (;;) {
    const size_t n = size_t(std::max_element(load_.begin(), load_.end()) - load_.begin()) / ranks;
    const int first_rank = int(n) * ranks;
    int64_t lowest = fullest(first_rank, ranks);
    if (lowest <= far || tried[n]) return;
    tried[n] = true;
    std::vector<int> hot = nodes[n];
    std::stable_sort(hot.begin(), hot.end(), [&](int a, int b) { return weight_[a] > weight_[b]; });
    const int next = ranks > kFewRanks ? 0 : std::min(kNextHottest, int(hot.size()) - 1);
    const int64_t least = weight_[hot[0]] / lowest + 1;
    State best{slots_, count_, share_, load_, has_};
    const auto attempt = [&](int64_t replicas, int expert, int more) {
      if (slots - more < int(hot.size())) return;
      clear(first_rank, ranks);
      replicate(nodes[n], slots - more, ranks, std::max<int64_t>(share_of(hot[0], int(replicas)), 1), true);
      if (count_[expert] + more > ranks) return;
      set_count(expert, count_[expert] + more);
      pack(nodes[n], first_rank, ranks, false);
      refine(first_rank, ranks, far);
      if (fullest(first_rank, ranks) >= lowest) return;
      lowest = fullest(first_rank, ranks);
      best = {slots_, count_, share_, load_, has_};
    };
    for (int i = 0; i < kHottestTries && least + i <= most && lowest > far; ++i) {
      attempt(least + i, hot[0], 0);
      for (int k = 1; k <= next && i < kNextTries; ++k)
        for (int more = 1; more <= kNextReplicas; ++more) attempt(least + i, hot[k], more);
    }
    restore(best);
  }
}

}  // namespace hep::balance
