"""`hybrid-ep bench`: flags, their validation, and the two roles of the process: launcher or rank.

The launcher validates everything it can before it starts a rank, so bad usage costs no second and
prints one sentence.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from hybrid_ep.cli import EXIT_OK, EXIT_WRONG, UsageError, launch
from hybrid_ep.cli.bench import checks, heap, routing
from hybrid_ep.cli.bench.session import OPS, Config

_DEFAULT_OPS = ("dispatch", "combine", "pair")
_STEP_LIMIT = 64  # points of a sweep; more is a typing error


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags, named after nccl-tests where it has a name."""
    _add_shape_flags(parser.add_argument_group("what is exchanged"))
    _add_run_flags(parser.add_argument_group("how it is measured"))


def _add_shape_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument("-b", "--min-tokens", type=int, default=1024, help="smallest number of tokens a rank")
    group.add_argument("-e", "--max-tokens", type=int, default=4096, help="largest number of tokens a rank")
    group.add_argument("-f", "--factor", type=int, default=4, help="from one number of tokens to the next")
    group.add_argument("--tokens", type=_int_list, help="explicit list T[,T..] in place of -b -e -f")
    group.add_argument("--hidden", type=int, default=2048, help="elements of a row")
    group.add_argument("--topk", type=int, default=8, help="experts of a token")
    group.add_argument("--experts", type=int, default=64, help="experts of the whole group")
    group.add_argument("--dtype", choices=tuple(checks.DTYPES), default="bf16", help="of rows, both ways")
    group.add_argument("--routing", default="uniform", help="uniform, zipf:A, one-hot or file:PATH")
    group.add_argument("--ragged", choices=routing.RAGGED, default="none", help="uneven tokens over ranks")
    group.add_argument(
        "--permute", action=argparse.BooleanOptionalAction, default=True, help="expert-major or received rows"
    )
    group.add_argument("--route-as", choices=("map", "topk"), default="map", help="the form of routing")
    group.add_argument("--ranks", type=int, default=4, help="processes to launch (ignored where RANK is set)")
    group.add_argument("--ranks-per-node", type=int, help="ranks of one NVLink domain  (default: all)")
    group.add_argument("--seed", type=int, default=1, help="of rows and routing")


def _add_run_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--op", type=_op_list, default="all", help="dispatch, combine, pair, train, or all = "
                       "the first three; a list is fine. train: the pair forward and backward")  # fmt: skip
    group.add_argument("--num-sms", type=_int_list, default="0", help="list of SMs (host: blocks); 0 = auto")
    group.add_argument("--peers", action="store_true", help="measure every known peer beside hybrid_ep")
    group.add_argument("--impl", type=_name_list, help="explicit list; the first is the base of ratios")
    group.add_argument("--peer", action="append", default=[], metavar="SPEC",
                       help="plug-in FILE.py or module with a list PEERS; may be repeated")  # fmt: skip
    group.add_argument("-w", "--warmup", type=int, default=2, help="iterations before timing")
    group.add_argument("-n", "--iterations", type=int, default=10, help="timed iterations")
    group.add_argument("-c", "--check", type=int, choices=(0, 1), default=1, help="check all values exactly")
    group.add_argument("-a", "--average", type=int, choices=(0, 1, 2, 3), default=3,
                       help="time over ranks: 0 rank 0, 1 average, 2 min, 3 max")  # fmt: skip
    group.add_argument("-I", "--per-iteration", action="store_true", help="print every sample")
    group.add_argument("-J", "--json", metavar="FILE", help="write everything, raw samples included")
    group.add_argument("-T", "--timeout", type=float, default=600.0, help="seconds for the whole run")
    group.add_argument("-M", "--memory", action="store_true", help="report peak resident memory")
    group.add_argument("--heap", choices=heap.MODES, default="default", help="warm: keep freed memory in the process")
    group.add_argument("--threads", type=int, help="torch threads a rank  (default: cores / ranks)")


