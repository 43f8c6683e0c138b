"""`--sweep`: time of dispatch and combine over SMs, over chunk and over EP size, as pictures and numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hybrid_ep.cli import plotting
from hybrid_ep.cli.outputs import say_written
from hybrid_ep.cli.progress import track
from hybrid_ep.cli.simulate.request import Request
from hybrid_ep.perf import model, routing
from hybrid_ep.perf.shape import Shape

_SMS = (2, 4, 6, 8, 12, 16, 20, 24, 32, 40, 48, 64)
_CHUNKS = (8, 16, 32, 64, 128, 256)


def run(request: Request, folder: str) -> dict[str, Any]:
    """Prints three tables and draws sweep.png and sweep.svg. ValueError when matplotlib is missing, or for the event
    engine."""
    if request.engine == "events":
        raise ValueError("--engine events: --sweep asks the model, hundreds of times; leave --engine out")
    plotting.pyplot()
    Path(folder).mkdir(parents=True, exist_ok=True)
    request = request.settled(request.tuned())
    tables = {"num_sms": _over_sms(request), "chunk": _over_chunk(request), "ranks": _over_ranks(request)}
    for name, points in tables.items():
        print(f"# {name:>8} dispatch us  combine us  dispatch binds")
        for p in points:
            print(f"{p[name]:10d} {p['dispatch_us']:11.1f} {p['combine_us']:11.1f}  {p['binds']}")
    say_written(draw(request, tables, Path(folder) / "sweep"))
    return {"engine": "model", "cluster": request.cluster.name, "sweeps": tables}


def _point(request: Request, name: str, value: int, shape: Shape, num_sms: int, chunk: int) -> dict[str, Any]:
    traffic = request.traffic
    if shape != request.shape:
        traffic = routing.traffic_of(request.routing_text, shape, request.seed)
    got = {
        op: model.predict(
            op,
            shape,
            request.cluster,
            num_sms=num_sms,
            chunk=chunk,
            traffic=traffic,
            dtype=request.dtype if op == "dispatch" else "bf16",
            impl=request.kernels,
        )
        for op in model.OPS
    }
    return {
        name: value,
        "dispatch_us": got["dispatch"].api_us,
        "combine_us": got["combine"].api_us,
        "binds": got["dispatch"].binds,
    }


def _over_sms(request: Request) -> list[dict[str, Any]]:
    most = request.cluster.gpu.num_sms.value
    return [
        _point(request, "num_sms", n, request.shape, n, request.chunk)
        for n in track([n for n in _SMS if n <= most], "SMs")
    ]


def _over_chunk(request: Request) -> list[dict[str, Any]]:
    return [_point(request, "chunk", c, request.shape, request.num_sms, c) for c in track(_CHUNKS, "chunks")]


def _over_ranks(request: Request) -> list[dict[str, Any]]:
    """EP sizes by powers of two with the same number of experts; a load file fits one group only."""
    s, points, ranks = request.shape, [], 2
    if request.routing_text.startswith("file:"):
        return [_point(request, "ranks", s.ranks, s, request.num_sms, request.chunk)]
    while ranks <= min(256, s.experts):
        local = min(ranks, s.ranks_per_node)
        if s.experts % ranks == 0 and ranks % local == 0:
            shape = s.with_(ranks=ranks, ranks_per_node=local)
            points.append(_point(request, "ranks", ranks, shape, request.num_sms, request.chunk))
        ranks *= 2
    return points


def draw(request: Request, tables: dict[str, list[dict[str, Any]]], stem: Path) -> list[Path]:
    """Three panels with a common time axis."""
    figure, panels = plotting.pyplot().subplots(1, 3, figsize=(9.2, 3.0), sharey=True, layout="constrained")
    titles = {"num_sms": "SMs of an operation", "chunk": "rows of a rail message", "ranks": "EP size"}
    for panel, (name, points) in zip(panels, tables.items(), strict=True):
        for op, colour, mark in (("dispatch", plotting.BLUE, "o"), ("combine", plotting.RED, "s")):
            panel.plot(
                [p[name] for p in points],
                [p[f"{op}_us"] / 1e3 for p in points],
                color=colour,
                marker=mark,
                markersize=3.5,
                linewidth=1.4,
                label=op,
            )
        panel.set_xscale("log", base=2)
        ticks = [p[name] for p in points]
        plotting.label_ticks(panel.xaxis, ticks, ticks)
        panel.tick_params(axis="x", labelsize=7)
        panel.set_xlabel(titles[name])
    panels[0].set_ylabel("time (ms)")
    panels[0].set_ylim(0, None)
    panels[0].legend()
    s = request.shape
    plotting.note(
        figure,
        f"Predicted: {request.cluster.name}, EP {s.ranks}, {s.tokens} tokens, hidden {s.hidden}, "
        f"top-{s.topk} of {s.experts}, {request.dtype}, {request.num_sms} SMs, chunk {request.chunk}",
    )
    return plotting.save(figure, stem)
