"""The flags of `hybrid-ep launch --slurm` and the sbatch.Job that they make."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Mapping
from pathlib import Path

from hybrid_ep import env

from . import sbatch
from .cluster import ClusterRun

STARTS = 3  # of a requeued job from one checkpoint
# Flags that mean something to Slurm alone, as attributes.
FLAGS = (
    "no_preflight",
    "max_starts",
    "partition",
    "account",
    "time",
    "container",
    "container_mounts",
    "container_python",
    "segment",
    "cpus_per_task",
    "no_numa",
    "nics",
    "env",
    "module",
    "sbatch",
    "signal_before",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The group "with --slurm"."""
    slurm = parser.add_argument_group("with --slurm")
    slurm.add_argument("--no-preflight", action="store_true", help="start the ranks without hybrid-ep doctor first")
    slurm.add_argument(
        "--max-starts",
        type=int,
        metavar="N",
        help=f"starts of a requeued job from one checkpoint before it gives up (default {STARTS})",
    )
    for name in ("partition", "account", "time"):
        slurm.add_argument(f"--{name}", help=f"Slurm's {name}")
    slurm.add_argument(
        "--segment",
        type=int,
        metavar="HOSTS",
        help="hosts that must share one NVLink domain; default: "
        "those of an expert-parallel group's domain where it spans hosts; 0 leaves it to Slurm",
    )
    slurm.add_argument(
        "--cpus-per-task",
        type=int,
        metavar="N",
        help="cores of a rank; default: of a GPU recipe an equal share of the host",
    )
    slurm.add_argument(
        "--no-numa", action="store_true", help="do not bind ranks of a GPU recipe to the NUMA node of their GPU"
    )
    slurm.add_argument(
        "--nics",
        metavar="NAME[,..]",
        help="RDMA NICs that NCCL and the ranks may use, as mlx5_0,mlx5_1; default: all, each GPU those nearest to it",
    )
    slurm.add_argument("--env", action="append", metavar="NAME=VALUE", help="export a variable; may be repeated")
    slurm.add_argument("--module", action="append", metavar="NAME", help="module load NAME first; may be repeated")
    slurm.add_argument(
        "--sbatch",
        action="append",
        metavar="KEY=VALUE",
        help="one more #SBATCH line, as qos=high or exclude=n[1-3]; may be repeated",
    )
    slurm.add_argument(
        "--signal-before",
        type=int,
        metavar="SECONDS",
        help=f"before the time limit: finish the step, write a checkpoint (default {sbatch.SIGNAL_S})",
    )
    slurm.add_argument("--container", metavar="IMAGE", help="run in this image (srun --container-image, pyxis)")
    slurm.add_argument(
        "--container-mounts",
        metavar="FROM:TO[,..]",
        help="beside this folder and that of the runs, which are mounted at their own paths",
    )
    slurm.add_argument("--container-python", metavar="PATH", help="the image's Python (default python3)")


def python(args: argparse.Namespace) -> str:
    """What ranks run: this Python, or that of the image."""
    return (args.container_python or "python3") if args.container else sys.executable


def make_job(
    args: argparse.Namespace,
    name: str,
    folder: str,
    nodes: int,
    tasks: int,
    command: list[str],
    run: ClusterRun | None = None,
    environment: Mapping[str, str] | None = None,
) -> sbatch.Job:
    """ValueError names what Slurm's lines cannot hold. run: of a GPU recipe; None asks for no GPU."""
    if args.container is None and (args.container_mounts or args.container_python):
        raise ValueError("--container-mounts, --container-python: say something of a container; add --container IMAGE")
    gpus = run.hardware.gpus_per_host if run else 0
    doctor = [python(args), "-m", "hybrid_ep", "doctor", *(["--require-gpu"] if run else [])]
    return sbatch.Job(
        name,
        folder,
        str(Path.cwd()),
        nodes,
        tasks,
        command,
        [] if args.no_preflight else doctor,
        gpus,
        args.partition or "",
        args.account or "",
        args.time or "",
        args.container or "",
        {**(environment or {}), **_of_nics(args.nics), **_variables(args.env)},
        STARTS if args.max_starts is None else args.max_starts,
        segment=_segment(args, run, nodes),
        cpus_per_task=_cpus(args),
        modules=tuple(args.module or ()),
        sbatch=tuple(args.sbatch or ()),
        mounts=mounts(args, folder),
        numa=not args.no_numa,
        signal_s=sbatch.SIGNAL_S if args.signal_before is None else args.signal_before,
    )


def mounts(args: argparse.Namespace, folder: str) -> str:
    """FROM:TO,.. of the container: this folder and that of the runs at their own paths, and what was given."""
    own = [f"{path}:{path}" for path in dict.fromkeys((str(Path.cwd()), str(Path(folder).parent)))]
    return ",".join([*own, *filter(None, [args.container_mounts])])


def _variables(pairs: list[str] | None) -> dict[str, str]:
    found = {}
    for pair in pairs or ():
        name, equals, value = pair.partition("=")
        if not equals:
            raise ValueError(f"--env {pair!r}: write NAME=VALUE")
        if name in env.TABLE:
            env.parse(name, value)
        found[name] = value
    return found


def _of_nics(names: str | None) -> dict[str, str]:
    """The NICs in the words of NCCL (= is an exact name) and of NVSHMEM, port 1 of each."""
    if names is None:
        return {}
    listed = names.split(",")
    if not all(re.fullmatch(r"\w+", name) for name in listed):
        raise ValueError(f"nics={names!r}: give names as ibv_devices lists them, mlx5_0,mlx5_1")
    ports = ",".join(f"{name}:1" for name in listed)
    return {"NCCL_IB_HCA": f"={ports}", "NVSHMEM_HCA_LIST": ports}


def _cpus(args: argparse.Namespace) -> int:
    if args.cpus_per_task is None:
        return 0
    if args.cpus_per_task < 1:
        raise ValueError(f"cpus_per_task={args.cpus_per_task}: must be 1 or more")
    return args.cpus_per_task


def _segment(args: argparse.Namespace, run: ClusterRun | None, nodes: int) -> int:
    """Hosts that must lie in one NVLink domain: nothing but Slurm's block topology makes compute trays share a rack."""
    wanted = args.segment
    if wanted is None:
        wanted = 0
        if run and run.hardware.ranks_per_nvlink_domain > run.hardware.gpus_per_host:
            wanted = -(-run.domain // run.hardware.gpus_per_host)
    if wanted < 0 or (wanted and nodes % wanted):
        raise ValueError(f"segment={wanted}: must be 0 or divide the job's {nodes} hosts")
    return wanted if wanted > 1 else 0
