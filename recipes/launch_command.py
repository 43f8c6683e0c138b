"""`hybrid-ep launch RECIPE`: resolves a recipe, says what it needs, and runs it here or through Slurm.

What starts the run is a script in its folder, job.sh or job.sbatch: to be read, edited and, with --resume, run again.
A subcommand of hybrid-ep by its entry point in the group hybrid_ep.commands; `python -m recipes.launch_command` is
the same where nothing is installed.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from hybrid_ep import env
from hybrid_ep.cli import UsageError, names, outputs
from hybrid_ep.cli.arguments import in_flags
from hybrid_ep.cli.parser import Parser, warn_renamed
from hybrid_ep.cli.progress import track

from . import (
    CLUSTER_RECIPES,
    RECIPES,
    cluster_summary,
    get_recipe,
    launch_checks,
    launch_slurm,
    safe_yaml,
    sbatch,
    text_files,
)
from .__main__ import described, list_recipes
from .cluster import ClusterRun
from .config import RunConfig
from .hardware import HARDWARE
from .launch_run import program_of, run_script
from .run_folder import RunFolder, new_folder

SUMMARY = "train a recipe here or on Slurm"
_OF_A_NEW_RUN = (
    "recipe",
    "nodes",
    "tasks_per_node",
    "cluster",
    "hardware",
    "set",
    "layouts",
    "name",
    "dry_run",
    "no_submit",
    *launch_slurm.FLAGS,
)
_SET = "--set "
# Arguments of errors by the words that give them: fields of a run by --set, those of a CPU recipe with their section.
_ARGUMENTS = {
    **{field.name: f"{_SET}{field.name}=" for field in dataclasses.fields(ClusterRun)},
    **{
        f"{section.name}.{field.name}": f"{_SET}{section.name}.{field.name}="
        for section in dataclasses.fields(RunConfig)
        if dataclasses.is_dataclass(section.default_factory)
        for field in dataclasses.fields(cast(Any, section.default_factory))
    },
    **{
        name: f"--{name.replace('_', '-')} "
        for name in ("nodes", "tasks_per_node", "cluster", "name", "resume", *launch_slurm.FLAGS)
    },
    "num_hosts": "--nodes ",
    "starts": "--max-starts ",
    "recipe": "RECIPE ",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of the subcommand."""
    parser.add_argument("recipe", nargs="?", help=f"one of {', '.join([*CLUSTER_RECIPES, *RECIPES])}")
    parser.add_argument("--list", action="store_true", help="list the recipes and leave")
    parser.add_argument(
        "--layouts", action="store_true", help="of a GPU recipe: print the fastest layouts that fit, and leave"
    )
    outputs.add_json(parser)
    parser.add_argument("--nodes", type=int, help="hosts (default: the recipe's; 1 for a CPU recipe)")
    parser.add_argument("--tasks-per-node", type=int, help="ranks a host, CPU recipes only")
    names.add_cluster(parser.add_argument, f"GPUs of a GPU recipe, {next(iter(HARDWARE))} if not given", names=HARDWARE)
    parser.add_argument("--hardware", type=names.cluster_of(HARDWARE), help=argparse.SUPPRESS)
    parser.add_argument(
        "--set",
        action="append",
        metavar="KEY=VALUE",
        help="change a field: expert=32; section.field=value in a CPU recipe",
    )
    parser.add_argument("--name", help="name of the run folder (default: recipe and time)")
    parser.add_argument("--runs-dir", default="runs", help="where run folders live")
    parser.add_argument("--resume", metavar="NAME", help="run the script of an earlier run's folder again")
    parser.add_argument("--dry-run", action="store_true", help="print the script that would run, leave nothing behind")
    parser.add_argument("--no-submit", action="store_true", help="write the run folder with its script, start nothing")
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--slurm", action="store_true", help="submit an sbatch script")
    where.add_argument("--local", action="store_true", help="torchrun on this machine (the default)")
    launch_slurm.add_arguments(parser)


