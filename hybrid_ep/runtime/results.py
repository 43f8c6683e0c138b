"""Memory of results: of the buffer's arena, else of this process, where a host's large ones are used again once nothing
refers to them.

PyTorch's CPU allocator is malloc, which takes every large block fresh from the kernel and gives it back: page faults
and zeroing then cost more than the exchange that fills the block. A GPU's caching allocator needs no such help."""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from hybrid_ep import _core
from hybrid_ep.runtime import validation
from hybrid_ep.runtime.device_arena import DeviceArena
from hybrid_ep.runtime.tensors import code_of


@functools.cache
def _nothing(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Whose new_empty reads one argument, where torch.empty reads five, which costs it twice as much again."""
    made = torch.empty(0, dtype=dtype, device=device)
    if type(made) is not torch.Tensor:  # it would be there for every later call of the process
        raise ValueError(
            f"results are memory, and torch makes a {type(made).__name__} now: call outside of such a mode"
        )
    return made


T = TypeVar("T")
_SMALLEST = 1 << 20  # bytes; below, malloc keeps what it has


def size_class(num_bytes: int) -> int:
    """num_bytes rounded up by at most an eighth, so that a result whose rows vary meets its old memory."""
    step = max(1 << max(num_bytes.bit_length() - 4, 0), 64)
    return -(-num_bytes // step) * step


def lent(engine: Any, rows: int, row_bytes: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor | None:
    """[rows, row_bytes of that type], uninitialised, of the engine's arena; None where that has no room. The storage
    refers to the block, which returns when the storage ends; it cannot be resized."""
    if not rows * row_bytes:
        return None
    if _core.exchanges_tensors():
        return engine.lend(rows, row_bytes // dtype.itemsize, code_of(dtype))
    block = engine.take(rows * row_bytes)
    return None if block is None else torch.frombuffer(block, dtype=torch.uint8).view(rows, row_bytes).view(dtype)


class _Block:
    """One storage, kept through its Python object."""

    __slots__ = ("storage",)

    def __init__(self, num_bytes: int):
        self.storage = torch.UntypedStorage(num_bytes, device="cpu")

    @property
    def references(self) -> tuple[int, int]:
        """To the storage: from tensors, views, saved inputs, arrays. To its Python object, which its user shares."""
        return torch._C._storage_Use_Count(self.storage._cdata), sys.getrefcount(self.storage)

    @property
    def is_idle(self) -> bool:
        return self.references == _UNUSED

    @property
    def is_spoilt(self) -> bool:
        """Whether its user freed it or gave it to other processes, of which nothing is known here."""
        return self.storage.nbytes() == 0 or self.storage.is_shared()


_UNUSED = _Block(1).references


class ResultPool:
    """Hands out tensors that are ordinary to their user: views of one resizable storage, freed by dropping them.

    idle_limit: bytes kept for results to come while nobody uses them; 0 keeps nothing. Memory in use is never
    counted against it. device: a GPU's results come from PyTorch's own caching allocator. For any thread: backwards
    take memory while others call the buffer."""

    def __init__(self, idle_limit: int, device: torch.device | None = None):
        self.device = device or torch.device("cpu")
        self.idle_limit = idle_limit if self.device.type == "cpu" else 0
        self._blocks: list[_Block] = []  # the longest unused first
        self._lock = threading.Lock()  # from when a block is found idle until a tensor refers to it

    def empty(self, rows: int, row_bytes: int, dtype: torch.dtype = torch.uint8, flat: bool = False) -> torch.Tensor:
        """[rows, row_bytes of that type], uninitialised, on the pool's device; flat: one dimension."""
        num_bytes, columns = rows * row_bytes, row_bytes // dtype.itemsize
        if num_bytes < _SMALLEST or not self.idle_limit:  # sizes by themselves: torch takes half the time for them
            empty = _nothing(dtype, self.device).new_empty
            return empty(rows * columns) if flat else empty(rows, columns)
        shape, strides = ((rows * columns,), (1,)) if flat else ((rows, columns), (columns, 1))
        with self._lock:
            block = self._take(size_class(num_bytes))
            return torch.empty(0, dtype=dtype, device="cpu").set_(block.storage, 0, shape, strides)

    @property
    def idle_bytes(self) -> int:
        """Bytes kept that no tensor uses."""
        return sum(block.storage.nbytes() for block in self._blocks if block.is_idle)

    def _take(self, num_bytes: int) -> _Block:
        self._trim()
        found = next((i for i, b in enumerate(self._blocks) if b.storage.nbytes() == num_bytes and b.is_idle), None)
        block = _Block(num_bytes) if found is None else self._blocks.pop(found)
        self._blocks.append(block)
        return block

    def _trim(self) -> None:
        """Forgets spoilt blocks, and the oldest idle ones over the limit. What is in use lives on with its tensors."""
        kept, idle = [], 0
        for block in reversed(self._blocks):
            if block.is_spoilt:
                continue
            if block.is_idle:
                idle += block.storage.nbytes()
                if idle > self.idle_limit:
                    continue
            kept.append(block)
        self._blocks = kept[::-1]


class ResultMemory:
    """Of one buffer: its engine's arena, and a pool for what that has no room for. idle_limit: of the pool. streams:
    that a GPU's arena is for."""

    def __init__(self, idle_limit: int, device: torch.device, streams: int = 1):
        self._device, self._streams = device, streams
        self._keep(ResultPool(idle_limit, device))
        self._engine: Any = None
        self._arena: DeviceArena | None = None  # of a GPU

    def use(self, engine: Any, arena_bytes: int) -> None:
        """The arena of this engine, and of no other."""
        self._engine, self._arena = engine, None
        if self._device.type == "cuda" and arena_bytes:
            self._arena = DeviceArena(engine, arena_bytes, self._device, self._streams)

    def part(self) -> None:
        """From the engine and its arena; what was lent stays."""
        self._engine = self._arena = None

    def _keep(self, pool: ResultPool) -> None:
        self.empty = pool.empty  # of what no rank reaches; every call asks it, so it is no method in between

    def close(self) -> None:
        """Keeps nothing any more."""
        self.part()
        self._keep(ResultPool(0))

    def _lent(self, rows: int, row_bytes: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor | None:
        """[rows, row_bytes of that type] of the arena, if there is room."""
        if self._device.type != "cuda":
            return lent(self._engine, rows, row_bytes, dtype)
        made = None if self._arena is None else self._arena.empty(rows, row_bytes)
        return None if made is None else made.view(dtype)

    def dispatched(
        self, rows: int, row_bytes: int, dtype: torch.dtype, scale_bytes: int, weight_columns: int | None, zero: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """Memory for a result: [rows, row_bytes of that type], uint8 [rows, scale_bytes], fp32 [rows, weight_columns]
        or, of None, [rows]; None for a width of 0. Payload and scales are the arena's, where rows land to stay. Where
        it has no room they lie elsewhere, and a copy follows (copied_rows in traffic())."""
        empty = self.empty
        x = self._lent(rows, row_bytes, dtype)
        scales = self._lent(rows, scale_bytes) if scale_bytes and x is not None else None
        if x is None or (scale_bytes and scales is None):
            x = empty(rows, row_bytes, dtype)
            scales = empty(rows, scale_bytes) if scale_bytes else None
        weights = None
        if weight_columns != 0:
            weights = empty(rows, 4 * (weight_columns or 1), torch.float32, weight_columns is None)
        if zero:
            for made in (x, scales, weights):
                if made is not None:
                    made.zero_()
        return x, scales, weights

    def rows(self, rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
        """[rows, columns], of the arena if that has room. ValueError as `row_size`."""
        row_bytes = row_size(rows, columns, dtype)
        made = self._lent(rows, row_bytes, dtype)
        return self.empty(rows, row_bytes, dtype) if made is None else made

    def placing(self, function: Callable[[], T], rows: int, columns: int, dtype: torch.dtype) -> T:
        """function(), whose result torch makes in the arena, where that has room for [rows, columns]. ValueError as
        `row_size`."""
        num_bytes = rows * row_size(rows, columns, dtype)
        return function() if self._arena is None else self._arena.placing(function, num_bytes)


def row_size(rows: int, columns: int, dtype: torch.dtype) -> int:
    """Bytes of a row that combine sums; ValueError for [rows, columns] of that type that are none."""
    validation.integer("rows", rows, 0)
    validation.integer("columns", columns, 1)
    if dtype not in validation.SUMMABLE:
        raise ValueError(f"dtype={dtype!r}: combine sums torch.bfloat16, torch.float16 or torch.float32; give one")
    return columns * dtype.itemsize
