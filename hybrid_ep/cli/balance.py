"""`hybrid-ep balance report|plan`: what recorded expert loads say, and a placement made from them."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hybrid_ep.cli import EXIT_OK, UsageError, outputs
from hybrid_ep.cli.parser import Parser

if TYPE_CHECKING:
    import numpy as np

    from hybrid_ep.balance.statistics import LoadStatistics

_ONE_EACH = "one expert a rank is assumed; --ep gives their number"
_OLD_NAMES = {
    "--ep-size": "--ep",
    "--num-experts": "--experts",
    "--num-nodes": "--nodes",
    "--iterations": "--between",
    "--output": "--out",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The two subcommands and their flags."""
    commands = parser.add_subparsers(dest="balance_command", required=True, metavar="report|plan")
    for name, function, text in (
        ("report", add_report_arguments, "imbalance by layer, as a table and a plot"),
        ("plan", add_plan_arguments, "a placement with replicas, as YAML"),
    ):
        command = commands.add_parser(name, help=text, description=text)
        if isinstance(command, Parser):
            command.renamed = _OLD_NAMES
        function(command)


def _add_common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "statistics",
        metavar="STATS",
        help="JSONL of counts, a recipe's run folder, a Megatron routing trace, or a TensorRT-LLM statistics folder",
    )
    parser.add_argument("--between", metavar="A-B", help="only iterations A to B, both included")
    parser.add_argument("--experts", type=int, help="for a routing trace whose last experts got no token")
    outputs.add_json(parser)


def add_report_arguments(parser: argparse.ArgumentParser) -> None:
    _add_common(parser)
    parser.add_argument("--ep", type=int, help="expert parallel size, ranks; without it that of the "
                        "run's config.yaml beside STATS, else one expert a rank, which is said")  # fmt: skip
    parser.add_argument("--plan", metavar="YAML", help="project onto this placement")
    parser.add_argument(
        "--spare-slots",
        type=int,
        default=0,
        help="also show exact balancing with so many a rank; within 1 %% where experts are hot independently, with "
        "1 up to 8 experts a rank, 2 at 16, 4 at 32",
    )
    outputs.add_plot(parser, "imbalance by layer and load by expert")
    parser.add_argument("--per-expert", action="store_true", help="also list every layer's expert counts")
    parser.add_argument(
        "--sources",
        action="store_true",
        help="also who sends to whom: of a recipe's metrics.jsonl, or with --ep of --hybrid-ep-load-stats, of a "
        "trace, or of a file of each rank",
    )
    parser.add_argument(
        "--layout",
        choices=("table", "tensorrt"),
        default="table",
        help="tensorrt: mean, std and imbalance ratio by layer and nothing else, as TensorRT-LLM's report prints them",
    )


def add_plan_arguments(parser: argparse.ArgumentParser) -> None:
    _add_common(parser)
    parser.add_argument("--ep", type=int, required=True, help="expert parallel size, ranks")
    parser.add_argument(
        "--num-slots",
        type=int,
        required=True,
        help="experts and replicas in all; 32 to 256 experts on 8 to 64 ranks, without groups, ended at most 0.06 "
        "above a bound on even splits with synthetic loads up to zipf 3 and sigma 2, 0.15 at sigma 3, 0.2 where a few "
        "experts or groups have nearly all tokens",
    )
    parser.add_argument("--nodes", type=int, default=1, help="nodes, for --num-groups and --current")
    parser.add_argument("--num-groups", type=int, default=0, help="groups of experts that stay on one node")
    parser.add_argument("--current", metavar="YAML", help="placement in force: change as few slots as possible")
    parser.add_argument("--target", type=float, default=0.02, help="with --current: imbalance to reach")
    parser.add_argument("--max-moves", type=int, help="with --current: most slots of a layer that change")
    parser.add_argument(
        "--front", action="store_true", help="with --current: also list changed slots against imbalance, layer by layer"
    )
    parser.add_argument("--layer-updates-per-iter", type=int, default=0, help="written to the file; 0: static")
    parser.add_argument("-o", "--out", required=True, metavar="FILE", help="write the placement here, as YAML")


def run(args: argparse.Namespace, argv: list[str]) -> int:
    """Bad input ends as a usage error: exit code 2 and one line."""
    outputs.check(args, picture_files=True)
    outputs.check_file("-o", getattr(args, "out", None))
    metrics = Path(args.statistics) / "metrics.jsonl"
    if metrics.is_file():  # of a run's folder, which `report scaling` takes too
        args.statistics = str(metrics)
    try:
        with outputs.for_people(args.json):
            document = (run_report if args.balance_command == "report" else run_plan)(args)
    except ValueError as error:
        raise UsageError(str(error)) from None
    outputs.write_json(args.json, document)
    return EXIT_OK


def _load(args: argparse.Namespace) -> LoadStatistics:
    from hybrid_ep.balance import statistics

    loaded = statistics.load(args.statistics, args.experts)
    return loaded.between(*statistics.parse_range(args.between)) if args.between else loaded


