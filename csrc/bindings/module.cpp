// hybrid_ep._core: the engine for Python. Tensors come as addresses, so this module knows no torch and one build
// serves every torch version. Every call that can wait releases the GIL.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>

#include "arch/host/errors.h"
#include "bindings/balance.h"
#include "bindings/convert.h"
#include "bindings/cuda.h"
#include "bindings/nvshmem.h"
#include "bindings/sim.h"
#include "layout/headers.h"
#include "runtime/engine.h"

namespace py = pybind11;

namespace hep {
namespace {

// A finished exchange: headers by name, counts, and the way to a plan.
struct Exchange {
  std::shared_ptr<Routing> routing;
  std::vector<std::string> names;

  std::vector<std::map<std::string, uint32_t>> headers() const {
    std::vector<std::map<std::string, uint32_t>> all;
    for (int r = 0; r < routing->world.num_ranks(); ++r) {
      std::map<std::string, uint32_t> h{{"num_tokens", routing->view().header(r, kHeaderNumTokens)},
                                        {"topk", routing->view().header(r, kHeaderTopk)}};
      for (size_t i = 0; i < names.size(); ++i) h[names[i]] = routing->view().header(r, kHeaderFirstFree + int(i));
      all.push_back(std::move(h));
    }
    return all;
  }
  std::vector<uint64_t> recv_rows() const {
    std::vector<uint64_t> rows;
    for (int d = 0; d < routing->world.num_ranks(); ++d) {
      rows.push_back(0);
      for (int s = 0; s < routing->world.num_ranks(); ++s) rows.back() += routing->view().rows(s, d);
    }
    return rows;
  }
  uint32_t topk() const {
    uint32_t k = 1;
    for (int r = 0; r < routing->world.num_ranks(); ++r) k = std::max(k, routing->view().header(r, kHeaderTopk));
    return k;
  }
};

Exchange exchange(Engine& engine, uint64_t routing, const std::string& kind, uint64_t weights, int64_t num_tokens,
                  int64_t topk, const py::dict& header) {
  RoutingInput in;
  if (kind != "topk" && kind != "map") throw std::invalid_argument("kind: '" + kind + "' must be 'topk' or 'map'");
  (kind == "topk" ? in.topk_idx = pointer<const int64_t>(routing) : nullptr);
  (kind == "map" ? in.routing_map = pointer<const unsigned char>(routing) : nullptr);
  in.weights = pointer<const float>(weights);
  in.num_tokens = narrow("num_tokens", num_tokens);
  in.topk = narrow("topk", topk);
  Exchange x;
  for (const auto& [name, value] : header) {
    x.names.push_back(name.cast<std::string>());
    in.header.push_back(narrow(x.names.back().c_str(), value.cast<int64_t>()));
  }
  py::gil_scoped_release release;
  x.routing = engine.exchange(in);
  return x;
}

// A routed dispatch that the exchange kernel places. The host waits for the counts, or, without `count`, for nothing.
struct Placed {
  std::shared_ptr<Plan> complete;  // without `count`
  std::shared_ptr<Placement> placement;
  std::vector<std::string> names;

