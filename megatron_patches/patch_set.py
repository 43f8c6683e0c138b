"""Changes to other packages, each recorded so that it can be undone exactly, newest first."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Protocol

_ABSENT = object()


@dataclasses.dataclass(frozen=True)
class Patch:
    """One change in force.

    id: the part of this package that asked for it. owner, name: whose attribute was replaced, "sys.modules" and
    "deep_ep" for instance; what is undone by other means has an owner of this package.
    """

    id: str
    owner: str
    name: str
    undo: Callable[[], None] = dataclasses.field(repr=False, compare=False)

    def __str__(self) -> str:
        return f"{self.id}: {self.owner}.{self.name}"


class Replace(Protocol):
    """Replaces `owner.name` by a value and remembers how to undo it."""

    def __call__(self, owner: Any, name: str, value: Any) -> None: ...


class PatchSet:
    """The patches of a process, oldest first."""

    def __init__(self) -> None:
        self._patches: list[Patch] = []

    def __contains__(self, id: str) -> bool:
        """Whether the part with this id has a patch in force."""
        return any(patch.id == id for patch in self._patches)

    def replace(self, id: str, owner: Any, name: str, value: Any) -> None:
        """Set an attribute of a module or class and remember how to put it back."""
        before = owner.__dict__.get(name, _ABSENT)

        def restore() -> None:
            if before is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, before)

        setattr(owner, name, value)
        self.record(id, owner.__name__, name, restore)

    def record(self, id: str, owner: str, name: str, undo: Callable[[], None]) -> None:
        """Remember a change that was made, or is about to be made, by other means."""
        self._patches.append(Patch(id, owner, name, undo))

    def revert(self) -> None:
        """Undo every patch, newest first."""
        while self._patches:
            self._patches.pop().undo()

    def describe(self) -> tuple[str, ...]:
        """One line a patch, oldest first."""
        return tuple(str(patch) for patch in self._patches)
