"""Worlds of real processes over gloo for tests: started once, fed many functions, ended for certain.

    with ProcessWorld(4) as world:
        results = world.run(function, argument)      # function(ctx, argument) on every rank; ctx.rank,
        ctx.group(2)

The parent hosts the store, so any rank may be killed. Every wait of the parent has a deadline."""

from __future__ import annotations

import contextlib
import datetime
import multiprocessing
import os
import signal
import time
import traceback
from typing import Any

import torch
import torch.distributed as dist

from hybrid_ep.local_ranks import LocalRank, LocalRanks

_START_S = 120.0
GROUP_SIZES = (1, 2, 3, 4, 6)


class RankError(AssertionError):
    """A function failed on a rank; carries that rank's traceback."""


class Context:
    """What a function finds on its rank. `kept` survives from one run to the next."""

    def __init__(self, rank: int, size: int):
        self.rank, self.size, self.kept = rank, size, {}
        self._groups = {n: dist.new_group(list(range(n))) for n in GROUP_SIZES if n < size}

    def group(self, size: int):
        """The group of the first `size` ranks."""
        return dist.group.WORLD if size == self.size else self._groups[size]


def _main(job: LocalRank, port: int) -> None:
    rank, size, pipe = job.rank, job.num_ranks, job.pipe
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    limit = datetime.timedelta(seconds=_START_S)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=limit)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=limit)
    ctx = Context(rank, size)
    pipe.send(("ready", None))
    with contextlib.suppress(EOFError, OSError):
        while (job := pipe.recv()) is not None:
            function, arguments, options = job
            try:
                pipe.send(("ok", function(ctx, *arguments, **options)))
            except BaseException as error:
                pipe.send(("error", (error_of(error), traceback.format_exc())))
    os._exit(0)  # no collective farewell: peers may be dead


def error_of(error: BaseException) -> dict[str, Any]:
    """An exception as plain data, with its public attributes."""
    facts = {k: v for k, v in vars(error).items() if isinstance(v, (int, float, str, tuple))}
    for name in ("site", "role", "rank", "peer", "node", "peer_node", "expected", "seen", "waited_s"):
        if hasattr(error, name):
            facts.setdefault(name, getattr(error, name))
    return {"type": type(error).__name__, "message": str(error), **facts}


class ProcessWorld:
    def __init__(self, size: int):
        self.size = size
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch", "torch.distributed", "hybrid_ep.buffer", "hybrid_ep.functional"])
        self._store = dist.TCPStore(
            "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=datetime.timedelta(seconds=_START_S)
        )
        self._ranks = LocalRanks(context, size, _main, (self._store.port,), duplex=True)
        self._pipes, self.processes = self._ranks.pipes, self._ranks.processes
        self.collect(range(size), _START_S)

    def start(self, function, *arguments, ranks=None, **options) -> range:
        ranks = range(self.size) if ranks is None else ranks
        for rank in ranks:
            self._pipes[rank].send((function, arguments, options))
        return ranks

    def collect(self, ranks, timeout_s: float = 60.0, return_errors: bool = False) -> list[Any]:
        """Results by rank; with return_errors a dict of facts where a rank raised."""
        ends, results, errors = time.monotonic() + timeout_s, [], []
        for rank in ranks:
            if not self._pipes[rank].poll(max(0.0, ends - time.monotonic())):
                self.close()
                raise TimeoutError(f"rank {rank} of {self.size} did not answer within {timeout_s} s")
            try:
                what, value = self._pipes[rank].recv()
            except EOFError:
                what, value = "error", ({"type": "Died", "message": "the process ended"}, "the process ended")
            if what == "error":
                errors.append(f"rank {rank}: {value[1]}")
                value = value[0]
            results.append(value)
        if errors and not return_errors:
            raise RankError("\n".join(errors))
        return results

    def run(self, function, *arguments, ranks=None, timeout_s: float = 60.0, return_errors: bool = False, **options):
        return self.collect(self.start(function, *arguments, ranks=ranks, **options), timeout_s, return_errors)

    def signal(self, rank: int, number: int) -> None:
        os.kill(self.processes[rank].pid, number)

    def close(self) -> None:
        for pipe in self._pipes:
            with contextlib.suppress(OSError):
                pipe.send(None)
        for process in self.processes:
            process.join(timeout=2.0)
        self._ranks.kill()

    def __enter__(self) -> ProcessWorld:
        return self

    def __exit__(self, *_) -> None:
        self.close()
