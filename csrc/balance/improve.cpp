// A placement changed as little as possible: each step takes the replica or the pair swap that removes most of what
// stands above the limit per expert that a rank has to fetch for it. A rank keeps what it had at first, so that a step
// over a slot changed before costs less or nothing. At the end steps are taken back that later ones made superfluous.
#include <algorithm>
#include <array>
#include <numeric>
#include <stdexcept>
#include <string>

#include "balance/placement.h"

namespace hep::balance {
namespace {

constexpr int64_t kSteps = 3'000'000;  // moves weighed, some ten milliseconds in all
constexpr size_t kFullest = 4;         // ranks that give first
constexpr int64_t kPolishSteps = 300'000;
constexpr int64_t kPolish[] = {10, 50, 400};  // limits: a 10th, a 50th and a 400th above what no placement beats
constexpr int64_t kMillion = 1'000'000, kNearFreshPpm = 10'000;

}  // namespace

void Placer::adopt(const int32_t* phy2log) {
  std::fill(has_.begin(), has_.end(), 0);
  std::fill(load_.begin(), load_.end(), 0);
  std::fill(count_.begin(), count_.end(), 0);
  for (auto& ranks : where_) ranks.clear();
  for (int i = 0; i < shape_.num_slots; ++i) {
    const int e = phy2log[i];
    const auto refuse = [&](const std::string& why) {
      throw std::invalid_argument("current[" + std::to_string(i) + "] is " + std::to_string(e) + ": " + why);
    };
    if (e < 0 || e >= shape_.num_experts) refuse("give experts from 0 to " + std::to_string(shape_.num_experts - 1));
    if (holds(rank_of(i), e))
      refuse("rank " + std::to_string(rank_of(i)) + " has that expert already; give it a replica on another rank");
    has_[size_t(rank_of(i)) * shape_.num_experts + e] = 1;
    set_count(e, count_[e] + 1);
    where_[e].push_back(rank_of(i));
  }
  if (const auto none = std::find(count_.begin(), count_.end(), 0); none != count_.end())
    throw std::invalid_argument("current: lacks expert " + std::to_string(none - count_.begin()) +
                                "; give every expert a slot");
  for (int i = 0; i < shape_.num_slots; ++i) put(rank_of(i), i, phy2log[i]);
}

// The ranks of `fresh` under the names that keep most of what ranks have: nodes of groups first, then ranks inside.
// Each time the pair that shares most, of equal ones the first.
std::vector<int32_t> Placer::renamed(const int32_t* fresh) const {
  const int nodes = shape_.num_groups ? shape_.num_nodes : 1, each = shape_.num_ranks / nodes;
  const auto shared = [&](int from, int to, int size) {
    int n = 0;
    for (int i = from * size * per_rank_; i < (from + 1) * size * per_rank_; ++i)
      for (int r = to * size; r < (to + 1) * size; ++r) n += had_[size_t(r) * shape_.num_experts + fresh[i]];
    return n;
  };
  const auto match = [&](int first_from, int first_to, int n, int size) {
    std::vector<int> name(n, -1);
    std::vector<std::array<int, 3>> pairs;
    for (int i = 0; i < n; ++i)
      for (int k = 0; k < n; ++k) pairs.push_back({-shared(first_from + i, first_to + k, size), i, k});
    std::sort(pairs.begin(), pairs.end());
    std::vector<bool> taken(n);
    for (const auto& [_, i, k] : pairs)
      if (name[i] < 0 && !taken[k]) {
        name[i] = k;
        taken[k] = true;
      }
    return name;
  };
  std::vector<int32_t> slots(shape_.num_slots);
  const std::vector<int> node = match(0, 0, nodes, each);
  for (int n = 0; n < nodes; ++n) {
    const std::vector<int> rank = match(n * each, node[n] * each, each, 1);
    for (int r = 0; r < each; ++r)
      std::copy_n(fresh + (n * each + r) * per_rank_, per_rank_, &slots[(node[n] * each + rank[r]) * per_rank_]);
  }
  return slots;
}

int64_t Placer::top() const {
  return *std::max_element(load_.begin(), load_.end());
}

int64_t Placer::fetched_in_all() const {
  int64_t n = 0;
  for (int i = 0; i < shape_.num_slots; ++i) n += !had_[size_t(rank_of(i)) * shape_.num_experts + slots_[i]];
  return n;
}

// Experts fetched more when `in` takes the place of `out` on a rank: -1 to 1.
int Placer::fetched(int rank, int out, int in) const {
  const auto had = [&](int e) { return int(had_[size_t(rank) * shape_.num_experts + e]); };
  return had(out) - had(in);
}

// Whether a slot's rank may take the expert: it lacks it and, with groups, the expert lives on that node.
bool Placer::may_host(int slot, int expert) const {
  const int rank = rank_of(slot), ranks_per_node = shape_.num_ranks / shape_.num_nodes;
  if (holds(rank, expert)) return false;
  return !shape_.num_groups || where_[expert].front() / ranks_per_node == rank / ranks_per_node;
}

// What one more replica of `expert` takes off above the limit on the ranks that hold it.
int64_t Placer::relief(int expert) const {
  const int64_t fall = share(expert) - share_of(expert, count_[expert] + 1);
  int64_t gain = 0;
  for (int r : where_[expert]) gain += excess(load_[r]) - excess(load_[r] - fall);
  return gain;
}

// What one replica less of `expert` adds above the limit on the ranks that hold it, but for one of them.
int64_t Placer::burden(int expert, int but) const {
  const int64_t rise = share_of(expert, count_[expert] - 1) - share(expert);
  int64_t loss = 0;
  for (int r : where_[expert])
    if (r != but) loss += excess(load_[r] + rise) - excess(load_[r]);
  return loss;
}

// On the slot's own rank.
int64_t Placer::gain_on_rank(int slot, int expert) const {
  const int64_t load = load_[rank_of(slot)];
  return excess(load) - excess(load - share(slots_[slot]) + share_of(expert, count_[expert] + 1));
}

// relief: of `expert`. Ranks with other replicas of what the slot holds get more of it.
int64_t Placer::gain_of_replica(int slot, int expert, int64_t relief) const {
  const int old = slots_[slot];
  const int64_t rise = share_of(old, count_[old] - 1) - share(old);
  const int64_t fall = share(expert) - share_of(expert, count_[expert] + 1);
  int64_t gain = gain_on_rank(slot, expert) + relief;
  for (int r : where_[old]) {
    if (r == rank_of(slot)) continue;
    const int64_t load = holds(r, expert) ? load_[r] - fall : load_[r];
    gain += excess(load) - excess(load + rise);
  }
  return gain;
}

int64_t Placer::gain_of_swap(int slot, int other) const {
  const int a = rank_of(slot), b = rank_of(other);
  const int64_t d = share(slots_[slot]) - share(slots_[other]);
  return excess(load_[a]) - excess(load_[a] - d) + excess(load_[b]) - excess(load_[b] + d);
}

// Away from the fullest ranks; from all above the limit where those cannot give.
Placer::Move Placer::best_move(int64_t below) {
  std::vector<int> above;
  for (int r = 0; r < shape_.num_ranks; ++r)
    if (load_[r] > limit_) above.push_back(r);
  std::stable_sort(above.begin(), above.end(), [&](int a, int b) { return load_[a] > load_[b]; });
  const std::vector<int> fullest(above.begin(), above.begin() + std::min(above.size(), kFullest));
  const Move best = best_move_from(fullest, below);
  return best.slot < 0 && above.size() > kFullest ? best_move_from(above, below) : best;
}

// below: only moves that fetch less than this. Per expert fetched the most gain; more than none for none beats all.
// Most moves are turned down by what they gain at most, which takes no loop over replicas: as if no rank had replicas
// of both experts, plus what such ranks can make of it.
Placer::Move Placer::best_move_from(const std::vector<int>& givers, int64_t below) {
  Move best;
  best.fetched = 1;
  const auto beats = [&](int64_t gain, int fetched) {
    if (gain <= 0 || fetched >= below) return false;
    const bool free = fetched <= 0, was_free = best.fetched <= 0;
    return free != was_free ? free : free ? gain > best.gain : gain * best.fetched > best.gain * fetched;
  };
  std::vector<unsigned char> gives(shape_.num_ranks);
  for (int r : givers) gives[r] = 1;
  std::vector<std::pair<int, int64_t>> hot;  // experts of the givers, whose replicas alone help, and their relief
  for (int e = 0; e < shape_.num_experts; ++e)
    if (std::any_of(where_[e].begin(), where_[e].end(), [&](int r) { return gives[r]; }))
      hot.emplace_back(e, relief(e));
  for (int i = 0; i < shape_.num_slots; ++i) {
    const int old = slots_[i];
    if (count_[old] < 2) continue;
    const int64_t on = burden(old, rank_of(i)), rise = share_of(old, count_[old] - 1) - share(old);
    for (const auto& [e, off] : hot) {
      if (!may_host(i, e)) continue;
      ++steps_;
      const int fetches = fetched(rank_of(i), old, e), both = std::min(count_[old] - 1, count_[e]);
      const int64_t fall = share(e) - share_of(e, count_[e] + 1);
      if (!beats(gain_on_rank(i, e) + off - on + both * std::min(rise, fall), fetches)) continue;
      const int64_t gain = gain_of_replica(i, e, off);
      if (beats(gain, fetches)) best = {gain, fetches, i, -1, e};
    }
  }
  const int node = shape_.num_groups ? shape_.num_ranks / shape_.num_nodes : shape_.num_ranks;
  for (int i = 0; i < shape_.num_slots; ++i) size_[i] = share(slots_[i]);
  for (int i = 0; i < shape_.num_slots; ++i) {
    const int a = rank_of(i), x = slots_[i], first = a / node * node;
    if (!gives[a]) continue;
    const int64_t over = excess(load_[a]);
    for (int b = first; b < first + node; ++b) {
      if (holds(b, x)) continue;  // as the giver does
      for (int j = b * per_rank_; j < (b + 1) * per_rank_; ++j) {
        const int64_t d = size_[i] - size_[j];
        if (d <= 0 || holds(a, slots_[j])) continue;  // nothing is gained, or there already
        ++steps_;
        const int fetches = fetched(a, x, slots_[j]) + fetched(b, slots_[j], x);
        if (!beats(std::min(d, over), fetches)) continue;
        const int64_t gain = gain_of_swap(i, j);
        if (beats(gain, fetches)) best = {gain, fetches, i, j, -1};
      }
    }
  }
  return best;
}

// The best way back for the expert fetched to a slot: an expert that the rank had returns, and what is gained (or lost)
// above the limit is least bad.
Placer::Move Placer::way_back(int slot) {
  const int a = rank_of(slot), x = slots_[slot];
  Move best;
  const auto offer = [&](int64_t gain, int fetched, int other, int expert) {
    ++steps_;
    if (fetched < 0 && (best.slot < 0 || gain > best.gain)) best = {gain, fetched, slot, other, expert};
  };
  for (int k = a * per_rank_; k < (a + 1) * per_rank_; ++k) {
    const int y = first_slots_[k];
    if (!may_host(slot, y)) continue;
    if (count_[x] > 1) offer(gain_of_replica(slot, y, relief(y)), -1, -1, y);
    for (int b : where_[y]) {
      const int j = int(std::find(&slots_[b * per_rank_], &slots_[b * per_rank_] + per_rank_, y) - slots_.data());
      if (may_host(j, x)) offer(gain_of_swap(slot, j), fetched(a, x, y) + fetched(b, y, x), j, -1);
    }
  }
  return best;
}

// Greedy steps until all ranks are at the limit, nothing helps, the budget is spent or no more than `left` may be
// fetched; what was. lowest: where the fullest rank has least on the way, which need not be its end, for a step is
// chosen by all that stands above the limit.
int64_t Placer::lower(int64_t left, State* lowest) {
  int64_t spent = 0, least = top();
  for (;;) {
    if (steps_ > budget_) return spent;
    const Move move = best_move(left - spent + 1);
    if (move.slot < 0) return spent;
    apply(move);
    spent += move.fetched;
    if (lowest && top() < least) {
      least = top();
      *lowest = {slots_, count_, share_, load_, has_};
    }
  }
}

// Every fetched expert goes back once; where the steps that this needs then fetch less in all, it stays so.
int64_t Placer::reconsider(int64_t spent) {
  for (int slot = 0; slot < shape_.num_slots && steps_ <= budget_; ++slot) {
    if (had_[size_t(rank_of(slot)) * shape_.num_experts + slots_[slot]]) continue;
    const Move back = way_back(slot);
    if (back.slot < 0) continue;
    const State before{slots_, count_, share_, load_, has_};
    apply(back);
    const int64_t now = spent + back.fetched, then = now + lower(spent - 1 - now);
    if (then < spent && *std::max_element(load_.begin(), load_.end()) <= limit_)
      spent = then;
    else {
      restore(before);
      index_ranks();
    }
  }
  return spent;
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
  set_count(old, count_[old] - 1);
  set_count(m.expert, count_[m.expert] + 1);
  for (int e : {old, m.expert})
    for (int r : where_[e]) load_[r] += share(e);
}

// A fresh placement that ends far above what none beats: the steps of an improvement, where any slot may change,
// towards several limits, and levelled again.
void Placer::polish(const Marks& m, int num_nodes) {
  const int ranks = shape_.num_ranks / num_nodes;
  State best{slots_, count_, share_, load_, has_};
  had_.assign(has_.size(), 0);
  for (int64_t part : kPolish) {
    int64_t lowest = *std::max_element(load_.begin(), load_.end());
    if (lowest <= m.far) return;
    index_ranks();
    limit_ = m.floor + m.floor / part;
    steps_ = 0;
    budget_ = kPolishSteps;
    lower(0);
    for (int n = 0; n < num_nodes; ++n) refine(n * ranks, ranks, m.good);
    if (*std::max_element(load_.begin(), load_.end()) < lowest)
      best = {slots_, count_, share_, load_, has_};
    else
      restore(best);
  }
}

// Steps from the current placement, or where these stick, steps back from a fresh one under the names that fit best.
void Placer::improve(const int64_t* load, const int32_t* fresh, int64_t target_ppm, int64_t max_moves,
                     int32_t* phy2log) {
  std::copy(load, load + shape_.num_experts, weight_.begin());
  adopt(fresh);
  const int64_t reachable = top();
  adopt(phy2log);
  had_ = has_;
  first_slots_ = slots_;
  const int64_t mean = std::accumulate(weight_.begin(), weight_.end(), int64_t(0)) / shape_.num_ranks, before = top();
  limit_ = std::max(mean + mean * target_ppm / kMillion, reachable + mean * kNearFreshPpm / kMillion);
  if (before <= limit_) return;
  const auto take_back = [&](int64_t spent) {
    for (int64_t last = spent + 1; spent < last;) {
      last = spent;
      spent = reconsider(spent);
    }
    return spent;
  };
  steps_ = 0;
  budget_ = kSteps;
  State stuck{slots_, count_, share_, load_, has_};
  const int64_t spent = lower(max_moves, &stuck);
  if (top() <= limit_) {
    take_back(spent);
  } else {
    adopt(renamed(fresh).data());
    steps_ = 0;
    if (take_back(fetched_in_all()) > max_moves) {
      restore(stuck);
      if (top() >= before) return;
    }
  }
  settle(phy2log);
}

// What a rank had at first stays in its slots; the rest fills the others in order.
void Placer::settle(int32_t* phy2log) const {
  for (int begin = 0; begin < shape_.num_slots; begin += per_rank_) {
    const auto old = first_slots_.begin() + begin, now = slots_.begin() + begin;
    auto fresh = now;
    for (int i = 0; i < per_rank_; ++i) {
      if (std::find(now, now + per_rank_, old[i]) != now + per_rank_) {
        phy2log[begin + i] = old[i];
        continue;
      }
      while (std::find(old, old + per_rank_, *fresh) != old + per_rank_) ++fresh;
      phy2log[begin + i] = *fresh++;
    }
  }
}

}  // namespace hep::balance
