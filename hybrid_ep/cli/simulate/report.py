"""One exchange: time, bandwidth on each link, who is busy, what binds, what to set."""

from __future__ import annotations

from typing import Any

from hybrid_ep.cli import outputs
from hybrid_ep.cli.progress import say
from hybrid_ep.cli.simulate.request import Request
from hybrid_ep.hardware.clusters import Cluster
from hybrid_ep.perf import events, model, trace
from hybrid_ep.perf.events import Events
from hybrid_ep.perf.implementations import HYBRID_EP
from hybrid_ep.perf.model import Prediction

# The ports of the event engine by the resource whose time they are.
_ROWS_A_SECOND = events.QUICK_ROWS / 10  # of the event engine: QUICK_ROWS take some ten seconds
_PORTS = {"NVLink": ("nvlink_egress", "nvlink_ingress"), "NIC": ("nic_egress", "nic_ingress"), "HBM": ("hbm",)}


def run(request: Request, trace_path: str | None) -> dict[str, Any]:
    """Prints the report; returns every number of it. ValueError when the engine asked for is not there."""
    tuned = request.tuned()
    request = request.settled(tuned)
    found, engine, why = numbers(request)
    spans, covers = [], f"the model: one rank for all, {request.shape.tokens} tokens"
    if engine == "events" and trace_path:
        shown = events.timeline(
            request.shape,
            request.cluster,
            num_sms=request.num_sms,
            chunk=request.chunk,
            dtype=request.dtype,
            choices=request.choices,
        )
        spans = list(shown.spans)
        covers = f"{shown.simulated_tokens} of {request.shape.tokens} tokens a rank, all ranks"
    elif trace_path:
        shift = 0.0
        for op in model.OPS:
            line = _predict(request, op).timeline
            spans += [s._replace(start=s.start + shift) for s in trace.of_timeline(line, op)]
            shift += line.end
    _print_header(request, engine, why)
    for op, got in found.items():
        _print_operation(op, got, request.num_sms)
    print(
        f"suggested: --num-sms {tuned.num_sms} --chunk {tuned.chunk} (pair {tuned.exchange_us:.0f} us by the model; "
        "the fewest SMs within 5 % of the fastest)"
    )
    if trace_path:
        count = trace.write(trace_path, spans, covers)
        print(f"# written: {trace_path}: {count} spans, of {covers}; open it in ui.perfetto.dev")
    return {
        "engine": engine,
        "kernels": request.kernels.name,
        "cluster": request.cluster.name,
        "shape": vars(request.shape),
        "dtype": request.dtype,
        "routing": request.routing_text,
        "num_sms": request.num_sms,
        "chunk": request.chunk,
        "imbalance": request.traffic.imbalance,
        "suggested": {"num_sms": tuned.num_sms, "chunk": tuned.chunk, "pair_us": tuned.exchange_us},
        "operations": found,
    }


def numbers(request: Request) -> tuple[dict[str, dict[str, Any]], str, str]:
    """({operation: every number}, the engine that answered, what it simulated or why not the other one). request:
    settled. ValueError when the engine asked for is not there."""
    engine, why = _engine(request)
    found = {op: as_dict(_predict(request, op)) for op in model.OPS}
    if engine == "events":
        rows = min(events.rows(request.shape), 2 * events.ROW_BUDGET)
        seconds = rows / _ROWS_A_SECOND
        say(f"simulating about {rows:,} rows, roughly {seconds:.0f} s of a free core", seconds)
        got = events.measure(
            request.shape,
            request.cluster,
            num_sms=request.num_sms,
            chunk=request.chunk,
            dtype=request.dtype,
            choices=request.choices,
        )
        _take_events(found, got, request)
        why = _sampling(got, request)
    return found, engine, why


def _engine(request: Request) -> tuple[str, str]:
    """(engine, why not the other one)."""
    reason = events.missing()
    if request.kernels is not HYBRID_EP:
        reason = "only this library's own kernels run in the event engine"
    if reason is None and request.dtype not in ("bf16", "fp8"):
        reason = f"the event engine moves bf16 or fp8 rows, not {request.dtype}"
    if request.engine == "events" and reason:
        raise ValueError(f"--engine events: {reason}; use --engine model")
    if request.engine == "model":
        return "model", "as asked"
    if reason is None and request.engine == "auto" and events.rows(request.shape) > events.QUICK_ROWS:
        reason = "too many rows to simulate each in seconds; --engine events does, in minutes"
    return ("model", reason) if reason else ("events", "")


def _predict(request: Request, op: str) -> Prediction:
    return model.predict(
        op,
        request.shape,
        request.cluster,
        num_sms=request.num_sms,
        chunk=request.chunk,
        dtype=request.dtype if op == "dispatch" else "bf16",
        traffic=request.traffic,
        impl=request.kernels,
    )


