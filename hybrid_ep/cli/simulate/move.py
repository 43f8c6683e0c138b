"""What should move, tokens or experts' weights: both on the virtual clock, side by side; the trace shows one."""

from __future__ import annotations

import argparse
from typing import Any

from hybrid_ep.cli.parser import one_of
from hybrid_ep.hardware.clusters import Cluster
from hybrid_ep.perf import dwdp, models, trace, weight_events
from hybrid_ep.perf.weight_events import Found, Job

MOVES = ("tokens", "weights", "auto")
_ITERATIONS = 8
# Of errors, as cli.arguments takes them, beside those of an exchange.
ARGUMENTS = {"cv": "--length-cv ", "shortest": "--shortest ", "slices": "--slices "}


def add_flags(group: Any) -> None:
    group.add_argument("--move", choices=MOVES, help="compare moving tokens with moving experts' weights (forward); "
                       "the trace is of the one named, auto: of the faster")  # fmt: skip
    group.add_argument("--model", default="deepseek_v3", **one_of(models.MODELS, "of --move: whose layers"))
    group.add_argument("--sequences", type=int, default=1, help="of --move: sequences of a micro-batch, alike")
    group.add_argument("--length-cv", type=float, default=0.0, help="of --move: ranks' tokens vary by that much")
    group.add_argument("--shortest", type=float, default=1.0,
                       help="of --move: or are drawn from that share of --tokens to --tokens")  # fmt: skip
    group.add_argument("--weight-group", type=int, help="of --move: ranks that hold all experts among them "
                       "(default: all); copies from other groups are there")  # fmt: skip
    group.add_argument("--slices", type=int, default=weight_events.SLICES,
                       help="of --move: of an owner's share of a layer; 1 pulls it whole")  # fmt: skip


def job_of(args: argparse.Namespace, cluster: Cluster) -> Job:
    """ValueError names flag, value and remedy."""
    if args.nodes != 1:
        raise ValueError(f"--nodes {args.nodes}: weights move inside one NVLink domain; give --nodes 1 with --move")
    for flag in ("sequences", "slices"):
        if getattr(args, flag) < 1:
            raise ValueError(f"--{flag} {getattr(args, flag)}: must be at least 1")
    if args.tokens < args.sequences:
        raise ValueError(f"--sequences {args.sequences}: must be at most the {args.tokens} of --tokens")
    ranks = cluster.ranks_per_node if args.ranks_per_node is None else args.ranks_per_node
    if not 2 <= ranks <= cluster.ranks_per_node:
        raise ValueError(
            f"--ranks-per-node {ranks}: must be from 2 to the {cluster.ranks_per_node} of an NVLink domain of "
            f"{cluster.name}"
        )
    model = models.get(args.model)
    if model.experts % ranks:
        fitting = max(n for n in range(2, ranks) if model.experts % n == 0)
        raise ValueError(
            f"--ranks-per-node {ranks}: must divide the {model.experts} experts of {model.name}; give "
            f"--ranks-per-node {fitting}"
        )
    if args.weight_group is not None and (args.weight_group < 2 or ranks % args.weight_group):
        raise ValueError(
            f"--weight-group {args.weight_group}: must be at least 2 and divide the {ranks} of --ranks-per-node"
        )
    tokens = weight_events.lengths(
        args.tokens, ranks, _ITERATIONS, cv=args.length_cv, shortest=args.shortest, seed=args.seed
    )
    return Job(
        model,
        cluster,
        tokens,
        model.moe_layers,
        args.dtype,
        sequence=-(-args.tokens // args.sequences),
        slices=args.slices,
        seed=args.seed,
        rates=dwdp.rates_of(model, cluster, args.dtype),
        group=args.weight_group,
    )


def run(args: argparse.Namespace, cluster: Cluster) -> dict[str, Any]:
    """Prints both and the choice; returns every number."""
    job = job_of(args, cluster)
    found = {"tokens": weight_events.tokens_move(job), "weights": weight_events.weights_move(job)}
    faster = min(found, key=lambda move: found[move].iteration_us)
    print(
        f"{job.model.name} on {job.ranks} ranks of {cluster.name}: {job.layers} MoE layers forward, {args.dtype}\n"
        f"{_ITERATIONS} iterations of {job.tokens.mean():,.0f} tokens a rank ({job.tokens.min():,} to "
        f"{job.tokens.max():,}), sequences of {job.sequence:,}"
        + (f", weights in groups of {job.group} ranks" if job.group else "")
    )
    print(f"{'what moves':12}{'iteration ms':>14}{'compute':>10}{'exchange':>10}{'waits':>10}{'engine blocked':>16}")
    for move, got in found.items():
        parts = (got.iteration_us, got.compute_us, got.exchange_us, got.waited_us, got.blocked_us)
        widths = (14, 10, 10, 10, 16)
        print(f"{move:12}" + "".join(f"{us / 1e3:{width}.1f}" for us, width in zip(parts, widths, strict=True)))
    change = found["weights"].iteration_us / found["tokens"].iteration_us - 1
    print(
        f"moving weights takes {change:+.1%} of the time; a layer's weights alone take {job.prefetch_us / 1e3:.2f} ms"
    )
    shown = faster if args.move == "auto" else args.move
    if args.trace:
        covers = f"{shown} move, all ranks, the first spans of {_ITERATIONS} iterations"
        count = trace.write(args.trace, found[shown].spans, covers)
        print(f"# written: {args.trace}: {count} spans, {covers}; open it in ui.perfetto.dev")
    return {
        "cluster": cluster.name,
        "model": job.model.name,
        "dtype": args.dtype,
        "ranks": job.ranks,
        "weight_group": job.group or job.ranks,
        "tokens": job.tokens.tolist(),
        "prefetch_us": job.prefetch_us,
        "faster": faster,
        "moves": {move: _numbers(got) for move, got in found.items()},
    }


def _numbers(got: Found) -> dict[str, float]:
    return {name: value for name, value in vars(got).items() if name != "spans"}
