// What a test world does, and what must come of it: routing decisions of all ranks, operations on them, and a
// reference that looks at every token and every expert, with maps instead of positions.
#pragma once
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "common/numeric.h"
#include "common/world.h"

namespace hep::test {

// splitmix64: a seed is a test case, on every machine.
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed) {}
  uint64_t next() {
    uint64_t z = state_ += 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
  }
  uint32_t below(uint32_t n) { return uint32_t(next() % n); }
  uint32_t between(uint32_t least, uint32_t most) { return least + below(most - least + 1); }
  bool one_in(uint32_t n) { return below(n) == 0; }
  template <class T>
  T of(std::initializer_list<T> choices) {
    return choices.begin()[below(uint32_t(choices.size()))];
  }

 private:
  uint64_t state_;
};

// One routing decision of the group, as the callers state it. Weights are small integers, so sums are exact.
struct RoutingCase {
  bool dense = false;                          // routing_map and probs instead of topk_idx and topk_weights
  std::vector<uint32_t> num_tokens, topk;      // [R]
  std::vector<std::vector<int64_t>> topk_idx;  // [R] -> [T * topk], -1 = dropped; also when dense
  std::vector<std::vector<float>> weights;     // [R] -> [T * topk]
  uint32_t pad_multiple = 1;
  bool pad_empty = false;
  std::vector<std::optional<uint32_t>> budgets;  // [R]
};

// Where a rank's dispatched rows land: in the receive region, or in the caller's tensors, in one of two ways. Of
// combine's rows, where they lie: outside the arena, or there, to be read by every pair where the executor can, or by
// the only pair.
enum class Landed { kAside, kEveryPair, kFirstPair };

// One collective operation. A plan is exchanged when an operation first names it; later ones find it cached.
struct OpCase {
  bool combine = false;
  size_t plan = 0;
  bool permute = true, weights = true, multiply = false, fp32_partials = false;
  uint32_t row_bytes = 16, scale_bytes = 0;  // dispatch
  DType dtype = DType::kBf16;                // combine
  uint32_t hidden = 8;                       // combine
  uint32_t extra_rows = 0;                   // of the permuted output, behind the plan's
  std::vector<int> num_blocks;               // [R]
  std::vector<int> local_blocks;             // [R], for local work; 0: those that feed links do it
  std::vector<Landed> landed;                // [R]
  bool rounds = false;                       // combine: also of numbers whose sums round, in place and by partials
  uint64_t salt = 0;                         // tells the data of operations apart
  bool latency = false;                      // by lines; not a first dispatch whose plan an exchange has made
};

struct WorldCase {
  uint32_t num_nodes = 1, num_local_ranks = 1, num_experts = 1;
  uint32_t chunk_tokens = 4, rail_slots = 2;
  uint64_t recv_capacity = 1 << 20;  // at least 1; a buffer has no more receive rows, though a plan may want more
  std::vector<RoutingCase> plans;
  std::vector<OpCase> ops;
  bool latency = false;         // the buffer has slabs for all tokens
  bool exchange_first = false;  // all plans up front, one exchange right after the other
  std::string executor = "host_checked";
  uint64_t seed = 0;
  double timeout_s = 60;

  uint32_t num_ranks() const { return num_nodes * num_local_ranks; }
  std::string describe() const;
};

// What a routing decision means, the slow and obvious way.
struct Reference {
  struct Token {
    int rank;
    uint32_t index;
  };
  struct Slot {                             // of the permuted rows
    enum Kind { kPair, kPad, kHole } kind;  // hole: its token found no receive row; content is unspecified
    Token token;
    int expert;
  };
  uint32_t num_ranks, num_local_ranks, num_experts;
  std::vector<std::vector<std::map<int, float>>> pairs;  // [R][T] expert -> summed weight, ascending
  std::vector<std::vector<Token>> received;              // [R] receive rows
  std::vector<std::vector<Slot>> permuted;               // [R] permuted rows, within the budget
  std::vector<std::vector<int64_t>> tokens_per_expert, padded_tokens_per_expert;  // [R][experts of a rank]
  std::vector<uint64_t> wanted_rows, dropped_pairs;  // [R] before the capacity; lost to budgets

  Reference(const WorldCase& world, const RoutingCase& routing);
  int rank_of(int expert) const { return expert / int(num_experts / num_ranks); }
  int node_of(int expert) const { return rank_of(expert) / int(num_local_ranks); }
  const std::map<int, float>& pairs_of(Token t) const { return pairs[size_t(t.rank)][t.index]; }
  bool arrives(Token t, int rank) const { return row_.contains({rank, t.rank, t.index}); }
  bool needs_rank(Token t, int rank) const;
  bool needs(Token t, int node) const;        // some expert of the token lives there
  bool computes(Token t, int expert) const {  // the pair found a receive row and a permuted row
    return computed_.contains({expert, t.rank, t.index});
  }
  uint32_t widest() const;  // most pairs that a token of any rank may have

 private:
  std::map<std::tuple<int, int, uint32_t>, uint32_t> row_;       // (rank, token) -> receive row
  std::map<std::tuple<int, int, uint32_t>, uint32_t> computed_;  // (expert, token) -> permuted row
  std::vector<uint32_t> widths_;
};

// Limits of random cases.
struct CaseLimits {
  uint32_t max_nodes = 4, max_local_ranks = 4, max_ranks = 16;
  uint32_t max_tokens = 20, max_blocks = 5, max_ops = 6;
  uint32_t big_rows_one_in = 10;  // cases with rows of several tiles; 0 = none
  std::string executor = "host_checked";
  bool latency = false;  // two of three operations go by lines
};
WorldCase random_case(uint64_t seed, const CaseLimits& limits);

// Building blocks for cases written by hand. `experts(rank, token)` lists a token's experts.
template <class F>
RoutingCase route_by(const WorldCase& w, const std::vector<uint32_t>& num_tokens, uint32_t topk, F&& experts) {
  RoutingCase c;
  c.num_tokens = num_tokens;
  c.topk.assign(w.num_ranks(), topk);
  c.budgets.resize(w.num_ranks());
  for (uint32_t r = 0; r < w.num_ranks(); ++r) {
    c.topk_idx.emplace_back(num_tokens[r] * topk, -1);
    c.weights.emplace_back(num_tokens[r] * topk, 1.f);
    for (uint32_t t = 0; t < num_tokens[r]; ++t) {
      uint32_t k = 0;
      for (const int e : experts(int(r), t)) c.topk_idx[r][t * topk + k++] = e;
    }
  }
  return c;
}
OpCase dispatch_op(const WorldCase& w, size_t plan, int num_blocks);
OpCase combine_op(const WorldCase& w, size_t plan, int num_blocks);
WorldCase skewed_world(const std::string& executor);
WorldCase paired_world(const std::string& executor);  // four nodes that could wait for each other in a ring

}  // namespace hep::test
