"""A caller's weights, [num_tokens, num_experts] or of the chosen experts, and the order in which a plan keeps them.

Plan order is fp32 [num_tokens, weight_stride]: a token's experts ascending, zeros behind the last."""

from __future__ import annotations

import torch

from hybrid_ep import validation
from hybrid_ep.handle import Plan
from hybrid_ep.tensors import aligned, view


def in_plan_order(plan: Plan, topk_idx, topk_weights, probs) -> torch.Tensor | None:
    """New weights for a handle: topk_weights of topk_idx, or dense probs; None without either. ValueError when they do
    not fit the handle."""
    if plan.facts is not None:
        return _on_device(plan, topk_idx, topk_weights, probs)
    ordered = torch.empty(plan.num_tokens, plan.weight_stride, dtype=torch.float32, device="cpu")
    if topk_idx is not None and topk_weights is not None:
        idx = aligned(validation.topk(topk_idx, plan.num_tokens, plan.num_experts))
        given = aligned(validation.weights("topk_weights", topk_weights, tuple(idx.shape)))
        plan.core.weights_from_topk(view("topk_idx", idx), idx.shape[1], view("topk_weights", given),
                                    view("weights", ordered))
    elif probs is not None:
        given = aligned(validation.weights("probs", probs, (plan.num_tokens, plan.num_experts)))
        plan.core.weights_from_dense(view("probs", given), view("weights", ordered))
    else:
        return None
    return ordered


def _on_device(plan: Plan, topk_idx, topk_weights, probs) -> torch.Tensor | None:
    if topk_idx is not None and topk_weights is not None:
        idx = validation.topk(topk_idx, plan.num_tokens, plan.num_experts, look=False)
        given = validation.weights("topk_weights", topk_weights, tuple(idx.shape))
        return plan.facts.from_topk(idx, given.detach(), plan.num_experts, plan.weight_stride)
    if probs is None:
        return None
    given = validation.weights("probs", probs, (plan.num_tokens, plan.num_experts))
    return plan.facts.from_dense(given.detach(), plan.weight_stride)


def to_dense(plan: Plan, ordered: torch.Tensor) -> torch.Tensor:
    """Plan order -> fp32 [num_tokens, num_experts], 0 where not chosen."""
    if plan.facts is not None:
        return plan.facts.to_dense(ordered, plan.num_experts)
    probs = torch.empty(plan.num_tokens, plan.num_experts, dtype=torch.float32, device="cpu")
    plan.core.weights_to_dense(view("weights", ordered), view("probs", probs))
    return probs
