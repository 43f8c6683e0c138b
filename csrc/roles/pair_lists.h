// What a token is routed to, compact: (expert, weight) pairs by ascending expert, from topk_idx or routing_map.
#pragma once
#include <bit>

#include "roles/params.h"

namespace hep {

template <class A>
struct PairLists {
  A& a;
  const ExchangeParams& p;

  HEP_DEVICE void make(uint32_t t) const { p.topk_idx ? from_topk(t) : from_map(t); }

 private:
  // Inserts an expert into the token's ascending list. An expert that is named twice becomes one pair with
  // the sum of the weights: w1 f(x) + w2 f(x) = (w1 + w2) f(x).
  HEP_DEVICE static uint32_t insert(int32_t* experts, float* weights, uint32_t n, int32_t e, float w) {
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
  HEP_DEVICE void from_topk(uint32_t t) const {
    int32_t* experts = p.pair_expert + uint64_t(t) * p.topk;
    float* weights = p.pair_weight + uint64_t(t) * p.weight_stride;
    uint32_t n = 0;
    for (uint32_t k = 0; k < p.topk_in; ++k) {
      int64_t e = p.topk_idx[uint64_t(t) * p.topk_in + k];
      if (e < -1 || e >= int64_t(p.layout.num_experts)) {  // where nobody looked beforehand
        a.add_acq_rel_rank(p.excess, 1);
        continue;
      }
      if (e >= 0) n = insert(experts, weights, n, int32_t(e), p.weights ? p.weights[uint64_t(t) * p.topk_in + k] : 0.f);
    }
    pad(experts, weights, n);
  }
  HEP_DEVICE void from_map(uint32_t t) const {
    int32_t* experts = p.pair_expert + uint64_t(t) * p.topk;
    float* weights = p.pair_weight + uint64_t(t) * p.weight_stride;
    const unsigned char* row = p.routing_map + uint64_t(t) * p.layout.num_experts;
    uint32_t n = 0;
    for (uint32_t e = 0; e < p.layout.num_experts; ++e) {
      while (e + 8 <= p.layout.num_experts && std::bit_cast<uint64_t>(load8(row + e)) == 0) e += 8;
      if (e < p.layout.num_experts && row[e]) {
        if (n == p.topk) {  // where nobody counted beforehand
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
  HEP_DEVICE void pad(int32_t* experts, float* weights, uint32_t n) const {
    for (uint32_t k = n; k < p.topk; ++k) experts[k] = -1;
    for (uint32_t k = n; k < p.weight_stride; ++k) weights[k] = 0.f;
  }
};

}  // namespace hep
