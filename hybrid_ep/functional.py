"""Dispatch and combine as autograd operators: each is the other's backward, with the same handle.

Gradients flow to hidden and to the weights (topk_weights or probs; in combine to probs). Handles are not
differentiable. Works under activation checkpointing of both kinds: a forward that is run again makes a new handle and
its backward uses that one. Or it takes the handle of the first run, and no routing is exchanged again; a combine
whose sums nobody reads there takes backward_only=True (megatron_patches does both). Every rank must run the same
operators, and their backwards, in the same order. torch's selective activation checkpointing does not see what they
are made of: it cannot keep their results, and makes them again.

backward_only=True, of a combine: nothing is exchanged and nothing summed, and the result is NaN, so that whoever reads
it after all shows; gradients flow as ever. ValueError with probs, which would have to come back, with async_finish or
previous_event, for there is nothing to wait for, and inside torch.compile.

Inside torch.compile each is one node of the graph and no graph break, with the same results
(hybrid_ep.runtime.compiled); its handle is then opaque, a hybrid_ep.runtime.names.Handle, which these operators take in
compiled and in eager code alike.

async_finish, previous_event: as of the buffer's verbs (hybrid_ep.streams), of the forward. With async_finish=True the
result has one element more, an EventOverlap: current_stream_wait() on the stream that uses the results, before it does.
The backward is in order with the stream that it runs on. ValueError inside torch.compile, whose graphs hold no events.

buffer: a HybridEPBuffer or a ReferenceBuffer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hybrid_ep.payload import quantize
from hybrid_ep.runtime import eager, validation
from hybrid_ep.runtime.signatures import Buffer, Handle
from hybrid_ep.streams import EventOverlap


def dispatch(
    buffer: Buffer,
    hidden: Tensor,
    *,
    topk_idx: Tensor | None = None,
    topk_weights: Tensor | None = None,
    num_of_experts: int | None = None,
    routing_map: Tensor | None = None,
    probs: Tensor | None = None,
    scaling_factor: Tensor | None = None,
    handle: Handle | None = None,
    async_finish: bool = False,
    previous_event: EventOverlap | None = None,
) -> tuple[Any, ...]:
    """Differentiable HybridEPBuffer.dispatch: (rows [M, H], weights [M, experts of this node] or None,
    scales, handle)."""
    given = {
        "topk_idx": topk_idx,
        "topk_weights": topk_weights,
        "routing_map": routing_map,
        "probs": probs,
        "num_of_experts": num_of_experts,
        "scaling_factor": scaling_factor,
        "handle": handle,
    }
    _require_rows(hidden, "num_tokens")
    return _dispatch(buffer, False, hidden, given, _order(async_finish, previous_event))


def dispatch_with_permute(
    buffer: Buffer,
    hidden: Tensor,
    *,
    topk_idx: Tensor | None = None,
    topk_weights: Tensor | None = None,
    num_of_experts: int | None = None,
    num_of_experts_per_rank: int | None = None,
    routing_map: Tensor | None = None,
    probs: Tensor | None = None,
    scaling_factor: Tensor | None = None,
    num_permuted_tokens: int | Tensor | None = None,
    pad_multiple: int | None = None,
    non_blocking: bool = False,
    pad_empty_experts: bool = False,
    handle: Handle | None = None,
    dispatch_dtype: str | None = None,
    num_of_tokens_per_rank: int | None = None,
    async_finish: bool = False,
    previous_event: EventOverlap | None = None,
) -> tuple[Any, ...]:
    """Differentiable HybridEPBuffer.dispatch_with_permute: (rows [P, H], weights [P] or None, scales,
    padded_tokens_per_expert, handle).

    dispatch_dtype: "fp8", "mxfp8" or "nvfp4" sends hidden quantised (hybrid_ep.payload.quantize) and returns the rows
    dequantised, in hidden's dtype; None or "bf16" sends it as it is. Gradients pass straight through the rounding and
    travel unquantised. ValueError with a hidden of integers or of 8 bits; with a scaling_factor, for hidden is
    quantised already then; with async_finish=True, for rows are dequantised as soon as they are here.

    num_of_tokens_per_rank: by which a buffer with latency_tokens chooses the latency path, for all calls of a step;
    ValueError inside torch.compile, which takes the other."""
    _require_rows(hidden, "num_tokens")
    if quantize.format_of(dispatch_dtype, hidden.shape[1]):
        if not hidden.is_floating_point() or hidden.element_size() < 2:
            raise ValueError(
                f"hidden has dtype {hidden.dtype}, and dispatch_dtype={dispatch_dtype!r} would round it; give "
                "bfloat16, float16 or float32, or leave dispatch_dtype out"
            )
        if scaling_factor is not None:
            raise ValueError(
                f"dispatch_dtype={dispatch_dtype!r} quantises hidden, but scaling_factor says that it is "
                "quantised already; give one of them"
            )
        if async_finish:
            raise ValueError(
                f"async_finish=True, but dispatch_dtype={dispatch_dtype!r} uses the rows at once, to dequantise them; "
                "quantise hidden yourself and give scaling_factor, or leave async_finish out"
            )
    given = {
        "topk_idx": topk_idx,
        "topk_weights": topk_weights,
        "routing_map": routing_map,
        "probs": probs,
        "num_of_experts": num_of_experts,
        "num_of_experts_per_rank": num_of_experts_per_rank,
        "scaling_factor": scaling_factor,
        "num_permuted_tokens": num_permuted_tokens,
        "pad_multiple": pad_multiple,
        "pad_empty_experts": pad_empty_experts,
        "non_blocking": non_blocking,
        "handle": handle,
        "dispatch_dtype": dispatch_dtype,
    }
    rest = _order(async_finish, previous_event)
    if num_of_tokens_per_rank is not None:
        if torch.compiler.is_compiling():
            raise ValueError(
                "num_of_tokens_per_rank is given inside torch.compile, where it has no effect; leave it out"
            )
        rest = rest | {"num_of_tokens_per_rank": num_of_tokens_per_rank}
    return _dispatch(buffer, True, hidden, given, rest)


def combine(
    buffer: Buffer,
    hidden: Tensor,
    handle: Handle,
    probs: Tensor | None = None,
    *,
    fp32_partials: bool = False,
    backward_only: bool = False,
    async_finish: bool = False,
    previous_event: EventOverlap | None = None,
) -> tuple[Any, ...]:
    """Differentiable HybridEPBuffer.combine: (tokens [T, H], probs [T, E] or None)."""
    order = _order(async_finish, previous_event)
    return _combine(buffer, False, hidden, handle, probs, fp32_partials, backward_only, order)


def combine_with_unpermute(
    buffer: Buffer,
    hidden: Tensor,
    handle: Handle,
    probs: Tensor | None = None,
    *,
    fp32_partials: bool = False,
    backward_only: bool = False,
    async_finish: bool = False,
    previous_event: EventOverlap | None = None,
) -> tuple[Any, ...]:
    """Differentiable HybridEPBuffer.combine_with_unpermute: (tokens [T, H], probs [T, E] or None)."""
    order = _order(async_finish, previous_event)
    return _combine(buffer, True, hidden, handle, probs, fp32_partials, backward_only, order)


def _order(async_finish: bool, previous_event: EventOverlap | None) -> dict[str, Any]:
    """What a verb is told of streams; nothing where all is as usual, for not every buffer has streams."""
    if not async_finish and previous_event is None:
        return {}
    if torch.compiler.is_compiling():
        name = "async_finish" if async_finish else "previous_event"
        raise ValueError(f"{name} is given inside torch.compile, whose graphs hold no events; call eagerly")
    return {"async_finish": async_finish, "previous_event": previous_event}


def _require_rows(hidden: Any, rows: str) -> None:
    """What is read here, before a buffer's verb looks at the rest."""
    if not isinstance(hidden, Tensor) or hidden.dim() != 2:
        raise ValueError(f"hidden is {validation.describe(hidden)}; give a tensor of 2 dimensions: [{rows}, hidden]")


def _dispatch(
    buffer: Buffer, permute: bool, hidden: Tensor, given: dict[str, Any], order: dict[str, Any]
) -> tuple[Any, ...]:
    if torch.compiler.is_compiling():
        from hybrid_ep.runtime import compiled

        return compiled.dispatch(buffer, permute, hidden, **given)
    return eager.dispatch(buffer, permute, hidden, given | order)


def _combine(
    buffer: Buffer,
    permute: bool,
    hidden: Tensor,
    handle: Handle,
    probs: Tensor | None,
    fp32_partials: bool,
    backward_only: bool,
    order: dict[str, Any],
) -> tuple[Any, ...]:
    _require_rows(hidden, "rows of the dispatch")
    if backward_only:
        given = ["probs"] if probs is not None else list(order)
        if given or torch.compiler.is_compiling():
            where = f"with {', '.join(given)}" if given else "inside torch.compile"
            raise ValueError(f"backward_only=True {where}: nothing runs in such a forward; leave one of them out")
    if torch.compiler.is_compiling():
        from hybrid_ep.runtime import compiled

        return compiled.combine(buffer, permute, hidden, handle, probs, fp32_partials)
    return eager.combine(buffer, permute, hidden, handle, probs, fp32_partials, order, backward_only)
