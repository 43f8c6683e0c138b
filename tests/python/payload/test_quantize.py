"""Eight-bit payloads: error bounds of the formats, exact cases, a quantised dispatch and its gradients."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hybrid_ep import functional
from hybrid_ep.payload import quantize
from hybrid_ep.payload.quantize import FORMATS
from hybrid_ep.testing import VirtualWorld

FP8, MXFP8 = FORMATS["fp8"], FORMATS["mxfp8"]


def there_and_back(x, fmt, dtype=torch.float32):
    return quantize.dequantize(*quantize.quantize(x, fmt), fmt, dtype)


@pytest.mark.parametrize("name", FORMATS)
@given(seed=st.integers(0, 1 << 20), low=st.integers(-100, 90))
def test_error_is_within_half_a_step(name, seed, low):
    """e4m3 has 3 bits behind the point: half a step is 2^-4 of a normal value, 2^-10 of the scale below that."""
    fmt, g = FORMATS[name], torch.Generator().manual_seed(seed)
    x = torch.randn(3, 256, generator=g) * 2.0 ** torch.randint(low, low + 20, (3, 256), generator=g)
    scale = x.unflatten(1, (-1, fmt.block)).abs().amax(2, keepdim=True) / quantize.E4M3_MAX
    if name == "mxfp8":  # the power of two above
        scale = 2.0 ** torch.ceil(torch.log2(scale.double()) - 1e-9).float()
    bound = torch.maximum(x.abs() * 2.0**-4, (scale * 2.0**-10).expand(-1, -1, fmt.block).flatten(1)) * 1.0001
    assert bool(((there_and_back(x, fmt) - x).abs() <= bound).all())


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=str)
def test_exact_cases(fmt):
    zeros = torch.zeros(2, 256)
    assert torch.equal(there_and_back(zeros, fmt), zeros)
    x = torch.tensor([448.0, -7.0, 0.5, 2.0**-9]).repeat(2, 64)  # e4m3 numbers, whose block has scale 1
    assert torch.equal(there_and_back(x, fmt), x)
    assert torch.equal(there_and_back(x * 2.0**-60, fmt), x * 2.0**-60)
    assert torch.equal(there_and_back(x * 2.0**100, fmt), x * 2.0**100)


def test_mxfp8_scales_are_the_powers_of_two_at_or_above():
    x = torch.zeros(1, 32)
    for largest, biased in ((448.0, 127), (448.1, 128), (896.0, 128), (1.0, 119), (1e-44, 0), (0.0, 0)):
        x[0, 5] = largest
        payload, scales = quantize.quantize(x, MXFP8)
        assert scales.tolist() == [[biased]], largest
        assert not payload.float().isnan().any()


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=str)
@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_what_is_not_finite_is_not_hidden(fmt, bad):
    x = torch.ones(1, 256)
    x[0, 3] = bad
    back = there_and_back(x, fmt)
    assert bool(back[0, : fmt.block].isnan().all()) and torch.equal(back[0, fmt.block :], x[0, fmt.block :])


@pytest.mark.parametrize(
    "name, hidden, words",
    [
        ("fp4", 128, "one of bf16, fp8, mxfp8"),
        ("fp8", 192, "blocks of 128"),
        ("mxfp8", 48, "blocks of 32"),
        ("nvfp4", 48, "multiple of 32"),
    ],
)
def test_bad_formats_are_refused(name, hidden, words):
    with pytest.raises(ValueError, match=words):
        quantize.format_of(name, hidden)


@pytest.mark.parametrize("name", ["bf16", "fp8", "mxfp8", "nvfp4"])
def test_a_quantised_dispatch_delivers_rounded_rows_and_whole_gradients(name):
    world, experts, tokens, hidden = VirtualWorld(2, 2), 2, 9, 256
    buffers = world.buffers(hidden, tokens, experts, timeout_s=60)
    fmt = quantize.format_of(name, hidden)

    def rank_program(rank, _):
        g = torch.Generator().manual_seed(rank)
        x = torch.randn(tokens, hidden, generator=g).bfloat16().requires_grad_()
        idx = torch.rand(tokens, 8, generator=g).argsort(1)[:, :3]
        rounded = x.detach() if fmt is None else there_and_back(x.detach(), fmt, torch.bfloat16)
        common = {"topk_idx": idx, "num_of_experts": 8, "pad_multiple": 4}
        rows, _, scales, _, handle = functional.dispatch_with_permute(buffers[rank], x, dispatch_dtype=name, **common)
        want, *_ = buffers[rank].dispatch_with_permute(hidden=rounded, **common)
        plain, *_ = buffers[rank].dispatch_with_permute(hidden=x.detach(), **common)
        out, _ = functional.combine_with_unpermute(buffers[rank], rows, handle)
        grad_out = torch.randint(-4, 5, out.shape, generator=g).bfloat16()
        out.backward(grad_out)
        return {
            "rows": rows.detach(),
            "want": want,
            "plain": plain,
            "scales": scales,
            "out": out.detach(),
            "grad": x.grad,
            "grad_out": grad_out,
        }

    for rank, r in enumerate(world.run(rank_program)):
        assert torch.equal(r["rows"], r["want"]) and r["rows"].dtype == torch.bfloat16
        assert torch.equal(r["rows"], r["plain"]) == (fmt is None), f"rank {rank}: is anything quantised?"
        assert r["scales"] is None
        assert torch.equal(r["grad"], 3 * r["grad_out"])  # three experts a token; small integers add exactly


def test_nvfp4_by_hand():
    row = torch.tensor([6.0, -6.0, 0.5, -0.5, 1.5, 3.0, 4.0, 2.0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 0.0])
    ties = torch.tensor([6.0, -6.0, 0.5, -0.5, 1.5, 3.0, 4.0, 2.0, 0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, 0.0])
    x = torch.stack([torch.cat([row, row * 2]), torch.cat([row, row * 2]) * 2.0**-100, torch.zeros(32)])
    payload, scales = quantize.quantize(x, quantize.NVFP4)
    assert payload.shape == (3, 16) and scales.shape == (3, 6) and payload.dtype == scales.dtype == torch.uint8
    assert payload[0, 0] == 7 | 15 << 4 and not payload[2].any() and not scales[2].any()
    want = torch.cat([ties, ties * 2])
    assert torch.equal(there_and_back(x, quantize.NVFP4), torch.stack([want, want * 2.0**-100, torch.zeros(32)]))


@given(seed=st.integers(0, 1 << 20), low=st.integers(-60, 40))
def test_nvfp4_error_is_within_half_a_step(seed, low):
    """e2m1 has steps of at most 2 in 6; the block's scale is itself rounded by at most 2^-4, and saturates what it
    rounds down."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(4, 64, generator=g) * 2.0**low
    largest = x.unflatten(1, (-1, 16)).abs().amax(2, keepdim=True).expand(-1, -1, 16).flatten(1)
    error = (there_and_back(x, quantize.NVFP4) - x).abs()
    assert bool((error <= largest * (1 / 6 * 1.0626 + 1e-6)).all())


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_nvfp4_hides_nothing_that_is_not_finite(bad):
    x = torch.ones(1, 64)
    x[0, 3] = bad
    back = there_and_back(x, quantize.NVFP4)
    assert bool(back[0, :16].isnan().all()) and torch.equal(back[0, 16:], x[0, 16:])


def test_scales_of_the_caller_and_quantising_exclude_each_other():
    x = torch.zeros(1, 128, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="scaling_factor"):
        functional.dispatch_with_permute(None, x, scaling_factor=torch.ones(1, 1), dispatch_dtype="fp8")


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint8, torch.float8_e4m3fn])
def test_integers_and_rows_of_eight_bits_are_not_quantised(dtype):
    with pytest.raises(ValueError, match=f"hidden has dtype {dtype}, and dispatch_dtype='mxfp8' would round it"):
        functional.dispatch_with_permute(None, torch.zeros(1, 128).to(dtype), dispatch_dtype="mxfp8")