def _placement(flag: str, path: str, loaded: LoadStatistics) -> np.ndarray:
    from hybrid_ep.balance import plan_file

    try:
        phy2log, planned = plan_file.load(path)
    except ValueError as error:
        raise ValueError(f"{flag} {error}") from None
    missing = sorted(set(loaded.layers) - set(planned))
    if missing:
        raise ValueError(f"{flag} {path}: has no layer {missing[0]}: it was made from other statistics; plan these")
    placed, experts = phy2log[[planned.index(layer) for layer in loaded.layers]], loaded.counts.shape[2]
    if any(set(row) != set(range(experts)) for row in placed.tolist()):
        raise ValueError(f"{flag} {path}: its experts are not the {experts} of the statistics; plan these")
    return placed


def run_report(args: argparse.Namespace) -> dict[str, Any]:
    """Prints the table and draws; returns what --json writes."""
    from hybrid_ep.balance import report, sources

    loaded = _load(args)
    ranks, assumed = _ranks(args, loaded.counts.shape[2])
    placed = _placement("--plan", args.plan, loaded) if args.plan else None
    if args.ep is not None and placed is not None:
        _check_divides("--ep", args.ep, "the", placed.shape[1], f"slots of --plan {args.plan}")
    elif args.ep is not None:
        _check_divides("--ep", args.ep, "the", loaded.counts.shape[2], "experts")
    rows = report.report(loaded, ranks, placed, args.spare_slots)
    if args.layout == "tensorrt":
        if args.sources or args.plot or args.per_expert or args.spare_slots or args.json:
            raise ValueError("--layout tensorrt has nothing but its table: leave the other output flags out")
        if assumed:
            print(f"hybrid-ep: {outputs.count(ranks, 'rank')}: {assumed}", file=sys.stderr)
        if args.plan:  # the table is TensorRT-LLM's, word for word
            print(f"hybrid-ep: projected onto the placement of {args.plan}", file=sys.stderr)
        print(report.tensorrt_table(rows, ranks))
        return {}
    sent = _sources(args, None if assumed == _ONE_EACH else ranks) if args.sources else None
    floor = report.noise_floor(loaded, ranks)
    _say(
        ", ".join(
            outputs.count(number, thing)
            for number, thing in (
                (len(loaded.iterations), "iteration"),
                (len(loaded.layers), "layer"),
                (loaded.counts.shape[2], "expert"),
                (ranks, "rank"),
            )
        )
        + (f" ({assumed})" if assumed else "")
        + (f", projected onto the placement of {args.plan}" if args.plan else "")
        + "; imbalance is (max - mean) / mean of an iteration, averaged over iterations"
    )
    print(report.table(rows))
    print(f"sampling noise of a perfectly fair static placement: {floor:.3f}")
    if args.per_expert:
        for layer, counts in zip(loaded.layers, loaded.total().tolist(), strict=True):
            _say(f"layer {layer}: {counts}")
    if sent is not None:
        _say(sources.describe(sent, sources.own_ranks(args.statistics, *sent.shape)))
    if args.plot:
        from hybrid_ep.cli import balance_picture, traffic_picture

        outputs.say_written(balance_picture.draw(outputs.picture(args.plot, "balance"), rows, loaded, floor))
        if sent is not None:
            outputs.say_written(traffic_picture.draw(outputs.picture(args.plot, "sources"), sent))
    return {
        "schema": "hybrid_ep.balance-report/1",
        "statistics": args.statistics,
        "plan": args.plan,
        "iterations": list(map(int, loaded.iterations)),
        "experts": int(loaded.counts.shape[2]),
        "ranks": int(ranks),
        "ranks_are": assumed or "--ep",
        "spare_slots": args.spare_slots,
        "noise_floor": float(floor),
        "layers": [
            {**dataclasses.asdict(row), "tokens": tokens}
            for row, tokens in zip(rows, loaded.total().tolist(), strict=True)
        ],
        "average": {name: value for name, value in dataclasses.asdict(report.average(rows)).items() if name != "layer"},
        "sent": None if sent is None else sent.tolist(),
    }


def _say(text: str) -> None:
    """Tables stay as they are."""
    for line in text.splitlines():
        print(line if line.startswith("|") else outputs.narrowed(line))


def _ranks(args: argparse.Namespace, num_experts: int) -> tuple[int, str]:
    """Ranks that experts lie on, and whence the number where --ep does not say it: a recipe's run has it beside its
    metrics."""
    config = Path(args.statistics).parent / "config.yaml"
    if args.ep is not None:
        return args.ep, ""
    if Path(args.statistics).name != "metrics.jsonl" or not config.is_file():
        return num_experts, _ONE_EACH
    try:
        import yaml
    except ImportError:
        raise ValueError(f"{config} says the ranks, and is YAML: pip install pyyaml, or give --ep") from None
    try:
        ranks = yaml.safe_load(config.read_text())["parallel"]["expert_parallel_size"]
    except (yaml.YAMLError, KeyError, TypeError):
        raise ValueError(f"{config}: says no parallel.expert_parallel_size; give --ep") from None
    return ranks, f"parallel.expert_parallel_size of {config}"


