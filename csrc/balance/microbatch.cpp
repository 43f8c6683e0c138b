// Two constructions, the better kept, and a third when both miss. Alias (after Walker, Vose): fill the most idle rank
// to the target from the hottest expert of the most loaded rank, which may itself become idle; each clone settles one
// rank for good. Best fit: move no more than the excess, to the tightest place that holds it. Alias wins where single
// experts are large, best fit where a rank has many small ones. Both spend the large experts of the fullest rank first;
// about one load in a hundred then lacks a large one at the end, and the third rule, the largest expert of any
// overloaded rank, levels it. Where even that misses, mostly because no plan exists (hybrid_ep/balance/bounds.py), it
// levels to more than the target, as little as bisection finds, and search.cpp has the last word.
#include "balance/microbatch.h"

#include <algorithm>
#include <limits>
#include <stdexcept>
#include <string>

#include "common/macros.h"

namespace hep::balance {
namespace {

constexpr int64_t kMillion = 1'000'000;
constexpr int kRankBits = 12;
constexpr int64_t kRankMask = (1 << kRankBits) - 1;
constexpr int kAimRounds = 8;
constexpr int64_t kNever = std::numeric_limits<int64_t>::max();
// Loads share a word with a rank number, and are multiplied by parts per million.
constexpr int64_t kMaxTokens = int64_t(1) << 40;

// Sums run on 256-bit registers where the machine has them; integers, so the result is the same.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define HEP_WIDE __attribute__((target_clones("arch=x86-64-v3", "default")))
#else
#define HEP_WIDE
#endif

void require(bool ok, const char* name, int64_t value, const char* remedy) {
  if (!ok) throw std::invalid_argument(std::string(name) + ": " + std::to_string(value) + " " + remedy);
}

// The largest of key[i] ^ flip among those of at most `limit`, -1 without one. Sixteen running maxima, which are four
// 256-bit registers: the comparisons of a single one would wait for each other.
HEP_WIDE int64_t largest_below(const int64_t* HEP_RESTRICT key, int n, int64_t limit, int64_t flip) {
  constexpr int kLanes = 16;
  int64_t best[kLanes];
  std::fill(best, best + kLanes, -1);
  int i = 0;
  for (; i + kLanes <= n; i += kLanes)
    for (int j = 0; j < kLanes; ++j) {
      const int64_t k = key[i + j] <= limit ? key[i + j] ^ flip : -1;
      best[j] = k > best[j] ? k : best[j];
    }
  for (; i < n; ++i) {
    const int64_t k = key[i] <= limit ? key[i] ^ flip : -1;
    best[0] = k > best[0] ? k : best[0];
  }
  return *std::max_element(best, best + kLanes);
}

// total (+)= up to four rows; returns the union of their bits. Four at a time, because the sums are memory-bound.
HEP_WIDE int64_t add_rows(const int64_t* HEP_RESTRICT rows, int num_rows, int E, bool first,
                          int64_t* HEP_RESTRICT total) {
  int64_t bits = 0;
  if (first) std::fill(total, total + E, 0);
  if (num_rows == 4) {
    const int64_t *b = rows + E, *c = b + E, *d = c + E;
    for (int e = 0; e < E; ++e) {
      bits |= rows[e] | b[e] | c[e] | d[e];
      total[e] += (rows[e] + b[e]) + (c[e] + d[e]);
    }
    return bits;
  }
  for (int i = 0; i < num_rows; ++i)
    for (int e = 0; e < E; ++e) {
      bits |= rows[int64_t(i) * E + e];
      total[e] += rows[int64_t(i) * E + e];
    }
  return bits;
}

int64_t largest(const int64_t* key, int n) {
  return largest_below(key, n, kNever, 0);
}

// The smallest of non-negative keys: the largest of their complements, which are negative, lifted above -1.
int64_t smallest(const int64_t* key, int n) {
  return kNever - largest_below(key, n, kNever, kNever);
}

}  // namespace

void MicrobatchShape::validate() const {
  require(num_ranks >= 1 && num_ranks <= kRankMask, "num_ranks", num_ranks, "must be 1 to 4095");
  require(num_experts >= 1, "num_experts", num_experts, "must be at least 1");
  require(spare_slots >= 0, "spare_slots", spare_slots, "must not be negative");
  require(num_nodes >= 1 && num_ranks % num_nodes == 0, "num_nodes", num_nodes, "must divide num_ranks");
  require(epsilon_ppm >= 0 && epsilon_ppm <= kMillion, "epsilon", epsilon_ppm, "must be 0 to 1 (here in ppm)");
  require(skip_below_ppm >= 0, "skip_below", skip_below_ppm, "must not be negative (here in ppm)");
  require(min_chunk >= 1, "min_chunk", min_chunk, "must be at least 1 token");
  require(instance_cost >= 0 && instance_cost <= kMaxTokens / num_experts, "instance_cost", instance_cost,
          "must be 0 or a number of tokens");
  require(tile >= 1 && tile <= kMaxTokens / num_experts, "tile", tile, "must be at least 1 token");
  require(search_nodes >= 0, "search_nodes", search_nodes, "must be 0 (no search) or a number of nodes");
  require(fan_out >= 0, "fan_out", fan_out, "must be 0 (no limit) or the most clones a rank pushes");
}

MicrobatchPlanner::MicrobatchPlanner(const MicrobatchShape& shape) : shape_(shape) {
  shape_.validate();
  const int R = shape_.num_ranks, E = shape_.num_experts;
  ranks_per_node_ = R / shape_.num_nodes;
  // With nothing to spare an exact plan needs at most R - 1 clones (a tree over the ranks).
  max_copies_ = shape_.epsilon_ppm == 0 ? R - 1 : R * shape_.spare_slots;
  total_.resize(E);
  by_owner_.resize(E);
  load_.resize(R);
  first_.resize(R + 1);
  for (Draft* d : {&alias_, &best_fit_, &retry_, &spare_}) {
    d->load.resize(R);
    d->donor_key.resize(R);
    d->receiver_key.resize(R);
    d->used.resize(R);
    d->pushed.resize(R);
    d->left.resize(E);
    d->clones.reserve(std::max(max_copies_, R));
  }
}

// What an expert with that many tokens costs its rank, in tokens.
int64_t MicrobatchPlanner::cost(int64_t tokens) const {
  if (tokens <= 0) return 0;
  const int64_t t = shape_.tile;
  return shape_.instance_cost + (t == 1 ? tokens : (tokens + t - 1) / t * t);
}

void MicrobatchPlanner::read(const int64_t* counts, const int32_t* owner) {
  const int R = shape_.num_ranks, E = shape_.num_experts;
  int64_t size = 0;  // all bits any count has: negative or huge ones show
  for (int r = 0; r < R; r += 4)
    size |= add_rows(counts + int64_t(r) * E, std::min(4, R - r), E, r == 0, total_.data());
  require(size >= 0, "counts", size, "has a negative count");
  int64_t all = 0;
  for (int e = 0; e < E; ++e) all += total_[e];
  require(size < kMaxTokens && all >= 0 && all < kMaxTokens, "counts", all, "tokens in all, must be below 2^40");
  std::fill(first_.begin(), first_.end(), 0);
  for (int e = 0; e < E; ++e) {
    require(owner[e] >= 0 && owner[e] < R, "owner", owner[e], "must be a rank");
    ++first_[owner[e] + 1];
  }
  for (int r = 0; r < R; ++r) first_[r + 1] += first_[r];
  std::fill(load_.begin(), load_.end(), 0);
  for (int e = 0; e < E; ++e) {
    by_owner_[first_[owner[e]]++] = e;
    load_[owner[e]] += cost(total_[e]);
  }
  for (int r = R; r > 0; --r) first_[r] = first_[r - 1];
  first_[0] = 0;

  // The fullest domain sets the pace: its mean, with the fixed cost of the clones that level it.
  const int domain = shape_.within_node ? ranks_per_node_ : R;
  mean_ = target_ = 0;
  for (int base = 0; base < R; base += domain) {
    int64_t sum = 0;
    for (int r = base; r < base + domain; ++r) sum += load_[r];
    mean_ = std::max(mean_, (sum + domain - 1) / domain);
    target_ = std::max(target_, (sum + shape_.instance_cost * (domain - 1) + domain - 1) / domain);
  }
  exact_ = target_;
  target_ += target_ * shape_.epsilon_ppm / kMillion;
}

// Whole tiles of tokens that still fit below the target on a rank, 0 without a free slot.
int64_t MicrobatchPlanner::room(const Draft& d, int rank) const {
  if (d.used[rank] == shape_.spare_slots) return 0;
  const int64_t slack = d.aim - d.load[rank] - shape_.instance_cost;
  if (slack < std::max(shape_.min_chunk, shape_.tile)) return 0;
  return shape_.tile == 1 ? slack : slack / shape_.tile * shape_.tile;
}

void MicrobatchPlanner::refresh(Draft& d, int rank) const {
  d.donor_key[rank] = (d.load[rank] << kRankBits) | (kRankMask - rank);
  d.receiver_key[rank] = room(d, rank) > 0 ? (d.load[rank] << kRankBits) | rank : kNever;
}

int MicrobatchPlanner::hottest(const Draft& d, int donor) const {
  int best = -1;
  for (int i = first_[donor]; i < first_[donor + 1]; ++i)
    if (best < 0 || d.left[by_owner_[i]] > d.left[best]) best = by_owner_[i];
  return best;
}

int MicrobatchPlanner::least_loaded(const Draft& d, int donor) const {
  const int base = shape_.within_node ? donor / ranks_per_node_ * ranks_per_node_ : 0;
  const int64_t key = smallest(&d.receiver_key[base], shape_.within_node ? ranks_per_node_ : shape_.num_ranks);
  return key == kNever ? -1 : int(key & kRankMask);
}

// The fullest rank that still takes `want` tokens, the emptiest if none does.
int MicrobatchPlanner::smallest_cover(const Draft& d, int donor, int64_t want) const {
  const int base = shape_.within_node ? donor / ranks_per_node_ * ranks_per_node_ : 0;
  const int end = base + (shape_.within_node ? ranks_per_node_ : shape_.num_ranks);
  // room >= want, said of the load: whole tiles of room cover `want` when they cover it rounded up.
  const int64_t limit = d.aim - cost(want);
  const int64_t keys = limit < 0 ? -1 : (limit << kRankBits) | kRankMask;  // below it: keys of at most that load
  const int64_t best = largest_below(&d.receiver_key[base], end - base, keys, kRankMask);
  return best >= 0 ? int(kRankMask - (best & kRankMask)) : least_loaded(d, donor);
}

// One clone away from `donor`; false when there is none to make.
bool MicrobatchPlanner::step(Draft& d, int donor, Rule rule) const {
  if (shape_.fan_out && d.pushed[donor] >= shape_.fan_out) return false;
  const int expert = hottest(d, donor);
  if (expert < 0 || d.left[expert] < shape_.min_chunk) return false;
  int64_t want = d.left[expert];
  if (rule == Rule::kBestFit) {
    const int64_t excess = std::max(d.load[donor] - d.aim, shape_.min_chunk), t = shape_.tile;
    want = std::min(want, (excess + t - 1) / t * t);
  }
  const int to = rule == Rule::kBestFit ? smallest_cover(d, donor, want) : least_loaded(d, donor);
  if (to < 0 || to == donor) return false;
  const int64_t piece = std::min(want, room(d, to));
  d.clones.push_back({expert, to, d.used[to]++, piece});
  ++d.pushed[donor];
  d.load[to] += cost(piece);
  d.load[donor] -= cost(d.left[expert]) - cost(d.left[expert] - piece);
  d.left[expert] -= piece;
  refresh(d, to);
  refresh(d, donor);
  return true;
}

// The rank above the aim that gives next, -1 when there is none.
int MicrobatchPlanner::next_donor(const Draft& d, Rule rule) const {
  if (rule != Rule::kLargest) {
    const int64_t top = largest(d.donor_key.data(), shape_.num_ranks);
    return top < 0 || (top >> kRankBits) <= d.aim ? -1 : int(kRankMask - (top & kRankMask));
  }
  int best = -1;
  int64_t most = -1;
  for (int r = 0; r < shape_.num_ranks; ++r) {
    if (d.donor_key[r] < 0 || d.load[r] <= d.aim) continue;
    const int expert = hottest(d, r);
    if (expert >= 0 && d.left[expert] > most) {
      best = r;
      most = d.left[expert];
    }
  }
  return best;
}

void MicrobatchPlanner::construct(Draft& d, Rule rule, int64_t aim) const {
  d.load = load_;
  d.left = total_;
  d.aim = aim;
  std::fill(d.used.begin(), d.used.end(), 0);
  std::fill(d.pushed.begin(), d.pushed.end(), 0);
  d.clones.clear();
  for (int r = 0; r < shape_.num_ranks; ++r) refresh(d, r);
  while (int(d.clones.size()) < max_copies_) {
    const int donor = next_donor(d, rule);
    if (donor < 0) break;
    if (!step(d, donor, rule)) d.donor_key[donor] = -1;  // nothing more to give: out of the race
  }
  d.max_cost = *std::max_element(d.load.begin(), d.load.end());
}

// Levelling to less than is allowed gives other constructions: five aims, from the target down to epsilon 0. After
// them more than is allowed, between the target and the best so far.
void MicrobatchPlanner::retry(Draft& d) {
  const int64_t slack = target_ - exact_;
  construct(d, Rule::kLargest, target_);
  for (int part = 3; part >= 0 && slack && d.max_cost > target_; --part) {
    construct(spare_, Rule::kLargest, exact_ + slack * part / 4);
    if (spare_.max_cost < d.max_cost) std::swap(d, spare_);
  }
  int64_t low = target_;  // where levelling failed; it needs some slack, so it succeeds above some aim
  for (int round = 0; round < kAimRounds && d.max_cost > low + 1; ++round) {
    const int64_t aim = low + (d.max_cost - low) / 2;
    construct(spare_, Rule::kLargest, aim);
    if (spare_.max_cost > aim) low = aim;
    if (spare_.max_cost < d.max_cost) std::swap(d, spare_);
  }
}

MicrobatchResult MicrobatchPlanner::plan(const int64_t* counts, const int32_t* owner, int32_t* slot_expert,
                                         int64_t* slot_tokens) {
  const int R = shape_.num_ranks, S = shape_.spare_slots;
  read(counts, owner);
  std::fill(slot_expert, slot_expert + R * S, -1);
  std::fill(slot_tokens, slot_tokens + R * S, 0);
  MicrobatchResult result;
  result.target = target_;
  result.max_cost_before = result.max_cost = *std::max_element(load_.begin(), load_.end());
  if (!S || result.max_cost_before <= mean_ + mean_ * shape_.skip_below_ppm / kMillion) return result;

  const Draft* best = nullptr;
  // Below the target all is equal, and fewer clones are better.
  const auto offer = [&](const Draft& d) {
    const auto rank = [&](const Draft& x) { return std::pair(std::max(x.max_cost, target_), x.clones.size()); };
    if (!best || rank(d) < rank(*best)) best = &d;
  };
  if (shape_.strategy != Strategy::kBestFit) {
    construct(alias_, Rule::kAlias, target_);
    offer(alias_);
  }
  if (shape_.strategy != Strategy::kAlias) {
    construct(best_fit_, Rule::kBestFit, target_);
    offer(best_fit_);
  }
  if (shape_.strategy == Strategy::kBest && best->max_cost > target_) {
    retry(retry_);
    offer(retry_);
  }
  if (shape_.strategy == Strategy::kBest && best->max_cost > target_ && searchable()) {
    search(spare_, owner);
    offer(spare_);
  }
  if (best->max_cost >= result.max_cost_before) return result;
  result.max_cost = best->max_cost;
  result.num_copies = int(best->clones.size());
  for (const Clone& c : best->clones) {
    slot_expert[c.rank * S + c.slot] = c.expert;
    slot_tokens[c.rank * S + c.slot] = c.tokens;
  }
  return result;
}

}  // namespace hep::balance
