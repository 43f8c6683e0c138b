"""Weighted activations and unpermute: values, gradients, rounding and determinism; Triton in its interpreter."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hybrid_ep.moe import activations, inverse_map, unpermute, weighted_activation, weighted_swiglu

F = torch.nn.functional
PLAIN = {
    "silu": F.silu,
    "gelu": lambda x: F.gelu(x, approximate="tanh"),
    "gelu_erf": F.gelu,
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
}


def eager(h, prob, kind):
    """The definition, in h's dtype."""
    if kind in activations.GATED:
        gate, up = h.chunk(2, -1)
        value = PLAIN[activations.GATED[kind]](gate) * up
    else:
        value = PLAIN[kind](h)
    return value if prob is None else value * prob.reshape(-1, 1).to(value.dtype)


@pytest.mark.parametrize("kind", activations.KINDS)
@pytest.mark.parametrize("shape", [(6,), (6, 1), None])
def test_value_and_gradients_are_those_of_the_definition(kind, shape):
    torch.manual_seed(1)
    h = torch.randn(6, 20, dtype=torch.float64, requires_grad=True)
    prob = None if shape is None else torch.rand(shape, dtype=torch.float64, requires_grad=True)
    inputs = (h,) if prob is None else (h, prob)
    grad = torch.randn(6, 10 if kind in activations.GATED else 20, dtype=torch.float64)
    got, want = weighted_activation(h, prob, kind), eager(h, prob, kind)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    for a, b in zip(torch.autograd.grad(got, inputs, grad), torch.autograd.grad(want, inputs, grad), strict=True):
        assert a.shape == b.shape
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-11)


def test_blocks_of_rows_do_not_show():
    torch.manual_seed(2)
    h, prob = torch.randn(300, 2 * 512), torch.rand(300)
    together = weighted_swiglu(h, prob)
    assert torch.equal(together, torch.cat([weighted_swiglu(h[i : i + 1], prob[i : i + 1]) for i in range(300)]))


def nearest_even(x: torch.Tensor) -> torch.Tensor:
    """fp64 -> bf16 by comparison with both neighbours, in integers: what round to nearest even means."""
    toward_zero = x.float().view(torch.int32)
    # x.float() rounds once already, so only values that fp32 holds exactly may come here
    assert torch.equal(x.float().double(), x)
    low = (toward_zero >> 16) << 16
    high = low + 0x10000
    below, above = low.view(torch.float32).double(), high.view(torch.float32).double()
    nearer_above = (above - x).abs() < (x - below).abs()
    tie = (above - x).abs() == (x - below).abs()
    pick_above = nearer_above | (tie & (((low >> 16) & 1) == 1))
    return torch.where(pick_above, high, low).view(torch.float32).to(torch.bfloat16)


@pytest.mark.parametrize("fraction", [0x8000, 0x7FFF, 0x8001, 0x0001])
def test_the_one_rounding_is_to_nearest_even_on_all_bf16_patterns(fraction):
    """relu(h) * prob is h * prob in fp32: every finite positive bf16 value times a prob that makes the product lie
    at, just below or just above the middle of two bf16 values."""
    patterns = torch.arange(1 << 16, dtype=torch.int32) << 16
    values = (patterns | fraction).view(torch.float32)
    usable = values.isfinite() & (values.abs() < 1e38)
    wanted = values[usable]
    got = wanted.to(torch.bfloat16)  # torch's cast, which the CPU path ends with
    assert torch.equal(got.view(torch.int16), nearest_even(wanted.double()).view(torch.int16))
    # And through the operator: fp32 in, the product by a power of two is exact, bf16 out of the backward's store.
    h = torch.ones(wanted.numel(), 1, dtype=torch.bfloat16, requires_grad=True)
    out = activations._forward(h.detach(), wanted, "relu")
    zero = wanted == 0
    assert torch.equal(out[~zero, 0].view(torch.int16), got[~zero].view(torch.int16))


def test_bf16_results_are_the_fp64_results_rounded_once():
    """Against fp64: at most the last place, and only where fp32 lands on the other side of a tie."""
    h = (torch.arange(1 << 16, dtype=torch.int32).to(torch.int16)).view(torch.bfloat16)
    h = h[h.isfinite() & (h.abs() < 1e4)][:, None]
    both = torch.cat([h, torch.full_like(h, 1.5)], 1)
    prob = torch.full((h.shape[0],), 0.3)
    got = weighted_swiglu(both, prob).double()
    want = eager(both.double(), prob.double(), "swiglu")
    differs = got != want.to(torch.float32).to(torch.bfloat16).double()
    assert differs.float().mean() < 2e-3
    big = want.abs() > 1e-30
    assert ((got - want).abs()[big] <= want.abs()[big] * 2.0**-8 * 1.001).all()


