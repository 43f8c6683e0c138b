"""What `grouped_mm` is given, judged before anything is multiplied."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch

from hybrid_ep.moe import checks
from hybrid_ep.moe.backends import FLOATS


def stacks_of(given: Any) -> tuple[torch.Tensor, ...]:
    try:
        stacks = tuple(given)
    except TypeError:
        stacks = (given,)
    for n, w in enumerate(stacks):
        checks.tensor(f"w[{n}]" if len(stacks) > 1 else "w", w, "weights [E, K, F], or several such stacks")
    return stacks


def operands(
    x: torch.Tensor,
    stacks: Sequence[torch.Tensor],
    offsets: torch.Tensor,
    tail: bool,
    first_rows: tuple[int, ...] | None,
) -> None:
    num_groups = 0
    checks.tensor("x", x, "rows [N, K]")
    checks.tensor("offsets", offsets, "int32 or int64 [E], the row at which each group ends")
    for w in stacks:
        checks.tensor("w", w, "weights [E, K, F]")
        if x.dim() != 2 or w.dim() != 3 or x.shape[1] != w.shape[1] or w.shape[2] != stacks[0].shape[2]:
            raise ValueError(
                f"x {tuple(x.shape)} and w {tuple(w.shape)} must be [N, K] and [E, K, F]; a weight stored "
                "[E, F, K] goes in as w.transpose(1, 2)"
            )
        if x.dtype not in FLOATS or w.dtype not in FLOATS:
            raise ValueError(f"x is {x.dtype} and w is {w.dtype}; both must be one of {', '.join(map(str, FLOATS))}")
        if w.dtype != x.dtype:
            raise ValueError(
                f"x is {x.dtype} and w is {w.dtype}, which must be the same (autocast changes neither): give one of "
                "them in the other's"
            )
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
    if first_rows is not None:
        _check_first_rows(first_rows, x.shape[0], len(stacks))
    ends = checks.row_ends(offsets, x.shape[0], tail=tail)
    if ends is not None and first_rows is not None:
        starts = [0, *ends]
        begins = (0, *(starts[cut] for cut in itertools.accumulate(w.shape[0] for w in stacks[:-1])))
        if first_rows != begins:
            raise ValueError(f"first_rows={first_rows} must be where offsets={ends} end the groups of the stack before")


def _check_first_rows(first_rows: tuple[int, ...], num_rows: int, num_stacks: int) -> None:
    bounds = [*first_rows, num_rows]
    if len(first_rows) != num_stacks or bounds[0] != 0 or bounds != sorted(bounds):
        raise ValueError(
            f"first_rows={first_rows} must hold the first row of each of the {num_stacks} stacks "
            f"of w: 0, then ascending to at most the {num_rows} rows of x"
        )


def out_memory(out: torch.Tensor, x: torch.Tensor, stacks: Sequence[torch.Tensor]) -> None:
    shape = (x.shape[0], stacks[0].shape[2])
    if not isinstance(out, torch.Tensor):
        raise ValueError(f"out={out!r:.80} is no tensor; give contiguous {x.dtype} {shape} on {x.device}, or None")
    if tuple(out.shape) != shape or out.dtype != x.dtype or out.device != x.device or not out.is_contiguous():
        raise ValueError(
            f"out is {out.dtype} {tuple(out.shape)} on {out.device}{'' if out.is_contiguous() else ', strided'}; give "
            f"contiguous {x.dtype} {shape} on {x.device}"
        )
    if out.requires_grad or out.grad_fn is not None:
        raise ValueError(
            "out is part of a graph of autograd, or a slice of what is; give memory that is nobody's result, as "
            "buffer.empty()"
        )
    if out.is_inference() and not torch.is_inference_mode_enabled():
        raise ValueError("out was made in inference mode, where no gradient may pass; make it outside of that")
    inside = {t.untyped_storage().data_ptr() for t in (x, *stacks)}
    if out.numel() and out.untyped_storage().data_ptr() in inside:
        raise ValueError("out shares memory with x or w; give memory of its own")


def arriving_weights(arriving: Any) -> None:
    if not all(callable(getattr(arriving, name, None)) for name in ("under_way", "wait", "gradients")):
        raise ValueError(
            f"arriving={arriving!r:.80} must have under_way(), wait() and gradients(made), as hybrid_ep.moe.grouped's "
            "Arrivals says, or be None where all weights are here"
        )


def lender(name: str, given: Any) -> None:
    if given is not None and not all(callable(getattr(given, method, None)) for method in ("empty", "registered")):
        raise ValueError(
            f"{name}={given!r:.80} must lend memory by empty() and registered(), as a HybridEPBuffer does; give one, "
            "or None"
        )
