"""`hybrid-ep report scaling`: flags and their validation. Measured and predicted tables are marked as such."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from hybrid_ep.cli import EXIT_OK, UsageError, names, outputs, questions
from hybrid_ep.cli.arguments import in_flags
from hybrid_ep.cli.bench.flags import int_list
from hybrid_ep.cli.report import runs, scaling
from hybrid_ep.cli.simulate import job as job_flags
from hybrid_ep.perf import memory, models, step_time, training

_RUNS = "a table of run folders"
TAKERS: dict[str, tuple[str, ...]] = {
    "--skip": (_RUNS,),
    **dict.fromkeys(("--cluster", "--gpus", *job_flags.FLAGS), ("--simulate",)),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    kinds = parser.add_subparsers(dest="report", required=True, metavar="REPORT")
    scaling_parser = kinds.add_parser("scaling", help="strong and weak scaling: nodes, GPUs, tokens/s, memory")
    add = scaling_parser.add_argument
    add("runs", nargs="*", metavar="RUN", help="folders runs/NAME of finished jobs, one of each size")
    add("--skip", type=int, default=5, help="first steps of a run that do not count")
    add("--simulate", metavar="MODEL", choices=tuple(models.MODELS), help="predict the jobs of this model instead")
    names.add_cluster(add, "of --simulate", "h100_8x400g")
    add("--gpus", type=int_list, default="64,128,256,512", help="of --simulate: a list of job sizes")
    job_flags.add_flags(add, "--simulate")
    add("--mode", choices=(*scaling.MODES, "both"), default="both", help="which table")
    outputs.add_json(scaling_parser)
    outputs.add_plot(scaling_parser, "tokens/s over GPUs")


def run(args: argparse.Namespace, argv: Sequence[str]) -> int:
    """Prints the tables; exit code 0. UsageError for bad flags and folders."""
    outputs.check(args, picture_files=True)
    if bool(args.runs) == bool(args.simulate):
        raise UsageError("scaling: give run folders, runs/NAME .., or --simulate MODEL; one of the two")
    asked = "--simulate" if args.simulate else _RUNS
    questions.refuse_idle(args, add_arguments, asked, TAKERS, ("scaling",))
    if args.skip < 0:
        raise UsageError(f"--skip {args.skip}: must be at least 0")
    modes = scaling.MODES if args.mode == "both" else (args.mode,)
    try:
        with outputs.for_people(args.json):
            tables, source, workers = _predicted(args, modes) if args.simulate else _measured(args, modes)
            _show(tables, named=not args.simulate)
            if args.plot:
                outputs.say_written(scaling.draw(tables, outputs.picture(args.plot, "scaling"), source, workers))
    except ValueError as error:
        raise UsageError(in_flags(str(error), job_flags.ARGUMENTS)) from None
    rows = [row for mode, found in tables.items() for row in scaling.as_json(mode, found)]
    outputs.write_json(
        args.json, {"schema": "hybrid_ep.scaling/1", "simulated": bool(args.simulate), "source": source, "rows": rows}
    )
    return EXIT_OK


def _measured(args: argparse.Namespace, modes: Sequence[str]) -> tuple[dict[str, list[scaling.Row]], str, str]:
    """Tables by mode, where they come from, what they count; likewise of `_predicted`."""
    given = {Path(run).resolve(): run for run in reversed(args.runs)}
    rows, device = runs.read([*reversed(given.values())], args.skip)
    found, neither = scaling.split(rows)
    _say(
        f"MEASURED: {outputs.count(len(rows), 'run')} on {device}; median of the steps after the first "
        f"{args.skip}; memory: peak of the process with most"
    )
    if device == "cpu":
        _say("ranks of CPU processes stand where GPUs would: they share one machine, so this is no claim about GPUs")
    if len(given) < len(args.runs):
        _say(f"{outputs.count(len(args.runs), 'run')} were given, {len(given)} of them different: each counts once")
    for row in neither:
        _say(f"{row.name} keeps neither the tokens of a GPU nor those of the job of the smallest run: left out")
    return {mode: found[mode] for mode in modes}, f"measured, {device}", "ranks" if device == "cpu" else "GPUs"


def _predicted(args: argparse.Namespace, modes: Sequence[str]) -> tuple[dict[str, list[scaling.Row]], str, str]:
    if not all(n >= 1 for n in args.gpus):
        raise UsageError(f"--gpus {','.join(map(str, args.gpus))}: every one must be at least 1")
    if twice := [n for n in args.gpus if args.gpus.count(n) > 1]:
        raise UsageError(f"--gpus {','.join(map(str, args.gpus))}: names {twice[0]} twice; give each size once")
    job = job_flags.from_flags(args, args.simulate, min(args.gpus))
    tables = {mode: scaling.predict(job, args.gpus, mode) for mode in modes}
    _say("SIMULATED: predictions of hybrid_ep's step model, not measurements (docs/performance_model.md)")
    _say(
        f"{args.simulate} on {job.cluster.name}: {job.cluster.summary}; EP {job.ep}  PP {job.pp} x "
        f"{job.virtual_pp}  TP {job.tensor}  {job.tokens} tokens a micro-batch  {job.dtype}, recompute "
        f"{names.said_of_recompute(args.recompute)}  {args.dispatcher}, {job.dispatch_dtype} dispatch, {job.num_sms} "
        f"SMs, {job.overlap:.0%} hidden"
    )
    _say(
        f"memory: of the fullest GPU, as hybrid-ep launch counts it, of {memory.budget_bytes(job.cluster) / 1e9:.1f} "
        f"GB ({memory.RESERVE:.0%} is left free); state: its {memory.STATE_HOLDS}, without activations and buffers"
    )
    for line in (step_time.said_of_compute(job), *training.said_of(job).splitlines()):
        _say(line)
    if lacking := scaling.said_of_fit(job, next(iter(tables.values()))):
        _say(lacking)
    source = f"{args.simulate}, EP{job.ep} PP{job.pp}, {job.dtype}, {args.dispatcher}\n{job.cluster.name}, simulated"
    return tables, source, "GPUs"


def _say(what: str) -> None:
    print(outputs.wrapped(f"# {what}"))


def _show(tables: dict[str, list[scaling.Row]], named: bool) -> None:
    for mode, rows in tables.items():
        for line in scaling.lines(mode, rows, named):
            print(line)
        if len(rows) == 1:
            print(
                f"# one job alone: {mode} scaling needs another size with the same tokens "
                f"{'of each GPU' if mode == 'weak' else 'of the job'}"
            )