def test_rows_of_probability_zero_are_harmless():
    h = torch.full((3, 8), float("nan"))
    h[0] = 1.0
    h.requires_grad_()
    prob = torch.tensor([0.5, 0.0, 0.0], requires_grad=True)
    out = weighted_swiglu(h, prob)
    out.backward(torch.tensor([1.0, 1.0, float("nan")])[:, None].expand(3, 4))
    assert out.isfinite().all() and (out[1:] == 0).all()
    assert h.grad.isfinite().all() and (h.grad[1:] == 0).all() and h.grad[0].abs().sum() > 0
    assert weighted_swiglu(torch.zeros(0, 8), torch.zeros(0)).shape == (0, 4)


def test_strided_rows_and_probabilities_are_read_where_they_lie():
    torch.manual_seed(4)
    h, prob = torch.randn(20, 6).double().t(), torch.rand(12).double()[::2]
    grad = torch.randn(10, 6).double().t()
    results = []
    for a, b in ((h, prob), (h.contiguous(), prob.contiguous())):
        a, b = a.requires_grad_(), b.requires_grad_()
        out = weighted_swiglu(a, b)
        results.append((out, *torch.autograd.grad(out, (a, b), grad)))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_fp64_stays_out_of_the_kernels_that_compute_in_fp32():
    """On a GPU, too, fp64 goes through the torch code that the tests here run on a CPU."""
    on_gpu = {d: types.SimpleNamespace(device=torch.device("cuda"), dtype=d) for d in activations.FLOATS}
    single, double = on_gpu[torch.float32], on_gpu[torch.float64]
    for h in on_gpu.values():
        assert activations._fused(h, single) == activations._fused(h, None) == (h is not double)
        assert not activations._fused(h, double)
    assert not activations._fused(torch.zeros(1), None)


@pytest.mark.parametrize(
    "arguments, said",
    [
        ((torch.zeros(2, 4), None, "swish"), "kind='swish'"),
        ((torch.zeros(2, 3), None, "swiglu"), "2F"),
        ((torch.zeros(2, 4, dtype=torch.int32), None, "silu"), "floating"),
        ((torch.zeros(2, 4), torch.zeros(3), "silu"), "the 2 rows of h"),
        ((torch.zeros(2, 4), torch.zeros(2).half(), "silu"), "must be fp32"),
        ((torch.zeros(2, 4), 3.0, "swiglu"), "prob is float 3.0; give a tensor"),
        ((None, None, "swiglu"), "h is NoneType None; give a tensor"),
    ],
)
def test_bad_activation_input_is_named(arguments, said):
    with pytest.raises(ValueError, match=said):
        weighted_activation(*arguments)


# ---- unpermute


@st.composite
def maps(draw):
    num_tokens, topk = draw(st.integers(1, 7)), draw(st.integers(1, 4))
    rows = [t for t in range(num_tokens) for _ in range(draw(st.integers(0, topk)))]
    rows += [-1] * draw(st.integers(0, 5))
    return torch.tensor(draw(st.permutations(rows)), dtype=torch.int64), num_tokens, topk


@given(maps())
def test_inverse_map_lists_the_rows_of_every_token(case):
    token_of_row, num_tokens, topk = case
    inverse = inverse_map(token_of_row, num_tokens, topk)
    for token in range(num_tokens):
        rows = (token_of_row == token).nonzero().flatten().tolist()
        assert inverse[token].tolist() == rows + [-1] * (topk - len(rows))


@given(maps(), st.booleans())
def test_unpermute_and_its_gradients_are_those_of_the_scatter(case, weighted):
    token_of_row, num_tokens, topk = case
    torch.manual_seed(3)
    rows = torch.randn(token_of_row.numel(), 6, requires_grad=True)
    weights = torch.rand(token_of_row.numel(), requires_grad=True) if weighted else None
    got = unpermute(rows, inverse_map(token_of_row, num_tokens, topk), weights)
    real = token_of_row >= 0
    term = rows if weights is None else rows * weights[:, None]
    want = torch.zeros(num_tokens, 6).index_add(0, token_of_row[real], term[real])
    torch.testing.assert_close(got, want)
    inputs, grad = (rows,) if weights is None else (rows, weights), torch.randn(num_tokens, 6)
    for a, b in zip(torch.autograd.grad(got, inputs, grad), torch.autograd.grad(want, inputs, grad), strict=True):
        torch.testing.assert_close(a, b)


