"""Tensors in memory that other layers use meanwhile, kept for the backward by their places; all other tensors are
kept as whoever stands outside asks: a non-reentrant checkpoint, which keeps none, or what moves them to the host."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

_Hooks = tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]


class _Outside(NamedTuple):
    """What the hooks outside have made of a tensor, and how they make it a tensor again."""

    unpack: Callable[[Any], torch.Tensor]
    packed: Any


class SavedPlaces(torch.autograd.graph.saved_tensors_hooks):
    """Hooks for what is saved in its context; torch itself asks the innermost hooks alone.

    place_of(tensor): its place, or None for a tensor that lies elsewhere. at(place): the tensor there, in the
    backward."""

    def __init__(self, place_of: Callable[[torch.Tensor], Any], at: Callable[[Any], torch.Tensor]) -> None:
        self._place_of, self._at = place_of, at
        self._outside: _Hooks | None = None
        super().__init__(self._pack, self._unpack)

    def __enter__(self) -> None:
        self._outside = torch._C._autograd._top_saved_tensors_default_hooks(False)
        super().__enter__()

    def _pack(self, tensor: torch.Tensor) -> Any:
        place = self._place_of(tensor)
        if place is not None:
            return (place,)
        if self._outside is None:
            return tensor
        pack, unpack = self._outside
        return _Outside(unpack, pack(tensor))

    def _unpack(self, packed: Any) -> torch.Tensor:
        if isinstance(packed, torch.Tensor):
            return packed
        if isinstance(packed, _Outside):
            return packed.unpack(packed.packed)
        return self._at(packed[0])
