// A placement changed as little as possible: each step takes the replica or the pair swap that removes most of what
// stands above the limit per slot it changes. A changed slot is an expert's weights on the wire.
#include <algorithm>
#include <numeric>
#include <stdexcept>

#include "balance/placement.h"

namespace hep::balance {

void Placer::adopt(const int32_t* phy2log) {
  std::fill(has_.begin(), has_.end(), 0);
  std::fill(load_.begin(), load_.end(), 0);
  std::fill(count_.begin(), count_.end(), 0);
  for (auto& ranks : where_) ranks.clear();
  for (int i = 0; i < shape_.num_slots; ++i) {
    const int e = phy2log[i];
    if (e < 0 || e >= shape_.num_experts) throw std::invalid_argument("current: names an expert that does not exist");
    if (holds(rank_of(i), e)) throw std::invalid_argument("current: has two replicas of an expert on one rank");
    has_[size_t(rank_of(i)) * shape_.num_experts + e] = 1;
    set_count(e, count_[e] + 1);
    where_[e].push_back(rank_of(i));
  }
  if (std::find(count_.begin(), count_.end(), 0) != count_.end())
    throw std::invalid_argument("current: lacks an expert: give every expert a slot");
  for (int i = 0; i < shape_.num_slots; ++i) put(rank_of(i), i, phy2log[i]);
}

// Whether a slot's rank may take the expert: it lacks it and, with groups, the expert lives on that node.
bool Placer::may_host(int slot, int expert) const {
  const int rank = rank_of(slot), ranks_per_node = shape_.num_ranks / shape_.num_nodes;
  if (holds(rank, expert)) return false;
  return !shape_.num_groups || where_[expert].front() / ranks_per_node == rank / ranks_per_node;
}

int64_t Placer::gain_of_replica(int slot, int expert) const {
  const int rank = rank_of(slot), old = slots_[slot];
  const int64_t rise = share_of(old, count_[old] - 1) - share(old);
  const int64_t fall = share(expert) - share_of(expert, count_[expert] + 1);
  int64_t gain = excess(load_[rank]) - excess(load_[rank] - share(old) + share(expert) - fall);
  for (int r : where_[old])
    if (r != rank) gain += excess(load_[r]) - excess(load_[r] + rise - (holds(r, expert) ? fall : 0));
  for (int r : where_[expert])
    if (!holds(r, old)) gain += excess(load_[r]) - excess(load_[r] - fall);
  return gain;
}

int64_t Placer::gain_of_swap(int slot, int other) const {
  const int a = rank_of(slot), b = rank_of(other);
  const int64_t d = share(slots_[slot]) - share(slots_[other]);
  return excess(load_[a]) - excess(load_[a] - d) + excess(load_[b]) - excess(load_[b] + d);
}

Placer::Move Placer::best_move(int64_t max_slots) const {
  Move best;
  const auto offer = [&](int64_t gain, int slots, int slot, int other, int expert) {
    if (gain * best.slots > best.gain * slots) best = {gain, slots, slot, other, expert};
  };
  std::vector<int> hot;  // experts on ranks above the limit: only their replicas help
  for (int e = 0; e < shape_.num_experts; ++e)
    for (int r : where_[e])
      if (load_[r] > limit_) {
        hot.push_back(e);
        break;
      }
  for (int i = 0; i < shape_.num_slots; ++i)
    if (count_[slots_[i]] > 1)
      for (int e : hot)
        if (may_host(i, e)) offer(gain_of_replica(i, e), 1, i, -1, e);
  if (max_slots < 2) return best;
  for (int i = 0; i < shape_.num_slots; ++i) {
    if (load_[rank_of(i)] <= limit_) continue;
    for (int j = 0; j < shape_.num_slots; ++j)
      if (rank_of(i) != rank_of(j) && may_host(i, slots_[j]) && may_host(j, slots_[i]))
        offer(gain_of_swap(i, j), 2, i, j, -1);
  }
  return best;
}

void Placer::apply(const Move& m) {
  const auto replace = [](std::vector<int32_t>& ranks, int from, int to) {
    if (from >= 0) ranks.erase(std::find(ranks.begin(), ranks.end(), from));
    if (to >= 0) ranks.insert(std::lower_bound(ranks.begin(), ranks.end(), to), to);
  };
  const int rank = rank_of(m.slot), old = slots_[m.slot];
  if (m.other >= 0) {
    replace(where_[old], rank, rank_of(m.other));
    replace(where_[slots_[m.other]], rank_of(m.other), rank);
    return swap(m.slot, m.other);
  }
  for (int e : {old, m.expert})
    for (int r : where_[e]) load_[r] -= share(e);
  replace(where_[old], rank, -1);
  replace(where_[m.expert], -1, rank);
  has_[size_t(rank) * shape_.num_experts + old] = 0;
  has_[size_t(rank) * shape_.num_experts + m.expert] = 1;
  slots_[m.slot] = m.expert;
  set_count(old, count_[old] - 1), set_count(m.expert, count_[m.expert] + 1);
  for (int e : {old, m.expert})
    for (int r : where_[e]) load_[r] += share(e);
}

void Placer::improve(const int64_t* load, int64_t target_ppm, int64_t max_moves, int32_t* phy2log) {
  std::copy(load, load + shape_.num_experts, weight_.begin());
  adopt(phy2log);
  const int64_t mean = (std::accumulate(weight_.begin(), weight_.end(), int64_t(0)) << kShareBits) / shape_.num_ranks;
  // Two factors, so that a load of 2^56 times a million does not overflow.
  limit_ = mean + mean / 1'000'000 * target_ppm;
  for (int64_t left = max_moves; left > 0;) {
    const Move move = best_move(left);
    if (move.slot < 0) break;
    apply(move);
    left -= move.slots;
  }
  std::copy(slots_.begin(), slots_.end(), phy2log);
}

}  // namespace hep::balance
