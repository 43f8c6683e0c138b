"""What functions of this package ask of their arguments. Every complaint is a ValueError that names the argument, its
value and the remedy; on a GPU the numbers themselves are not read, for that would wait for it."""

from __future__ import annotations

import operator
from typing import Any

import torch


def tensor(name: str, given: Any, wanted: str) -> torch.Tensor:
    if not isinstance(given, torch.Tensor):
        raise ValueError(f"{name} is {type(given).__name__} {given!r:.60}; give a tensor: {wanted}")
    if hasattr(given, "to_local"):  # its shape is that of all ranks together
        raise ValueError(f"{name} is a {type(given).__name__}; give this rank's part, {name}.to_local(): {wanted}")
    return given


def integers(name: str, given: Any, wanted: str) -> tuple[int, ...]:
    """Of the host."""
    try:
        return tuple(operator.index(n) for n in given)
    except TypeError:
        raise ValueError(f"{name}={given!r:.80} must be integers: {wanted}") from None


def row_ends(offsets: torch.Tensor, num_rows: int, rows: str = "x", tail: bool = True) -> list[int] | None:
    """Where groups of rows end, once they are known to lie among the rows; None on a GPU. tail: rows may lie behind."""
    if offsets.device.type != "cpu":
        return None
    ends = offsets.tolist()
    if any(a > b for a, b in zip([0, *ends], [*ends, num_rows], strict=True)) or (not tail and ends[-1] != num_rows):
        raise ValueError(
            f"offsets={ends} must ascend from 0 to {'at most ' if tail else ''}the {num_rows} rows of {rows}"
            f"{'' if tail else ' (tail=False says that none lie behind)'}"
        )
    return ends
