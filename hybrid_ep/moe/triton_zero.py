"""Zeros where no row was computed: kernels that return at once for every part that needs nothing.

The grids depend on shapes only, the counts are read on the device: no host synchronisation, CUDA-graph safe. Zeros
are stored, never multiplied: what is there may be NaN.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_BLOCK = 1024


@triton.jit
def _zero_tail_kernel(rows_ptr, offsets_ptr, num_groups, num_columns, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    if row >= tl.load(offsets_ptr + num_groups - 1):
        column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        zeros = tl.zeros((BLOCK,), dtype=rows_ptr.dtype.element_ty)
        tl.store(rows_ptr + row * num_columns + column, zeros, mask=column < num_columns)


@triton.jit
def _zero_empty_groups_kernel(x_ptr, offsets_ptr, group_size, BLOCK: tl.constexpr):
    group = tl.program_id(1).to(tl.int64)
    end = tl.load(offsets_ptr + group)
    start = tl.load(offsets_ptr + group - 1, mask=group > 0, other=0)
    if end == start:
        at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        zeros = tl.zeros((BLOCK,), dtype=x_ptr.dtype.element_ty)
        tl.store(x_ptr + group * group_size + at, zeros, mask=at < group_size)


def zero_tail(rows: torch.Tensor, offsets: torch.Tensor) -> None:
    """rows [N, K] contiguous, offsets int [E]: rows[offsets[-1]:] = 0."""
    num_rows, num_columns = rows.shape
    _zero_tail_kernel[(num_rows, triton.cdiv(num_columns, _BLOCK))](
        rows, offsets, offsets.numel(), num_columns, BLOCK=_BLOCK
    )


def zero_empty_groups(x: torch.Tensor, offsets: torch.Tensor) -> None:
    """x [E, ...] contiguous, offsets int [E]: x[e] = 0 for every e whose group has no row."""
    group_size = x[0].numel()
    _zero_empty_groups_kernel[(triton.cdiv(group_size, _BLOCK), x.shape[0])](x, offsets, group_size, BLOCK=_BLOCK)
