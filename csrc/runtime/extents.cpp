#include "runtime/extents.h"

namespace hep {

RoutingExtents extents_of(const RoutingInput& in, uint32_t num_experts) {
  return {num_bytes(in.num_tokens, in.topk, sizeof(int64_t)), num_bytes(in.num_tokens, num_experts),
          num_bytes(in.num_tokens, in.topk, sizeof(float)), num_bytes(in.num_tokens, num_experts, sizeof(float))};
}

DispatchExtents extents_of(const Plan& plan, const DispatchCall& c) {
  const uint64_t tokens = plan.num_tokens(), rows = c.permute ? c.out_rows : plan.num_recv_rows();
  const uint64_t width = c.permute ? 1 : uint64_t(plan.num_local_experts()) * uint64_t(plan.world().num_local_ranks);
  return {num_bytes(tokens, c.row_bytes),
          num_bytes(tokens, c.scale_bytes),
          num_bytes(tokens, plan.weight_stride(), sizeof(float)),
          num_bytes(rows, c.row_bytes),
          num_bytes(rows, c.scale_bytes),
          num_bytes(rows, width, sizeof(float))};
}

CombineExtents extents_of(const Plan& plan, const CombineCall& c) {
  const uint64_t tokens = plan.num_tokens(), rows = c.permuted ? plan.num_permuted_rows() : plan.num_recv_rows();
  const uint64_t width = c.permuted ? 1 : uint64_t(plan.num_local_experts()) * uint64_t(plan.world().num_local_ranks);
  const uint64_t element = dtype_bytes(c.dtype);
  return {num_bytes(rows, c.hidden, element), num_bytes(rows, width, sizeof(float)),
          num_bytes(tokens, c.hidden, element), num_bytes(tokens, plan.weight_stride(), sizeof(float))};
}

}  // namespace hep
