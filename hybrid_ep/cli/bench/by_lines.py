"""`--backend sim --path latency`: operations by lines beside the same ones by the throughput path, and from how many
tokens on the latter is faster. Both are times of the event engine, without what a launch takes."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from typing import Any

from hybrid_ep.cli.bench.config import require, token_sweep
from hybrid_ep.cli.bench.routing_spec import parse_routing
from hybrid_ep.cli.outputs import narrowed
from hybrid_ep.hardware import clusters
from hybrid_ep.perf import crossover
from hybrid_ep.perf.crossover import OPS, Row
from hybrid_ep.perf.shape import Shape

HEADER = f"#{'tokens':>7}{'sms':>9}{'op':>10}{'lines us':>11}{'throughput us':>15}{'ratio':>8}  faster"


def refuse(args: argparse.Namespace) -> None:
    """UsageError for what the latency path, or its event engine, has not."""
    for flag, given, why in (
        ("--preset", args.preset is not None, "presets are of the throughput path"),
        ("--op", not set(args.op) <= set(OPS), f"the path has {', '.join(OPS)}"),
        ("--nodes", args.nodes is not None and args.nodes < 1, "must be at least 1"),
        ("--dtype", args.dtype != "bf16", "rows are bf16"),
        ("--routing", parse_routing(args.routing).kind != "uniform", "routing is uniform"),
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
    local = cluster.ranks_per_node if args.ranks_per_node is None else args.ranks_per_node
    if local > cluster.ranks_per_node:
        raise ValueError(f"--ranks-per-node {local}: {cluster.name} has NVLink domains of {cluster.ranks_per_node}")
    by_sms: dict[int, list[Row]] = {num_sms: [] for num_sms in args.num_sms}
    ranks = local * (1 if args.nodes is None else args.nodes)
    fewest = Shape(ranks, local, min(token_sweep(args)), args.hidden, args.topk, args.experts)
    _print_header(cluster, fewest)
    for num_sms in args.num_sms:
        for tokens in token_sweep(args):
            shape = fewest.with_(tokens=tokens)
            predicted = crossover.predict(shape, cluster, dispatch_sms=num_sms, combine_sms=num_sms, seed=args.seed)
            for op in args.op:
                by_sms[num_sms].append(predicted[op])
                print(line(predicted[op], str(num_sms)), flush=True)
    crossovers = {num_sms: [crossover.find(rows, op) for op in args.op] for num_sms, rows in by_sms.items()}
    for num_sms, of_ops in crossovers.items():
        for found in of_ops:
            print(f"# {num_sms} SMs: {found.said}")
    return [
        {
            "cluster": cluster.name,
            "path": "latency",
            "engine": "events",
            "shape": {name: value for name, value in asdict(shape).items() if name != "tokens"},
            "rows": [{"num_sms": n, **row.to_json()} for n, rows in by_sms.items() for row in rows],
            "crossovers": [{"num_sms": n, **found.to_json()} for n, of_ops in crossovers.items() for found in of_ops],
        }
    ]


def _print_header(cluster: clusters.Cluster, shape: Shape) -> None:
    print("# SIMULATED: predictions of the event engine, not measurements; trips to memory are assumed, +-30 %")
    said = (
        f"# cluster {cluster.name}: {cluster.summary}; EP {shape.ranks} ({shape.nodes} x {shape.ranks_per_node})  "
        f"hidden {shape.hidden}  topk {shape.topk}/{shape.experts}  bf16  routing uniform; "
        "both paths without what a launch takes"
    )
    print(narrowed(said))
    print("# beside these an operation has 1.5 times as many SMs for local work, if there are; lines go over all alike")
    print(HEADER)


def line(row: Row, sms: str) -> str:
    """Below HEADER. sms: those of the operation, of a pair's two perhaps."""
    return (
        f"{row.tokens:>8}{sms:>9}{row.op:>10}{row.latency_us:>11.1f}{row.throughput_us:>15.1f}"
        f"{row.ratio:>8.2f}  {row.faster}"
    )
