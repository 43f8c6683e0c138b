"""Dense routing, a column for each expert, made of sparse routing, a column for each choice."""

from __future__ import annotations

import torch


def from_topk(
    topk_idx: torch.Tensor, topk_weights: torch.Tensor | None, num_experts: int
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(routing_map bool [T, E], probs fp32 [T, E] or None), on topk_idx's device.

    topk_idx integers [T, K], -1 drops a choice; topk_weights [T, K] or None. The weights of an expert named twice are
    added. IndexError (on a GPU: a device assertion) for an expert that is not there."""
    kept, columns = topk_idx >= 0, topk_idx.clamp(min=0).long()
    counts = torch.zeros(topk_idx.shape[0], num_experts, dtype=torch.int32, device=topk_idx.device)
    route = counts.scatter_add(1, columns, kept.int()).bool()
    if topk_weights is None:
        return route, None
    probs = torch.zeros(route.shape, dtype=torch.float32, device=topk_idx.device)
    return route, probs.scatter_add(1, columns, topk_weights.float().masked_fill(~kept, 0.0))
