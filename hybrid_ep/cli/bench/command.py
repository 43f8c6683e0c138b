"""`hybrid-ep bench`: the two roles of the process, launcher or rank, or a prediction instead of either.

The launcher validates everything it can before it starts a rank, so bad usage costs no second and
prints one sentence.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from hybrid_ep import env, tuning
from hybrid_ep.cli import EXIT_OK, EXIT_WRONG, UsageError, launch, outputs
from hybrid_ep.cli.bench import flags, heap, presets
from hybrid_ep.cli.bench.config import Config, check_environment, make_config, refuse_plot_of_a_point, require
from hybrid_ep.cli.progress import say

if TYPE_CHECKING:
    from hybrid_ep.cli.bench.implementations import Implementation
    from hybrid_ep.cli.bench.plots import Point
    from hybrid_ep.cli.bench.report import Row
    from hybrid_ep.cli.bench.session import CaseResult

add_arguments = flags.add_arguments


def run(args: argparse.Namespace, argv: Sequence[str]) -> int:
    """Predict, launch the ranks, or be one. Returns 0, 1 (a wrong value), 2 (bad usage) or 3 (failure, deadline)."""
    outputs.check(args)
    if args.backend == "sim":
        from hybrid_ep.cli.bench import simulated

        return simulated.run(args)
    flags.refuse_simulated(args)
    require(args.path == "throughput" or not args.impl, f"--path {args.path} with --impl: --impl says what is "
            "measured; give one of them, hybrid_ep-latency is the path's name there")  # fmt: skip
    presets.apply_to_ranks(args)
    refuse_plot_of_a_point(args)
    check_environment(args.backend, with_tuning=True)
    if launch.is_rank():
        return _run_rank(args)
    ranks = flags.DEFAULT_RANKS if args.ranks is None else args.ranks
    config = make_config(args, num_ranks=ranks)
    say("loading torch, to see what can run here")
    _refuse_unavailable_base(config, _choose(args)[0])
    _require_device(config)
    _require_tuning(config, _choose(args))
    return launch.run_ranks(argv, ranks, args.timeout, args.threads)


def _require_device(config: Config) -> None:
    """UsageError when the CUDA backend has nothing to run on, before any rank starts."""
    if config.backend == "cuda":
        from hybrid_ep.runtime import devices

        try:
            devices.current()
        except ValueError as error:
            raise UsageError(f"--backend cuda: {error}; use --backend host or sim") from None


def _require_tuning(config: Config, kinds: list[type[Implementation]]) -> None:
    """UsageError where the file of HYBRID_EP_TUNING has nothing for this device and a shape of the sweep: our
    buffers would refuse it in every rank."""
    file = env.get("HYBRID_EP_TUNING")
    if not file or not any(kind.name.partition("-")[0] == "hybrid_ep" for kind in kinds):
        return
    import torch

    device = torch.device("cuda" if config.backend == "cuda" else "cpu")
    key = tuning.Key(config.num_ranks, config.num_local_ranks, config.hidden, config.num_experts)
    try:
        table = tuning.load(file, tuning.device_name(device))
        for tokens in config.tokens:
            table.find(key, max(tokens, 1))
    except ValueError as error:
        raise UsageError(f"HYBRID_EP_TUNING: {error}") from None


def _choose(args: argparse.Namespace) -> list[type[Implementation]]:
    """The implementations that the flags name, base first."""
    from hybrid_ep.cli.bench.plugins import choose

    both = ("hybrid_ep", "hybrid_ep-latency") if args.path == "latency" and not args.peers else None
    return choose(args.impl or both, args.peers, args.peer)


def _run_rank(args: argparse.Namespace) -> int:
    import torch

    from hybrid_ep.cli.bench import environment, report, session
    from hybrid_ep.cli.bench.world import dist, joined

    launch.explain_on_deadline()
    heap_mode = heap.prepare(args.heap)
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    with joined(args.backend, args.timeout) as world:
        require(
            args.preset is None or world.size == args.ranks,
            f"--preset {args.preset}: is a world of {args.ranks} ranks, and the launcher started {world.size}",
        )
        config = make_config(args, num_ranks=world.size)
        kinds = _choose(args)
        _refuse_unavailable_base(config, kinds[0])
        _require_tuning(config, kinds)
        wires = {kind.name: kind.wire for kind in kinds}
        show = _shower(world.rank, args.json, args.wide)
        described = environment.describe() | {"heap": heap_mode, "device": environment.device_name(world.device)}
        for line in report.header_lines(config, described, list(wires), args.wide):
            show(line, flush=True)
        results, rows = [], []
        sweep = [(tokens, num_sms) for tokens in config.tokens for num_sms in config.num_sms]
        for number, (tokens, num_sms) in enumerate(sweep, 1):
            place = f"{number} of {len(sweep)}: {tokens} tokens"
            result = session.run_case(config, world, kinds, tokens, num_sms, place)
            results.append(result)
            case_rows = report.build_rows(config, result, wires)
            rows += case_rows
            _show_case(report, config, result, case_rows, args, show)
        peak = world.reduce(environment.peak_rss_bytes(), dist.ReduceOp.MAX)
        for line in report.footer_lines(config, results, rows, peak if args.memory else None):
            show(line, flush=True)
        if args.plot and world.rank == 0:
            from hybrid_ep.cli.bench import plots

            workers = "blocks" if world.device.type == "cpu" else "SMs"
            points = [plot_point(row) for row in rows]
            for line in plots.draw(points, Path(args.plot), _title(config, described), workers):
                show(line, flush=True)
        if args.json and world.rank == 0:
            extra = {"peak_rss_bytes": peak, "argv": sys.argv[1:]}
            outputs.write_json(args.json, report.to_json(config, described, results, wires, **extra))
        return EXIT_WRONG if any(result.failed for result in results) else EXIT_OK


def plot_point(row: Row) -> Point:
    """A row of the table as a point of the plots."""
    from hybrid_ep.cli.bench.plots import Point

    return Point(row.tokens, row.num_sms, row.op, row.implementation, row.time_us, row.p10_us, row.p90_us, row.busbw)


def _title(config: Config, described: dict) -> str:
    nodes = config.num_ranks // config.num_local_ranks
    return (
        f"EP {config.num_ranks} ({nodes} x {config.num_local_ranks}), hidden {config.hidden}, top-{config.topk} of "
        f"{config.num_experts}, {config.dtype}; {described['device']}, measured {described['date'][:10]}"
    )


def _show_case(
    report: ModuleType,
    config: Config,
    result: CaseResult,
    rows: list[Row],
    args: argparse.Namespace,
    show: Callable[..., None],
) -> None:
    for row in rows:
        show(report.row_line(row, args.wide), flush=True)
    if args.per_iteration:
        for line in report.iteration_lines(config, result):
            show(line, flush=True)
    for line in report.limit_lines(config, result, rows):
        show(line, flush=True)


def _refuse_unavailable_base(config: Config, base: type[Implementation]) -> None:
    """All ratios stand on the base, so a base that cannot run ends the run instead of being skipped."""
    from hybrid_ep.cli.bench.implementations import Setting

    setting = Setting(config.num_ranks, max(config.tokens), config.topk, config.row_bytes, config.permute,
                      config.dtype, config.backend, config.num_ranks // config.num_local_ranks)  # fmt: skip
    reason = base.unavailable(setting)
    require(reason is None, f"{base.name} cannot run here: {reason}")


def _shower(rank: int, to_json: str | None, wide: bool) -> Callable[..., None]:
    """print of rank 0, fitted to the columns, on stderr where the JSON has stdout; other ranks print nothing."""
    if rank:
        return lambda *_, **__: None
    from hybrid_ep.cli.bench.report import fitted

    def show(line: str, **options: Any) -> None:
        print(fitted(line, wide), file=sys.stderr if to_json == outputs.STDOUT else sys.stdout, **options)

    return show
