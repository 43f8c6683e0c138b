#include "bindings/requests.h"

#include <pybind11/stl.h>

#include "bindings/convert.h"
#include "runtime/extents.h"

namespace py = pybind11;

namespace hep {
namespace {

using MaybeTensor = std::optional<Tensor>;
using MaybeCount = std::optional<int64_t>;

constexpr uint64_t kRowAlignment = 16;

Device device_of(const Engine& engine) {
  return engine.on_host() ? Device::kCpu : Device::kCuda;
}

const TensorView* given(const std::optional<TensorView>& view) {
  return view ? &*view : nullptr;
}

std::optional<uint32_t> narrow_given(const char* name, const MaybeCount& value) {
  return value ? std::optional(narrow(name, *value)) : std::nullopt;
}

// Rows of a token with several pairs on a rank: into the row of each of them, or of the first.
LandIn land_in(const std::string& name) {
  if (name == "all") return LandIn::kEveryPair;
  if (name == "first") return LandIn::kFirstPair;
  throw std::invalid_argument("landing: is '" + name + "'; give 'first', 'all' or None");
}

LaunchShape make_launch(int num_blocks, std::optional<int> local_blocks, MaybeCount chunk_tokens,
                        const std::optional<std::string>& landing) {
  return {num_blocks, local_blocks, narrow_given("chunk_tokens", chunk_tokens),
          landing ? std::optional(land_in(*landing)) : std::nullopt};
}

PlaceRequest make_place(const CallHeader& header, const MaybeTensor& topk_idx, const MaybeTensor& routing_map,
                        const MaybeTensor& weights, const Tensor& memory, int64_t topk_in, bool count, int num_blocks,
                        bool looked_at) {
  return {header,
          view_of("topk_idx", topk_idx, looked_at),
          view_of("routing_map", routing_map, looked_at),
          view_of("weights", weights, looked_at),
          TensorView::of("memory", memory, true),
          narrow("topk_in", topk_in),
          count,
          num_blocks};
}

DispatchRequest make_dispatch(const Tensor& x, const MaybeTensor& scale, const MaybeTensor& weights,
                              bool routed_weights, const Tensor& out_x, const MaybeTensor& out_scale,
                              const MaybeTensor& out_weights, int64_t row_bytes, int64_t scale_bytes,
                              MaybeCount permuted, const LaunchShape& launch, bool looked_at) {
  return {TensorView::of("hidden", x, looked_at),
          TensorView::of("out_x", out_x, true),
          view_of("scaling_factor", scale, looked_at),
          view_of("weights", weights, looked_at),
          view_of("out_scale", out_scale, true),
          view_of("out_weights", out_weights, true),
          routed_weights,
          narrow("row_bytes", row_bytes),
          narrow("scale_bytes", scale_bytes),
          narrow_given("permuted", permuted),
          launch};
}

CombineRequest make_combine(const Tensor& x, int64_t hidden, const MaybeTensor& weights, const Tensor& out_x,
                            const MaybeTensor& out_weights, bool permuted, bool multiply, bool fp32_partials,
                            const LaunchShape& launch) {
  return {TensorView::of("hidden", x),
          TensorView::of("out_x", out_x, true),
          view_of("probs", weights),
          view_of("out_weights", out_weights, true),
          narrow("hidden", hidden),
          permuted,
          multiply,
          fp32_partials,
          launch};
}

// A view of a request, read and written by value: who keeps what it read must not see what is written later.
template <class R, class V>
void field(py::class_<R>& c, const char* name, V R::* at) {
  c.def_property(name, [at](const R& r) { return r.*at; }, [at](R& r, V view) { r.*at = std::move(view); });
}

// The caller's routing: exactly one of topk_idx and routing_map.
RoutingInput routing_input(const Engine& engine, const PlaceRequest& r) {
  if (!r.topk_idx == !r.routing_map) throw std::invalid_argument("topk_idx, routing_map: give one of them");
  RoutingInput in;
  in.num_tokens = r.header.num_tokens;
  in.topk = r.topk_in;
  const RoutingExtents e = extents_of(in, engine.layout().counts.num_experts);
  const Device device = device_of(engine);
  in.topk_idx = optional_array<const int64_t>(given(r.topk_idx), {"topk_idx", e.topk_idx, device});
  in.routing_map = reinterpret_cast<const unsigned char*>(
      optional_array<const bool>(given(r.routing_map), {"routing_map", e.routing_map, device}));
  const uint64_t weight_bytes = r.topk_idx ? e.weights_of_topk : e.weights_of_map;
  in.weights = optional_array<const float>(given(r.weights), {"weights", weight_bytes, device});
  return in;
}

}  // namespace

Placed place(Engine& engine, const PlaceRequest& r) {
  Placed result;
  result.device = device_of(engine);
  result.memory = r.memory.keep_alive;
  const RoutingInput in = routing_input(engine, r);
  PlaceCall c;
  c.header = r.header;
  c.num_blocks = r.num_blocks;
  const PlanMemory needed = engine.plan_memory(in.num_tokens, r.header.topk, !r.count);
  c.memory = require(&r.memory, {"memory", needed.total, result.device, 128}, Element::kInt64);
  py::gil_scoped_release release;
  if (r.count)
    result.placement = engine.place_and_count(in, c);
  else
    result.complete = engine.place(in, c);
  return result;
}

namespace {

DispatchCall sizes_of(const DispatchRequest& r) {
  if (r.weights && r.routed_weights) throw std::invalid_argument("weights: give none with routed_weights=True");
  DispatchCall c;
  c.row_bytes = r.row_bytes;
  c.scale_bytes = r.scale_bytes;
  c.permute = r.permuted.has_value();
  c.out_rows = r.permuted.value_or(0);
  if (c.permute) c.land_in = r.launch.land_in;
  c.num_blocks = r.launch.num_blocks;
  c.local_blocks = r.launch.local_blocks.value_or(0);
  c.chunk_tokens = r.launch.chunk_tokens.value_or(0);
  return c;
}

// The tensors of the call, which have those bytes.
void bind_tensors(const Engine& engine, const DispatchRequest& r, const DispatchExtents& e, DispatchCall& c) {
  const Device device = device_of(engine);
  c.x = require(&r.x, {"x", e.x, device, kRowAlignment});
  c.out_x = require(&r.out_x, {"out_x", e.out_x, device, kRowAlignment}, r.x.element);
  if (c.scale_bytes) {
    c.scales = require(given(r.scale), {"scale", e.scale, device, kRowAlignment});
    c.out_scales = require(given(r.out_scale), {"out_scale", e.out_scale, device, kRowAlignment}, r.scale->element);
  }
  c.weights = optional_array<const float>(given(r.weights), {"weights", e.weights, device, kRowAlignment});
  if (c.weights || r.routed_weights)
    c.out_weights = require_array<float>(given(r.out_weights), {"out_weights", e.out_weights, device});
}

DispatchCall call_on(const Engine& engine, const Plan& plan, const DispatchRequest& r) {
  DispatchCall c = sizes_of(r);
  bind_tensors(engine, r, extents_of(plan, c), c);
  if (r.routed_weights) c.weights = plan.weights();
  return c;
}

}  // namespace

void dispatch(Engine& engine, Plan& plan, const DispatchRequest& r) {
  const DispatchCall c = call_on(engine, plan, r);
  py::gil_scoped_release release;
  engine.dispatch(plan, c);
}

std::shared_ptr<Plan> latency_route(Engine& engine, const PlaceRequest& p, const DispatchRequest& r) {
  if (r.weights) throw std::invalid_argument("weights: those of the routing travel; give routed_weights=True");
  const RoutingInput in = routing_input(engine, p);
  PlaceCall place;
  place.header = p.header;
  const PlanMemory needed = engine.plan_memory(in.num_tokens, p.header.topk, true);
  place.memory = require(&p.memory, {"memory", needed.total, device_of(engine), 128}, Element::kInt64);
  DispatchCall c = sizes_of(r);
  if (!c.permute) throw std::invalid_argument("permuted: give the rows of the result, a static number");
  bind_tensors(
      engine, r,
      {num_bytes(in.num_tokens, c.row_bytes), num_bytes(in.num_tokens, c.scale_bytes), 0,
       num_bytes(c.out_rows, c.row_bytes), num_bytes(c.out_rows, c.scale_bytes), num_bytes(c.out_rows, sizeof(float))},
      c);
  py::gil_scoped_release release;
  return engine.latency_dispatch(in, place, c, r.routed_weights);
}

void latency_dispatch(Engine& engine, Plan& plan, const DispatchRequest& r) {
  const DispatchCall c = call_on(engine, plan, r);
  py::gil_scoped_release release;
  engine.latency_dispatch(plan, c);
}

namespace {

CombineCall call_on(const Engine& engine, const Plan& plan, const CombineRequest& r) {
  CombineCall c;
  c.dtype = summable("x", &r.x);
  c.hidden = r.hidden;
  c.permuted = r.permuted;
  c.multiply = r.multiply;
  c.fp32_partials = r.fp32_partials;
  c.num_blocks = r.launch.num_blocks;
  c.local_blocks = r.launch.local_blocks.value_or(0);
  c.chunk_tokens = r.launch.chunk_tokens.value_or(0);
  const CombineExtents e = extents_of(plan, c);
  const Device device = device_of(engine);
  c.x = require(&r.x, {"x", e.x, device, kRowAlignment});
  c.out_x = require(&r.out_x, {"out_x", e.out_x, device, kRowAlignment}, r.x.element);
  c.weights = optional_array<const float>(given(r.weights), {"weights", e.weights, device});
  if (c.weights)
    c.out_weights = require_array<float>(given(r.out_weights), {"out_weights", e.out_weights, device, kRowAlignment});
  return c;
}

}  // namespace

void combine(Engine& engine, Plan& plan, const CombineRequest& r) {
  const CombineCall c = call_on(engine, plan, r);
  py::gil_scoped_release release;
  engine.combine(plan, c);
}

void latency_combine(Engine& engine, Plan& plan, const CombineRequest& r) {
  const CombineCall c = call_on(engine, plan, r);
  py::gil_scoped_release release;
  engine.latency_combine(plan, c);
}

void bind_requests(py::module_& m) {
  // of(...): all of them by position. pybind11 looks every keyword up, which costs a call more than all its checks.
  // looked_at: signature() has seen where the storages of the caller's tensors end, in this call.
  using P = PlaceRequest;
  using D = DispatchRequest;
  using C = CombineRequest;
  py::class_<LaunchShape>(m, "LaunchShape", "How an operation is launched: what calls of one kind have in common.")
      .def(
          py::init(&make_launch), py::kw_only(), py::arg("num_blocks") = 1, py::arg("local_blocks") = py::none(),
          py::arg("chunk_tokens") = py::none(), py::arg("landing") = py::none(),
          "local_blocks: for local work, behind num_blocks that feed links (None: these do it). chunk_tokens: of a "
          "rail message, the same on all ranks (None: what ring slots hold). landing: where permuted rows land in the "
          "arena, 'all' in the row of each of a token's pairs on a rank, 'first' in that of the first, which is copied "
          "there (None: all on hosts, first on GPUs).");
  py::class_<P> p(m, "PlaceRequest", "A routed call, for Engine.place.");
  p.def(py::init(&make_place), py::arg("header"), py::kw_only(), py::arg("topk_idx") = py::none(),
        py::arg("routing_map") = py::none(), py::arg("weights") = py::none(), py::arg("memory"), py::arg("topk_in") = 0,
        py::arg("count"), py::arg("num_blocks") = 1, py::arg("looked_at") = false,
        "Of topk_idx int64 [T, topk_in] and routing_map bool [T, E] one; weights fp32 of its shape; memory: int64, "
        "plan_memory() bytes. count: wait for the counts, else the host never learns them. num_blocks: of the exchange "
        "kernel.");
  p.def_static("of", &make_place, py::arg("header"), py::arg("topk_idx").none(true), py::arg("routing_map").none(true),
               py::arg("weights").none(true), py::arg("memory"), py::arg("topk_in"), py::arg("count"),
               py::arg("num_blocks"), py::arg("looked_at"), "All of them, by position.");
  field(p, "topk_idx", &P::topk_idx);
  field(p, "routing_map", &P::routing_map);
  field(p, "weights", &P::weights);
  field(p, "memory", &P::memory);
  py::class_<D> d(m, "DispatchRequest", "The rows of a plan on their way, for Engine.dispatch.");
  d.def(py::init(&make_dispatch), py::kw_only(), py::arg("x"), py::arg("scale") = py::none(),
        py::arg("weights") = py::none(), py::arg("routed_weights") = false, py::arg("out_x"),
        py::arg("out_scale") = py::none(), py::arg("out_weights") = py::none(), py::arg("row_bytes"),
        py::arg("scale_bytes") = 0, py::arg("permuted") = py::none(), py::arg("launch"), py::arg("looked_at") = false,
        "weights: in plan order; routed_weights: those that the plan's routing brought. permuted: rows of the "
        "permuted result; None: receive order.");
  d.def_static("of", &make_dispatch, py::arg("x"), py::arg("scale").none(true), py::arg("weights").none(true),
               py::arg("routed_weights"), py::arg("out_x"), py::arg("out_scale").none(true),
               py::arg("out_weights").none(true), py::arg("row_bytes"), py::arg("scale_bytes"),
               py::arg("permuted").none(true), py::arg("launch"), py::arg("looked_at"), "All of them, by position.");
  field(d, "x", &D::x);
  field(d, "scale", &D::scale);
  field(d, "weights", &D::weights);
  field(d, "out_x", &D::out_x);
  field(d, "out_scale", &D::out_scale);
  field(d, "out_weights", &D::out_weights);
  py::class_<C> c(m, "CombineRequest", "Rows on their way back, for Engine.combine.");
  c.def(py::init(&make_combine), py::kw_only(), py::arg("x"), py::arg("hidden"), py::arg("weights") = py::none(),
        py::arg("out_x"), py::arg("out_weights") = py::none(), py::arg("permuted"), py::arg("multiply") = false,
        py::arg("fp32_partials") = false, py::arg("launch"));
  c.def_static("of", &make_combine, py::arg("x"), py::arg("hidden"), py::arg("weights").none(true), py::arg("out_x"),
               py::arg("out_weights").none(true), py::arg("permuted"), py::arg("multiply"), py::arg("fp32_partials"),
               py::arg("launch"), "All of them, by position.");
  field(c, "x", &C::x);
  field(c, "weights", &C::weights);
  field(c, "out_x", &C::out_x);
  field(c, "out_weights", &C::out_weights);
}

}  // namespace hep