def run(args: argparse.Namespace, argv: Sequence[str]) -> int:
    """Launch the ranks, or be one. Returns 0, 1 (a wrong value), 2 (bad usage) or 3 (failure, deadline)."""
    if launch.is_rank():
        return _run_rank(args)
    make_config(args, num_ranks=args.ranks)
    _choose(args)
    if args.json and not Path(args.json).resolve().parent.is_dir():
        raise UsageError(f"-J {args.json}: no such folder; create it first")
    threads = args.threads or max(1, len(os.sched_getaffinity(0)) // args.ranks)
    return launch.run_ranks(argv, args.ranks, args.timeout, threads)


def make_config(args: argparse.Namespace, num_ranks: int) -> Config:
    """Validated flags as plain data; UsageError names the flag, its value and what would do."""
    ranks_per_node = num_ranks if args.ranks_per_node is None else args.ranks_per_node
    _require(num_ranks >= 1, f"--ranks {num_ranks}: must be at least 1")
    _require(
        ranks_per_node >= 1 and num_ranks % ranks_per_node == 0,
        f"--ranks-per-node {ranks_per_node}: must divide the number of ranks, {num_ranks}",
    )
    _require(
        args.experts >= num_ranks and args.experts % num_ranks == 0,
        f"--experts {args.experts}: must be a multiple of the number of ranks, {num_ranks}",
    )
    _require(1 <= args.topk <= args.experts, f"--topk {args.topk}: must be in 1 .. --experts, {args.experts}")
    row_bytes = args.hidden * checks.DTYPES[args.dtype].itemsize
    _require(
        args.hidden >= 1 and row_bytes % 16 == 0,
        f"--hidden {args.hidden}: a row of {row_bytes} bytes; must be a positive multiple of 16 bytes",
    )
    for flag, value, least in (("-n", args.iterations, 1), ("-w", args.warmup, 0), ("-T", args.timeout, 1)):
        _require(value >= least, f"{flag} {value}: must be at least {least}")
    _require(all(sms >= 0 for sms in args.num_sms), "--num-sms: must be 0 (auto) or positive")
    checks.amplitude(args.dtype, args.topk)
    return Config(
        tokens=_token_sweep(args),
        num_sms=args.num_sms,
        ops=args.op,
        hidden=args.hidden,
        topk=args.topk,
        num_experts=args.experts,
        dtype=args.dtype,
        routing=routing.parse_routing(args.routing),
        ragged=args.ragged,
        permute=args.permute,
        route_as=args.route_as,
        num_ranks=num_ranks,
        num_local_ranks=ranks_per_node,
        warmup=args.warmup,
        iterations=args.iterations,
        check=bool(args.check),
        seed=args.seed,
        reduction=args.average,
        timeout_s=args.timeout,
    )


def _token_sweep(args: argparse.Namespace) -> tuple[int, ...]:
    if args.tokens is not None:
        _require(all(tokens >= 0 for tokens in args.tokens), "--tokens: must not be negative")
        return args.tokens
    _require(
        1 <= args.min_tokens <= args.max_tokens,
        f"-b {args.min_tokens} -e {args.max_tokens}: need 1 <= -b <= -e",
    )
    _require(args.factor >= 2, f"-f {args.factor}: must be at least 2; for one size use --tokens")
    sweep = [args.min_tokens]
    while sweep[-1] * args.factor <= args.max_tokens and len(sweep) < _STEP_LIMIT:
        sweep.append(sweep[-1] * args.factor)
    return tuple(sweep)


def _choose(args: argparse.Namespace) -> list[type]:
    """The implementations that the flags name, base first."""
    from hybrid_ep.cli.bench.implementations import BUILT_IN, find_plugins, load_plugin

    known = {kind.name: kind for kind in BUILT_IN}
    explicit = [kind for spec in args.peer for kind in load_plugin(spec)]
    found = [kind for spec in find_plugins() for kind in load_plugin(spec)] if args.peers or args.impl else []
    for kind in [*found, *explicit]:
        known[kind.name] = kind
    if args.impl:
        unknown = [name for name in args.impl if name not in known]
        _require(not unknown, f"--impl {','.join(unknown)}: not known; known are {', '.join(known)}")
        return [known[name] for name in dict.fromkeys([*args.impl, *(kind.name for kind in explicit)])]
    if args.peers:
        return list(known.values())
    return [known["hybrid_ep"], *explicit]


def _run_rank(args: argparse.Namespace) -> int:
    import torch
    import torch.distributed as dist

    from hybrid_ep.cli.bench import environment, report, session

    launch.explain_on_deadline()
    heap_mode = heap.prepare(args.heap)
    if args.threads:
        torch.set_num_threads(args.threads)
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=args.timeout))
    try:
        group = dist.group.WORLD
        config = make_config(args, num_ranks=group.size())
        kinds = _choose(args)
        _refuse_unavailable_base(config, kinds[0])
        wires = {kind.name: kind.wire for kind in kinds}
        show = print if group.rank() == 0 else _discard
        described = environment.describe() | {"heap": heap_mode}
        for line in report.header_lines(config, described, list(wires)):
            show(line, flush=True)
        results, rows = [], []
        for tokens in config.tokens:
            for num_sms in config.num_sms:
                result = session.run_case(config, group, kinds, tokens, num_sms)
                results.append(result)
                case_rows = report.build_rows(config, result, wires)
                rows += case_rows
                _show_case(report, config, result, case_rows, args.per_iteration, show)
        peak = session.reduce_max(environment.peak_rss_bytes(), group)
        for line in report.footer_lines(config, results, rows, peak if args.memory else None):
            show(line, flush=True)
        if args.json and group.rank() == 0:
            extra = {"peak_rss_bytes": peak, "argv": sys.argv[1:]}
            document = report.to_json(config, described, results, wires, **extra)
            Path(args.json).write_text(json.dumps(document, indent=1) + "\n")
        return EXIT_WRONG if any(result.failed for result in results) else EXIT_OK
    finally:
        dist.destroy_process_group()


def _show_case(report, config, result, rows, per_iteration: bool, show) -> None:
    for row in rows:
        show(report.row_line(row), flush=True)
    if per_iteration:
        for line in report.iteration_lines(config, result):
            show(line, flush=True)
    for line in report.limit_lines(config, result, rows):
        show(line, flush=True)


def _refuse_unavailable_base(config: Config, base: type) -> None:
    """All ratios stand on the base, so a base that cannot run ends the run instead of being skipped."""
    from hybrid_ep.cli.bench.implementations import Setting

    setting = Setting(config.num_ranks, max(config.tokens), config.topk, config.row_bytes, config.permute)
    reason = base.unavailable(setting)
    _require(reason is None, f"{base.name} cannot run here: {reason}")


def _discard(*_: object, **__: object) -> None:
    """print for the ranks that do not print."""


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise UsageError(message)


def _int_list(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of integers such as 1024,4096") from error


def _name_list(text: str) -> tuple[str, ...]:
    return tuple(name for name in text.split(",") if name)


def _op_list(text: str) -> tuple[str, ...]:
    listed = [name for part in text.split(",") for name in (_DEFAULT_OPS if part == "all" else (part,))]
    names = tuple(dict.fromkeys(listed))
    unknown = [name for name in names if name not in OPS]
    if unknown:
        raise argparse.ArgumentTypeError(f"{','.join(unknown)!r}: use {', '.join(OPS)} or all")
    return names
