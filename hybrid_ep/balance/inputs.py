"""What callers give, as numbers: any tensor, array or list, checked entry by entry before anything is planned.

Nothing is rounded, wrapped or taken for another type: what is no integer, or lies outside what a planner can use, is a
ValueError that names the argument, the entry, what stands there and what to give.
"""

from __future__ import annotations

import math
import operator
import sys
from typing import Any

import numpy as np

INT32_MAX = 2**31 - 1


def array(name: str, given: Any, remedy: str) -> np.ndarray:
    """As numpy has it. Tensors lie on any device, require gradients or not, and may be of types that numpy lacks, of
    which floating ones become float64."""
    torch = sys.modules.get("torch")  # whoever has a tensor has imported it
    try:
        if torch is not None and isinstance(given, torch.Tensor):
            tensor = given.detach().cpu()
            return np.asarray((tensor.double() if tensor.is_floating_point() else tensor).numpy())
        return np.asarray(given)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise ValueError(f"{name} is {_described(given)} ({error}): {remedy}") from None


def integers(
    name: str, given: Any, shape: tuple[int, ...], low: int, high: int, remedy: str, dtype: Any = np.int64
) -> np.ndarray:
    """C-contiguous integers of that shape, from low to high; `remedy` says which these are."""
    found = array(name, given, f"give {remedy}")
    if found.dtype.kind not in "iu" or found.shape != shape:
        raise ValueError(f"{name} is {found.dtype} {found.shape}: give integers of shape {shape}, {remedy}")
    if found.size and not low <= int(found.min()) <= int(found.max()) <= high:  # compared before they are narrowed
        raise ValueError(
            f"{entry(name, (found < low) | (found > high), found)}: give {remedy}, integers from {low} to {high}"
        )
    return np.ascontiguousarray(found, dtype=dtype)


def entry(name: str, bad: np.ndarray, values: np.ndarray) -> str:
    """`name[i, j] is value`, of the first entry that is bad."""
    place = np.unravel_index(int(np.argmax(bad)), bad.shape)
    return f"{name}[{', '.join(str(int(i)) for i in place)}] is {values[place].item()!r}"


def integer(name: str, value: Any, low: int, high: int = INT32_MAX, remedy: str = "") -> int:
    """value as int: whatever is an integer, 0-d tensors too, and no bool."""
    if type(value) is int and low <= value <= high:
        return value
    try:
        number = None if isinstance(value, (bool, np.bool_)) or _is_bool(value) else operator.index(value)
    except (TypeError, ValueError, RuntimeError):
        number = None
    if number is None or not low <= number <= high:
        raise ValueError(f"{name} is {value!r}: give an integer from {low} to {high}{', ' if remedy else ''}{remedy}")
    return number


def number(name: str, value: Any, low: float, high: float, remedy: str) -> float:
    """value as it is, once it is known to be a number from low to high. NaN and bools are none."""
    if isinstance(value, (bool, np.bool_)) or _is_bool(value):
        raise ValueError(f"{name} is {value!r}: give {remedy}")
    try:
        inside = low <= float(value) <= high and math.isfinite(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        inside = False
    if not inside or isinstance(value, (str, bytes)):
        raise ValueError(f"{name} is {value!r}: give {remedy}")
    return float(value)


def _is_bool(value: Any) -> bool:
    return str(getattr(value, "dtype", "")) in ("torch.bool", "bool")


def _described(given: Any) -> str:
    dtype, shape = getattr(given, "dtype", None), getattr(given, "shape", None)
    return f"{dtype} {tuple(shape)}" if dtype is not None and shape is not None else f"{type(given).__name__}"
