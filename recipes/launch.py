"""Runs the ranks of a job on this machine: forks them, relays what they say, ends all with any of them.

The launcher imports torch and Megatron once and then forks, which on two cores saves most of a minute over
four processes that each import them. It owns the terminal; ranks speak through pipes. One rank that fails
ends the job and its error is shown once. SIGINT, SIGTERM or SIGHUP asks the ranks to stop after the step they
are in; a second signal ends them at once. Ranks die with the launcher, whatever kills it.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import connection
from multiprocessing.context import ForkProcess
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch.distributed as dist

OnEvent = Callable[[int, str, dict[str, Any]], None]  # (rank, kind, fields)
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_PR_SET_PDEATHSIG = 1
_POLL_S = 0.2
_SETTLE_S = 0.5  # after a failure, time for slower reports that may hold the true cause


class RankFailed(RuntimeError):
    """A rank raised or was killed. `str()` says which, and why, with its traceback.

    signal: the signal that stopped the job, where it was stopped rather than broken; else None.
    """

    def __init__(self, message: str, signal: signal.Signals | None = None) -> None:
        super().__init__(message)
        self.signal = signal


class RankContext:
    """What a rank knows of the job: who it is, how to meet the others, how to report, whether to stop."""

    def __init__(self, rank: int, num_ranks: int, listener: socket.socket, pipe: connection.Connection):
        self.rank, self.num_ranks = rank, num_ranks
        self._listener, self._pipe = listener, pipe
        self._stop = False

    def store(self, timeout_s: float) -> dist.TCPStore:
        """The job's rendezvous on loopback, served by rank 0 on a port that nobody else can take."""
        import torch.distributed as dist

        host, port = self._listener.getsockname()
        serving = self.rank == 0
        return dist.TCPStore(
            host,
            port,
            self.num_ranks,
            is_master=serving,
            timeout=timedelta(seconds=timeout_s),
            wait_for_workers=False,
            master_listen_fd=self._listener.detach() if serving else None,
        )

    def emit(self, kind: str, fields: dict[str, Any]) -> None:
        """Sends an event to the launcher."""
        self._pipe.send((kind, fields))

    def stop_requested(self) -> bool:
        """Whether the launcher asked this rank to finish its step and leave."""
        return self._stop

    def request_stop(self, *_: Any) -> None:
        """Signal handler of SIGTERM."""
        self._stop = True


@dataclass
class _Rank:
    index: int
    process: ForkProcess
    pipe: connection.Connection
    open: bool = True


def run_ranks(
    num_ranks: int, main: Callable[[RankContext], None], on_event: OnEvent, stop_grace_s: float = 60.0
) -> signal.Signals | None:
    """Runs `main` on every rank until all have ended; returns the signal that stopped the job, or None.

    on_event(rank, kind, fields) is called in this process for every event. RankFailed if a rank raised, was
    killed, or did not stop within `stop_grace_s` seconds of a request.
    """
    job = _Job(on_event, stop_grace_s)
    listener = socket.create_server(("127.0.0.1", 0), backlog=max(16, num_ranks))
    # Until a rank has its own handlers it must not run the launcher's: signals wait.
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    before = {number: signal.signal(number, job.on_signal) for number in STOP_SIGNALS}
    try:
        try:
            for index in range(num_ranks):
                job.ranks.append(_fork_rank(index, num_ranks, listener, main))
            listener.close()
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
        job.supervise()
    finally:
        job.kill()
        for number, handler in before.items():
            signal.signal(number, handler)
    return job.signal


def _fork_rank(index: int, num_ranks: int, listener: socket.socket, main: Callable[[RankContext], None]) -> _Rank:
    context = multiprocessing.get_context("fork")
    reader, writer = context.Pipe(duplex=False)
    arguments = (RankContext(index, num_ranks, listener, writer), main, os.getpid(), reader)
    process = context.Process(target=_rank_main, args=arguments, name=f"rank {index}", daemon=True)
    sys.stdout.flush()
    sys.stderr.flush()
    process.start()
    writer.close()
    return _Rank(index, process, reader)


