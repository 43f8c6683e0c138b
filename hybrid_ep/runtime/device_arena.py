"""Results of a GPU in a buffer's arena: tensors of torch's own allocator, over registered memory.

The arena is a segment of a torch.cuda.MemPool, so that a result lives as every tensor does. Autograd, views,
recompute and record_stream know it, and its memory is reused in the order of the stream that it was made on, behind the
work of the streams that it was recorded on. The dispatch kernel of the next result runs on that stream; it raises the
flag behind which peers write. So they write where the kernel itself might.

A segment belongs to the stream that asked for it first. Here that is the stream of the first call that takes of it, a
buffer's first dispatch as a rule; calls on others find no room. For several streams the arena is as many segments, in
equal parts, of the first streams that ask. A pool serves one thread at a time: others, and calls within `placing`, find
none.

A CUDA graph writes its results at every replay, so they are of a pool of the graph's own, which takes from the arena
what the capture asks for and which the graph keeps. The pool of all other results, which has the whole arena, goes
before, if nobody holds any, and comes again with what is left."""

from __future__ import annotations

import contextlib
import functools
import re
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch

from hybrid_ep import _core, env, recording
from hybrid_ep.buffer_sizes import LARGE, SMALL, UNIT

_calling = threading.local()  # placed: within `placing`, of whatever arena
T = TypeVar("T")

# Of arenas that are gone. torch ends the process where a pool goes while the current stream is being captured, and
# buffers go when nobody refers to them any more.
_pools_of_the_gone: list[Any] = []


def _let_go() -> None:
    if _pools_of_the_gone and not torch.cuda.is_current_stream_capturing():
        _pools_of_the_gone.clear()


@functools.cache
def _allocator() -> Any:
    """For the life of the process: torch gives memory back through it after the pools are gone."""
    return torch.cuda.memory.CUDAPluggableAllocator(_core.__file__, "hep_pool_allocate", "hep_pool_free")


def _is_full(error: RuntimeError) -> bool:
    """Whether a pool would have to grow: torch 2.9 says so in other words where its segments are expandable."""
    return any(words in str(error) for words in (_core.ArenaBlock.no_room, "doesn't currently support expandable"))


@contextlib.contextmanager
def _whole_segments() -> Iterator[None]:
    """torch's allocator without expandable segments, if it was the environment that asked for them."""
    conf = env.torch_allocator_conf()
    without = re.sub(r"(expandable_segments\s*:\s*)True", r"\1False", conf)
    if without == conf:
        yield
        return
    torch.cuda.memory._set_allocator_settings(without)  # all of them: what is left out falls back to its default
    try:
        yield
    finally:
        torch.cuda.memory._set_allocator_settings(conf)


