// A fresh placement: replicas where a replica's share is largest (optimal for the fullest slot), the largest share
// first to the emptiest rank that lacks the expert, then swaps with the fullest rank until none helps. Where ranks
// do not come out level, hot experts got more replicas than ranks without them can take: again with only those that
// bring shares below a cap, and the slots left over for small experts, which fit anywhere. The mark to reach is
// what the plain greedy of EPLB reaches, which may put two replicas of an expert on one rank; where nothing else
// does, its placement is taken with the second replicas exchanged.
#include "balance/placement.h"

#include <algorithm>
#include <array>
#include <iterator>
#include <limits>
#include <numeric>

namespace hep::balance {
namespace {

constexpr int64_t kLevel = 2'500;  // a 2,500th above the mean is level: no more swaps
constexpr size_t kUsualCaps = 3;
constexpr int kShakes = 400, kKicks = 3;
constexpr int64_t kFar = 100;     // a hundredth above what no placement beats is worth more work
constexpr int64_t kGood = 1'250;  // a 1,250th is good enough: no other numbers of replicas

}  // namespace

Placer::Placer(const PlacementShape& shape)
    : shape_(shape),
      per_rank_(shape.num_slots / shape.num_ranks),
      weight_(shape.num_experts),
      share_(shape.num_experts),
      load_(shape.num_ranks),
      size_(shape.num_slots),
      count_(shape.num_experts),
      slots_(shape.num_slots),
      used_(shape.num_ranks),
      has_(size_t(shape.num_ranks) * shape.num_experts),
      where_(shape.num_experts) {}

void Placer::put(int rank, int slot, int expert) {
  slots_[slot] = expert;
  has_[size_t(rank) * shape_.num_experts + expert] = 1;
  load_[rank] += share(expert);
}

// Experts of two slots on different ranks change places.
void Placer::swap(int slot, int other) {
  const int x = slots_[slot], y = slots_[other], a = rank_of(slot), b = rank_of(other);
  has_[size_t(a) * shape_.num_experts + x] = has_[size_t(b) * shape_.num_experts + y] = 0;
  load_[a] -= share(x);
  load_[b] -= share(y);
  put(a, slot, y);
  put(b, other, x);
}

// One more replica for the largest share; of equal ones the expert with fewer, then the lower number. With a cap those
// above it grow first, then second replicas of small ones (`smallest`: of these the smallest share first), then all.
void Placer::replicate(const std::vector<int>& experts, int num_slots, int max_replicas, int64_t cap, bool smallest) {
  for (int e : experts) set_count(e, 1);
  enum { kAll, kAbove, kSmall } phase = cap ? kAbove : kAll;
  const auto may_grow = [&](int e) {
    return count_[e] < max_replicas && (phase == kAll || (phase == kAbove && share(e) > cap) ||
                                        (phase == kSmall && count_[e] == 1 && share(e) <= cap / 2));
  };
  const auto after = [&](int a, int b) {
    if (share(a) != share(b)) return (share(a) < share(b)) != (smallest && phase == kSmall);
    return count_[a] != count_[b] ? count_[a] > count_[b] : a > b;
  };
  heap_.clear();
  for (int n = num_slots - int(experts.size()); n > 0;) {
    if (heap_.empty()) {
      std::copy_if(experts.begin(), experts.end(), std::back_inserter(heap_), may_grow);
      std::make_heap(heap_.begin(), heap_.end(), after);
      if (heap_.empty()) {
        phase = phase == kAbove ? kSmall : kAll;
        continue;
      }
    }
    std::pop_heap(heap_.begin(), heap_.end(), after);
    const int e = heap_.back();
    set_count(e, count_[e] + 1);
    --n;
    if (may_grow(e))
      std::push_heap(heap_.begin(), heap_.end(), after);
    else
      heap_.pop_back();
  }
}

// No rank with a free slot lacks the expert: a full one that lacks it hands one of its own over.
void Placer::make_room(int expert, int first_rank, int num_ranks) {
  int open = -1, full = -1;
  for (int r = first_rank; r < first_rank + num_ranks; ++r) {
    int& best = used_[r] < per_rank_ ? open : full;
    if ((used_[r] == per_rank_ && holds(r, expert)) || (best >= 0 && load_[r] >= load_[best])) continue;
    best = r;
  }
  int give = -1;  // exists: the full rank holds more experts than the open one
  for (int i = full * per_rank_; i < (full + 1) * per_rank_; ++i)
    if (!holds(open, slots_[i]) && (give < 0 || share(slots_[i]) < share(slots_[give]))) give = i;
  const int moved = slots_[give];
  has_[size_t(full) * shape_.num_experts + moved] = 0;
  load_[full] -= share(moved);
  put(open, open * per_rank_ + used_[open]++, moved);
  put(full, give, expert);
}

// The largest share first to the emptiest rank with a free slot; `twice`: even if it holds the expert already. Returns
// whether one does.
bool Placer::pack(const std::vector<int>& experts, int first_rank, int num_ranks, bool twice) {
  order_.clear();
  for (int e : experts) order_.emplace_back(-share(e), e);
  std::sort(order_.begin(), order_.end());
  const auto after = [&](int a, int b) { return load_[a] != load_[b] ? load_[a] > load_[b] : a > b; };
  heap_.resize(num_ranks);
  std::iota(heap_.begin(), heap_.end(), first_rank);
  bool twins = false;
  for (const auto& [_, e] : order_)
    for (int copy = 0; copy < count_[e]; ++copy) {
      auto end = heap_.end();  // behind it the ranks that hold the expert, emptier ones last
      while (end != heap_.begin() && !twice && holds(heap_.front(), e)) std::pop_heap(heap_.begin(), end--, after);
      if (end == heap_.begin()) {
        make_room(e, first_rank, num_ranks);
        heap_.clear();
        for (int r = first_rank; r < first_rank + num_ranks; ++r)
          if (used_[r] < per_rank_) heap_.push_back(r);
        std::make_heap(heap_.begin(), heap_.end(), after);
        continue;
      }
      std::pop_heap(heap_.begin(), end, after);
      const int rank = *--end;
      twins |= holds(rank, e);
      put(rank, rank * per_rank_ + used_[rank]++, e);
      if (used_[rank] == per_rank_) {
        *end = heap_.back();
        heap_.pop_back();
        if (end == heap_.end()) continue;
      }
      while (end != heap_.end()) std::push_heap(heap_.begin(), ++end, after);
    }
  return twins;
}

// The swap of the fullest rank with one of a load under `below` that leaves the lowest pair, or the first good enough.
bool Placer::swap_down(int hot, int first_rank, int num_ranks, int64_t below, int64_t good) {
  const int last_rank = first_rank + num_ranks;
  int64_t lowest = load_[hot];
  int from = -1, to = -1;
  for (int i = hot * per_rank_; i < (hot + 1) * per_rank_ && lowest > good; ++i)
    for (int r = first_rank; r < last_rank && lowest > good; ++r) {
      // Only a share between these two bounds brings the pair below `lowest`.
      const int64_t least = size_[i] - (lowest - load_[r]), most = size_[i] - (load_[hot] - lowest);
      if (load_[r] >= below || least >= most || holds(r, slots_[i])) continue;
      for (int j = r * per_rank_; j < (r + 1) * per_rank_; ++j) {
        if (size_[j] <= least || size_[j] >= most || holds(hot, slots_[j])) continue;
        const int64_t d = size_[i] - size_[j], pair = std::max(load_[hot] - d, load_[r] + d);
        if (pair < lowest) {
          lowest = pair;
          from = i;
          to = j;
        }
      }
    }
  if (from < 0) return false;
  swap(from, to);
  std::swap(size_[from], size_[to]);
  return true;
}

// The fullest of all ranks that a replica of `expert` in place of what `slot` holds would change.
int64_t Placer::fullest_with(int slot, int expert) const {
  const int rank = rank_of(slot), old = slots_[slot];
  const int64_t rise = share_of(old, count_[old] - 1) - share(old);
  const int64_t fall = share(expert) - share_of(expert, count_[expert] + 1);
  int64_t most = load_[rank] - share(old) + share(expert) - fall;
  for (int r : where_[old])
    if (r != rank) most = std::max(most, load_[r] + rise - (holds(r, expert) ? fall : 0));
  for (int r : where_[expert])
    if (!holds(r, old)) most = std::max(most, load_[r] - fall);
  return most;
}

// One more replica of an expert of the fullest rank, at the expense of an expert that keeps another. Most are turned
// down by the slot's own rank or by the fullest of the others that lose the replica.
bool Placer::replica_down(int hot, int first_rank, int num_ranks) {
  index_ranks();
  Move best;
  int64_t lowest = load_[hot];
  for (int i = first_rank * per_rank_; i < (first_rank + num_ranks) * per_rank_; ++i) {
    const int old = slots_[i], rank = rank_of(i);
    if (count_[old] < 2) continue;
    int64_t others = 0;
    for (int r : where_[old])
      if (r != rank) others = std::max(others, load_[r]);
    others += share_of(old, count_[old] - 1) - share(old);
    for (int k = hot * per_rank_; k < (hot + 1) * per_rank_; ++k) {
      const int e = slots_[k];
      if (holds(rank, e)) continue;
      const int64_t next = share_of(e, count_[e] + 1);
      if (load_[rank] - share(old) + next >= lowest || others - (share(e) - next) >= lowest) continue;
      const int64_t most = fullest_with(i, e);
      if (most < lowest) {
        lowest = most;
        best.slot = i;
        best.expert = e;
      }
    }
  }
  if (best.slot < 0) return false;
  apply(best);
  for (int i = first_rank * per_rank_; i < (first_rank + num_ranks) * per_rank_; ++i) size_[i] = share(slots_[i]);
  return true;
}

void Placer::index_ranks() {
  for (auto& ranks : where_) ranks.clear();
  for (int i = 0; i < shape_.num_slots; ++i)
    if (slots_[i] >= 0) where_[slots_[i]].push_back(rank_of(i));
}

// The fullest rank gives until it is down at `good` or nothing helps: swaps first, a different set of replicas where
// swaps end.
void Placer::refine(int first_rank, int num_ranks, int64_t good) {
  const int64_t sum = std::accumulate(&load_[first_rank], &load_[first_rank] + num_ranks, int64_t(0));
  const int64_t mean = sum / num_ranks;
  for (int i = first_rank * per_rank_; i < (first_rank + num_ranks) * per_rank_; ++i) size_[i] = share(slots_[i]);
  for (int round = 0; round < 4 * num_ranks; ++round) {
    const int hot = int(std::max_element(&load_[first_rank], &load_[first_rank] + num_ranks) - load_.data());
    if (load_[hot] <= good) return;
    if (!swap_down(hot, first_rank, num_ranks, mean, good) && !replica_down(hot, first_rank, num_ranks) &&
        !swap_down(hot, first_rank, num_ranks, load_[hot], good))
      return;
  }
}

int64_t Placer::fullest(int first_rank, int num_ranks) const {
  return *std::max_element(&load_[first_rank], &load_[first_rank] + num_ranks);
}

// EPLB's greedy: returns whether a rank holds an expert twice.
bool Placer::greedy(const std::vector<int>& experts, int first_rank, int num_ranks) {
  clear(first_rank, num_ranks);
  replicate(experts, num_ranks * per_rank_, std::numeric_limits<int>::max(), 0);
  return pack(experts, first_rank, num_ranks, true);
}

// Every second replica on a rank changes places with the expert that leaves the lowest pair; false if one finds none.
bool Placer::part_twins(int first_rank, int num_ranks) {
  const int begin = first_rank * per_rank_, end = begin + num_ranks * per_rank_;
  for (int i = begin; i < end; ++i) {
    const int rank = rank_of(i), twin = slots_[i];
    if (std::find(&slots_[rank * per_rank_], &slots_[i], twin) == &slots_[i]) continue;
    int best = -1;
    int64_t lowest = std::numeric_limits<int64_t>::max();
    for (int j = begin; j < end; ++j) {
      if (holds(rank_of(j), twin) || holds(rank, slots_[j])) continue;
      const int64_t d = share(twin) - share(slots_[j]);
      const int64_t pair = std::max(load_[rank] - d, load_[rank_of(j)] + d);
      if (pair < lowest) {
        lowest = pair;
        best = j;
      }
    }
    if (best < 0) return false;
    const int other = rank_of(best), taken = slots_[best];
    swap(i, best);
    const auto has = [&](int r, int e) {
      const auto mine = slots_.begin() + r * per_rank_;
      has_[size_t(r) * shape_.num_experts + e] = std::find(mine, mine + per_rank_, e) != mine + per_rank_;
    };
    has(rank, twin);
    has(other, taken);  // one that was there twice still is
  }
  return true;
}

int64_t Placer::mean_of(const std::vector<int>& experts, int num_ranks) const {
  int64_t sum = 0;
  for (int e : experts) sum += weight_[e];
  return sum / num_ranks;
}

// From the greedy placement, which stands: down to `good` if that can be done without much trouble, else the lowest
// found.
void Placer::spread(const std::vector<int>& experts, int first_rank, int num_ranks, bool twins, const Marks& m) {
  int64_t sum = 0, hottest = 0;
  for (int e : experts) {
    sum += weight_[e];
    hottest = std::max(hottest, weight_[e]);
  }
  const int64_t mean = mean_of(experts, num_ranks);
  int64_t lowest = std::numeric_limits<int64_t>::max();
  State best;
  const auto settled = [&] {
    refine(first_rank, num_ranks, m.good);
    const int64_t now = fullest(first_rank, num_ranks);
    if (now <= m.enough) return true;
    if (now < lowest) {
      lowest = now;
      best = {slots_, count_, share_, load_, has_};
    }
    return false;
  };
  const bool hot = 4 * hottest > sum || hottest > 6 * mean;
  const bool later = hot && twins;  // seldom level: first what mostly is
  if (!later && (!twins || part_twins(first_rank, num_ranks)) && settled()) return;
  // Caps in per cent of the mean rank, 0 for none. The order is for speed: what mostly levels comes first. The last
  // ones are for EPLB's mark alone, and those above the mean for a few experts that fill many ranks.
  const auto caps = hot ? std::array{75, 90, 0, 100, 60, 82, 50, 105, 110, 120, 135}
                        : std::array{0, 75, 90, 100, 60, 82, 50, 105, 110, 120, 135};
  for (size_t i = 0; i < caps.size(); ++i) {
    const int percent = caps[i];
    if (i >= kUsualCaps && lowest <= (percent > 100 ? m.far : m.eplb)) continue;
    if (later && i == kUsualCaps) {
      greedy(experts, first_rank, num_ranks);
      if (part_twins(first_rank, num_ranks) && settled()) return;
    }
    if (!percent && !twins) continue;  // the greedy placement again
    clear(first_rank, num_ranks);
    replicate(experts, num_ranks * per_rank_, num_ranks, mean / 100 * percent);
    pack(experts, first_rank, num_ranks, false);
    if (settled()) return;
  }
  restore(best);
  // One layer in a thousand, with few slots a rank: a few swaps by a fixed rule, and down again.
  uint32_t draw = 1;
  const int begin = first_rank * per_rank_, num_slots = num_ranks * per_rank_;
  const auto any_slot = [&] {
    draw = draw * 1'664'525u + 1'013'904'223u;
    return begin + int((draw >> 8) % uint32_t(num_slots));
  };
  for (int round = 0; round < kShakes && lowest > m.eplb; ++round) {
    for (int kick = 0; kick < kKicks; ++kick) {
      const int i = any_slot(), j = any_slot();
      if (holds(rank_of(i), slots_[j])) continue;
      if (kick == 0 && count_[slots_[i]] > 1) {
        index_ranks();
        apply({0, 1, i, -1, slots_[j]});
      } else if (!holds(rank_of(j), slots_[i]))
        swap(i, j);
    }
    if (settled()) return;
    restore(best);
  }
}

void Placer::restore(const State& s) {
  slots_ = s.slots;
  count_ = s.count;
  share_ = s.share;
  load_ = s.load;
  has_ = s.has;
}

void Placer::clear(int first_rank, int num_ranks) {
  const auto fill = [&](auto& values, int each, int value) {
    std::fill_n(values.begin() + size_t(first_rank) * each, size_t(num_ranks) * each, value);
  };
  fill(has_, shape_.num_experts, 0);
  fill(load_, 1, 0);
  fill(used_, 1, 0);
  fill(slots_, per_rank_, -1);
}

int Placer::compare(const int64_t* load, const int32_t* a, const int32_t* b) const {
  const auto fullest_of = [&](const int32_t* placed) {
    std::vector<int64_t> count(shape_.num_experts);
    for (int i = 0; i < shape_.num_slots; ++i) ++count[placed[i]];
    int64_t most = 0;
    for (int i = 0; i < shape_.num_slots; i += per_rank_) {
      int64_t sum = 0;
      for (int k = i; k < i + per_rank_; ++k) sum += load[placed[k]] / count[placed[k]];
      most = std::max(most, sum);
    }
    return most;
  };
  // A slot's share is off by up to 1/2 from the load's rounding and 1 from the division's, in either placement.
  const int64_t difference = fullest_of(a) - fullest_of(b), rounding = 3 * per_rank_;
  return difference < -rounding ? -1 : difference > rounding ? 1 : 0;
}

void Placer::place(const std::vector<std::vector<int>>& nodes) {
  std::fill(slots_.begin(), slots_.end(), -1);
  const int ranks = shape_.num_ranks / int(nodes.size());
  std::vector<std::pair<int64_t, int>> order;  // the heaviest node first: it sets the pace, the others need no better
  std::vector<bool> twins(nodes.size());
  Marks m;
  for (int n = 0; n < int(nodes.size()); ++n) {
    order.emplace_back(-mean_of(nodes[n], ranks), n);
    twins[n] = greedy(nodes[n], n * ranks, ranks);
    m.eplb = std::max(m.eplb, fullest(n * ranks, ranks));
    m.floor = std::max(m.floor, mean_of(nodes[n], ranks));
    for (int e : nodes[n]) m.floor = std::max(m.floor, share(e));  // no even split has a lower fullest slot
  }
  std::sort(order.begin(), order.end());
  const int64_t pace = -order[0].first;
  m.far = m.floor + m.floor / kFar;
  m.good = std::min(m.eplb, pace + pace / kLevel);
  m.enough = std::min(m.eplb, pace + pace / kGood);
  for (const auto& [_, n] : order) {
    spread(nodes[n], n * ranks, ranks, twins[n], m);
    for (int64_t* mark : {&m.good, &m.enough, &m.eplb}) *mark = std::max(*mark, fullest(n * ranks, ranks));
  }
  polish(m, int(nodes.size()));
  spread_hottest(nodes, m.far);
}

void Placer::fresh(const int64_t* load, int32_t* phy2log) {
  std::copy(load, load + shape_.num_experts, weight_.begin());
  if (shape_.num_groups) {
    const GroupsOfNodes greedy = greedy_groups(), even = even_groups(greedy);
    place(experts_of(greedy));
    if (heaviest(even) < heaviest(greedy)) {
      const State first{slots_, count_, share_, load_, has_};
      const int64_t lowest = fullest(0, shape_.num_ranks);
      place(experts_of(even));
      if (fullest(0, shape_.num_ranks) >= lowest) restore(first);
    }
  } else {
    std::vector<std::vector<int>> all(1, std::vector<int>(shape_.num_experts));
    std::iota(all[0].begin(), all[0].end(), 0);
    place(all);
  }
  std::copy(slots_.begin(), slots_.end(), phy2log);
}

}  // namespace hep::balance
