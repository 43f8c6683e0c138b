// Routing of this rank's own tokens: compact (expert, weight) pairs, counts, and every pair's position among
// the pairs of this source. A lane owns a token where tokens are independent, a column where they are not.
#pragma once
#include <bit>

#include "layout/headers.h"
#include "roles/params.h"

namespace hep {

template <Arch A>
struct RouteRole {
  const ExchangeParams& p;
  A& a;
  const int width, me;  // lanes over all warps of the block

  HEP_DEVICE RouteRole(A& arch, const ExchangeParams& params)
      : p(params), a(arch), width(arch.num_warps() * A::kLanes), me(arch.warp_idx() * A::kLanes + arch.lane()) {}

  HEP_DEVICE uint32_t experts_per_rank() const { return p.layout.num_experts / p.layout.num_ranks; }
  HEP_DEVICE uint32_t num_columns() const { return p.layout.num_ranks + p.layout.num_nodes + p.layout.num_experts; }

  HEP_DEVICE void run() {
    if (p.excess) {
      if (me == 0) *p.excess = 0, *p.misfits = 0;
      a.block_sync();
    }
    for (uint32_t t = me; t < p.num_tokens; t += width) p.topk_idx ? compact_topk(t) : compact_map(t);
    for (uint64_t i = me; i < uint64_t(a.num_warps()) * num_columns(); i += width) p.columns[i] = 0;
    a.block_sync();
    walk(false);
    a.block_sync();
    scan_columns();
    a.block_sync();
    walk(true);
    a.block_sync();
  }

 private:
  // Inserts an expert into the token's ascending list. An expert that is named twice becomes one pair with
  // the sum of the weights: w1 f(x) + w2 f(x) = (w1 + w2) f(x).
  HEP_DEVICE uint32_t insert(int32_t* experts, float* weights, uint32_t n, int32_t e, float w) {
    uint32_t at = n;
    while (at > 0 && experts[at - 1] > e) --at;
    if (at > 0 && experts[at - 1] == e) {
      weights[at - 1] += w;
      return n;
    }
    for (uint32_t i = n; i > at; --i) experts[i] = experts[i - 1], weights[i] = weights[i - 1];
    experts[at] = e, weights[at] = w;
    return n + 1;
  }
  HEP_DEVICE void compact_topk(uint32_t t) {
    int32_t* experts = p.pair_expert + uint64_t(t) * p.topk;
    float* weights = p.pair_weight + uint64_t(t) * p.weight_stride;
    uint32_t n = 0;
    for (uint32_t k = 0; k < p.topk_in; ++k) {
      int64_t e = p.topk_idx[uint64_t(t) * p.topk_in + k];
      if (e < -1 || e >= int64_t(p.layout.num_experts)) {  // only where the host could not look beforehand
        a.add_acq_rel_rank(p.excess, 1);
        continue;
      }
      if (e >= 0) n = insert(experts, weights, n, int32_t(e), p.weights ? p.weights[uint64_t(t) * p.topk_in + k] : 0.f);
    }
    pad(experts, weights, n);
  }
  HEP_DEVICE void compact_map(uint32_t t) {
    int32_t* experts = p.pair_expert + uint64_t(t) * p.topk;
    float* weights = p.pair_weight + uint64_t(t) * p.weight_stride;
    const unsigned char* row = p.routing_map + uint64_t(t) * p.layout.num_experts;
    uint32_t n = 0;
    for (uint32_t e = 0; e < p.layout.num_experts; ++e) {
      while (e + 8 <= p.layout.num_experts && std::bit_cast<uint64_t>(load8(row + e)) == 0) e += 8;
      if (e < p.layout.num_experts && row[e]) {
        if (n == p.topk) {  // only where the host could not count beforehand
          a.add_acq_rel_rank(p.excess, 1);
          break;
        }
        experts[n] = int32_t(e);
        weights[n++] = p.weights ? p.weights[uint64_t(t) * p.layout.num_experts + e] : 0.f;
      }
    }
    pad(experts, weights, n);
  }
  struct Bytes8 {
    unsigned char b[8];
  };
  HEP_DEVICE static Bytes8 load8(const unsigned char* p) {  // rows of the map have no alignment
    return {{p[0], p[1], p[2], p[3], p[4], p[5], p[6], p[7]}};
  }
  HEP_DEVICE void pad(int32_t* experts, float* weights, uint32_t n) {
    for (uint32_t k = n; k < p.topk; ++k) experts[k] = -1;
    for (uint32_t k = n; k < p.weight_stride; ++k) weights[k] = 0.f;
  }

  // Each warp walks its share of the tokens in order, its lanes the pairs of one token: experts of a token
  // differ, so lanes never meet in a column. First walk counts, second walk hands out positions.
  HEP_DEVICE void walk(bool assign) {
    const uint32_t per_warp = uint32_t(div_up(p.num_tokens, a.num_warps()));
    const uint32_t begin = a.warp_idx() * per_warp;
    const uint32_t end = begin + per_warp < p.num_tokens ? begin + per_warp : p.num_tokens;
    uint32_t* rank_column = p.columns + uint64_t(a.warp_idx()) * num_columns();
    uint32_t* node_column = rank_column + p.layout.num_ranks;
    uint32_t* expert_column = node_column + p.layout.num_nodes;
    for (uint32_t t = begin; t < end; ++t) {
      const int32_t* experts = p.pair_expert + uint64_t(t) * p.topk;
      if (assign)
        for (uint32_t n = a.lane(); n < p.layout.num_nodes; n += A::kLanes)
          p.node_pos[uint64_t(t) * p.layout.num_nodes + n] = -1;
      a.warp_sync();
      for (uint32_t k = a.lane(); k < p.topk; k += A::kLanes) {
        if (experts[k] < 0) continue;
        const uint32_t e = experts[k], rank = e / experts_per_rank(), node = rank / p.world.num_local_ranks;
        const int64_t prev = k ? experts[k - 1] / int64_t(experts_per_rank()) : -1;
        const uint32_t pair = expert_column[e]++;
        if (assign) p.pair_pos[uint64_t(t) * p.topk + k] = pair;
        if (prev != int64_t(rank)) {
          const uint32_t row = rank_column[rank]++;
          if (assign) p.row_pos[uint64_t(t) * p.topk + k] = row;
        }
        if (prev < 0 || prev / p.world.num_local_ranks != int64_t(node)) {
          const uint32_t pos = node_column[node]++;
          if (assign) {
            p.node_pos[uint64_t(t) * p.layout.num_nodes + node] = int32_t(pos);
            p.node_tokens[uint64_t(node) * p.num_tokens + pos] = t;
          }
        }
      }
      a.warp_sync();
    }
  }
  // Exclusive scan of every column over the warps; the totals are this rank's count vector.
  HEP_DEVICE void scan_columns() {
    auto* vector = reinterpret_cast<uint32_t*>(p.counts + p.parity_bytes() + p.world.rank * p.layout.vector_bytes());
    for (uint32_t w = me; w < uint32_t(kCountHeaderWords); w += width)
      a.st_global(vector + w, p.header[w] | (p.mail && w == uint32_t(kHeaderTopk) ? header_excess(*p.excess) : 0));
    for (uint32_t c = me; c < num_columns(); c += width) {
      uint32_t sum = 0;
      for (int w = 0; w < a.num_warps(); ++w) {
        uint32_t& cell = p.columns[uint64_t(w) * num_columns() + c];
        const uint32_t n = cell;
        cell = sum;
        sum += n;
      }
      a.st_global(vector + kCountHeaderWords + c, sum);
    }
  }
};

}  // namespace hep
