"""dispatch_with_permute(pad_empty_experts=True): no expert is left without rows, and nothing else changes."""

from __future__ import annotations

import dataclasses
from functools import partial

import pytest
import torch
from examples import Example, check, expected, make_inputs
from test_buffer_features import world_and_buffers

from hybrid_ep import functional
from hybrid_ep.moe import grouped_mm

SKEWS = ("nothing", "one_expert", "one_rank", "uniform")
EX = Example(2, 2, 2, (6, 0, 12, 3), 2, 32, "fp32", pad_multiple=4, pad_empty_experts=True, seed=3)


@pytest.mark.parametrize("skew", SKEWS)
def test_every_verb_agrees_with_the_reference(skew):
    world, buffers = world_and_buffers()
    for pad, budget in ((0, None), (4, None), (16, None), (4, 8)):
        ex = dataclasses.replace(EX, skew=skew, pad_multiple=pad, budget=budget)
        world.run(lambda rank, _, ex=ex: check(buffers[rank], rank, ex))


def test_each_expert_gets_rows_and_the_real_ones_are_those_of_the_plain_layout():
    world, buffers = world_and_buffers()
    ex = dataclasses.replace(EX, skew="one_expert", topk=1)  # seven of eight experts get nothing

    def work(rank, _, pad_empty):
        mine = make_inputs(ex, rank)
        return buffers[rank].dispatch_with_permute(
            hidden=mine.hidden, pad_multiple=4, pad_empty_experts=pad_empty, num_of_experts=8, **mine.routing()
        )

    padded, plain = world.run(partial(work, pad_empty=True)), world.run(partial(work, pad_empty=False))
    for rank in range(4):
        counts, bare = padded[rank][3], plain[rank][3]
        assert (counts >= 4).all() and torch.equal(counts, bare.clamp(min=4))
        rows, start, at = padded[rank][0], 0, 0
        for count, real in zip(counts.tolist(), bare.tolist(), strict=True):
            assert torch.equal(rows[start : start + real], plain[rank][0][at : at + real])
            assert (rows[start + real : start + count] == 0).all()
            start, at = start + count, at + real
        assert rows.shape[0] == start
        weights = [w[w != 0] for w in (padded[rank][1], plain[rank][1])]
        assert torch.equal(*weights) and weights[0].numel() == (12 + 6 + 3 if rank == 1 else 0)


def test_the_argument_is_checked():
    world, buffers = world_and_buffers()
    errors = world.run(
        lambda rank, _: buffers[rank].dispatch_with_permute(
            hidden=torch.zeros(1, 16),
            topk_idx=torch.zeros(1, 1, dtype=torch.int64),
            num_of_experts=8,
            pad_empty_experts="yes",
        ),
        return_errors=True,
    )
    assert all(type(e) is ValueError and "pad_empty_experts" in str(e) for e in errors)


def test_gradients_through_padded_experts_are_those_of_the_dense_layer():
    """dispatch, grouped GEMM, combine: with all tokens on one expert the other weights get exact zeros."""
    world, buffers = world_and_buffers()
    ex = dataclasses.replace(EX, skew="one_expert", topk=1, hidden=16)
    want = expected(ex)
    chosen = ex.seed % 8

    def work(rank, _):
        mine = want.inputs[rank]
        x = mine.hidden.clone().requires_grad_()
        w = torch.ones(2, 16, 16).requires_grad_()
        rows, _, _, counts, handle = functional.dispatch_with_permute(
            buffers[rank], x, pad_multiple=4, pad_empty_experts=True, num_of_experts=8, **mine.routing()
        )
        out, _ = functional.combine_with_unpermute(buffers[rank], grouped_mm(rows, w, counts.cumsum(0)), handle)
        out.sum().backward()
        return x, w, out.detach()

    everything = world.run(work)
    tokens = torch.cat([inputs.hidden for inputs in want.inputs])
    for rank, (x, w, out) in enumerate(everything):
        torch.testing.assert_close(out, x.detach() @ torch.ones(16, 16))
        torch.testing.assert_close(x.grad, torch.full_like(x, 16.0))
        for e in range(2):
            here = rank * 2 + e == chosen
            total = tokens.sum(0)[:, None].expand(16, 16) if here else torch.zeros(16, 16)
            torch.testing.assert_close(w.grad[e], total)
            assert here or (w.grad[e] == 0).all()
