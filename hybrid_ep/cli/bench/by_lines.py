"""`--backend sim --path latency`: operations by lines beside the same ones by the throughput path, and from how many
tokens on the latter is faster. Both are times of the event engine, without what a launch takes."""

from __future__ import annotations

import argparse
from dataclasses import asdict, dataclass
from typing import Any

from hybrid_ep.cli.bench import routing
from hybrid_ep.cli.bench.config import require, token_sweep
from hybrid_ep.cli.simulate.latency import PATHS
from hybrid_ep.hardware import clusters
from hybrid_ep.perf import events, latency_events
from hybrid_ep.perf.shape import Shape

OPS = ("dispatch", "combine", "pair")
_HEADER = f"#{'tokens':>7}{'sms':>5}{'op':>10}{'lines us':>11}{'throughput us':>15}{'ratio':>8}  faster"


@dataclass(frozen=True)
class Row:
    """Predictions in microseconds of one operation; `ratio` is the latency path's time over the other's."""

    tokens: int
    num_sms: int
    op: str
    latency_us: float
    throughput_us: float

    @property
    def ratio(self) -> float:
        return self.latency_us / self.throughput_us

    @property
    def faster(self) -> str:
        return PATHS[self.ratio < 1]


def refuse(args: argparse.Namespace) -> None:
    """UsageError for what the latency path, or its event engine, has not."""
    for flag, given, why in (
        ("--preset", args.preset is not None, "presets are of the throughput path"),
        ("--op", not set(args.op) <= set(OPS), f"the path has {', '.join(OPS)}"),
        ("--nodes", args.nodes not in (None, 1), "the path is for one NVLink domain; give 1"),
        ("--dtype", args.dtype != "bf16", "rows are bf16"),
        ("--routing", routing.parse_routing(args.routing).kind != "uniform", "routing is uniform"),
        ("--imbalance", args.imbalance is not None, "routing is uniform"),
        ("--no-permute", not args.permute, "the path is one of the permuted verbs"),
        ("--plot", args.plot is not None, "has no picture; take --json"),
        ("--num-sms", 0 in args.num_sms, "says what an operation takes on so many SMs; give --num-sms N[,N..]"),
    ):
        require(not given, f"{flag} with --path latency: {why}")
    require(min(token_sweep(args)) > 0, "--tokens with --path latency: must be at least 1")


def run(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Prints the table and the crossover of each number of SMs; returns the worlds of `--json`. ValueError for what the
    engine refuses."""
    cluster = clusters.get(args.cluster or "h100_8x400g")
    ranks = cluster.ranks_per_node if args.ranks_per_node is None else args.ranks_per_node
    if ranks > cluster.ranks_per_node:
        raise ValueError(f"--ranks-per-node {ranks}: {cluster.name} has NVLink domains of {cluster.ranks_per_node}")
    rows: list[Row] = []
    for num_sms in args.num_sms:
        for tokens in token_sweep(args):
            shape = Shape(ranks, ranks, tokens, args.hidden, args.topk, args.experts)
            if not rows:
                _print_header(cluster, shape)
            by_lines = latency_events.measure(shape, cluster, num_sms=num_sms, seed=args.seed)
            other = events.measure(shape, cluster, num_sms=num_sms)
            both = {
                "dispatch": (by_lines.dispatch_us, other.time_us["dispatch"]),
                "combine": (by_lines.combine_us, other.time_us["combine"]),
            }
            both["pair"] = (sum(us for us, _ in both.values()), sum(us for _, us in both.values()))
            for op in args.op:
                rows.append(Row(tokens, num_sms, op, *both[op]))
                print(_line(rows[-1]), flush=True)
    crossovers = [_crossover(rows, op, num_sms) for num_sms in args.num_sms for op in args.op]
    for found in crossovers:
        print(f"# {found['op']}, {found['num_sms']} SMs: {found['said']}")
    shape = Shape(ranks, ranks, rows[0].tokens, args.hidden, args.topk, args.experts)
    return [
        {
            "cluster": cluster.name,
            "path": "latency",
            "engine": "events",
            "shape": {name: value for name, value in asdict(shape).items() if name != "tokens"},
            "rows": [asdict(row) | {"ratio": row.ratio, "faster": row.faster} for row in rows],
            "crossovers": crossovers,
        }
    ]


def _print_header(cluster: clusters.Cluster, shape: Shape) -> None:
    print("# SIMULATED: predictions of the event engine, not measurements; trips to memory are assumed, +-30 %")
    print(
        f"# cluster {cluster.name}: {cluster.summary}; EP {shape.ranks}  hidden {shape.hidden}  topk "
        f"{shape.topk}/{shape.experts}  bf16  routing uniform; both paths without what a launch takes"
    )
    print("# the throughput path has half as many SMs again beside these, for local work, if there are")
    print(_HEADER)


def _line(row: Row) -> str:
    return (
        f"{row.tokens:>8}{row.num_sms:>5}{row.op:>10}{row.latency_us:>11.1f}{row.throughput_us:>15.1f}"
        f"{row.ratio:>8.2f}  {row.faster}"
    )


def _crossover(rows: list[Row], op: str, num_sms: int) -> dict[str, Any]:
    """Up to how many tokens of the sweep, from the smallest on, lines are faster."""
    mine = sorted((row for row in rows if (row.op, row.num_sms) == (op, num_sms)), key=lambda row: row.tokens)
    lost = next((row.tokens for row in mine if row.faster != "latency"), None)
    won = max((row.tokens for row in mine if lost is None or row.tokens < lost), default=None)
    if won is None:
        said = f"the throughput path is faster from {mine[0].tokens} tokens a rank, the fewest of this sweep"
    elif lost is None:
        said = f"lines are faster up to {won} tokens a rank, the most of this sweep: latency_tokens={won} or more"
    else:
        said = f"lines are faster up to {won} tokens a rank and not at {lost}: latency_tokens={won}"
    return {"op": op, "num_sms": num_sms, "latency_tokens": won, "throughput_from": lost, "said": said}
