"""--backend sim: the table of the bench from the model of `hybrid-ep simulate`, for a cluster that is not here.

Every number is a prediction and marked as one. The times are those that `hybrid-ep simulate` prints for the same
exchange: both ask `simulate.report.numbers`."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from hybrid_ep.cli import EXIT_OK, UsageError, outputs
from hybrid_ep.cli.arguments import in_flags
from hybrid_ep.cli.bench import by_lines, presets, routing_spec
from hybrid_ep.cli.bench.config import refuse_plot_of_a_point, require, token_sweep
from hybrid_ep.cli.bench.plots import Point, draw
from hybrid_ep.cli.bench.presets import Condition
from hybrid_ep.cli.progress import say
from hybrid_ep.cli.simulate import report
from hybrid_ep.cli.simulate.request import ARGUMENTS, Request
from hybrid_ep.hardware import clusters
from hybrid_ep.hardware.clusters import Cluster
from hybrid_ep.perf import events, model, published
from hybrid_ep.perf import routing as sim_routing
from hybrid_ep.perf.implementations import HYBRID_EP, PUBLISHED, UNPERMUTED, Implementation
from hybrid_ep.perf.shape import DTYPES, Shape

SCHEMA = "hybrid_ep.bench-simulated/1"
_MARK = "# SIMULATED: predictions of hybrid_ep's performance model, not measurements (docs/performance_model.md)"
_RATES = ("algbw", "busbw", "rail", "node", "logical")
_HEADER = (
    f"#{'tokens':>7}{'sms':>5}{'op':>10}{'dtype':>7}{'time':>10}{'kernel':>10}"
    f"{''.join(f'{name:>8}' for name in _RATES)}  binds"
)
_SUMS_OF = {"pair": ("dispatch", "combine"), "step": ("dispatch", "combine", "dispatch in bf16", "combine")}


@dataclass(frozen=True)
class Row:
    """A prediction: microseconds of the call and inside its kernels, GB/s over the call's time as the bench defines
    them, the share of the link that the kernel alone reaches."""

    tokens: int
    num_sms: int
    op: str
    dtype: str
    time_us: float
    kernel_us: float
    algbw: float | None
    busbw: float | None
    rail_gbps: float | None
    node_gbps: float | None
    logical_gbps: float | None
    link_gbps: float
    kernel_share: float | None
    binds: str


def run(args: argparse.Namespace) -> int:
    """Prints the table, or that of every condition of a preset; exit code 0. UsageError for what cannot be
    simulated."""
    _refuse(args)
    if args.path == "latency":
        by_lines.refuse(args)
    try:
        with outputs.for_people(args.json):
            documents = by_lines.run(args) if args.path == "latency" else [_run(*world) for world in _worlds(args)]
    except (ValueError, MemoryError) as error:
        raise UsageError(in_flags(str(error), ARGUMENTS)) from None
    outputs.write_json(args.json, {"schema": SCHEMA, "simulated": True, "worlds": documents})
    return EXIT_OK


def _refuse(args: argparse.Namespace) -> None:
    for flag, given, why in (
        (
            "--peers",
            args.peers or args.impl or args.peer,
            "peers do not run in the simulator; docs/performance_model.md compares their models",
        ),
        ("--ranks", args.ranks is not None, "give --nodes and --ranks-per-node"),
        ("--ragged", args.ragged != "none", "the model has the same tokens on every rank"),
        ("--chain", args.chain, "the model has no skew that a chain would absorb"),
        ("--cuda-graph", args.cuda_graph, "nothing is launched; use --backend cuda"),
        ("-M", args.memory, "nothing is allocated; use --backend host"),
        ("-I", args.per_iteration, "a prediction has no iterations"),
        ("--op route", "route" in args.op, "the model leaves the exchange of counts out; use --backend host or cuda"),
        ("--no-permute", not args.permute and args.engine != "model", "only --engine model has it"),
        (
            "--op permute",
            {"permute", "unpermute"} & set(args.op) and (args.engine != "model" or not args.permute),
            "needs --engine model and no --no-permute",
        ),
    ):
        require(not given, f"{flag} with --backend sim: {why}")
    require(args.dtype in DTYPES, f"--dtype {args.dtype} with --backend sim: use one of {', '.join(DTYPES)}")
    require(all(sms >= 0 for sms in args.num_sms), "--num-sms: must be 0 (as suggested) or positive")


def _worlds(args: argparse.Namespace) -> Iterator[tuple[argparse.Namespace, Condition | None, Path | None]]:
    """(flags, condition of the preset, folder of the plots) of every world to predict."""
    folder = Path(args.plot) if args.plot else None
    if args.preset is None:
        given = {"cluster": args.cluster or "h100_8x400g", "nodes": 1 if args.nodes is None else args.nodes}
        refuse_plot_of_a_point(args)
        yield argparse.Namespace(**(vars(args) | given)), None, folder
        return
    presets.refuse_shape_flags(args)
    for c in presets.conditions(args.preset):
        sms = args.num_sms if args.num_sms != (0,) else (c.num_sms // 2, c.num_sms, 2 * c.num_sms)
        shape = {
            name: getattr(c, name)
            for name in ("cluster", "nodes", "ranks_per_node", "hidden", "topk", "experts", "dtype")
        }
        world = argparse.Namespace(**(vars(args) | shape | {"tokens": (c.tokens,), "num_sms": sms}))
        refuse_plot_of_a_point(world)
        yield world, c, folder / c.name if folder else None


def _run(args: argparse.Namespace, condition: Condition | None, folder: Path | None) -> dict[str, Any]:
    rows: list[Row] = []
    kernels: dict[tuple[str, int], float] = {}
    for tokens in token_sweep(args):
        for num_sms in args.num_sms:
            request = _request(args, tokens, num_sms)
            if not rows:
                _print_header(args, request, condition)
            answers: dict[str, Any] = {}
            for op in args.op:
                rows.append(_row(request, op, args.permute, answers))
                print(_line(rows[-1]), flush=True)
            kernels |= _events_kernels(request, answers)
    document: dict[str, Any] = {
        "cluster": args.cluster,
        "nodes": args.nodes,
        "routing": request.routing_text,
        "shape": asdict(request.shape),
        "engine": args.engine,
        "rows": [asdict(row) for row in rows],
    }
    if condition is not None:
        document |= {
            "preset": condition.name,
            "claim": condition.claim,
            "published": _print_published(condition, rows, kernels, args.permute),
        }
    if folder is not None:
        s = request.shape
        title = (
            f"EP {s.ranks} ({s.nodes} x {s.ranks_per_node}), hidden {s.hidden}, top-{s.topk} of {s.experts}, "
            f"{request.dtype}; {args.cluster}, simulated"
        )
        points = [
            Point(r.tokens, r.num_sms, r.op, "hybrid_ep", r.time_us, None, None, r.busbw, r.link_gbps) for r in rows
        ]
        folder.parent.mkdir(parents=True, exist_ok=True)
        for line in draw(points, folder, title):
            print(line)
    return document


def _request(args: argparse.Namespace, tokens: int, num_sms: int) -> Request:
    """What `hybrid-ep simulate` would be asked with the same flags, SMs settled."""
    spec = routing_spec.parse_routing(args.routing)
    drawn = spec.kind == "one-hot" or args.imbalance is not None
    flags = argparse.Namespace(
        **{
            name: getattr(args, name)
            for name in ("nodes", "ranks_per_node", "hidden", "topk", "experts", "dtype", "seed", "engine")
        },
        tokens=tokens,
        num_sms=num_sms,
        chunk=HYBRID_EP.chunk,
        load=None,
        kernels="ours",
        routing="uniform" if drawn else args.routing,
    )
    cluster = clusters.get(args.cluster)
    request = Request.from_flags(flags, cluster)
    if drawn:  # routing that only the bench has: drawn by it, counted by the simulator
        s = request.shape
        from hybrid_ep.cli.bench import routing

        spec = routing_spec.with_imbalance(spec, args.imbalance, s.experts, s.topk, s.ranks)
        choices = routing.draw(spec, s.ranks, tokens, s.experts, s.topk, args.seed)
        request = replace(request, choices=choices, traffic=sim_routing.count(choices, s), routing_text=str(spec))
    return request.settled(request.tuned()) if not num_sms else request


def _row(request: Request, op: str, permute: bool, answers: dict[str, Any]) -> Row:
    """One prediction; pair and step are sums, permute and unpermute what they add to the call. answers: to this
    request by dtype, of rows before."""
    parts = {name: _part(request, name, permute, answers) for name in _SUMS_OF.get(op, (op,))}
    each = [parts[name] for name in _SUMS_OF.get(op, (op,))]
    time_us, kernel_us = sum(p["api_us"] for p in each), sum(p["kernel_us"] for p in each)
    moved = {key: sum(p.get(key, 0.0) for p in each) for key in ("nvlink", "rail", "logical", "payload")}
    link = "rail" if request.shape.nodes > 1 else "nvlink"
    cluster = request.cluster
    rate = cluster.nic.rate if link == "rail" else cluster.gpu.nvlink_rate
    stage = op in ("permute", "unpermute")

    def over(num_bytes: float, us: float) -> float | None:
        return None if stage or us <= 0 else num_bytes / us / 1e3

    share = over(moved[link], kernel_us)
    return Row(
        request.shape.tokens,
        request.num_sms,
        op,
        request.dtype,
        time_us,
        kernel_us,
        over(moved["payload"], time_us),
        over(moved[link], time_us),
        over(moved["rail"], time_us),
        over(moved["nvlink"], time_us),
        over(moved["logical"], time_us),
        rate,
        share and share / rate,
        max(each, key=lambda p: p["api_us"])["binds"],
    )


def _part(request: Request, name: str, permute: bool, answers: dict[str, Any]) -> dict[str, Any]:
    """Times in microseconds and bytes of dispatch, combine, permute or unpermute."""
    if name in ("permute", "unpermute"):
        op = "dispatch" if name == "permute" else "combine"
        fused, alone = (_by_model(request, op, impl) for impl in (HYBRID_EP, UNPERMUTED))
        return {key: fused[key] - alone[key] for key in ("api_us", "kernel_us")} | {"binds": fused["binds"]}
    if name.endswith("in bf16"):
        request, name = replace(request, dtype="bf16"), "dispatch"
    if not permute:
        return _by_model(request, name, UNPERMUTED)
    if request.dtype not in answers:
        answers[request.dtype] = report.numbers(request)[0]
    return _with_bytes(answers[request.dtype][name], request, name)


def _by_model(request: Request, op: str, impl: Implementation) -> dict[str, Any]:
    got = model.predict(
        op,
        request.shape,
        request.cluster,
        num_sms=request.num_sms,
        chunk=request.chunk,
        impl=impl,
        dtype=request.dtype if op == "dispatch" else "bf16",
        traffic=request.traffic,
    )
    return _with_bytes(report.as_dict(got), request, op)


def _with_bytes(found: dict[str, Any], request: Request, op: str) -> dict[str, Any]:
    """The bytes behind the bandwidths, which are over the kernel's time."""
    us, link = found["kernel_us"] * 1e3, "rail" if request.shape.nodes > 1 else "nvlink"
    payload = request.traffic.received * request.shape.row_bytes(request.dtype if op == "dispatch" else "bf16")
    return (
        found
        | {key: found["physical_gb_per_s"][key] * us for key in ("nvlink", "rail")}
        | {"logical": found["logical_gb_per_s"][link] * us, "payload": payload}
    )


