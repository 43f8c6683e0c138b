// From quotas to sources: who sends how many of its tokens to which clone. Every pass walks sources and clones in rank
// order and takes what it can (the north-west corner rule), so all ranks find the same answer without talking.
#include <algorithm>

#include "balance/microbatch.h"

namespace hep::balance {
namespace {

struct Instance {
  int32_t rank, index;  // index into take, -1 for the owner
  int64_t tokens;
};

// Sources [begin, end) fill the instances on ranks [begin, end); `mine` gets what `source` sends.
void fill(std::vector<Instance>& instances, std::vector<int64_t>& left, int begin, int end, int source, int64_t* mine) {
  int s = begin;
  for (Instance& at : instances) {
    if (at.rank < begin || at.rank >= end) continue;
    for (; at.tokens > 0 && s < end; ++s) {
      const int64_t n = std::min(at.tokens, left[s]);
      at.tokens -= n;
      left[s] -= n;
      if (s == source && at.index >= 0) mine[at.index] += n;
      if (left[s] > 0) break;
    }
  }
}

}  // namespace

void share_of_source(const MicrobatchShape& shape, const int64_t* counts, const int32_t* owner,
                     const int32_t* slot_expert, const int64_t* slot_tokens, int source, int64_t* take) {
  const int R = shape.num_ranks, E = shape.num_experts, S = shape.spare_slots;
  const int per_node = R / shape.num_nodes;
  std::fill(take, take + R * S, 0);
  std::vector<std::pair<int32_t, int32_t>> clones;  // (expert, index), so that clones of an expert are together
  for (int i = 0; i < R * S; ++i)
    if (slot_expert[i] >= 0) clones.emplace_back(slot_expert[i], i);
  std::sort(clones.begin(), clones.end());
  std::vector<Instance> instances;
  std::vector<int64_t> left(R);
  for (size_t first = 0, last = 0; first < clones.size(); first = last) {
    const int expert = clones[first].first;
    instances.clear();
    int64_t at_owner = 0;
    for (int r = 0; r < R; ++r) at_owner += left[r] = counts[int64_t(r) * E + expert];
    for (; last < clones.size() && clones[last].first == expert; ++last) {
      const int index = clones[last].second;
      instances.push_back({index / S, index, slot_tokens[index]});
      at_owner -= slot_tokens[index];
    }
    instances.push_back({owner[expert], -1, at_owner});
    std::sort(instances.begin(), instances.end(), [](const Instance& a, const Instance& b) {
      return std::pair(a.rank, a.index) < std::pair(b.rank, b.index);
    });
    for (Instance& at : instances) {
      const int64_t n = std::min(at.tokens, left[at.rank]);
      at.tokens -= n;
      left[at.rank] -= n;
      if (at.rank == source && at.index >= 0) take[at.index] += n;
    }
    if (shape.num_nodes > 1)
      for (int base = 0; base < R; base += per_node) fill(instances, left, base, base + per_node, source, take);
    fill(instances, left, 0, R, source, take);
  }
}

}  // namespace hep::balance
