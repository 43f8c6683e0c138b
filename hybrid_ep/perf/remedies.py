"""The values that would do, for errors about sizes that do not divide: `give ep=2 or ep=4`."""

from __future__ import annotations


def divisor(name: str, value: int, whole: int) -> str:
    """The divisors of `whole` nearest to `value`, below and above it."""
    fitting = [n for n in range(1, whole + 1) if whole % n == 0]
    return _give(
        name, max((n for n in fitting if n < value), default=None), min((n for n in fitting if n > value), default=None)
    )


def multiple(name: str, value: int, part: int) -> str:
    """The positive multiples of `part` nearest to `value`, below and above it."""
    below = value // part * part
    return _give(name, below or None, below + part)


def _give(name: str, *values: int | None) -> str:
    return "give " + " or ".join(f"{name}={value}" for value in values if value is not None)
