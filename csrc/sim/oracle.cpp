// Random routing, and the oracle's view of it.
#include "sim/oracle.h"

#include <algorithm>

namespace hep::sim {

uint64_t mix(uint64_t a, uint64_t b, uint64_t c, uint64_t d) {
  return host::Rng(((a * 1000003 + b) * 1000003 + c) * 1000003 + d).next();
}

namespace {

int64_t choose(host::Rng& rng, const WorldSpec& s, uint32_t rank, uint32_t token, uint32_t favourite) {
  const uint32_t experts = s.num_logical_experts(), per_node = experts / s.num_nodes, node = rank / s.num_local_ranks;
  switch (s.routing) {
    case 1: return favourite;
    case 2: return node * per_node + rng.below(per_node);
    case 3: return (favourite + rng.below(2)) % experts;
    case 4: {  // a node is wanted by every token, by every second, by every seventh
      const uint32_t n = uint32_t(rng.below(s.num_nodes));
      static constexpr uint32_t kPeriod[] = {1, 2, 7};
      return token % kPeriod[(rank + n) % 3] ? -1 : int64_t(n * per_node + rng.below(per_node));
    }
    default: return int64_t(rng.below(experts));
  }
}

}  // namespace

RoutingDecision decide(const WorldSpec& s, uint32_t plan, const std::vector<std::vector<int64_t>>& given) {
  RoutingDecision d;
  for (uint32_t r = 0; r < s.num_ranks(); ++r) {
    host::Rng rng(mix(s.data_seed, plan, r, 17));
    uint32_t tokens = s.tokens;
    if (s.uneven) tokens = s.uneven == 2 && rng.one_in(3) ? 0 : uint32_t(rng.below(s.tokens + 1));
    if (!given.empty()) tokens = uint32_t(given[r].size() / s.topk);
    const uint32_t favourite = uint32_t(rng.below(s.num_logical_experts()));
    std::vector<int64_t> idx(uint64_t(tokens) * s.topk, -1);
    std::vector<float> weights(idx.size());
    for (uint32_t t = 0; t < tokens; ++t)
      for (uint32_t k = 0; k < s.topk; ++k) {
        int64_t& e = idx[uint64_t(t) * s.topk + k];
        weights[uint64_t(t) * s.topk + k] = float(1 + rng.below(2));
        if (!given.empty()) {
          e = given[r][uint64_t(t) * s.topk + k];
          continue;
        }
        if (s.drop_one_in && rng.one_in(s.drop_one_in)) continue;
        const auto* row = &idx[uint64_t(t) * s.topk];
        // Mostly distinct experts, as routers choose; a repeat is legal and is left in when it insists.
        for (int tries = 0; tries < 8; ++tries) {
          e = choose(rng, s, r, t, favourite);
          if (e < 0 || std::find(row, row + k, e) == row + k) break;
        }
      }
    d.num_tokens.push_back(tokens);
    d.topk_idx.push_back(std::move(idx));
    d.topk_weights.push_back(std::move(weights));
  }
  return d;
}

Oracle::Oracle(const WorldSpec& s, const RoutingDecision& d) : spec(s) {
  const uint32_t ranks = s.num_ranks();
  pairs.resize(ranks);
  received.resize(ranks);
  first_row.resize(ranks);
  permuted.resize(ranks);
  for (uint32_t r = 0; r < ranks; ++r) {
    pairs[r].resize(d.num_tokens[r]);
    for (uint32_t t = 0; t < d.num_tokens[r]; ++t) {
      std::vector<Pair>& p = pairs[r][t];
      for (uint32_t k = 0; k < s.topk; ++k) {
        const int64_t e = d.topk_idx[r][uint64_t(t) * s.topk + k];
        if (e < 0) continue;
        const float w = d.topk_weights[r][uint64_t(t) * s.topk + k];
        const auto it = std::find_if(p.begin(), p.end(), [&](const Pair& x) { return x.expert == e; });
        if (it == p.end())
          p.push_back({int(e), w});
        else
          it->weight += w;
      }
      std::sort(p.begin(), p.end(), [](const Pair& a, const Pair& b) { return a.expert < b.expert; });
    }
  }
  std::vector<std::vector<Token>> of_expert(s.num_experts());
  for (uint32_t r = 0; r < ranks; ++r) {
    for (uint32_t dst = 0; dst < ranks; ++dst) first_row[dst].push_back(uint32_t(received[dst].size()));
    for (uint32_t t = 0; t < pairs[r].size(); ++t) {
      int last = -1;
      for (const Pair& p : pairs[r][t]) {
        of_expert[size_t(p.expert)].push_back({int(r), t});
        if (std::exchange(last, rank_of(p.expert)) != rank_of(p.expert)) received[size_t(last)].push_back({int(r), t});
      }
    }
  }
  for (uint32_t dst = 0; dst < ranks; ++dst) first_row[dst].push_back(uint32_t(received[dst].size()));
  for (uint32_t e = 0; e < s.num_experts(); ++e) {
    auto& rows = permuted[e / s.experts_per_rank];
    for (const Token t : of_expert[e]) rows.push_back({t, int(e)});
    while (rows.size() % s.pad_multiple) rows.push_back({{-1, 0}, -1});
  }
}

bool Oracle::arrives(Token t, int rank) const {
  for (const Pair& p : pairs[size_t(t.rank)][t.index])
    if (rank_of(p.expert) == rank) return true;
  return false;
}

}  // namespace hep::sim
