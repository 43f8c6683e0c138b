"""Dispatch and combine as autograd functions, each the other's backward: what hybrid_ep.functional runs in eager code,
and what hybrid_ep.runtime.compiled's operators run inside a compiled graph."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hybrid_ep.payload import quantize
from hybrid_ep.runtime import names, validation
from hybrid_ep.runtime.handle_kinds import DISPATCHED, PERMUTED
from hybrid_ep.runtime.signatures import Buffer, Combined, Handle
from hybrid_ep.runtime.validation import ROW_ALIGNMENT, SUMMABLE


def dispatch(buffer: Buffer, permute: bool, hidden: Tensor, given: dict[str, Any]) -> tuple[Any, ...]:
    """A buffer's dispatch with gradients; given: the other arguments of functional's operator."""
    rest = given | {"handle": names.eager_handle(given["handle"])}
    routing = [rest.pop(name) for name in ("topk_idx", "topk_weights", "routing_map", "probs")]
    return _Dispatch.apply(buffer, permute, rest, hidden, *routing)


def combine(
    buffer: Buffer,
    permute: bool,
    hidden: Tensor,
    handle: Handle,
    probs: Tensor | None,
    fp32_partials: bool,
    order: dict[str, Any] | None = None,
    backward_only: bool = False,
) -> tuple[Any, ...]:
    """A buffer's combine with gradients. order: what else the verb is told, async_finish and previous_event.
    backward_only: NaN in place of the sums, without the verb."""
    rest = {"handle": names.eager_handle(handle), "fp32_partials": fp32_partials, **(order or {})}
    return _Combine.apply(buffer, permute, rest, hidden, probs, backward_only)


def run_dispatch(
    buffer: Buffer,
    permute: bool,
    rest: dict[str, Any],
    hidden: Tensor,
    topk_idx: Tensor | None,
    topk_weights: Tensor | None,
    routing_map: Tensor | None,
    probs: Tensor | None,
) -> tuple[Any, ...]:
    """The buffer's verb, and quantisation around it where rest["dispatch_dtype"] asks for one. No gradients."""
    rest = dict(rest)
    fmt, payload = quantize.format_of(rest.pop("dispatch_dtype", None), hidden.shape[1]), hidden
    if fmt:
        payload, rest["scaling_factor"] = quantize.quantize(hidden, fmt)
    verb = buffer.dispatch_with_permute if permute else buffer.dispatch
    out = verb(
        hidden=payload, topk_idx=topk_idx, topk_weights=topk_weights, routing_map=routing_map, probs=probs, **rest
    )
    return (quantize.dequantize(out[0], out[2], fmt, hidden.dtype), out[1], None, *out[3:]) if fmt else out


def run_combine(buffer: Buffer, permute: bool, **arguments: Any) -> Combined:
    """The buffer's verb. No gradients."""
    return (buffer.combine_with_unpermute if permute else buffer.combine)(**arguments)


def zero_rows(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros for a combine that is to bring weights back alone: of dispatched rows [M, H] in a type that it sums whole
    rows, as of ranks whose rows were used; in another, of which nobody sums any, the narrowest that it does sum."""
    if dtype in SUMMABLE:
        return torch.zeros(tuple(shape), dtype=dtype, device=device)
    return torch.zeros(shape[0], ROW_ALIGNMENT // 2, dtype=torch.bfloat16, device=device)


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        buffer: Buffer,
        permute: bool,
        rest: dict[str, Any],
        hidden: Tensor,
        topk_idx: Tensor | None,
        topk_weights: Tensor | None,
        routing_map: Tensor | None,
        probs: Tensor | None,
    ) -> tuple[Any, ...]:
        out = run_dispatch(buffer, permute, rest, hidden, topk_idx, topk_weights, routing_map, probs)
        ctx.buffer, ctx.permute = buffer, permute
        ctx.handle = out[-2] if rest.get("async_finish") else out[-1]
        ctx.weights_are_topk = topk_weights is not None
        ctx.save_for_backward(topk_idx)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(t for t in out[2:-1] if isinstance(t, torch.Tensor)))
        ctx.like = hidden.new_empty(0), out[0].shape
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(
        ctx: Any, grad_rows: Tensor | None, grad_weights: Tensor | None, *_: None
    ) -> tuple[Tensor | None, ...]:
        nothing = (None,) * 8
        if grad_rows is None and grad_weights is None:
            return nothing
        (empty, shape), (topk_idx,) = ctx.like, ctx.saved_tensors
        if grad_rows is None:  # only the weights were used
            grad_rows = zero_rows(shape, empty.dtype, empty.device)
        grad_hidden, grad_dense = run_combine(
            ctx.buffer, ctx.permute, hidden=grad_rows, probs=grad_weights, handle=ctx.handle
        )
        back = grad_hidden if empty.dtype in SUMMABLE else None
        if grad_dense is None or not ctx.weights_are_topk:
            return *nothing[:3], back, None, None, None, grad_dense
        grad_topk = grad_dense.gather(1, topk_idx.long().clamp(min=0)).masked_fill(topk_idx < 0, 0.0)
        return *nothing[:3], back, None, grad_topk, None, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        buffer: Buffer,
        permute: bool,
        rest: dict[str, Any],
        hidden: Tensor,
        probs: Tensor | None,
        backward_only: bool,
    ) -> tuple[Any, ...]:
        if backward_only:
            kind = PERMUTED if permute else DISPATCHED
            validation.require_tuple(rest["handle"], kind)  # no verb looks at it before the backward
            num_tokens = validation.integer("handle's number of tokens", rest["handle"][kind.config - 1], 0)
            out: tuple[Any, ...] = (hidden.new_full((num_tokens, hidden.shape[1]), float("nan")), None)
        else:
            out = run_combine(buffer, permute, hidden=hidden, probs=probs, **rest)
        ctx.buffer, ctx.permute, ctx.handle = buffer, permute, rest["handle"]
        ctx.num_rows = hidden.shape[0]
        ctx.like = hidden.new_empty(0), out[0].shape
        ctx.set_materialize_grads(False)
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(
        ctx: Any, grad_tokens: Tensor | None, grad_probs: Tensor | None, *_: None
    ) -> tuple[Tensor | None, ...]:
        if grad_tokens is None and grad_probs is None:
            return (None,) * 6
        if grad_tokens is None:
            grad_tokens = ctx.like[0].new_zeros(ctx.like[1])
        rest = {"num_permuted_tokens": ctx.num_rows} if ctx.permute else {}
        verb = ctx.buffer.dispatch_with_permute if ctx.permute else ctx.buffer.dispatch
        grad_hidden, grad_weights, *_ = verb(hidden=grad_tokens, probs=grad_probs, handle=ctx.handle, **rest)
        return None, None, None, grad_hidden, grad_weights, None
