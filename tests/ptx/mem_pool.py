"""torch.cuda.MemPool on the PTX machine, as far as hybrid_ep uses it: blocks cut from segments that an allocator of the
user's makes, or cudaMalloc. A block is reused on the stream that its segment was made for and on no other, at once
where only that stream used it, else when the events of the others have come (c10/cuda/CUDACachingAllocator.cpp)."""

from __future__ import annotations

import contextlib
import ctypes
import threading

import torch

_GRAIN, _SMALL, _LARGE, _UNIT, _BETWEEN = 512, 1 << 20, 10 << 20, 2 << 20, 20 << 20
_GARBAGE = 0xCB


class PluggableAllocator:
    """torch.cuda.memory.CUDAPluggableAllocator; both functions are called by address."""

    def __init__(self, path: str, allocate: str, free: str):
        functions = ctypes.CDLL(path)
        self.allocate_at = ctypes.cast(getattr(functions, allocate), ctypes.c_void_p).value
        self.free = getattr(functions, free)
        self.free.argtypes = (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p)
        self.free.restype = None

    def allocator(self) -> PluggableAllocator:
        return self


class Segment:
    """Memory of one stream. gaps: bytes by address, none of which touch."""

    def __init__(self, at: int, size: int, stream: int, small: bool):
        self.at, self.size, self.stream, self.small = at, size, stream, small
        self.gaps = {at: size}

    @property
    def is_idle(self) -> bool:
        return self.gaps.get(self.at) == self.size

    def cut(self, at: int, size: int) -> int:
        """The size of the block that begins the gap at `at`: all of it, where the rest is not worth keeping."""
        room = self.gaps.pop(at)
        if room - size <= (_GRAIN if self.small else _SMALL):
            return room
        self.gaps[at + size] = room - size
        return size

    def give_back(self, at: int, size: int) -> None:
        size += self.gaps.pop(at + size, 0)
        before = next((b for b, n in self.gaps.items() if b + n == at), None)
        if before is not None:
            self.gaps[before] += size
        else:
            self.gaps[at] = size


class Blocks:
    """What a MemPool and the tensors of it share."""

    def __init__(self, runtime, allocator: PluggableAllocator | None):
        self.runtime, self.allocator = runtime, allocator
        self.lock = threading.RLock()
        self.segments: list[Segment] = []
        self.lent: dict[int, tuple[Segment, int]] = {}
        self.pending: list[tuple[int, list[int]]] = []  # address, events of the streams that still use it
        self.is_closed = self.serves = False

    def allocate(self, num_bytes: int, stream: int) -> int:
        size = -(-num_bytes // _GRAIN) * _GRAIN
        small = size <= _SMALL
        with self.lock:
            self._poll()
            mine = [s for s in self.segments if s.stream == stream and s.small == small]
            fitting = [(room, at, s) for s in mine for at, room in s.gaps.items() if room >= size]
            if not fitting:
                fitting = [self._grow(size, stream, small)]
            _, at, segment = min(fitting, key=lambda f: f[:2])
            taken = segment.cut(at, size)
            self.lent[at] = segment, taken
        self.runtime.call("cudaMemsetAsync", at, _GARBAGE, num_bytes, stream)
        return at

    def _grow(self, size: int, stream: int, small: bool) -> tuple[int, int, Segment]:
        whole = _UNIT if small else _BETWEEN if size < _LARGE else -(-size // _UNIT) * _UNIT
        if self.allocator is None:
            at = self.runtime.made("cudaMalloc", whole)
        else:
            at = self.runtime.allocate_by(self.allocator.allocate_at, whole, stream)
        if not at:
            raise RuntimeError("hybrid_ep: no room in the arena (as the C++ exception says)")
        self.segments.append(Segment(at, whole, stream, small))
        return whole, at, self.segments[-1]

    def free(self, at: int, users: set[int]) -> None:
        with self.lock:
            events = []
            for user in users:
                events.append(self.runtime.made("cudaEventCreateWithFlags", 2))
                self.runtime.status("cudaEventRecord", events[-1], user)
            self.pending.append((at, events))
            self._poll()

    def snapshot(self) -> list[dict]:
        """torch's, as far as it says which blocks are free."""
        with self.lock:
            self._poll()
            return [{"blocks": [{"state": "inactive" if s.is_idle else "active_allocated"}]} for s in self.segments]

    def close(self) -> None:
        with self.lock:
            self.is_closed = True
            self._poll()

    def _poll(self) -> None:
        still = []
        for at, events in self.pending:
            if all(self.runtime.ready("cudaEventQuery", e) for e in events):
                for e in events:
                    self.runtime.status("cudaEventDestroy", e)
                segment, size = self.lent.pop(at)
                segment.give_back(at, size)
            else:
                still.append((at, events))
        self.pending = still
        if self.is_closed:
            for s in [s for s in self.segments if s.is_idle]:
                self.segments.remove(s)
                if self.allocator is None:
                    self.runtime.status("cudaFree", s.at)
                else:
                    self.allocator.free(s.at, s.size, 0, s.stream)


def classes(library, memory):
    """(torch.cuda.MemPool, torch.cuda.use_mem_pool) of the machine."""

    class MemPool:
        def __init__(self, allocator: PluggableAllocator | None = None):
            self.blocks = Blocks(library, allocator)

        def snapshot(self):
            return self.blocks.snapshot()

        def __del__(self):
            assert not torch.cuda.is_current_stream_capturing(), "torch ends the process here"
            self.blocks.close()

    @contextlib.contextmanager
    def use_mem_pool(pool: MemPool, device=None):
        if pool.blocks.serves:
            raise RuntimeError("beginAllocateToPool: already recording to mempool_id")
        before, memory.chosen.pool = memory.chosen.pool, pool.blocks  # the innermost, as in torch 2.15
        pool.blocks.serves = True
        try:
            if torch.cuda.is_current_stream_capturing():
                torch.cuda.CUDAGraph.get_currently_capturing_graph().retained.append(pool)
            yield
        finally:
            pool.blocks.serves, memory.chosen.pool = False, before

    return MemPool, use_mem_pool
