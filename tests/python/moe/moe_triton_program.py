"""Run with TRITON_INTERPRET=1 in a process of its own: every Triton kernel of hybrid_ep.moe against torch.

The interpreter runs the kernels' logic with NumPy. Its own cast to bf16 cuts off instead of rounding, which the last
check here shows: with it the results would be biased, so the kernels round with integers. Not a test of a GPU.
"""

from __future__ import annotations

import importlib.util
import itertools
import os
import tempfile
from pathlib import Path

import numpy as np
import torch
import triton
import triton.language as tl

from hybrid_ep.moe import activations, combining, triton_activations, triton_grouped, triton_unpermute, triton_zero
from hybrid_ep.moe.triton_rounding import round_to

assert os.environ.get("TRITON_INTERPRET") == "1"


@triton.jit
def _cast_kernel(x_ptr, exact_ptr, plain_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < n, other=0)
    tl.store(exact_ptr + at, round_to(x, tl.bfloat16), mask=at < n)
    tl.store(plain_ptr + at, x.to(tl.bfloat16), mask=at < n)


def bf16_patterns() -> torch.Tensor:
    """All 65,536 bf16 values as fp32, each with low bits that make it a tie, just under or just over one."""
    high = np.arange(1 << 16, dtype=np.uint32) << 16
    low = np.array([0x8000, 0x7FFF, 0x8001, 0x0000, 0xFFFF], dtype=np.uint32)
    return torch.from_numpy((high[:, None] | low[None, :]).reshape(-1).view(np.float32).copy())


def check_rounding():
    x = bf16_patterns()
    exact, plain = torch.empty(x.numel(), dtype=torch.bfloat16), torch.empty(x.numel(), dtype=torch.bfloat16)
    _cast_kernel[(triton.cdiv(x.numel(), 4096),)](x, exact, plain, x.numel(), BLOCK=4096)
    want = x.to(torch.bfloat16)
    number = ~x.isnan()
    assert torch.equal(exact[number].view(torch.int16), want[number].view(torch.int16))
    assert exact[~number].isnan().all()
    wrong = int((plain[number].view(torch.int16) != want[number].view(torch.int16)).sum())
    print(f"rounding: {x.numel()} patterns exact; the interpreter's own cast differs on {wrong}")


def assert_close(got: torch.Tensor, want: torch.Tensor, rtol: float, atol: float):
    """torch.testing's own takes three seconds to import."""
    got, want = got.double(), want.double()
    assert got.shape == want.shape and bool(((got - want).abs() <= atol + rtol * want.abs()).all()), (got, want)


def check_activations():
    """Every kind in fp32 with a weight over two tiles; what is the same code for all kinds (no weight, bf16's loads and
    stores) with a gated and a plain one. The interpreter pays for every launch and operation, not for its width."""
    torch.manual_seed(0)
    cases = [(kind, torch.float32, 1030, True) for kind in activations.KINDS]
    cases += [(kind, torch.float32, 40, False) for kind in ("swiglu", "relu2")]
    cases += [(kind, torch.bfloat16, 1030, True) for kind in ("swiglu", "relu2")]
    for kind, dtype, f, weighted in cases:
        h = (torch.randn(3, f * (2 if kind in activations.GATED else 1)) * 3).to(dtype)
        prob, grad = torch.rand(3), torch.randn(3, f).to(dtype)
        prob[1], h[2, 0] = 0, -0.0
        h[1, 0] = float("inf")
        prob = prob if weighted else None
        tolerance = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 8e-3, "atol": 1e-5}
        rows = [0, 2]
        got = triton_activations.forward(h, prob, kind)
        want = activations._forward(h, prob, kind)
        assert_close(got[rows], want[rows], **tolerance)
        (dh, dprob), (want_dh, want_dprob) = (
            run(h, prob, grad, kind, weighted) for run in (triton_activations.backward, activations._backward)
        )
        assert_close(dh[rows], want_dh[rows], **tolerance)
        if weighted:
            assert (got[1] == 0).all() and (dh[1] == 0).all()
            assert_close(dprob[rows], want_dprob[rows], rtol=1e-4, atol=1e-4)


def check_unpermute():
    torch.manual_seed(1)
    token = torch.tensor([2, 0, -1, 2, 1, 0, -1, 4])
    inverse = combining.inverse_map(token, 5, 3)
    for dtype, hidden, weighted in itertools.product((torch.float32, torch.bfloat16), (24, 1100), (True, False)):
        rows = torch.randn(8, hidden).to(dtype)
        rows[[2, 6]] = float("nan")
        weights = torch.rand(8) if weighted else None
        got = triton_unpermute.gather_sum(rows, inverse, weights)
        assert torch.equal(got, combining.unpermute(rows, inverse, weights))  # the same sum in the same order
        strided = None if weights is None else torch.stack([weights, -weights], 1)[:, 0]
        assert torch.equal(
            got, triton_unpermute.gather_sum(rows.t().contiguous().t(), inverse.t().contiguous().t(), strided)
        ), "any strides"
        assert (got[3] == 0).all()