def run(args: argparse.Namespace, _argv: Sequence[str]) -> int:
    """Exit code: that of torchrun or sbatch; 3 where a CPU recipe's run did not learn; 0 for a dry run. UsageError
    for what the user can mend."""
    try:
        _new_spellings(args)
        outputs.check(args)
        _check_flags(args)
        if args.list:
            with outputs.for_people(args.json):
                print(list_recipes(cluster=True))
            outputs.write_json(args.json, {"schema": "hybrid_ep.recipes/1", "recipes": described()})
            return 0
        if args.resume is not None:
            return _resume(args)
        if args.layouts:
            from . import layouts

            watch = functools.partial(track, what="layouts")
            table, document = layouts.table(resolve_cluster(args, parse_changes(args.set or [])), watch)
            with outputs.for_people(args.json):
                print(outputs.narrowed(in_flags(table, _ARGUMENTS)))
            outputs.write_json(args.json, document)
            return 0
        name = args.name or f"{args.recipe}-{time.strftime('%Y%m%d-%H%M%S')}"
        plan = _plan_cluster if args.recipe in CLUSTER_RECIPES else _plan_small
        return _start(plan(args, name, parse_changes(args.set or [])), args, name)
    except ValueError as error:
        asked = {"name": "--resume "} if args.resume is not None else {}  # a run's name has either flag
        asked |= {key: f"{_SET}{key}=" for key in (word.partition("=")[0] for word in args.set or ())}
        raise UsageError(in_flags(str(error), {**_ARGUMENTS, **asked})) from error
    except ModuleNotFoundError as error:
        if error.name != "yaml":
            raise
        raise UsageError("recipes need pyyaml: pip install 'hybrid_ep[train]'") from error


def _new_spellings(args: argparse.Namespace) -> None:
    """Old names of flags, with a warning; of clusters their flag knows them."""
    if args.hardware is not None:
        warn_renamed("--hardware", "--cluster")
        if args.cluster is not None:
            raise ValueError(f"--hardware {args.hardware}: the old name of --cluster {args.cluster}; give one")
        args.cluster, args.hardware = args.hardware, None


def _check_flags(args: argparse.Namespace) -> None:
    """ValueError for a flag that the call would ignore."""

    def given(*flags: str) -> str:
        found = [name for name in flags if (value := getattr(args, name)) is not None and value is not False]
        return " ".join("--" + name.replace("_", "-") for name in found)

    predicts = args.recipe in CLUSTER_RECIPES and (args.layouts or args.dry_run)
    if args.json is not None and not (args.list or predicts):
        raise ValueError(
            f"--json {args.json}: for --list, and of a GPU recipe for --layouts and --dry-run; leave it out"
        )
    if args.list:
        if flags := given(*_OF_A_NEW_RUN, "slurm", "local", "resume").replace("--recipe", "RECIPE"):
            raise ValueError(f"--list with {flags}: lists the recipes and starts nothing; leave them out")
        return
    if args.resume is not None:
        if flags := given(*_OF_A_NEW_RUN, "slurm", "local").replace("--recipe", "RECIPE"):
            raise ValueError(f"resume={args.resume!r} with {flags}: a run goes on as it began; leave them out")
        return
    if args.recipe is None:
        raise ValueError("recipe is missing: name one, or give --resume NAME; --list shows them")
    if args.recipe not in (*CLUSTER_RECIPES, *RECIPES):
        raise ValueError(f"recipe={args.recipe!r}: unknown; choose one of these\n{list_recipes(cluster=True)}")
    if not args.slurm and (flags := given(*launch_slurm.FLAGS)):
        raise ValueError(f"{flags}: for jobs of Slurm; add --slurm")
    if args.nodes is not None and args.nodes < 1:
        raise ValueError(f"nodes={args.nodes}: must be 1 or more")
    if args.recipe in CLUSTER_RECIPES:
        if args.tasks_per_node is not None:
            raise ValueError(f"tasks_per_node={args.tasks_per_node}: one process a GPU; leave it out")
    elif args.layouts:
        raise ValueError(f"--layouts: {args.recipe} runs on CPUs, where memory and links decide nothing; leave it out")
    elif args.cluster is not None:
        raise ValueError(f"cluster={args.cluster!r}: {args.recipe} runs on CPUs; leave it out")
    elif args.tasks_per_node is not None and args.tasks_per_node < 1:
        raise ValueError(f"tasks_per_node={args.tasks_per_node}: must be 1 or more")


