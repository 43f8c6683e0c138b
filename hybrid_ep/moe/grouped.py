"""grouped_mm: a matrix product per expert, exact for experts that received nothing and for rows behind the last.

Three things go wrong in grouped GEMMs with ragged groups, and each has its exact answer here: gradients of experts
without rows that nobody writes (`probe` decides the remedy), rows behind the last group that nobody writes, in the
output and, unseen, in the gradient that autograd hands on (both are stored as zeros), and calls without any row
(answered with zeros of the right shapes). Raising a count instead of adding rows is never an answer: the expert
would multiply its neighbour's rows.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from hybrid_ep.moe import padding, probing
from hybrid_ep.moe.backends import BACKENDS, FLOATS, Backend

log = logging.getLogger("hybrid_ep.moe")
_said: set[tuple[Any, ...]] = set()
Machine = tuple[Backend, str]  # with the remedy for groups without rows


def grouped_mm(
    x: torch.Tensor,
    w: torch.Tensor | Sequence[torch.Tensor],
    offsets: torch.Tensor,
    *,
    backend: str = "auto",
    tail: bool = True,
    first_rows: Sequence[int] = (0,),
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """[N, F]: rows of group e of x times w[e]; rows from offsets[-1] on are zero. Differentiable in x and w.

    x [N, K] and w [E, K, F] of one dtype (bf16, fp16, fp32), any strides; a weight stored as [E, F, K] goes in as
    w.transpose(1, 2), without a copy. offsets int32 or int64 [E], on x's device: the row where each group ends,
    ascending, the last at most N; groups may be empty. backend: "torch", "loop", "te", or "auto": torch's where it
    takes the shape and the probe finds it usable, else the loop, said once in the log. tail: False promises that
    offsets[-1] is N, and saves clearing.

    w may be several stacks [E_i, K, F] of weights that live in different memory, their experts one after the other:
    E is then the sum of E_i, and first_rows says, on the host, at which row the experts of each stack begin. No
    weight is copied; the outputs of all stacks but the first are.

    out [N, F], contiguous and not part of a graph: where the product is stored and what is returned, e.g. of
    buffer.empty(), whose rows combine reads where they lie. The loop stores there; results of other backends are
    copied, so that "auto" takes the loop for it on a CPU.

    Gradients: rows behind the last group get and give nothing, whatever they or their gradients hold (NaN too);
    weight gradients of experts without rows are exact zeros. With "torch" nothing waits for the device (the first
    call per device and dtype, which probes, does). Raises ValueError for a wrong argument; on a CPU offsets are
    checked too."""
    stacks = (w,) if isinstance(w, torch.Tensor) else tuple(w)
    _check(x, stacks, offsets, tail, first_rows)
    if out is not None:
        _check_out(out, x, stacks)
    machines = tuple(_choose(backend, x, stack, out is not None) for stack in stacks)
    return _GroupedMM.apply(x, offsets.to(torch.int32), (*first_rows, x.shape[0]), machines, tail, out, *stacks)


class _GroupedMM(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        offsets: torch.Tensor,
        bounds: tuple[int, ...],
        machines: tuple[Machine, ...],
        tail: bool,
        out: torch.Tensor | None,
        *stacks: torch.Tensor,
    ) -> torch.Tensor:
        ctx.save_for_backward(x, offsets, *stacks)
        ctx.facts = bounds, machines, tail
        if out is not None:
            ctx.mark_dirty(out)
        return _rows_times_stacks(x, stacks, offsets, bounds, machines, tail, out)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, offsets, *stacks = ctx.saved_tensors
        bounds, machines, tail = ctx.facts
        grad = grad.contiguous()  # of a sum it is one number seen [N, F] times, which GEMMs do not take
        dx = None
        if ctx.needs_input_grad[0]:
            dx = _rows_times_stacks(grad, [w.transpose(1, 2) for w in stacks], offsets, *ctx.facts)
        dw, wanted = [], ctx.needs_input_grad[6:]
        for i, (first, last, ends) in enumerate(_parts(stacks, offsets, bounds)):
            dw.append(_weight_gradient(x[first:last], grad[first:last], ends, *machines[i]) if wanted[i] else None)
        return dx, None, None, None, None, None, *dw


def _parts(
    stacks: Sequence[torch.Tensor], offsets: torch.Tensor, bounds: Sequence[int]
) -> Iterator[tuple[int, int, torch.Tensor]]:
    """(first row, last row, ends of its groups counted from the first row) of every stack."""
    ends = offsets.split([stack.shape[0] for stack in stacks])
    for first, last, own in zip(bounds, bounds[1:], ends, strict=False):
        yield first, last, own - first if first else own


def _rows_times_stacks(
    x: torch.Tensor,
    stacks: Sequence[torch.Tensor],
    offsets: torch.Tensor,
    bounds: Sequence[int],
    machines: Sequence[Machine],
    tail: bool,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """The first stack's product goes over all rows and leaves those of the others to them: nothing is joined. With
    `out` each goes to its rows there."""
    if len(stacks) == 1:
        return _rows_times_weights(x, stacks[0], offsets, *machines[0], tail, out)
    place = out
    for (first, last, ends), w, machine in zip(_parts(stacks, offsets, bounds), stacks, machines, strict=True):
        if place is not None:
            _rows_times_weights(x[first:last], w, ends, *machine, tail=False, out=place[first:last])
        elif out is None:
            out = _rows_times_weights(x, w, ends, *machine, tail=False) if last else x.new_empty(len(x), w.shape[2])
        elif last > first:
            out[first:last] = _rows_times_weights(x[first:last], w, ends, *machine, tail=False)
    assert out is not None  # there is at least one stack
    return padding.zero_tail_(out, offsets) if tail else out


def _rows_times_weights(
    x: torch.Tensor,
    w: torch.Tensor,
    offsets: torch.Tensor,
    backend: Backend,
    remedy: str,
    tail: bool,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    if x.shape[0] == 0 or w.numel() == 0:
        return x.new_zeros(x.shape[0], w.shape[2]) if out is None else out.zero_()
    if remedy == "pad_empty":
        padded = padding.pad_groups(x, offsets, probing.PAD_ROWS, empty_only=True)
        made = backend.mm(padded.rows, w, padded.offsets)[padded.row_of]
        out = made if out is None else out.copy_(made)
    elif out is None:
        out = backend.mm(x, w, offsets)
    else:
        backend.mm_into(x, w, offsets, out)
    return padding.zero_tail_(out, offsets) if tail else out


def _weight_gradient(
    x: torch.Tensor, grad: torch.Tensor, offsets: torch.Tensor, backend: Backend, remedy: str
) -> torch.Tensor:
    if x.shape[0] == 0 or x.shape[1] == 0 or grad.shape[1] == 0:
        return x.new_zeros(offsets.numel(), x.shape[1], grad.shape[1])
    if remedy == "pad_empty":
        x, at, _ = padding.pad_groups(x, offsets, probing.PAD_ROWS, empty_only=True)
        return backend.wgrad(x, padding.pad_groups(grad, offsets, probing.PAD_ROWS, empty_only=True).rows, at)
    dw = backend.wgrad(x, grad, offsets)
    return padding.zero_empty_groups_(dw, offsets) if remedy == "zero_empty_wgrad" else dw


def _choose(name: str, x: torch.Tensor, w: torch.Tensor, stores: bool) -> Machine:
    """(backend, remedy). stores: the result has a place."""
    if name != "auto" and name not in BACKENDS:
        raise ValueError(f"backend={name!r} is unknown; give 'auto' or one of {', '.join(BACKENDS)}")
    reasons: list[str] = []
    best = ("loop", "torch") if stores and x.device.type == "cpu" else ("torch", "loop")
    for candidate in best if name == "auto" else (name,):
        backend = BACKENDS[candidate]
        why = backend.refusal(x.device, x.dtype, tuple(w.shape))
        if why is None:
            known = probing.probe(x.device, x.dtype, candidate)
            if known.remedy != "unusable":
                _say_once(name, candidate, reasons, x, w)
                return backend, known.remedy
            why = known.found
        reasons.append(f"{candidate}: {why}")
    raise ValueError(
        f"backend={name!r} cannot multiply {tuple(x.shape)} rows of {x.dtype} on {x.device} by weights "
        f"{tuple(w.shape)}: {'; '.join(reasons)}"
    )


def _check_out(out: torch.Tensor, x: torch.Tensor, stacks: Sequence[torch.Tensor]) -> None:
    shape = (x.shape[0], stacks[0].shape[2])
    if tuple(out.shape) != shape or out.dtype != x.dtype or out.device != x.device or not out.is_contiguous():
        raise ValueError(
            f"out is {out.dtype} {tuple(out.shape)} on {out.device}{'' if out.is_contiguous() else ', strided'}; give "
            f"contiguous {x.dtype} {shape} on {x.device}"
        )
    if out.requires_grad or out.grad_fn is not None:
        raise ValueError("out is part of a graph of autograd; give memory that is nobody's result, as buffer.empty()")
    inside = {t.untyped_storage().data_ptr() for t in (x, *stacks)}
    if out.numel() and out.untyped_storage().data_ptr() in inside:
        raise ValueError("out shares memory with x or w; give memory of its own")


def _say_once(name: str, candidate: str, reasons: list[str], x: torch.Tensor, w: torch.Tensor) -> None:
    key = (name, candidate, x.device, x.dtype, tuple(w.shape))
    if reasons and key not in _said:
        _said.add(key)
        log.warning(
            "grouped GEMM of %s %s weights on %s runs in backend %s (%s)",
            x.dtype,
            tuple(w.shape),
            x.device,
            candidate,
            "; ".join(reasons),
        )


def _check(
    x: torch.Tensor, stacks: Sequence[torch.Tensor], offsets: torch.Tensor, tail: bool, first_rows: Sequence[int]
) -> None:
    num_groups = 0
    for w in stacks:
        if x.dim() != 2 or w.dim() != 3 or x.shape[1] != w.shape[1] or w.shape[2] != stacks[0].shape[2]:
            raise ValueError(
                f"x {tuple(x.shape)} and w {tuple(w.shape)} must be [N, K] and [E, K, F]; a weight stored "
                "[E, F, K] goes in as w.transpose(1, 2)"
            )
        if x.dtype not in FLOATS or w.dtype != x.dtype:
            raise ValueError(f"x is {x.dtype} and w is {w.dtype}; both must be one of {', '.join(map(str, FLOATS))}")
        if not x.device == w.device == offsets.device:
            raise ValueError(
                f"x is on {x.device}, w on {w.device}, offsets on {offsets.device}; move them to one device"
            )
        num_groups += w.shape[0]
    if offsets.dtype not in (torch.int32, torch.int64) or offsets.shape != (num_groups,) or num_groups == 0:
        raise ValueError(
            f"offsets {offsets.dtype} {tuple(offsets.shape)} must be int32 or int64 [E] with the "
            f"E={num_groups} >= 1 experts of w; it holds the row at which each group ends"
        )
    bounds = [*first_rows, x.shape[0]]
    if len(first_rows) != len(stacks) or bounds[0] != 0 or bounds != sorted(bounds):
        raise ValueError(
            f"first_rows={tuple(first_rows)} must hold the first row of each of the {len(stacks)} stacks "
            f"of w: 0, then ascending to at most the {x.shape[0]} rows of x"
        )
    if offsets.device.type == "cpu":
        ends = [0, *offsets.tolist(), x.shape[0]]
        if any(a > b for a, b in zip(ends, ends[1:], strict=False)) or (not tail and ends[-2] != x.shape[0]):
            raise ValueError(
                f"offsets={ends[1:-1]} must ascend from 0 to {'at most ' if tail else ''}the "
                f"{x.shape[0]} rows of x{'' if tail else ' (tail=False says that none lie behind)'}"
            )
        own, at = offsets.split([w.shape[0] for w in stacks]), list(bounds[1:])
        if any(int(ends[-1]) != end for ends, end in zip(own[:-1], at, strict=False)):
            raise ValueError(
                f"first_rows={tuple(first_rows)} must be where offsets={offsets.tolist()} end the groups "
                "of the stack before"
            )
