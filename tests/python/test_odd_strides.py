"""Tensors of one row or one element: torch calls them contiguous whatever their strides, and views and GEMMs mind."""

import pytest
import torch

from hybrid_ep import functional
from hybrid_ep.moe import grouped_mm
from hybrid_ep.payload import nvfp4, quantize
from hybrid_ep.testing import VirtualWorld


@pytest.mark.parametrize("verb", ["dispatch", "dispatch_with_permute"])
@pytest.mark.parametrize("scale", [torch.tensor(0.5).expand(1, 1), torch.full((1, 3), 0.5)[:, 2::2]])
def test_a_scale_of_one_token(verb, scale):
    world = VirtualWorld(1, 2)
    buffers = world.buffers(64, 8, 2, timeout_s=10)

    def run(rank, group):
        tokens = (1, 3)[rank]
        x = torch.ones(tokens, 64).to(torch.float8_e4m3fn)
        idx = torch.zeros(tokens, 1).long()
        given = scale if tokens == 1 else scale.contiguous().expand(tokens, 1)
        return getattr(buffers[rank], verb)(hidden=x, scaling_factor=given, topk_idx=idx, num_of_experts=4)[2]

    first, second = world.run(run)
    assert first.tolist() == [[0.5]] * 4 and not len(second)


@pytest.mark.parametrize("hidden", [64, 96, 160])
@pytest.mark.parametrize("rows", [0, 1, 2])
def test_four_bits_of_any_rows(hidden, rows):
    x = torch.arange(rows * hidden).view(rows, hidden).remainder(7).float()
    payload, scales = nvfp4.quantize(x)
    assert nvfp4.dequantize(payload, scales, torch.float32).shape == x.shape
    odd = torch.cat([torch.zeros(rows, 3, dtype=torch.uint8), scales], 1)[:, 3:]
    assert torch.equal(nvfp4.token_scales(odd), nvfp4.token_scales(scales))


def test_four_bits_reach_a_rank_that_gets_one_row():
    world = VirtualWorld(1, 2)
    buffers = world.buffers(96, 8, 2, timeout_s=10)

    def run(rank, group):
        x, idx = torch.full((2, 96), 6.0, dtype=torch.bfloat16), torch.tensor([[0], [2 * rank]])
        return functional.dispatch_with_permute(
            buffers[rank], x, topk_idx=idx, num_of_experts=4, dispatch_dtype="nvfp4"
        )[0]

    assert [rows.tolist() for rows in world.run(run)] == [[[6.0] * 96] * n for n in (3, 1)]


@pytest.mark.parametrize("name", ["fp8", "mxfp8", "nvfp4"])
@pytest.mark.parametrize("largest", [65504.0, 60000.0, 65500.0])
def test_finite_halves_stay_finite(name, largest):
    fmt = quantize.format_of(name, 128)
    x = torch.linspace(-largest, largest, 128).half()[None]
    x[0, 5] = -largest
    back = quantize.dequantize(*quantize.quantize(x, fmt), fmt, torch.float16)
    assert back.isfinite().all() and torch.allclose(back, x, rtol=0.26, atol=largest / 12)


def strided(rows, k, how):
    """A tensor [rows, k] of other strides than its shape has."""
    if how == "sliced":
        return torch.arange(rows * (k + 1)).remainder(5).float().view(rows, k + 1)[:, 1:]
    return torch.arange(k).remainder(5).float().expand(rows, k)


@pytest.mark.parametrize("how", ["sliced", "expanded"])
@pytest.mark.parametrize("ends, sizes", [([0, 0, 1], (3,)), ([2, 2, 5, 6], (3, 1)), ([0, 0, 1, 17], (3, 1))])
def test_grouped_products_of_single_rows(how, ends, sizes):
    x = strided(ends[-1], 16, how)
    stacks = [torch.arange(n * 128).remainder(3).float().view(n, 16, 8).requires_grad_() for n in sizes]
    offsets = torch.tensor(ends)
    results = []
    for given in (x, x.clone(memory_format=torch.contiguous_format)):
        out = grouped_mm(given, stacks if len(stacks) > 1 else stacks[0], offsets)
        results.append([out, *torch.autograd.grad(out.sum(), stacks)])
    assert all(map(torch.equal, *results))
