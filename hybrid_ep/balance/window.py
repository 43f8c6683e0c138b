"""A decayed window of tokens per layer and expert: counted on the device, summed over ranks when somebody asks.

    window = LoadWindow(num_layers=58, num_experts=256, decay=0.9)
    window.add(layer, counts)          # every micro-batch: one addition on the device, no synchronisation
    window.advance()                   # once a step: what is old counts `decay` times as much as before
    load = window.reduced(group)       # when a plan is due: tokens a step, the same bits on every rank

Everything is an integer in fixed point, so that sums over ranks do not depend on their order: planners on different
ranks must see equal loads.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.distributed as dist

_TOKEN = 1 << 8  # the window counts in 1/256 tokens
_ONE = 1 << 16  # decay as a fraction of this
_STEP = 1 << 40  # the weight of the latest step


class LoadWindow:
    """Tokens of this rank per layer and expert; recent steps weigh more.

    decay: from 0 (the latest step alone) to 1 (all steps alike). Nothing overflows up to 2^30 tokens a step and expert
    while decay <= 0.99. ValueError for sizes below 1 or a decay outside [0, 1].
    """

    def __init__(self, num_layers: int, num_experts: int, decay: float = 0.9, device: Any = "cpu") -> None:
        if num_layers < 1 or num_experts < 1:
            raise ValueError(f"num_layers, num_experts are {num_layers}, {num_experts}: give integers >= 1")
        if not 0 <= decay <= 1:
            raise ValueError(f"decay is {decay!r}: give a fraction from 0 to 1")
        self.shape = (num_layers, num_experts)
        self._decay = round(decay * _ONE)
        self._fresh = torch.zeros(self.shape, dtype=torch.int64, device=device)  # tokens since the last advance
        self._window = torch.zeros_like(self._fresh)
        self._weight = 0  # of all steps in the window

    def add(self, layer: int, counts: torch.Tensor) -> None:
        """Count a micro-batch: integers [num_experts] of one layer. No synchronisation, no communication."""
        if self._fresh.device != counts.device:
            self._fresh, self._window = self._fresh.to(counts.device), self._window.to(counts.device)
        self._fresh[layer] += counts

    def advance(self) -> None:
        """End a step: what was added since the last call joins the window, what was there fades."""
        self._window.mul_(self._decay).bitwise_right_shift_(16).add_(self._fresh, alpha=_TOKEN)
        self._weight = (self._weight * self._decay >> 16) + _STEP
        self._fresh.zero_()

    def reduced(self, *groups: dist.ProcessGroup) -> np.ndarray:
        """float64 [layers, experts]: tokens a step, summed over the ranks of each group in turn; 0 before any step.

        Collective. Two groups that span a grid (expert parallel, expert data parallel) sum over the whole grid.
        """
        total = self._window.clone()
        for group in groups:
            dist.all_reduce(total, group=group)
        return total.cpu().numpy() / (_TOKEN * max(self._weight / _STEP, 1.0))

    def state(self) -> tuple[torch.Tensor, int]:
        """(int64 [layers, experts], weight): what `restore` takes, to continue a run exactly."""
        return self._window.cpu().clone(), self._weight

    def restore(self, state: tuple[torch.Tensor, int]) -> None:
        """Take up a `state` of a window of the same shape."""
        window, weight = state
        if tuple(window.shape) != self.shape:
            raise ValueError(f"window has shape {tuple(window.shape)}: give one of shape {self.shape}")
        self._window.copy_(window)
        self._weight = int(weight)
