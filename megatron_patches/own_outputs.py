"""Outputs of Megatron's own grouped experts (TEGroupedMLP) where combine reads them in place.

Their last product, the module `linear_fc2`, makes the layer's output and stores where it chooses, so that it runs by
`HybridEPBuffer.registered` of the buffer that serves the layer. Not in fp8 or fp4: there it makes more that stays,
quantised weights and rows."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from megatron_patches import buffers

if TYPE_CHECKING:
    from megatron.core.transformer.moe.moe_layer import MoELayer


def _registered(forward: Callable[..., Any], *args: Any, **keywords: Any) -> Any:
    rows = next((x.shape[0] for x in (*args, *keywords.values()) if isinstance(x, torch.Tensor)), 0)
    return buffers.registered_rows(functools.partial(forward, *args, **keywords), rows)


def place(experts: torch.nn.Module | None) -> None:
    """Of a layer's experts that end in one product for all; nothing is done to others."""
    last, config = getattr(experts, "linear_fc2", None), getattr(experts, "config", None)
    quantises = getattr(config, "fp8", None) or getattr(config, "fp4", None)
    if isinstance(last, torch.nn.Module) and not quantises:
        last.forward = functools.partial(_registered, last.forward)  # the instance's, in front of its class's


def layer_init(original: Callable[..., None]) -> Callable[..., None]:
    """A replacement for MoELayer.__init__ that does so."""

    @functools.wraps(original)
    def __init__(self: MoELayer, *args: Any, **keywords: Any) -> None:
        original(self, *args, **keywords)
        place(getattr(self, "experts", None))

    return __init__
