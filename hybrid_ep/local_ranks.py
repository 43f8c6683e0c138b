"""The ranks of a job as processes of this host: started from one process, a pipe to each, ended together.

`hybrid_ep.cli.launch` starts command lines instead; it shares a rank's variables and its tie to the parent."""

from __future__ import annotations

import atexit
import ctypes
import gc
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import connection
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from multiprocessing.context import ForkContext, ForkServerContext

    import torch.distributed as dist

LOOPBACK = "127.0.0.1"
_PR_SET_PDEATHSIG = 1
_POLL_S = 0.2


class Ended:
    """In place of a rank's message: its pipe is closed, or its process is gone, and nothing more comes."""


class LocalRank:
    """What a rank knows of its job. pipe: to the process that started it."""

    def __init__(self, rank: int, num_ranks: int, pipe: connection.Connection, listener: socket.socket):
        self.rank, self.num_ranks, self.pipe = rank, num_ranks, pipe
        self._listener = listener

    @property
    def port(self) -> int:
        """Of the job's store."""
        return self._listener.getsockname()[1]

    def store(self, timeout_s: float) -> dist.TCPStore:
        """The job's rendezvous on loopback, served by rank 0 on a port that nobody else can take. Once a rank."""
        import torch.distributed as dist

        serving = self.rank == 0
        return dist.TCPStore(
            LOOPBACK,
            self.port,
            self.num_ranks,
            is_master=serving,
            timeout=timedelta(seconds=timeout_s),
            wait_for_workers=False,
            master_listen_fd=self._listener.detach() if serving else None,
        )


class LocalRanks:
    """num_ranks processes of `context`, each of which runs main(LocalRank, *arguments) and dies with this process.

    * `processes`, `pipes`: by rank. `open`: the ranks of whom more messages may come.
    * duplex: whether this process can send a rank something, too.

    Leave every use through `kill`."""

    def __init__(
        self,
        context: ForkContext | ForkServerContext,
        num_ranks: int,
        main: Callable[..., None],
        arguments: tuple[Any, ...] = (),
        duplex: bool = False,
    ):
        self.processes: list[Any] = []
        self.pipes: list[connection.Connection] = []
        self.open: set[int] = set()
        parent = os.getpid() if context.get_start_method() == "fork" else None  # else the fork server is
        with socket.create_server((LOOPBACK, 0), backlog=max(16, num_ranks)) as listener:
            try:
                for rank in range(num_ranks):
                    ours, theirs = context.Pipe(duplex=duplex)
                    self.pipes.append(ours)
                    job = LocalRank(rank, num_ranks, theirs, listener)
                    process = context.Process(
                        target=_main, args=(main, job, arguments, parent), name=f"rank {rank}", daemon=True
                    )
                    process.start()
                    theirs.close()
                    self.processes.append(process)
                    self.open.add(rank)
            except BaseException:
                self.kill()
                raise

    def alive(self) -> list[int]:
        return [rank for rank, process in enumerate(self.processes) if process.is_alive()]

    def receive(self, timeout_s: float) -> list[tuple[int, Any]]:
        """(rank, message) of every open rank that has one, after the first of them or `timeout_s` seconds; `Ended` is
        the last message of a rank."""
        end = time.monotonic() + timeout_s
        while True:
            left = end - time.monotonic()
            ready = connection.wait([self.pipes[rank] for rank in self.open], max(0.0, min(left, _POLL_S)))
            # A child of a rank may hold the rank's pipe open, and what multiprocessing waits for, behind its end.
            gone = self.open.difference(self.alive())
            if news := [(r, self._message(r)) for r in sorted(self.open) if self.pipes[r] in ready or r in gone]:
                return news
            if left <= 0 or not self.open:
                return []

    def _message(self, rank: int) -> Any:
        """Of a rank that has one, or is gone."""
        try:
            if self.pipes[rank].poll():
                return self.pipes[rank].recv()
        except (EOFError, OSError):
            pass
        self.open.discard(rank)
        return Ended

    def kill(self) -> None:
        """Ends what still runs; returns when nothing does."""
        for process in self.processes:
            if process.is_alive():
                process.kill()
        for process in self.processes:
            process.join()
        for pipe in self.pipes:
            pipe.close()


def variables(rank: int, num_ranks: int, port: int) -> dict[str, str]:
    """torchrun's variables, for a rank of a job on this host."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": LOOPBACK,
        "MASTER_PORT": str(port),
    }


def die_with_parent(number: signal.Signals, parent: int | None = None) -> None:
    """In a child: the signal that it gets when its parent ends, whatever ends it. parent: the process id to expect; a
    child whose parent has ended already ends here."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, number)
    if parent is not None and os.getppid() != parent:
        os._exit(1)


def end_groups_first() -> None:
    """In a rank, before it joins process groups: what is left of them ends before the interpreter does.

    A thread of gloo's may still hold the last reference to a tensor of a collective that has returned, and takes the
    GIL to drop it. Once the interpreter finalizes, CPython ends a thread that asks for the GIL, in the middle of
    torch's C++, and that aborts a process which had done all its work. A group that nobody refers to has no threads."""
    import torch.distributed.nn.functional  # noqa: F401 - imported later, its default arguments are this job's group

    atexit.unregister(_drop_garbage)
    atexit.register(_drop_garbage)


def _drop_garbage() -> None:
    for name in ("last_exc", "last_type", "last_value", "last_traceback"):  # whose frames hold groups, too
        if hasattr(sys, name):
            delattr(sys, name)
    gc.collect()


def _main(main: Callable[..., None], job: LocalRank, arguments: tuple[Any, ...], parent: int | None) -> None:
    die_with_parent(signal.SIGKILL, parent)
    main(job, *arguments)
