"""Loads of any scale as integers: what makes a plan independent of the unit, and equal on every rank.

A layer is divided by its largest load and multiplied by a fixed number, so that a layer in tokens, in shares of 1e-30
or near the largest double gives the same integers. Exactly so if the unit changes by a power of two; by any other
factor, up to a last bit of loads that are no simple fraction of the largest. The fixed number divides by 1 to 16, so
that loads in simple proportions, and their shares, stay equal where they are. A load below 2^-48 of the largest one
(256 experts) is nothing beside it.
"""

from __future__ import annotations

from typing import Any

import numpy as np

_SUM_BITS = 56  # sums of a layer fit 63 bits even four times over
_DIVISIBLE = 720_720  # by 1 to 16


def checked(load: Any) -> np.ndarray:
    """float64 [L, E] of finite numbers >= 0. ValueError names the shape, or the first entry that is neither."""
    array = np.asarray(load)
    if array.ndim != 2 or array.dtype.kind not in "iuf" or 0 in array.shape:
        raise ValueError(f"load is {array.dtype} {array.shape}: give numbers [layers, experts]")
    with np.errstate(over="ignore"):  # a long double may be too large for a double
        array = np.ascontiguousarray(array, dtype=np.float64)
    bad = ~(np.isfinite(array) & (array >= 0))
    if bad.any():
        layer, expert = (int(i[0]) for i in bad.nonzero())
        raise ValueError(f"load[{layer}, {expert}] is {float(array[layer, expert])!r}: give finite numbers >= 0, "
                         "counts or averages of counts")
    return array


def normalised(load: np.ndarray) -> np.ndarray:
    """float64 [L, E]: each layer in units of its largest load."""
    largest = load.max(axis=1, keepdims=True)
    return np.divide(load, largest, out=np.zeros_like(load), where=largest > 0)


def integers(load: np.ndarray, sum_bits: int = _SUM_BITS) -> np.ndarray:
    """int64 [L, E], C-contiguous: each layer in a unit of its own, with a sum of at most 2^sum_bits."""
    unit = _DIVISIBLE << (sum_bits - (_DIVISIBLE * load.shape[1] - 1).bit_length())
    return np.rint(normalised(load) * float(unit)).astype(np.int64)


def singles(load: np.ndarray) -> np.ndarray:
    """float32 [L, E]: each layer times a power of two that leaves its sum finite and its small loads most room."""
    exponent = np.frexp(load.max(axis=1, keepdims=True))[1]
    return np.ldexp(load, 126 - load.shape[1].bit_length() - exponent).astype(np.float32)
