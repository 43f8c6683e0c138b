"""`hybrid-ep tune`: flags and their validation; the launcher, a rank, or a prediction."""

from __future__ import annotations

import argparse
import datetime
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hybrid_ep import tuning
from hybrid_ep.cli import EXIT_OK, EXIT_WRONG, UsageError, launch, names, outputs
from hybrid_ep.cli.arguments import in_flags
from hybrid_ep.cli.bench.config import BACKENDS, check_environment, make_config
from hybrid_ep.cli.bench.flags import DTYPES, int_list, refuse_simulated
from hybrid_ep.cli.parser import Parser, seed
from hybrid_ep.cli.simulate.request import ARGUMENTS
from hybrid_ep.cli.tune import report
from hybrid_ep.hardware import clusters
from hybrid_ep.perf.shape import DTYPES as SIM_DTYPES
from hybrid_ep.perf.shape import Shape

if TYPE_CHECKING:
    from hybrid_ep.cli.tune.paths import Crossing

_HOST_SMS, _GPU_SMS = (1, 2, 4, 8), (2, 4, 8, 12, 16, 24, 32, 48, 64)
_CHUNKS = (8, 16, 32, 64, 128)
_RANKS = 4
_DEFAULTS = {
    "host": {"tokens": (1024,), "hidden": 2048, "experts": 64},
    "cuda": {"tokens": (4096,), "hidden": 7168, "experts": 256},
    "sim": {"tokens": (4096,), "hidden": 7168, "experts": 256},
}


def add_arguments(parser: Parser) -> None:
    parser.renamed = {"--chunks": "--chunk"}
    where = parser.add_argument_group("where")
    where.add_argument("--backend", choices=BACKENDS, default="host", help="host tunes blocks, sim a cluster elsewhere")
    where.add_argument("--ranks", type=int, help=f"host, cuda: processes to launch, {_RANKS} if not given")
    where.add_argument("--ranks-per-node", type=int, help="ranks of one NVLink domain, all if not given")
    names.add_cluster(where.add_argument, "sim: GPUs and links, h100_8x400g if not given")
    where.add_argument("--nodes", type=int, help="sim: NVLink domains of the EP group, 1 if not given")
    what = parser.add_argument_group("what for")
    what.add_argument("--tokens", type=int_list, help="of each rank, a list; 4096 if not given, of host 1024")
    what.add_argument("--hidden", type=int, help="elements of a row; 7168 if not given, of host 2048")
    what.add_argument("--topk", type=int, default=8, help="experts of a token")
    what.add_argument("--experts", type=int, help="of the whole group; 256 if not given, of host 64")
    what.add_argument("--dtype", choices=DTYPES, default="bf16", help="of dispatched rows")
    what.add_argument("--seed", type=seed, default=1, help="of rows and routing")
    how = parser.add_argument_group("how")
    how.add_argument("--num-sms", type=int_list, help=f"to try: {_list(_GPU_SMS)} if not given, of host "
                     f"{_list(_HOST_SMS)}")  # fmt: skip
    how.add_argument("--chunk", type=int_list, default=_list(_CHUNKS), help="rows of a rail message to try, a list")
    how.add_argument("--latency-tokens", type=int_list, help="compare the latency path with the other one at so many "
                     "tokens of each rank, a list; path='auto' goes by what is found")  # fmt: skip
    how.add_argument("-w", "--warmup", type=int, default=2, help="iterations before timing")
    how.add_argument("-n", "--iterations", type=int, default=15, help="timed iterations")
    how.add_argument("-T", "--timeout", metavar="SECONDS", type=float, default=600.0, help="for the whole run")
    how.add_argument("-o", "--out", metavar="FILE", help="write the settings, or add them to a file that is there")


def _list(numbers: tuple[int, ...]) -> str:
    return ",".join(map(str, numbers))


def run(args: argparse.Namespace, argv: Sequence[str]) -> int:
    """Returns 0, 1 (a setting changed a result), 2 (bad usage) or 3 (failure, deadline)."""
    outputs.check_file("-o", args.out)
    if args.out and Path(args.out).exists():
        report.write_check(args.out)
    for name, value in _DEFAULTS[args.backend].items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    args.num_sms = args.num_sms or (_HOST_SMS if args.backend == "host" else _GPU_SMS)
    given = (
        ("--tokens", args.tokens),
        ("--num-sms", args.num_sms),
        ("--chunk", args.chunk),
        ("--latency-tokens", args.latency_tokens or ()),
    )
    for flag, values in given:
        if not all(v >= 1 for v in values):
            raise UsageError(f"{flag} {_list(values)}: must be at least 1, every one")
    if args.latency_tokens:
        args.latency_tokens = tuple(sorted(set(args.latency_tokens)))
    if args.backend == "sim":
        return _predict(args)
    refuse_simulated(args)
    check_environment(args.backend)
    if launch.is_rank():
        return _run_rank(args)
    ranks = _RANKS if args.ranks is None else args.ranks
    _checked(args, ranks)
    if args.backend == "cuda":
        from hybrid_ep.runtime import devices

        try:
            devices.current()
        except ValueError as error:
            raise UsageError(f"--backend cuda: {error}; use --backend host or sim") from None
    return launch.run_ranks(argv, ranks, args.timeout)