def _say(line: str) -> None:
    print(outputs.narrowed(line))


def _print_header(args: argparse.Namespace, request: Request, condition: Condition | None) -> None:
    s, c = request.shape, request.cluster
    print(_MARK)
    if condition is not None:
        _say(f"# preset {condition.name}; published claim: {condition.claim}")
    _say(
        f"# cluster {c.name}: {c.summary}; EP {s.ranks} ({s.nodes} x {s.ranks_per_node})  hidden {s.hidden}  topk "
        f"{s.topk}/{s.experts}  {request.dtype}/bf16  routing {request.routing_text}  chunk {request.chunk}  engine "
        f"{args.engine}  {'permute' if args.permute else 'no permute'}"
    )
    _say(
        f"# imbalance ratio over ranks: {request.traffic.imbalance:.3f}; columns as of a measurement: us and GB/s, "
        "time is the call's, bandwidths are over it"
    )
    print(_HEADER)


def _line(row: Row) -> str:
    def number(value: float | None) -> str:
        return "-" if value is None else f"{value:.2f}"

    cells = "".join(f"{number(v):>8}" for v in (row.algbw, row.busbw, row.rail_gbps, row.node_gbps, row.logical_gbps))
    return (
        f"{row.tokens:>8}{row.num_sms:>5}{row.op:>10}{row.dtype:>7}{row.time_us:>10.1f}{row.kernel_us:>10.1f}"
        f"{cells}  {row.binds}"
    )