class DeviceArena:
    """Of one engine, which must not be freed while torch has the arena; its memory may, it is kept mapped."""

    def __init__(self, engine: Any, num_bytes: int, device: torch.device, streams: int = 1):
        self._engine, self._device = engine, device
        self._num_bytes, self._streams = num_bytes, streams  # that the arena is for
        self._pool: Any = None
        self._spans: dict[torch.cuda.Stream, range] = {}  # addresses of its segment, none where torch makes none
        self._before: set[torch.cuda.Stream] = set()  # that had segments, whose work there may not have ended
        self._lock = threading.Lock()  # of its pools
        self._captured: tuple[weakref.ref[Any], Any] | None = None  # the latest graph, and its pool
        _let_go()

    def __del__(self) -> None:
        try:
            _pools_of_the_gone.extend(pool for pool in (self._pool, self._captured and self._captured[1]) if pool)
            self._pool = self._captured = None
            _let_go()
        except Exception:  # while the interpreter ends, modules are gone
            pass

    def empty(self, rows: int, row_bytes: int) -> torch.Tensor | None:
        """uint8 [rows, row_bytes], uninitialised, for work on the current stream; None where there is no room."""
        num_bytes = rows * row_bytes
        if not 0 < num_bytes <= self._num_bytes or getattr(_calling, "placed", False):
            return None
        if not self._lock.acquire(blocking=False):
            return None
        try:
            captured = torch.cuda.is_current_stream_capturing()
            made = (self._of_graph if captured else self._of_stream)(max(num_bytes, SMALL + 1))
            return None if made is None else made[:num_bytes].view(rows, row_bytes)
        finally:
            self._lock.release()

    def _of_stream(self, num_bytes: int) -> torch.Tensor | None:
        """At least so many bytes for the current stream, if the arena is its own."""
        stream = torch.cuda.current_stream(self._device)
        if stream not in self._spans and len(self._spans) < self._streams:
            self._fill(stream)
        return self._made(num_bytes, self._pool) if self._spans.get(stream) else None

    def placing(self, function: Callable[[], T], num_bytes: int) -> T:
        """function(), which makes a tensor of so many bytes, and in which torch's tensors are of the arena, if that has
        room for it; small ones lie beside. Called again without where it finds no room for another large one."""
        if num_bytes <= SMALL or torch.cuda.is_current_stream_capturing():
            return function()
        with recording.unrecorded():  # the block is free again behind it, for what is made next
            fits = self.empty(1, num_bytes) is not None
        if not fits or not self._lock.acquire(blocking=False):
            return function()
        _calling.placed = True
        try:
            if self._pool is None:  # a capture has had it given back meanwhile
                return function()
            with torch.cuda.use_mem_pool(self._pool, self._device):
                _core.cuda.offer_small_memory(True)
                try:
                    return function()
                except RuntimeError as error:
                    if not _is_full(error):
                        raise
                finally:
                    _core.cuda.offer_small_memory(False)
        finally:
            _calling.placed = False
            self._lock.release()
        return function()

    def _of_graph(self, num_bytes: int) -> torch.Tensor | None:
        """At least so many bytes for the capture under way; None where torch does not say which one that is."""
        which = getattr(torch.cuda.CUDAGraph, "get_currently_capturing_graph", None)  # since torch 2.15
        if which is None:
            return None
        graph = which()
        if self._captured is None or self._captured[0]() is not graph:
            if self._captured is not None:
                _pools_of_the_gone.append(self._captured[1])
            self._give_back()
            self._captured = weakref.ref(graph), torch.cuda.MemPool(_allocator().allocator())
        self._engine.offer_arena(True)
        try:
            return self._made(num_bytes, self._captured[1])
        finally:
            self._engine.offer_arena(False)

    def _give_back(self) -> None:
        """Ends the pool whose results nobody holds. On a stream that no capture is of: torch lets none go elsewhere."""
        blocks = [block for segment in self._pool.snapshot() for block in segment["blocks"]] if self._pool else []
        if blocks and all(block["state"] == "inactive" for block in blocks):
            with torch.cuda.stream(torch.cuda.default_stream(self._device)):
                self._pool = None
            self._before.update(stream for stream, span in self._spans.items() if span)
            self._spans = {stream: span for stream, span in self._spans.items() if not span}

    def _fill(self, stream: torch.cuda.Stream) -> None:
        """Makes a segment of the current stream that has its part of the arena, or of what graphs have left. Warns
        where torch makes none, or cuts none."""
        left = self._streams - len(self._spans)
        room = min(self._num_bytes // self._streams, self._engine.arena_gap // left // UNIT * UNIT)
        if room < LARGE:
            return
        for before in self._before - {stream}:  # parts change hands where streams come in another order
            stream.wait_stream(before)
        why = "its allocator takes no piece of that size"
        try:
            try:
                is_filled = self._filled(room, stream)
            except RuntimeError as error:
                if "expandable_segments" not in str(error):
                    raise
                # torch 2.9's pools have none of these. What the arena is then, they cut as they cut any other.
                with _whole_segments():
                    is_filled = self._filled(room, stream, small=True)
            if not is_filled or self._made(SMALL + 1, self._pool) is not None:
                return
        except (RuntimeError, AttributeError, OSError) as error:
            why = str(error)
        self._spans[stream] = range(0)
        serves = any(self._spans.values())
        if not serves:
            self._pool = None
        what, remedy = f"the arena of {self._num_bytes >> 20} MiB", "; HYBRID_EP_ARENA_MIB=0 saves it"
        if serves:
            what, remedy = f"{room >> 20} MiB of {what}, a stream's part,", ""
        warnings.warn(
            f"{what} stays unused, rows that would land there are copied once more: torch's memory pools cannot use it "
            f"({why}; PYTORCH_ALLOC_CONF may say otherwise){remedy}",
            RuntimeWarning,
            stacklevel=2,
        )

    def _filled(self, room: int, stream: torch.cuda.Stream, small: bool = False) -> bool:
        """Whether torch has taken a piece of the arena into the pool, a new one if there is none; small: and memory for
        small tensors. False, and no new pool, where the caller has one, of which torch made it all."""
        lent, is_new = self._engine.arena_bytes_lent, self._pool is None
        if is_new:
            self._pool = torch.cuda.MemPool(_allocator().allocator())
        with torch.cuda.use_mem_pool(self._pool, self._device):
            self._engine.offer_arena(True)
            try:
                begin = torch.empty(room, dtype=torch.uint8, device=self._device).data_ptr()
            finally:
                self._engine.offer_arena(False)
            if small:
                _core.cuda.offer_small_memory(True)
                try:
                    torch.empty(1, dtype=torch.uint8, device=self._device)
                finally:
                    _core.cuda.offer_small_memory(False)
        if self._engine.arena_bytes_lent > lent:
            self._spans[stream] = range(begin, begin + room)
            return True
        if is_new:
            _pools_of_the_gone.append(self._pool)  # older versions of torch let none go inside of another
            self._pool = None
        return False

    def _made(self, num_bytes: int, pool: Any) -> torch.Tensor | None:
        """More than SMALL bytes of a pool; None where it has no room."""
        with torch.cuda.use_mem_pool(pool, self._device):
            try:
                return torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
            except torch.OutOfMemoryError:
                raise
            except RuntimeError as error:
                if not _is_full(error):
                    raise
                return None
