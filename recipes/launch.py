"""Runs the ranks of a job on this machine: forks them, relays what they say, ends all with any of them.

The launcher imports torch and Megatron once and then forks, which on two cores saves most of a minute over
four processes that each import them. It owns the terminal; ranks speak through pipes. One rank that fails
ends the job and its error is shown once. SIGINT, SIGTERM or SIGHUP asks the ranks to stop after the step they
are in; a second signal ends them at once. Ranks die with the launcher, whatever kills it.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

from hybrid_ep.local_ranks import Ended, LocalRank, LocalRanks

from .stop_signals import STOP_SIGNALS, StopRequests

OnEvent = Callable[[int, str, dict[str, Any]], None]  # (rank, kind, fields)
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

    def __init__(self, job: LocalRank):
        self.rank, self.num_ranks, self.store = job.rank, job.num_ranks, job.store
        self._pipe = job.pipe
        self._stop = False

    def emit(self, kind: str, fields: dict[str, Any]) -> None:
        """Sends an event to the launcher."""
        self._pipe.send((kind, fields))

    def stop_requested(self) -> bool:
        """Whether the launcher asked this rank to finish its step and leave."""
        return self._stop

    def request_stop(self, *_: Any) -> None:
        """Signal handler of SIGTERM."""
        self._stop = True


def run_ranks(
    num_ranks: int, main: Callable[[RankContext], None], on_event: OnEvent, stop_grace_s: float = 60.0
) -> signal.Signals | None:
    """Runs `main` on every rank until all have ended; returns the signal that stopped the job, or None.

    on_event(rank, kind, fields) is called in this process for every event. RankFailed if a rank raised, was
    killed, or did not stop within `stop_grace_s` seconds of a request.
    """
    job = _Job(on_event, stop_grace_s)
    # Until a rank has its own handlers it must not run the launcher's: signals wait.
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    before = {number: signal.signal(number, job.on_signal) for number in STOP_SIGNALS}
    try:
        sys.stdout.flush()
        sys.stderr.flush()
        try:
            job.ranks = LocalRanks(multiprocessing.get_context("fork"), num_ranks, _rank_main, (main,))
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
        job.supervise()
    finally:
        if job.ranks is not None:
            job.ranks.kill()
        for number, handler in before.items():
            signal.signal(number, handler)
    return job.signal


def _rank_main(job: LocalRank, main: Callable[[RankContext], None]) -> None:
    context = RankContext(job)
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
        self.ranks: LocalRanks | None = None
        self.signal: signal.Signals | None = None
        self._on_event, self._stop_grace_s = on_event, stop_grace_s
        self._requests, self._num_signals = StopRequests(), 0
        self._errors: list[tuple[float, int, dict[str, Any]]] = []

    def on_signal(self, number: int, _frame: Any) -> None:
        """Only notes the signal; `supervise` acts on it."""
        self._num_signals += self._requests.is_new(number)
        self.signal = self.signal or signal.Signals(number)

    def supervise(self) -> None:
        assert self.ranks is not None
        forwarded, deadline = 0, float("inf")
        while self.ranks.alive():
            self._relay(_POLL_S)
            if self._failed():
                settled = time.monotonic() + _SETTLE_S
                while (left := settled - time.monotonic()) > 0 and self.ranks.open:
                    self._relay(left)
                break
            if self.signal is not None and self._num_signals > forwarded:
                forwarded = self._num_signals
                if forwarded > 1:
                    message = "ended at once by a second signal; no checkpoint was written"
                    raise RankFailed(message, self.signal)
                deadline = time.monotonic() + self._stop_grace_s
                self._on_event(-1, "stopping", {"signal": self.signal.name})
                for process in self.ranks.processes:
                    process.terminate()
            if time.monotonic() > deadline:
                message = f"ranks {self.ranks.alive()} did not stop within {self._stop_grace_s:g} s and were killed"
                raise RankFailed(message, self.signal)
        while self._relay(0):
            pass
        if self._failed():
            raise RankFailed(self._cause())

    def _exit_codes(self) -> dict[int, int]:
        """Of the ranks that have ended other than well."""
        assert self.ranks is not None
        return {rank: p.exitcode for rank, p in enumerate(self.ranks.processes) if p.exitcode}

    def _failed(self) -> bool:
        return bool(self._errors) or bool(self._exit_codes())

    def _relay(self, timeout_s: float) -> bool:
        """Waits for events or the end of a rank, and passes on one event a rank; whether there was any."""
        assert self.ranks is not None
        news = self.ranks.receive(timeout_s)
        for rank, message in news:
            if message is Ended:
                continue
            kind, fields = message
            if kind == "error":
                self._errors.append((fields["when"], rank, fields))
            else:
                self._on_event(rank, kind, fields)
        return bool(news)

    def _cause(self) -> str:
        # A rank that was killed reports nothing, and what the others report follows from it.
        codes = self._exit_codes()
        for rank, code in codes.items():
            if code < 0:
                return f"rank {rank} was killed by {signal.Signals(-code).name}; the others were ended"
        if self._errors:
            _, rank, fields = min(self._errors, key=lambda error: error[0])
            return f"rank {rank}: {fields['what']}\n\n{fields['traceback']}"
        return f"ranks ended without a report, exit codes {codes}"
