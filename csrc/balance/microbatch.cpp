// The planning role on one lane of a host: what a caller gives is checked, and sums run on wide registers.
#include "balance/microbatch.h"

#include <algorithm>
#include <stdexcept>
#include <string>

#include "balance/one_lane.h"
#include "common/macros.h"
#include "roles/plan_clones.h"

namespace hep::balance {
namespace {

constexpr int64_t kMillion = 1'000'000;
// Loads share a word with a rank's number or an expert's, and are multiplied by parts per million.
constexpr int64_t kMaxTokens = int64_t(1) << 40;
constexpr int kMaxSpareSlots = 4096;  // with as many ranks and experts as there may be, a block's memory is below 2^32

// Sums run on 256-bit registers where the machine has them; integers, so the result is the same. Not under
// ThreadSanitizer, which is not there yet when a program asks what the machine has.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && !defined(__SANITIZE_THREAD__)
#define HEP_WIDE __attribute__((target_clones("arch=x86-64-v3", "default")))
#else
#define HEP_WIDE
#endif

void require(bool ok, const char* name, int64_t value, const char* remedy) {
  if (!ok) throw std::invalid_argument(std::string(name) + ": " + std::to_string(value) + " " + remedy);
}

// What is wrong with counts that no planner takes: the first that is negative or too large, or else their sum.
[[noreturn]] void refuse_counts(const int64_t* counts, int R, int E) {
  const std::string remedy = ": give tokens, 0 or more and below 2^40 in all";
  for (int64_t i = 0; i < int64_t(R) * E; ++i)
    if (counts[i] < 0 || counts[i] >= kMaxTokens)
      throw std::invalid_argument("counts[" + std::to_string(i / E) + ", " + std::to_string(i % E) + "] is " +
                                  std::to_string(counts[i]) + remedy);
  int64_t all = 0;  // R * E * 2^40 may not fit: said as soon as it is too large
  for (int64_t i = 0; i < int64_t(R) * E && all < kMaxTokens; ++i) all += counts[i];
  throw std::invalid_argument("counts has " + std::to_string(all) + " tokens or more in all" + remedy);
}

// The largest of key[i] ^ flip among those of at most `limit`, -1 without one. Sixteen running maxima, which are four
// 256-bit registers: the comparisons of a single one would wait for each other.
HEP_WIDE int64_t wide_largest_below(const int64_t* HEP_RESTRICT key, int n, int64_t limit, int64_t flip) {
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

}  // namespace

void MicrobatchShape::validate() const {
  require(num_ranks >= 1 && num_ranks <= CloneKeys::kRankMask, "num_ranks", num_ranks, "must be 1 to 4095");
  require(num_experts >= 1 && num_experts <= CloneKeys::kExpertMask, "num_experts", num_experts,
          "must be 1 to 4194303");
  require(spare_slots >= 0 && spare_slots <= kMaxSpareSlots, "spare_slots", spare_slots, "must be 0 to 4096");
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
  layout_ = CloneLayout::make(shape_, 1, 1);
  memory_.resize(div_up(layout_.bytes, sizeof(Vec16)));
  OneLane lane;
  std::fill_n(CloneTables<OneLane>{lane, shape_, layout_, shared()}.owner(), shape_.num_experts, -1);  // none yet
  log_ = std::make_unique_for_overwrite<CloneFlow[]>(layout_.flow_bytes / sizeof(CloneFlow));
}

// Checks, and fills the tables that the role begins with.
void MicrobatchPlanner::read(const int64_t* counts, const int32_t* owner) {
  const int R = shape_.num_ranks, E = shape_.num_experts;
  OneLane lane;
  const CloneTables<OneLane> t{lane, shape_, layout_, shared()};
  int64_t* const total = t.total();
  int64_t size = 0;  // all bits any count has: negative or huge ones show
  for (int r = 0; r < R; r += 4) size |= add_rows(counts + int64_t(r) * E, std::min(4, R - r), E, r == 0, total);
  bool bad = size < 0 || size >= kMaxTokens;
  int64_t all = 0;
  for (int e = 0; e < E && !bad; ++e) bad = (all += total[e]) >= kMaxTokens;
  if (bad) refuse_counts(counts, R, E);
  if (!std::equal(owner, owner + E, t.owner())) read_owners(t, owner);
}

// They change seldom; a plan looks only whether they have.
void MicrobatchPlanner::read_owners(const CloneTables<OneLane>& t, const int32_t* owner) {
  const int R = shape_.num_ranks, E = shape_.num_experts;
  for (int e = 0; e < E; ++e)
    if (owner[e] < 0 || owner[e] >= R)
      throw std::invalid_argument("owner[" + std::to_string(e) + "] is " + std::to_string(owner[e]) +
                                  ": give the rank of each expert, 0 to " + std::to_string(R - 1));
  int32_t* const first = t.first();
  std::fill(first, first + R + 1, 0);
  for (int e = 0; e < E; ++e) ++first[owner[e] + 1];
  for (int r = 0; r < R; ++r) first[r + 1] += first[r];
  for (int e = 0; e < E; ++e) t.by_owner()[first[owner[e]]++] = e;
  for (int r = R; r > 0; --r) first[r] = first[r - 1];
  first[0] = 0;
  std::copy(owner, owner + E, t.owner());
}

MicrobatchResult MicrobatchPlanner::plan(const int64_t* counts, const int32_t* owner, int32_t* slot_expert,
                                         int64_t* slot_tokens) {
  read(counts, owner);
  OneLane lane;
  PlanClonesRole<OneLane> role(lane, shape_, layout_, shared(), log_.get());
  const ClonePlan made = role.run();
  role.store(slot_expert, slot_tokens);
  return {made.copies, made.max_cost_before, made.max_cost, made.target};
}

}  // namespace hep::balance

namespace hep {

int64_t KeyMath<balance::OneLane>::largest_below(const int64_t* key, int n, int64_t limit, int64_t flip) {
  return balance::wide_largest_below(key, n, limit, flip);
}

}  // namespace hep
