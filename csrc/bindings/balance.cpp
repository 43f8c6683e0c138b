// The planners of csrc/balance for numpy. An array of another size, type or layout than a planner reads is a ValueError
// that names it; results are arrays made here.
#include "bindings/balance.h"

#include <pybind11/numpy.h>
#include <pybind11/stl.h>
#include <pybind11/typing.h>

#include <algorithm>

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

MicrobatchShape make_shape(int num_ranks, int num_experts, int spare_slots, int num_nodes, bool within_node, bool near,
                           int64_t epsilon_ppm, int64_t skip_below_ppm, int64_t min_chunk, int64_t instance_cost,
                           int64_t tile, int64_t fan_out, int search_nodes, const std::string& strategy) {
  MicrobatchShape s{
      num_ranks,      num_experts, spare_slots,   num_nodes, within_node, near,         epsilon_ppm,
      skip_below_ppm, min_chunk,   instance_cost, tile,      fan_out,     search_nodes, parse_strategy(strategy)};
  s.validate();
  return s;
}

// A C-contiguous array of T with `size` elements, as it is: nothing is converted.
template <class T>
const T* numbers(const char* name, const py::array& a, py::ssize_t size) {
  if (!py::isinstance<py::array_t<T, py::array::c_style>>(a))
    throw std::invalid_argument(std::string(name) + ": is " + std::string(py::str(a.dtype())) +
                                " or not contiguous; give a C-contiguous array of " +
                                std::string(py::str(py::dtype::of<T>())));
  if (a.size() != size)
    throw std::invalid_argument(std::string(name) + ": has " + std::to_string(a.size()) + " numbers; give " +
                                std::to_string(size));
  return static_cast<const T*>(a.data());
}

using Counts = py::array_t<int64_t, py::array::c_style>;
using Ranks = py::array_t<int32_t, py::array::c_style>;
using PlanOfLayers = py::typing::Tuple<Ranks, Counts, py::object>;

// What a planner refuses of a layer says which one it is.
template <class Make>
auto of_layer(py::ssize_t layer, const Make& make) {
  try {
    return make();
  } catch (const std::invalid_argument& error) {
    throw std::invalid_argument(std::string(error.what()) + " (layer " + std::to_string(layer) + ")");
  }
}

// One micro-batch [R, E] or one of each of L layers [L, R, E]: (slot_expert, slot_tokens, target of each layer).
// Arrays, not addresses: asking numpy for an address from Python costs 2 us, a sixth of a plan.
PlanOfLayers plan(MicrobatchPlanner& planner, const py::array& counts, const py::array& owner) {
  const MicrobatchShape& s = planner.shape();
  const bool layers = counts.ndim() == 3;
  const py::ssize_t num_layers = layers ? counts.shape(0) : 1;
  const int64_t* from = numbers<int64_t>("counts", counts, num_layers * s.num_ranks * s.num_experts);
  const int32_t* owners = numbers<int32_t>("owner", owner, s.num_experts);
  std::vector<py::ssize_t> dims{s.num_ranks, s.spare_slots};
  if (layers) dims.insert(dims.begin(), num_layers);
  Ranks expert(dims);
  Counts tokens(dims);
  int32_t* to_expert = expert.mutable_data();
  int64_t* to_tokens = tokens.mutable_data();
  const int slots = s.num_ranks * s.spare_slots;
  if (!layers) return py::make_tuple(expert, tokens, planner.plan(from, owners, to_expert, to_tokens).target);
  py::list targets;
  for (py::ssize_t l = 0; l < num_layers; ++l) {
    targets.append(of_layer(l, [&] { return planner.plan(from, owners, to_expert, to_tokens).target; }));
    from += int64_t(s.num_ranks) * s.num_experts;
    to_expert += slots;
    to_tokens += slots;
  }
  return py::make_tuple(expert, tokens, targets);
}

void require_rank(const char* name, int rank, const MicrobatchShape& s) {
  if (rank < 0 || rank >= s.num_ranks)
    throw std::invalid_argument(std::string(name) + ": is " + std::to_string(rank) + "; give a rank below " +
                                std::to_string(s.num_ranks));
}

void require_owners(const MicrobatchShape& s, const int32_t* owners) {
  for (int e = 0; e < s.num_experts; ++e)
    if (owners[e] < 0 || owners[e] >= s.num_ranks)
      throw std::invalid_argument("owner: expert " + std::to_string(e) + " is on rank " + std::to_string(owners[e]) +
                                  "; give ranks from 0 to " + std::to_string(s.num_ranks - 1));
}