def _print_published(
    c: Condition, rows: list[Row], kernels: dict[tuple[str, int], float], permute: bool
) -> list[dict[str, Any]]:
    """The claim against the predictions, then every published number of this world beside the models' answers.
    kernels: microseconds by the event engine, where the rows are its."""
    cluster = clusters.get(c.cluster)
    said = []
    _say(
        f"# the claim, {c.claim}: share of the {c.link}'s rate that the kernels reach, predicted for hybrid_ep as "
        "it is, with num_blocks_permute and num_blocks_unpermute for all SMs, and without permute; and for the "
        "published kernels, which leave the way between received rows and tensors out. By the model, but for "
        "'event engine', which runs hybrid_ep's kernels themselves, of all ranks"
    )
    ran = bool(kernels)
    if permute and not ran:
        kernels = _kernels_by_events(c, rows)
    for row in rows:
        if row.op in model.OPS and row.kernel_share is not None:
            shares = {"hybrid_ep": _model_share(c, row, HYBRID_EP, None) if ran else row.kernel_share}
            if us := kernels.get((row.op, row.num_sms)):  # of the same bytes
                shares["event engine"] = row.kernel_share * row.kernel_us / us
            every = int(cluster.gpu.num_sms.value) - row.num_sms
            for name, impl, apart in (
                ("permute on all SMs", HYBRID_EP, every),
                ("no permute", UNPERMUTED, None),
                ("published kernels", PUBLISHED, None),
            ):
                shares[name] = _model_share(c, row, impl, apart)
            said.append({"kind": "claim", "op": row.op, "num_sms": row.num_sms, "shares": shares})
            _say(
                f"#   {row.num_sms:>3} SMs  {row.op:<9} "
                + "   ".join(f"{n} {s:>4.0%}" for n, s in shares.items())
                + ("   <- claimed" if row.num_sms == c.num_sms else "")
            )
    if permute and not kernels:
        for line in _how_to_ask(c):
            _say(f"# {line}")
    found = [
        a
        for a in published.answers()
        if a.row.own_kernels and (a.row.gpu, a.row.ranks, a.row.dtype) == (c.gpu, c.ranks, c.dtype)
    ]
    if not found:
        _say(f"# no published table has {c.ranks} x {c.gpu}: the claim stands alone")
        return said
    r = found[0].row
    _say(
        f"# published tables of the same GPUs at hidden {r.hidden}, {r.experts // r.ranks} experts a rank, GB/s "
        f"{r.basis}: published, predicted for those kernels, predicted for hybrid_ep"
    )
    for a in found:
        mine = model.predict(a.row.op, a.row.shape, cluster, num_sms=a.row.num_sms)
        us = mine.api_us if a.row.scope == "api" else mine.kernel_us
        ours = mine.logical[c.link] * mine.kernel_us / us
        said.append(
            {
                "kind": "table",
                "op": a.row.op,
                "num_sms": a.row.num_sms,
                "scope": a.row.scope,
                "published_gbps": a.row.gb_per_s,
                "published_kernels_gbps": a.gb_per_s,
                "residual": a.residual,
                "hybrid_ep_gbps": ours,
                "source": a.row.source,
            }
        )
        _say(
            f"#   {a.row.num_sms:>3} SMs  {a.row.op:<9} {a.row.scope:<7} published {a.row.gb_per_s:>7.1f}   "
            f"predicted {a.gb_per_s:>7.1f} ({a.residual:+.1%})   hybrid_ep {ours:>7.1f}"
        )
    return said


