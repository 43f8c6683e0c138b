"""What layer is used next: as it was when the same layers came one after the other before.

A pipeline's schedule says in what order a rank's layers run, and with virtual stages their numbers do not tell it. But
every step has the order of the step before it, and an evaluation repeats itself with every micro-batch: whoever
has seen it once knows what comes."""

from __future__ import annotations

from collections.abc import Sequence

CONTEXT = 3  # layers in a row, at least, that must have come before: fewer mean little on the way to and fro
LONGEST = 16  # that are looked at
LOOK_BACK = 1 << 12  # layers of the past that are gone through when something else came: under a millisecond
REMEMBERED = 1 << 14  # layers of the past, at least, in a step that does not end


class Order:
    """Of one rank's layers, in the order in which they are acquired. A wrong answer costs time, never a result."""

    def __init__(self) -> None:
        self._past: list[int] = []  # the step before, then this one
        self._began = 0  # this one
        self._next: int | None = 0  # where in the past what is used now has been seen; None: nowhere

    def new_step(self) -> None:
        """Weights are new: the step is over, unless it used nothing."""
        if self._began < len(self._past):
            del self._past[: self._began]
            self._began = len(self._past)
        self._next = 0

    def used(self, layer: int) -> None:
        past, follows = self._past, self._next
        seen = follows is not None and follows < len(past) and past[follows] == layer
        past.append(layer)
        self._next = follows + 1 if seen and follows is not None else self._seen_before()
        if len(past) > 2 * REMEMBERED:
            self._forget(len(past) - REMEMBERED)

    def following(self, most: int) -> Sequence[int]:
        """The layers that came next when it was like now, at most so many; none where it never was."""
        return () if self._next is None else self._past[self._next : self._next + most]

    def _seen_before(self) -> int | None:
        """Behind the longest stretch of the past that ends as the past does now, the latest of those."""
        past = self._past
        best, found = CONTEXT - 1, None
        for end in range(len(past) - 1, max(len(past) - LOOK_BACK, CONTEXT) - 1, -1):
            length = 0
            while length < min(end, LONGEST) and past[end - 1 - length] == past[-1 - length]:
                length += 1
            if length > best:
                best, found = length, end
                if length == LONGEST:
                    break
        return found

    def _forget(self, count: int) -> None:
        del self._past[:count]
        self._began = max(0, self._began - count)
        self._next = self._next - count if self._next is not None and self._next >= count else None
