// Bytes that an operation reads from or writes to each of its caller's tensors. The boundary to Python demands at least
// so many of every tensor before anything is sent.
#pragma once
#include "runtime/engine.h"

namespace hep {

// a * b * ..., or the largest number, which no tensor has, where that does not fit.
template <class... T>
uint64_t num_bytes(T... factors) {
  uint64_t product = 1;
  for (const uint64_t factor : {uint64_t(factors)...})
    if (__builtin_mul_overflow(product, factor, &product)) return ~uint64_t(0);
  return product;
}

struct RoutingExtents {
  uint64_t topk_idx, routing_map, weights_of_topk, weights_of_map;
};
RoutingExtents extents_of(const RoutingInput& in, uint32_t num_experts);

struct DispatchExtents {
  uint64_t x, scale, weights, out_x, out_scale, out_weights;
};
// The pointers of the call need not be set.
DispatchExtents extents_of(const Plan& plan, const DispatchCall& call);

struct CombineExtents {
  uint64_t x, weights, out_x, out_weights;
};
CombineExtents extents_of(const Plan& plan, const CombineCall& call);

}  // namespace hep
