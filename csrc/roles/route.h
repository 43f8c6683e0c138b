// Routing of this rank's own tokens: lists of (expert, weight) pairs, counts, and every pair's position among
// the pairs of this source. A lane owns a token where tokens are independent, a column where they are not.
#pragma once
#include "layout/headers.h"
#include "roles/pair_lists.h"

namespace hep {

template <Arch A>
struct RouteRole {
  // A walk's trips to memory for pairs, made together: one after another they would be most of its time.
  static constexpr uint32_t kAhead = A::kLanes < 32 ? 1 : 4;

  const ExchangeParams& p;
  A& a;
  uint32_t* const counters;  // shared memory, [walkers][R + N + E]
  const int width, me;       // lanes over all warps of the block

  HEP_DEVICE RouteRole(A& arch, const ExchangeParams& params, std::byte* smem)
      : p(params),
        a(arch),
        counters(reinterpret_cast<uint32_t*>(smem)),
        width(arch.num_warps() * A::kLanes),
        me(arch.warp_idx() * A::kLanes + arch.lane()) {}

  // The host asks too, before a launch.
  HEP_HOST_DEVICE static uint32_t num_columns(const CountsLayout& c) {
    return c.num_ranks + c.num_nodes + c.num_experts;
  }

  HEP_DEVICE void run() {
    if (me == 0) *p.excess = 0, *p.misfits = 0;
    a.block_sync();
    const PairLists<A> lists{a, p};
    for (uint32_t t = me; t < p.num_tokens; t += width) lists.make(t);
    for (uint64_t i = me; i < uint64_t(p.num_tokens) * p.layout.num_nodes; i += width) p.node_pos[i] = -1;
    for (uint32_t i = me; i < p.walkers * num_columns(p.layout); i += width) a.st_shared(counters + i, 0);
    a.block_sync();
    HEP_NO_UNROLL  // one copy of the walk's code
    for (int round = 0; round < 2; ++round) {
      if (round > 0) {
        scan_columns();
        a.block_sync();
      }
      walk(round > 0);
      a.block_sync();
    }
  }

 private:
  // A pair as the counters see it: its expert, and its rank and node where it is its token's first there; else -1.
  struct Seen {
    uint32_t t = 0, k = 0;
    int32_t expert = -1, rank = -1, node = -1;
  };
  HEP_DEVICE Seen look(uint32_t t, uint32_t k) const {
    Seen s{t, k};
    if (k >= p.topk) return s;
    const int32_t* experts = p.pair_expert + uint64_t(t) * p.topk;
    s.expert = experts[k];
    if (s.expert < 0) return s;
    const int32_t per_rank = int32_t(p.layout.num_experts / p.layout.num_ranks), L = p.world.num_local_ranks;
    const int32_t before = k ? experts[k - 1] / per_rank : -1, rank = s.expert / per_rank;
    if (before != rank) s.rank = rank;
    if (before < 0 || before / L != rank / L) s.node = rank / L;
    return s;
  }
  HEP_DEVICE uint32_t take(uint32_t* counter) {
    const uint32_t n = a.ld_shared(counter);
    a.st_shared(counter, n + 1);
    return n;
  }
  HEP_DEVICE void count(const Seen& s, bool assign) {
    uint32_t* rank_column = counters + uint32_t(a.warp_idx()) * num_columns(p.layout);
    uint32_t* node_column = rank_column + p.layout.num_ranks;
    uint32_t* expert_column = node_column + p.layout.num_nodes;
    const uint64_t cell = uint64_t(s.t) * p.topk + s.k;
    if (s.expert >= 0) {
      const uint32_t pair = take(expert_column + s.expert);
      if (assign) p.pair_pos[cell] = pair;
    }
    if (s.rank >= 0) {
      const uint32_t row = take(rank_column + s.rank);
      if (assign) p.row_pos[cell] = row;
    }
    if (s.node >= 0) {
      const uint32_t pos = take(node_column + s.node);
      if (assign) {
        p.node_pos[uint64_t(s.t) * p.layout.num_nodes + s.node] = int32_t(pos);
        p.node_tokens[uint64_t(s.node) * p.num_tokens + pos] = s.t;
      }
    }
  }
  // Each warp walks its share of the tokens in order, its lanes the pairs of one token: experts of a token
  // differ, so lanes never meet in a column. First walk counts, second walk hands out positions.
  HEP_DEVICE void walk(bool assign) {
    const uint32_t warp = uint32_t(a.warp_idx()), per_warp = uint32_t(div_up(p.num_tokens, p.walkers));
    if (warp >= p.walkers) return;
    const uint32_t end = (warp + 1) * per_warp < p.num_tokens ? (warp + 1) * per_warp : p.num_tokens;
    uint32_t t = warp * per_warp, k = uint32_t(a.lane());
    while (t < end) {
      Seen seen[kAhead];
      HEP_UNROLL
      for (uint32_t i = 0; i < kAhead; ++i) {
        seen[i] = t < end ? look(t, k) : Seen{};
        k += A::kLanes;
        if (k - uint32_t(a.lane()) >= p.topk) ++t, k = uint32_t(a.lane());
      }
      HEP_UNROLL
      for (uint32_t i = 0; i < kAhead; ++i) {
        count(seen[i], assign);
        if (kMutant != 52) a.warp_sync();
      }
    }
  }
  // Exclusive scan of every column over the walkers; the totals are this rank's count vector.
  HEP_DEVICE void scan_columns() {
    auto* vector = reinterpret_cast<uint32_t*>(p.counts + p.parity_bytes() + p.world.rank * p.layout.vector_bytes());
    for (uint32_t w = me; w < uint32_t(kCountHeaderWords); w += width)
      a.st_global(vector + w, p.header[w] | (p.mail && w == uint32_t(kHeaderTopk) ? header_excess(*p.excess) : 0));
    const uint32_t num = num_columns(p.layout);
    for (uint32_t c = me; c < num; c += width) {
      uint32_t sum = 0;
      for (uint32_t w = 0; w < p.walkers; ++w) {
        const uint32_t n = a.ld_shared(counters + w * num + c);
        a.st_shared(counters + w * num + c, sum);
        sum += n;
      }
      a.st_global(vector + kCountHeaderWords + c, sum);
    }
  }
};

}  // namespace hep
