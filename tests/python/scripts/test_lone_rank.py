"""A lone rank of the GPU benchmarks does what that rank does in a whole world: on the host's executors, beside one."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from examples import Example, expected, make_inputs, same

from hybrid_ep import traffic
from hybrid_ep.testing import VirtualWorld

sys.path.insert(0, str(Path(__file__).parents[3] / "scripts"))

from lone_rank import LoneRank, bytes_at  # noqa: E402  (a script)


@pytest.mark.parametrize("shape", [(1, 1), (1, 4), (1, 72)])
@pytest.mark.parametrize("dtype, columns", [("bf16", 0), ("fp8", 4)])
def test_among_silent_peers_it_does_what_it_does_in_a_whole_world(shape, dtype, columns):
    num_ranks = shape[0] * shape[1]
    ex = Example(*shape, 2, (21,) + (0,) * (num_ranks - 1), 3, 64, dtype, scale_columns=columns, seed=3)
    mine, want = make_inputs(ex, 0), expected(ex)
    rank = LoneRank(*shape, ex.world.num_experts, 21, 3, hidden=64, scale_bytes=4 * columns, executor="host")
    plan = rank.route(mine.topk_idx, mine.topk_weights)
    rank.engine.reset_traffic()
    for permute_sms in (0, 2):  # and a plan is used twice
        found = rank.dispatch(plan, mine.hidden, mine.scale, 2, permute_sms)
        for what, got, right in zip(("rows", "weights", "scales"), found, want.permuted[0], strict=True):
            same(what, got, right)
    message = traffic.message_bytes(3, shape[1], 64 if columns else 128, 4 * columns)
    sent = traffic.dispatch(want.plan.routes, shape[1], message, traffic.metadata_bytes(3, shape[1]), landed=False)[0]
    assert rank.engine.traffic() == traffic.add(sent, sent)
    rank.engine.reset_traffic()
    out = rank.combine(plan, want.returned[0], 2)
    assert rank.engine.traffic() == traffic.combine(want.plan.routes, shape[1], traffic.partial_bytes(3, 64, 2))[0]
    own = mine.topk_idx.max(1).values < ex.num_local_experts  # tokens that chose nobody else: of them it knows the sums
    same("sums", out[own], want.combined[0][0][own])


def test_with_peers_of_one_node_the_first_rank_writes_their_rows():
    ex = Example(1, 3, 1, (5, 0, 0), 2, 16, seed=4)
    mine = make_inputs(ex, 0)
    rank = LoneRank(1, 3, 3, 5, 2, executor="host")
    rank.dispatch(rank.route(mine.topk_idx, mine.topk_weights), mine.hidden[:, :8].contiguous(), None, 1)
    at, _ = {name: (at, size) for name, at, size in rank.shape.regions()}["receive_rows"]
    # At a line of memory behind the metadata of as many rows as they have room for.
    landing = -(-5 * traffic.metadata_bytes(2, 3) // 128) * 128
    for peer in (1, 2):
        came = mine.hidden[(mine.topk_idx == peer).any(1), :8].contiguous().view(torch.uint8)
        there = bytes_at(rank.segments[peer].address + at + landing, len(came) * 16, torch.device("cpu"))
        assert len(came) and torch.equal(there.view(-1, 16), came)


def test_rows_and_scales_that_land_aside_begin_at_lines_of_memory():
    ex = Example(1, 2, 2, (5, 0), 3, 24, "fp8", scale_columns=4, seed=4)
    mine = make_inputs(ex, 0)
    rank = LoneRank(1, 2, 4, 5, 3, hidden=24, scale_bytes=16, executor="host")
    rank.dispatch(rank.route(mine.topk_idx, mine.topk_weights), mine.hidden[:, :16].contiguous(), mine.scale, 1)
    at, _ = {name: (at, size) for name, at, size in rank.shape.regions()}["ready_flags"]
    said = bytes_at(rank.segments[1].address + at, 64, torch.device("cpu")).view(torch.int64)  # of rank 0, to rank 1
    rows, x, scales = said[4].item() >> 32, said[2].item(), said[3].item()
    assert rows and x % 128 == 0 and scales % 128 == 0, (rows, x, scales)
    assert rows * traffic.metadata_bytes(3, 2) <= x and x + rows * 16 <= scales
    assert (rows * traffic.metadata_bytes(3, 2)) % 128 or (rows * 16) % 128, "they would without being put there"


@pytest.mark.parametrize("shape", [(1, 8), (2, 4), (8, 8)])
def test_routing_among_peers_alike(shape):
    """What one rank of a whole world finds where everybody's routing is the same, and the bytes it sends."""
    num_ranks = shape[0] * shape[1]
    num_experts, tokens = 2 * num_ranks, 13
    idx = torch.rand(tokens, num_experts, generator=torch.Generator().manual_seed(2)).argsort(1)[:, :4].contiguous()
    weights = torch.ones(tokens, 4)
    rank = LoneRank(*shape, num_experts, tokens, 4, peers="alike", executor="host")
    rank.route(idx, weights)
    rank.engine.reset_traffic()
    plan = rank.route(idx, weights)
    said = rank.exchanged()
    assert rank.engine.traffic()["count_bytes"] == said["sent"]
    assert said["received"] == (num_ranks - 1) * rank.vector_bytes
    assert said["received_as_maps"] == (num_ranks - 1) * tokens * num_experts
    here = (idx < 2).sum()
    assert plan.num_permuted_rows == num_ranks * here and plan.num_recv_rows == num_ranks * (idx < 2).any(1).sum()
    if num_ranks > 8:
        return
    world = VirtualWorld(*shape)
    buffers = world.buffers(8, tokens, 2, timeout_s=30)
    padded = world.run(
        lambda r, _: buffers[r].dispatch_with_permute(
            hidden=torch.zeros(tokens, 8).bfloat16(), topk_idx=idx, topk_weights=weights, num_of_experts=num_experts
        )[3]
    )
    assert padded[0].tolist() == torch.frombuffer(plan.padded_tokens_per_expert, dtype=torch.int64).tolist()
