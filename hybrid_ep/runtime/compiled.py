"""The operators of hybrid_ep.functional for torch.compile: opaque to it, one node of the graph each.

Two custom ops, torch.ops.hybrid_ep.dispatch and .combine, each the other's backward. The graph holds the buffer's name
and the handle's tensor (names.py). The ops are ordered: no pass reorders, merges or drops one, because other ranks wait
for it. Where routing alone decides how many rows come, that number is an unbacked symbol, and the op is
.dispatch_unsized instead: inductor cannot define a symbol in an ordered op (torch 2.15), so data alone orders it there.
Programs whose dispatches do not depend on each other give num_permuted_tokens, or compile with another backend.

Imported while a function is traced and never before, for it imports torch's compiler, which takes seconds."""

from __future__ import annotations

from typing import Any

import torch
from torch.library import custom_op, get_ctx

from hybrid_ep.runtime import eager, names
from hybrid_ep.runtime.handle_kinds import OVERFLOW_FLAG
from hybrid_ep.runtime.names import Handle
from hybrid_ep.runtime.validation import SUMMABLE

# ---- what functional calls while it is traced


def dispatch(buffer: Any, permute: bool, hidden: torch.Tensor, **given: Any) -> tuple[Any, ...]:
    """As functional's, with a Handle. A buffer's own handle, made by eager code, breaks the graph here."""
    handle: Handle | None = given["handle"]
    topk_idx, topk_weights = given["topk_idx"], given["topk_weights"]
    routing_map, probs = given["routing_map"], given["probs"]
    if handle is not None and not isinstance(handle, Handle):
        return _broken_dispatch(buffer, permute, hidden, given)
    ranks, num_experts = buffer.group_size, given["num_of_experts"]
    if handle is not None:
        num_experts = handle.num_experts
    elif routing_map is not None:
        num_experts = routing_map.shape[1]
    elif num_experts is None and given.get("num_of_experts_per_rank") is not None:
        num_experts = given["num_of_experts_per_rank"] * ranks
    elif num_experts is None:
        num_experts = _experts_per_rank(buffer) * ranks
    budget = given.get("num_permuted_tokens")
    if isinstance(budget, torch.Tensor):
        budget = budget.item()
    per_rank = num_experts // ranks
    scale = given["scaling_factor"]
    op = torch.ops.hybrid_ep.dispatch_unsized if budget is None else torch.ops.hybrid_ep.dispatch
    rows, weights, scales, counts, overflow, token = op(
        hidden,
        topk_idx,
        topk_weights,
        routing_map,
        probs,
        scale,
        None if handle is None else handle.token,
        buffer.compile_name,
        permute,
        num_experts,
        budget,
        budget,
        given.get("pad_multiple"),
        given.get("non_blocking", False),
        given.get("pad_empty_experts", False),
        given.get("dispatch_dtype"),
        per_rank,
        per_rank * buffer.num_of_hybrid_ep_ranks_per_nvlink_domain,
    )
    made = Handle(token, hidden.shape[0], num_experts, permute, overflow) if handle is None else handle
    weights = None if topk_weights is None and probs is None else weights
    scales = None if scale is None else scales
    return (rows, weights, scales, counts, made) if permute else (rows, weights, scales, made)


def combine(
    buffer: Any,
    permute: bool,
    hidden: torch.Tensor,
    handle: tuple[Any, ...],
    probs: torch.Tensor | None,
    fp32_partials: bool,
) -> tuple[Any, ...]:
    """As functional's, with a Handle; as in dispatch."""
    if not isinstance(handle, Handle):
        return _broken_combine(buffer, permute, hidden, handle, probs, fp32_partials)
    tokens, dense = torch.ops.hybrid_ep.combine(
        hidden,
        probs,
        handle.token,
        buffer.compile_name,
        permute,
        fp32_partials,
        handle.num_tokens,
        handle.num_experts,
        *_widths(buffer, handle),
    )
    return tokens, None if probs is None else dense


_broken_dispatch = torch.compiler.disable(eager.dispatch)  # these break the graph
_broken_combine = torch.compiler.disable(eager.combine)


def _widths(buffer: Any, handle: Handle) -> tuple[int, int]:
    per_rank = handle.num_experts // buffer.group_size
    return per_rank, per_rank * buffer.num_of_hybrid_ep_ranks_per_nvlink_domain


def _experts_per_rank(buffer: Any) -> int:
    return buffer.config.num_of_experts_per_rank if hasattr(buffer, "config") else buffer.num_local_experts


# ---- the ops


