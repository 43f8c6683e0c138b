"""Every exception that hybrid_ep raises on purpose. Wrong arguments are plain ValueErrors, on top of
these."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


class HybridEPError(RuntimeError):
    """Base of all errors of the library that are not about an argument."""


class DeadlineError(HybridEPError):
    """A wait passed its deadline. The attributes are the timeout report: who waited, where, for whom and for what.

    site: the waiting place in the role code; rank, node: who waited; peer, peer_node: whom it waited for (-1:
    nobody else); block, role, chunk: which block, warp role and chunk (-1: none); expected, seen: the flag's
    values;
    waited_s: seconds. The buffer that raised it cannot be used again."""

    site = role = ""
    rank = peer = node = peer_node = block = chunk = -1
    expected = seen = 0
    waited_s = 0.0

    def __init__(self, message: str = "", **facts: Any) -> None:
        super().__init__(message)
        for name, value in facts.items():
            setattr(self, name, value)


class BootstrapError(HybridEPError):
    """The ranks could not find each other through the process group's store, or one of them failed to set up.

    missing: the ranks that did not answer in time."""

    def __init__(self, message: str, missing: Iterable[int] = ()) -> None:
        super().__init__(message)
        self.missing = tuple(missing)


class CapacityError(HybridEPError, ValueError):
    """More rows than a buffer or a call admits, with overflow="raise". Raised on every rank alike; the buffer
    remains usable. rows: what each rank needs; capacity: what each rank has (None: any number)."""

    def __init__(self, message: str, rows: Iterable[int] = (), capacity: Iterable[int | None] = ()) -> None:
        super().__init__(message)
        self.rows, self.capacity = tuple(rows), tuple(capacity)


class BufferFailedError(HybridEPError):
    """The buffer was destroyed, an earlier operation on it failed (the message repeats why), or it belongs to the
    process from which this one was forked; make a new one."""


class ReentrantCallError(HybridEPError):
    """Two threads called one buffer at the same time; give each its own buffer."""
