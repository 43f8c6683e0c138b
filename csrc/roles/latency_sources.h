// Latency dispatch: where each source's rows and pairs begin on this rank, and those of rail peers on its node, in the
// shared memory of every block.
#pragma once
#include "roles/exchange_share.h"
#include "roles/latency_params.h"

namespace hep {

template <Arch A>
struct LatencySources {
  A& a;
  const LatencyDispatchParams& p;
  std::byte* const smem;

  // By all lanes of a block, which meets before anybody reads it.
  HEP_DEVICE void find_rows() {
    if (a.warp_idx() != 0 || a.lane() != 0) return;
    uint32_t begin = 0;
    for (int s = 0; s < p.world.num_ranks(); ++s) {
      a.st_shared(word(p.source_begins_at) + s, begin);
      begin += p.plan.source_rows[s];
    }
    a.st_shared(word(p.source_begins_at) + p.world.num_ranks(), begin);
  }
  // Likewise, behind placement, which has found where the pairs of this rank's own tokens begin.
  HEP_DEVICE void find_pairs(const CountsView& counts, const ExchangeSmem& placed) {
    const uint32_t experts = p.plan.num_local_experts, width = uint32_t(a.num_warps() * A::kLanes);
    for (uint32_t e = uint32_t(a.warp_idx() * A::kLanes + a.lane()); e < experts; e += width) {
      const int expert = int(p.plan.first_expert + e);
      uint32_t row = a.ld_shared(word(0) + placed.pair_base_at() + expert);
      const auto of = [&](int s) { return counts.pairs(s, expert); };
      over_sources(p.world.rank, of, [&](int, uint32_t n) { row -= n; });
      over_sources(p.world.num_ranks(), of, [&](int s, uint32_t n) {
        a.st_shared(word(p.pair_bases_at) + uint32_t(s) * experts + e, row);
        row += n;
      });
    }
  }
  // Likewise: where rows and pairs of rail peers begin on this node's ranks, which this rank's records of them say.
  HEP_DEVICE void find_rail(const CountsView& counts, const ExchangeSmem& placed) {
    if (p.world.num_nodes == 1) return;
    const uint32_t ranks = uint32_t(p.world.num_local_ranks), width = uint32_t(a.num_warps() * A::kLanes);
    for (uint32_t i = uint32_t(a.warp_idx() * A::kLanes + a.lane()); i < rail_words(); i += width) {
      const bool is_rank = i < ranks;
      const int to = is_rank ? p.world.rank_of(p.world.node(), int(i)) : int(p.first_node_expert + i - ranks);
      const auto of = [&](int s) { return is_rank ? counts.rows(s, to) : counts.pairs(s, to); };
      uint32_t at = a.ld_shared(word(0) + (is_rank ? placed.row_base_at() : placed.pair_base_at()) + to);
      over_sources(p.world.rank, of, [&](int, uint32_t n) { at -= n; });
      over_sources(p.world.num_ranks(), of, [&](int s, uint32_t n) {
        const int node = s / p.world.num_local_ranks;
        if (s == p.world.rail_peer(node) && s != p.world.rank) a.st_shared(rail_word(node) + i, at);
        at += n;
      });
    }
  }
  // Receive row on a rank of this node, and permuted row of a pair for an expert of it, of a rail peer's position.
  HEP_DEVICE uint32_t rail_row(int node, uint32_t local_rank, uint32_t position) const {
    return a.ld_shared(rail_word(node) + local_rank) + position;
  }
  HEP_DEVICE uint32_t rail_pair(int node, uint32_t node_expert, uint32_t position) const {
    return a.ld_shared(rail_word(node) + uint32_t(p.world.num_local_ranks) + node_expert) + position;
  }
  HEP_DEVICE uint32_t begin_of(int source) const { return a.ld_shared(word(p.source_begins_at) + source); }
  // The row of the pair that is the `position`-th of its source for a local expert, before budgets.
  HEP_DEVICE uint32_t row_of(int source, uint32_t local_expert, uint32_t position) const {
    return a.ld_shared(word(p.pair_bases_at) + uint32_t(source) * p.plan.num_local_experts + local_expert) + position;
  }

 private:
  // f(s, of(s)) for all s below `end`. Loads of several are made together: one by one they take a trip to memory each.
  template <class Of, class F>
  HEP_DEVICE static void over_sources(int end, Of&& of, F&& f) {
    constexpr int kAhead = A::kLanes < 32 ? 1 : 8;
    for (int s = 0; s < end; s += kAhead) {
      uint32_t n[kAhead];
      HEP_UNROLL
      for (int i = 0; i < kAhead; ++i) n[i] = of(s + i < end ? s + i : s);
      HEP_UNROLL
      for (int i = 0; i < kAhead; ++i)
        if (s + i < end) f(s + i, n[i]);
    }
  }
  HEP_DEVICE uint32_t rail_words() const { return uint32_t(p.world.num_local_ranks) + p.num_node_experts; }
  HEP_DEVICE uint32_t* rail_word(int node) const {
    return word(p.rail_bases_at) + uint32_t(node < p.world.node() ? node : node - 1) * rail_words();
  }
  HEP_DEVICE uint32_t* word(uint64_t at) const { return reinterpret_cast<uint32_t*>(smem + at); }
};

}  // namespace hep
