// What must come of a world's routing, computed the slow and obvious way from the choices alone: nothing here
// shares code with route, exchange or plan.
#pragma once
#include <array>
#include <vector>

#include "sim/world_spec.h"

namespace hep::sim {

struct Pair {
  int expert;
  float weight;
};

// One routing decision of the group; decide() draws one over logical experts.
struct RoutingDecision {
  std::vector<uint32_t> num_tokens;            // [R]
  std::vector<std::vector<int64_t>> topk_idx;  // [R] -> [T * topk]
  std::vector<std::vector<float>> topk_weights;
};
RoutingDecision decide(const WorldSpec& spec, uint32_t plan, const std::vector<std::vector<int64_t>>& given);

struct Token {
  int rank;
  uint32_t index;
};
struct PermutedRow {
  Token token;
  int expert;  // -1 = padding
};

struct Oracle {
  const WorldSpec& spec;
  std::vector<std::vector<std::vector<Pair>>> pairs;  // [R][T] ascending, an expert once
  std::vector<std::vector<Token>> received;           // [R] receive rows
  std::vector<std::vector<uint32_t>> first_row;       // [R][R + 1] of each source
  std::vector<std::vector<PermutedRow>> permuted;     // [R]

  Oracle(const WorldSpec& spec, const RoutingDecision& routing);
  int rank_of(int expert) const { return expert / int(spec.experts_per_rank); }
  int node_of(int expert) const { return rank_of(expert) / int(spec.num_local_ranks); }
  bool arrives(Token t, int rank) const;
};

// Data, a function of seeds.
uint64_t mix(uint64_t a, uint64_t b, uint64_t c = 0, uint64_t d = 0);

}  // namespace hep::sim
