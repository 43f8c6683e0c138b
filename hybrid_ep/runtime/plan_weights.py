"""A caller's weights, [num_tokens, num_experts] or of the chosen experts, and the order in which a plan keeps them.

Plan order is fp32 [num_tokens, weight_stride]: a token's experts ascending, zeros behind the last. Where the host can
read the plan's pairs the compiled core converts, several times as fast as torch on a CPU; on a GPU torch does."""

from __future__ import annotations

import torch

from hybrid_ep import _core
from hybrid_ep.runtime import validation
from hybrid_ep.runtime.plan import Plan
from hybrid_ep.runtime.tensors import aligned, view


def in_plan_order(
    plan: Plan, topk_idx: torch.Tensor | None, topk_weights: torch.Tensor | None, probs: torch.Tensor | None
) -> torch.Tensor | None:
    """New weights for a handle: topk_weights of topk_idx, or dense probs; None without either. ValueError when they do
    not fit the handle; on a GPU, which nobody waits for, whatever the values are."""
    on_host = plan.host_reads
    if topk_idx is not None and topk_weights is not None:
        idx = aligned(validation.topk(topk_idx, plan.num_tokens, plan.num_experts, look=on_host))
        given = aligned(validation.weights("topk_weights", topk_weights, tuple(idx.shape)))
        if not on_host:
            return _from_dense(plan, _dense_of_topk(plan, idx, given))
        ordered = _ordered(plan)
        plan.core.weights_from_topk(
            pair_expert=_pairs(plan),
            topk_idx=view("topk_idx", idx),
            topk=idx.shape[1],
            topk_weights=view("topk_weights", given),
            out=view("weights", ordered),
        )
        return ordered
    if probs is None:
        return None
    given = aligned(validation.weights("probs", probs, (plan.num_tokens, plan.num_experts)))
    if not on_host:
        return _from_dense(plan, given)
    ordered = _ordered(plan)
    plan.core.weights_from_dense(pair_expert=_pairs(plan), probs=view("probs", given), out=view("weights", ordered))
    return ordered


def to_dense(plan: Plan, ordered: torch.Tensor) -> torch.Tensor:
    """Plan order -> fp32 [num_tokens, num_experts], 0 where not chosen."""
    if plan.host_reads:
        dense = torch.empty(plan.num_tokens, plan.num_experts, dtype=torch.float32, device="cpu")
        plan.core.weights_to_dense(pair_expert=_pairs(plan), weights=view("weights", ordered), out=view("probs", dense))
        return dense
    dense, experts = ordered.new_zeros(plan.num_tokens, plan.num_experts + 1), plan.pair_expert
    where = experts.long().masked_fill_(experts < 0, plan.num_experts)
    return dense.scatter_(1, where, ordered[:, : where.shape[1]])[:, :-1].contiguous()


def _pairs(plan: Plan) -> _core.TensorView | None:
    return view("pair_expert", plan.pair_expert)


def _ordered(plan: Plan) -> torch.Tensor:
    return torch.empty(plan.num_tokens, plan.weight_stride, dtype=torch.float32, device="cpu")


def _dense_of_topk(plan: Plan, idx: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """fp32 [num_tokens, num_experts + 1], whose last column takes what was dropped."""
    dense = weights.new_zeros(plan.num_tokens, plan.num_experts + 1)
    return dense.scatter_add_(1, idx.masked_fill((idx < 0) | (idx >= plan.num_experts), plan.num_experts), weights)


def _from_dense(plan: Plan, probs: torch.Tensor) -> torch.Tensor:
    experts = plan.pair_expert
    ordered = probs.new_zeros(plan.num_tokens, plan.weight_stride)
    picked = probs.gather(1, experts.long().clamp_(min=0))
    ordered[:, : picked.shape[1]] = picked.masked_fill_(experts < 0, 0.0)
    return ordered
