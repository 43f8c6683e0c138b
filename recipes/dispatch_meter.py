"""Measures what dispatch and combine cost and where tokens go, for any Megatron token dispatcher.

The meter wraps the six methods that MoELayer calls. Forward time is the time inside them. In the backward,
identity nodes before and after each triple mark when gradients enter and leave it; on a CPU autograd runs
one node at a time, so the difference is the time the triple took.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from megatron.core.transformer.moe.moe_layer import MoELayer

_DISPATCH = ("dispatch_preprocess", "token_dispatch", "dispatch_postprocess")
_COMBINE = ("combine_preprocess", "token_combine", "combine_postprocess")


class _Mark(torch.autograd.Function):
    """Identity on a tuple of tensors that calls back when all their gradients have arrived."""

    @staticmethod
    def forward(ctx: Any, on_backward: Callable[[], None], *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.on_backward = on_backward
        ctx.set_materialize_grads(False)
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        ctx.on_backward()
        return (None, *grads)


class DispatchMeter:
    """Seconds in dispatch and combine, and rows per expert, since the last `take()`.

    Counts only while the layer trains. Rows are (token, expert) pairs, the unit of an expert's work.
    """

    def __init__(self, layers: list[MoELayer], num_experts: int) -> None:
        self._seconds = {"dispatch": 0.0, "combine": 0.0}
        self._backward_start = {"dispatch": 0.0, "combine": 0.0}
        self._load = torch.zeros(len(layers), num_experts, dtype=torch.int64, device="cpu")
        for index, layer in enumerate(layers):
            self._attach(index, layer)

    def take(self) -> tuple[dict[str, float], torch.Tensor]:
        """({"dispatch": s, "combine": s}, rows this rank sent as int64 [layers, experts]); then resets."""
        taken = dict(self._seconds), self._load.clone()
        self._seconds = {name: 0.0 for name in self._seconds}
        self._load.zero_()
        return taken

    def _attach(self, index: int, layer: MoELayer) -> None:
        dispatcher = layer.token_dispatcher
        for phase, names in (("dispatch", _DISPATCH), ("combine", _COMBINE)):
            first, _, last = names
            for name in names:
                wrapped = self._timed(getattr(dispatcher, name), layer, phase, name == first, name == last)
                setattr(dispatcher, name, wrapped)
        preprocess = dispatcher.dispatch_preprocess

        def counted(
            hidden: torch.Tensor, routing_map: torch.Tensor, probs: torch.Tensor, *args: Any, **kwargs: Any
        ) -> Any:
            if layer.training:
                self._load[index] += routing_map.reshape(-1, self._load.size(1)).sum(0)
            return preprocess(hidden, routing_map, probs, *args, **kwargs)

        dispatcher.dispatch_preprocess = counted

    def _timed(
        self, method: Callable[..., Any], layer: MoELayer, phase: str, is_first: bool, is_last: bool
    ) -> Callable[..., Any]:
        def leave_backward() -> None:
            self._seconds[phase] += time.perf_counter() - self._backward_start[phase]

        def enter_backward() -> None:
            self._backward_start[phase] = time.perf_counter()

        def call(*args: Any, **kwargs: Any) -> Any:
            if not layer.training:
                return method(*args, **kwargs)
            if is_first:
                args = _mark_floats(leave_backward, args)
            start = time.perf_counter()
            result = method(*args, **kwargs)
            self._seconds[phase] += time.perf_counter() - start
            if is_last:
                outputs = result if isinstance(result, tuple) else (result,)
                outputs = _mark_floats(enter_backward, outputs)
                result = outputs if isinstance(result, tuple) else outputs[0]
            return result

        return call


def _mark_floats(on_backward: Callable[[], None], values: tuple) -> tuple:
    """The same values, with one mark over all tensors among them that carry a gradient."""
    places = [i for i, value in enumerate(values) if torch.is_tensor(value) and value.requires_grad]
    if not places:
        return values
    marked = list(values)
    for place, tensor in zip(places, _Mark.apply(on_backward, *(values[i] for i in places)), strict=True):
        marked[place] = tensor
    return tuple(marked)


def imbalance(rows: torch.Tensor) -> torch.Tensor:
    """(max - mean) / mean over the last dimension; 0 where nothing was sent. float64."""
    rows = rows.double()
    mean = rows.mean(-1)
    return torch.where(mean > 0, (rows.amax(-1) - mean) / mean.clamp(min=1e-9), torch.zeros_like(mean))