def _run_dispatch(
    hidden: torch.Tensor,
    topk_idx: torch.Tensor | None,
    topk_weights: torch.Tensor | None,
    routing_map: torch.Tensor | None,
    probs: torch.Tensor | None,
    scaling_factor: torch.Tensor | None,
    handle: torch.Tensor | None,
    buffer: str,
    permute: bool,
    num_experts: int,
    budget: int | None,
    num_rows: int | None,
    pad_multiple: int | None,
    non_blocking: bool,
    pad_empty_experts: bool,
    dispatch_dtype: str | None,
    local_experts: int,
    node_experts: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(rows, weights, scales, padded tokens per expert, overflow, handle's tensor), empty where there is none.

    num_rows, local_experts, node_experts: for the shapes alone."""
    given = None if handle is None else names.from_tensor(handle)
    rest: dict[str, Any] = {
        "scaling_factor": scaling_factor,
        "handle": given,
        "num_of_experts": None if given is not None or routing_map is not None else num_experts,
    }
    if permute:
        rest |= {
            "num_permuted_tokens": budget,
            "pad_multiple": pad_multiple,
            "non_blocking": non_blocking,
            "pad_empty_experts": pad_empty_experts,
            "dispatch_dtype": dispatch_dtype,
        }
    rows, weights, scales, *counts, made = eager.run_dispatch(
        names.named(buffer), permute, rest, hidden, topk_idx, topk_weights, routing_map, probs
    )
    overflow = made[OVERFLOW_FLAG].clone() if permute else _none(hidden, torch.int32).new_zeros(1)
    return (
        rows,
        _or_none(weights, hidden, torch.float32),
        _or_none(scales, hidden, hidden.dtype),
        counts[0] if counts else _none(hidden, torch.int64, "cpu"),
        overflow,
        names.as_tensor(made),
    )


@custom_op("hybrid_ep::combine", mutates_args=())
def _combine(
    hidden: torch.Tensor,
    probs: torch.Tensor | None,
    handle: torch.Tensor,
    buffer: str,
    permute: bool,
    fp32_partials: bool,
    num_tokens: int,
    num_experts: int,
    local_experts: int,
    node_experts: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(tokens [T, H], probs [T, E] or empty). The integers are for the shapes alone."""
    tokens, dense = eager.run_combine(
        names.named(buffer),
        permute,
        hidden=hidden,
        probs=probs,
        handle=names.from_tensor(handle),
        fp32_partials=fp32_partials,
    )
    return tokens, _or_none(dense, hidden, torch.float32)


def _none(like: torch.Tensor, dtype: torch.dtype, device: Any = None) -> torch.Tensor:
    return torch.empty(0, dtype=dtype, device=device or like.device)


def _or_none(x: torch.Tensor | None, like: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return _none(like, dtype) if x is None else x


def _fake_dispatch(
    hidden: torch.Tensor,
    topk_idx: torch.Tensor | None,
    topk_weights: torch.Tensor | None,
    routing_map: torch.Tensor | None,
    probs: torch.Tensor | None,
    scaling_factor: torch.Tensor | None,
    handle: torch.Tensor | None,
    buffer: str,
    permute: bool,
    num_experts: int,
    budget: int | None,
    num_rows: int | torch.SymInt | None,
    pad_multiple: int | None,
    non_blocking: bool,
    pad_empty_experts: bool,
    dispatch_dtype: str | None,
    local_experts: int,
    node_experts: int,
) -> tuple[torch.Tensor, ...]:
    num_rows = get_ctx().new_dynamic_size() if num_rows is None else num_rows
    weights = _none(hidden, torch.float32)
    if topk_weights is not None or probs is not None:
        shape = (num_rows,) if permute else (num_rows, node_experts)
        weights = torch.empty(shape, dtype=torch.float32, device=hidden.device)
    scales = _none(hidden, hidden.dtype)
    if scaling_factor is not None:
        scales = scaling_factor.new_empty(num_rows, scaling_factor.shape[1])
    on_host = "cpu" if not non_blocking else hidden.device
    counts = (
        torch.empty(local_experts, dtype=torch.int64, device=on_host) if permute else _none(hidden, torch.int64, "cpu")
    )
    return (
        hidden.new_empty(num_rows, hidden.shape[1]),
        weights,
        scales,
        counts,
        torch.empty(1, dtype=torch.int32, device=hidden.device),
        torch.empty(1, dtype=torch.int64, device="cpu"),
    )


@_combine.register_fake
def _(
    hidden: torch.Tensor,
    probs: torch.Tensor | None,
    handle: torch.Tensor,
    buffer: str,
    permute: bool,
    fp32_partials: bool,
    num_tokens: int,
    num_experts: int,
    local_experts: int,
    node_experts: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    dense = (
        _none(hidden, torch.float32)
        if probs is None
        else torch.empty(num_tokens, num_experts, dtype=torch.float32, device=hidden.device)
    )
    return hidden.new_empty(num_tokens, hidden.shape[1]), dense


# ---- gradients


def _keep_dispatch(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    (
        hidden,
        topk_idx,
        topk_weights,
        _,
        _,
        _,
        _,
        ctx.buffer,
        ctx.permute,
        ctx.num_experts,
        *_,
        ctx.local_experts,
        ctx.node_experts,
    ) = inputs
    ctx.weights_are_topk, ctx.num_tokens, ctx.rows = topk_weights is not None, hidden.shape[0], output[0].shape
    ctx.dtype = hidden.dtype
    ctx.mark_non_differentiable(*output[2:])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(topk_idx, output[5])


def _dispatch_backward(
    ctx: Any, grad_rows: torch.Tensor | None, grad_weights: torch.Tensor | None, *_: torch.Tensor | None
) -> tuple[torch.Tensor | None, ...]:
    nothing = (None,) * 18
    grad = grad_weights if grad_rows is None else grad_rows
    if grad is None:
        return nothing
    topk_idx, token = ctx.saved_tensors
    if grad_rows is None:  # only the weights were used
        grad_rows = eager.zero_rows(ctx.rows, ctx.dtype, grad.device)
    grad_hidden, grad_dense = torch.ops.hybrid_ep.combine(
        grad_rows.contiguous(),
        grad_weights,
        token,
        ctx.buffer,
        ctx.permute,
        False,
        ctx.num_tokens,
        ctx.num_experts,
        ctx.local_experts,
        ctx.node_experts,
    )
    grad_hidden = grad_hidden if ctx.dtype in SUMMABLE else None
    if grad_weights is None:
        return grad_hidden, *nothing[1:]
    if not ctx.weights_are_topk:
        return grad_hidden, None, None, None, grad_dense, *nothing[5:]
    grad_topk = grad_dense.gather(1, topk_idx.long().clamp(min=0)).masked_fill(topk_idx < 0, 0.0)
    return grad_hidden, None, grad_topk, *nothing[3:]


def _keep_combine(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    hidden, _, handle, ctx.buffer, ctx.permute, _, _, ctx.num_experts, ctx.local_experts, ctx.node_experts = inputs
    ctx.num_rows, ctx.tokens, ctx.dtype = hidden.shape[0], output[0].shape, hidden.dtype
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(handle)


def _combine_backward(
    ctx: Any, grad_tokens: torch.Tensor | None, grad_probs: torch.Tensor | None
) -> tuple[torch.Tensor | None, ...]:
    nothing = (None,) * 10
    grad = grad_probs if grad_tokens is None else grad_tokens
    if grad is None:
        return nothing
    if grad_tokens is None:
        grad_tokens = torch.zeros(ctx.tokens, dtype=ctx.dtype, device=grad.device)
    (token,) = ctx.saved_tensors
    grad_hidden, grad_weights, *_ = torch.ops.hybrid_ep.dispatch(
        grad_tokens.contiguous(),
        None,
        None,
        None,
        grad_probs,
        None,
        token,
        ctx.buffer,
        ctx.permute,
        ctx.num_experts,
        ctx.num_rows if ctx.permute else None,
        ctx.num_rows,
        None,
        False,
        False,
        None,
        ctx.local_experts,
        ctx.node_experts,
    )
    return grad_hidden, None if grad_probs is None else grad_weights, *nothing[2:]


_combine.register_autograd(_combine_backward, setup_context=_keep_combine)


def _register_dispatches() -> None:
    from torch._higher_order_ops import effects
    from torch.fx.node import has_side_effect

    for name in ("dispatch", "dispatch_unsized"):
        op = custom_op(f"hybrid_ep::{name}", _run_dispatch, mutates_args=())
        op.register_fake(_fake_dispatch)
        op.register_autograd(_dispatch_backward, setup_context=_keep_dispatch)
        has_side_effect(getattr(torch.ops.hybrid_ep, name).default)
    for overload in (torch.ops.hybrid_ep.dispatch.default, torch.ops.hybrid_ep.combine.default):
        effects._register_effectful_op(overload, effects._EffectType.ORDERED)


_register_dispatches()
