"""A decayed window of tokens per layer and expert: counted on the device, summed over ranks when somebody asks.

    window = LoadWindow(num_layers=58, num_experts=256, decay=0.9)
    window.add(layer, counts)          # every micro-batch: one addition on the device, no synchronisation
    window.advance()                   # once a step: what is old counts `decay` times as much as before
    load = window.reduced(group)       # when a plan is due: tokens a step, the same bits on every rank
    heat = window.covariance(group)    # of a window made with covariance=True: which experts are hot together

Everything is an integer in fixed point, so that sums over ranks do not depend on their order: planners on different
ranks must see equal loads.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from hybrid_ep.balance import inputs

_TOKEN = 1 << 8  # the window counts in 1/256 tokens
_ONE = 1 << 16  # decay as a fraction of this
_STEP = 1 << 40  # the weight of the latest step
_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


class LoadWindow:
    """Tokens of this rank per layer and expert; recent steps weigh more.

    decay: from 0 (the latest step alone) to 1 (all steps alike). Nothing overflows up to 2^30 tokens a step and expert
    while decay <= 0.99. ValueError for sizes below 1 or a decay outside [0, 1].

    covariance: also keep second moments of the loads of micro-batches, 8 bytes a layer and pair of experts (of 256:
    512 KiB a layer) and an addition of that size a micro-batch; nothing overflows up to 2^17 tokens an expert, 64
    micro-batches a step and 1,024 ranks while decay <= 0.9.
    """

    def __init__(
        self, num_layers: int, num_experts: int, decay: float = 0.9, device: Any = "cpu", covariance: bool = False
    ) -> None:
        self.shape = (inputs.integer("num_layers", num_layers, 1), inputs.integer("num_experts", num_experts, 1))
        decay = inputs.number("decay", decay, 0, 1, "a fraction from 0 to 1")
        self._decay = round(decay * _ONE)
        self._fresh = torch.zeros(self.shape, dtype=torch.int64, device=device)  # tokens since the last advance
        self._window = torch.zeros_like(self._fresh)
        self._weight = 0  # of all steps in the window
        self._moments = _Moments(num_layers, num_experts, device) if covariance else None

    def add(self, layer: int, counts: torch.Tensor) -> None:
        """Count a micro-batch: integers [num_experts] of one layer, 0 or more. No synchronisation, no communication.
        ValueError for another layer, type or shape, and on a CPU for negative counts; on a GPU nothing waits to look.
        """
        layer = inputs.integer("layer", layer, 0, self.shape[0] - 1)
        if not isinstance(counts, torch.Tensor) or counts.dtype not in _INTEGERS or counts.shape != self.shape[1:]:
            given = f"{counts.dtype} {tuple(counts.shape)}" if isinstance(counts, torch.Tensor) else f"{counts!r:.60}"
            raise ValueError(f"counts is {given}: give a tensor of integers ({self.shape[1]},), tokens of each expert")
        if counts.device.type == "cpu" and int(counts.min()) < 0:
            raise ValueError(f"{inputs.entry('counts', (counts < 0).numpy(), counts.numpy())}: give tokens, 0 or more")
        if self._fresh.device != counts.device:
            self._fresh, self._window = self._fresh.to(counts.device), self._window.to(counts.device)
        self._fresh[layer] += counts
        if self._moments is not None:
            self._moments.add(layer, counts)

    def advance(self) -> None:
        """End a step: what was added since the last call joins the window, what was there fades."""
        self._window.mul_(self._decay).bitwise_right_shift_(16).add_(self._fresh, alpha=_TOKEN)
        self._weight = (self._weight * self._decay >> 16) + _STEP
        self._fresh.zero_()
        if self._moments is not None:
            self._moments.fade(self._decay)

    def reduced(self, *groups: dist.ProcessGroup) -> np.ndarray:
        """float64 [layers, experts]: tokens a step, summed over the ranks of each group in turn; 0 before any step.

        Collective. Two groups that span a grid (expert parallel, expert data parallel) sum over the whole grid.
        """
        total = self._window.clone()
        for group in groups:
            dist.all_reduce(total, group=group)
        return total.cpu().numpy() / (_TOKEN * max(self._weight / _STEP, 1.0))

    def covariance(self, *groups: dist.ProcessGroup) -> np.ndarray:
        """float64 [layers, experts, experts], tokens squared: how loads of one rank's micro-batch vary together, summed
        over the ranks of each group in turn; 0 for a layer of fewer than two micro-batches. Recent ones weigh more.

        No rank knows the others' loads, so what varies on all ranks at once counts once a rank: its share among the
        covariances is right, their size is that of ranks which vary independently. Collective, the same bits on every
        rank. ValueError for a window made without covariance."""
        if self._moments is None:
            raise ValueError("covariance: this window keeps no second moments; make it with covariance=True")
        total = self._moments.covariance()
        for group in groups:
            dist.all_reduce(total, group=group)
        return total.cpu().numpy() / _TOKEN

    def state(self) -> tuple[Any, ...]:
        """(int64 [layers, experts], weight), with covariance also its moments: what `restore` takes, to continue a run
        exactly."""
        moments = () if self._moments is None else self._moments.state()
        return (self._window.cpu().clone(), self._weight, *moments)

    def restore(self, state: tuple[Any, ...]) -> None:
        """Take up a `state` of a window of the same shape; second moments begin anew where it has none."""
        window, weight, *moments = state
        if tuple(window.shape) != self.shape:
            raise ValueError(f"window has shape {tuple(window.shape)}: give one of shape {self.shape}")
        self._window.copy_(window)
        self._weight = int(weight)
        if self._moments is not None and moments:
            self._moments.restore(moments)


class _Moments:
    """Sums over micro-batches of their number, loads and products of loads, whose weights fade alike.

    A step's weights are 1 while it runs, so that sums need no second copy of the products."""

    def __init__(self, num_layers: int, num_experts: int, device: Any) -> None:
        self.number = torch.zeros(num_layers, dtype=torch.int64, device="cpu")  # in 1 / _ONE, on the host
        self.sums = torch.zeros((num_layers, num_experts), dtype=torch.int64, device=device)  # in 1 / _TOKEN
        self.products = torch.zeros((num_layers, num_experts, num_experts), dtype=torch.int64, device=device)

    def add(self, layer: int, counts: torch.Tensor) -> None:
        if self.products.device != counts.device:
            self.sums, self.products = self.sums.to(counts.device), self.products.to(counts.device)
        counts = counts.to(torch.int64)
        self.number[layer] += _ONE
        self.sums[layer] += counts * _TOKEN
        self.products[layer] += counts[:, None] * counts

    def fade(self, decay: int) -> None:
        for sums in (self.number, self.sums, self.products):
            sums.mul_(decay).add_(_ONE // 2).bitwise_right_shift_(16)  # rounded: cut off, covariances would sink

    def covariance(self) -> torch.Tensor:
        """int64 [layers, experts, experts] in 1 / _TOKEN tokens squared."""
        number = (self.number.double() / _ONE).to(self.sums.device)
        mean = self.sums.double() / _TOKEN / number.clamp(min=1e-9)[:, None]
        products = self.products.double() / number.clamp(min=1e-9)[:, None, None]
        found = (products - mean[:, :, None] * mean[:, None, :]) * (number > 1.5)[:, None, None]
        diagonal = torch.diagonal(found, dim1=1, dim2=2)
        diagonal.clamp_(min=0)  # what fading rounds off may leave less than nothing of a load that never varies
        return torch.round(found * _TOKEN).to(torch.int64)

    def state(self) -> tuple[torch.Tensor, ...]:
        return tuple(sums.cpu().clone() for sums in (self.number, self.sums, self.products))

    def restore(self, state: Any) -> None:
        for mine, given in zip((self.number, self.sums, self.products), state, strict=True):
            mine.copy_(given)
