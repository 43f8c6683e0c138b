"""Objects by name, and handles by tensor: what a compiled graph can carry of them.

A graph of torch.compile holds tensors, numbers and strings. A buffer therefore has a name, the same at every run of a
program; a handle travels as an int64 tensor of one element that owns it: when the tensor's storage goes, so does the
handle, wherever the graph, autograd or the caller kept it in between."""

from __future__ import annotations

import itertools
import weakref
from typing import Any, NamedTuple, TypeVar

import torch

_numbers = itertools.count()
_named: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()


_Self = TypeVar("_Self", bound="Named")


class Named:
    """Gives every object of a class a compile_name, under which `named` finds it while it lives."""

    compile_name: str

    def __new__(cls: type[_Self], *_args: Any, **_keywords: Any) -> _Self:
        self = super().__new__(cls)
        self.compile_name = f"{cls.__name__} {next(_numbers)}"
        _named[self.compile_name] = self
        return self


def named(name: str) -> Any:
    """The living object of that name. ValueError when it is gone."""
    found = _named.get(name)
    if found is None:
        raise ValueError(
            f"a compiled graph asks for {name!r}, which was garbage collected; keep the buffer while the "
            "graph is in use"
        )
    return found


class _Owner(bytearray):
    """The memory of a tensor that stands for an object: eight bytes with its number, and the object."""

    kept: Any


_owners: weakref.WeakValueDictionary[int, _Owner] = weakref.WeakValueDictionary()


def as_tensor(thing: Any) -> torch.Tensor:
    """An int64 tensor [1] on the CPU that keeps `thing` alive as long as its storage lives; views share it."""
    number = next(_numbers)
    owner = _Owner(number.to_bytes(8, "little"))
    owner.kept = thing
    _owners[number] = owner
    return torch.frombuffer(owner, dtype=torch.int64)  # whose storage holds a reference to owner


def from_tensor(tensor: torch.Tensor) -> Any:
    """What as_tensor was given. ValueError for another tensor, or a copy that outlived the original."""
    owner = _owners.get(int(tensor)) if tensor.numel() == 1 and tensor.dtype == torch.int64 else None
    if owner is None:
        raise ValueError(
            f"{tensor!r} stands for no handle that is alive: a copy of a handle's tensor (saved-tensor "
            "hooks that offload, clone, deepcopy) does not keep the handle; keep what dispatch returned"
        )
    return owner.kept


def num_alive() -> int:
    """Objects that tensors own, for tests of leaks."""
    return len(_owners)


class Handle(NamedTuple):
    """What a dispatch inside a compiled function returns as its handle: opaque, but for the numbers that shapes need.

    token: owns the handle (as_tensor). num_tokens, num_experts: T and E. permute: which of the two verbs made it.
    overflow: int32 [1], 1 when pairs were dropped here."""

    token: torch.Tensor
    num_tokens: int
    num_experts: int
    permute: bool
    overflow: torch.Tensor


def eager_handle(handle: Any) -> Any:
    """The buffer's own handle; also for one that a compiled function returned."""
    return from_tensor(handle.token) if isinstance(handle, Handle) else handle
