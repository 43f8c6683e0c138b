"""Dispatch and combine as autograd operators: each is the other's backward, with the same handle.

Gradients flow to hidden and to the weights (topk_weights or probs; in combine to probs). Handles are not
differentiable. Works under activation checkpointing of both kinds: a forward that is run again makes a new
handle and its backward uses that one. Every rank must run the same operators, and their backwards, in the
same order.

Inside torch.compile each is one node of the graph and no graph break, with the same results (compiled.py); its handle
is then opaque, a names.Handle, which these operators take in compiled and in eager code alike.

buffer: a HybridEPBuffer or a ReferenceBuffer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hybrid_ep import names, quantize
from hybrid_ep.signatures import Buffer, Combined, Handle


def dispatch(buffer: Buffer, hidden: Tensor, *, topk_idx: Tensor | None = None, topk_weights: Tensor | None = None,
             num_of_experts: int | None = None, routing_map: Tensor | None = None, probs: Tensor | None = None,
             scaling_factor: Tensor | None = None, handle: Handle | None = None) -> tuple[Any, ...]:
    """Differentiable HybridEPBuffer.dispatch: (rows [M, H], weights [M, experts of this node] or None,
    scales, handle)."""
    given = {"topk_idx": topk_idx, "topk_weights": topk_weights, "routing_map": routing_map, "probs": probs,
             "num_of_experts": num_of_experts, "scaling_factor": scaling_factor, "handle": handle}
    return _dispatch(buffer, False, hidden, given)


def dispatch_with_permute(buffer: Buffer, hidden: Tensor, *, topk_idx: Tensor | None = None,
                          topk_weights: Tensor | None = None, num_of_experts: int | None = None,
                          num_of_experts_per_rank: int | None = None, routing_map: Tensor | None = None,
                          probs: Tensor | None = None, scaling_factor: Tensor | None = None,
                          num_permuted_tokens: int | Tensor | None = None, pad_multiple: int | None = None,
                          non_blocking: bool = False, pad_empty_experts: bool = False, handle: Handle | None = None,
                          dispatch_dtype: str | None = None) -> tuple[Any, ...]:
    """Differentiable HybridEPBuffer.dispatch_with_permute: (rows [P, H], weights [P] or None, scales,
    padded_tokens_per_expert, handle).

    dispatch_dtype: "fp8", "mxfp8" or "nvfp4" sends hidden quantised (hybrid_ep.quantize) and returns the rows
    dequantised, in hidden's dtype; None or "bf16" sends it as it is. Gradients pass straight through the rounding and
    travel unquantised. ValueError with a scaling_factor, for hidden is quantised already then."""
    if quantize.format_of(dispatch_dtype, hidden.shape[1]) and scaling_factor is not None:
        raise ValueError(f"dispatch_dtype={dispatch_dtype!r} quantises hidden, but scaling_factor says that it is "
                         "quantised already; give one of them")
    given = {"topk_idx": topk_idx, "topk_weights": topk_weights, "routing_map": routing_map, "probs": probs,
             "num_of_experts": num_of_experts, "num_of_experts_per_rank": num_of_experts_per_rank,
             "scaling_factor": scaling_factor, "num_permuted_tokens": num_permuted_tokens,
             "pad_multiple": pad_multiple, "pad_empty_experts": pad_empty_experts,
             "non_blocking": non_blocking, "handle": handle, "dispatch_dtype": dispatch_dtype}
    return _dispatch(buffer, True, hidden, given)


def combine(buffer: Buffer, hidden: Tensor, handle: Handle, probs: Tensor | None = None, *,
            fp32_partials: bool = False) -> Combined:
    """Differentiable HybridEPBuffer.combine: (tokens [T, H], probs [T, E] or None)."""
    return _combine(buffer, False, hidden, handle, probs, fp32_partials)


def combine_with_unpermute(buffer: Buffer, hidden: Tensor, handle: Handle, probs: Tensor | None = None, *,
                           fp32_partials: bool = False) -> Combined:
    """Differentiable HybridEPBuffer.combine_with_unpermute: (tokens [T, H], probs [T, E] or None)."""
    return _combine(buffer, True, hidden, handle, probs, fp32_partials)


def _dispatch(buffer: Buffer, permute: bool, hidden: Tensor, given: dict[str, Any]) -> tuple[Any, ...]:
    if torch.compiler.is_compiling():
        from hybrid_ep import compiled

        return compiled.dispatch(buffer, permute, hidden, **given)
    rest = given | {"handle": names.eager_handle(given["handle"])}
    routing = [rest.pop(name) for name in ("topk_idx", "topk_weights", "routing_map", "probs")]
    return _Dispatch.apply(buffer, permute, rest, hidden, *routing)


def _combine(buffer: Buffer, permute: bool, hidden: Tensor, handle: Handle, probs: Tensor | None,
             fp32_partials: bool) -> Combined:
    if torch.compiler.is_compiling():
        from hybrid_ep import compiled

        return compiled.combine(buffer, permute, hidden, handle, probs, fp32_partials)
    return _Combine.apply(buffer, permute, names.eager_handle(handle), fp32_partials, hidden, probs)


def run_dispatch(buffer: Buffer, permute: bool, rest: dict[str, Any], hidden: Tensor, topk_idx: Tensor | None,
                 topk_weights: Tensor | None, routing_map: Tensor | None, probs: Tensor | None) -> tuple[Any, ...]:
    """The buffer's verb, and quantisation around it where rest["dispatch_dtype"] asks for one. No gradients."""
    rest = dict(rest)
    fmt, payload = quantize.format_of(rest.pop("dispatch_dtype", None), hidden.shape[1]), hidden
    if fmt:
        payload, rest["scaling_factor"] = quantize.quantize(hidden, fmt)
    verb = buffer.dispatch_with_permute if permute else buffer.dispatch
    out = verb(hidden=payload, topk_idx=topk_idx, topk_weights=topk_weights, routing_map=routing_map, probs=probs,
               **rest)
    return (quantize.dequantize(out[0], out[2], fmt, hidden.dtype), out[1], None, *out[3:]) if fmt else out


