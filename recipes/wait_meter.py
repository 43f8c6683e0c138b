"""Who makes whom wait, by hybrid_ep's own counters: `HybridEPBuffer.wait_seconds()` of all buffers."""

from __future__ import annotations

import torch

from megatron_patches import buffers


class WaitMeter:
    """Seconds that this rank waited for each rank of its expert-parallel group."""

    def __init__(self, num_ranks: int) -> None:
        self._before = torch.zeros(num_ranks, dtype=torch.float64, device="cpu")

    def take(self) -> torch.Tensor:
        """float64 [ranks of the group], since the last call; zeros without hybrid_ep."""
        now = torch.zeros_like(self._before)
        for buffer in buffers.live():
            waited = buffer.wait_seconds() if hasattr(buffer, "wait_seconds") else ()
            if len(waited) == len(now):  # a rank whose experts' weights travel has a group of its own
                now += torch.tensor(waited, dtype=torch.float64, device="cpu")
        taken, self._before = now - self._before, now
        return taken.clamp(min=0)  # a buffer may have gone
