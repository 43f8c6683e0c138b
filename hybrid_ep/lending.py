"""Registered memory for what experts put out, which combine then reads where it lies."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import torch

from hybrid_ep import recording

if TYPE_CHECKING:
    from hybrid_ep.runtime.session import Session


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

    def registered(
        self, rows: int, columns: int, dtype: torch.dtype = torch.bfloat16
    ) -> contextlib.AbstractContextManager[bool]:
        """A context for operations that store where they choose, and are to put out [rows, columns]: tensors that torch
        makes in it, in this thread and on the current stream, lie in a GPU's arena as long as that has room.

            with buffer.registered(*shape, dtype) as in_arena:
                rows = torch.nn.functional.grouped_mm(x, weights, offs=ends)  # [rows, columns], and what it needs

        What is large and made first is to be the output. Gives False and changes nothing where the arena has no room
        for it now, for outputs of up to 1 MiB, while a CUDA graph is captured, and on CPUs, whose allocator takes no
        orders: there empty() is for those who can store where they are told. Same bits. While it lasts, other threads'
        calls on this buffer find no room. ValueError as empty()'s."""
        return self._open_session().results.lending(rows, columns, dtype)
