#include "bindings/clones.h"

#include <pybind11/stl.h>

#include <algorithm>

#include "bindings/convert.h"
#include "bindings/tensor_view.h"

namespace py = pybind11;

namespace hep {
namespace {

using MaybeTensor = std::optional<Tensor>;

// A tensor of this many numbers, in memory of the kernels.
template <class T>
T* numbers(const Engine& engine, const char* name, const Tensor& tensor, uint64_t count, bool made_here = true) {
  const TensorView view = TensorView::of(name, tensor, made_here);
  return require_array<T>(&view, {name, count * sizeof(T), engine.on_host() ? Device::kCpu : Device::kCuda, sizeof(T)});
}

void plan_clones(Engine& engine, const MaybeTensor& topk_idx, const MaybeTensor& routing_map, int64_t num_tokens,
                 int64_t topk, const Tensor& columns, int64_t owners_digest, const Tensor& out,
                 const MaybeTensor& out_columns, const Tensor& slot_expert, const Tensor& slots, const Tensor& counts,
                 const Tensor& plan_numbers, bool replayed, int num_blocks) {
  if (!topk_idx == !routing_map) throw std::invalid_argument("topk_idx, routing_map: give one of them");
  const CloneShape& s = engine.clones();
  const uint64_t experts = uint64_t(s.num_experts), ranks = uint64_t(s.num_ranks),
                 spare = ranks * uint64_t(s.spare_slots);
  RoutingInput in;
  in.num_tokens = narrow("num_tokens", num_tokens);
  in.topk = narrow("topk", topk);
  const uint64_t tokens = in.num_tokens;
  BalanceCall c;
  if (topk_idx) {
    in.topk_idx = numbers<const int64_t>(engine, "topk_idx", *topk_idx, tokens * in.topk, false);
    c.out_idx = numbers<int64_t>(engine, "out", out, tokens * in.topk);
  } else {
    in.routing_map = reinterpret_cast<const unsigned char*>(
        numbers<const bool>(engine, "routing_map", *routing_map, tokens * experts, false));
    c.out_map = reinterpret_cast<unsigned char*>(numbers<bool>(engine, "out", out, tokens * (experts + spare)));
    if (out_columns) c.out_columns = numbers<int64_t>(engine, "out_columns", *out_columns, tokens * experts);
  }
  c.columns = numbers<const int64_t>(engine, "columns", columns, experts, false);
  c.owners_digest = narrow("owners_digest", owners_digest);
  c.slot_expert = numbers<int32_t>(engine, "slot_expert", slot_expert, spare, false);
  c.slot_tokens = numbers<int64_t>(engine, "slots", slots, 3 * spare, false);
  c.take = c.slot_tokens + spare;
  c.first = c.take + spare;
  c.counts = numbers<int64_t>(engine, "counts", counts, ranks * experts, false);
  c.numbers = numbers<int64_t>(engine, "numbers", plan_numbers, 4, false);
  c.replayed = replayed;
  c.num_blocks = num_blocks;
  py::gil_scoped_release release;
  engine.balance(in, c);
}

SpareShape spare_shape(uint32_t spare_slots, uint32_t num_owners, uint32_t element_bytes,
                       const std::vector<uint64_t>& elements, uint32_t rail_chunk_bytes, bool gradients) {
  SpareShape s;
  if (elements.size() > SpareShape::kMostMatrices)
    throw std::invalid_argument("elements: an expert has " + std::to_string(elements.size()) +
                                " matrices; give at most " + std::to_string(SpareShape::kMostMatrices));
  s.spare_slots = spare_slots, s.num_owners = num_owners, s.element_bytes = element_bytes;
  s.num_matrices = uint32_t(elements.size());
  s.rail_chunk_bytes = rail_chunk_bytes, s.gradients = gradients;
  std::ranges::copy(elements, s.elements);
  return s;
}

SpareCall spare_call(const Engine& engine, const Tensor& slot_expert, const Tensor& columns,
                     const MaybeTensor& experts) {
  const SpareShape& s = engine.spares();
  const uint64_t ranks = engine.layout().num_ranks;
  SpareCall c;
  c.slot_expert = numbers<const int32_t>(engine, "slot_expert", slot_expert, ranks * s.spare_slots, false);
  c.columns = numbers<const int64_t>(engine, "columns", columns, ranks * s.num_owners, false);
  if (experts)
    c.experts = reinterpret_cast<const uint64_t*>(
        numbers<const int64_t>(engine, "experts", *experts, uint64_t(s.num_owners) * s.num_matrices, false));
  return c;
}

template <void (Engine::*launch)(const SpareCall&)>
void launch_spares(Engine& engine, const Tensor& slot_expert, const Tensor& columns, const MaybeTensor& experts,
                   int num_blocks) {
  SpareCall c = spare_call(engine, slot_expert, columns, experts);
  c.num_blocks = num_blocks;
  py::gil_scoped_release release;
  (engine.*launch)(c);
}

}  // namespace

void bind_spare_shape(py::module_& m) {
  py::class_<SpareShape>(m, "SpareShape", "Registered spare slots for weights of clones; see layout/spare_shape.h.")
      .def(py::init(&spare_shape), py::kw_only(), py::arg("spare_slots"), py::arg("num_owners"),
           py::arg("element_bytes"), py::arg("elements"), py::arg("rail_chunk_bytes") = SpareShape{}.rail_chunk_bytes,
           py::arg("gradients") = true,
           "elements: of each matrix of an expert. rail_chunk_bytes: 0 where clones stay on their owners' nodes. "
           "gradients: False has no memory for them.")
      .def("weights_at", &SpareShape::weights_at, py::arg("matrix"), "Where its stack begins in spare_weights.")
      .def("gradients_at", &SpareShape::gradients_at, py::arg("matrix"), "The same of spare_gradients.");
}

void bind_clones(py::class_<Engine>& engine) {
  engine.def(
      "plan_clones", &plan_clones, py::arg("topk_idx").none(true), py::arg("routing_map").none(true),
      py::arg("num_tokens"), py::arg("topk"), py::arg("columns"), py::arg("owners_digest"), py::arg("out"),
      py::arg("out_columns").none(true), py::arg("slot_expert"), py::arg("slots"), py::arg("counts"),
      py::arg("numbers"), py::arg("replayed"), py::arg("num_blocks"),
      "Engine::balance. topk_idx int64 [T, topk] or routing_map bool [T, E] over logical experts; columns int64 [E]; "
      "written: out, of the same kind over physical slots; out_columns int64 [T, E] or None; slot_expert int32 "
      "[R, S], slots int64 [3, R, S] (tokens, take, first), counts int64 [R, E], numbers int64 [4], which replayed "
      "reads instead.");
  const auto launch = [&](const char* name, auto verb, const char* what) {
    engine.def(name, verb, py::arg("slot_expert"), py::arg("columns"), py::arg("experts").none(true),
               py::arg("num_blocks"), what);
  };
  launch("push_weights", &launch_spares<&Engine::push_weights>,
         "Engine::push_weights. slot_expert int32 [R, S], columns int64 [E]; experts int64 [owners, matrices]: "
         "addresses of this rank's weights.");
  launch("await_weights", &launch_spares<&Engine::await_weights>, "Engine::await_weights; experts: None.");
  launch("collect_gradients", &launch_spares<&Engine::collect_gradients>,
         "Engine::collect_gradients; experts: addresses of fp32 sums.");
}

}  // namespace hep
