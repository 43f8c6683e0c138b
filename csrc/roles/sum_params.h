// What kernels are told of the sums of a combine, by either path.
#pragma once
#include "common/numeric.h"
#include "roles/exchange_params.h"
#include "roles/plan_view.h"

namespace hep {

struct SumParams {
  World world;
  PartialLayout partial;
  PlanView plan;
  uint32_t record_bytes, pairs_at;  // as in MessageLayout
  DType dtype, partial_dtype;
  uint32_t hidden;
  const unsigned char* x;  // experts' outputs: [P][hidden] or [M][hidden]
  const float* x_weights;  // permuted: [P]; else [M][experts of this node]; null = none
  bool permuted, multiply;
  uint32_t first_node_expert, num_node_experts;
  unsigned char* out_x;  // [T][hidden]
  float* out_weights;    // [T][weight_stride], null = none
  RankProgress* progress;
  TrafficCounters* traffic;

  HEP_DEVICE const PairEntry* pairs_of(const RecordHeader* rec) const {
    return reinterpret_cast<const PairEntry*>(reinterpret_cast<const unsigned char*>(rec) + pairs_at);
  }
};

}  // namespace hep
