"""The sbatch script of a run: readable, to be kept and edited. Every value that reaches the shell is quoted."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import PurePath

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_ATOM = re.compile(r"[A-Za-z0-9_.,:@%/+\[\]=-]+")


_PREFLIGHT_S = 900


@dataclass(frozen=True)
class Job:
    """command: what every rank runs, unquoted words. folder: absolute, seen by all nodes. gpus_per_node: 0 asks for
    none. preflight: what every node must pass first, or nothing. container: an image for srun's pyxis plugin, or empty.
    environment: variables of every rank. starts: how often in a row the job may start from one and the same checkpoint.
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

    def __post_init__(self) -> None:
        for name in ("nodes", "tasks_per_node", "starts"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: must be 1 or more")
        # Slurm reads #SBATCH lines itself, and a line break would start a line of its own.
        for name in ("name", "folder", "partition", "account", "time"):
            value = getattr(self, name)
            if value and not _ATOM.fullmatch(value):
                raise ValueError(f"{name}={value!r}: goes into an #SBATCH line; use letters, digits and _.,:@/+-=")
        for name in self.environment:
            if not _NAME.fullmatch(name):
                raise ValueError(f"environment={name!r}: is no name of a variable; use letters, digits and _")
        for word in (*self.command, *self.preflight, self.workdir, self.container, *self.environment.values()):
            if "\n" in word or "\0" in word:
                raise ValueError(f"command={word!r}: holds a line break; take it out")


def script(job: Job) -> str:
    """The whole text."""
    return "\n".join([*_header(job), "", *_body(job)]) + "\n"


def local_script(workdir: str, command: list[str], environment: Mapping[str, str] | None = None) -> str:
    """The script of a run on this machine."""
    variables = [f"export {name}={shlex.quote(value)}" for name, value in (environment or {}).items()]
    return "\n".join(["#!/bin/bash", "set -euo pipefail", f"cd {shlex.quote(workdir)}", *variables,
                      "exec " + _lines(command)]) + "\n"


def _header(job: Job) -> list[str]:
    log = f"{job.folder}/logs/%j.log"
    options = {
        "job-name": job.name, "nodes": job.nodes, "ntasks-per-node": job.tasks_per_node, "output": log,
        "partition": job.partition, "account": job.account, "time": job.time,
    }
    lines = [f"#SBATCH --{name}={value}" for name, value in options.items() if value]
    if job.gpus_per_node:
        lines += [f"#SBATCH --gpus-per-node={job.gpus_per_node}", "#SBATCH --exclusive"]
    return [
        "#!/bin/bash", *lines,
        "#SBATCH --open-mode=append   # a requeued job goes on in the same log",
        "#SBATCH --requeue            # a lost node restarts the job, which resumes from its last checkpoint",
        "#SBATCH --signal=TERM@180    # three minutes before the time limit: finish the step, write a checkpoint",
        f"# Slurm makes no folders: {shlex.quote(str(PurePath(log).parent))} must be there before sbatch.",
    ]


def _body(job: Job) -> list[str]:
    container = ["--container-image", job.container] if job.container else []
    once = ["srun", "--ntasks-per-node=1", f"--ntasks={job.nodes}"]
    ranks = shlex.join(["srun", "--kill-on-bad-exit=1", "--label", *container])
    return [
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
        "export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} PYTHONUNBUFFERED=1",
        *(f"export {name}={shlex.quote(value)}" for name, value in job.environment.items()),
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
        "# One process a rank. Slurm's variables in torch's names; exec, so that SIGTERM reaches the rank itself.",
        "# A rank that fails ends all the others at once.",
        "status=0",
        ranks + " bash -c '",
        '  export RANK=$SLURM_PROCID WORLD_SIZE=$SLURM_NTASKS LOCAL_RANK=$SLURM_LOCALID',
        '  export LOCAL_WORLD_SIZE=${SLURM_NTASKS_PER_NODE:-1}',
        '  exec "$@"',
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


def _preflight(job: Job, once: list[str]) -> list[str]:
    if not job.preflight:
        return []
    return [
        "# Pre-flight on every node: better one line now than a hang in an hour. There is time for an image to come.",
        f"timeout --kill-after=30 {_PREFLIGHT_S} {shlex.join([*once, *job.preflight])} || {{",
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
