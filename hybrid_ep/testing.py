"""A whole group in one process: every rank is a thread, through the same public API as real processes.

For example::

    world = VirtualWorld(num_nodes=2, num_local_ranks=2)
    outputs = world.run(lambda rank, group: train(HybridEPBuffer(group, ..., timeout_s=30)))
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from hybrid_ep import _core, env
from hybrid_ep.runtime import devices

_names = itertools.count()
_PATIENCE_S = 5.0  # of kernels that try whether they run at once


class PrivateSegments:
    """Segments that the threads of one process find by name, with no operating-system object behind them."""

    def __init__(self, make: Callable[[int], _core.Segment] = _core.Segment.private) -> None:
        self._lock = threading.Lock()
        self._by_name: dict[str, _core.Segment] = {}
        self._make = make
        self._on_device: PrivateSegments | None = None

    def on_device(self) -> PrivateSegments:
        """The same for memory of the current GPU."""
        with self._lock:
            if self._on_device is None:  # not `or`: one without segments is false
                self._on_device = PrivateSegments(lambda n: _core.cuda.DeviceMemory.create("none", n).segment())
            return self._on_device

    def create(self, name: str, num_bytes: int) -> _core.Segment:
        segment = self._make(num_bytes)
        with self._lock:
            self._by_name[name] = segment
        return segment

    def attach(self, name: str, num_bytes: int) -> _core.Segment:
        with self._lock:
            return self._by_name[name]

    def unlink(self, name: str) -> None:
        with self._lock:
            self._by_name.pop(name, None)

    def __len__(self) -> int:
        return len(self._by_name)


class VirtualGroup:
    """What a process group is to hybrid_ep, for one thread."""

    def __init__(self, rank: int, size: int, name: str, store: dist.Store, segments: PrivateSegments) -> None:
        self._rank, self._size = rank, size
        self.group_name, self.store, self.segments = name, store, segments

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size


class VirtualWorld:
    """num_nodes x num_local_ranks ranks. Give HybridEPBuffer
    num_of_hybrid_ep_ranks_per_nvlink_domain=num_local_ranks, or use buffers().

    On a GPU ranks share the current device, and each needs a stream of its own whose kernels run beside those of the
    others. `streams` holds them, by rank, once on_device() or buffers() with a CUDA executor has made and tried them;
    run() then runs each rank on its own. Before that, `streams` is None."""

    def __init__(self, num_nodes: int, num_local_ranks: int):
        self.streams: list[torch.cuda.Stream] | None = None
        self._handles: list[int] = []  # of all streams that were made
        self.num_nodes, self.num_local_ranks = num_nodes, num_local_ranks
        self.size = num_nodes * num_local_ranks
        self.segments, store, name = PrivateSegments(), dist.HashStore(), f"virtual{next(_names)}"
        self.groups = [VirtualGroup(r, self.size, name, store, self.segments) for r in range(self.size)]

    def on_device(self) -> list[torch.cuda.Stream]:
        """The ranks' streams, made and tried by the first call; before anything else of these ranks is on the device:
        streams that follow each other have different hardware queues, as far as there are some. ValueError where their
        kernels do not run at once: ranks would wait for each other until their deadlines."""
        if self.streams is None:
            self.streams = self.more_streams()
        return self.streams

    def more_streams(self) -> list[torch.cuda.Stream]:
        """One more for each rank (operations of two buffers at once need two), tried with all that the world has made
        before, which must be idle."""
        device = devices.current()
        devices.enter(device)
        streams = [torch.cuda.Stream(device) for _ in range(self.size)]
        handles = [*self._handles, *(s.cuda_stream for s in streams)]
        distinct = len(set(handles))
        if distinct < len(handles) or (self.size > 1 and not _core.cuda.run_at_once(handles, _PATIENCE_S)):
            found = "do not" if distinct == len(handles) else f"torch has {distinct} streams for {len(handles)}"
            raise ValueError(
                f"num_nodes={self.num_nodes}, num_local_ranks={self.num_local_ranks}: kernels of {self.size} ranks "
                f"on {device} must run at once, and {found}; set CUDA_DEVICE_MAX_CONNECTIONS=32 before CUDA starts "
                "(8 where it is not set), take fewer ranks (at most 32), and leave the device to them"
            )
        self._handles = handles
        return streams

    def run(self, work: Callable[[int, VirtualGroup], Any], return_errors: bool = False) -> list[Any]:
        """[work(rank, group)] of every rank, all at once. An exception of a rank is raised, that of the
        lowest rank if there are several, or stands in the list with return_errors. On a device, each on its stream."""
        results: list[Any] = [None] * self.size
        streams = self.streams

        def body(rank: int) -> None:
            try:
                with contextlib.nullcontext() if streams is None else torch.cuda.stream(streams[rank]):
                    results[rank] = work(rank, self.groups[rank])
            except BaseException as error:  # handed to the caller below
                results[rank] = error

        threads = [threading.Thread(target=body, args=(r,), name=f"rank{r}", daemon=True) for r in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        errors = [r for r in results if isinstance(r, BaseException)]
        if errors and not return_errors:
            raise errors[0]
        return results

    def poison(self, buffers: list[Any]) -> None:
        """0xFF into everything registered that holds data, not flags: a row that nobody wrote shows. While no
        operation is in flight."""
        for buffer in buffers:
            buffer.poison()

    def buffers(self, hidden_dim: int, max_tokens: int, num_local_experts: int, **options: Any) -> list[Any]:
        """A HybridEPBuffer of every rank."""
        from hybrid_ep.buffer import HybridEPBuffer

        executor = options.get("executor") or env.get("HYBRID_EP_EXECUTOR")
        if isinstance(executor, str) and devices.is_cuda(executor):
            self.on_device()
        return self.run(
            lambda rank, group: HybridEPBuffer(
                group,
                hidden_dim,
                max_tokens,
                num_local_experts,
                num_of_hybrid_ep_ranks_per_nvlink_domain=self.num_local_ranks,
                **options,
            )
        )
