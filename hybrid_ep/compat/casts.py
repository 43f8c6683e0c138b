"""deep_ep.utils.math's casts of rows to FP8 and back, and its sums: what callers prepare and check rows by.

The bits are deep_ep's, which are not those of hybrid_ep.payload: a block is multiplied by the fp32 reciprocal of its
scale, and its largest value counts as 1e-4 at least."""

from __future__ import annotations

import torch

BLOCK, E4M3_MAX, LEAST = 128, 448.0, 1e-4  # elements of a scale; of e4m3; of a block's largest magnitude


def ceil_div(x: int, y: int) -> int:
    return -(-x // y)


def align(x: int, y: int) -> int:
    """The least multiple of y that is not below x."""
    return ceil_div(x, y) * y


def calc_diff(x: torch.Tensor, y: torch.Tensor) -> float:
    """1 - 2 sum(ab) / sum(aa + bb) of a = x + 1 and b = y + 1, in fp64: 0 of equal ones, else a mean of squares."""
    a, b = x.double() + 1, y.double() + 1
    return 1 - float(2 * (a * b).sum() / (a * a + b * b).sum())


def per_token_cast_to_fp8(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x [T, H], floating -> (float8_e4m3fn [T, H], fp32 [T, H / 128 rounded up]: the largest magnitude of each block
    over 448). ValueError for what has not two dimensions."""
    blocks = _blocks(x)
    largest = blocks.abs().float().amax(2).clamp(min=LEAST)
    cast = (blocks * (E4M3_MAX / largest)[..., None]).to(torch.float8_e4m3fn)
    return cast.flatten(1)[:, : x.shape[1]].contiguous(), largest / E4M3_MAX


def per_token_cast_back(x_fp8: torch.Tensor, x_scales: torch.Tensor) -> torch.Tensor:
    """(float8_e4m3fn [T, H], scales of its blocks of 128) -> bf16 [T, H]: the product in fp32, rounded once. x_scales:
    fp32 [T, blocks], or int32, four powers of two (e8m0) in each. ValueError for what has not two dimensions."""
    if x_fp8.dim() == 2 and x_fp8.numel() == 0:
        return x_fp8.to(torch.bfloat16)
    if x_scales.dtype == torch.int32:
        x_scales = (x_scales.view(torch.uint8).int() << 23).view(torch.float32)  # exponents where fp32 has them
    blocks = _blocks(x_fp8.float())
    factors = x_scales.reshape(len(x_fp8), -1)
    return (blocks * factors[..., None]).flatten(1).to(torch.bfloat16)[:, : x_fp8.shape[1]].contiguous()


def _blocks(x: torch.Tensor) -> torch.Tensor:
    """[T, blocks, 128], the last padded by zeros."""
    if x.dim() != 2:
        raise ValueError(f"x is {tuple(x.shape)}: give rows, [tokens, hidden]")
    return torch.nn.functional.pad(x, (0, -x.shape[1] % BLOCK)).unflatten(1, (-1, BLOCK))
