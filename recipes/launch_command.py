"""`hybrid-ep launch RECIPE`: resolves a recipe, says what it needs, and runs it here or through Slurm.

A subcommand of hybrid-ep by its entry point in the group hybrid_ep.commands; `python -m recipes.launch_command` is
the same where nothing is installed.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hybrid_ep.cli import COMMANDS, UsageError
from recipes import CLUSTER_RECIPES, RECIPES, get_recipe, sbatch
from recipes.cluster import HARDWARE, ClusterRun
from recipes.config import RunConfig
from recipes.run_folder import RunFolder

SUMMARY = "train a recipe here or on Slurm"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of the subcommand."""
    parser.add_argument("recipe", help=f"one of {', '.join([*CLUSTER_RECIPES, *RECIPES])}")
    parser.add_argument("--nodes", type=int, help="hosts (default: the recipe's; 1 for a CPU recipe)")
    parser.add_argument("--tasks-per-node", type=int, help="ranks a host, CPU recipes only")
    parser.add_argument("--hardware", choices=HARDWARE, default="h100_8x400g", help="which variant of a GPU recipe")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE",
                        help="change a field: expert=32; section.field=value in a CPU recipe")
    parser.add_argument("--name", help="name of the run folder (default: recipe and time)")
    parser.add_argument("--runs-dir", default="runs", help="where run folders live")
    parser.add_argument("--dry-run", action="store_true", help="print what would run and leave nothing behind")
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--slurm", action="store_true", help="submit an sbatch script")
    where.add_argument("--local", action="store_true", help="torchrun on this machine (the default)")
    parser.add_argument("--no-preflight", action="store_true", help="start the ranks without hybrid-ep doctor first")
    parser.add_argument("--max-starts", type=int, default=3, metavar="N",
                        help="starts of a requeued job from one checkpoint before it gives up (default 3)")
    for name in ("partition", "account", "time", "container"):
        parser.add_argument(f"--{name}", default="", help=f"Slurm's {name}" + (" image" * (name == "container")))


def run(args: argparse.Namespace, _argv: Sequence[str]) -> int:
    """Exit code: that of torchrun or sbatch; 0 for a dry run. UsageError for what the user can mend."""
    try:
        changes = parse_changes(args.set)
        name = args.name or f"{args.recipe}-{time.strftime('%Y%m%d-%H%M%S')}"
        if args.recipe in CLUSTER_RECIPES:
            return _launch_cluster(args, name, changes)
        return _launch_small(args, name, changes)
    except ValueError as error:
        raise UsageError(str(error)) from error


def parse_changes(pairs: Sequence[str]) -> dict[str, Any]:
    """{key: value} of KEY=VALUE words; values are YAML scalars read with the safe loader."""
    import yaml

    changes: dict[str, Any] = {}
    for pair in pairs:
        key, equals, text = pair.partition("=")
        if not (key and equals):
            raise ValueError(f"--set {pair!r}: write KEY=VALUE")
        try:
            changes[key] = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise ValueError(f"--set {pair!r}: the value is no YAML scalar ({error}); quote it") from error
        if changes[key] is None:
            changes[key] = ""
    return changes