// A plan that its counts allow: slots name experts that there are, and clones take no more tokens than these have.
void require_plan(const MicrobatchShape& s, const int64_t* counts, const int32_t* owners, const int32_t* experts,
                  const int64_t* tokens) {
  require_owners(s, owners);
  constexpr int64_t kMost = int64_t(1) << 40;  // of a planner too: sums stay far from the end of the type
  std::vector<int64_t> left(size_t(s.num_experts), 0);
  int64_t all = 0;
  for (int64_t i = 0; i < int64_t(s.num_ranks) * s.num_experts; ++i) {
    if (counts[i] < 0 || counts[i] >= kMost || (all += counts[i]) >= kMost)
      throw std::invalid_argument("counts: is " + std::to_string(counts[i]) + " for expert " +
                                  std::to_string(i % s.num_experts) + "; give 0 or more, below 2^40 in all");
    left[size_t(i % s.num_experts)] += counts[i];
  }
  const auto at = [&](int i) {
    return " in slot " + std::to_string(i % s.spare_slots) + " of rank " + std::to_string(i / s.spare_slots);
  };
  for (int i = 0; i < s.num_ranks * s.spare_slots; ++i) {
    const int32_t e = experts[i];
    if (e < -1 || e >= s.num_experts)
      throw std::invalid_argument("slot_expert: is " + std::to_string(e) + at(i) + "; give experts from 0 to " +
                                  std::to_string(s.num_experts - 1) + ", or -1 for an empty slot");
    if (tokens[i] < 0 || (e >= 0 && tokens[i] > left[size_t(e)]))
      throw std::invalid_argument("slot_tokens: is " + std::to_string(tokens[i]) + at(i) +
                                  "; give 0 or more, over all " +
                                  "clones of an expert at most the tokens that counts has for it");
    if (e >= 0) left[size_t(e)] -= tokens[i];
  }
}

// Columns of a map over physical slots, one of its own for each expert, among those that its rank has for owners.
void require_columns(const MicrobatchShape& s, const int32_t* owners, const int64_t* columns) {
  if (s.num_experts % s.num_ranks != 0) return;  // part_of_rank says so
  const int64_t own = s.num_experts / s.num_ranks, width = own + s.spare_slots;
  std::vector<char> taken(size_t(s.num_ranks * width), 0);
  for (int e = 0; e < s.num_experts; ++e) {
    const int64_t first = owners[e] * width;
    if (columns[e] >= first && columns[e] < first + own && !taken[size_t(columns[e])]++) continue;
    throw std::invalid_argument("columns: is " + std::to_string(columns[e]) + " for expert " + std::to_string(e) +
                                " of rank " + std::to_string(owners[e]) +
                                "; give each expert a column of its own from " + std::to_string(first) + " to " +
                                std::to_string(first + own - 1));
  }
}

using Part = py::typing::Tuple<Counts, Counts>;
Part as_arrays(const balance::RankPart& part) {
  static_assert(sizeof(balance::RankPart::Redirect) == 3 * 8 && sizeof(balance::RankPart::Push) == 5 * 8);
  Counts redirects({py::ssize_t(part.redirects.size()), py::ssize_t(3)});
  Counts pushes({py::ssize_t(part.pushes.size()), py::ssize_t(5)});
  std::copy_n(reinterpret_cast<const int64_t*>(part.redirects.data()), redirects.size(), redirects.mutable_data());
  std::copy_n(reinterpret_cast<const int64_t*>(part.pushes.data()), pushes.size(), pushes.mutable_data());
  return py::make_tuple(redirects, pushes);
}

Part part_of_rank(const MicrobatchShape& s, const py::array& counts, const py::array& owner, const py::array& columns,
                  const py::array& slot_expert, const py::array& slot_tokens, int rank) {
  require_rank("rank", rank, s);
  const py::ssize_t slots = py::ssize_t(s.num_ranks) * s.spare_slots;
  const int64_t* from = numbers<int64_t>("counts", counts, py::ssize_t(s.num_ranks) * s.num_experts);
  const int32_t* owners = numbers<int32_t>("owner", owner, s.num_experts);
  const int64_t* at = numbers<int64_t>("columns", columns, s.num_experts);
  const int32_t* experts = numbers<int32_t>("slot_expert", slot_expert, slots);
  const int64_t* tokens = numbers<int64_t>("slot_tokens", slot_tokens, slots);
  require_plan(s, from, owners, experts, tokens);
  require_columns(s, owners, at);
  return as_arrays(balance::part_of_rank(s, from, owners, at, experts, tokens, rank));
}

