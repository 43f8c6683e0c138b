"""The weighted activations on a GPU: one kernel forward, one backward that also sums dprob. Not yet run on a GPU.

Forward: a program a tile of one row. Backward: a program a row, which goes over the row's tiles in ascending order
and keeps dprob's sum in registers: one writer, a fixed order, no atomics. All arithmetic fp32; GELU's
(1 + tanh u) / 2 is sigmoid(2u), which does not cancel for negative u.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from hybrid_ep.moe.triton_rounding import LAUNCH, round_to

_KIND = {"swiglu": 0, "geglu": 1, "geglu_erf": 4, "silu": 0, "gelu": 1, "gelu_erf": 4, "relu": 2, "relu2": 3}
_GATED = ("swiglu", "geglu", "geglu_erf")
_BLOCK = 1024


@triton.jit
def _act_and_slope(x, KIND: tl.constexpr):
    if KIND == 0:
        s = 1.0 / (1.0 + tl.exp(-x))
        return x * s, s * (1.0 + x * (1.0 - s))
    if KIND == 1:
        s = 1.0 / (1.0 + tl.exp(-1.5957691216057308 * (x + 0.044715 * x * x * x)))
        return x * s, s + x * s * (1.0 - s) * 1.5957691216057308 * (1.0 + 0.134145 * x * x)
    if KIND == 4:
        normal = 0.5 * (1.0 + tl.math.erf(x * 0.7071067811865476))
        return x * normal, normal + x * tl.exp(-0.5 * x * x) * 0.3989422804014327
    positive = tl.where(x > 0, x, x * 0.0)  # NaN stays NaN
    if KIND == 2:
        return positive, tl.where(x > 0, 1.0, 0.0)
    return positive * positive, 2.0 * positive


@triton.jit
def _forward_kernel(
    h_ptr, prob_ptr, out_ptr, f, KIND: tl.constexpr, GATED: tl.constexpr, WEIGHTED: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < f
    width = 2 * f if GATED else f
    gate = tl.load(h_ptr + row * width + column, mask=inside, other=0).to(tl.float32)
    value, _ = _act_and_slope(gate, KIND)
    if GATED:
        value = value * tl.load(h_ptr + row * width + f + column, mask=inside, other=0).to(tl.float32)
    if WEIGHTED:
        prob = tl.load(prob_ptr + row)
        value = tl.where(prob == 0, 0.0, value * prob)
    tl.store(out_ptr + row * f + column, round_to(value, out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _backward_kernel(
    h_ptr,
    prob_ptr,
    grad_ptr,
    dh_ptr,
    dprob_ptr,
    f,
    KIND: tl.constexpr,
    GATED: tl.constexpr,
    WEIGHTED: tl.constexpr,
    DPROB: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    width = 2 * f if GATED else f
    prob = 1.0
    if WEIGHTED:
        prob = tl.load(prob_ptr + row)
    total = tl.sum(tl.zeros((BLOCK,), dtype=tl.float32), 0)
    for start in range(0, f, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < f
        gate = tl.load(h_ptr + row * width + column, mask=inside, other=0).to(tl.float32)
        grad = tl.load(grad_ptr + row * f + column, mask=inside, other=0).to(tl.float32)
        act, slope = _act_and_slope(gate, KIND)
        dgate = grad * prob * slope
        if GATED:
            up = tl.load(h_ptr + row * width + f + column, mask=inside, other=0).to(tl.float32)
            dup = grad * prob * act
            if WEIGHTED:
                dup = tl.where(prob == 0, 0.0, dup)
            tl.store(dh_ptr + row * width + f + column, round_to(dup, dh_ptr.dtype.element_ty), mask=inside)
            dgate = dgate * up
            act = act * up
        if WEIGHTED:
            dgate = tl.where(prob == 0, 0.0, dgate)
        tl.store(dh_ptr + row * width + column, round_to(dgate, dh_ptr.dtype.element_ty), mask=inside)
        if DPROB:
            total += tl.sum(tl.where(inside, grad * act, 0.0), 0)
    if DPROB:
        tl.store(dprob_ptr + row, total)


def forward(h: torch.Tensor, prob: torch.Tensor | None, kind: str) -> torch.Tensor:
    """h [N, 2F] or [N, F] contiguous, prob fp32 [N] or None -> [N, F]."""
    gated = kind in _GATED
    f = h.shape[1] // 2 if gated else h.shape[1]
    out = h.new_empty(h.shape[0], f)
    if out.numel():
        _forward_kernel[(h.shape[0], triton.cdiv(f, _BLOCK))](
            h,
            h if prob is None else prob,
            out,
            f,
            KIND=_KIND[kind],
            GATED=gated,
            WEIGHTED=prob is not None,
            BLOCK=_BLOCK,
            **LAUNCH,
        )
    return out


def backward(
    h: torch.Tensor, prob: torch.Tensor | None, grad: torch.Tensor, kind: str, want_dprob: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(dh like h, dprob fp32 [N] or None)."""
    gated = kind in _GATED
    f = grad.shape[1]
    dh = torch.empty_like(h)
    dprob = torch.zeros_like(prob) if prob is not None and want_dprob else None
    if grad.numel():
        _backward_kernel[(h.shape[0],)](
            h,
            h if prob is None else prob,
            grad,
            dh,
            h if dprob is None else dprob,
            f,
            KIND=_KIND[kind],
            GATED=gated,
            WEIGHTED=prob is not None,
            DPROB=want_dprob,
            BLOCK=_BLOCK,
            **LAUNCH,
        )
    return dh, dprob
