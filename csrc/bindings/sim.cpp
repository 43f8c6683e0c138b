// Simulated worlds for Python: specs and costs as dictionaries, results as dictionaries of plain values.
#include "bindings/sim.h"

#include <pybind11/numpy.h>
#include <pybind11/stl.h>
#include <pybind11/typing.h>

#include "sim/world_spec.h"

namespace py = pybind11;

namespace hep {
namespace {

using sim::CostModel;
using sim::WorldSpec;
using Spec = py::typing::Dict<py::str, int>;
using SoakResult = py::typing::Tuple<uint64_t, uint64_t, py::typing::Optional<py::int_>>;
using Result = py::typing::Dict<py::str, py::object>;

template <class F>
void each_cost(CostModel& c, F&& f) {
  f("launch_ps", c.launch_ps), f("barrier_ps", c.barrier_ps);
  f("wake_ps", c.wake_ps), f("poll_ps", c.poll_ps), f("fence_ps", c.fence_ps), f("flag_ps", c.flag_ps);
  f("route_token_ps", c.route_token_ps), f("place_token_ps", c.place_token_ps);
  const auto loop = [&](const char* name, LoopStep step) { f(name, c.loop_ps[int(step)]); };
  loop("g2s_token_ps", LoopStep::kG2sToken), loop("s2g_token_ps", LoopStep::kS2gToken);
  loop("s2g_destination_ps", LoopStep::kS2gDestination), loop("s2g_pair_ps", LoopStep::kS2gPair);
  loop("n2n_token_ps", LoopStep::kN2nToken), loop("deliver_load_ps", LoopStep::kDeliverLoad);
  loop("deliver_store_ps", LoopStep::kDeliverStore), loop("sum_token_ps", LoopStep::kSumToken);
  loop("sum_destination_ps", LoopStep::kSumDestination), loop("sum_pair_ps", LoopStep::kSumPair);
  loop("sum_partial_ps", LoopStep::kSumPartial);
  loop("sum_row_ps", LoopStep::kSumRow);
  f("tma_read_mbps", c.tma_read_mbps), f("tma_write_mbps", c.tma_write_mbps), f("tma_op_ps", c.tma_op_ps);
  f("tma_latency_ps", c.tma_latency_ps), f("reduce_mbps", c.reduce_mbps), f("round_mbps", c.round_mbps);
  f("hbm_mbps", c.hbm_mbps), f("nvlink_egress_mbps", c.nvlink_egress_mbps);
  f("nvlink_ingress_mbps", c.nvlink_ingress_mbps), f("nvlink_latency_ps", c.nvlink_latency_ps);
  f("nic_mbps", c.nic_mbps), f("nic_message_ps", c.nic_message_ps), f("nic_post_ps", c.nic_post_ps);
  f("nic_latency_ps", c.nic_latency_ps);
  f("line_store_ps", c.line_store_ps), f("line_load_ps", c.line_load_ps), f("line_wait_ps", c.line_wait_ps);
  f("partial_line_ps", c.partial_line_ps), f("sum_line_ps", c.sum_line_ps);
  f("word_load_ps", c.word_load_ps), f("line_mbps", c.line_mbps);
  f("dispatch_signal_ps", c.dispatch_signal_ps), f("combine_signal_ps", c.combine_signal_ps);
  f("dispatch_count_ps", c.dispatch_count_ps), f("combine_count_ps", c.combine_count_ps);
}

// Fills the fields that the dictionary names; an unknown name or a negative number is an error.
template <class Each>
void fill(const py::dict& from, const char* what, Each&& each) {
  size_t known = 0;
  each([&](const char* name, auto& field) {
    if (!from.contains(name)) return;
    ++known;
    const int64_t value = py::object(from[name]).cast<int64_t>();
    using T = std::remove_reference_t<decltype(field)>;
    if (value < 0 || uint64_t(value) > uint64_t(std::numeric_limits<T>::max()))
      throw std::invalid_argument(std::string(what) + ": " + name + " = " + std::to_string(value) + " is out of range");
    field = T(value);
  });
  if (known == from.size()) return;
  for (const auto& [key, value] : from) {
    const std::string name = py::str(key);
    bool found = false;
    std::string names;
    each([&](const char* n, auto&) {
      found |= name == n;
      names += std::string(names.empty() ? "" : ", ") + n;
    });
    if (!found) throw std::invalid_argument(std::string(what) + ": has no field '" + name + "'; there are " + names);
  }
}

WorldSpec spec_of(const Spec& d) {
  WorldSpec spec;
  fill(d, "spec", [&](auto&& f) { WorldSpec::each_field(spec, f); });
  return spec;
}

Spec dict_of(const WorldSpec& spec) {
  Spec d;
  WorldSpec::each_field(spec, [&](const char* name, const auto& value) { d[name] = value; });
  return d;
}

py::object text_or_none(const char* text) {
  return text && *text ? py::object(py::str(text)) : py::object(py::none());
}

Result dict_of(const sim::WorldResult& r) {
  py::dict d;
  d["failure"] = py::none();
  if (!r.failure.kind.empty()) {
    py::dict f;
    f["kind"] = r.failure.kind;
    f["rule"] = r.failure.rule;
    f["what"] = r.failure.what;
    d["failure"] = f;
  }
  py::list ranks;
  for (const auto& o : r.ranks) {
    py::dict rank;
    rank["error"] = text_or_none(o.error.c_str());
    rank["site"] = text_or_none(o.site.c_str());
    rank["role"] = text_or_none(o.role.c_str());
    rank["peer"] = o.peer;
    rank["waited_s"] = o.waited_s;
    ranks.append(rank);
  }
  d["ranks"] = ranks;
  d["steps"] = r.steps;
  d["log"] = r.log;
  py::list kernels, links, roles, spans;
  for (const auto& k : r.kernels) kernels.append(py::make_tuple(k.kernel, k.rank, k.start, k.end));
  for (const auto& l : r.links) links.append(py::make_tuple(l.link, l.rank, l.block, l.busy, l.bytes, l.copies));
  for (const auto& [rank, t] : r.roles) {
    py::dict waited;
    for (int i = 0; i < 16; ++i)
      if (t.waited[i]) waited[site_name(Site(i))] = t.waited[i];
    roles.append(py::make_tuple(rank, t.role, t.busy, waited));
  }
  for (const auto& s : r.spans)
    spans.append(py::make_tuple(s.name, s.role, s.rank, s.block, s.link, s.start, s.end, s.bytes));
  d["kernels"] = kernels;
  d["links"] = links;
  d["roles"] = roles;
  d["spans"] = spans;
  return d;
}

Result simulate(const Spec& spec, const py::typing::Optional<Spec>& costs,
                const std::vector<std::vector<int64_t>>& topk_idx, double timeout_s, bool log, bool trace) {
  const WorldSpec world = spec_of(spec);
  sim::RunOptions options;
  options.log = log;
  options.trace = trace;
  options.timeout_s = timeout_s;
  options.topk_idx = topk_idx;
  if (!costs.is_none()) {
    options.timed = true;
    fill(costs.cast<py::dict>(), "costs", [&](auto&& f) { each_cost(options.costs, f); });
  }
  sim::WorldResult result;
  {
    py::gil_scoped_release release;
    result = sim::run_world(world, options);
  }
  return dict_of(result);
}

// Seeds first .. first + count - 1 until one fails: (seeds run, scheduler steps, failing seed or None).
SoakResult soak(uint64_t first, uint64_t count, int strategy) {
  uint64_t run = 0, steps = 0;
  bool failed = false;
  {
    py::gil_scoped_release release;
    for (; run < count && !failed; ++run) {
      const sim::WorldResult r = sim::run_world(sim::random_world(first + run, strategy), {});
      steps += r.steps;
      failed = !r.failure.kind.empty();
    }
  }
  return py::make_tuple(run, steps, failed ? py::object(py::int_(first + run - 1)) : py::object(py::none()));
}

}  // namespace

void bind_sim(py::module_& m) {
  m.def("simulate", &simulate, py::arg("spec"), py::kw_only(), py::arg("costs") = py::none(),
        py::arg("topk_idx") = std::vector<std::vector<int64_t>>{}, py::arg("timeout_s") = 100.0, py::arg("log") = false,
        py::arg("trace") = false,
        R"(Runs a whole world of the real kernels in one thread.

spec: {name: int}, the fields of csrc/sim/world_spec.h (what is missing keeps its default; see sim_defaults()).
costs: None explores: the interleaving is drawn from spec['seed'] by spec['strategy'], all bytes are moved and
    compared with an oracle. A dictionary of csrc/arch/sim/costs.h (times in picoseconds, rates in MB/s, 0 = free)
    runs on a virtual clock instead: deterministic, payload is not moved, nothing is compared.
topk_idx: by rank, a flat list [tokens * topk] of expert numbers, -1 = dropped; empty = drawn from spec['data_seed'].

Returns a dictionary:
  failure  None or {kind: deadlock | rule | wrong | error, rule, what}
  ranks    by rank {error, site, role, peer, waited_s}: the timeout report of a rank that waited in vain, else None in
           them
  steps    choices of the scheduler; log: lines, if asked for
  kernels  (kernel, rank, start_ps, end_ps) in order of their ends
  links    (link, rank, block, busy_ps, bytes, copies); link = tma_read | tma_write | line_store (by block), hbm,
           nvlink_egress, nvlink_ingress, nic_egress, nic_ingress (block -1); bytes are what really crosses it
  roles    (rank, role, busy_ps, {site: waited_ps}), summed over blocks
  spans    with trace: (operation, role, rank, block, link, start_ps, end_ps, bytes)
Raises ValueError for a spec or cost that makes no sense.)");
  m.def("sim_defaults", [] { return dict_of(WorldSpec{}); }, "The fields of a simulated world with their defaults.");
  m.def(
      "sim_random_world", [](uint64_t seed, int strategy) { return dict_of(sim::random_world(seed, strategy)); },
      py::arg("seed"), py::arg("strategy") = -1, "The world that a seed of the soak stands for.");
  m.def(
      "sim_cost_fields",
      [] {
        CostModel c;
        std::vector<std::string> names;
        each_cost(c, [&](const char* name, auto&) { names.emplace_back(name); });
        return names;
      },
      "Names of the costs.");
  m.def(
      "sim_strategies",
      [] {
        std::vector<std::string> names;
        for (int i = 0; i < sim::kNumStrategies; ++i) names.emplace_back(sim::strategy_name(sim::StrategyKind(i)));
        return names;
      },
      "Names of the strategies; spec['strategy'] is an index of this list.");
  m.def("sim_soak", &soak, py::arg("first"), py::arg("count"), py::arg("strategy") = -1,
        "Random worlds first .. first + count - 1 until one fails: (worlds run, steps, failing seed or None).");
}

}  // namespace hep
