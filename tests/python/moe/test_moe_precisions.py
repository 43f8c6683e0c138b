"""What grouped_mm keeps with precision="fp8": the reference's bits wherever experts have no rows, errors within the
bound, bits that do not depend on who else is there, and who multiplies."""

from __future__ import annotations

import functools
import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_moe_grouped import COUNTS, NeverWritten, offsets_of, problem, run
from test_moe_turns import Bringer

from hybrid_ep.moe import block_scaled, grouped_mm, probe, probing
from hybrid_ep.moe.precisions import PRECISIONS, BlockScaledLoop

FP8 = functools.partial(run, precision="fp8")
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def by_hand(x, w, grad, counts):
    """(out, dx, dw) of the reference, expert by expert."""
    out, dx, dw = x.new_zeros(len(x), w.shape[2]), torch.zeros_like(x), torch.zeros_like(w)
    start = 0
    for e, count in enumerate(counts):
        rows = slice(start, start := start + count)
        out[rows] = block_scaled.rows_times_matrix(x[rows], w[e])
        dx[rows] = block_scaled.rows_times_matrix(grad[rows], w[e].t())
        dw[e] = block_scaled.matrix_gradient(x[rows], grad[rows])
    return out, dx, dw


def same(got, want):
    assert all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize(
    "backend, dtype", [("loop", torch.float32), ("loop", torch.float16), ("auto", torch.bfloat16)], ids=str
)
def test_groups_stacks_places_and_turns(backend, dtype):
    """Bits of the reference for every position of experts without rows, one stack and several, with NaN behind."""
    for counts, tail, cuts in itertools.product(COUNTS, (0, 5), ([3], [1, 2])):
        x, w, grad = problem(counts, tail, dtype, transposed=True)
        if not len(x):
            continue
        offsets, want = offsets_of(counts), by_hand(*problem(counts, tail, dtype, transposed=True), counts)
        same(FP8(x, w, grad, offsets, backend=backend, tail=tail > 0), want)
        place = torch.full_like(want[0], float("nan"))
        same(FP8(x, w, grad, offsets, backend=backend, out=place), want)
        parts = [part.clone().requires_grad_() for part in w.tensor_split(cuts)]
        first_rows = [sum(counts[:cut]) for cut in (0, *cuts)]
        how = {"backend": backend, "precision": "fp8", "first_rows": first_rows}
        x.requires_grad_()
        out = grouped_mm(x, parts, offsets, **how)
        out.backward(grad)
        same((out.detach(), x.grad, torch.cat([part.grad for part in parts])), want)
        parts = [part.detach().requires_grad_() for part in parts]
        x.grad, bringer = None, Bringer(parts[1:])
        out = grouped_mm(x, parts, offsets, **how, arriving=bringer)
        bringer.take()
        out.backward(grad)
        same((out.detach(), x.grad, torch.cat([parts[0].grad, *bringer.made])), want)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_errors_are_within_the_bound(dtype):
    torch.manual_seed(3)
    k, f, counts = 300, 200, (150, 0, 40)
    x, w, grad = torch.randn(195, k).to(dtype), torch.randn(3, k, f).to(dtype), torch.randn(195, f).to(dtype)
    x[:, ::7] *= 100
    got = FP8(x, w, grad, offsets_of(counts))
    magnitudes = [t.double().abs() for t in (x, w, grad)]
    rounding = {torch.float32: 2.0**-22, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}[dtype]
    start = 0
    for e, count in enumerate(counts):
        rows = slice(start, start := start + count)
        for result, exact, sums, length in (
            (got[0][rows], x[rows].double() @ w[e].double(), magnitudes[0][rows] @ magnitudes[1][e], k),
            (got[1][rows], grad[rows].double() @ w[e].double().t(), magnitudes[2][rows] @ magnitudes[1][e].t(), f),
            (
                got[2][e],
                x[rows].double().t() @ grad[rows].double(),
                magnitudes[0][rows].t() @ magnitudes[2][rows],
                count,
            ),
        ):
            # Values that are small in their block are off by 2.2e-6 of its largest.
            floor = 2.2e-6 * length * float(x.abs().max().double() * max(w.abs().max(), grad.abs().max())) * 2.2
            assert ((result.double() - exact).abs() <= (0.13 + rounding) * sums + floor).all()


def test_the_error_of_normal_data_is_what_the_page_says():
    torch.manual_seed(4)
    x, w, grad = torch.randn(256, 512), torch.randn(2, 512, 256), torch.randn(256, 256)
    pairs = zip(FP8(x, w, grad, offsets_of((100, 156))), run(x, w, grad, offsets_of((100, 156))), strict=True)
    assert all(0.034 < float((a - b).norm() / b.norm()) < 0.039 for a, b in pairs)