def parse_changes(pairs: Sequence[str]) -> dict[str, Any]:
    """{key: value} of KEY=VALUE words; values are YAML scalars read with the safe loader."""
    changes: dict[str, Any] = {}
    for pair in pairs:
        key, equals, text = pair.partition("=")
        if not (key and equals):
            raise ValueError(f"--set {pair!r}: write KEY=VALUE")
        value = safe_yaml.load(text, f"--set {pair!r}")
        changes[key] = "" if value is None else value
    return changes


def _where(config: RunConfig, key: str) -> str:
    """How to write a key that is a section, a field of one, or nothing known."""
    sections = {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}
    sections = {name: section for name, section in sections.items() if dataclasses.is_dataclass(section)}
    fields = {f"{name}.{f.name}" for name, section in sections.items() for f in dataclasses.fields(section)}
    meant = sorted(field for field in fields if field.split(".")[1] == key or field.split(".")[0] == key)
    return f"write {' or '.join(meant)}" if meant else f"unknown; write SECTION.FIELD of {', '.join(sorted(sections))}"


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
        known = dataclasses.is_dataclass(getattr(config, section, None))
        if dot and known:
            sections.setdefault(section, {})[field] = value
        elif not dot and hasattr(config, key) and known == isinstance(value, dict):
            sections[key] = value
        else:
            given = f"{key}={value}"
            raise ValueError(f"--set {given!r}: {_where(config, key)}")
    return config.derive(**sections), nodes, tasks


def resolve_cluster(args: argparse.Namespace, changes: dict[str, Any]) -> ClusterRun:
    """A GPU recipe with its changes, checked to fit."""
    recipe = CLUSTER_RECIPES[args.recipe](args.cluster or next(iter(HARDWARE)))
    return recipe.derive(**({} if args.nodes is None else {"num_hosts": args.nodes}), **changes)


@dataclass(frozen=True)
class _Plan:
    """A run that could start. config: what a CPU recipe's ranks read from the folder. run: a GPU recipe's."""

    script: str
    config: RunConfig | None = None
    run: ClusterRun | None = None


def _refuse_other_machines(args: argparse.Namespace, nodes: int) -> None:
    """ValueError before anything is said where no script of this machine could start the run."""
    if nodes > 1 and not args.slurm:
        more = ", and the same command prints its job's script" if args.dry_run else ""
        raise ValueError(f"nodes={nodes}: this machine is one; add --slurm{more}")


def _plan_small(args: argparse.Namespace, name: str, changes: dict[str, Any]) -> _Plan:
    config, nodes, tasks = resolve_small(args, changes)
    _refuse_other_machines(args, nodes)
    module = ["-m", f"{__package__}.rank", _folder(args, name)]
    if args.slurm:
        script = sbatch.script(
            launch_slurm.make_job(args, name, _folder(args, name), nodes, tasks, [launch_slurm.python(args), *module])
        )
    else:
        script = sbatch.local_script(str(Path.cwd()), _torchrun(tasks, module))
    try:
        text_files.read(config.data)
    except ValueError as error:
        if not (args.slurm or args.dry_run or args.no_submit):
            raise
        print(
            outputs.narrowed(f"missing here: {in_flags(str(error), _ARGUMENTS)}"), file=sys.stderr
        )  # the nodes, or another day, may have it
    return _Plan(script, config)


