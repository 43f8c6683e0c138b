// The planners of csrc/balance for numpy. An array of another size, type or layout than a planner reads is a ValueError
// that names it; results are arrays made here.
#include "bindings/balance.h"

#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include "balance/microbatch.h"
#include "balance/placement.h"

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

// A C-contiguous array of T with `size` elements, as it is: nothing is converted.
template <class T>
const T* numbers(const char* name, const py::array& a, py::ssize_t size) {
  if (!py::isinstance<py::array_t<T, py::array::c_style>>(a))
    throw std::invalid_argument(std::string(name) + ": is " + std::string(py::str(a.dtype())) +
                                " or not contiguous; give a C-contiguous array of int" +
                                std::to_string(8 * sizeof(T)));
  if (a.size() != size)
    throw std::invalid_argument(std::string(name) + ": has " + std::to_string(a.size()) + " numbers; give " +
                                std::to_string(size));
  return static_cast<const T*>(a.data());
}

using Counts = py::array_t<int64_t, py::array::c_style>;
using Ranks = py::array_t<int32_t, py::array::c_style>;

// One micro-batch [R, E] or one of each of L layers [L, R, E]: (slot_expert, slot_tokens, target of each layer).
// Arrays, not addresses: asking numpy for an address from Python costs 2 us, a sixth of a plan.
py::tuple plan(MicrobatchPlanner& planner, const py::array& counts, const py::array& home) {
  const MicrobatchShape& s = planner.shape();
  const bool layers = counts.ndim() == 3;
  const py::ssize_t num_layers = layers ? counts.shape(0) : 1;
  const int64_t* from = numbers<int64_t>("counts", counts, num_layers * s.num_ranks * s.num_experts);
  const int32_t* homes = numbers<int32_t>("home", home, s.num_experts);
  std::vector<py::ssize_t> dims{s.num_ranks, s.spare_slots};
  if (layers) dims.insert(dims.begin(), num_layers);
  Ranks expert(dims);
  Counts tokens(dims);
  int32_t* to_expert = expert.mutable_data();
  int64_t* to_tokens = tokens.mutable_data();
  const int slots = s.num_ranks * s.spare_slots;
  if (!layers) return py::make_tuple(expert, tokens, planner.plan(from, homes, to_expert, to_tokens).target);
  py::list targets;
  for (py::ssize_t l = 0; l < num_layers; ++l) {
    targets.append(planner.plan(from, homes, to_expert, to_tokens).target);
    from += int64_t(s.num_ranks) * s.num_experts, to_expert += slots, to_tokens += slots;
  }
  return py::make_tuple(expert, tokens, targets);
}

Counts share_of_source(const MicrobatchShape& s, const py::array& counts, const py::array& home,
                       const py::array& slot_expert, const py::array& slot_tokens, int source) {
  if (source < 0 || source >= s.num_ranks)
    throw std::invalid_argument("source: is " + std::to_string(source) + "; give a rank below " +
                                std::to_string(s.num_ranks));
  const py::ssize_t slots = py::ssize_t(s.num_ranks) * s.spare_slots;
  const int64_t* from = numbers<int64_t>("counts", counts, py::ssize_t(s.num_ranks) * s.num_experts);
  const int32_t* homes = numbers<int32_t>("home", home, s.num_experts);
  const int32_t* experts = numbers<int32_t>("slot_expert", slot_expert, slots);
  const int64_t* tokens = numbers<int64_t>("slot_tokens", slot_tokens, slots);
  for (int e = 0; e < s.num_experts; ++e)
    if (homes[e] < 0 || homes[e] >= s.num_ranks)
      throw std::invalid_argument("home: expert " + std::to_string(e) + " is on rank " + std::to_string(homes[e]));
  for (py::ssize_t i = 0; i < slots; ++i)
    if (experts[i] >= s.num_experts)
      throw std::invalid_argument("slot_expert: names expert " + std::to_string(experts[i]));
  Counts take(std::vector<py::ssize_t>{s.num_ranks, s.spare_slots});
  balance::share_of_source(s, from, homes, experts, tokens, source, take.mutable_data());
  return take;
}

// [layers, experts] loads -> [layers, slots]; each(placer, load, slots) plans a layer.
template <class Each>
Ranks plan_layers(const py::array& load, const balance::PlacementShape& s, Ranks slots, Each each) {
  const py::ssize_t num_layers = slots.shape(0);
  const int64_t* from = numbers<int64_t>("load", load, num_layers * s.num_experts);
  int32_t* to = slots.mutable_data();
  py::gil_scoped_release release;
  balance::Placer placer(s);
  for (py::ssize_t l = 0; l < num_layers; ++l) each(placer, from + l * s.num_experts, to + l * s.num_slots);
  return slots;
}

Ranks place_layers(const py::array& load, int num_layers, int num_experts, int num_slots, int num_groups, int num_nodes,
                   int num_ranks) {
  const balance::PlacementShape s{num_experts, num_slots, num_groups, num_nodes, num_ranks};
  s.validate();
  Ranks slots(std::vector<py::ssize_t>{num_layers, num_slots});
  std::fill_n(slots.mutable_data(), slots.size(), 0);
  return plan_layers(load, s, std::move(slots),
                     [](auto& placer, const int64_t* from, int32_t* to) { placer.fresh(from, to); });
}

Ranks improve_layers(const py::array& load, const py::array& current, int num_layers, int num_experts, int num_slots,
                     int num_groups, int num_nodes, int num_ranks, int64_t target_ppm, int64_t max_moves) {
  const balance::PlacementShape s{num_experts, num_slots, num_groups, num_nodes, num_ranks};
  s.validate();
  Ranks slots(std::vector<py::ssize_t>{num_layers, num_slots});
  std::copy_n(numbers<int32_t>("current", current, slots.size()), slots.size(), slots.mutable_data());
  return plan_layers(load, s, std::move(slots), [=](auto& placer, const int64_t* from, int32_t* to) {
    placer.improve(from, target_ppm, max_moves, to);
  });
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
      .def("plan", &plan, py::arg("counts"), py::arg("home"),
           "counts int64 [R, E] or [L, R, E], home int32 [E]: (slot_expert, slot_tokens, target or targets).");
  m.def("share_of_source", &share_of_source, py::arg("shape"), py::arg("counts"), py::arg("home"),
        py::arg("slot_expert"), py::arg("slot_tokens"), py::arg("source"));
  m.def("place_layers", &place_layers, py::kw_only(), py::arg("load"), py::arg("num_layers"), py::arg("num_experts"),
        py::arg("num_slots"), py::arg("num_groups"), py::arg("num_nodes"), py::arg("num_ranks"),
        "load int64 [L, E]: the expert of every slot, int32 [L, slots].");
  m.def("improve_layers", &improve_layers, py::kw_only(), py::arg("load"), py::arg("current"), py::arg("num_layers"),
        py::arg("num_experts"), py::arg("num_slots"), py::arg("num_groups"), py::arg("num_nodes"),
        py::arg("num_ranks"), py::arg("target_ppm"), py::arg("max_moves"),
        "The same from a placement in force, int32 [L, slots].");
}

}  // namespace hep
