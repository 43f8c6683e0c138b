"""Run with TRITON_INTERPRET=1 in a process of its own: every Triton kernel of hybrid_ep.moe against torch.

The interpreter runs the kernels' logic with NumPy. Its own cast to bf16 cuts off instead of rounding, which the last
check here shows: with it the results would be biased, so the kernels round with integers. Not a test of a GPU.
"""

from __future__ import annotations

import itertools
import os

import numpy as np
import torch
import triton
import triton.language as tl

from hybrid_ep.moe import activations, combining, triton_activations, triton_unpermute, triton_zero
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


if __name__ == "__main__":
    for check in (check_zeros, check_unpermute, check_activations, check_rounding):
        check()
        print(check.__name__, "ok")
