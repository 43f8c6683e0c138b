#include "bindings/plan.h"

#include <pybind11/stl.h>

#include "bindings/tensor_view.h"
#include "runtime/extents.h"

namespace py = pybind11;

namespace hep {
namespace {

using View = TensorView;

void weights_from_dense(const Plan& p, const View* probs, const View* out) {
  const PlanExtents e = extents_of(p);
  const auto* from = require_array<const float>(probs, {"probs", e.dense_weights});
  p.weights_from_dense(from, require_array<float>(out, {"out", e.ordered_weights}));
}

void weights_to_dense(const Plan& p, const View* weights, const View* out) {
  const PlanExtents e = extents_of(p);
  const auto* from = require_array<const float>(weights, {"weights", e.ordered_weights});
  p.weights_to_dense(from, require_array<float>(out, {"out", e.dense_weights}));
}

void weights_from_topk(const Plan& p, const View* topk_idx, uint32_t topk, const View* topk_weights, const View* out) {
  const auto* idx = require_array<const int64_t>(topk_idx, {"topk_idx", num_bytes(p.num_tokens(), topk, 8)});
  const auto* from = require_array<const float>(topk_weights, {"topk_weights", num_bytes(p.num_tokens(), topk, 4)});
  p.weights_from_topk(idx, topk, from, require_array<float>(out, {"out", extents_of(p).ordered_weights}));
}

void weights_to_topk(const Plan& p, const View* topk_idx, uint32_t topk, const View* weights, const View* out) {
  const auto* idx = require_array<const int64_t>(topk_idx, {"topk_idx", num_bytes(p.num_tokens(), topk, 8)});
  const auto* from = require_array<const float>(weights, {"weights", extents_of(p).ordered_weights});
  p.weights_to_topk(idx, topk, from, require_array<float>(out, {"out", num_bytes(p.num_tokens(), topk, 4)}));
}

// The maps of a host's plan, which its first dispatch completes.
template <class T>
auto filler(void (Plan::*fill)(T*) const, uint64_t PlanExtents::*extent) {
  using Written = std::conditional_t<std::is_same_v<T, unsigned char>, bool, T>;
  return [=](const Plan& p, const View* out) {
    if (!p.complete()) throw std::invalid_argument("plan: its dispatch has not run");
    (p.*fill)(reinterpret_cast<T*>(require_array<Written>(out, {"out", extents_of(p).*extent})));
  };
}

std::shared_ptr<Plan> plan_in(const Placed& p, const View* memory) {
  if (!p.placement) throw std::logic_error("plan: nobody waited for counts; see complete");
  return p.placement->plan(require(memory, {"memory", p.placement->learned.total, p.device, 128}, Element::kUint8));
}

}  // namespace

void bind_plan(py::module_& m) {
  py::class_<Exchange>(m, "Exchange", "All ranks' headers and counts.")
      .def_property_readonly("headers", &Exchange::headers)
      .def_property_readonly("recv_rows", &Exchange::recv_rows)
      .def_property_readonly("topk", &Exchange::topk)
      .def(
          "place",
          [](const Exchange& x, uint32_t pad_multiple, std::vector<int64_t> budgets, uint64_t recv_capacity,
             bool pad_empty) {
            return std::make_shared<Plan>(x.routing,
                                          PlacementOptions{pad_multiple, std::move(budgets), recv_capacity, pad_empty});
          },
          py::kw_only(), py::arg("pad_multiple") = 1, py::arg("budgets"), py::arg("recv_capacity"),
          py::arg("pad_empty") = false);
  py::class_<Placed>(m, "Placed", "A routing that the exchange kernel was asked to place.")
      .def_property_readonly("complete",
                             py::cpp_function([](const Placed& p) { return p.complete; }, py::keep_alive<0, 1>()),
                             "The plan, when nobody waited for counts.")
      .def_property_readonly("placed", &Placed::placed)
      .def_property_readonly("headers", &Placed::headers)
      .def_property_readonly("recv_rows", [](const Placed& p) { return p.counts().rank_rows; })
      .def_property_readonly("num_dropped_per_rank", [](const Placed& p) { return p.counts().dropped; })
      .def_property_readonly("from_nodes", [](const Placed& p) { return p.counts().from_nodes; })
      .def_property_readonly("learned",
                             [](const Placed& p) {
                               const PlanMemory& to = p.placement->learned;
                               return std::map<std::string, uint64_t>{{"total", to.total},
                                                                      {"rail_records", to.rail_records},
                                                                      {"rail_record_stride", to.rail_record_stride},
                                                                      {"row_records", to.row_records}};
                             })
      .def("plan", &plan_in, py::arg("memory"), py::keep_alive<0, 1>(), py::keep_alive<0, 2>(),
           "The plan, with learned['total'] bytes, 128-byte aligned, for what its dispatch learns.");
  py::class_<Plan, std::shared_ptr<Plan>>(m, "Plan", "One routing decision, ready for dispatch and combine.")
      .def_property_readonly("num_tokens", &Plan::num_tokens)
      .def_property_readonly("topk", &Plan::topk)
      .def_property_readonly("weight_stride", &Plan::weight_stride)
      .def_property_readonly("num_recv_rows", &Plan::num_recv_rows)
      .def_property_readonly("max_recv_rows", &Plan::max_recv_rows)
      .def_property_readonly("num_permuted_rows", &Plan::num_permuted_rows)
      .def_property_readonly("tokens_per_expert", &Plan::tokens_per_expert)
      .def_property_readonly("padded_tokens_per_expert", &Plan::padded_tokens_per_expert)
      .def_property_readonly("on_device", &Plan::on_device)
      .def_property_readonly("overflow", &Plan::overflow)
      .def_property_readonly("has_holes", &Plan::has_holes)
      .def_property_readonly("num_dropped", &Plan::num_dropped)
      .def_property_readonly("num_dropped_per_rank", &Plan::num_dropped_per_rank)
      .def_property_readonly("recv_rows_per_source", &Plan::recv_rows_per_source)
      .def("num_rail_tokens", &Plan::num_rail_tokens, py::arg("node"))
      .def("weights_from_dense", &weights_from_dense, py::arg("probs"), py::arg("out"))
      .def("weights_to_dense", &weights_to_dense, py::arg("weights"), py::arg("out"))
      .def("weights_from_topk", &weights_from_topk, py::arg("topk_idx"), py::arg("topk"), py::arg("topk_weights"),
           py::arg("out"))
      .def("weights_to_topk", &weights_to_topk, py::arg("topk_idx"), py::arg("topk"), py::arg("weights"),
           py::arg("out"))
      .def("fill_sparse_to_dense", filler(&Plan::fill_sparse_to_dense, &PlanExtents::sparse_to_dense), py::arg("out"))
      .def("fill_rail_to_node", filler(&Plan::fill_rail_to_node, &PlanExtents::rail_to_node), py::arg("out"))
      .def("fill_node_to_rail", filler(&Plan::fill_node_to_rail, &PlanExtents::node_to_rail), py::arg("out"))
      .def("fill_local_expert_routing_map", filler(&Plan::fill_local_routing, &PlanExtents::local_routing),
           py::arg("out"))
      .def("fill_dense_to_expert_map", filler(&Plan::fill_permuted_rows, &PlanExtents::permuted_rows), py::arg("out"));
}

}  // namespace hep