def _checked(args: argparse.Namespace, ranks: int) -> tuning.Key:
    """The bench's rules for the same flags."""
    rest = {
        "op": (),
        "routing": "uniform",
        "imbalance": None,
        "ragged": "none",
        "permute": True,
        "route_as": "topk",
        "chain": 0,
        "cuda_graph": False,
        "check": 1,
        "average": 3,
        "threads": None,
    }
    found = make_config(argparse.Namespace(**(vars(args) | rest)), ranks)
    return tuning.Key(found.num_ranks, found.num_local_ranks, found.hidden, found.num_experts)


def _predict(args: argparse.Namespace) -> int:
    from hybrid_ep.cli.tune import paths, predicted

    if args.ranks is not None:
        raise UsageError(f"--ranks {args.ranks}: --backend sim takes --nodes and --ranks-per-node")
    if args.dtype not in SIM_DTYPES:
        raise UsageError(f"--dtype {args.dtype} with --backend sim: use one of {', '.join(SIM_DTYPES)}")
    if args.latency_tokens and args.dtype != "bf16":
        raise UsageError(
            f"--dtype {args.dtype} with --backend sim --latency-tokens {_list(args.latency_tokens)}: lines are "
            "predicted with bf16 rows alone; give --dtype bf16, or leave --latency-tokens out"
        )
    cluster = clusters.get(args.cluster or "h100_8x400g")
    try:
        local = cluster.ranks_per_node if args.ranks_per_node is None else args.ranks_per_node
        nodes = 1 if args.nodes is None else args.nodes
        grids = [
            predicted.grid(
                Shape(nodes * local, local, tokens, args.hidden, args.topk, args.experts),
                cluster,
                args.dtype,
                args.num_sms,
                args.chunk,
            )
            for tokens in args.tokens
        ]
    except ValueError as error:
        raise UsageError(in_flags(str(error), ARGUMENTS)) from None
    title = (
        f"{cluster.name}: {cluster.summary}  EP {nodes * local} ({nodes} x {local})  hidden {args.hidden}  topk "
        f"{args.topk}/{args.experts}  {args.dtype}"
    )
    for line in report.header_lines(title, simulated=True):
        print(outputs.narrowed(line))
    for grid in grids:
        for line in report.grid_lines(grid):
            print(outputs.narrowed(line))
    crossing = None
    if args.latency_tokens:
        few = min(grids, key=lambda grid: grid.tokens).settings
        shape = Shape(nodes * local, local, args.tokens[0], args.hidden, args.topk, args.experts)
        try:
            crossing = paths.predicted(shape, cluster, args.latency_tokens, few, args.seed)
        except ValueError as error:
            raise UsageError(f"--latency-tokens {_list(args.latency_tokens)}: {error}") from None
        for line in crossing.lines():
            print(outputs.narrowed(line))
    date = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    _finish(args, grids, crossing, {"source": "simulated", "cluster": cluster.name, "date": date})
    return EXIT_OK


def _run_rank(args: argparse.Namespace) -> int:
    from hybrid_ep.cli.bench import environment
    from hybrid_ep.cli.bench.world import joined
    from hybrid_ep.cli.tune.measured import Tuner
    from hybrid_ep.cli.tune.paths import PathTimer

    launch.explain_on_deadline()
    with joined(args.backend, args.timeout) as world:
        key = _checked(args, world.size)
        nodes = key.num_ranks // key.num_local_ranks
        described = {"source": args.backend, **environment.describe()}
        tuner = Tuner(world, key, args.topk, args.dtype, max(args.tokens), args.backend)
        title = (
            f"{tuner.device}  EP {key.num_ranks} ({nodes} x {key.num_local_ranks})  hidden {key.hidden}  topk "
            f"{args.topk}/{key.num_experts}  {args.dtype}  load {described['load_average'][0]:.1f}"
        )

        def show(line: str, **options: Any) -> None:
            if world.rank == 0:
                print(outputs.narrowed(line), **options)

        for line in report.header_lines(title, simulated=False):
            show(line, flush=True)
        grids, wrong, crossing = [], 0, None
        try:
            for tokens in args.tokens:
                grid, differ = tuner.grid(tokens, args.num_sms, args.chunk, args.warmup, args.iterations, args.seed)
                grids.append(grid)
                wrong += differ
                for line in report.grid_lines(grid):
                    show(line, flush=True)
        finally:
            tuner.close()
        if args.latency_tokens:
            few = min(grids, key=lambda grid: grid.tokens).settings
            timer = PathTimer(world, key, args.topk, args.dtype, max(args.latency_tokens), args.backend, few)
            try:
                crossing, differ = timer.crossing(args.latency_tokens, args.warmup, args.iterations, args.seed)
            finally:
                timer.close()
            wrong += differ
            for line in crossing.lines():
                show(line, flush=True)
        show(f"# Elements that a setting changed : {wrong} {'FAILED' if wrong else 'OK'}", flush=True)
        if wrong:
            return EXIT_WRONG
        if world.rank == 0:
            _finish(args, grids, crossing, described)
        return EXIT_OK


def _finish(args: argparse.Namespace, grids: list, crossing: Crossing | None, environment: dict) -> None:
    if args.out:
        entries = report.write(args.out, grids, crossing, environment)
        print(
            f"# written: {args.out}\n"
            f"# {entries} {'entry' if entries == 1 else 'entries'} for HYBRID_EP_TUNING or --hybrid-ep-tuning",
            flush=True,
        )
    else:
        print("# not written anywhere: -o FILE", flush=True)
