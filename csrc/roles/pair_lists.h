// What a token is routed to, compact: (expert, weight) pairs by ascending expert, from topk_idx or routing_map. A lane
// makes the list of a token.
#pragma once
#include "roles/params.h"

namespace hep {

template <class A>
struct PairLists {
  // So many choices a lane sorts in registers, where it has them; more are sorted where the list lies.
  static constexpr uint32_t kInRegisters = A::kLanes < 32 ? 0 : 8;
  static constexpr uint32_t kWordsAhead = A::kLanes < 32 ? 1 : 4, kWeightsAhead = A::kLanes < 32 ? 1 : 4;
  static constexpr int32_t kNone = 0x7fffffff;  // no choice, behind all experts

  A& a;
  const ExchangeParams& p;

  HEP_DEVICE void make(uint32_t t) const {
    int32_t* experts = p.pair_expert + uint64_t(t) * p.topk;
    float* weights = p.pair_weight + uint64_t(t) * p.weight_stride;
    const uint32_t n = !p.topk_idx                    ? from_map(t, experts, weights)
                       : p.topk_in - 1 < kInRegisters ? from_few(t, experts, weights)
                                                      : from_topk(t, experts, weights);
    for (uint32_t k = n; k < p.topk; ++k) experts[k] = -1;
    for (uint32_t k = n; k < p.weight_stride; ++k) weights[k] = 0.f;
  }

 private:
  // kNone also where nobody looked beforehand, and there is no such expert.
  HEP_DEVICE int32_t checked(int64_t e) const {
    if (e >= -1 && e < int64_t(p.layout.num_experts)) return e < 0 ? kNone : int32_t(e);
    a.add_acq_rel_rank(&p.progress->excess, 1);
    return kNone;
  }
  // An expert that is named twice becomes one pair with the sum of the weights, in the order of the choices:
  // w1 f(x) + w2 f(x) = (w1 + w2) f(x). These return the number of pairs.
  HEP_DEVICE uint32_t from_few(uint32_t t, int32_t* experts, float* weights) const {
    constexpr uint32_t kMost = kInRegisters ? kInRegisters : 1;
    const uint64_t first = uint64_t(t) * p.topk_in;
    int64_t chosen[kMost];
    int32_t e[kMost];
    float w[kMost];
    HEP_UNROLL
    for (uint32_t k = 0; k < kMost; ++k) chosen[k] = p.topk_idx[first + (k < p.topk_in ? k : 0)];
    HEP_UNROLL
    for (uint32_t k = 0; k < kMost; ++k) w[k] = p.weights ? p.weights[first + (k < p.topk_in ? k : 0)] : 0.f;
    HEP_UNROLL
    for (uint32_t k = 0; k < kMost; ++k) e[k] = k < p.topk_in ? checked(chosen[k]) : kNone;
    HEP_UNROLL
    for (uint32_t i = 1; i < kMost; ++i) {
      HEP_UNROLL
      for (uint32_t j = i; j > 0; --j) {  // equal ones stay in their order
        const bool swap = e[j - 1] > e[j];
        const int32_t lower = swap ? e[j] : e[j - 1], upper = swap ? e[j - 1] : e[j];
        const float of_lower = swap ? w[j] : w[j - 1], of_upper = swap ? w[j - 1] : w[j];
        e[j - 1] = lower;
        e[j] = upper;
        w[j - 1] = of_lower;
        w[j] = of_upper;
      }
    }
    uint32_t n = 0;
    float sum = 0;
    HEP_UNROLL
    for (uint32_t k = 0; k < kMost; ++k) {
      const bool again = k > 0 && e[k] == e[k - (k > 0)];
      sum = again ? sum + w[k] : w[k];
      n += e[k] != kNone && !again;
      if (e[k] != kNone) {
        experts[n - 1] = e[k];
        weights[n - 1] = sum;
      }
    }
    return n;
  }
  HEP_DEVICE uint32_t from_topk(uint32_t t, int32_t* experts, float* weights) const {
    const uint64_t first = uint64_t(t) * p.topk_in;
    uint32_t n = 0;
    for (uint32_t k = 0; k < p.topk_in; ++k)
      if (const int32_t e = checked(p.topk_idx[first + k]); e != kNone)
        n = insert(experts, weights, n, e, p.weights ? p.weights[first + k] : 0.f);
    return n;
  }
  HEP_DEVICE static uint32_t insert(int32_t* experts, float* weights, uint32_t n, int32_t e, float w) {
    uint32_t at = n;
    while (at > 0 && experts[at - 1] > e) --at;
    if (at > 0 && experts[at - 1] == e) {
      weights[at - 1] += w;
      return n;
    }
    for (uint32_t i = n; i > at; --i) {
      experts[i] = experts[i - 1];
      weights[i] = weights[i - 1];
    }
    experts[at] = e;
    weights[at] = w;
    return n + 1;
  }
  HEP_DEVICE uint32_t from_map(uint32_t t, int32_t* experts, float* weights) const {
    const uint64_t first = uint64_t(t) * p.layout.num_experts;
    const uint32_t n =
        p.map_words ? scan<true>(p.routing_map + first, experts) : scan<false>(p.routing_map + first, experts);
    for (uint32_t k = 0; k < n; k += kWeightsAhead) {
      float w[kWeightsAhead];
      HEP_UNROLL
      for (uint32_t i = 0; i < kWeightsAhead; ++i)
        w[i] = p.weights ? p.weights[first + uint32_t(experts[k + i < n ? k + i : k])] : 0.f;
      HEP_UNROLL
      for (uint32_t i = 0; i < kWeightsAhead; ++i)
        if (k + i < n) weights[k + i] = w[i];
    }
    return n;
  }
  // The experts of a row that are not zero; whole: it consists of words.
  template <bool kWhole>
  HEP_DEVICE uint32_t scan(const unsigned char* row, int32_t* experts) const {
    uint32_t n = 0;
    for (uint32_t e = 0; e < p.layout.num_experts; e += 8 * kWordsAhead) {
      uint64_t words[kWordsAhead];
      HEP_UNROLL
      for (uint32_t i = 0; i < kWordsAhead; ++i) {
        const bool there = e + 8 * i < p.layout.num_experts;
        const uint64_t word = eight<kWhole>(row, there ? e + 8 * i : e);
        words[i] = there ? word : 0;
      }
      HEP_UNROLL
      for (uint32_t i = 0; i < kWordsAhead; ++i)
        for (uint32_t at = e + 8 * i; words[i]; words[i] >>= 8, ++at) {
          if (!(words[i] & 0xff)) continue;
          if (n == p.topk) {  // where nobody counted beforehand
            a.add_acq_rel_rank(&p.progress->excess, 1);
            return n;
          }
          experts[n++] = int32_t(at);
        }
    }
    return n;
  }
  // Bytes of a row from e on, zeros behind its end.
  template <bool kWhole>
  HEP_DEVICE uint64_t eight(const unsigned char* row, uint32_t e) const {
    if constexpr (kWhole) return *reinterpret_cast<const uint64_t*>(row + e);
    uint64_t word = 0;
    for (uint32_t i = 0; i < 8 && e + i < p.layout.num_experts; ++i) word |= uint64_t(row[e + i]) << (8 * i);
    return word;
  }
};

}  // namespace hep
