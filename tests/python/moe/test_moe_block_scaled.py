"""Products in fp8 with block scales: the reference against plain loops, and the Triton kernels against the reference in
a process of its own."""

from __future__ import annotations

import itertools
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hybrid_ep.moe import block_scaled
from hybrid_ep.payload import quantize


def e4m3_values() -> torch.Tensor:
    every = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    return every[every.isfinite()].sort().values


def nearest(value: float, grid: list[float]) -> float:
    """Of e4m3, ties to the even mantissa."""
    best = min(abs(value - g) for g in grid)
    found = [g for g in grid if abs(value - g) == best]
    even = [g for g in found if int(torch.tensor(g).to(torch.float8_e4m3fn).view(torch.uint8)) % 2 == 0]
    return (found if len(set(found)) == 1 else even)[0]


def quantised_slowly(matrix: torch.Tensor, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(values, scales), element by element."""
    grid, (height, width) = e4m3_values().tolist(), matrix.shape
    values, scales = torch.zeros(height, width), torch.zeros(height, -(-width // 128))
    for top, left in itertools.product(range(0, height, rows), range(0, width, 128)):
        block = matrix[top : top + rows, left : left + 128].float()
        amax = block.abs().max()
        scale = amax / 448 if amax else torch.tensor(1.0)
        scales[top : top + rows, left // 128] = scale
        for i, j in itertools.product(range(block.shape[0]), range(block.shape[1])):
            values[top + i, left + j] = nearest(float(block[i, j] * (1 / scale)), grid)
    return values, scales


@pytest.mark.parametrize("rows, shape", [(1, (3, 300)), (128, (131, 20)), (1, (2, 128))])
def test_blocks_are_quantised_as_one_would_by_hand(rows, shape):
    torch.manual_seed(0)
    matrix = torch.randn(*shape) * torch.logspace(-6, 2, shape[0])[:, None]
    matrix[-1, :128] = 0  # of rows of their own a block of zeros, whose scale is 1
    got, (values, scales) = block_scaled.quantise(matrix, rows), quantised_slowly(matrix, rows)
    assert torch.equal(got.scales, scales)
    flat = got.values.flatten(1).float()
    assert torch.equal(flat[:, : shape[1]], values) and (flat[:, shape[1] :] == 0).all()
    assert rows > 1 or got.scales[-1, 0] == 1


def test_scales_of_the_smallest_and_of_what_is_no_number():
    x = torch.ones(5, 256)
    x[0, 3], x[1, 200], x[2] = float("nan"), float("inf"), 2.0**-149
    x[3], x[4] = 1e36, -0.0
    got = block_scaled.quantise(x)
    assert got.scales[0, 0].isnan() and got.scales[1, 1].isnan() and got.values[0, 0].float().isnan().all()
    assert got.scales[2, 0] == 2.0**-126 and (got.values[2].float() == 0).all()
    assert torch.equal(got.scales[:2].isnan().sum(1), torch.ones(2, dtype=torch.int64))
    assert (got.values[3].float() == 448).all() and (got.scales[4] == 1).all()
    out = block_scaled.rows_times_matrix(x, torch.ones(256, 3))
    assert out[:2].isnan().all() and out[2:].isfinite().all()
    w = torch.ones(256, 130)
    w[0, 129] = float("inf")
    out = block_scaled.rows_times_matrix(torch.ones(2, 256), w)
    assert out[:, 128:].isnan().all(), "the square of the infinity"
    assert torch.allclose(out[:, :128], torch.full((2, 128), 256.0)), "and no other"


@given(*(st.floats(-(2.0**60), 2.0**60, width=32) for _ in range(2)), st.floats(-(2.0**120), 2.0**120, width=32))
def test_a_fused_sum_is_rounded_once(a, b, c):
    from fractions import Fraction

    exact = Fraction(a) * Fraction(b) + Fraction(c)
    got = float(block_scaled.fused(*(torch.tensor([value], dtype=torch.float32) for value in (a, b, c))))
    near = [torch.nextafter(torch.tensor(got), torch.tensor(to)).item() for to in (-math.inf, math.inf)]
    assert all(abs(Fraction(got) - exact) <= abs(Fraction(other) - exact) for other in near)


def test_a_fused_sum_that_two_roundings_would_get_wrong():
    # 1 + 2^-24 + 2^-60: just above the middle of two fp32 values, in fp64 on it.
    a, b, c = (torch.tensor([value]) for value in (2.0**-60, 1.0, 1.0))
    a = a + 2.0**-24  # fp32 holds 2^-24 alone; the rest comes by b
    b = torch.tensor([1 + 2.0**-23])
    assert block_scaled.fused(a, b, c) == 1 + 2.0**-23
    assert (a.double() * b.double() + c.double()).float() == block_scaled.fused(a, b, c)  # 2^-47 is within 53 bits
    a, b = torch.tensor([2.0**-12 + 2.0**-35]), torch.tensor([2.0**-12 - 2.0**-35])  # 2^-24 - 2^-70
    assert block_scaled.fused(a, b, torch.tensor([1.0])) == 1
    c = torch.tensor([1 + 2.0**-23])
    assert (a.double() * b.double() + c.double()).float() == 1 + 2.0**-22, "fp64 makes a tie of it, which goes up"
    assert block_scaled.fused(a, b, c) == 1 + 2.0**-23


@pytest.mark.parametrize("n, k, f", [(3, 300, 130), (1, 128, 1), (5, 16, 260)])
def test_products_are_sums_over_scaled_blocks(n, k, f):
    torch.manual_seed(1)
    x, w = torch.randn(n, k), torch.randn(k, f)
    qx, qw = block_scaled.quantise(x), block_scaled.quantise(w.t(), 128)
    want = torch.zeros(n, f)
    for i, j in itertools.product(range(n), range(f)):
        total = torch.zeros(1)
        for b in range(-(-k // 128)):
            dot = math.fsum((qx.values[i, b].double() * qw.values[j, b].double()).tolist())
            total = block_scaled.fused(torch.tensor([dot]), qx.scales[i, b] * qw.scales[j, b], total)
        want[i, j] = total
    assert torch.equal(block_scaled.rows_times_matrix(x, w), want)
    assert torch.equal(block_scaled.rows_times_matrix(x.half(), w.half()), block_scaled.rows_times_matrix(
        x.half().float(), w.half().float()).half())  # fmt: skip


def test_rows_of_an_fp8_dispatch_are_not_rounded_again():
    torch.manual_seed(2)
    x = (torch.randn(64, 512) * torch.logspace(-3, 3, 64)[:, None]).bfloat16()
    payload, scales = quantize.quantize(x, quantize.FORMATS["fp8"])
    arrived = quantize.dequantize(payload, scales, quantize.FORMATS["fp8"], torch.bfloat16)
    assert not torch.equal(arrived, x)
    again = block_scaled.quantise(arrived).values.flatten(1)
    assert torch.equal(again.view(torch.uint8), payload.view(torch.uint8))


def test_gradients_of_weights_follow_the_blocks_of_rows():
    """Split between two places, a group's gradient is the sum of two of other blocks: near, and not the same bits;
    split at a block, the same values in other sums."""
    torch.manual_seed(5)
    x, g = torch.randn(256, 32), torch.randn(256, 48)
    whole = block_scaled.matrix_gradient(x, g)
    for cut, at_most in ((100, 0.06), (128, 1e-6)):
        parts = block_scaled.matrix_gradient(x[:cut], g[:cut]) + block_scaled.matrix_gradient(x[cut:], g[cut:])
        error = float((whole - parts).norm() / whole.norm())
        assert error <= at_most and (cut == 128 or error > 1e-3)


def test_triton_kernels_in_the_interpreter():
    pytest.importorskip("triton", reason="Triton is not installed")
    here = Path(__file__).parent
    done = subprocess.run(
        [sys.executable, "-W", "ignore", here / "moe_block_scaled_program.py"],
        capture_output=True,
        text=True,
        timeout=240,
        env=os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join([str(here.parents[2]), *sys.path])},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count(" ok") == 3