def as_dict(got: Prediction) -> dict[str, Any]:
    """A prediction without its timeline."""
    return {
        "dtype": got.dtype,
        "kernel_us": got.kernel_us,
        "api_us": got.api_us,
        "binds": got.binds,
        "bounds_us": dict(got.bounds),
        "physical_gb_per_s": got.physical,
        "logical_gb_per_s": got.logical,
        "sm_busy": got.roles,
    }


def _take_events(found: dict[str, dict[str, Any]], got: Events, request: Request) -> None:
    """Puts the event engine's times in place of the model's; what nodes wait for one another is added to both."""
    gpu = request.cluster.gpu
    skew = gpu.skew_us.value if request.shape.nodes > 1 else 0.0
    for op, numbers in found.items():
        model_us = numbers["kernel_us"]
        numbers["model_kernel_us"] = model_us
        numbers["kernel_us"] = got.time_us[op] + skew
        numbers["api_us"] = numbers["kernel_us"] + 2 * gpu.launch_us.value
        for kind in ("physical_gb_per_s", "logical_gb_per_s"):
            numbers[kind] = {k: v * model_us / numbers["kernel_us"] for k, v in numbers[kind].items()}
        numbers["sm_busy"] = {r: v * model_us / numbers["kernel_us"] for r, v in numbers["sm_busy"].items()}
        numbers["events_kernels_us"] = {k: got.kernel_us[k] for k in events.KERNELS[op] if k in got.kernel_us}
    # the engine counts ports over the pair of operations
    pair = {name: max((got.link_us.get(p, 0.0) for p in ports), default=0.0) for name, ports in _PORTS.items()}
    found["dispatch"]["events_pair_port_us"] = found["combine"]["events_pair_port_us"] = pair


def _sampling(got: Events, request: Request) -> str:
    if got.exact:
        return "every token of every rank"
    return (
        f"every rank; {got.simulated_tokens} and {got.simulated_tokens // 2} tokens, continued in a straight line "
        f"to {request.shape.tokens}"
    )


def _print_header(request: Request, engine: str, why: str) -> None:
    s, t = request.shape, request.traffic
    print(f"# hybrid_ep simulate  {request.cluster.name}: {request.cluster.summary}")
    print(
        f"# EP {s.ranks} ({s.nodes} x {s.ranks_per_node})  tokens {s.tokens}  hidden {s.hidden}  topk {s.topk}/"
        f"{s.experts}  {request.dtype}  routing {request.routing_text}  SMs {request.num_sms}  chunk {request.chunk}"
    )
    print(f"# kernels {request.kernels.name}: {request.kernels.summary}")
    said = f"# engine {engine} ({why}); logical bandwidth counts local rows, physical only what crosses; GB = 1e9 B"
    print(outputs.narrowed(said))
    print(
        f"# a token goes to {t.ranks_per_token:.2f} ranks on {t.nodes_per_token:.2f} nodes; imbalance ratio "
        f"{t.imbalance:.2f}"
    )
    if s.nodes > 1:
        skew = request.cluster.gpu.skew_us
        print(f"# times have {skew.value:.0f} us by which nodes enter an operation apart ({skew.kind}; --sources)")


def _print_operation(op: str, got: dict[str, Any], num_sms: int) -> None:
    by_model = f"   (model {got['model_kernel_us']:.1f} us)" if "model_kernel_us" in got else ""
    print(
        f"{op:<9} {got['dtype']}  kernel {got['kernel_us']:8.1f} us   call {got['api_us']:8.1f} us   "
        f"binds: {got['binds']}{by_model}"
    )
    for link in ("nvlink", "rail"):
        if got["physical_gb_per_s"][link]:
            print(
                f"  {link:<7} physical {got['physical_gb_per_s'][link]:6.1f} GB/s   logical "
                f"{got['logical_gb_per_s'][link]:6.1f} GB/s"
            )
    bounds = "  ".join(f"{name} {us:.0f}" for name, us in got["bounds_us"].items() if us)
    print(f"  busy    {bounds}  (us, each resource alone: none can be beaten)")
    shares = "  ".join(f"{role} {share:.0%}" for role, share in got["sm_busy"].items())
    print(f"  SM      {shares}  (of the copy engines of {num_sms} SMs)")


def print_sources(cluster: Cluster) -> None:
    """Every number, its kind and its source."""
    print(f"# {cluster.name}: {cluster.summary}; NVLink domain of {cluster.ranks_per_node}")
    for name, q in cluster.quantities():
        numbers = f"{name:<26} {q.value:>10.5g} {q.unit:<12} {q.kind:<10} "
        print(outputs.narrowed(numbers + q.source, " " * len(numbers)))
