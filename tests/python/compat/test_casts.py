"""deep_ep.utils.math: casts to FP8 and back, by their definition in fp64, over shapes and both kinds of scales."""

from __future__ import annotations

import pytest
import torch

import hybrid_ep
from hybrid_ep.compat import casts

NEAREST = torch.arange(256, dtype=torch.int16).to(torch.uint8).view(torch.float8_e4m3fn).double()
NEAREST = NEAREST[NEAREST.isfinite()]


def rows(tokens, hidden, scale, dtype, seed=1):
    x = torch.randn(tokens, hidden, generator=torch.Generator().manual_seed(seed), dtype=torch.float32)
    return (x * scale).to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("tokens, hidden", [(0, 128), (3, 128), (5, 384), (4, 200), (1, 1)])
@pytest.mark.parametrize("scale", [1.0, 1e-6, 1e3, 0.0])
def test_a_block_is_cast_by_its_largest_value(dtype, tokens, hidden, scale):
    x = rows(tokens, hidden, scale, dtype)
    cast, scales = casts.per_token_cast_to_fp8(x)
    assert cast.shape == x.shape and cast.dtype == torch.float8_e4m3fn and cast.is_contiguous()
    assert scales.shape == (tokens, -(-hidden // 128)) and scales.dtype == torch.float32
    for block in range(scales.shape[1]):
        part = slice(128 * block, 128 * block + 128)
        largest = x[:, part].double().abs().amax(1).clamp(min=1e-4)
        assert torch.allclose(scales[:, block].double(), largest / 448, rtol=1e-6, atol=0)
        wanted = x[:, part].double() * 448 / largest[:, None]
        miss = (cast[:, part].double() - wanted).abs()
        least = (wanted[..., None] - NEAREST).abs().amin(-1)
        assert (miss <= least + 1e-5 * wanted.abs()).all(), "no e4m3 is nearer"
    back = casts.per_token_cast_back(cast, scales)
    exact = cast.float() * scales.repeat_interleave(128, 1)[:, :hidden]
    assert back.dtype == torch.bfloat16 and torch.equal(back, exact.bfloat16())


def test_the_bits_are_those_of_a_multiplied_reciprocal():
    """As callers compare them with what deep_ep has cast: to divide by the scale rounds some values to another e4m3."""
    x = rows(4096, 128, 1.0, torch.bfloat16)
    cast, scales = casts.per_token_cast_to_fp8(x)
    largest = x.float().abs().amax(1, keepdim=True)
    assert torch.equal(cast.view(torch.uint8), (x * (448.0 / largest)).to(torch.float8_e4m3fn).view(torch.uint8))
    assert not torch.equal(cast.view(torch.uint8), (x / scales).to(torch.float8_e4m3fn).view(torch.uint8))


def test_scales_that_are_powers_of_two_come_four_in_an_int():
    cast, _ = casts.per_token_cast_to_fp8(rows(3, 1024, 1.0, torch.bfloat16))
    exponents = torch.randint(100, 150, (3, 8), dtype=torch.uint8)
    packed = exponents.view(torch.int32)
    powers = torch.ldexp(torch.ones(3, 8, dtype=torch.float32), exponents.int() - 127)
    assert torch.equal(casts.per_token_cast_back(cast, packed), casts.per_token_cast_back(cast, powers))


def test_they_are_served_by_their_names():
    hybrid_ep.compat.install_as_deep_ep()
    try:
        from deep_ep.utils.math import align, calc_diff, ceil_div, per_token_cast_back, per_token_cast_to_fp8
    finally:
        hybrid_ep.compat.uninstall()
    assert (per_token_cast_to_fp8, per_token_cast_back) == (casts.per_token_cast_to_fp8, casts.per_token_cast_back)
    assert [ceil_div(n, 4) for n in (0, 1, 4, 5)] == [0, 1, 1, 2] and align(5, 4) == 8
    x = rows(4, 64, 1.0, torch.float32)
    assert calc_diff(x, x) == pytest.approx(0, abs=1e-15) and 0 < calc_diff(x, 1.01 * x) < 1e-4
    for refused in (lambda: per_token_cast_to_fp8(x[0]), lambda: per_token_cast_back(x[0], x[0])):
        with pytest.raises(ValueError, match=r"x is \(64,\): give rows"):
            refused()