def test_unpermute_sums_in_fp32_in_the_maps_order_and_ignores_padding():
    rows = torch.tensor([[1.0], [float("nan")], [2.0**-8], [2.0**-8]], dtype=torch.bfloat16)
    inverse = inverse_map(torch.tensor([0, -1, 0, 0]), 2, 3)
    assert unpermute(rows, inverse).tolist() == [[1.0 + 2.0**-7], [0.0]]  # in bf16 steps each addition would be lost
    big = torch.tensor([[2.0**24], [1.0], [-(2.0**24)]])
    assert unpermute(big, torch.tensor([[0, 1, 2]])).item() == 0.0  # (2^24 + 1) - 2^24 in fp32
    assert unpermute(big, torch.tensor([[0, 2, 1]])).item() == 1.0


def test_unpermute_reads_strided_inputs_where_they_lie():
    torch.manual_seed(5)
    inverse = inverse_map(torch.tensor([1, 0, -1, 1, 3, 0]), 4, 2)
    rows, grad = torch.randn(5, 6).t(), torch.randn(5, 4).t()
    for weights in (torch.rand(12)[::2], torch.rand(1).expand(6), torch.rand(6, 3)[:, 1]):
        results = []
        for a, at, b in (
            (rows, inverse.t().contiguous().t(), weights),
            (rows.contiguous(), inverse, weights.contiguous()),
        ):
            a, b = a.detach().requires_grad_(), b.detach().requires_grad_()
            out = unpermute(a, at, b)
            results.append((out, *torch.autograd.grad(out, (a, b), grad)))
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_bad_unpermute_input_is_named():
    rows, inverse, weights = torch.zeros(2, 2), torch.zeros(1, 2, dtype=torch.int64), torch.zeros(2)
    with pytest.raises(ValueError, match="weights is on meta and rows on cpu; move weights to cpu"):
        unpermute(rows, inverse, weights.to("meta"))
    with pytest.raises(ValueError, match="inverse is on meta and rows on cpu; move inverse to cpu"):
        unpermute(rows, inverse.to("meta"), weights)
    with pytest.raises(ValueError, match="topk=1 must be larger"):
        inverse_map(torch.tensor([0, 0]), 1, 1)
    with pytest.raises(ValueError, match="num_tokens=1"):
        inverse_map(torch.tensor([0, 3]), 1, 1)
    with pytest.raises(ValueError, match="inverse_map makes one"):
        unpermute(torch.zeros(2, 2), torch.zeros(1, 2))
    with pytest.raises(ValueError, match="one a row"):
        unpermute(torch.zeros(2, 2), torch.zeros(1, 2, dtype=torch.int64), torch.zeros(3))
    for names, said in (([[0, 9]], "inverse names row 9 of 2 rows"), ([[-2, 0]], "inverse names row -2")):
        with pytest.raises(ValueError, match=said):
            unpermute(rows, torch.tensor(names), weights)
    for arguments, said in (
        ((None, inverse), "rows is NoneType None; give a tensor"),
        ((rows, [[0, 1]]), r"inverse is list \[\[0, 1\]\]; give a tensor"),
        ((rows, inverse, 0.5), "weights is float 0.5; give a tensor"),
        ((rows.int(), inverse, weights), r"rows are torch.int32; give floating ones: rows.float\(\)"),
    ):
        with pytest.raises(ValueError, match=said):
            unpermute(*arguments)
    with pytest.raises(ValueError, match="token_of_row is NoneType None"):
        inverse_map(None, 1, 1)


def test_the_table_of_precision_says_that_the_accumulator_matters(capsys):
    path = Path(__file__).parents[3] / "scripts" / "combine_precision.py"
    program = runpy.run_path(str(path))
    program["main"](["--experts", "8", "--hidden", "64", "--ffn", "64", "--tokens", "64", "--seeds", "2"])
    lines = [line for line in capsys.readouterr().out.splitlines() if "w2" in line]
    error = {line.split("|")[1].strip(): float(line.split("|")[2]) for line in lines}
    assert list(error) == list(program["WAYS"])
    for place in ("before w2, fp32 inside the activation", "after w2, fp32 product"):
        fp32, bf16 = (
            next(e for way, e in error.items() if way.startswith(place) and way.endswith(s))
            for s in ("fp32 sum", "bf16 sum")
        )
        assert fp32 < 6e-3 and bf16 > 1.15 * fp32


def test_triton_kernels_in_the_interpreter():
    pytest.importorskip("triton", reason="Triton is not installed")
    here = Path(__file__).parent
    done = subprocess.run(
        [sys.executable, "-W", "ignore", here / "moe_triton_program.py"],
        capture_output=True,
        text=True,
        timeout=240,
        env=os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join([str(here.parents[2]), *sys.path])},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count(" ok") == 5
