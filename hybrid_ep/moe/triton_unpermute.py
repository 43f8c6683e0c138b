"""unpermute's forward on a GPU: a program a tile of one token, its rows added in the order of the map in fp32.

One writer, a fixed order, no atomics. Not yet run on a GPU.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from hybrid_ep.moe.triton_rounding import LAUNCH, round_to

_BLOCK = 1024


@triton.jit
def _gather_sum_kernel(
    rows_ptr, inverse_ptr, weights_ptr, out_ptr, topk, hidden, WEIGHTED: tl.constexpr, BLOCK: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < hidden
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for k in range(topk):
        row = tl.load(inverse_ptr + token * topk + k)
        if row >= 0:
            term = tl.load(rows_ptr + row * hidden + column, mask=inside, other=0).to(tl.float32)
            if WEIGHTED:
                term = term * tl.load(weights_ptr + row)
            total += term
    tl.store(out_ptr + token * hidden + column, round_to(total, out_ptr.dtype.element_ty), mask=inside)


def gather_sum(rows: torch.Tensor, inverse: torch.Tensor, weights: torch.Tensor | None) -> torch.Tensor:
    """rows [P, H], inverse int64 [T, K], weights fp32 [P] or None -> [T, H]."""
    # The kernel computes addresses from shapes alone.
    rows, inverse = rows.contiguous(), inverse.contiguous()
    weights = None if weights is None else weights.contiguous()
    num_tokens, hidden = inverse.shape[0], rows.shape[1]
    out = rows.new_empty(num_tokens, hidden)
    if out.numel():
        _gather_sum_kernel[(num_tokens, triton.cdiv(hidden, _BLOCK))](
            rows,
            inverse,
            rows if weights is None else weights,
            out,
            inverse.shape[1],
            hidden,
            WEIGHTED=weights is not None,
            BLOCK=_BLOCK,
            **LAUNCH,
        )
    return out
