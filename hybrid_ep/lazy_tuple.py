"""A tuple some of whose elements are made when they are first read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any


class Later:
    """An element that is still to be made."""

    __slots__ = ("_make", "_made")

    def __init__(self, make: Callable[[], Any]):
        self._make: Callable[[], Any] | None = make
        self._made: Any = None

    def get(self) -> Any:
        if self._make is not None:
            self._made = self._make()
            self._make = None
        return self._made

    @classmethod
    def several(cls, count: int, make: Callable[[], tuple]) -> list[Later]:
        """The elements of make()'s result, which is made once, with the first of them that is read."""
        together = cls(make)
        return [cls(lambda i=i: together.get()[i]) for i in range(count)]


def _now(element: Any) -> Any:
    return element.get() if type(element) is Later else element


def _as_plain(name: str) -> Callable:
    return lambda self, *arguments: getattr(tuple(self), name)(*arguments)


class LazyTuple(tuple):
    """Given elements, of which those that are Later stand for what they make. To its readers it is the plain tuple of
    those; what they slice off it, add to it or copy of it is one."""

    __slots__ = ()

    def __getitem__(self, at: Any) -> Any:
        found = super().__getitem__(at)
        return tuple(map(_now, found)) if isinstance(at, slice) else _now(found)

    def __iter__(self) -> Iterator[Any]:
        return map(_now, super().__iter__())

    def __radd__(self, other: Any) -> Any:
        return other + tuple(self)

    # All that tuple would else do with the elements as they lie there.
    __add__, __mul__, __rmul__ = _as_plain("__add__"), _as_plain("__mul__"), _as_plain("__rmul__")
    __contains__, index, count = _as_plain("__contains__"), _as_plain("index"), _as_plain("count")
    __eq__, __ne__, __hash__ = _as_plain("__eq__"), _as_plain("__ne__"), _as_plain("__hash__")
    __lt__, __le__, __gt__, __ge__ = map(_as_plain, ("__lt__", "__le__", "__gt__", "__ge__"))
    __repr__ = _as_plain("__repr__")

    def __reduce_ex__(self, protocol: Any) -> Any:
        return tuple, (tuple(self),)

    def given(self) -> list[Any]:
        """The elements that were there from the start; makes none."""
        return [element for element in super().__iter__() if type(element) is not Later]
