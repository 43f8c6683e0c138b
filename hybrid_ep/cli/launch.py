"""Local ranks for a subcommand: run the same command line once per rank, under one deadline.

Each rank is a plain process with torchrun's variables (RANK, WORLD_SIZE, MASTER_ADDR, ...), so a subcommand has a
single code path: RANK set means "I am a rank", whoever started me. The launcher owns the rendezvous store and lets
the kernel choose its port, so no port can be taken in between. Ranks print through it: a stdout that takes no more
(`| head -1`, a full disk) is its error alone, and it ends the ranks before one of them can miss another."""

from __future__ import annotations

import faulthandler
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from hybrid_ep import local_ranks
from hybrid_ep.cli import EXIT_FAILED, outputs
from hybrid_ep.cli.progress import say

# Once one rank has failed the others wait for it in vain; they get this long to report by themselves.
FAILURE_GRACE_S = 5.0
_TRACEBACK_S = 0.3  # for one rank to write its traceback, so that two do not interleave
_POLL_S = 0.05
_STDOUT = 1


def is_rank() -> bool:
    """True in a process that a launcher (this one, torchrun, or a Slurm script) started as a rank."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def local_rank() -> int:
    """Of a rank: its index on this host; 0 where the launcher does not say."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def explain_on_deadline() -> None:
    """In a rank: when the launcher's deadline passes, write the tracebacks of all threads to stderr."""
    if sys.__stderr__ is not None:  # a process without standard streams has nowhere to write
        faulthandler.register(signal.SIGUSR1, file=sys.__stderr__, all_threads=True)


def run_ranks(argv: Sequence[str], num_ranks: int, timeout_s: float, threads: int | None = None) -> int:
    """Run `hybrid-ep ARGV` as `num_ranks` local processes and return the first non-zero exit code, or 0.

    threads: of torch in each rank, an equal share of this process's cores if not given. Ranks that are alive after
    `timeout_s` seconds are ended and named on stderr; the code is then 3. OSError when stdout takes no more;
    BrokenPipeError where its reader has gone.
    """
    say(f"starting {outputs.count(num_ranks, 'rank')}; each imports torch first")
    from torch.distributed import TCPStore

    threads = threads or max(1, len(os.sched_getaffinity(0)) // num_ranks)
    store = TCPStore(local_ranks.LOOPBACK, 0, is_master=True, wait_for_workers=False)
    ranks: list[subprocess.Popen] = []
    relay, code = _Relay(), EXIT_FAILED
    try:
        for rank in range(num_ranks):
            environment = _rank_environment(rank, num_ranks, store.port, threads)
            command = [sys.executable, "-m", "hybrid_ep", *argv]
            ranks.append(subprocess.Popen(command, env=environment, stdout=relay.writer, preexec_fn=_die_with_parent))
        relay.start()
        code = _wait(ranks, relay, timeout_s)
    finally:
        _end(ranks)
        relay.close(FAILURE_GRACE_S if code else None)
    if relay.error is not None:
        raise relay.error
    return code


class _Relay(threading.Thread):
    """Hands what ranks print on to stdout, in a thread: a reader who takes its time delays no deadline.

    `writer`: the ranks' stdout. `error`: why stdout takes no more; what comes after it is read and dropped."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self._reader, self.writer = os.pipe()
        self._ended = threading.Event()
        self.error: OSError | None = None

    def run(self) -> None:
        while True:
            ended = self._ended.is_set()  # asked first: what a rank wrote before its end is in the pipe by then
            if select.select([self._reader], [], [], 0 if ended else _POLL_S)[0]:
                self._write(os.read(self._reader, 1 << 16))
            elif ended:
                return

    def _write(self, text: bytes) -> None:
        try:
            while text and self.error is None:
                text = text[os.write(_STDOUT, text) :]
        except OSError as error:
            self.error = error

    def close(self, wait_s: float | None) -> None:
        """Once the ranks have ended: returns when all that they printed is handed on, or after wait_s seconds."""
        self._ended.set()
        if self.ident is not None:
            self.join(wait_s)
        if not self.is_alive():  # else it still waits for its reader
            os.close(self._reader)
            os.close(self.writer)


def _rank_environment(rank: int, num_ranks: int, port: int, threads: int) -> dict[str, str]:
    environment = os.environ | local_ranks.variables(rank, num_ranks, port)
    environment.update(
        TORCHELASTIC_USE_AGENT_STORE="True",  # the launcher serves the store, every rank is a client
        OMP_NUM_THREADS=str(threads),
    )
    environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
    # The ranks must import the very package that launched them, also from a source tree.
    package_parent = str(Path(__file__).resolve().parents[2])
    inherited = environment.get("PYTHONPATH")
    environment["PYTHONPATH"] = os.pathsep.join([package_parent, *([inherited] if inherited else [])])
    return environment


def _die_with_parent() -> None:
    """In the child, before exec: a launcher that is killed takes its ranks with it. A terminal sends Ctrl-C to every
    process of the job; the launcher alone answers and ends the ranks, or each would print a traceback."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    local_ranks.die_with_parent(signal.SIGTERM)


def _wait(ranks: list[subprocess.Popen], relay: _Relay, timeout_s: float) -> int:
    deadline = time.monotonic() + timeout_s
    first_failure = 0
    while any(rank.poll() is None for rank in ranks) and relay.error is None:
        failures = [code for code in (rank.poll() for rank in ranks) if code]
        if failures and not first_failure:
            first_failure = failures[0]
            deadline = min(deadline, time.monotonic() + FAILURE_GRACE_S)
        if time.monotonic() > deadline:
            if not first_failure:
                _explain({index: rank for index, rank in enumerate(ranks) if rank.poll() is None}, timeout_s)
            return _exit_code(first_failure or EXIT_FAILED)
        time.sleep(_POLL_S)
    return _exit_code(next((rank.returncode for rank in ranks if rank.returncode), 0))


def _explain(alive: dict[int, subprocess.Popen], timeout_s: float) -> None:
    """On stderr: the ranks that the deadline found, the tracebacks of those that can write one, and which cannot."""
    started = {index: rank for index, rank in alive.items() if _catches(rank.pid, signal.SIGUSR1)}
    said = f"hybrid-ep: ranks {[*alive]} still run after {timeout_s:g} s"
    where = "where each of them is:"
    if importing := [index for index in alive if index not in started]:
        who, where = (f"ranks {importing}", "where the others are:") if started else ("all of them", "")
        said += f"; {who} still imported torch and had not begun: allow more time"
    print(f"{said}; {where}" if started else said, file=sys.stderr, flush=True)
    for rank in started.values():
        rank.send_signal(signal.SIGUSR1)
        time.sleep(_TRACEBACK_S)


def _catches(pid: int, number: int) -> bool:
    """Whether a process has a handler for a signal, which would end it otherwise. False where it has ended."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
    caught = next((line.split()[1] for line in status.splitlines() if line.startswith("SigCgt:")), "0")
    return bool(int(caught, 16) >> (number - 1) & 1)


def _exit_code(code: int) -> int:
    return EXIT_FAILED if code < 0 else code  # negative: ended by a signal


def _end(ranks: list[subprocess.Popen]) -> None:
    """End every rank that is still alive, politely first. All stand still before one is ended, so that none reports
    the end of another."""
    alive = [rank for rank in ranks if rank.poll() is None]
    for number in (signal.SIGSTOP, signal.SIGTERM, signal.SIGCONT):
        for rank in alive:
            rank.send_signal(number)
    for rank in ranks:
        try:
            rank.wait(timeout=3)
        except subprocess.TimeoutExpired:
            rank.kill()
            rank.wait()
