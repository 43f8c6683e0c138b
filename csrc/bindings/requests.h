// What Python asks of an engine, one object a call: the tensors, which become views as it is made, and the sizes to
// which the core holds them. An absent tensor or number is None, never a number that stands for it.
#pragma once
#include <pybind11/pybind11.h>

#include <cstdint>
#include <optional>

#include "bindings/plan.h"
#include "bindings/tensor_view.h"
#include "layout/headers.h"
#include "runtime/engine.h"

namespace hep {

// How an operation is launched. Calls of one kind have it in common.
struct LaunchShape {
  int num_blocks = 1;
  std::optional<int> local_blocks;       // for local work; none: those that feed links do it
  std::optional<uint32_t> chunk_tokens;  // of a rail message, the same on all ranks; none: the most
  std::optional<LandIn> land_in;         // of a permuted dispatch; none: the engine's choice
};

struct PlaceRequest {
  CallHeader header;
  std::optional<TensorView> topk_idx, routing_map, weights;  // one of the first two
  TensorView memory;                                         // plan_memory() bytes
  uint32_t topk_in = 0;                                      // columns of topk_idx
  bool count = true;                                         // wait for the counts; else the host never learns them
  int num_blocks = 1;                                        // of the exchange kernel
};

struct DispatchRequest {
  TensorView x, out_x;
  std::optional<TensorView> scale, weights, out_scale, out_weights;
  bool routed_weights = false;  // those that the plan's routing brought; and no others
  uint32_t row_bytes = 0, scale_bytes = 0;
  std::optional<uint32_t> permuted;  // rows of the permuted result; none: receive order
  LaunchShape launch;
};

struct CombineRequest {
  TensorView x, out_x;
  std::optional<TensorView> weights, out_weights;
  uint32_t hidden = 0;
  bool permuted = false, multiply = false, fp32_partials = false;
  LaunchShape launch;
};

Placed place(Engine& engine, const PlaceRequest& request);
void dispatch(Engine& engine, Plan& plan, const DispatchRequest& request);
void combine(Engine& engine, Plan& plan, const CombineRequest& request);
// By lines. The first routes, and makes the plan in the memory of `place`, whose `count` and `num_blocks` say nothing.
std::shared_ptr<Plan> latency_route(Engine& engine, const PlaceRequest& place, const DispatchRequest& request);
void latency_dispatch(Engine& engine, Plan& plan, const DispatchRequest& request);
void latency_combine(Engine& engine, Plan& plan, const CombineRequest& request);

void bind_requests(pybind11::module_& m);

}  // namespace hep
