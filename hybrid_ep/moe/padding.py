"""Groups of rows and the rows between and behind them: padding with real zero rows, clearing of tails.

`offsets` [E] holds the row at which each group ends, as torch's grouped GEMM takes it; group e is the rows
offsets[e-1]:offsets[e] (from 0 for e = 0), rows from offsets[-1] on are the tail. Everything here has shapes that do
not depend on the counts, so nothing synchronises with the host and all of it captures in a CUDA graph.
"""

from __future__ import annotations

from types import ModuleType
from typing import NamedTuple

import torch

from hybrid_ep.moe import checks

# Rows to which the groups of a format must be padded: the scale blocks of mxfp8 lie along the token dimension in the
# weight gradient, rowwise fp8 needs 16-byte rows of the transposed operand. 16-bit and wider formats need nothing:
# the ragged dimension is not the contiguous one.
_ALIGNMENT = {"bf16": 1, "fp16": 1, "fp32": 1, "fp8": 16, "mxfp8": 32}


def row_alignment(format: str) -> int:
    """Rows to which each expert's group must be padded for a grouped GEMM in `format`.

    format: "bf16", "fp16", "fp32" (1), "fp8" with rowwise scales (16) or "mxfp8" (32). ValueError for another."""
    if format not in _ALIGNMENT:
        raise ValueError(f"format={format!r} is unknown; give one of {', '.join(_ALIGNMENT)}")
    return _ALIGNMENT[format]


class PaddedGroups(NamedTuple):
    """rows [N + E * multiple, K]; offsets int32 [E]; row_of int64 [N]: where row i of the input lies now."""

    rows: torch.Tensor
    offsets: torch.Tensor
    row_of: torch.Tensor


def padded_layout(
    offsets: torch.Tensor, num_rows: int, multiple: int, *, empty_only: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """(offsets int32 [E], row_of int64 [num_rows]) of groups padded as pad_groups does, without moving a row."""
    ends = offsets.long()
    counts = torch.diff(ends, prepend=ends.new_zeros(1))
    wanted = torch.div(counts.clamp(min=1) + (multiple - 1), multiple, rounding_mode="floor") * multiple
    if empty_only:
        wanted = torch.where(counts == 0, wanted, counts)
    padded_ends = wanted.cumsum(0)
    row = torch.arange(num_rows, device=offsets.device, dtype=torch.int64)
    group = torch.searchsorted(ends, row, right=True)  # E for a row of the tail
    shift = torch.cat([(padded_ends - wanted) - (ends - counts), (padded_ends - ends)[-1:]])
    return padded_ends.to(torch.int32), row + shift[group]


def pad_groups(rows: torch.Tensor, offsets: torch.Tensor, multiple: int, *, empty_only: bool = False) -> PaddedGroups:
    """Copies groups apart so that each has a positive multiple of `multiple` rows, the new ones zero.

    rows [N, K], offsets int [E]. An empty group gets `multiple` rows: rounding up alone leaves 0 at 0, which is the
    one count that grouped GEMMs get wrong. empty_only: leave the groups that have rows as they are. Zero rows add
    exact zeros to weight gradients and touch no other row: with empty_only no bit of any result changes (a group of
    another length may get another kernel from the BLAS, that is, another order of the same sum). Raising the *counts*
    without real rows hands an expert its neighbour's rows. Tail rows follow behind the groups, as they were.
    The result has N + E * multiple rows whatever the counts. Differentiable in rows. ValueError: multiple < 1, rows or
    offsets of other kinds; on a CPU also offsets that do not ascend or lead beyond the rows."""
    if isinstance(multiple, bool) or not isinstance(multiple, int) or multiple < 1:
        raise ValueError(
            f"multiple={multiple!r} must be an integer of at least 1; row_alignment(format) tells what a format needs"
        )
    if checks.tensor("rows", rows, "[N, K]").dim() != 2:
        raise ValueError(f"rows {tuple(rows.shape)} must be [N, K]")
    checks.tensor("offsets", offsets, "int32 or int64 [E], the row at which each group ends")
    if offsets.dtype not in (torch.int32, torch.int64) or offsets.dim() != 1 or not offsets.numel():
        raise ValueError(
            f"offsets {offsets.dtype} {tuple(offsets.shape)} must be int32 or int64 [E], E >= 1; it holds the row at "
            "which each group ends"
        )
    if offsets.device != rows.device:
        raise ValueError(f"rows are on {rows.device}, offsets on {offsets.device}; move them to one device")
    checks.row_ends(offsets, rows.shape[0], "rows")
    padded_offsets, row_of = padded_layout(offsets, rows.shape[0], multiple, empty_only=empty_only)
    padded = rows.new_zeros(rows.shape[0] + offsets.numel() * multiple, rows.shape[1])
    return PaddedGroups(padded.index_copy(0, row_of, rows), padded_offsets, row_of)


def zero_tail_(rows: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Stores zeros to the rows from offsets[-1] on, in place; stores, since 0 * NaN is NaN. Returns rows."""
    if rows.numel() == 0:
        return rows
    if rows.device.type == "cpu":
        rows[int(offsets[-1]) :].zero_()
    elif (kernels := _kernels(rows)) is not None:
        kernels.zero_tail(rows, offsets)
    else:
        row = torch.arange(rows.shape[0], device=rows.device, dtype=torch.int64)
        rows.masked_fill_((row >= offsets[-1])[:, None], 0)
    return rows


def zero_empty_groups_(per_group: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Stores zeros to per_group[e] of every empty group e, in place. per_group [E, ...]; returns it."""
    if per_group.numel() == 0:
        return per_group
    if per_group.device.type != "cpu" and (kernels := _kernels(per_group)) is not None:
        kernels.zero_empty_groups(per_group, offsets)
        return per_group
    empty = torch.diff(offsets.long(), prepend=offsets.new_zeros(1).long()) == 0
    return per_group.masked_fill_(empty.view(-1, *[1] * (per_group.dim() - 1)), 0)


def _kernels(x: torch.Tensor) -> ModuleType | None:
    """Triton's early-exit kernels where there is a GPU and Triton; they touch only what must become zero."""
    if x.device.type != "cuda" or not x.is_contiguous():
        return None
    try:
        from hybrid_ep.moe import triton_zero
    except ImportError:
        return None  # torch's masked_fill_ gives the same zeros; it reads and writes the whole tensor
    return triton_zero