// A plan and one rank's part in it, in one call: what a layer waits for.
using PlanOfRank = py::typing::Tuple<Ranks, Counts, py::int_, Counts, Counts>;
PlanOfRank plan_of_rank(MicrobatchPlanner& planner, const py::array& counts, const py::array& owner,
                        const py::array& columns, int rank) {
  const MicrobatchShape& s = planner.shape();
  require_rank("rank", rank, s);
  const int64_t* from = numbers<int64_t>("counts", counts, py::ssize_t(s.num_ranks) * s.num_experts);
  const int32_t* owners = numbers<int32_t>("owner", owner, s.num_experts);
  const int64_t* at = numbers<int64_t>("columns", columns, s.num_experts);
  require_owners(s, owners);
  require_columns(s, owners, at);
  Ranks expert({s.num_ranks, s.spare_slots});
  Counts tokens({s.num_ranks, s.spare_slots});
  const int64_t target = planner.plan(from, owners, expert.mutable_data(), tokens.mutable_data()).target;
  const Part part = as_arrays(balance::part_of_rank(s, from, owners, at, expert.data(), tokens.data(), rank));
  return py::make_tuple(expert, tokens, target, part[0], part[1]);
}

Counts share_of_source(const MicrobatchShape& s, const py::array& counts, const py::array& owner,
                       const py::array& slot_expert, const py::array& slot_tokens, int source) {
  require_rank("source", source, s);
  const py::ssize_t slots = py::ssize_t(s.num_ranks) * s.spare_slots;
  const int64_t* from = numbers<int64_t>("counts", counts, py::ssize_t(s.num_ranks) * s.num_experts);
  const int32_t* owners = numbers<int32_t>("owner", owner, s.num_experts);
  const int32_t* experts = numbers<int32_t>("slot_expert", slot_expert, slots);
  const int64_t* tokens = numbers<int64_t>("slot_tokens", slot_tokens, slots);
  require_plan(s, from, owners, experts, tokens);
  Counts take(std::vector<py::ssize_t>{s.num_ranks, s.spare_slots});
  std::vector<int64_t> first(static_cast<size_t>(take.size()));
  balance::share_of_source(s, from, owners, experts, tokens, source, take.mutable_data(), first.data());
  return take;
}

int64_t clones_fit(const py::array& load, const py::array& owner, int num_ranks, int spare_slots) {
  const int64_t* tokens = numbers<int64_t>("load", load, load.size());
  const int32_t* owners = numbers<int32_t>("owner", owner, load.size());
  for (py::ssize_t e = 0; e < load.size(); ++e)
    if (owners[e] < 0 || owners[e] >= num_ranks || tokens[e] < 0)
      throw std::invalid_argument("load, owner: expert " + std::to_string(e) + " has " + std::to_string(tokens[e]) +
                                  " tokens on rank " + std::to_string(owners[e]));
  return balance::ClonesFit(num_ranks, spare_slots, tokens, int(load.size()), owners).least();
}

// load int64 [L, E], single float32 [L, E], group float32 [L, groups]: (ours, EPLB's, how they compare).
py::typing::Tuple<Ranks, Ranks, Ranks> place_layers(const py::array& load, const py::array& single,
                                                    const py::array& group, int num_layers, int num_experts,
                                                    int num_slots, int num_groups, int num_nodes, int num_ranks) {
  const balance::PlacementShape s{num_experts, num_slots, num_groups, num_nodes, num_ranks};
  s.validate();
  const py::ssize_t groups = std::max(num_groups, 1), L = num_layers;
  const int64_t* from = numbers<int64_t>("load", load, L * num_experts);
  const float* floats = numbers<float>("single", single, L * num_experts);
  const float* sums = numbers<float>("group", group, L * groups);
  Ranks ours({L, py::ssize_t(num_slots)}), theirs({L, py::ssize_t(num_slots)}), which(L);
  int32_t *mine = ours.mutable_data(), *other = theirs.mutable_data(), *compared = which.mutable_data();
  {
    py::gil_scoped_release release;
    balance::Placer placer(s);
    for (py::ssize_t l = 0; l < L; ++l) {
      placer.fresh(from + l * num_experts, mine + l * num_slots);
      balance::eplb(s, floats + l * num_experts, sums + l * groups, other + l * num_slots);
      compared[l] = placer.compare(from + l * num_experts, mine + l * num_slots, other + l * num_slots);
    }
  }
  return py::make_tuple(ours, theirs, which);
}

