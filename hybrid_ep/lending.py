"""Registered memory for what experts put out, which combine then reads where it lies."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

import torch

from hybrid_ep import recording

if TYPE_CHECKING:
    from hybrid_ep.runtime.session import Session

T = TypeVar("T")


class LendsMemory:
    """The part of a buffer that lends its arena."""

    def _open_session(self) -> Session:
        raise NotImplementedError

    def empty(self, rows: int, columns: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        """[rows, columns], uninitialised, for what experts put out: in the arena, where combine reads it in place, or,
        where that has no room, an ordinary tensor, of which combine forms partial sums first. Same bits. dtype: bf16,
        fp16 or fp32. ValueError for anything else, and for sizes below 0 rows or 1 column."""
        with recording.unrecorded():
            return self._open_session().results.rows(rows, columns, dtype)

    def registered(self, function: Callable[[], T], rows: int, columns: int, dtype: torch.dtype = torch.bfloat16) -> T:
        """function(), an operation that stores where it chooses and puts out [rows, columns] on a GPU: torch makes its
        result in the arena, where combine reads it in place, if that has room.

            out = buffer.registered(lambda: torch.nn.functional.grouped_mm(x, weights, offs=ends), rows, columns)

        It has to be a function that may be called twice: where it makes another tensor of more than 1 MiB, first or
        besides, for which the arena has no room, it is called again with torch's memory alone. It is called just so for
        results of up to 1 MiB, on a stream that the arena is not for, while a CUDA graph is captured, inside of itself,
        while another thread takes of the arena, and on CPUs, whose allocator takes no orders: there empty() is for
        those who can store where they are told. Same bits. ValueError as empty()'s."""
        return self._open_session().results.placing(function, rows, columns, dtype)
