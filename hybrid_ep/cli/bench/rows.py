"""Rows of each --dtype in plain numbers, known without torch: a flag is refused before its import, which takes seconds.

`checks.DTYPES` and `hybrid_ep.payload.quantize.FORMATS` have the same as torch's types; a test compares them."""

from __future__ import annotations

from typing import NamedTuple

from hybrid_ep.cli import UsageError


class Rows(NamedTuple):
    """Bytes of an element as it is dispatched and as combine sums it; elements that share a scale, and its bytes."""

    dispatched: int
    summed: int
    block: int = 0
    scale: int = 0


ROWS = {
    "bf16": Rows(2, 2),
    "fp16": Rows(2, 2),
    "fp32": Rows(4, 4),
    "fp8": Rows(1, 2, block=128, scale=4),
    "mxfp8": Rows(1, 2, block=32, scale=1),
}
_EXACT_INTEGERS = {"bf16": 1 << 8, "fp16": 1 << 11, "fp32": 1 << 24}  # all integers up to here are exact
_MAX_AMPLITUDE = 100  # values fit int8, the generator's dtype


def amplitude(dtype: str, topk: int) -> int:
    """Largest |value| of an input for which every partial sum of `topk` doubled rows stays exact."""
    limit = _EXACT_INTEGERS.get(dtype, _EXACT_INTEGERS["bf16"]) // (2 * topk)
    if limit < 1:
        raise UsageError(f"--topk {topk}: sums of so many rows are not exact in {dtype}; use --dtype fp32")
    return min(limit, _MAX_AMPLITUDE)


def row_bytes(dtype: str, hidden: int) -> tuple[int, int]:
    """(bytes of a dispatched row with its scales, bytes of a summed row)."""
    rows = ROWS[dtype]
    scales = hidden // rows.block * rows.scale if rows.block else 0
    return hidden * rows.dispatched + scales, hidden * rows.summed