Ranks improve_layers(const py::array& load, const py::array& current, const py::array& fresh, int num_layers,
                     int num_experts, int num_slots, int num_groups, int num_nodes, int num_ranks, int64_t target_ppm,
                     int64_t max_moves) {
  const balance::PlacementShape s{num_experts, num_slots, num_groups, num_nodes, num_ranks};
  s.validate();
  const py::ssize_t L = num_layers, slots = num_slots;
  const int64_t* from = numbers<int64_t>("load", load, L * num_experts);
  const int32_t* start = numbers<int32_t>("fresh", fresh, L * slots);
  const int32_t* given = numbers<int32_t>("current", current, L * slots);
  Ranks placed({L, slots});
  int32_t* to = placed.mutable_data();
  std::copy_n(given, L * slots, to);
  py::gil_scoped_release release;
  balance::Placer placer(s);
  for (py::ssize_t l = 0; l < L; ++l)
    of_layer(l,
             [&] { placer.improve(from + l * num_experts, start + l * slots, target_ppm, max_moves, to + l * slots); });
  return placed;
}

}  // namespace

void bind_balance(py::module_& m) {
  py::class_<MicrobatchShape>(m, "MicrobatchShape", "What does not change between micro-batches; balance/microbatch.h.")
      .def(py::init(&make_shape), py::kw_only(), py::arg("num_ranks"), py::arg("num_experts"), py::arg("spare_slots"),
           py::arg("num_nodes"), py::arg("within_node"), py::arg("near"), py::arg("epsilon_ppm"),
           py::arg("skip_below_ppm"), py::arg("min_chunk"), py::arg("instance_cost"), py::arg("tile"),
           py::arg("fan_out"), py::arg("search_nodes"), py::arg("strategy"));
  py::class_<MicrobatchPlanner>(m, "MicrobatchPlanner", "Clones and quotas of one micro-batch.")
      .def(py::init<const MicrobatchShape&>(), py::arg("shape"))
      .def("plan", &plan, py::arg("counts"), py::arg("owner"),
           "counts int64 [R, E] or [L, R, E], owner int32 [E]: (slot_expert, slot_tokens, target or targets).")
      .def(
          "plan_of_rank", &plan_of_rank, py::arg("counts"), py::arg("owner"), py::arg("columns"), py::arg("rank"),
          "counts int64 [R, E], owner int32 [E], columns int64 [E]: (slot_expert, slot_tokens, target, redirects int64 "
          "[n, 3], pushes int64 [m, 5]); RankPart of hybrid_ep/balance/microbatch.py.");
  m.def("share_of_source", &share_of_source, py::arg("shape"), py::arg("counts"), py::arg("owner"),
        py::arg("slot_expert"), py::arg("slot_tokens"), py::arg("source"));
  m.def("part_of_rank", &part_of_rank, py::arg("shape"), py::arg("counts"), py::arg("owner"), py::arg("columns"),
        py::arg("slot_expert"), py::arg("slot_tokens"), py::arg("rank"),
        "(redirects int64 [n, 3], pushes int64 [m, 5]) of a plan, as in plan_of_rank.");
  m.def("clones_fit", &clones_fit, py::arg("load"), py::arg("owner"), py::arg("num_ranks"), py::arg("spare_slots"),
        "load int64 [E], owner int32 [E]: tokens of the fullest rank that no plan beats; bounds.clones_fit.");
  m.def("place_layers", &place_layers, py::kw_only(), py::arg("load"), py::arg("single"), py::arg("group"),
        py::arg("num_layers"), py::arg("num_experts"), py::arg("num_slots"), py::arg("num_groups"),
        py::arg("num_nodes"), py::arg("num_ranks"),
        "load int64 [L, E]; single and group the same in float32, by expert and by group of experts: (our placement, "
        "EPLB's, int32 [L, slots] each, and by layer: below 0 where ours is lower, above 0 where EPLB's is).");
  m.def("improve_layers", &improve_layers, py::kw_only(), py::arg("load"), py::arg("current"), py::arg("fresh"),
        py::arg("num_layers"), py::arg("num_experts"), py::arg("num_slots"), py::arg("num_groups"),
        py::arg("num_nodes"), py::arg("num_ranks"), py::arg("target_ppm"), py::arg("max_moves"),
        "From a placement in force, int32 [L, slots], measured against a fresh one.");
}

}  // namespace hep
