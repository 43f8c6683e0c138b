"""Outputs of Megatron's own grouped experts (TEGroupedMLP) where combine reads them in place.

Their last product, the module `linear_fc2`, makes the layer's output and stores where it chooses. While it runs, torch
makes tensors in the arena of the buffer that serves the layer (`HybridEPBuffer.registered`). Not in fp8 or fp4: there
the module makes more that stays, quantised weights and rows, which would take the room of outputs."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from megatron_patches import buffers

if TYPE_CHECKING:
    from megatron.core.transformer.moe.moe_layer import MoELayer


class Registered:
    """Hooks of one module, around its forward."""

    def __init__(self) -> None:
        self._entered: list[contextlib.AbstractContextManager[bool]] = []

    def around(self, module: torch.nn.Module) -> None:
        module.register_forward_pre_hook(self._enter)
        module.register_forward_hook(self._leave, always_call=True)  # also of a forward that raises

    def _enter(self, module: torch.nn.Module, inputs: tuple[Any, ...]) -> None:
        context = buffers.registered_rows(inputs[0].shape[0])
        context.__enter__()
        self._entered.append(context)

    def _leave(self, module: torch.nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        if self._entered:  # not where another hook raised before ours
            self._entered.pop().__exit__(None, None, None)


def place(experts: torch.nn.Module | None) -> None:
    """Of a layer's experts that end in one product for all; nothing is done to others."""
    last, config = getattr(experts, "linear_fc2", None), getattr(experts, "config", None)
    quantises = getattr(config, "fp8", None) or getattr(config, "fp4", None)
    if isinstance(last, torch.nn.Module) and not quantises:
        Registered().around(last)


def layer_init(original: Callable[..., None]) -> Callable[..., None]:
    """A replacement for MoELayer.__init__ that does so."""

    @functools.wraps(original)
    def __init__(self: MoELayer, *args: Any, **keywords: Any) -> None:
        original(self, *args, **keywords)
        place(getattr(self, "experts", None))

    return __init__