def resolve_small(args: argparse.Namespace, changes: dict[str, Any]) -> tuple[RunConfig, int, int]:
    """A CPU recipe with its changes, hosts and ranks a host."""
    config = get_recipe(args.recipe)
    nodes = args.nodes or 1
    tasks = args.tasks_per_node or max(1, config.parallel.num_ranks // nodes)
    sections: dict[str, Any] = {"logging": {"runs_dir": args.runs_dir}, "parallel": {"num_ranks": nodes * tasks}}
    if nodes > 1:
        sections["parallel"]["ranks_per_node"] = tasks
    for key, value in changes.items():
        section, dot, field = key.partition(".")
        if dot:
            sections.setdefault(section, {})[field] = value
        else:
            sections[section] = value
    return config.derive(**sections), nodes, tasks


def resolve_cluster(args: argparse.Namespace, changes: dict[str, Any]) -> ClusterRun:
    """A GPU recipe with its changes, checked to fit."""
    if args.tasks_per_node:
        raise ValueError(f"tasks_per_node={args.tasks_per_node}: one process a GPU; leave it out")
    if args.nodes is not None:
        changes = {"num_hosts": args.nodes, **changes}
    return CLUSTER_RECIPES[args.recipe](args.hardware).derive(**changes)


def describe(run: ClusterRun) -> str:
    """Parameters, layout, memory and predicted step time. ValueError where it does not fit."""
    from recipes import memory

    model, need = run.architecture, memory.check_fits(run)
    return "\n".join([
        f"{run.recipe}: {model.total_params / 1e9:.2f} B parameters, {model.active_params / 1e9:.2f} B active "
        f"({model.source})",
        f"{run.num_hosts} hosts x {run.hardware.gpus_per_host} {run.hardware.gpu}: TP {run.tensor}, PP {run.pipeline} "
        f"x {run.virtual_pipeline}, EP {run.expert} in domains of {run.domain}, DP {run.data}; {run.precision}, "
        f"recompute {run.recompute}, {run.num_microbatches} micro-batches, balance {run.balance}"
        + (f" with {run.clones} spare slots a rank ({memory.clone_bytes(run):,} bytes)" if run.clones else ""),
        f"fullest GPU (pipeline rank {need.stage}), {memory.budget_bytes(run) / 1e9:.1f} GB to use; hybrid_ep "
        f"registers {need.buffers:,} bytes:", str(need), predict(run),
    ])


def predict(run: ClusterRun) -> str:
    """Step time by the performance model, with the assumption it rests on; says so where the model cannot tell."""
    if importlib.util.find_spec("hybrid_ep.sim.step_time") is None:
        return "step time: no prediction, this build has no performance model"
    from hybrid_ep.sim import clusters, models, step_time

    cluster = "b200_8x400g" if run.hardware.name == "b200_8" else run.hardware.name
    if run.tensor > 1:
        return f"step time: no prediction, the performance model has no tensor parallelism (tensor={run.tensor})"
    try:
        job = step_time.Job(
            models.get(run.architecture.name), clusters.get(cluster), run.num_gpus, run.expert, run.pipeline,
            run.virtual_pipeline, run.tokens_per_rank, run.seq_length, run.num_microbatches, dtype=run.precision,
            dispatcher="a2a" if run.dispatcher == "alltoall" else run.dispatcher, num_sms=run.num_sms)
        step = step_time.step(job)
    except ValueError as error:
        return f"step time: no prediction ({error})"
    return (f"step time: {step.seconds:.2f} s, {step.tflops_per_gpu:.0f} TFLOP/s a GPU (model, not measured; assumes "
            f"{job.efficiency:.0%} of peak in compute, no recompute, no load imbalance)")


def preflight() -> list[str]:
    """What every node must pass: the doctor where this build has one, else the import of the compiled core."""
    if "doctor" in COMMANDS:
        return [sys.executable, "-m", "hybrid_ep.cli", "doctor"]
    return [sys.executable, "-m", "hybrid_ep.env"]


def _job(args: argparse.Namespace, name: str, nodes: int, tasks: int, command: list[str], gpus: int = 0,
         environment: Mapping[str, str] | None = None) -> sbatch.Job:
    folder = str(Path(args.runs_dir, name).resolve())
    return sbatch.Job(name, folder, str(Path.cwd()), nodes, tasks, command,
                      [] if args.no_preflight else preflight(), gpus, args.partition,
                      args.account, args.time, args.container, environment or {}, args.max_starts)


def _launch_small(args: argparse.Namespace, name: str, changes: dict[str, Any]) -> int:
    config, nodes, tasks = resolve_small(args, changes)
    folder = str(Path(args.runs_dir, name).resolve())
    module = ["-m", "recipes.rank", folder]
    if args.slurm:
        text = sbatch.script(_job(args, name, nodes, tasks, [sys.executable, *module]))
    elif nodes > 1:
        raise ValueError(f"nodes={nodes}: this machine is one; add --slurm")
    else:
        command = _torchrun(tasks, module)
        text = shlex.join(command)
    if args.dry_run:
        print(text)
        return 0
    RunFolder.create(config, name)
    return _submit(folder, text) if args.slurm else subprocess.run(command, check=False).returncode


def _launch_cluster(args: argparse.Namespace, name: str, changes: dict[str, Any]) -> int:
    from recipes.megatron_arguments import environment, megatron_arguments

    run = resolve_cluster(args, changes)
    print("\n".join("# " + line for line in describe(run).splitlines()), flush=True)
    folder = str(Path(args.runs_dir, name).resolve())
    arguments = megatron_arguments(run, f"{folder}/checkpoint", f"{folder}/tensorboard")
    module = ["-m", "megatron_patches", f"{run.megatron_path}/pretrain_gpt.py", *arguments]
    gpus, variables = run.hardware.gpus_per_host, environment(run)
    if args.slurm:
        text = sbatch.script(_job(args, name, run.num_hosts, gpus, [sys.executable, *module], gpus, variables))
    elif run.num_hosts > 1 and not args.dry_run:
        raise ValueError(f"nodes={run.num_hosts}: this machine is one; add --slurm")
    else:
        assignments = [f"{key}={shlex.quote(value)}" for key, value in variables.items()]
        text = " ".join([*assignments, shlex.join(_torchrun(gpus, module))])
    if args.dry_run:
        print(text)
        return 0
    Path(folder).mkdir(parents=True)
    if args.slurm:
        return _submit(folder, text)
    return subprocess.run(_torchrun(gpus, module), env={**os.environ, **variables}, check=False).returncode


def _torchrun(ranks: int, module: list[str]) -> list[str]:
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", *module]


def _submit(folder: str, text: str) -> int:
    Path(folder, "logs").mkdir()
    path = Path(folder, "job.sbatch")
    path.write_text(text)
    print(f"{path}: submitting; logs in {folder}/logs", flush=True)
    try:
        return subprocess.run(["sbatch", str(path)], check=False).returncode
    except FileNotFoundError:
        raise ValueError(f"slurm: sbatch is not on PATH; the script is {path}, submit it where Slurm is") from None


def main(argv: Sequence[str]) -> int:
    """The subcommand without hybrid-ep."""
    parser = argparse.ArgumentParser(prog="hybrid-ep launch", description=SUMMARY)
    add_arguments(parser)
    try:
        return run(parser.parse_args(argv), argv)
    except UsageError as error:
        print(f"hybrid-ep launch: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