def check_zeros():
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        rows = torch.full((6, 1030), float("nan"), dtype=dtype)
        rows[:4] = 1
        triton_zero.zero_tail(rows, torch.tensor([0, 4, 4], dtype=torch.int32))
        assert (rows[:4] == 1).all() and (rows[4:] == 0).all()
        groups = torch.full((4, 3, 700), 2.0, dtype=dtype)
        triton_zero.zero_empty_groups(groups, torch.tensor([0, 4, 4, 5], dtype=torch.int32))
        assert (groups[[0, 2]] == 0).all() and (groups[[1, 3]] == 2).all()


def grouped_is_right(kernels, dtype: torch.dtype, cuts: tuple[int, ...], counts: tuple[int, ...], **sizes: int) -> bool:
    """Products and weight gradients of some groups, with NaN behind the last, against torch in fp64. The interpreter
    multiplies no bf16; kernels are the same for all dtypes but for what is loaded and rounded."""
    torch.manual_seed(2)
    num_rows, k, f, real = sum(counts) + 20, 24, 40, sum(counts)
    x, g, out = torch.randn(num_rows, k), torch.randn(num_rows, f), torch.full((num_rows, f), 7.0)
    x[real:] = g[real:] = float("nan")
    x, g, out = x.to(dtype), g.to(dtype), out.to(dtype)
    stored = torch.randn(len(counts), f, k).to(dtype)  # as torch.nn.Linear has it
    # Each in memory of its own, with room behind it: what a planted fault reads there is wrong, and is there.
    stacks = [torch.cat([w, stored])[: len(w)].transpose(1, 2) for w in stored.tensor_split(list(cuts))]
    ends = torch.tensor(list(itertools.accumulate(counts)), dtype=torch.int32)
    kernels.rows_times_stacks(x, stacks, ends, out, BM=16, BN=32, BK=16)
    turns, cut = torch.full_like(out, 7.0), cuts[0] if cuts else len(counts)
    kernels.rows_times_stacks(x, stacks, ends, turns, (cut, cut), BM=16, BN=32, BK=16)  # a stack without experts
    if not (turns == 7).all():
        return False
    for groups in ((cut, len(counts)), (0, cut)):
        kernels.rows_times_stacks(x, stacks, ends, turns, groups, BM=16, BN=32, BK=16)
        others = slice(sum(counts[: groups[0]])), slice(sum(counts[: groups[1]]), None)
        if groups[0] and any(not (turns[rows] == 7).all() for rows in others):
            return False
    if not torch.equal(turns, out):
        return False
    gradients = [torch.full_like(stack, float("nan")).contiguous() for stack in stacks]
    first = 0
    for dw in gradients:
        kernels.weight_gradient(x, g, ends, first, dw, BM=16, BN=32, BR=16)
        first += len(dw)
    want, want_dw, start = torch.full((num_rows, f), 7.0).double(), torch.zeros(len(counts), k, f).double(), 0
    for e, count in enumerate(counts):
        rows = slice(start, start := start + count)
        want[rows] = x[rows].double() @ stored[e].double().T
        want_dw[e] = x[rows].double().T @ g[rows].double()
    at_most = {torch.float32: 1e-5, torch.float16: 2e-3}[dtype]
    pairs = ((out, want), (torch.cat(gradients), want_dw))
    return all(bool(((a.double() - b).abs() <= at_most * b.abs().max()).all()) for a, b in pairs)


# Of the kernels of grouped GEMM, each of which one of the two problems below must notice.
FAULTS = {
    "a row behind its group is stored": ("in_rows, in_f = (at_row < end - row)", "in_rows, in_f = (at_row < BM)"),
    "experts of a stack are counted from the first": (
        "tl.where(beyond, group - first, expert)",
        "tl.minimum(group, 1)",
    ),
    "the second stack is not taken": ("tl.where(beyond, its_ptr, weight)", "weight"),
    "bands lose a row tile": ("rows = tl.minimum(height - band, BAND)", "rows = tl.minimum(height, BAND)"),
    "the tile that is not full is forgotten": ("(ends - starts + BM - 1) // BM", "(ends - starts) // BM"),
    "rows behind the group enter its gradient": ("in_rows = (at_row < end - done)", "in_rows = (at_row < BR)"),
    "a turn begins at the first group": ("known & (groups >= from_group)", "known"),
    "the rest of K is not masked": ("if not EVEN_K:", "if False:"),
}


def check_grouped():
    several, one = (torch.float32, (2, 2, 3), (5, 0, 150, 1)), (torch.float16, (), (17, 16, 0, 3))
    assert grouped_is_right(triton_grouped, *several) and grouped_is_right(triton_grouped, *one)
    text = Path(triton_grouped.__file__).read_text()
    for fault, (is_there, planted) in FAULTS.items():
        assert text.count(is_there) == 1, fault
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "faulty.py"
            path.write_text(text.replace(is_there, planted))
            spec = importlib.util.spec_from_file_location("faulty", path)
            faulty = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(faulty)
            assert not grouped_is_right(faulty, *several), fault


if __name__ == "__main__":
    for check in (check_zeros, check_unpermute, check_activations, check_rounding, check_grouped):
        check()
        print(check.__name__, "ok")
