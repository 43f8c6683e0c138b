// A caller's weights and the order in which a plan keeps them, on the host; all fp32.
#pragma once
#include <cstdint>

namespace hep {

// The pairs of a plan, as the exchange kernel placed them where the host can read: a token's experts ascending, -1
// behind the last. Plan order: [num_tokens][weight_stride], as the pairs, zeros behind the last.
struct PlanPairs {
  const int32_t* experts;  // [num_tokens][topk]
  uint32_t num_tokens, topk, weight_stride, num_experts;

  void weights_from_dense(const float* probs, float* out) const;  // [num_tokens][num_experts]
  void weights_to_dense(const float* weights, float* out) const;  // the same, 0 where not chosen
  // [num_tokens][k] of the experts idx, -1 = none. std::invalid_argument names an expert that is not among the pairs.
  void weights_from_topk(const int64_t* idx, uint32_t k, const float* in, float* out) const;
};

}  // namespace hep
