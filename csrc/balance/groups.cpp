// Which groups of experts live on which node, as many on each: the heaviest first to the lightest node, as EPLB does,
// and then what is lighter than that at its heaviest node. Nodes keep what they get, so that no placement is below the
// mean of the heaviest. With two groups a node the greedy pairs the heaviest with the lightest, which nothing beats.
#include <algorithm>
#include <functional>
#include <numeric>

#include "balance/placement.h"

namespace hep::balance {
namespace {

constexpr int kGroupSteps = 4'000;  // groups put on a node: all ways for up to eight groups, the likeliest of more

}  // namespace

int64_t Placer::group_weight(int group) const {
  const int size = shape_.num_experts / shape_.num_groups;
  return std::accumulate(&weight_[group * size], &weight_[group * size] + size, int64_t(0));
}

int64_t Placer::heaviest(const GroupsOfNodes& groups) const {
  int64_t most = 0;
  for (const auto& mine : groups) {
    int64_t sum = 0;
    for (int g : mine) sum += group_weight(g);
    most = std::max(most, sum);
  }
  return most;
}

Placer::GroupsOfNodes Placer::greedy_groups() const {
  const int G = shape_.num_groups, N = shape_.num_nodes;
  std::vector<std::pair<int64_t, int>> groups(G);
  for (int g = 0; g < G; ++g) groups[g] = {-group_weight(g), g};
  std::sort(groups.begin(), groups.end());
  std::vector<int64_t> load(N);
  GroupsOfNodes on(N);
  for (const auto& [negative, g] : groups) {
    int best = -1;
    for (int n = 0; n < N; ++n)
      if (int(on[n].size()) < G / N && (best < 0 || load[n] < load[best])) best = n;
    load[best] -= negative;
    on[best].push_back(g);
  }
  return on;
}

// In depth, the heaviest group first, to each node that stays below the heaviest so far; of nodes that have nothing yet
// only the first. Where the steps end before the ways do, groups of the heaviest node change places with others' while
// that lowers the pair.
Placer::GroupsOfNodes Placer::even_groups(const GroupsOfNodes& greedy) const {
  const int G = shape_.num_groups, N = shape_.num_nodes, each = G / N;
  if (each <= 2 || N == 1) return greedy;
  std::vector<int64_t> weight(G), load(N);
  for (int g = 0; g < G; ++g) weight[g] = group_weight(g);
  std::vector<int> order(G);
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return weight[a] > weight[b]; });
  const int64_t sum = std::accumulate(weight.begin(), weight.end(), int64_t(0)), mean = (sum + N - 1) / N;
  GroupsOfNodes best = greedy, on(N);
  int64_t lowest = heaviest(greedy);
  int steps = 0;
  const std::function<void(int)> put = [&](int i) {
    if (i == G) {
      best = on;
      lowest = *std::max_element(load.begin(), load.end());
      return;
    }
    const int g = order[i];
    for (int n = 0; n < N && lowest > mean && steps < kGroupSteps; ++n) {
      if (int(on[n].size()) == each || load[n] + weight[g] >= lowest) continue;
      const bool empty = on[n].empty();
      ++steps;
      on[n].push_back(g);
      load[n] += weight[g];
      put(i + 1);
      on[n].pop_back();
      load[n] -= weight[g];
      if (empty) break;
    }
  };
  put(0);
  if (steps < kGroupSteps) return best;
  for (int n = 0; n < N; ++n) {
    load[n] = 0;
    for (int g : best[n]) load[n] += weight[g];
  }
  for (int round = 0; round < 4 * G; ++round) {
    const int hot = int(std::max_element(load.begin(), load.end()) - load.begin());
    int64_t pair = load[hot];
    int from = -1, to = -1, at = -1;
    for (int i = 0; i < each; ++i)
      for (int n = 0; n < N; ++n)
        for (int k = 0; k < each && n != hot; ++k) {
          const int64_t d = weight[best[hot][i]] - weight[best[n][k]], now = std::max(load[hot] - d, load[n] + d);
          if (now >= pair) continue;
          pair = now, from = i, to = n, at = k;
        }
    if (from < 0) break;
    const int64_t d = weight[best[hot][from]] - weight[best[to][at]];
    load[hot] -= d;
    load[to] += d;
    std::swap(best[hot][from], best[to][at]);
  }
  return best;
}

std::vector<std::vector<int>> Placer::experts_of(const GroupsOfNodes& groups) const {
  const int size = shape_.num_experts / shape_.num_groups;
  std::vector<std::vector<int>> experts;
  for (const auto& mine : groups) {
    auto& list = experts.emplace_back();
    for (int g : mine)
      for (int e = g * size; e < (g + 1) * size; ++e) list.push_back(e);
    std::sort(list.begin(), list.end());
  }
  return experts;
}

}  // namespace hep::balance
