"""Weighted activations: act(gate) * up * prob, the router's probability applied before the second matrix.

    h = 2F columns [gate | up]:   swiglu  silu(gate) * up * prob      geglu  gelu(gate) * up * prob
    h = F columns:                silu, gelu, relu, relu2: act(h) * prob

gelu and geglu are the tanh form; gelu_erf and geglu_erf the exact one, which torch and Megatron call gelu.

Applied here and not after the second matrix, prob needs no saved output of that matrix for its gradient, and
combine's backward is a plain gather. Everything between reading h and writing the result is fp32 and is rounded
once, to nearest even. The backward recomputes the activation from h and sums dprob in the same pass. On GPUs one
Triton kernel each way; on CPUs torch over blocks of rows that stay in the cache. An h of fp64 stays fp64 throughout,
by torch on GPUs too: for checks, not for speed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import torch

from hybrid_ep.moe import checks

GATED = {"swiglu": "silu", "geglu": "gelu", "geglu_erf": "gelu_erf"}
PLAIN = ("silu", "gelu", "gelu_erf", "relu", "relu2")
KINDS = (*GATED, *PLAIN)
FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
_BLOCK_ELEMENTS = 1 << 16  # fp32 temporaries of 256 KiB, inside a core's second-level cache
_NORMAL = 1 / math.sqrt(2 * math.pi)
_GELU_A, _GELU_B = 2 * math.sqrt(2 / math.pi), 0.044715  # (1 + tanh u) / 2 = sigmoid(2u), which does not cancel


def weighted_activation(h: torch.Tensor, prob: torch.Tensor | None, kind: str = "swiglu") -> torch.Tensor:
    """[N, F] in h's dtype. Differentiable in h and prob.

    h [N, 2F] for the gated kinds "swiglu", "geglu", "geglu_erf" (the gate's columns first), [N, F] for "silu", "gelu",
    "gelu_erf", "relu", "relu2"; bf16, fp16, fp32 or fp64. prob fp32 or fp64 [N] or [N, 1], or None for no weight.
    A prob of exactly 0 gives zeros and a zero gradient in h, also where the activation is infinite or NaN: padding and
    tail rows are harmless then, and get dprob = 0 only where h is finite. Raises ValueError."""
    if kind not in KINDS:
        raise ValueError(f"kind={kind!r} is unknown; give one of {', '.join(KINDS)}")
    checks.tensor("h", h, "floating [N, 2F] of a gated kind, else [N, F]")
    if h.dim() != 2 or h.dtype not in FLOATS or (kind in GATED and h.shape[1] % 2):
        raise ValueError(
            f"h {h.dtype} {tuple(h.shape)} must be a floating [N, {'2F' if kind in GATED else 'F'}] for kind={kind!r}"
        )
    if prob is not None:
        checks.tensor("prob", prob, "fp32 or fp64 [N] or [N, 1], or None")
        if prob.dtype not in (torch.float32, torch.float64) or prob.shape not in ((h.shape[0],), (h.shape[0], 1)):
            raise ValueError(
                f"prob {prob.dtype} {tuple(prob.shape)} must be fp32 or fp64 [N] or [N, 1] "
                f"with the {h.shape[0]} rows of h"
            )
        if prob.device != h.device:
            raise ValueError(f"h is on {h.device}, prob on {prob.device}; move them to one device")
    return _WeightedActivation.apply(h, prob, kind)


def weighted_swiglu(h: torch.Tensor, prob: torch.Tensor | None = None) -> torch.Tensor:
    """silu(gate) * up * prob: weighted_activation of kind "swiglu"."""
    return weighted_activation(h, prob, "swiglu")


class _WeightedActivation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, h: torch.Tensor, prob: torch.Tensor | None, kind: str) -> torch.Tensor:
        h = h.contiguous()
        ctx.save_for_backward(h, prob)
        ctx.kind = kind
        flat = None if prob is None else prob.reshape(-1).contiguous()
        return (_kernels().forward if _fused(h, flat) else _forward)(h, flat, kind)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None, None]:
        h, prob = ctx.saved_tensors
        flat = None if prob is None else prob.reshape(-1).contiguous()
        run = _kernels().backward if _fused(h, flat) else _backward
        dh, dprob = run(h, flat, grad.contiguous(), ctx.kind, prob is not None and ctx.needs_input_grad[1])
        return dh, None if dprob is None else dprob.view(prob.shape), None


def _fused(h: torch.Tensor, prob: torch.Tensor | None) -> bool:
    """Whether the Triton kernels may do it. They compute in fp32, which would cut fp64 of either down in silence."""
    return h.device.type == "cuda" and torch.float64 not in (h.dtype, None if prob is None else prob.dtype)


def _kernels() -> ModuleType:
    from hybrid_ep.moe import triton_activations  # needs Triton, which every GPU build of torch brings

    return triton_activations


def _blocks(num_rows: int, num_columns: int) -> Iterator[slice]:
    step = max(1, _BLOCK_ELEMENTS // max(num_columns, 1))
    return (slice(at, min(at + step, num_rows)) for at in range(0, num_rows, step))


def _wide(x: torch.Tensor) -> torch.Tensor:
    return x if x.dtype == torch.float64 else x.float()


def _forward(h: torch.Tensor, prob: torch.Tensor | None, kind: str) -> torch.Tensor:
    f = h.shape[1] // 2 if kind in GATED else h.shape[1]
    out = h.new_empty(h.shape[0], f)
    for rows in _blocks(*h.shape):
        value = _act(_wide(h[rows, :f]), GATED.get(kind, kind))
        if kind in GATED:
            value = value * _wide(h[rows, f:])
        if prob is not None:
            weight = prob[rows, None]
            value = (value * weight).masked_fill_(weight == 0, 0)
        out[rows] = value  # the one rounding
    return out


def _backward(
    h: torch.Tensor, prob: torch.Tensor | None, grad: torch.Tensor, kind: str, want_dprob: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    gated = kind in GATED
    f = grad.shape[1]
    dh, dprob = torch.empty_like(h), torch.empty_like(prob) if prob is not None and want_dprob else None
    for rows in _blocks(*h.shape):
        g, gate = _wide(grad[rows]), _wide(h[rows, :f])
        act, slope = _act(gate, GATED.get(kind, kind)), _slope(gate, GATED.get(kind, kind))
        up = _wide(h[rows, f:]) if gated else None
        if dprob is not None:
            dprob[rows] = (g * (act if up is None else act * up)).sum(1)
        scaled = g
        if prob is not None:
            scaled = g * prob[rows, None]
        dgate = scaled * slope if up is None else scaled * slope * up
        dup = None if up is None else scaled * act
        if prob is not None:
            none = prob[rows, None] == 0
            dgate = dgate.masked_fill_(none, 0)
            dup = None if dup is None else dup.masked_fill_(none, 0)
        dh[rows, :f] = dgate
        if dup is not None:
            dh[rows, f:] = dup
    return dh, dprob


def _act(x: torch.Tensor, kind: str) -> torch.Tensor:
    if kind == "silu":
        return x * torch.sigmoid(x)
    if kind == "gelu":
        return x * torch.sigmoid(_GELU_A * (x + _GELU_B * x * x * x))
    if kind == "gelu_erf":
        return x * torch.special.ndtr(x)
    positive = x.clamp(min=0)
    return positive * positive if kind == "relu2" else positive


def _slope(x: torch.Tensor, kind: str) -> torch.Tensor:
    if kind == "silu":
        s = torch.sigmoid(x)
        return s * (1 + x * (1 - s))
    if kind == "gelu":
        s = torch.sigmoid(_GELU_A * (x + _GELU_B * x * x * x))
        return s + x * s * (1 - s) * _GELU_A * (1 + 3 * _GELU_B * x * x)
    if kind == "gelu_erf":
        return torch.special.ndtr(x) + x * torch.exp(-0.5 * x * x) * _NORMAL
    return 2 * x.clamp(min=0) if kind == "relu2" else (x > 0).to(x.dtype)
