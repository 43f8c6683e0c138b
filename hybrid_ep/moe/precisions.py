"""In what the products of `grouped_mm` are made: "params", the dtype of rows and weights, or "fp8", e4m3 values with a
scale a block (`block_scaled`). Backends of "fp8" have the verbs of `backends`; rows and weights stay in 16 or 32 bits,
and are quantised inside."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch

from hybrid_ep.moe import block_scaled
from hybrid_ep.moe.backends import BACKENDS, FLOATS, Backend, Groups, LoopBackend, Stacks, TritonBackend, asked


class BlockScaledLoop(LoopBackend):
    """The reference, on any device."""

    in_a_graph = "give 'triton'"

    @staticmethod
    def product(x: torch.Tensor, w: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(block_scaled.rows_times_matrix(x, w))

    @staticmethod
    def gradient(x: torch.Tensor, g: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(block_scaled.matrix_gradient(x, g))


class BlockScaledTriton(TritonBackend):
    """Our kernels: quantise, then multiply on the fp8 tensor cores; counts on the device, zeros for empty experts."""

    @classmethod
    def refusal(cls, device: torch.device, dtype: torch.dtype, shape: Sequence[int]) -> str | None:
        if why := cls.absence():
            return why
        if dtype not in FLOATS:
            return f"dtype {dtype} is not one of {', '.join(map(str, FLOATS))}"
        if (why := cls.wrong_device(device)) is not None:
            return why
        _, k, f = shape
        if (k + block_scaled.BLOCK) * (f + block_scaled.BLOCK) >= 2**31:
            return f"a weight of {k} x {f} elements is beyond offsets of 32 bits"
        return None

    @staticmethod
    def objection(stacks: Stacks, groups: Groups) -> str | None:
        from hybrid_ep.moe import triton_block_scaled as kernels

        if (experts := sum(groups.sizes)) > kernels.MAX_GROUPS:
            return f"it takes at most {kernels.MAX_GROUPS} experts a rank, not {experts}"
        return None

    @staticmethod
    def mm(
        x: torch.Tensor, stacks: Stacks, groups: Groups, out: torch.Tensor | None = None, of: range | None = None
    ) -> torch.Tensor:
        from hybrid_ep.moe import triton_block_scaled

        if out is None:
            out = x.new_empty(x.shape[0], stacks[0].shape[2])
        some = None if of is None else (groups.first_group(of), groups.past_group(of))
        asked_for = [stacks[i] for i in asked(groups, of)]
        triton_block_scaled.rows_times_stacks(x.contiguous(), asked_for, groups.ends, out, some)
        return out

    @staticmethod
    def wgrad(x: torch.Tensor, g: torch.Tensor, groups: Groups, of: range | None = None) -> list[torch.Tensor]:
        from hybrid_ep.moe import triton_block_scaled

        firsts = [0, *accumulate(groups.sizes)]
        made = {i: x.new_empty(groups.sizes[i], x.shape[1], g.shape[1]) for i in asked(groups, of)}
        some = groups.first_group(of), groups.past_group(of)
        into = [(firsts[i], dw) for i, dw in made.items()]
        triton_block_scaled.weight_gradients(x.contiguous(), g.contiguous(), groups.ends, into, some)
        return list(made.values())


# precision -> name -> backend.
PRECISIONS: dict[str, dict[str, Backend]] = {
    "params": BACKENDS,
    "fp8": {b.name: b for b in (BlockScaledTriton(), BlockScaledLoop())},
}


def backends_of(precision: str) -> dict[str, Backend]:
    """By name. ValueError for a precision that there is not."""
    if precision not in PRECISIONS:
        raise ValueError(f"precision={precision!r} is unknown; give one of {', '.join(PRECISIONS)}")
    return PRECISIONS[precision]


def backend_of(name: str, precision: str) -> Backend:
    """ValueError for one that there is not, or that does not multiply in this precision."""
    known = backends_of(precision)
    if name in known:
        return known[name]
    if name in BACKENDS:
        raise ValueError(
            f"backend={name!r} makes no products of precision={precision!r}; give 'auto' or {' or '.join(known)}, or "
            "precision='params'"
        )
    raise ValueError(f"backend={name!r} is unknown; give one of {', '.join(BACKENDS)}")
