// hybrid_ep._core: the engine for Python. Tensors come as views (tensor_view.h), so this module knows no torch and one
// build serves every torch version. Every call that can wait releases the GIL.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <optional>
#include <tuple>

#include "arch/host/errors.h"
#include "balance/microbatch.h"
#include "bindings/balance.h"
#include "bindings/clones.h"
#include "bindings/convert.h"
#include "bindings/cuda.h"
#include "bindings/header.h"
#include "bindings/nvshmem.h"
#include "bindings/plan.h"
#include "bindings/requests.h"
#include "bindings/sim.h"
#include "bindings/tensor_view.h"
#include "bindings/torch_exchange.h"
#include "layout/smem.h"
#include "runtime/arena_pool.h"
#include "runtime/extents.h"
#include "runtime/unlaunched.h"

namespace py = pybind11;

namespace hep {
namespace {

// What reads or writes device memory waits for streams, and so does the end of what owns such memory. A stream may have
// to wait for Python in turn: for a host function of torch's, or for another rank of this process.
using Unlocked = py::call_guard<py::gil_scoped_release>;
constexpr py::release_gil_before_calling_cpp_dtor kUnlockedEnd;

PlanMemory plan_memory(const Engine& engine, int64_t num_tokens, int64_t topk, bool worst_case) {
  return engine.plan_memory(narrow("num_tokens", num_tokens), narrow("topk", topk), worst_case);
}

using Segments = std::vector<std::shared_ptr<Segment>>;

void pull(Segment& to, const Segments& sources, const std::vector<std::tuple<size_t, size_t, size_t, size_t>>& given) {
  std::vector<Segment::Piece> pieces;
  pieces.reserve(given.size());
  for (const auto& [source, from, at, bytes] : given) pieces.push_back({source, from, at, bytes});
  py::gil_scoped_release release;
  to.pull(sources, pieces);
}

// executor: a name from the table, or a maker.
template <class Which>
std::unique_ptr<Engine> make_engine(int rank, const BufferShape& shape, Segments segments, double timeout_s,
                                    const Which& executor, uint64_t seed, Segments arenas) {
  py::gil_scoped_release release;
  auto engine =
      std::make_unique<Engine>(rank, shape, std::move(segments), timeout_s, executor, seed, std::move(arenas));
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

// The same as a tensor; only where tensors are exchanged.
std::optional<Tensor> lend(const Engine& engine, int64_t rows, int64_t columns, int element) {
  if (element <= 0 || element >= int(Element::kCount) || rows < 1 || columns < 1)
    throw std::invalid_argument("rows, columns, element: give at least 1 of each, and a code of TensorView.elements");
  const auto e = Element(element);
  auto data = engine.arena().take(num_bytes(narrow("rows", rows), narrow("columns", columns), element_bytes(e)));
  if (!data) return std::nullopt;
  return Tensor(tensor_over(std::move(data), e, rows, columns));
}

std::map<std::string, uint64_t> traffic(const Engine& e) {
  const TrafficCounters t = [&e] {
    py::gil_scoped_release release;
    return e.traffic();
  }();
  return {{"rail_rows", t.rail_rows},     {"rail_bytes", t.rail_bytes},     {"node_rows", t.node_rows},
          {"node_bytes", t.node_bytes},   {"self_rows", t.self_rows},       {"self_bytes", t.self_bytes},
          {"copied_rows", t.copied_rows}, {"copied_bytes", t.copied_bytes}, {"partial_rows", t.partial_rows},
          {"count_bytes", t.count_bytes}};
}

std::map<std::string, std::vector<uint64_t>> waited_ns(const Engine& e) {
  const std::vector<uint64_t> all = [&e] {
    py::gil_scoped_release release;
    return e.waited_ns();
  }();
  const auto ranks = std::ptrdiff_t(all.size() / kNumWaitedIn);
  const auto in = [&](WaitedIn kind) {
    const auto first = all.begin() + ranks * std::ptrdiff_t(kind);
    return std::vector(first, first + ranks);
  };
  return {{"exchange", in(WaitedIn::kExchange)},
          {"dispatch", in(WaitedIn::kDispatch)},
          {"combine", in(WaitedIn::kCombine)}};
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
                       uint32_t partial_row_bytes, uint32_t chunk_tokens, std::optional<uint32_t> slots,
                       uint64_t arena_bytes, bool arena_apart, uint64_t latency_tokens,
                       const std::optional<balance::MicrobatchShape>& clones, const std::optional<SpareShape>& spares) {
  const uint32_t rail_slots = slots ? *slots : BufferShape::rail_slots_of(num_nodes);
  BufferShape s{num_nodes,   num_local_ranks, num_experts,        max_tokens,
                max_topk,    row_bytes,       scale_bytes,        partial_row_bytes,
                recv_rows,   chunk_tokens,    rail_slots,         arena_bytes,
                arena_apart, latency_tokens,  {.spare_slots = 0}, {}};
  if (clones) s.clones = *clones;
  if (spares) s.spares = *spares;
  s.validate();
  return s;
}

void bind_memory(py::module_& m) {
  using S = BufferShape;
  py::class_<S>(m, "BufferShape", "What a registered buffer must hold; layout/buffer.h turns it into offsets.")
      .def(py::init(&make_shape), py::kw_only(), py::arg("num_nodes"), py::arg("num_local_ranks"),
           py::arg("num_experts"), py::arg("max_tokens") = 1, py::arg("max_topk") = 1, py::arg("row_bytes") = 16,
           py::arg("scale_bytes") = 0, py::arg("recv_rows") = 1, py::arg("partial_row_bytes") = 16,
           py::arg("chunk_tokens") = S{}.chunk_tokens, py::arg("rail_slots") = py::none(), py::arg("arena_bytes") = 0,
           py::arg("arena_apart") = false, py::arg("latency_tokens") = 0, py::arg("clones") = py::none(),
           py::arg("spares") = py::none())
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
      .def_readonly("latency_tokens", &S::latency_tokens)
      .def_static("rail_slots_of", &S::rail_slots_of, py::arg("num_nodes"),
                  "Chunks in flight per rail peer where nobody says how many.")
      .def_readonly("arena_apart", &S::arena_apart)
      .def_property_readonly("total_bytes", [](const S& s) { return BufferLayout(s).total; })
      .def_property_readonly(
          "segment_bytes", [](const S& s) { return BufferLayout(s).segment_bytes; },
          "Of a rank's segment: the total, less an arena that lies apart.")
      .def(
          "regions",
          [](const S& s) {
            std::vector<std::tuple<std::string, uint64_t, uint64_t>> rows;
            for (const Region& r : BufferLayout(s).regions) rows.emplace_back(r.name, r.offset, r.bytes);
            return rows;
          },
          "(name, offset, bytes) of every region of a rank's segment, in order; an arena apart comes behind its end.")
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
  py::class_<Segment, std::shared_ptr<Segment>>(m, "Segment", py::buffer_protocol(), "Memory that peers can map.",
                                                kUnlockedEnd)
      .def_buffer([](Segment& s) {  // empty for memory that the host cannot read
        return py::buffer_info(s.data(), py::ssize_t(s.is_host() ? s.bytes() : 0), false);
      })
      .def_static("create", &Segment::create, py::arg("name"), py::arg("num_bytes"))
      .def_static("attach", &Segment::attach, py::arg("name"), py::arg("num_bytes"))
      .def_static("private", &Segment::private_memory, py::arg("num_bytes"))
      .def("unlink", &Segment::unlink)
      .def("observe", &Segment::observe, py::arg("offset"), "The counter there; what came before it is seen, too.")
      .def("publish", &Segment::publish, py::arg("offset"), py::arg("value"), "Store a counter behind all before it.")
      .def("pull", &pull, py::arg("sources"), py::arg("pieces"),
           "Copy pieces (place in sources, from, to, bytes) in their order, without the interpreter's lock.")
      .def_property_readonly("num_bytes", &Segment::bytes)
      .def_property_readonly("address", [](const Segment& s) { return reinterpret_cast<uint64_t>(s.data()); });
}

void bind_engine(py::module_& m) {
  py::class_<ArenaBlock>(m, "ArenaBlock", py::buffer_protocol(), kUnlockedEnd,
                         "Registered memory that is lent to a result.")
      .def_buffer([](ArenaBlock& b) { return py::buffer_info(b.data.get(), py::ssize_t(b.bytes), false); })
      .def_property_readonly("num_bytes", [](const ArenaBlock& b) { return b.bytes; })
      .def_property_readonly("address", [](const ArenaBlock& b) { return reinterpret_cast<uint64_t>(b.data.get()); })
      .def_property_readonly_static(
          "no_room", [](const py::object&) { return kNoRoom; }, "Words of the exception of hep_pool_allocate.");
  py::class_<Engine> engine(m, "Engine", kUnlockedEnd,
                            "One rank's registered buffer and the operations on it; see runtime/engine.h.");
  bind_clones(engine);
  engine
      .def(py::init(&make_engine<std::string>), py::arg("rank"), py::arg("shape"), py::arg("segments"),
           py::arg("timeout_s"), py::arg("executor") = "host", py::arg("seed") = 0, py::arg("arenas") = Segments{})
      .def_static(
          "unlaunched",
          [](int rank, const BufferShape& shape, Segments segments, double timeout_s, Segments arenas) {
            return make_engine(rank, shape, std::move(segments), timeout_s, make_unlaunched(), 0, std::move(arenas));
          },
          py::arg("rank"), py::arg("shape"), py::arg("segments"), py::arg("timeout_s"), py::arg("arenas") = Segments{},
          "For measuring the host's own work: launches nothing, moves nothing; see runtime/unlaunched.h.")
      .def("place", &place, py::arg("request"), "A plan that lies in the request's memory.")
      .def("plan_memory", &plan_memory, py::arg("num_tokens"), py::arg("topk"), py::arg("worst_case"),
           "Offsets in the memory of a plan; worst_case: with room for what its dispatch learns.")
      .def("require_spares", &Engine::require_spares, py::arg("num_blocks"),
           "ValueError where a push of so many blocks cannot be launched.")
      .def("require_blocks", &Engine::require_blocks, py::arg("name"), py::arg("blocks"),
           "ValueError unless a launch may have so many blocks.")
      .def_property_readonly("most_blocks", &Engine::most_blocks, "Of a launch: they are resident together.")
      .def_property_readonly("num_launches", &Engine::num_launches, "Kernels launched by this engine.")
      .def("dispatch", &dispatch, py::arg("plan"), py::arg("request"))
      .def("combine", &combine, py::arg("plan"), py::arg("request"))
      .def("latency_route", &latency_route, py::arg("place"), py::arg("request"),
           "The latency path: routes and dispatches in one launch. The plan lies in the memory of `place`.")
      .def("latency_dispatch", &latency_dispatch, py::arg("plan"), py::arg("request"))
      .def("latency_combine", &latency_combine, py::arg("plan"), py::arg("request"))
      .def("take", &take, py::arg("num_bytes"), "Bytes of the arena, aligned to 128; None: no gap holds so many.")
      .def(
          "spare_memory",
          [](const Engine& e, bool gradients) {
            return ArenaBlock{e.spare_memory(gradients), e.spare_bytes(gradients)};
          },
          py::arg("gradients"), "The registered spare slots, weights or gradients, for as long as this lives.")
      .def("lend", &lend, py::arg("rows"), py::arg("columns"), py::arg("element"),
           "A tensor in the arena, uninitialised; None: no gap holds it. Where exchanges_tensors().")
      .def(
          "offer_arena",
          [](const Engine& e, bool offered) { offered ? offer_arena(e.arena().shared_from_this()) : withdraw(); },
          py::arg("offered"), "To hep_pool_allocate in this thread, until False; see runtime/arena_pool.h.")
      .def_property_readonly("arena_bytes_lent", [](const Engine& e) { return e.arena().bytes_lent(); })
      .def_property_readonly(
          "arena_gap", [](const Engine& e) { return e.arena().largest_gap(); }, "Bytes of the largest block to be had.")
      .def("poison", &Engine::poison, Unlocked(),
           "For tests, between operations: 0xFF into the rings and receive rows.")
      .def("traffic", &traffic)
      .def("reset_traffic", &Engine::reset_traffic, Unlocked())
      .def("waited_ns", &waited_ns, "For each kind of operation, the nanoseconds that it waited for each rank.")
      .def(
          "set_stream", [](Engine& e, uint64_t stream) { e.set_stream(reinterpret_cast<void*>(stream)); },
          py::arg("stream"), Unlocked(), "CUDA: the stream of the next operations, in order with those before.");
}

}  // namespace
}  // namespace hep

PYBIND11_MODULE(_core, m) {
  m.doc() = "hybrid_ep's C++ core: expert-parallel dispatch and combine.";
  hep::bind_errors();
  hep::bind_balance(m);  // whose shapes others name
  hep::bind_spare_shape(m);
  hep::bind_tensor_view(m);
  hep::bind_exchange(m);
  hep::bind_memory(m);
  hep::bind_header(m);
  hep::bind_plan(m);
  hep::bind_requests(m);
  hep::bind_engine(m);
  hep::bind_cuda(m);
  hep::bind_nvshmem(m);
  hep::bind_sim(m);
  m.def("executors", &hep::Executor::names, "Names of the executors in this build.");
}