def _plan_cluster(args: argparse.Namespace, name: str, changes: dict[str, Any]) -> _Plan:
    folder = _folder(args, name)  # first: a name that is none is said before all else
    run = resolve_cluster(args, changes)
    _refuse_other_machines(args, run.num_hosts)
    script = _script_of(args, name, folder, run)  # before anything is said: a wrong flag is all that is shown
    # What is not the script goes to stderr: a dry run's output may be saved as one.
    said = f"{cluster_summary.describe(run)}\n{launch_checks.data(run)}"
    print(outputs.narrowed(said), file=sys.stderr, flush=True)
    mounts = launch_slurm.mounts(args, folder) if args.container else None
    if args.dry_run or args.no_submit:
        for line in launch_checks.missing(run, mounts):
            print(outputs.narrowed(f"missing here: {line}"), file=sys.stderr)
    else:
        launch_checks.require(run, mounts)
    for line in launch_checks.unseen(run, mounts):
        print(outputs.narrowed(f"not looked for: {line}"), file=sys.stderr)
    return _Plan(script, run=run)


def _script_of(args: argparse.Namespace, name: str, folder: str, run: ClusterRun) -> str:
    from .megatron_arguments import environment, megatron_arguments

    arguments = megatron_arguments(run, f"{folder}/checkpoint", f"{folder}/tensorboard")
    module = ["-m", "megatron_patches", f"{run.megatron_path}/pretrain_gpt.py", *arguments]
    gpus, variables = run.hardware.gpus_per_host, environment(run)
    if args.slurm:
        return sbatch.script(
            launch_slurm.make_job(
                args, name, folder, run.num_hosts, gpus, [launch_slurm.python(args), *module], run, variables
            )
        )
    return sbatch.local_script(str(Path.cwd()), _torchrun(gpus, module), variables)


def _folder(args: argparse.Namespace, name: str) -> str:
    return str(RunFolder.path_of(args.runs_dir, name).resolve())


def _torchrun(ranks: int, module: list[str]) -> list[str]:
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", *module]


def _start(plan: _Plan, args: argparse.Namespace, name: str) -> int:
    if args.dry_run:
        with outputs.for_people(args.json):
            print(plan.script, end="")
        if args.json is not None and plan.run is not None:  # beside a script that may be saved
            outputs.write_json(args.json, cluster_summary.as_json(plan.run), functools.partial(print, file=sys.stderr))
        return 0
    if not args.no_submit:
        env.check(files=not args.container)  # the job has this environment too, a container files of its own
    if plan.config is not None:
        path = RunFolder.create(plan.config, name).path
    else:
        path = new_folder(Path(args.runs_dir), name)
    script = path / ("job.sbatch" if args.slurm else "job.sh")
    script.write_text(plan.script)
    if args.slurm:
        (path / "logs").mkdir()
    if args.no_submit:
        print(f"{script}: written; start it with: {program_of(script)} {shlex.quote(str(script))}")
        return 0
    return run_script(script)


def _resume(args: argparse.Namespace) -> int:
    path = RunFolder.path_of(args.runs_dir, args.resume)
    for script in (path / "job.sbatch", path / "job.sh"):
        if script.is_file():
            env.check(files=script.name == "job.sh")  # a job's container may have files of its own
            if script.name == "job.sh" and (path / "config.yaml").is_file():
                text_files.read(RunFolder(path).read_config().data)
            return run_script(script)
    raise ValueError(f"resume={args.resume!r}: no job.sbatch or job.sh in {path}; name a run that launch has started")


def main(argv: Sequence[str]) -> int:
    """The subcommand without hybrid-ep."""
    parser = Parser(prog="hybrid-ep launch", description=SUMMARY)
    add_arguments(parser)
    try:
        return run(parser.parse_args(argv), argv)
    except UsageError as error:
        print(f"hybrid-ep launch: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("hybrid-ep launch: interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
