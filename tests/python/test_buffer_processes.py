"""Real processes over shared memory, bit for bit against the reference, on groups that are part of a larger
world."""

from __future__ import annotations

import os

import pytest
import torch
from examples import WRONG, Example, check, examples, expected
from hypothesis import given

from hybrid_ep import HybridEPBuffer

SHAPES = [(1, 1), (1, 2), (1, 4), (2, 1), (2, 2), (4, 1), (2, 3)]


def buffer_of(ctx, ex: Example) -> HybridEPBuffer:
    key = "buffer", ex.num_nodes, ex.num_local_ranks
    if key not in ctx.kept:
        ctx.kept[key] = HybridEPBuffer(
            ctx.group(ex.world.num_ranks),
            16,
            1,
            ex.num_local_experts,
            timeout_s=50,
            num_of_hybrid_ep_ranks_per_nvlink_domain=ex.num_local_ranks,
        )
    return ctx.kept[key]


def run_example(ctx, ex: Example, wrong: str | None = None):
    want = expected(ex)
    check(buffer_of(ctx, ex), ctx.rank, ex, WRONG[wrong](ex, want) if wrong else want)


@pytest.mark.parametrize("shape", SHAPES)
def test_examples(world, shape):
    @given(ex=examples(*shape))
    def run(ex):
        world.run(run_example, ex, ranks=range(ex.world.num_ranks))

    run()


def test_the_comparison_notices(world):
    ex = Example(2, 2, 2, (6, 9, 12, 3), 3, scale_columns=1, pad_multiple=8, seed=5)
    for wrong in sorted(WRONG):
        answers = world.run(run_example, ex, wrong, ranks=range(4), return_errors=True)
        assert any(a and a["type"] == "AssertionError" for a in answers), f"nobody noticed: {wrong}"
    world.run(run_example, ex, ranks=range(4))


def two_buffers(ctx, ex: Example):
    """Two buffers on one group, their calls interleaved, each finishing what the other began around it."""
    group = ctx.group(ex.world.num_ranks)
    first, second = (
        HybridEPBuffer(
            group, ex.hidden, 8, ex.num_local_experts, timeout_s=50, num_of_hybrid_ep_ranks_per_nvlink_domain=n
        )
        for n in (2, 1)
    )
    mine = expected(ex).inputs[ctx.rank]
    a = first.dispatch_with_permute(hidden=mine.hidden, **mine.routing())
    b = second.dispatch(mine.hidden, None, num_of_experts=ex.world.num_experts, **mine.routing())
    x, _ = first.combine_with_unpermute(hidden=a[0], handle=a[-1])
    y, _ = second.combine(b[0], handle=b[-1])
    counts = [
        ((mine.topk_idx // per)[:, :, None] == torch.arange(ex.world.num_experts // per)).any(1).sum(1)
        for per in (1, ex.num_local_experts)
    ]
    for out, n in zip((x, y), counts, strict=True):
        assert torch.equal(out.float(), mine.hidden.float() * n[:, None])
    check(first, ctx.rank, ex) if ex.num_local_ranks == 2 else check(second, ctx.rank, ex)
    first.destroy()
    second.destroy()


def test_two_buffers_on_one_group(world):
    world.run(two_buffers, Example(2, 2, 2, (6, 9, 12, 3), 3, exact=True, seed=5), ranks=range(4))


def environment_override(ctx, name: str, ranks_per_node: int):
    os.environ[name] = str(ranks_per_node)
    try:
        with HybridEPBuffer(ctx.group(4), 16, 8, 2, timeout_s=50) as buffer:
            return (
                buffer.num_of_nodes,
                buffer.num_of_hybrid_ep_ranks_per_nvlink_domain,
                buffer.node_rank,
                buffer.local_rank,
                buffer.rank,
                buffer.group_size,
            )
    finally:
        del os.environ[name]


@pytest.mark.parametrize("name", ["NUM_OF_HYBRID_EP_RANKS_PER_NVLINK_DOMAIN", "HYBRID_EP_RANKS_PER_NODE"])
def test_ranks_per_node_from_the_environment(world, name):
    assert world.run(environment_override, name, 2, ranks=range(4)) == [(2, 2, r // 2, r % 2, r, 4) for r in range(4)]


def default_nodes(ctx):
    with HybridEPBuffer(ctx.group(4), 16, 8, 2, timeout_s=50) as buffer:
        return buffer.num_of_nodes, buffer.local_rank


def test_ranks_of_one_host_are_one_node(world):
    assert world.run(default_nodes, ranks=range(4)) == [(1, r) for r in range(4)]


def disagree(ctx, argument: str):
    value = {
        "hidden_dim": 16 + 16 * (ctx.rank == 2),
        "num_local_experts": 2 + (ctx.rank == 2),
        "num_of_hybrid_ep_ranks_per_nvlink_domain": 2 + 2 * (ctx.rank == 2),
    }[argument]
    arguments = {"hidden_dim": 16, "num_local_experts": 2, argument: value}
    HybridEPBuffer(
        ctx.group(4), arguments.pop("hidden_dim"), 8, arguments.pop("num_local_experts"), timeout_s=50, **arguments
    )


@pytest.mark.parametrize("argument", ["hidden_dim", "num_local_experts", "num_of_hybrid_ep_ranks_per_nvlink_domain"])
def test_ranks_must_agree_on_the_constructor(world, argument):
    answers = world.run(disagree, argument, ranks=range(4), return_errors=True)
    assert {a["type"] for a in answers} == {"ValueError"}
    assert len({a["message"] for a in answers}) == 1
    assert argument in answers[0]["message"] and "on ranks [2]" in answers[0]["message"]
    assert "on ranks [0, 1, 3]" in answers[0]["message"]


def test_no_name_outlives_the_set_up(world, shm_names):
    world.run(run_example, Example(2, 2, 2, (6, 9, 12, 3), 3), ranks=range(4))
    assert shm_names.new() == []
