#include "bindings/plan.h"

#include <pybind11/stl.h>

#include <algorithm>

#include "bindings/tensor_view.h"
#include "bindings/torch_exchange.h"
#include "layout/plan_memory.h"
#include "runtime/extents.h"
#include "runtime/headers.h"
#include "runtime/plan_maps.h"
#include "runtime/plan_weights.h"

namespace py = pybind11;

namespace hep {
namespace {

using View = TensorView;

PlanPairs pairs_of(const Plan& p, const View* pair_expert) {
  const uint64_t bytes = num_bytes(p.num_tokens(), p.topk(), sizeof(int32_t));
  return {require_array<const int32_t>(pair_expert, {"pair_expert", bytes}), p.num_tokens(), p.topk(),
          p.weight_stride(), p.num_experts()};
}
uint64_t ordered_bytes(const Plan& p) {
  return num_bytes(p.num_tokens(), p.weight_stride(), sizeof(float));
}
uint64_t dense_bytes(const Plan& p) {
  return num_bytes(p.num_tokens(), p.num_experts(), sizeof(float));
}

void weights_from_dense(const Plan& p, const View* pair_expert, const View* probs, const View* out) {
  const auto* from = require_array<const float>(probs, {"probs", dense_bytes(p)});
  auto* to = require_array<float>(out, {"out", ordered_bytes(p)});
  pairs_of(p, pair_expert).weights_from_dense(from, to);
}

void weights_to_dense(const Plan& p, const View* pair_expert, const View* weights, const View* out) {
  const auto* from = require_array<const float>(weights, {"weights", ordered_bytes(p)});
  auto* to = require_array<float>(out, {"out", dense_bytes(p)});
  pairs_of(p, pair_expert).weights_to_dense(from, to);
}

void weights_from_topk(const Plan& p, const View* pair_expert, const View* topk_idx, uint32_t topk,
                       const View* topk_weights, const View* out) {
  const auto* idx = require_array<const int64_t>(topk_idx, {"topk_idx", num_bytes(p.num_tokens(), topk, 8)});
  const auto* from = require_array<const float>(topk_weights, {"topk_weights", num_bytes(p.num_tokens(), topk, 4)});
  auto* to = require_array<float>(out, {"out", ordered_bytes(p)});
  pairs_of(p, pair_expert).weights_from_topk(idx, topk, from, to);
}

// Where the host can read the plan's records, which lie in memory of its kernels.
void maps(const Plan& p, const View* memory, const View* sparse_to_dense, const View* rail_to_node,
          const View* node_to_rail, const View* local_routing, const View* permuted_rows, const View* source_ends) {
  if (!p.complete()) throw std::invalid_argument("plan: its dispatch has not run");
  if (require(memory, {"memory", p.memory().size()}, Element::kInt64) != p.memory().data())
    throw std::invalid_argument("memory: is not what the plan was placed in; give that block, a 'cpu' tensor");
  const uint64_t rail = num_rail_rows(p), ranks = uint64_t(p.world().num_ranks());
  const uint64_t cells = num_bytes(p.num_recv_rows(), p.num_local_experts());
  const auto flags = [](const View* v, const char* name, uint64_t bytes) {
    return reinterpret_cast<unsigned char*>(require_array<bool>(v, {name, bytes}));
  };
  PlanMaps m;
  m.sparse_to_dense = require_array<int32_t>(
      sparse_to_dense, {"sparse_to_dense", num_bytes(rail, uint32_t(p.world().num_local_ranks), sizeof(int32_t))});
  m.rail_to_node = flags(rail_to_node, "rail_to_node", rail);
  m.node_to_rail = flags(node_to_rail, "node_to_rail", num_bytes(p.num_tokens(), p.world().num_nodes - 1));
  m.local_routing = flags(local_routing, "local_routing", cells);
  m.permuted_rows = optional_array<int32_t>(permuted_rows, {"permuted_rows", num_bytes(cells, sizeof(int32_t))});
  m.source_ends = optional_array<int32_t>(source_ends, {"source_ends", num_bytes(ranks, sizeof(int32_t))});
  write_maps(p, m);
}

bool settled(const Placed& p, uint32_t topk, uint64_t most_tokens, uint64_t most_hidden, uint64_t recv_rows) {
  const PlacedCounts& c = p.waited().counts;
  if (!c.placed || std::ranges::max(c.rank_rows) > recv_rows) return false;
  if (std::ranges::any_of(c.dropped, [](uint32_t n) { return n > 0; })) return false;
  const HeaderRanges r = ranges_of(c.headers);
  return !r.excess && r.least_topk == topk && r.most_topk == topk && r.most_tokens <= most_tokens &&
         r.most_want_tokens <= most_tokens && r.most_want_hidden <= most_hidden && differing_fields(c.headers).empty();
}

std::shared_ptr<Plan> plan_in(const Placed& p, const View* memory) {
  const Placement& waited = p.waited();
  return p.placement->plan(require(memory, {"memory", waited.learned.total, p.device, 128}, Element::kInt64));
}

void bind_memory_of_plan(py::module_& m) {
  using M = PlanMemory;
  py::class_<M>(m, "PlanMemory", "Where a plan's arrays lie in its memory, in bytes; see layout/plan_memory.h.")
      .def_readonly("total", &M::total)
      .def_readonly("numbers", &M::numbers)
      .def_readonly("pair_expert", &M::pair_expert)
      .def_readonly("node_pos", &M::node_pos)
      .def_readonly("tokens_per_expert", &M::tokens_per_expert)
      .def_readonly("padded_tokens_per_expert", &M::padded_tokens_per_expert)
      .def_readonly("records", &M::records)
      .def_readonly("rail_records", &M::rail_records)
      .def_readonly("rail_record_stride", &M::rail_record_stride)
      .def_readonly("row_records", &M::row_records)
      .def_property_readonly("record_bytes", [](const M& p) { return p.message.record_bytes; })
      .def_property_readonly("dsts_at", [](const M&) { return MessageLayout::dsts_at(); })
      .def_property_readonly("max_dsts", [](const M& p) { return p.message.max_dsts; })
      .def_property_readonly("pairs_at", [](const M& p) { return p.message.pairs_at(); });
}

}  // namespace

void bind_plan(py::module_& m) {
  bind_memory_of_plan(m);
  py::class_<Placed>(m, "Placed", "A call that the exchange kernel was asked to place.")
      .def_property_readonly("complete",
                             py::cpp_function([](const Placed& p) { return p.complete; }, py::keep_alive<0, 1>()),
                             "The plan, when nobody waited for counts.")
      .def_property_readonly("placed", &Placed::placed)
      .def_property_readonly(
          "headers", [](const Placed& p) { return p.waited().counts.headers; }, "By rank.")
      .def_property_readonly(
          "differing", [](const Placed& p) { return differing_fields(p.waited().counts.headers); },
          "Names of what the headers must say alike and do not.")
      .def_property_readonly("ranges", [](const Placed& p) { return ranges_of(p.waited().counts.headers); })
      .def("settled", &settled, py::arg("topk"), py::arg("most_tokens"), py::arg("most_hidden"), py::arg("recv_rows"),
           "Whether all ranks made one kind of call, with that topk, and fit: rows are placed, none is dropped or more "
           "than recv_rows, and no rank has or wants more than most_tokens and most_hidden.")
      .def_property_readonly("most_tokens",
                             [](const Placed& p) { return ranges_of(p.waited().counts.headers).most_tokens; })
      .def_property_readonly("recv_rows", [](const Placed& p) { return p.counts().rank_rows; })
      .def_property_readonly("most_recv_rows", [](const Placed& p) { return std::ranges::max(p.counts().rank_rows); })
      .def_property_readonly("num_dropped_per_rank", [](const Placed& p) { return p.counts().dropped; })
      .def_property_readonly(
          "any_dropped",
          [](const Placed& p) { return std::ranges::any_of(p.counts().dropped, [](uint32_t n) { return n > 0; }); },
          "Whether a budget of some rank dropped pairs.")
      .def_property_readonly("from_nodes", [](const Placed& p) { return p.counts().from_nodes; })
      .def_property_readonly("learned", [](const Placed& p) { return p.waited().learned; })
      .def("plan", &plan_in, py::arg("memory"), py::keep_alive<0, 1>(), py::keep_alive<0, 2>(),
           "The plan, with learned.total bytes, 128-byte aligned, for what its dispatch learns.");
  py::class_<Plan, std::shared_ptr<Plan>>(m, "Plan", "One routing decision, ready for dispatch and combine.")
      .def_property_readonly("num_tokens", &Plan::num_tokens)
      .def_property_readonly("topk", &Plan::topk)
      .def_property_readonly("weight_stride", &Plan::weight_stride)
      .def_property_readonly("num_recv_rows", &Plan::num_recv_rows)
      .def_property_readonly("max_recv_rows", &Plan::max_recv_rows)
      .def_property_readonly("num_permuted_rows", &Plan::num_permuted_rows)
      .def_property_readonly("overflow", &Plan::overflow)
      .def_property_readonly("has_holes", &Plan::has_holes)
      .def_property_readonly("num_dropped", [](const Plan& p) { return p.counts().dropped[size_t(p.world().rank)]; })
      .def_property_readonly("tokens_per_expert", [](const Plan& p) { return p.counts().tokens_per_expert; })
      .def_property_readonly(
          "padded_tokens_per_expert",
          [](const Plan& p) {
            const auto& counts = p.counts().padded_tokens_per_expert;
            return py::bytearray(reinterpret_cast<const char*>(counts.data()), counts.size() * sizeof counts[0]);
          },
          "int64 [num_local_experts], a copy.")
      .def(
          "padded_tensor",
          [](const Plan& p) {
            auto copy = std::make_shared<std::vector<int64_t>>(p.counts().padded_tokens_per_expert);
            const auto rows = int64_t(copy->size());
            void* const data = copy->data();
            return Tensor(tensor_over({std::move(copy), data}, Element::kInt64, rows, std::nullopt));
          },
          "padded_tokens_per_expert as a tensor. Where exchanges_tensors().")
      .def("num_rail_tokens", &Plan::num_rail_tokens, py::arg("node"))
      .def_property_readonly("from_nodes", [](const Plan& p) { return p.counts().from_nodes; })
      .def_property_readonly("most_tokens", [](const Plan& p) { return ranges_of(p.counts().headers).most_tokens; })
      // Where the host can read the plan: the maps of the handles, and conversions of weights.
      .def("maps", &maps, py::kw_only(), py::arg("memory"), py::arg("sparse_to_dense"), py::arg("rail_to_node"),
           py::arg("node_to_rail"), py::arg("local_routing"), py::arg("permuted_rows") = py::none(),
           py::arg("source_ends") = py::none())
      .def("weights_from_dense", &weights_from_dense, py::kw_only(), py::arg("pair_expert"), py::arg("probs"),
           py::arg("out"))
      .def("weights_to_dense", &weights_to_dense, py::kw_only(), py::arg("pair_expert"), py::arg("weights"),
           py::arg("out"))
      .def("weights_from_topk", &weights_from_topk, py::kw_only(), py::arg("pair_expert"), py::arg("topk_idx"),
           py::arg("topk"), py::arg("topk_weights"), py::arg("out"));
}

}  // namespace hep
