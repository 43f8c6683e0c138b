#include "runtime/plan_weights.h"

#include <cstring>
#include <stdexcept>
#include <string>

namespace hep {

void PlanPairs::weights_from_dense(const float* probs, float* out) const {
  for (uint64_t t = 0; t < num_tokens; ++t)
    for (uint32_t k = 0; k < weight_stride; ++k) {
      const int32_t e = k < topk ? experts[t * topk + k] : -1;
      out[t * weight_stride + k] = e < 0 ? 0.f : probs[t * num_experts + uint32_t(e)];
    }
}

void PlanPairs::weights_to_dense(const float* weights, float* out) const {
  std::memset(out, 0, sizeof(float) * uint64_t(num_tokens) * num_experts);
  for (uint64_t t = 0; t < num_tokens; ++t)
    for (uint32_t k = 0; k < topk; ++k)
      if (const int32_t e = experts[t * topk + k]; e >= 0)
        out[t * num_experts + uint32_t(e)] = weights[t * weight_stride + k];
}

void PlanPairs::weights_from_topk(const int64_t* idx, uint32_t k_idx, const float* in, float* out) const {
  std::memset(out, 0, sizeof(float) * uint64_t(num_tokens) * weight_stride);
  for (uint64_t t = 0; t < num_tokens; ++t)
    for (uint32_t i = 0; i < k_idx; ++i) {
      const int64_t e = idx[t * k_idx + i];
      if (e < 0) continue;
      uint32_t k = 0;
      while (k < topk && experts[t * topk + k] != e) ++k;
      if (k == topk)
        throw std::invalid_argument(
            "topk_idx: expert " + std::to_string(e) +
            " is not in the handle's routing of this token; pass the topk_idx that the handle was made with");
      out[t * weight_stride + k] += in[t * k_idx + i];
    }
}

}  // namespace hep
