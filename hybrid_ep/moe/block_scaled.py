"""Products of e4m3 values with a scale a block, as DeepSeek-V3 trains (arXiv 2412.19437, section 3.3): the reference.

Both matrices of a product are laid with the inner dimension last and cut there into blocks of BLOCK values:

    forward          out = x w       x [N, K] by rows           w^T [F, K] by squares of 128 x 128
    gradient of x    dx = g w^T      g [N, F] by rows           w   [K, F] by the same squares
    gradient of w    dw = x_e^T g_e  x_e^T [K, n] by rows       g_e^T [F, n] by rows: 128 rows of one expert a block

    out[i, j] = sum over blocks b, ascending, of (scale_a[i, b] * scale_b[j, b]) * (sum of the 128 products in block b)

A block's sum is exact here and rounded once to fp32: products of e4m3 values need 43 bits at most, which fp64 has. So
no bit depends on the order of these sums, on the machine, or on how many rows there are. Blocks are added in fp32, each
by one fused multiply and add, and the result is rounded once more, to the dtype of the rows.

Scales are fp32, amax / 448 and not the power of two above: DeepGEMM's on Hopper, and those of an fp8 dispatch
(`hybrid_ep.payload`), whose rows come out here as the very values that travelled, with no second rounding. Powers of
two would round no better, and reach up to an octave less far down. A block of zeros has scale 1; a scale is at least
2^-126, so that its reciprocal is finite, by which values are multiplied. A block with a NaN or an infinity has scale
NaN: every result that it takes part in is NaN.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

BLOCK = 128
E4M3_MAX = 448.0
LEAST_SCALE = 2.0**-126


class Quantised(NamedTuple):
    """values: float8_e4m3fn [R, B, BLOCK], zeros behind the last real one. scales: fp32 [R, B]."""

    values: torch.Tensor
    scales: torch.Tensor


def quantise(matrix: torch.Tensor, rows: int = 1) -> Quantised:
    """matrix [R, I] (bf16, fp16, fp32; any strides) with a scale for each block of `rows` rows and BLOCK values of I.

    The last block of either direction may be smaller. Values are rounded to the nearest, ties to even."""
    num_rows, inner = matrix.shape
    filled = torch.nn.functional.pad(matrix.float(), (0, -inner % BLOCK, 0, -num_rows % rows))
    blocks = filled.unflatten(1, (-1, BLOCK)).unflatten(0, (-1, rows))  # [R / rows, rows, B, BLOCK]
    amax = blocks.abs().amax((1, 3), keepdim=True)
    scales = torch.where(amax == 0, 1.0, (amax / E4M3_MAX).clamp(min=LEAST_SCALE))
    scales = scales.masked_fill(~amax.isfinite(), float("nan"))
    values = (blocks * (1.0 / scales)).to(torch.float8_e4m3fn)
    return Quantised(values.flatten(0, 1)[:num_rows], scales[..., 0].expand(blocks.shape[:3]).flatten(0, 1)[:num_rows])


def product(a: Quantised, b: Quantised) -> torch.Tensor:
    """fp32 [Ra, Rb]: a times b transposed, both [R, I] in blocks of the same I; zeros where I is 0."""
    total = a.scales.new_zeros(a.values.shape[0], b.values.shape[0])
    for block in range(a.values.shape[1]):
        dot = (a.values[:, block].double() @ b.values[:, block].double().t()).float()
        total = fused(dot, a.scales[:, block, None] * b.scales[None, :, block], total)
    return total


def fused(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """a * b + c of fp32, rounded once: torch has no name for it."""
    exact, c = a.double() * b.double(), c.double()
    near = exact + c
    back = near - exact
    lost = (exact - (near - back)) + (c - back)
    # A sum of 53 bits that is not exact is made odd, so that rounding it to 24 goes the way of what it lost.
    even = (lost != 0) & near.isfinite() & (near.view(torch.int64) % 2 == 0)
    return torch.where(even, torch.nextafter(near, lost.sign() * float("inf")), near).float()


def rows_times_matrix(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """x [N, K] @ w [K, F] in x's dtype; w by squares. With g [N, F] and w transposed: the gradient of x."""
    return product(quantise(x), quantise(w.t(), BLOCK)).to(x.dtype)


def matrix_gradient(x: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
    """x^T g [K, F] of one expert's rows x [n, K] and g [n, F], in their dtype; rows in blocks from the first on."""
    return product(quantise(x.t()), quantise(g.t())).to(x.dtype)