def _model_share(c: Condition, row: Row, impl: Implementation, permute_sms: int | None) -> float:
    got = model.predict(
        row.op, _shape(c), clusters.get(c.cluster), num_sms=row.num_sms, impl=impl, permute_sms=permute_sms
    )
    return got.physical[c.link] / row.link_gbps


def _kernels_by_events(c: Condition, rows: list[Row]) -> dict[tuple[str, int], float]:
    """Microseconds by operation and SMs, of the claimed ones alone; nothing where it takes more than seconds."""
    if c.num_sms not in {row.num_sms for row in rows if row.op in model.OPS} or events.missing():
        return {}
    if events.rows(_shape(c)) > events.QUICK_ROWS:
        return {}
    say(f"simulating {c.name} by the event engine, some ten seconds", 10.0)
    cluster = clusters.get(c.cluster)
    got = events.measure(_shape(c), cluster, num_sms=c.num_sms)
    return {(op, c.num_sms): got.kernel_us[op] + _skew_us(_shape(c), cluster) for op in model.OPS}


def _events_kernels(request: Request, answers: dict[str, Any]) -> dict[tuple[str, int], float]:
    """The same of answers that are the event engine's. As in the model's kernels, routing is not in them and what
    nodes enter an operation apart is."""
    found = answers.get(request.dtype, {})
    skew = _skew_us(request.shape, request.cluster)
    return {
        (op, request.num_sms): found[op]["events_kernels_us"][op] + skew
        for op in model.OPS
        if "events_kernels_us" in found.get(op, {})
    }


def _skew_us(shape: Shape, cluster: Cluster) -> float:
    return cluster.gpu.skew_us.value if shape.nodes > 1 else 0.0


def _how_to_ask(c: Condition) -> list[str]:
    if why := events.missing():
        return [f"the event engine, which runs the kernels themselves, is not here: {why}"]
    return [
        "the event engine, which runs the kernels themselves, may say less (docs/performance_model.md has its shares); "
        "it takes minutes here:",
        f"  hybrid-ep bench --backend sim --preset {c.name} --num-sms {c.num_sms} --engine events",
    ]


def _shape(c: Condition) -> Shape:
    return Shape(c.ranks, c.ranks_per_node, c.tokens, c.hidden, c.topk, c.experts)