@given(st.lists(st.integers(0, 9), min_size=1, max_size=4), st.integers(0, 3), st.data())
def test_bits_depend_neither_on_others_nor_on_the_place(counts, tail, data):
    """Rows of an expert, alone in a batch or among others, in any stack: a clone computes what its owner would."""
    x, w, grad = problem(tuple(counts), tail, torch.bfloat16)
    whole = FP8(x, w, grad, offsets_of(counts)) if len(x) else None
    e = data.draw(st.integers(0, len(counts) - 1))
    start = sum(counts[:e])
    if whole is None or not counts[e]:
        return
    last = data.draw(st.integers(1, counts[e]))
    rows = slice(start, start + last)
    alone = FP8(x[rows], w[e : e + 1], grad[rows], offsets_of([last]))
    assert torch.equal(alone[0], whole[0][rows]) and torch.equal(alone[1], whole[1][rows])
    if last == counts[e]:
        assert torch.equal(alone[2][0], whole[2][e])


def test_no_rows_at_all_and_one_number_for_a_gradient():
    x, w = torch.randn(0, 32, requires_grad=True), torch.randn(3, 32, 48, requires_grad=True)
    grouped_mm(x, w, torch.zeros(3, dtype=torch.int32), precision="fp8").sum().backward()
    assert x.grad.shape == (0, 32) and (w.grad == 0).all()
    x = torch.randn(8, 32, requires_grad=True)
    grouped_mm(x, w, torch.tensor([0, 8, 8]), precision="fp8", tail=False).sum().backward()
    assert torch.equal(x.grad, block_scaled.rows_times_matrix(torch.ones(8, 48), w[1].detach().t()))


@pytest.mark.parametrize(
    "options, said",
    [
        ({"backend": "torch"}, "backend='torch' makes no products of precision='fp8'; give 'auto' or triton or loop"),
        ({"backend": "te"}, "backend='te' makes no products of precision='fp8'"),
        ({"backend": "cutlass"}, "backend='cutlass' is unknown"),
        ({"backend": "triton"}, r"weights \(3, 32, 48\) in fp8: triton: Triton"),
        ({"precision": "mxfp8"}, "precision='mxfp8' is unknown; give one of params, fp8"),
    ],
)
def test_what_does_not_multiply_in_fp8_is_named(options, said):
    x, w, ends = torch.randn(8, 32), torch.randn(3, 32, 48), torch.tensor([2, 4, 8])
    with pytest.raises(ValueError, match=said):
        grouped_mm(x, w, ends, **({"precision": "fp8"} | options))


def with_first_scale(a, rows):
    """Quantised, and every block of a row with the scale of the first one."""
    made = block_scaled.quantise(a, rows)
    return made._replace(scales=made.scales[:, :1].expand_as(made.scales))


class FirstScaleOfRows(BlockScaledLoop):
    @staticmethod
    def product(x, w, out):
        out.copy_(block_scaled.product(with_first_scale(x, 1), block_scaled.quantise(w.t(), 128)))


class FirstScaleOfWeights(BlockScaledLoop):
    @staticmethod
    def product(x, w, out):
        out.copy_(block_scaled.product(block_scaled.quantise(x), with_first_scale(w.t(), 128)))


class FirstScaleOfGradients(BlockScaledLoop):
    @staticmethod
    def gradient(x, g, out):
        out.copy_(block_scaled.product(block_scaled.quantise(x.t()), with_first_scale(g.t(), 1)))


def test_the_probe_judges_by_the_reference(monkeypatch):
    found = probe("cpu", torch.bfloat16, "loop", "fp8")
    assert found.remedy == "none" and "loop, bfloat16 in fp8 on cpu" in str(found)
    with pytest.raises(ValueError, match="backend='torch' makes no products"):
        probe("cpu", torch.bfloat16, "torch", "fp8")

    class Forgetful(BlockScaledLoop):
        """Writes no gradient of experts without rows."""

        name = "forgetful"

        @staticmethod
        def wgrad(x, g, groups, of=None):
            made = BlockScaledLoop.wgrad(x, g, groups, of)
            for dw in made:
                dw[(dw == 0).all(2).all(1)] = float("nan")
            return made

    monkeypatch.setitem(PRECISIONS["fp8"], "forgetful", Forgetful)
    monkeypatch.setitem(PRECISIONS["params"], "forgetful", Forgetful)
    assert probing.examine(Forgetful, torch.device("cpu"), torch.float32, "fp8").remedy == "zero_empty_wgrad"
    counts = (7, 0, 0, 1)
    x, w, grad = problem(counts, 5, torch.float32)
    same(FP8(x, w, grad, offsets_of(counts), backend="forgetful"), by_hand(x, w, grad, counts))
    for wrong in (FirstScaleOfRows, FirstScaleOfWeights, FirstScaleOfGradients):
        assert probing.examine(wrong, torch.device("cpu"), torch.bfloat16, "fp8").remedy == "unusable", wrong.__name__
    assert probing.examine(NeverWritten, torch.device("cpu"), torch.float32, "fp8").remedy == "unusable", "it is exact"
