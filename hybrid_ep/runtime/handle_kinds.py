"""The two kinds of handle tuples, by the verb that returns them; handle.py says what their elements are."""

from __future__ import annotations

from typing import NamedTuple


class HandleKind(NamedTuple):
    verb: str
    length: int
    config: int  # the element that carries the plan


DISPATCHED = HandleKind("dispatch", 7, 6)
PERMUTED = HandleKind("dispatch_with_permute", 11, 9)
OVERFLOW_FLAG = 10  # the element of PERMUTED
