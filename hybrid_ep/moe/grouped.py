"""grouped_mm: a matrix product per expert, exact for experts that received nothing and for rows behind the last.

Three things go wrong in grouped GEMMs with ragged groups, and each has its exact answer here: gradients of experts
without rows that nobody writes (`probe` decides the remedy), rows behind the last group that nobody writes, in the
output and, unseen, in the gradient that autograd hands on (both are stored as zeros), and calls without any row
(answered with zeros of the right shapes). Raising a count instead of adding rows is never an answer: the expert
would multiply its neighbour's rows.
"""

from __future__ import annotations

import logging

import torch

from hybrid_ep.moe import padding, probing
from hybrid_ep.moe.backends import BACKENDS, FLOATS

log = logging.getLogger("hybrid_ep.moe")
_said: set[tuple] = set()


def grouped_mm(x: torch.Tensor, w: torch.Tensor, offsets: torch.Tensor, *, backend: str = "auto",
               tail: bool = True) -> torch.Tensor:
    """[N, F]: rows of group e of x times w[e]; rows from offsets[-1] on are zero. Differentiable in x and w.

    x [N, K] and w [E, K, F] of one dtype (bf16, fp16, fp32), any strides; a weight stored as [E, F, K] goes in as
    w.transpose(1, 2), without a copy. offsets int32 or int64 [E], on x's device: the row where each group ends,
    ascending, the last at most N; groups may be empty. backend: "torch", "loop", "te", or "auto": torch's where it
    takes the shape and the probe finds it usable, else the loop, said once in the log. tail: False promises that
    offsets[-1] is N, and saves clearing.

    Gradients: rows behind the last group get and give nothing, whatever they or their gradients hold (NaN too);
    weight gradients of experts without rows are exact zeros. With "torch" nothing waits for the device (the first
    call per device and dtype, which probes, does). Raises ValueError for a wrong argument; on a CPU offsets are
    checked too."""
    _check(x, w, offsets, tail)
    chosen, remedy = _choose(backend, x, w)
    return _GroupedMM.apply(x, w, offsets.to(torch.int32), chosen, remedy, tail)


class _GroupedMM(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w, offsets, backend, remedy, tail):
        ctx.save_for_backward(x, w, offsets)
        ctx.facts = backend, remedy, tail
        return _rows_times_weights(x, w, offsets, *ctx.facts)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        x, w, offsets = ctx.saved_tensors
        backend, remedy, tail = ctx.facts
        grad = grad.contiguous()  # of a sum it is one number seen [N, F] times, which GEMMs do not take
        dx = dw = None
        if ctx.needs_input_grad[0]:
            dx = _rows_times_weights(grad, w.transpose(1, 2), offsets, backend, remedy, tail)
        if ctx.needs_input_grad[1]:
            dw = _weight_gradient(x, grad, offsets, backend, remedy)
        return dx, dw, None, None, None, None


def _rows_times_weights(x, w, offsets, backend, remedy, tail):
    if x.shape[0] == 0 or w.numel() == 0:
        return x.new_zeros(x.shape[0], w.shape[2])
    if remedy == "pad_empty":
        padded = padding.pad_groups(x, offsets, probing.PAD_ROWS, empty_only=True)
        out = backend.mm(padded.rows, w, padded.offsets)[padded.row_of]
    else:
        out = backend.mm(x, w, offsets)
    return padding.zero_tail_(out, offsets) if tail else out


def _weight_gradient(x, grad, offsets, backend, remedy):
    if x.shape[0] == 0 or x.shape[1] == 0 or grad.shape[1] == 0:
        return x.new_zeros(offsets.numel(), x.shape[1], grad.shape[1])
    if remedy == "pad_empty":
        x, at, _ = padding.pad_groups(x, offsets, probing.PAD_ROWS, empty_only=True)
        return backend.wgrad(x, padding.pad_groups(grad, offsets, probing.PAD_ROWS, empty_only=True).rows, at)
    dw = backend.wgrad(x, grad, offsets)
    return padding.zero_empty_groups_(dw, offsets) if remedy == "zero_empty_wgrad" else dw


def _choose(name: str, x: torch.Tensor, w: torch.Tensor):
    """(backend, remedy)."""
    if name != "auto" and name not in BACKENDS:
        raise ValueError(f"backend={name!r} is unknown; give 'auto' or one of {', '.join(BACKENDS)}")
    reasons = []
    for candidate in ("torch", "loop") if name == "auto" else (name,):
        backend = BACKENDS[candidate]
        why = backend.refusal(x.device, x.dtype, tuple(w.shape))
        if why is None:
            known = probing.probe(x.device, x.dtype, candidate)
            if known.remedy != "unusable":
                _say_once(name, candidate, reasons, x, w)
                return backend, known.remedy
            why = known.found
        reasons.append(f"{candidate}: {why}")
    raise ValueError(f"backend={name!r} cannot multiply {tuple(x.shape)} rows of {x.dtype} on {x.device} by weights "
                     f"{tuple(w.shape)}: {'; '.join(reasons)}")


def _say_once(name, candidate, reasons, x, w):
    key = (name, candidate, x.device, x.dtype, tuple(w.shape))
    if reasons and key not in _said:
        _said.add(key)
        log.warning("grouped GEMM of %s %s weights on %s runs in backend %s (%s)", x.dtype, tuple(w.shape), x.device,
                    candidate, "; ".join(reasons))


def _check(x, w, offsets, tail):
    if x.dim() != 2 or w.dim() != 3 or x.shape[1] != w.shape[1]:
        raise ValueError(f"x {tuple(x.shape)} and w {tuple(w.shape)} must be [N, K] and [E, K, F]; a weight stored "
                         "[E, F, K] goes in as w.transpose(1, 2)")
    if x.dtype not in FLOATS or w.dtype != x.dtype:
        raise ValueError(f"x is {x.dtype} and w is {w.dtype}; both must be one of {', '.join(map(str, FLOATS))}")
    if offsets.dtype not in (torch.int32, torch.int64) or offsets.shape != w.shape[:1] or w.shape[0] == 0:
        raise ValueError(f"offsets {offsets.dtype} {tuple(offsets.shape)} must be int32 or int64 [E] with the "
                         f"E={w.shape[0]} >= 1 experts of w; it holds the row at which each group ends")
    if not x.device == w.device == offsets.device:
        raise ValueError(f"x is on {x.device}, w on {w.device}, offsets on {offsets.device}; move them to one device")
    if offsets.device.type == "cpu":
        ends = [0, *offsets.tolist(), x.shape[0]]
        if any(a > b for a, b in zip(ends, ends[1:], strict=False)) or (not tail and ends[-2] != x.shape[0]):
            raise ValueError(f"offsets={ends[1:-1]} must ascend from 0 to {'at most ' if tail else ''}the "
                             f"{x.shape[0]} rows of x{'' if tail else ' (tail=False says that none lie behind)'}")
