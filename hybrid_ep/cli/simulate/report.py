"""One exchange: time, bandwidth on each link, who is busy, what binds, what to set."""

from __future__ import annotations

from typing import Any

from hybrid_ep.cli.simulate.request import Request
from hybrid_ep.sim import model, trace
from hybrid_ep.sim.clusters import Cluster
from hybrid_ep.sim.model import Prediction


def run(request: Request, trace_path: str | None) -> dict[str, Any]:
    """Prints the report; returns every number of it."""
    tuned = request.tuned()
    request = request.settled(tuned)
    engine = "model"
    found = {op: _predict(request, op) for op in model.OPS}
    _print_header(request, engine)
    for op, got in found.items():
        _print_operation(op, got)
    print(f"suggested: --num-sms {tuned.num_sms} --chunk {tuned.chunk} (pair {tuned.exchange_us:.0f} us by the model; "
          "the fewest SMs within 5 % of the fastest)")
    document = {"engine": engine, "cluster": request.cluster.name, "shape": vars(request.shape),
                "dtype": request.dtype, "routing": request.routing_text, "num_sms": request.num_sms,
                "chunk": request.chunk, "imbalance": request.traffic.imbalance,
                "suggested": {"num_sms": tuned.num_sms, "chunk": tuned.chunk, "pair_us": tuned.exchange_us},
                "operations": {op: as_dict(got) for op, got in found.items()}}
    if trace_path:
        shift, spans = 0.0, []
        for op, got in found.items():
            spans += [s._replace(start=s.start + shift) for s in trace.of_timeline(got.timeline, op)]
            shift += got.timeline.end
        print(f"# trace: {trace.write(trace_path, spans)} spans in {trace_path}; open it in ui.perfetto.dev")
    return document


def _predict(request: Request, op: str) -> Prediction:
    return model.predict(op, request.shape, request.cluster, num_sms=request.num_sms, chunk=request.chunk,
                         dtype=request.dtype if op == "dispatch" else "bf16", traffic=request.traffic)


def as_dict(got: Prediction) -> dict[str, Any]:
    """A prediction without its timeline."""
    return {"dtype": got.dtype, "kernel_us": got.kernel_us, "api_us": got.api_us, "binds": got.binds,
            "bounds_us": got.bounds, "physical_gb_per_s": got.physical, "logical_gb_per_s": got.logical,
            "sm_busy": got.roles, "hbm_bytes": got.hbm_bytes}


def _print_header(request: Request, engine: str) -> None:
    s = request.shape
    print(f"# hybrid_ep simulate  {request.cluster.name}: {request.cluster.summary}")
    print(f"# EP {s.ranks} ({s.nodes} x {s.ranks_per_node})  tokens {s.tokens}  hidden {s.hidden}  topk {s.topk}/"
          f"{s.experts}  {request.dtype}  routing {request.routing_text}  SMs {request.num_sms}  chunk {request.chunk}")
    print(f"# engine {engine}; logical bandwidth counts local rows, physical only what crosses the link; GB = 1e9 B")
    t = request.traffic
    print(f"# a token goes to {t.ranks_per_token:.2f} ranks on {t.nodes_per_token:.2f} nodes; imbalance ratio "
          f"{t.imbalance:.2f}")


def _print_operation(op: str, got: Prediction) -> None:
    print(f"{op:<9} {got.dtype}  kernel {got.kernel_us:8.1f} us   call {got.api_us:8.1f} us   binds: {got.binds}")
    for link in ("nvlink", "rail"):
        if got.physical[link]:
            print(f"  {link:<7} physical {got.physical[link]:6.1f} GB/s   logical {got.logical[link]:6.1f} GB/s")
    bounds = "  ".join(f"{name} {us:.0f}" for name, us in got.bounds.items() if us)
    print(f"  busy    {bounds}  (us, each resource alone: none can be beaten)")
    shares = "  ".join(f"{role} {share:.0%}" for role, share in got.roles.items())
    print(f"  SM      {shares}  (of the copy engines of {got.num_sms} SMs)")


def print_sources(cluster: Cluster) -> None:
    """Every number, its kind and its source."""
    print(f"# {cluster.name}: {cluster.summary}; NVLink domain of {cluster.ranks_per_node}")
    for name, q in cluster.quantities():
        print(f"{name:<26} {q.value:>10.5g} {q.unit:<12} {q.kind:<10} {q.source}")
