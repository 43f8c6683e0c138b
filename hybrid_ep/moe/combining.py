"""Unpermute: every token gathers the rows that were made for it, times their weights, through an inverse map.

A gather has one writer per token: no atomics, no zero-filling before, fp32 sums in the order of the map's columns,
one rounding, the same bits every time. A scatter of rows into tokens needs atomics in the result's dtype, rounds at
every addition and comes out differently from run to run.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from hybrid_ep.moe import checks

_BLOCK_ELEMENTS = 1 << 18


def inverse_map(token_of_row: torch.Tensor, num_tokens: int, topk: int) -> torch.Tensor:
    """int64 [num_tokens, topk]: the rows of each token in ascending order, -1 behind them.

    token_of_row int64 [P]: the token each row was made for, -1 for padding. No host synchronisation. Rows of a token
    beyond topk are an error on a CPU (ValueError) and undefined on a GPU, where nothing waits to look."""
    checks.tensor("token_of_row", token_of_row, "int64 [P], the token each row was made for")
    num_rows = token_of_row.numel()
    order = torch.sort(token_of_row, stable=True)  # rows of a token stay ascending, padding comes first
    first = torch.searchsorted(order.values, order.values)  # where this row's token begins
    position = torch.arange(num_rows, device=token_of_row.device, dtype=torch.int64) - first
    real = order.values >= 0
    if token_of_row.device.type == "cpu" and num_rows:
        if int(order.values[-1]) >= num_tokens or (bool(real.any()) and int(position[real].max()) >= topk):
            raise ValueError(
                f"token_of_row names tokens up to {int(order.values[-1])} and has up to "
                f"{int(position[real].max()) + 1} rows of one token; num_tokens={num_tokens} and "
                f"topk={topk} must be larger"
            )
    # Padding goes to a place of its own behind the map, which is cut off again.
    place = torch.where(real, order.values * topk + position, num_tokens * topk)
    out = torch.full((num_tokens * topk + 1,), -1, dtype=torch.int64, device=token_of_row.device)
    return out.index_copy_(0, place, torch.where(real, order.indices, -1))[:-1].view(num_tokens, topk)


def unpermute(rows: torch.Tensor, inverse: torch.Tensor, weights: torch.Tensor | None = None) -> torch.Tensor:
    """[T, H] in rows' dtype: the fp32 sum, over the columns of inverse in order, of weight times row.

    rows [P, H], floating; inverse int64 [T, K], -1 for no row, every row named at most once; weights fp32 [P] (one per
    row) or None; all on one device, any strides. A token without rows gets zeros. Differentiable in rows and weights;
    gradients of rows that no token names are zeros. Raises ValueError; for an inverse that names rows which are not
    there, on a CPU alone: on a GPU nothing waits to look."""
    checks.tensor("rows", rows, "[P, H]")
    checks.tensor("inverse", inverse, "int64 [T, K]; inverse_map makes one")
    if weights is not None:
        checks.tensor("weights", weights, "float32 [P], one a row")
    if rows.dim() != 2 or inverse.dim() != 2 or inverse.dtype != torch.int64:
        raise ValueError(
            f"rows {tuple(rows.shape)} and inverse {inverse.dtype} {tuple(inverse.shape)} must be [P, H] "
            "and int64 [T, K]; inverse_map makes one"
        )
    if not rows.is_floating_point():  # a sum in fp32 would be cut to their type
        raise ValueError(f"rows are {rows.dtype}; give floating ones: rows.float()")
    if weights is not None and (weights.shape != rows.shape[:1] or weights.dtype != torch.float32):
        raise ValueError(f"weights {weights.dtype} {tuple(weights.shape)} must be float32 [{rows.shape[0]}], one a row")
    for name, tensor in (("inverse", inverse), ("weights", weights)):
        if tensor is not None and tensor.device != rows.device:
            raise ValueError(f"{name} is on {tensor.device} and rows on {rows.device}; move {name} to {rows.device}")
    if inverse.device.type == "cpu" and inverse.numel():
        low, high = (int(row) for row in inverse.aminmax())
        if low < -1 or high >= rows.shape[0]:
            raise ValueError(
                f"inverse names row {low if low < -1 else high} of {rows.shape[0]} rows; give numbers from 0 to below "
                "that, -1 for no row"
            )
    return _Unpermute.apply(rows, inverse, weights)


class _Unpermute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, inverse: torch.Tensor, weights: torch.Tensor | None) -> torch.Tensor:
        ctx.save_for_backward(rows, inverse, weights)
        if not rows.shape[0]:
            return rows.new_zeros(inverse.shape[0], rows.shape[1])
        if rows.device.type == "cuda":
            from hybrid_ep.moe import triton_unpermute

            return triton_unpermute.gather_sum(rows, inverse, weights)
        out = rows.new_empty(inverse.shape[0], rows.shape[1])
        for at in _blocks(*out.shape):
            total = torch.zeros(out[at].shape, dtype=torch.float32, device=rows.device)
            for k in range(inverse.shape[1]):
                row = inverse[at, k]
                term = rows[row.clamp(min=0)].float()
                if weights is not None:
                    term = term * weights[row.clamp(min=0), None]
                total += term.masked_fill_((row < 0)[:, None], 0)
            out[at] = total
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        rows, inverse, weights = ctx.saved_tensors
        token = torch.full((rows.shape[0] + 1,), -1, dtype=torch.int64, device=rows.device)
        tokens = torch.arange(inverse.shape[0], device=rows.device, dtype=torch.int64)[:, None].expand_as(inverse)
        # All -1 entries write to the place behind the last row, which nobody reads.
        named = torch.where(inverse < 0, rows.shape[0], inverse)
        token = token.scatter_(0, named.reshape(-1), tokens.reshape(-1))[:-1]
        nobody = (token < 0)[:, None]
        drows, dweights = torch.empty_like(rows), None
        if weights is not None and ctx.needs_input_grad[2]:
            dweights = torch.empty_like(weights)
        if not grad.shape[0]:
            return torch.zeros_like(rows), None, None if dweights is None else dweights.zero_()
        for at in _blocks(*rows.shape):
            g = grad[token[at].clamp(min=0)].float().masked_fill_(nobody[at], 0)
            if dweights is not None:
                dweights[at] = (g * rows[at].float()).masked_fill_(nobody[at], 0).sum(1)
            drows[at] = g if weights is None else (g * weights[at, None]).masked_fill_(nobody[at], 0)
        return drows, None, dweights


def _blocks(num_rows: int, num_columns: int) -> Iterator[slice]:
    step = max(1, _BLOCK_ELEMENTS // max(num_columns, 1))
    return (slice(at, min(at + step, num_rows)) for at in range(0, num_rows, step))