def _sources(args: argparse.Namespace, ranks: int | None) -> np.ndarray:
    from hybrid_ep.balance import sources, statistics

    if ranks is None:
        raise ValueError("--sources needs --ep, the ranks that experts lie on: give it")
    between = statistics.parse_range(args.between) if args.between else None
    return sources.load(args.statistics, ranks, args.experts, between)


def _check_divides(flag: str, value: int, *whole: object) -> None:
    """whole: words, a number among them."""
    number = next(word for word in whole if isinstance(word, int))
    if value < 1 or number % value:
        raise ValueError(f"{flag} {value}: must be 1 or more and divide {' '.join(map(str, whole))}")


def _check_sizes(args: argparse.Namespace, experts: int) -> None:
    """What plan_placement requires, in the words of the command line."""
    if args.ep < 1:
        raise ValueError(f"--ep {args.ep}: must be 1 or more")
    _check_divides("--nodes", args.nodes, "--ep", args.ep)
    least, most = -(-experts // args.ep) * args.ep, experts * args.ep
    if args.num_groups:
        _check_divides("--num-groups", args.num_groups, "the", experts, "experts")
        if args.num_groups % args.nodes:
            raise ValueError(f"--num-groups {args.num_groups}: must be a multiple of --nodes {args.nodes}")
        most //= args.nodes
    if args.num_slots % args.ep or not least <= args.num_slots <= most:
        raise ValueError(
            f"--num-slots {args.num_slots}: must be a multiple of --ep {args.ep} from {least} to {most}, which is one "
            f"slot of each of {experts} experts at least, and at most one of each on every rank that may have it"
        )


def run_plan(args: argparse.Namespace) -> dict[str, Any]:
    """Writes the placement and prints what is left; returns what --json writes."""
    from hybrid_ep.balance import bounds, placement_front, plan_file, plan_placement

    loaded = _load(args)
    _check_sizes(args, loaded.counts.shape[2])
    current = _placement("--current", args.current, loaded) if args.current else None
    if current is None and (args.front or args.max_moves is not None):
        raise ValueError("--front and --max-moves need --current, the placement in force")
    if args.layer_updates_per_iter < 0:
        raise ValueError(f"--layer-updates-per-iter is {args.layer_updates_per_iter}: give 0 or more")
    load = loaded.total()
    plan = plan_placement(
        load,
        args.num_slots,
        args.ep,
        args.nodes,
        current,
        num_groups=args.num_groups,
        target=args.target,
        max_moves=args.max_moves,
    )
    plan_file.save(args.out, plan.phy2log, loaded.layers, args.layer_updates_per_iter)
    slots = [bounds.slots(w, args.num_slots) * args.num_slots / w.sum() - 1 if w.any() else 0.0 for w in load]
    summed, left = outputs.count(len(loaded.iterations), "iteration"), plan.imbalance()
    _say(
        f"{args.out}: {len(load)} layers, {args.num_slots} slots on {args.ep} ranks; imbalance by rank of loads summed "
        f"over {summed}: {left.mean():.4f} (max {left.max():.4f}, bound 0); by slot at least "
        f"{max(slots):.3f} in the worst layer" + (f"; slots changed: {int(plan.moved.sum())}" if args.current else "")
    )
    if len(loaded.iterations) > 1:
        print(
            "single iterations are less even than their sum: hybrid-ep balance report --plan prints their mean "
            "imbalance"
        )
    if current is not None:
        reasons = ", ".join(f"{name} {n}" for name, n in sorted(Counter(plan.stopped).items()))
        _say(
            f"layers by why they ended: {reasons}; a fresh plan leaves {plan.fresh.mean():.4f} "
            f"(max {plan.fresh.max():.4f})"
        )
    front = None
    if args.front:
        front = placement_front(load, args.num_slots, args.ep, args.nodes, current, num_groups=args.num_groups)
        for layer, points in zip(loaded.layers, front, strict=True):
            _say(
                f"layer {layer}, slots changed: imbalance  "
                + "  ".join(f"{p.moved}: {p.imbalance:.4f}" for p in points)
            )
    layers: list[dict[str, Any]] = [
        {"layer": layer, "imbalance": float(after), "by_slot_at_least": float(bound), "fresh": float(fresh)}
        for layer, after, bound, fresh in zip(loaded.layers, left, slots, plan.fresh, strict=True)
    ]
    if current is not None:
        for of_layer, moved, why in zip(layers, plan.moved, plan.stopped, strict=True):
            of_layer |= {"moved": int(moved), "stopped": why}
    for of_layer, points in zip(layers, front or (), strict=front is not None):
        of_layer["front"] = [{"moved": int(p.moved), "imbalance": float(p.imbalance)} for p in points]
    return {
        "schema": "hybrid_ep.balance-plan/1",
        "statistics": args.statistics,
        "out": args.out,
        "current": args.current,
        "iterations": list(map(int, loaded.iterations)),
        "ranks": args.ep,
        "nodes": args.nodes,
        "slots": args.num_slots,
        "layers": layers,
    }