def _rank_main(
    context: RankContext, main: Callable[[RankContext], None], launcher_pid: int, reader: connection.Connection
) -> None:
    reader.close()
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != launcher_pid:  # it died before the request above took effect
        os._exit(1)
    # A terminal sends Ctrl-C to every process of the job: the launcher decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, context.request_stop)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    try:
        main(context)
    except BaseException as error:
        # Leave without destructors: process groups would wait for ranks that will never answer.
        fields = {
            "when": time.monotonic(),
            "what": f"{type(error).__name__}: {error}",
            "traceback": traceback.format_exc(),
        }
        try:
            context.emit("error", fields)
        finally:
            os._exit(1)


class _Job:
    """The launcher's view of its ranks."""

    def __init__(self, on_event: OnEvent, stop_grace_s: float) -> None:
        self.ranks: list[_Rank] = []
        self.signal: signal.Signals | None = None
        self._on_event, self._stop_grace_s = on_event, stop_grace_s
        self._num_signals = 0
        self._errors: list[tuple[float, int, dict[str, Any]]] = []

    def on_signal(self, number: int, _frame: Any) -> None:
        """Only notes the signal; `supervise` acts on it."""
        self._num_signals += 1
        self.signal = self.signal or signal.Signals(number)

    def supervise(self) -> None:
        forwarded, deadline = 0, float("inf")
        while any(rank.process.is_alive() for rank in self.ranks):
            self._relay(_POLL_S)
            if self._failed():
                settled = time.monotonic() + _SETTLE_S
                while (left := settled - time.monotonic()) > 0 and any(rank.open for rank in self.ranks):
                    self._relay(left)
                break
            if self.signal is not None and self._num_signals > forwarded:
                forwarded = self._num_signals
                if forwarded > 1:
                    message = "ended at once by a second signal; no checkpoint was written"
                    raise RankFailed(message, self.signal)
                deadline = time.monotonic() + self._stop_grace_s
                self._on_event(-1, "stopping", {"signal": self.signal.name})
                for rank in self.ranks:
                    rank.process.terminate()
            if time.monotonic() > deadline:
                slow = [rank.index for rank in self.ranks if rank.process.is_alive()]
                message = f"ranks {slow} did not stop within {self._stop_grace_s:g} s and were killed"
                raise RankFailed(message, self.signal)
        while any(rank.open and rank.pipe.poll() for rank in self.ranks):
            self._relay(0)
        if self._failed():
            raise RankFailed(self._cause())

    def kill(self) -> None:
        """Ends what still runs; returns when nothing does."""
        for rank in self.ranks:
            if rank.process.is_alive():
                rank.process.kill()
        for rank in self.ranks:
            rank.process.join()

    def _failed(self) -> bool:
        return bool(self._errors) or any(rank.process.exitcode not in (None, 0) for rank in self.ranks)

    def _relay(self, timeout_s: float) -> None:
        """Waits for events or the end of a rank, and passes on one event a rank."""
        open_ranks = [rank for rank in self.ranks if rank.open]
        sentinels = [rank.process.sentinel for rank in self.ranks if rank.process.exitcode is None]
        ready = connection.wait([*(rank.pipe for rank in open_ranks), *sentinels], timeout_s)
        for rank in open_ranks:
            if rank.pipe not in ready:
                continue
            try:
                kind, fields = rank.pipe.recv()
            except (EOFError, OSError):
                rank.open = False
                continue
            if kind == "error":
                self._errors.append((fields["when"], rank.index, fields))
            else:
                self._on_event(rank.index, kind, fields)

    def _cause(self) -> str:
        # A rank that was killed reports nothing, and what the others report follows from it.
        for rank in self.ranks:
            if (code := rank.process.exitcode) is not None and code < 0:
                return f"rank {rank.index} was killed by {signal.Signals(-code).name}; the others were ended"
        if self._errors:
            _, index, fields = min(self._errors, key=lambda error: error[0])
            return f"rank {index}: {fields['what']}\n\n{fields['traceback']}"
        codes = {rank.index: rank.process.exitcode for rank in self.ranks if rank.process.exitcode}
        return f"ranks ended without a report, exit codes {codes}"
