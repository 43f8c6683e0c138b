"""Loads of any scale as integers: what makes a plan independent of the unit, and equal on every rank.

A layer is divided by its largest load and multiplied by a fixed number, so that a layer in tokens, in shares of 1e-30
or near the largest double gives the same integers, and so the same plan:

* exactly, for every load, where the unit changes by a power of two that leaves no load below the normal doubles;
* exactly, for whole numbers up to 100,000 of up to 256 experts, where it changes by any factor. Doubles round such a
  factor's products, by less than the distance of these loads from where the integers change;
* for other loads and factors up to a last bit of single integers, 2^-31 of the largest load. It seldom decides
  anything: only between swaps that are equal to that accuracy, after which plans differ.

EPLB's placement, which is taken where it is lower, is made in float32: there only powers of two are exact.

The fixed number divides by 1 to 16, so that loads in simple proportions, and their shares, stay equal where they are. A
load below 2^-32 of the largest one is nothing beside it.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from hybrid_ep.balance import inputs

_SUM_BITS = 40  # times a million parts still 60 bits
_DIVISIBLE = 720_720  # by 1 to 16
_MOST_DOUBLINGS = 12  # more would let the last bit of doubles decide between integers


def checked(load: Any, shape: tuple[int, int] | None = None, name: str = "load") -> np.ndarray:
    """float64 [L, E] of finite numbers >= 0, of that shape where one is given. ValueError names the shape, or the first
    entry that is neither."""
    array = inputs.array(name, load, "give numbers [layers, experts]")
    if array.ndim != 2 or array.dtype.kind not in "iuf" or 0 in array.shape:
        raise ValueError(f"{name} is {array.dtype} {array.shape}: give numbers [layers, experts]")
    if shape is not None and array.shape != shape:
        raise ValueError(
            f"{name} is {array.dtype} {array.shape}: give {shape}, the layers and experts of this placement"
        )
    with np.errstate(over="ignore"):  # a long double may be too large for a double
        array = np.ascontiguousarray(array, dtype=np.float64)
    bad = ~(np.isfinite(array) & (array >= 0))
    if bad.any():
        raise ValueError(f"{inputs.entry(name, bad, array)}: give finite numbers >= 0, counts or averages of counts")
    return array


def normalised(load: np.ndarray) -> np.ndarray:
    """float64 [L, E]: each layer in units of its largest load."""
    most = load.max(axis=1, keepdims=True)
    return np.divide(load, most, out=np.zeros_like(load), where=most > 0)


def largest(num_experts: int) -> int:
    """What the largest load of a layer becomes: about 2^31.5 up to 256 experts, less with more."""
    return _DIVISIBLE << min(_MOST_DOUBLINGS, _SUM_BITS - (_DIVISIBLE * num_experts - 1).bit_length())


def integers(load: np.ndarray) -> np.ndarray:
    """int64 [L, E], C-contiguous: each layer in a unit of its own, with a sum of at most 2^40."""
    return np.rint(normalised(load) * float(largest(load.shape[1]))).astype(np.int64)


def singles(load: np.ndarray) -> np.ndarray:
    """float32 [L, E]: each layer times a power of two that leaves its sum finite and its small loads most room."""
    exponent = np.frexp(load.max(axis=1, keepdims=True))[1]
    return np.ldexp(load, 126 - load.shape[1].bit_length() - exponent).astype(np.float32)
