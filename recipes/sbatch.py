"""The sbatch script of a run: readable, to be kept and edited. Every value that reaches the shell is quoted."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import PurePath

# torch would set it to 1 for several ranks of a host, too, with a banner of stars.
_ONE_THREAD = "export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}"
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_ATOM = re.compile(r"[A-Za-z0-9_.,:@%/+\[\]=-]+")
_OPTION = re.compile(rf"(--)?[a-z][a-z0-9-]*(={_ATOM.pattern})?")
# As sbatch's manual lists them; its parser takes -1 and INFINITE for UNLIMITED, in capitals or not.
_TIME = re.compile(r"\d+(:\d+){0,2}|\d+-\d+(:\d+){0,2}|-1|INFINITE|UNLIMITED", re.IGNORECASE)
_PREFLIGHT_S = 900
SIGNAL_S = 180  # from SIGTERM to the time limit: to finish a step and write a checkpoint
_MOST_SIGNAL_S = 65535  # sbatch's
# sbatch takes the last of two lines, so what the script sets itself is no option of the caller's: what says it instead.
_OWN = {
    "job-name": "give --name",
    "nodes": "give --nodes",
    "ntasks": "--nodes and --tasks-per-node give it",
    "ntasks-per-node": "give --tasks-per-node, of a GPU recipe --cluster",
    "output": "logs lie in the run's folder, which --runs-dir and --name give",
    "partition": "give --partition",
    "account": "give --account",
    "time": "give --time",
    "segment": "give --segment",
    "signal": "give --signal-before",
    "open-mode": "a requeued job goes on in its log",
    "requeue": "a lost node's job is requeued; --max-starts bounds it",
    "no-requeue": "a lost node's job is requeued; --max-starts bounds it",
}
_OWN_OF_GPUS = {
    "gpus-per-node": "--cluster gives it",
    "exclusive": "a GPU job has its hosts alone",
    "mem": "a GPU job has all of its hosts' memory",
    "mem-per-cpu": "a GPU job has all of its hosts' memory",
    "mem-per-gpu": "a GPU job has all of its hosts' memory",
}


@dataclass(frozen=True)
class Job:
    """command: what every rank runs, unquoted words. folder: absolute, seen by all nodes. gpus_per_node: 0 asks for
    none. preflight: what every node must pass first, or nothing. container: an image for srun's pyxis plugin, or empty.
    environment: variables of every rank. starts: how often in a row the job may start from one and the same checkpoint.
    segment: hosts that must share a block of the topology, 0: any. cpus_per_task: of a rank, 0: where hosts are
    exclusive an equal share, else as Slurm has it. modules: loaded first. sbatch: more options, KEY=VALUE or KEY.
    mounts: FROM:TO,.. of the container. signal_s: seconds before the time limit at which ranks get SIGTERM.
    numa: ranks of a GPU job keep to the NUMA node of their GPU.
    """

    name: str
    folder: str
    workdir: str
    nodes: int
    tasks_per_node: int
    command: list[str]
    preflight: list[str]
    gpus_per_node: int = 0
    partition: str = ""
    account: str = ""
    time: str = ""
    container: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)
    starts: int = 3
    segment: int = 0
    cpus_per_task: int = 0
    modules: tuple[str, ...] = ()
    sbatch: tuple[str, ...] = ()
    mounts: str = ""
    signal_s: int = SIGNAL_S
    numa: bool = True

    def __post_init__(self) -> None:
        for name in ("nodes", "tasks_per_node", "starts"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: must be 1 or more")
        # Slurm reads #SBATCH lines itself, and a line break would start a line of its own.
        for name in ("name", "folder", "partition", "account", "time"):
            value = getattr(self, name)
            if value and not _ATOM.fullmatch(value):
                raise ValueError(f"{name}={value!r}: goes into an #SBATCH line; use letters, digits and _.,:@/+-=")
        if self.time and not _TIME.fullmatch(self.time):
            raise ValueError(
                f"time={self.time!r}: is no time of Slurm; write minutes, MM:SS, HH:MM:SS, D-HH, D-HH:MM, D-HH:MM:SS "
                "or UNLIMITED"
            )
        for option in self.sbatch:
            if not _OPTION.fullmatch(option):
                raise ValueError(f"sbatch={option!r}: goes into an #SBATCH line; write KEY=VALUE or KEY, no blanks")
            key = option.removeprefix("--").partition("=")[0]
            if remedy := {**_OWN, **(_OWN_OF_GPUS if self.gpus_per_node else {})}.get(key):
                raise ValueError(f"--sbatch {option}: the script sets {key} itself: {remedy}")
        self._check_signal()
        for module in self.modules:
            if not _ATOM.fullmatch(module):
                raise ValueError(f"module={module!r}: use letters, digits and _.,:@/+-=")
        for name in self.environment:
            if not _NAME.fullmatch(name):
                raise ValueError(f"environment={name!r}: is no name of a variable; use letters, digits and _")
        for word in (
            *self.command,
            *self.preflight,
            self.workdir,
            self.container,
            self.mounts,
            *self.environment.values(),
        ):
            if "\n" in word or "\0" in word:
                raise ValueError(f"command={word!r}: holds a line break; take it out")

    def _check_signal(self) -> None:
        given = f"--signal-before {self.signal_s}"
        if not 1 <= self.signal_s <= _MOST_SIGNAL_S:
            raise ValueError(f"{given}: must be from 1 to {_MOST_SIGNAL_S} seconds, as sbatch takes them")
        limit = _seconds(self.time)
        if limit is not None and self.signal_s >= limit:
            raise ValueError(
                f"{given}: must be less than the {limit} s of --time {self.time}, or the job is told to stop as it "
                f"starts; give a longer --time, or --signal-before of fewer seconds ({SIGNAL_S} if not given)"
            )


def _seconds(time: str) -> int | None:
    """Of a time limit; None where there is none, as 0 means to Slurm."""
    days, dash, rest = time.rpartition("-")
    if not time or not re.fullmatch(r"[\d:-]+", time) or time == "-1":
        return None
    parts = [int(part) for part in rest.split(":")]
    units = [3600, 60, 1] if dash or len(parts) == 3 else [60, 1]
    seconds = int(days or 0) * 86400 + sum(part * unit for part, unit in zip(parts, units, strict=False))
    return seconds or None


def script(job: Job) -> str:
    """The whole text."""
    return "\n".join([*_header(job), "", *_body(job)]) + "\n"


def local_script(workdir: str, command: list[str], environment: Mapping[str, str] | None = None) -> str:
    """The script of a run on this machine."""
    variables = [_ONE_THREAD, *(f"export {name}={shlex.quote(value)}" for name, value in (environment or {}).items())]
    return (
        "\n".join(
            ["#!/bin/bash", "set -euo pipefail", f"cd {shlex.quote(workdir)}", *variables, "exec " + _lines(command)]
        )
        + "\n"
    )


def _header(job: Job) -> list[str]:
    log = f"{job.folder}/logs/%j.log"
    options = {
        "job-name": job.name,
        "nodes": job.nodes,
        "ntasks-per-node": job.tasks_per_node,
        "output": log,
        "partition": job.partition,
        "account": job.account,
        "time": job.time,
        "segment": job.segment,
    }
    lines = [f"#SBATCH --{name}={value}" for name, value in options.items() if value]
    if job.gpus_per_node:
        lines += [
            f"#SBATCH --gpus-per-node={job.gpus_per_node}",
            "#SBATCH --exclusive",
            "#SBATCH --mem=0              # all of a host's memory; some clusters give little by default",
        ]
    lines += [f"#SBATCH --{option.removeprefix('--')}" for option in job.sbatch]
    return [
        "#!/bin/bash -l" if job.modules else "#!/bin/bash",
        *lines,
        "#SBATCH --open-mode=append   # a requeued job goes on in the same log",
        "#SBATCH --requeue            # a lost node restarts the job, which resumes from its last checkpoint",
        f"#SBATCH --signal=TERM@{job.signal_s}    # so long before the time limit: finish the step, write a checkpoint",
        f"# Slurm makes no folders: {shlex.quote(str(PurePath(log).parent))} must be there before sbatch.",
    ]


def _body(job: Job) -> list[str]:
    container = ["--container-image", job.container, "--container-workdir", job.workdir] if job.container else []
    container += ["--container-mounts", job.mounts] if job.container and job.mounts else []
    once = ["srun", "--ntasks-per-node=1", f"--ntasks={job.nodes}"]
    ranks = shlex.join(["srun", "--kill-on-bad-exit=1", "--label", *_cpus(job), *container, *_node_logs(job)])
    ranks = ranks.replace(_SHARE, '"$cpus"')
    return [
        # Before set -u: the scripts behind module read variables that are not set.
        *([f"module load {shlex.join(job.modules)} || exit 1"] if job.modules else []),
        "set -euo pipefail",
        f"cd {shlex.quote(job.workdir)}",
        "",
        "# Rendezvous: the first node of the job, a port that other jobs of the same node do not use.",
        'nodes=$(scontrol show hostnames "$SLURM_JOB_NODELIST")',
        "first=${nodes%%$'\\n'*}",
        "# The address that Slurm itself reaches the node at; node names need not be host names.",
        'address=$(scontrol show node "$first" | grep -o "NodeAddr=[^ ]*")',
        'export MASTER_ADDR="${address#NodeAddr=}"',
        "export MASTER_PORT=$((20000 + SLURM_JOB_ID % 10000))",
        f"{_ONE_THREAD} PYTHONUNBUFFERED=1",
        *(f"export {name}={shlex.quote(value)}" for name, value in job.environment.items()),
        *([f"export RANK_0_LOG={shlex.quote(job.folder)}/logs/$SLURM_JOB_ID-rank0.log"] if job.gpus_per_node else []),
        'echo "job $SLURM_JOB_ID, restart ${SLURM_RESTART_COUNT:-0}, on $SLURM_JOB_NODELIST"',
        "",
        "# A lost node is nobody's fault, however often; a job that gets no further from one checkpoint has another",
        "# trouble. Every start notes the newest checkpoint: so many starts in a row from the same one are enough.",
        f"starts={shlex.quote(job.folder)}/logs/$SLURM_JOB_ID.starts",
        f"from=$(cat {shlex.quote(job.folder)}/checkpoint/latest* 2>/dev/null || echo none)",
        'echo "$from" >> "$starts"',
        """same=$(tac "$starts" | awk -v from="$from" '$0 != from { exit } { n++ } END { print n + 0 }')""",
        f'if [ "$same" -gt {job.starts} ]; then',
        f'  echo "{job.starts} starts from the same checkpoint ($from) and none newer: giving up"',
        "  exit 1",
        "fi",
        "",
        *_preflight(job, [*once, *container]),
        *_share_of_cpus(job),
        "# One process a rank. Slurm's variables in torch's names; exec, so that SIGTERM reaches the rank itself.",
        "# A rank that fails ends all the others at once.",
        "status=0",
        ranks + " bash -c '",
        "  export RANK=$SLURM_PROCID WORLD_SIZE=$SLURM_NTASKS LOCAL_RANK=$SLURM_LOCALID",
        "  export LOCAL_WORLD_SIZE=${SLURM_NTASKS_PER_NODE:-1}",
        *_rank_lines(job),
        "' rank " + _lines(job.command) + " || status=$?",
        "",
        "# Ranks notice a lost node long before Slurm does. Where a node no longer answers, start again elsewhere.",
        "# Asked without the container, which may take longer to come than a node to answer.",
        f'if [ "$status" -ne 0 ] && ! timeout 60 {shlex.join(once)} true; then',
        '  echo "a node of $SLURM_JOB_NODELIST no longer answers: requeueing"',
        '  scontrol requeue "$SLURM_JOB_ID"',
        "fi",
        'exit "$status"',
    ]


_SHARE = "@cpus@"  # stands for the shell's word while the others are quoted


def _cpus(job: Job) -> list[str]:
    """Of srun: it does not take --cpus-per-task from sbatch, and on an exclusive host gives a rank one core. Where
    ranks bind themselves, Slurm must not have given them cores of another NUMA node."""
    if not job.cpus_per_task and not job.gpus_per_node:
        return []
    binds = ["--cpu-bind=none"] if job.numa and job.gpus_per_node else []
    return ["--cpus-per-task", str(job.cpus_per_task or _SHARE), *binds]


def _share_of_cpus(job: Job) -> list[str]:
    if job.cpus_per_task or not job.gpus_per_node:
        return []
    return [
        "# An equal share of the host's cores for each rank: srun alone would give it one.",
        f"cpus=$((SLURM_CPUS_ON_NODE / {job.tasks_per_node}))",
        "",
    ]


def _node_logs(job: Job) -> list[str]:
    """A thousand ranks in one file are read by nobody: a GPU job has a log a node, lines labelled with the rank."""
    return ["--output", f"{job.folder}/logs/%j-%N.log", "--open-mode=append"] if job.gpus_per_node else []


# In bash -c '..': no single quotes. nvidia-smi writes a domain of eight digits, sysfs one of four.
_NUMA = """\
  bind=""
  if bus=$(nvidia-smi --id="$LOCAL_RANK" --query-gpu=pci.bus_id --format=csv,noheader 2>/dev/null) &&
     command -v numactl >/dev/null; then
    bus=${bus:4} node=$(cat "/sys/bus/pci/devices/${bus,,}/numa_node")
    if [ "$node" -ge 0 ]; then bind="numactl --cpunodebind=$node --preferred=$node"; fi
  elif [ "$LOCAL_RANK" = 0 ]; then
    echo "$(hostname): nvidia-smi or numactl is missing here: ranks are not bound to NUMA nodes" >&2
  fi"""


def _rank_lines(job: Job) -> list[str]:
    """What a rank's shell does before it becomes the rank."""
    if not job.gpus_per_node:
        return ['  exec "$@"']
    lines = [_NUMA] if job.numa else ['  bind=""']
    # tee outlives the SIGTERM that ends the run, or the last lines would be lost.
    return [
        *lines,
        '  if [ "$RANK" = 0 ]; then',
        '    exec > >(trap "" TERM; exec tee -a "$RANK_0_LOG") 2>&1',
        "  fi",
        '  exec $bind "$@"',
    ]


def _preflight(job: Job, once: list[str]) -> list[str]:
    if not job.preflight:
        return []
    return [
        "# Pre-flight on every node: better one line now than a hang in an hour. There is time for an image to come.",
        "# The label is the host's number; the doctor's lines have its name.",
        f"timeout --kill-after=30 {_PREFLIGHT_S} {shlex.join([once[0], '--label', *once[1:], *job.preflight])} || {{",
        f'  echo "pre-flight: a node failed or took over {_PREFLIGHT_S} s; see above"',
        "  exit 1",
        "}",
        "",
    ]


def _lines(words: list[str]) -> str:
    """Quoted words, a flag and its values a line."""
    text = ""
    for word in words:
        text += (" \\\n  " if word.startswith("--") else " " if text else "") + shlex.quote(word)
    return text