def run_combine(buffer: Buffer, permute: bool, **arguments: Any) -> Combined:
    """The buffer's verb. No gradients."""
    return (buffer.combine_with_unpermute if permute else buffer.combine)(**arguments)


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, buffer: Buffer, permute: bool, rest: dict[str, Any], hidden: Tensor, topk_idx: Tensor | None,
                topk_weights: Tensor | None, routing_map: Tensor | None, probs: Tensor | None) -> tuple[Any, ...]:
        out = run_dispatch(buffer, permute, rest, hidden, topk_idx, topk_weights, routing_map, probs)
        ctx.buffer, ctx.permute, ctx.handle = buffer, permute, out[-1]
        ctx.weights_are_topk = topk_weights is not None
        ctx.save_for_backward(topk_idx)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(t for t in out[2:-1] if isinstance(t, torch.Tensor)))
        ctx.like = hidden.new_empty(0), out[0].shape
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_rows: Tensor | None, grad_weights: Tensor | None,
                 *_: None) -> tuple[Tensor | None, ...]:
        nothing = (None,) * 8
        if grad_rows is None and grad_weights is None:
            return nothing
        (empty, shape), (topk_idx,) = ctx.like, ctx.saved_tensors
        if grad_rows is None:  # only the weights were used: the sum still moves whole rows
            grad_rows = empty.new_zeros(shape)
        grad_hidden, grad_dense = run_combine(ctx.buffer, ctx.permute, hidden=grad_rows, probs=grad_weights,
                                               handle=ctx.handle)
        if grad_dense is None or not ctx.weights_are_topk:
            return *nothing[:3], grad_hidden, None, None, None, grad_dense
        grad_topk = grad_dense.gather(1, topk_idx.long().clamp(min=0)).masked_fill(topk_idx < 0, 0.0)
        return *nothing[:3], grad_hidden, None, grad_topk, None, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, buffer: Buffer, permute: bool, handle: Handle, fp32_partials: bool, hidden: Tensor,
                probs: Tensor | None) -> Combined:
        out = run_combine(buffer, permute, hidden=hidden, probs=probs, handle=handle,
                           fp32_partials=fp32_partials)
        ctx.buffer, ctx.permute, ctx.handle = buffer, permute, handle
        ctx.num_rows = hidden.shape[0]
        ctx.like = hidden.new_empty(0), out[0].shape
        ctx.set_materialize_grads(False)
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_tokens: Tensor | None, grad_probs: Tensor | None) -> tuple[Tensor | None, ...]:
        if grad_tokens is None and grad_probs is None:
            return (None,) * 6
        if grad_tokens is None:
            grad_tokens = ctx.like[0].new_zeros(ctx.like[1])
        rest = {"num_permuted_tokens": ctx.num_rows} if ctx.permute else {}
        verb = ctx.buffer.dispatch_with_permute if ctx.permute else ctx.buffer.dispatch
        grad_hidden, grad_weights, *_ = verb(hidden=grad_tokens, probs=grad_probs, handle=ctx.handle, **rest)
        return None, None, None, None, grad_hidden, grad_weights
