"""Conditions in which users of other libraries reported hangs, crashes or wrong sums: docs/peers.md has the reports."""

from __future__ import annotations

import pytest
import torch

import hybrid_ep
from hybrid_ep.testing import VirtualWorld

TOPK, EXPERTS_OF_RANK = 2, 2


def inputs(rank, step, tokens, hidden, num_experts):
    generator = torch.Generator().manual_seed(100 * step + rank)
    x = torch.randint(-4, 5, (tokens, hidden), generator=generator).bfloat16()
    return x, torch.rand(tokens, num_experts, generator=generator).topk(TOPK).indices


def sums_are_right(shape, tokens, maxima, hidden=64):
    """Two layers of identity experts on buffers that each rank made for its own maximum: TOPK times x, exactly, and no
    row lost. tokens: of the ranks in each step."""
    world = VirtualWorld(*shape)
    num_experts = EXPERTS_OF_RANK * world.size

    def work(rank, group):
        buffer = hybrid_ep.HybridEPBuffer(group, hidden, maxima[rank], EXPERTS_OF_RANK, timeout_s=60)
        received = []
        for step, of_ranks in enumerate(tokens):
            x, idx = inputs(rank, step, of_ranks[rank], hidden, num_experts)
            rows, *_, handle = buffer.dispatch_with_permute(hidden=x, topk_idx=idx, num_of_experts=num_experts)
            received.append(len(rows))
            assert torch.equal(buffer.combine_with_unpermute(hidden=rows, handle=handle)[0], TOPK * x)
        return received

    for received, of_ranks in zip(zip(*world.run(work), strict=True), tokens, strict=True):
        assert sum(received) == TOPK * sum(of_ranks), "dropless"


@pytest.mark.parametrize("shape", [(1, 2), (2, 1)])
def test_an_odd_number_of_tokens_on_two_ranks(shape):
    sums_are_right(shape, [(4095, 4095)], (4095, 4095))


@pytest.mark.parametrize("shape", [(1, 4), (2, 2)])
def test_a_maximum_that_is_no_multiple_of_a_chunk(shape):
    sums_are_right(shape, [(672,) * 4, (671, 672, 1, 65)], (672,) * 4)


@pytest.mark.parametrize("shape", [(1, 4), (2, 2)])
def test_other_tokens_and_another_maximum_on_every_rank(shape):
    """Which change, and outgrow some of the maxima, as in packed sequences of varied length."""
    sums_are_right(shape, [(500, 3, 0, 64), (900, 8, 700, 0), (1, 1, 1, 1), (1200, 90, 5, 1)], (512, 8, 1, 100))


@pytest.mark.parametrize("shape", [(1, 4), (2, 2)])
def test_nobody_has_tokens_and_then_one_rank_does(shape):
    sums_are_right(shape, [(0, 0, 0, 0), (0, 0, 5, 0)], (4, 4, 4, 4))


def test_more_tokens_than_a_queue_of_a_nic_has_entries():
    sums_are_right((2, 1), [(70_000, 70_000)], (70_000, 70_000), hidden=8)


def test_a_rank_that_receives_nothing():
    """All choices are the first rank's experts; backwards go the same way."""
    world = VirtualWorld(2, 2)

    def work(rank, group):
        buffer = hybrid_ep.HybridEPBuffer(group, 64, 8, EXPERTS_OF_RANK, timeout_s=60)
        x = inputs(rank, 0, 8, 64, 8)[0]
        idx = torch.arange(TOPK).expand(8, TOPK)
        rows, *_, handle = buffer.dispatch_with_permute(hidden=x, topk_idx=idx, num_of_experts=8)
        assert len(rows) == (64 if rank == 0 else 0)
        again = buffer.dispatch_with_permute(hidden=x, handle=handle)[0]
        assert torch.equal(again, rows)
        assert torch.equal(buffer.combine_with_unpermute(hidden=rows, handle=handle)[0], TOPK * x)

    world.run(work)
