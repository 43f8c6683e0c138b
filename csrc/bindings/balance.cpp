// Arrays come as addresses of contiguous memory; hybrid_ep/balance checks shapes and types before they get here.
#include "bindings/balance.h"

#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <algorithm>

#include "balance/microbatch.h"
#include "balance/placement.h"
#include "bindings/convert.h"

namespace py = pybind11;

namespace hep {
namespace {

using balance::MicrobatchPlanner;
using balance::MicrobatchShape;

balance::Strategy parse_strategy(const std::string& name) {
  if (name == "best") return balance::Strategy::kBest;
  if (name == "alias") return balance::Strategy::kAlias;
  if (name == "best_fit") return balance::Strategy::kBestFit;
  throw std::invalid_argument("strategy: '" + name + "' must be 'best', 'alias' or 'best_fit'");
}

MicrobatchShape make_shape(int num_ranks, int num_experts, int spare_slots, int num_nodes, bool within_node,
                           int64_t epsilon_ppm, int64_t skip_below_ppm, int64_t min_chunk, int64_t instance_cost,
                           int64_t tile, int64_t fan_out, int search_nodes, const std::string& strategy) {
  MicrobatchShape s{num_ranks,
                    num_experts,
                    spare_slots,
                    num_nodes,
                    within_node,
                    epsilon_ppm,
                    skip_below_ppm,
                    min_chunk,
                    instance_cost,
                    tile,
                    fan_out,
                    search_nodes,
                    parse_strategy(strategy)};
  s.validate();
  return s;
}

using Counts = py::array_t<int64_t, py::array::c_style>;
using Ranks = py::array_t<int32_t, py::array::c_style>;

// One micro-batch [R, E] or one of each of L layers [L, R, E]: (slot_expert, slot_tokens, target of each layer).
// Arrays, not addresses: asking numpy for an address from Python costs 2 us, a sixth of a plan.
py::tuple plan(MicrobatchPlanner& planner, const Counts& counts, const Ranks& home) {
  const MicrobatchShape& s = planner.shape();
  const bool layers = counts.ndim() == 3;
  const py::ssize_t num_layers = layers ? counts.shape(0) : 1;
  if (counts.ndim() < 2 || counts.size() != num_layers * s.num_ranks * s.num_experts || home.size() != s.num_experts)
    throw std::invalid_argument("counts: must be [ranks, experts] or [layers, ranks, experts], home [experts]");
  std::vector<py::ssize_t> dims{s.num_ranks, s.spare_slots};
  if (layers) dims.insert(dims.begin(), num_layers);
  Ranks expert(dims);
  Counts tokens(dims);
  const int64_t* from = counts.data();
  int32_t* to_expert = expert.mutable_data();
  int64_t* to_tokens = tokens.mutable_data();
  const int slots = s.num_ranks * s.spare_slots;
  if (!layers) return py::make_tuple(expert, tokens, planner.plan(from, home.data(), to_expert, to_tokens).target);
  py::list targets;
  for (py::ssize_t l = 0; l < num_layers; ++l) {
    targets.append(planner.plan(from, home.data(), to_expert, to_tokens).target);
    from += int64_t(s.num_ranks) * s.num_experts, to_expert += slots, to_tokens += slots;
  }
  return py::make_tuple(expert, tokens, targets);
}

}  // namespace

void bind_balance(py::module_& m) {
  py::class_<MicrobatchShape>(m, "MicrobatchShape", "What does not change between micro-batches; balance/microbatch.h.")
      .def(py::init(&make_shape), py::kw_only(), py::arg("num_ranks"), py::arg("num_experts"), py::arg("spare_slots"),
           py::arg("num_nodes"), py::arg("within_node"), py::arg("epsilon_ppm"), py::arg("skip_below_ppm"),
           py::arg("min_chunk"), py::arg("instance_cost"), py::arg("tile"), py::arg("fan_out"), py::arg("search_nodes"),
           py::arg("strategy"));
  py::class_<MicrobatchPlanner>(m, "MicrobatchPlanner", "Clones and quotas of one micro-batch.")
      .def(py::init<const MicrobatchShape&>())
      .def("plan", &plan, py::arg("counts").noconvert(), py::arg("home").noconvert(),
           "counts int64 [R, E] or [L, R, E], home int32 [E]: (slot_expert, slot_tokens, target or targets).");
  m.def("share_of_source", [](const MicrobatchShape& shape, uint64_t counts, uint64_t home, uint64_t slot_expert,
                              uint64_t slot_tokens, int source, uint64_t take) {
    balance::share_of_source(shape, pointer<const int64_t>(counts), pointer<const int32_t>(home),
                             pointer<const int32_t>(slot_expert), pointer<const int64_t>(slot_tokens), source,
                             pointer<int64_t>(take));
  });
  m.def(
      "check_placement",
      [](int num_experts, int num_slots, int num_groups, int num_nodes, int num_ranks) {
        balance::PlacementShape{num_experts, num_slots, num_groups, num_nodes, num_ranks}.validate();
      },
      py::kw_only(), py::arg("num_experts"), py::arg("num_slots"), py::arg("num_groups"), py::arg("num_nodes"),
      py::arg("num_ranks"));
  m.def(
      "place_layers",
      [](uint64_t load, uint64_t single, uint64_t group, int num_layers, int num_experts, int num_slots, int num_groups,
         int num_nodes, int num_ranks, uint64_t phy2log, uint64_t eplb, uint64_t lower) {
        const balance::PlacementShape s{num_experts, num_slots, num_groups, num_nodes, num_ranks};
        s.validate();
        py::gil_scoped_release release;
        balance::Placer placer(s);
        for (int64_t l = 0; l < num_layers; ++l) {
          const auto weight = pointer<const int64_t>(load) + l * num_experts;
          const auto ours = pointer<int32_t>(phy2log) + l * num_slots, theirs = pointer<int32_t>(eplb) + l * num_slots;
          placer.fresh(weight, ours);
          balance::eplb(s, pointer<const float>(single) + l * num_experts,
                        pointer<const float>(group) + l * std::max(num_groups, 1), theirs);
          pointer<int32_t>(lower)[l] = placer.compare(weight, ours, theirs);
        }
      },
      py::kw_only(), py::arg("load"), py::arg("single"), py::arg("group"), py::arg("num_layers"),
      py::arg("num_experts"), py::arg("num_slots"), py::arg("num_groups"), py::arg("num_nodes"), py::arg("num_ranks"),
      py::arg("phy2log"), py::arg("eplb"), py::arg("lower"));
  m.def(
      "improve_layers",
      [](uint64_t load, int num_layers, int num_experts, int num_slots, int num_groups, int num_nodes, int num_ranks,
         int64_t target_ppm, int64_t max_moves, uint64_t fresh, uint64_t phy2log) {
        const balance::PlacementShape s{num_experts, num_slots, num_groups, num_nodes, num_ranks};
        s.validate();
        py::gil_scoped_release release;
        balance::Placer placer(s);
        for (int l = 0; l < num_layers; ++l)
          placer.improve(pointer<const int64_t>(load) + int64_t(l) * num_experts,
                         pointer<const int32_t>(fresh) + int64_t(l) * num_slots, target_ppm, max_moves,
                         pointer<int32_t>(phy2log) + int64_t(l) * num_slots);
      },
      py::kw_only(), py::arg("load"), py::arg("num_layers"), py::arg("num_experts"), py::arg("num_slots"),
      py::arg("num_groups"), py::arg("num_nodes"), py::arg("num_ranks"), py::arg("target_ppm"), py::arg("max_moves"),
      py::arg("fresh"), py::arg("phy2log"));
}

}  // namespace hep
