"""Runs the script of a run's folder, through sbatch or here, and ends it well when it is asked to.

SIGINT, SIGTERM or SIGHUP lets the ranks finish the step they are in and write a checkpoint; a second one ends them at
once.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hybrid_ep import local_ranks

from .stop_signals import STOP_SIGNALS, StopRequests
from .verdict import EXIT_NOT_LEARNED, failed

_STOP_S = {signal.SIGINT: 60.0, signal.SIGTERM: 900.0}  # for a step and its checkpoint: on CPUs, on GPUs


class _Asked(KeyboardInterrupt):
    """SIGTERM or SIGHUP: as Ctrl-C, but for the exit code."""

    def __init__(self, number: signal.Signals) -> None:
        super().__init__(number.name)
        self.number = number


def program_of(script: Path) -> str:
    """What starts it."""
    return "sbatch" if script.name == "job.sbatch" else "bash"


def run_script(script: Path) -> int:
    """Exit code of sbatch, or of the run itself; of one that trained to the end and did not learn, EXIT_NOT_LEARNED; of
    one that a signal has ended 128 + its number, but for SIGINT, which is KeyboardInterrupt."""
    try:
        with _asking():
            return _run(script)
    except _Asked as asked:
        _say(f"ended by {asked.number.name}")
        return 128 + asked.number


@contextlib.contextmanager
def _asking() -> Iterator[None]:
    """Within, SIGINT, SIGTERM and SIGHUP raise KeyboardInterrupt. What the caller ignores stays ignored (nohup)."""
    requests = StopRequests()

    def ask(number: int, _frame: Any) -> None:
        if requests.is_new(number):
            raise KeyboardInterrupt if number == signal.SIGINT else _Asked(signal.Signals(number))

    before = {n: signal.signal(n, ask) for n in STOP_SIGNALS if signal.getsignal(n) != signal.SIG_IGN}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _say(text: str) -> None:
    with contextlib.suppress(OSError):  # of a terminal that has gone
        print(f"hybrid-ep launch: {text}", file=sys.stderr, flush=True)


def _run(script: Path) -> int:
    program = program_of(script)
    print(
        f"{script}: " + (f"submitting; logs in {script.parent / 'logs'}" if program == "sbatch" else "starting"),
        flush=True,
    )
    try:
        # A session of its own: Ctrl-C comes here alone, and this decides what it means.
        started = subprocess.Popen([program, str(script)], start_new_session=True, preexec_fn=_die_with_parent)
    except FileNotFoundError as error:
        message = f"{error.filename} is not on PATH; the script is {script}, start it where there is one"
        raise ValueError(message) from None
    try:
        code = started.wait()
        if code or program == "sbatch":  # which has submitted the run: a verdict there is of an earlier one
            return code
        said = script.parent / "verdict.txt"
        return EXIT_NOT_LEARNED if said.is_file() and failed(said.read_text()) else code
    except KeyboardInterrupt:
        try:
            if program != "sbatch" and _listen(started.pid):
                _say("stopping, after its step if it is in one; Ctrl-C once more ends it at once")
                _stop(started, _stop_signal(script.parent))
        finally:
            # Ranks first, each in a session of its own: without torchrun nobody would end them.
            for pid in (*_children(started.pid), started.pid):
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(pid, signal.SIGKILL)
            started.wait()
        raise


def _stop_signal(folder: Path) -> signal.Signals:
    """What a rank finishes its step for: Megatron's exit_signal_handler knows SIGTERM; ranks of CPU recipes, whose run
    has a config.yaml, end as if all was done after SIGINT."""
    return signal.SIGINT if (folder / "config.yaml").is_file() else signal.SIGTERM


def _stop(started: subprocess.Popen[bytes], how: signal.Signals) -> None:
    """Asks the ranks to finish their step; returns when all has ended, or will not. torchrun is not asked: it would
    give them less time, and print a traceback."""
    told: set[int] = set()
    deadline = time.monotonic() + _STOP_S[how]
    while started.poll() is None and time.monotonic() < deadline:
        for pid in _children(started.pid) - told:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, how)
            told.add(pid)
        time.sleep(0.1)


def _listen(parent: int) -> bool:
    """Whether there are ranks and all of them have a handler for what asks them to stop. Before that a signal would end
    them in the middle of an import, and torchrun would report that on two screens. They may yet have no step to finish:
    ranks of CPU recipes have the handler early, and end at once until they train."""
    ranks = [pid for pid in _children(parent) if _is_rank(pid)]
    return bool(ranks) and all(_catches(pid, signal.SIGTERM) for pid in ranks)


def _is_rank(pid: int) -> bool:
    """By the variables that torchrun gives its ranks: other children of its, a resource tracker say, lack them."""
    with contextlib.suppress(OSError):
        return b"\0RANK=" in b"\0" + Path(f"/proc/{pid}/environ").read_bytes()
    return False


def _catches(pid: int, number: signal.Signals) -> bool:
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("SigCgt:"):
                return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    return False


def _children(parent: int) -> set[int]:
    found = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended since
            if int(stat.read_bytes().rpartition(b")")[2].split()[1]) == parent:  # names need not be text
                found.add(int(stat.parent.name))
    return found


def _die_with_parent() -> None:
    """In the child, before exec: it ends with this process, whatever ends that."""
    local_ranks.die_with_parent(signal.SIGTERM)
