"""Receive rows of large groups: laid out for twice the mean, grown to what comes, never dropped."""

from __future__ import annotations

import pytest
import torch

from hybrid_ep.buffer_sizes import first_recv_rows, recv_capacity
from hybrid_ep.errors import CapacityError
from hybrid_ep.testing import VirtualWorld

RANKS, TOKENS, HIDDEN, TOPK = 20, 4, 16, 2


def exchanged(buffers, world, of_rank, **options):
    """What every rank's combine of its own dispatch gives, doubled, beside its rows; of_rank: experts of a token."""

    def work(rank, _group):
        idx = torch.tensor([of_rank(rank, t) for t in range(TOKENS)])
        x = (torch.arange(TOKENS * HIDDEN).view(TOKENS, HIDDEN) % 13 + rank).bfloat16()
        rows, *_, handle = buffers[rank].dispatch_with_permute(hidden=x, topk_idx=idx, num_of_experts=RANKS, **options)
        out, _ = buffers[rank].combine_with_unpermute(hidden=rows * 2, handle=handle)
        kept = idx.ge(0).sum(1, keepdim=True)
        assert torch.equal(out, x * 2 * kept)
        return len(rows)

    return world.run(work)


def balanced(rank, token):
    return [(rank + token + n) % RANKS for n in range(TOPK)]


def all_to_one(rank, token):
    return [3, (rank + token) % (RANKS - 4) + 4]


def made(nodes=2, **options):
    world = VirtualWorld(nodes, RANKS // nodes)
    # One expert a token is what a buffer of one expert a rank would open for, but for the eight that all begin with.
    return world, world.buffers(HIDDEN, TOKENS, 1, timeout_s=60, **options)


@pytest.mark.parametrize("nodes", [1, 2])
def test_rows_grow_to_what_comes(nodes):
    world, buffers = made(nodes)
    first = first_recv_rows(None, TOKENS, 8, RANKS)
    assert first == 64 < RANKS * TOKENS == recv_capacity(None, TOKENS, RANKS)
    assert exchanged(buffers, world, balanced) == [TOKENS * TOPK] * RANKS
    assert {b._session.shape.recv_rows for b in buffers} == {first}
    before = buffers[0].memory_report().regions["receive_rows"]
    most = exchanged(buffers, world, all_to_one)
    assert max(most) == RANKS * TOKENS
    assert {b._session.shape.recv_rows for b in buffers} == {RANKS * TOKENS}
    assert buffers[0].memory_report().regions["receive_rows"] > before
    assert exchanged(buffers, world, all_to_one) == most  # a known call now, in memory that has grown


def test_a_rank_that_receives_more_makes_all_grow_by_a_quarter_more():
    world, buffers = made()
    to = [*range(17), *range(17)]  # 17 of 20 ranks send all their tokens to rank 0: 68 rows

    def most_to_one(rank, token):
        return [0, to[rank] % (RANKS - 1) + 1] if rank < 17 else [rank, (rank + 1) % RANKS or 1]

    exchanged(buffers, world, most_to_one)
    assert {b._session.shape.recv_rows for b in buffers} == {min(68 * 5 // 4, RANKS * TOKENS)}


def test_a_capacity_factor_is_a_limit_still():
    world, buffers = made(capacity_factor=10.0)
    assert {b._session.shape.recv_rows for b in buffers} == {40}
    with pytest.raises(CapacityError, match="capacity_factor=10.0 admits 40"):
        exchanged(buffers, world, all_to_one)
    assert exchanged(buffers, world, balanced) == [TOKENS * TOPK] * RANKS  # nothing is lost
    assert {b._session.shape.recv_rows for b in buffers} == {40}


def test_calls_that_wait_for_nothing_have_room_for_every_token_first():
    world, buffers = made()
    for buffer in buffers:
        buffer._session.runs_beside = True  # as on a GPU
    exchanged(buffers, world, all_to_one, non_blocking=True, num_permuted_tokens=RANKS * TOKENS * TOPK)
    assert {b._session.shape.recv_rows for b in buffers} == {RANKS * TOKENS}
