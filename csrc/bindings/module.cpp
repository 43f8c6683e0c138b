// hybrid_ep._core: the engine for Python. Tensors come as views (tensor_view.h), so this module knows no torch and one
// build serves every torch version. Every call that can wait releases the GIL.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <optional>

#include "arch/host/errors.h"
#include "bindings/balance.h"
#include "bindings/convert.h"
#include "bindings/cuda.h"
#include "bindings/header.h"
#include "bindings/nvshmem.h"
#include "bindings/plan.h"
#include "bindings/sim.h"
#include "bindings/tensor_view.h"
#include "layout/smem.h"
#include "runtime/extents.h"

namespace py = pybind11;

namespace hep {
namespace {

using View = TensorView;

Device device_of(const Engine& engine) {
  return engine.on_host() ? Device::kCpu : Device::kCuda;
}

// The caller's routing: exactly one of topk_idx and routing_map.
RoutingInput routing_input(const Engine& engine, const View* topk_idx, const View* routing_map, const View* weights,
                           uint32_t num_tokens, uint32_t topk) {
  if (!topk_idx == !routing_map) throw std::invalid_argument("topk_idx, routing_map: give one of them");
  RoutingInput in;
  in.num_tokens = num_tokens, in.topk = topk;
  const RoutingExtents e = extents_of(in, engine.layout().counts.num_experts);
  const Device device = device_of(engine);
  in.topk_idx = optional_array<const int64_t>(topk_idx, {"topk_idx", e.topk_idx, device});
  in.routing_map = reinterpret_cast<const unsigned char*>(
      optional_array<const bool>(routing_map, {"routing_map", e.routing_map, device}));
  const uint64_t weight_bytes = topk_idx ? e.weights_of_topk : e.weights_of_map;
  in.weights = optional_array<const float>(weights, {"weights", weight_bytes, device});
  return in;
}

Placed place(Engine& engine, const CallHeader& header, const View* topk_idx, const View* routing_map,
             const View* weights, int64_t topk_in, const View* memory, bool count, int num_blocks) {
  Placed result;
  result.device = device_of(engine);
  const RoutingInput in =
      routing_input(engine, topk_idx, routing_map, weights, header.num_tokens, narrow("topk_in", topk_in));
  PlaceCall c;
  c.header = header, c.num_blocks = num_blocks;
  const PlanMemory needed = engine.plan_memory(in.num_tokens, header.topk, !count);
  c.memory = require(memory, {"memory", needed.total, result.device, 128}, Element::kUint8);
  py::gil_scoped_release release;
  if (count)
    result.placement = engine.place_and_count(in, c);
  else
    result.complete = engine.place(in, c);
  return result;
}

PlanMemory plan_memory(const Engine& engine, int64_t num_tokens, int64_t topk, bool worst_case) {
  return engine.plan_memory(narrow("num_tokens", num_tokens), narrow("topk", topk), worst_case);
}

constexpr uint64_t kRowAlignment = 16;

void dispatch(Engine& engine, Plan& plan, const View* x, const View* scale, const View* weights, bool routed_weights,
              const View* out_x, const View* out_scale, const View* out_weights, int64_t row_bytes, int64_t scale_bytes,
              bool permute, int64_t out_rows, int num_blocks, int deliver_blocks, int64_t chunk_tokens) {
  if (weights && routed_weights) throw std::invalid_argument("weights: give none with routed_weights=True");
  DispatchCall c;
  c.row_bytes = narrow("row_bytes", row_bytes), c.scale_bytes = narrow("scale_bytes", scale_bytes);
  c.permute = permute, c.out_rows = narrow("out_rows", out_rows);
  c.num_blocks = num_blocks, c.deliver_blocks = deliver_blocks;
  c.chunk_tokens = narrow("chunk_tokens", chunk_tokens);
  const DispatchExtents e = extents_of(plan, c);
  const Device device = device_of(engine);
  c.x = require(x, {"x", e.x, device, kRowAlignment});
  c.out_x = require(out_x, {"out_x", e.out_x, device, kRowAlignment}, x->element);
  if (c.scale_bytes) {
    c.scales = require(scale, {"scale", e.scale, device, kRowAlignment});
    c.out_scales = require(out_scale, {"out_scale", e.out_scale, device, kRowAlignment}, scale->element);
  }
  c.weights = optional_array<const float>(weights, {"weights", e.weights, device, kRowAlignment});
  if (routed_weights) c.weights = plan.weights();
  if (c.weights) c.out_weights = require_array<float>(out_weights, {"out_weights", e.out_weights, device});
  py::gil_scoped_release release;
  engine.dispatch(plan, c);
}

void combine(Engine& engine, Plan& plan, const View* x, int64_t hidden, const View* weights, const View* out_x,
             const View* out_weights, bool permuted, bool multiply, bool fp32_partials, int num_blocks,
             int unpermute_blocks, int64_t chunk_tokens) {
  CombineCall c;
  c.dtype = summable("x", x), c.hidden = narrow("hidden", hidden);
  c.permuted = permuted, c.multiply = multiply, c.fp32_partials = fp32_partials;
  c.num_blocks = num_blocks, c.unpermute_blocks = unpermute_blocks;
  c.chunk_tokens = narrow("chunk_tokens", chunk_tokens);
  const CombineExtents e = extents_of(plan, c);
  const Device device = device_of(engine);
  c.x = require(x, {"x", e.x, device, kRowAlignment});
  c.out_x = require(out_x, {"out_x", e.out_x, device, kRowAlignment}, x->element);
  c.weights = optional_array<const float>(weights, {"weights", e.weights, device});
  if (c.weights)
    c.out_weights = require_array<float>(out_weights, {"out_weights", e.out_weights, device, kRowAlignment});
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

// Bytes of an engine's arena, which are lent as long as anything refers to this. Python's buffer protocol shows them.
struct ArenaBlock {
  std::shared_ptr<unsigned char> data;
  uint64_t bytes;
};

std::optional<ArenaBlock> take(const Engine& e, uint64_t bytes) {
  auto data = e.arena().take(bytes);
  return data ? std::optional(ArenaBlock{std::move(data), bytes}) : std::nullopt;
}

std::map<std::string, uint64_t> traffic(const Engine& e) {
  const TrafficCounters t = e.traffic();
  return {{"rail_rows", t.rail_rows},     {"rail_bytes", t.rail_bytes},     {"node_rows", t.node_rows},
          {"node_bytes", t.node_bytes},   {"self_rows", t.self_rows},       {"self_bytes", t.self_bytes},
          {"copied_rows", t.copied_rows}, {"copied_bytes", t.copied_bytes}, {"count_bytes", t.count_bytes}};
}

void bind_errors() {
  py::register_local_exception_translator([](std::exception_ptr p) {
    try {
      if (p) std::rethrow_exception(p);
    } catch (const host::DeadlineError& e) {
      raise_deadline(e.what(), e.timeout_report());
    } catch (const host::Interrupted& e) {
      if (!PyErr_Occurred()) PyErr_SetString(PyExc_KeyboardInterrupt, e.what());
    }
  });
}

BufferShape make_shape(uint32_t num_nodes, uint32_t num_local_ranks, uint32_t num_experts, uint64_t max_tokens,
                       uint32_t max_topk, uint32_t row_bytes, uint32_t scale_bytes, uint64_t recv_rows,
                       uint32_t partial_row_bytes, uint32_t chunk_tokens, uint32_t rail_slots, uint64_t arena_bytes) {
  BufferShape s{num_nodes,   num_local_ranks,   num_experts, max_tokens,   max_topk,   row_bytes,
                scale_bytes, partial_row_bytes, recv_rows,   chunk_tokens, rail_slots, arena_bytes};
  s.validate();
  return s;
}

void bind_memory(py::module_& m) {
  using S = BufferShape;
  py::class_<S>(m, "BufferShape", "What a registered buffer must hold; layout/buffer.h turns it into offsets.")
      .def(py::init(&make_shape), py::kw_only(), py::arg("num_nodes"), py::arg("num_local_ranks"),
           py::arg("num_experts"), py::arg("max_tokens") = 1, py::arg("max_topk") = 1, py::arg("row_bytes") = 16,
           py::arg("scale_bytes") = 0, py::arg("recv_rows") = 1, py::arg("partial_row_bytes") = 16,
           py::arg("chunk_tokens") = S{}.chunk_tokens, py::arg("rail_slots") = S{}.rail_slots,
           py::arg("arena_bytes") = 0)
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
      .def_readonly("arena_bytes", &S::arena_bytes)
      .def_property_readonly("total_bytes", [](const S& s) { return BufferLayout(s).total; })
      .def(
          "regions",
          [](const S& s) {
            std::vector<std::tuple<std::string, uint64_t, uint64_t>> rows;
            for (const Region& r : BufferLayout(s).regions) rows.emplace_back(r.name, r.offset, r.bytes);
            return rows;
          },
          "(name, offset, bytes) of every region of a rank's segment, in order.")
      .def_property_readonly_static(
          "default_chunk_tokens", [](const py::object&) { return S{}.chunk_tokens; }, "Tokens of a rail message.")
      .def_property_readonly_static(
          "most_exchange_blocks", [](const py::object&) { return kMostExchangeBlocks; },
          "Blocks of an exchange kernel at most.")
      .def_property_readonly_static("sum_tile_elements", [](const py::object&) { return kSumTileElems; })
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

void bind_engine(py::module_& m) {
  py::class_<ArenaBlock>(m, "ArenaBlock", py::buffer_protocol(), "Registered memory that is lent to a result.")
      .def_buffer([](ArenaBlock& b) { return py::buffer_info(b.data.get(), py::ssize_t(b.bytes), false); });
  py::class_<Engine>(m, "Engine", "One rank's registered buffer and the operations on it; see runtime/engine.h.")
      .def(py::init(&make_engine), py::arg("rank"), py::arg("shape"), py::arg("segments"), py::arg("timeout_s"),
           py::arg("executor") = "host", py::arg("seed") = 0)
      .def("place", &place, py::arg("header"), py::kw_only(), py::arg("topk_idx") = py::none(),
           py::arg("routing_map") = py::none(), py::arg("weights") = py::none(), py::arg("topk_in") = 0,
           py::arg("memory"), py::arg("count"), py::arg("num_blocks") = 1, py::keep_alive<0, 7>(),
           "A plan that lies in `memory`; count: wait for its counts, else the host never learns them.")
      .def("plan_memory", &plan_memory, py::arg("num_tokens"), py::arg("topk"), py::arg("worst_case"),
           "Offsets in the memory of a plan; worst_case: with room for what its dispatch learns.")
      .def("require_blocks", &Engine::require_blocks, py::arg("name"), py::arg("blocks"),
           "ValueError unless a launch may have so many blocks.")
      .def_property_readonly("num_launches", &Engine::num_launches, "Kernels launched by this engine.")
      .def_property_readonly("launch_ns", &Engine::launch_ns,
                             "Nanoseconds in launches and in waits for counts; a host executor's launch is its kernel.")
      .def("dispatch", &dispatch, py::arg("plan"), py::kw_only(), py::arg("x"), py::arg("scale") = py::none(),
           py::arg("weights") = py::none(), py::arg("routed_weights") = false, py::arg("out_x"),
           py::arg("out_scale") = py::none(), py::arg("out_weights") = py::none(), py::arg("row_bytes"),
           py::arg("scale_bytes") = 0, py::arg("permute"), py::arg("out_rows") = 0, py::arg("num_blocks") = 1,
           py::arg("deliver_blocks") = 0, py::arg("chunk_tokens") = 0,
           "weights: in plan order; routed_weights: those that the plan's routing brought.")
      .def("combine", &combine, py::arg("plan"), py::kw_only(), py::arg("x"), py::arg("hidden"),
           py::arg("weights") = py::none(), py::arg("out_x"), py::arg("out_weights") = py::none(), py::arg("permuted"),
           py::arg("multiply") = false, py::arg("fp32_partials") = false, py::arg("num_blocks") = 1,
           py::arg("unpermute_blocks") = 0, py::arg("chunk_tokens") = 0)
      .def("take", &take, py::arg("num_bytes"), "Bytes of the arena, aligned to 128; None: no gap holds so many.")
      .def_property_readonly("arena_bytes_lent", [](const Engine& e) { return e.arena().bytes_lent(); })
      .def("poison", &Engine::poison, "For tests, between operations: 0xFF into the rings and receive rows.")
      .def("traffic", &traffic)
      .def("reset_traffic", &Engine::reset_traffic)
      .def(
          "set_stream", [](Engine& e, uint64_t stream) { e.set_stream(reinterpret_cast<void*>(stream)); },
          py::arg("stream"), "CUDA: the stream of the next operations, in order with those before.");
}

}  // namespace
}  // namespace hep

PYBIND11_MODULE(_core, m) {
  m.doc() = "hybrid_ep's C++ core: expert-parallel dispatch and combine.";
  hep::bind_errors();
  hep::bind_tensor_view(m);
  hep::bind_memory(m);
  hep::bind_header(m);
  hep::bind_plan(m);
  hep::bind_engine(m);
  hep::bind_cuda(m);
  hep::bind_nvshmem(m);
  hep::bind_sim(m);
  hep::bind_balance(m);
  m.def("executors", &hep::Executor::names, "Names of the executors in this build.");
}