  bool placed() const { return placement->counts.placed; }
  const PlacedCounts& counts() const {
    if (!placed()) throw std::logic_error("the ranks' calls do not fit: there are headers, and nothing else");
    return placement->counts;
  }
  std::vector<std::map<std::string, uint32_t>> headers() const {
    const PlacedCounts& c = placement->counts;
    std::vector<std::map<std::string, uint32_t>> all;
    for (int r = 0; r < int(c.headers.size()) / kCountHeaderWords; ++r) {
      const uint32_t topk = c.header(r, kHeaderTopk);
      all.push_back(
          {{"num_tokens", c.header(r, kHeaderNumTokens)}, {"topk", topk & kMostTopk}, {"excess", topk >> 16}});
      for (size_t i = 0; i < names.size(); ++i) all.back()[names[i]] = c.header(r, kHeaderFirstFree + int(i));
    }
    return all;
  }
};

Placed place(Engine& engine, uint64_t routing, const std::string& kind, uint64_t weights, int64_t num_tokens,
             int64_t topk_in, int64_t topk, const py::dict& header, const std::vector<std::string>& must_agree,
             uint64_t memory, int64_t pad_multiple, bool pad_empty, int64_t budget, bool count) {
  Placed result;
  RoutingInput in;
  (kind == "topk" ? in.topk_idx = pointer<const int64_t>(routing) : nullptr);
  (kind == "map" ? in.routing_map = pointer<const unsigned char>(routing) : nullptr);
  in.weights = pointer<const float>(weights);
  in.num_tokens = narrow("num_tokens", num_tokens), in.topk = narrow("topk_in", topk_in);
  PlaceCall c;
  c.topk = narrow("topk", topk), c.pad_multiple = narrow("pad_multiple", pad_multiple), c.pad_empty = pad_empty;
  c.budget = narrow("budget", budget), c.memory = pointer<unsigned char>(memory);
  c.must_agree = 1u << kHeaderTopk;
  for (const auto& [key, value] : header) {
    const std::string name = key.cast<std::string>();
    const uint32_t word = kHeaderFirstFree + uint32_t(in.header.size());
    if (name == "budget") c.budget_word = word;
    if (std::find(must_agree.begin(), must_agree.end(), name) != must_agree.end()) c.must_agree |= 1u << word;
    in.header.push_back(narrow(name.c_str(), value.cast<int64_t>()));
    result.names.push_back(name);
  }
  if (!c.budget_word) throw std::invalid_argument("header: a word named 'budget' must be in it");
  py::gil_scoped_release release;
  if (count)
    result.placement = engine.place_and_count(in, c);
  else
    result.complete = engine.place(in, c);
  return result;
}

// Arrays of a placed plan that a caller may look at, as offsets in its memory; "total" is its size.
std::map<std::string, uint64_t> plan_memory(const Engine& engine, int64_t num_tokens, int64_t topk, bool worst_case) {
  const PlanMemory m = engine.plan_memory(narrow("num_tokens", num_tokens), narrow("topk", topk), worst_case);
  return {{"total", m.total},
          {"numbers", m.numbers},
          {"pair_expert", m.pair_expert},
          {"node_pos", m.node_pos},
          {"records", m.records},
          {"record_bytes", m.message.record_bytes},
          {"dsts_at", MessageLayout::dsts_at()},
          {"max_dsts", m.message.max_dsts},
          {"pairs_at", m.message.pairs_at()},
          {"tokens_per_expert", m.tokens_per_expert},
          {"padded_tokens_per_expert", m.padded_tokens_per_expert}};
}

void dispatch(Engine& engine, Plan& plan, uint64_t x, uint64_t scale, int64_t weights, uint64_t out_x,
              uint64_t out_scale, uint64_t out_weights, int64_t row_bytes, int64_t scale_bytes, bool permute,
              int64_t out_rows, int num_blocks, int deliver_blocks, int64_t chunk_tokens) {
  DispatchCall c;
  c.x = pointer<const unsigned char>(x), c.scales = pointer<const unsigned char>(scale);
  c.weights = weights == -1 ? plan.weights() : pointer<const float>(uint64_t(weights));
  // A rank without tokens has no weights to point at; that weights travel is a fact of the call all the same.
  static constexpr float kNoWeights[4] = {};
  if (weights == -1 && !c.weights) c.weights = kNoWeights;
  c.out_x = pointer<unsigned char>(out_x), c.out_scales = pointer<unsigned char>(out_scale),
  c.out_weights = pointer<float>(out_weights);
  c.row_bytes = narrow("row_bytes", row_bytes), c.scale_bytes = narrow("scale_bytes", scale_bytes);
  c.permute = permute, c.out_rows = narrow("out_rows", out_rows);
  c.num_blocks = num_blocks, c.deliver_blocks = deliver_blocks;
  c.chunk_tokens = narrow("chunk_tokens", chunk_tokens);
  py::gil_scoped_release release;
  engine.dispatch(plan, c);
}

void combine(Engine& engine, Plan& plan, uint64_t x, const std::string& dtype, int64_t hidden, uint64_t weights,
             uint64_t out_x, uint64_t out_weights, bool permuted, bool multiply, bool fp32_partials, int num_blocks,
             int unpermute_blocks, int64_t chunk_tokens) {
  CombineCall c;
  c.x = pointer<const unsigned char>(x), c.weights = pointer<const float>(weights);
  c.out_x = pointer<unsigned char>(out_x), c.out_weights = pointer<float>(out_weights);
  c.dtype = parse_dtype(dtype), c.hidden = narrow("hidden", hidden);
  c.permuted = permuted, c.multiply = multiply, c.fp32_partials = fp32_partials;
  c.num_blocks = num_blocks, c.unpermute_blocks = unpermute_blocks;
  c.chunk_tokens = narrow("chunk_tokens", chunk_tokens);
  py::gil_scoped_release release;
  engine.combine(plan, c);
}

std::unique_ptr<Engine> make_engine(int rank, const BufferShape& shape, std::vector<std::shared_ptr<Segment>> segments,
                                    double timeout_s, const std::string& executor, uint64_t seed) {
  auto engine = std::make_unique<Engine>(rank, shape, std::move(segments), timeout_s, executor, seed);
  engine->set_interrupt_check([] {  // Ctrl-C while a kernel waits for other ranks
    py::gil_scoped_acquire acquire;
    return PyErr_CheckSignals() != 0;
  });
  return engine;
}

std::map<std::string, uint64_t> traffic(const Engine& e) {
  const TrafficCounters t = e.traffic();
  return {{"rail_rows", t.rail_rows},    {"rail_bytes", t.rail_bytes}, {"node_rows", t.node_rows},
          {"node_bytes", t.node_bytes},  {"self_rows", t.self_rows},   {"self_bytes", t.self_bytes},
          {"count_bytes", t.count_bytes}};
}

void bind_errors() {
  py::register_local_exception_translator([](std::exception_ptr p) {
    try {
      if (p) std::rethrow_exception(p);
    } catch (const host::DeadlineError& e) {
      raise_deadline(e.what(), e.obituary());
    } catch (const host::Interrupted& e) {
      if (!PyErr_Occurred()) PyErr_SetString(PyExc_KeyboardInterrupt, e.what());
    }
  });
}

BufferShape make_shape(uint32_t num_nodes, uint32_t num_local_ranks, uint32_t num_experts, uint64_t max_tokens,
                       uint32_t max_topk, uint32_t row_bytes, uint32_t scale_bytes, uint64_t recv_rows,
                       uint32_t partial_row_bytes, uint32_t chunk_tokens, uint32_t rail_slots) {
  BufferShape s{num_nodes,   num_local_ranks,   num_experts, max_tokens,   max_topk,  row_bytes,
                scale_bytes, partial_row_bytes, recv_rows,   chunk_tokens, rail_slots};
  s.validate();
  return s;
}

void bind_memory(py::module_& m) {
  using S = BufferShape;
  py::class_<S>(m, "BufferShape", "What a registered buffer must hold; layout/buffer.h turns it into offsets.")
      .def(py::init(&make_shape), py::kw_only(), py::arg("num_nodes"), py::arg("num_local_ranks"),
           py::arg("num_experts"), py::arg("max_tokens") = 1, py::arg("max_topk") = 1, py::arg("row_bytes") = 16,
           py::arg("scale_bytes") = 0, py::arg("recv_rows") = 1, py::arg("partial_row_bytes") = 16,
           py::arg("chunk_tokens") = S{}.chunk_tokens, py::arg("rail_slots") = S{}.rail_slots)
      .def_readonly("num_nodes", &S::num_nodes)
      .def_readonly("num_local_ranks", &S::num_local_ranks)
      .def_readonly("num_experts", &S::num_experts)
      .def_readonly("max_tokens", &S::max_tokens)
      .def_readonly("max_topk", &S::max_topk)
      .def_readonly("row_bytes", &S::row_bytes)
      .def_readonly("scale_bytes", &S::scale_bytes)
      .def_readonly("recv_rows", &S::recv_rows)
      .def_readonly("partial_row_bytes", &S::partial_row_bytes)
      .def_readonly("chunk_tokens", &S::chunk_tokens)
      .def_readonly("rail_slots", &S::rail_slots)
      .def_property_readonly("total_bytes", [](const S& s) { return BufferLayout(s).total; })
      .def(
          "regions",
          [](const S& s) {
            std::vector<std::tuple<std::string, uint64_t, uint64_t>> rows;
            for (const Region& r : BufferLayout(s).regions) rows.emplace_back(r.name, r.offset, r.bytes);
            return rows;
          },
          "(name, offset, bytes) of every region of a rank's segment, in order.")
      .def_property_readonly_static("flag_stride", [](const py::object&) { return BufferLayout::kFlagStride; })
      .def_property_readonly_static(
          "count_words",
          [](const py::object&) {
            return std::map<std::string, int>{
                {"num_tokens", kHeaderNumTokens}, {"topk", kHeaderTopk}, {"header", kCountHeaderWords}};
          },
          "Of a count vector: where the header has its first words, and how long it is, in 32-bit words.");
  py::class_<Segment, std::shared_ptr<Segment>>(m, "Segment", "Memory that peers can map.")
      .def_static("create", &Segment::create, py::arg("name"), py::arg("num_bytes"))
      .def_static("attach", &Segment::attach, py::arg("name"), py::arg("num_bytes"))
      .def_static("private", &Segment::private_memory, py::arg("num_bytes"))
      .def("unlink", &Segment::unlink)
      .def_property_readonly("num_bytes", &Segment::bytes)
      .def_property_readonly("address", [](const Segment& s) { return reinterpret_cast<uint64_t>(s.data()); });
}

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
      .def_readonly("complete", &Placed::complete, "The plan, when nobody waited for counts.")
      .def_property_readonly("placed", &Placed::placed)
      .def_property_readonly("headers", &Placed::headers)
      .def_property_readonly("recv_rows", [](const Placed& p) { return p.counts().rank_rows; })
      .def_property_readonly("num_dropped_per_rank", [](const Placed& p) { return p.counts().dropped; })
      .def_property_readonly("from_nodes", [](const Placed& p) { return p.counts().from_nodes; })
      .def_property_readonly("learned",
                             [](const Placed& p) {
                               const PlanMemory& m = p.placement->learned;
                               return std::map<std::string, uint64_t>{{"total", m.total},
                                                                      {"rail_records", m.rail_records},
                                                                      {"rail_record_stride", m.rail_record_stride},
                                                                      {"row_records", m.row_records}};
                             })
      .def(
          "plan", [](const Placed& p, uint64_t memory) { return p.placement->plan(pointer<unsigned char>(memory)); },
          py::arg("memory"), "The plan, with learned['total'] bytes, 128-byte aligned, for what its dispatch learns.");
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
      .def("weights_from_dense",
           [](const Plan& p, uint64_t in, uint64_t out) {
             p.weights_from_dense(pointer<const float>(in), pointer<float>(out));
           })
      .def("weights_to_dense", [](const Plan& p, uint64_t in,
                                  uint64_t out) { p.weights_to_dense(pointer<const float>(in), pointer<float>(out)); })
      .def("weights_from_topk",
           [](const Plan& p, uint64_t idx, uint32_t k, uint64_t in, uint64_t out) {
             p.weights_from_topk(pointer<const int64_t>(idx), k, pointer<const float>(in), pointer<float>(out));
           })
      .def("weights_to_topk",
           [](const Plan& p, uint64_t idx, uint32_t k, uint64_t in, uint64_t out) {
             p.weights_to_topk(pointer<const int64_t>(idx), k, pointer<const float>(in), pointer<float>(out));
           })
      .def("fill_sparse_to_dense", [](const Plan& p, uint64_t out) { p.fill_sparse_to_dense(pointer<int32_t>(out)); })
      .def("fill_rail_to_node", [](const Plan& p, uint64_t out) { p.fill_rail_to_node(pointer<unsigned char>(out)); })
      .def("fill_node_to_rail", [](const Plan& p, uint64_t out) { p.fill_node_to_rail(pointer<unsigned char>(out)); })
      .def("fill_local_expert_routing_map",
           [](const Plan& p, uint64_t out) { p.fill_local_routing(pointer<unsigned char>(out)); })
      .def("fill_dense_to_expert_map",
           [](const Plan& p, uint64_t out) { p.fill_permuted_rows(pointer<int32_t>(out)); });
}

void bind_engine(py::module_& m) {
  py::class_<Engine>(m, "Engine", "One rank's registered buffer and the operations on it; see runtime/engine.h.")
      .def(py::init(&make_engine), py::arg("rank"), py::arg("shape"), py::arg("segments"), py::arg("timeout_s"),
           py::arg("executor") = "host", py::arg("seed") = 0)
      .def("exchange", &exchange, py::kw_only(), py::arg("routing"), py::arg("kind"), py::arg("weights") = 0,
           py::arg("num_tokens"), py::arg("topk") = 0, py::arg("header") = py::dict())
      .def("place", &place, py::kw_only(), py::arg("routing"), py::arg("kind"), py::arg("weights") = 0,
           py::arg("num_tokens"), py::arg("topk_in") = 0, py::arg("topk"), py::arg("header"), py::arg("must_agree"),
           py::arg("memory"), py::arg("pad_multiple") = 1, py::arg("pad_empty") = false, py::arg("budget"),
           py::arg("count"),
           "A plan that lies in `memory`; count: wait for its counts, else the host never learns them.")
      .def("plan_memory", &plan_memory, py::arg("num_tokens"), py::arg("topk"), py::arg("worst_case"),
           "Offsets in the memory of such a plan; worst_case: with room for what its dispatch learns.")
      .def("require_blocks", &Engine::require_blocks, py::arg("name"), py::arg("blocks"),
           "ValueError unless a launch may have so many blocks.")
      .def_property_readonly("num_launches", &Engine::num_launches, "Kernels launched by this engine.")
      .def("dispatch", &dispatch, py::arg("plan"), py::kw_only(), py::arg("x"), py::arg("scale") = 0,
           py::arg("weights") = 0, py::arg("out_x"), py::arg("out_scale") = 0, py::arg("out_weights") = 0,
           py::arg("row_bytes"), py::arg("scale_bytes") = 0, py::arg("permute"), py::arg("out_rows") = 0,
           py::arg("num_blocks") = 1, py::arg("deliver_blocks") = 0, py::arg("chunk_tokens") = 0)
      .def("combine", &combine, py::arg("plan"), py::kw_only(), py::arg("x"), py::arg("dtype"), py::arg("hidden"),
           py::arg("weights") = 0, py::arg("out_x"), py::arg("out_weights") = 0, py::arg("permuted"),
           py::arg("multiply") = false, py::arg("fp32_partials") = false, py::arg("num_blocks") = 1,
           py::arg("unpermute_blocks") = 0, py::arg("chunk_tokens") = 0)
      .def("poison", &Engine::poison, "For tests, between operations: 0xFF into the rings and receive rows.")
      .def("traffic", &traffic)
      .def("reset_traffic", &Engine::reset_traffic)
      .def(
          "set_stream", [](Engine& e, uint64_t stream) { e.set_stream(pointer<void>(stream)); }, py::arg("stream"),
          "CUDA: the stream of the next operations, in order with those before.");
}

}  // namespace
}  // namespace hep

PYBIND11_MODULE(_core, m) {
  m.doc() = "hybrid_ep's C++ core: expert-parallel dispatch and combine.";
  hep::bind_errors();
  hep::bind_memory(m);
  hep::bind_plan(m);
  hep::bind_engine(m);
  hep::bind_cuda(m);
  hep::bind_nvshmem(m);
  hep::bind_sim(m);
  hep::bind_balance(m);
  m.def("executors", &hep::Executor::names, "Names of the executors in this build.");
}
