"""Whole worlds in one process, bit for bit against the reference: many topologies, every executor, every
example."""

from __future__ import annotations

import pytest
from examples import WRONG, Example, check, examples, expected
from hypothesis import given, settings

from hybrid_ep import HybridEPBuffer, _core
from hybrid_ep.testing import VirtualWorld

SHAPES = [(1, 1), (1, 2), (1, 4), (2, 1), (2, 2), (4, 1), (2, 3), (3, 2)]
_worlds: dict = {}


def buffers_of(shape, num_local_experts: int, executor: str, **options):
    """The buffers of a virtual world, kept: later examples find the flags and counters of earlier ones."""
    key = (shape, executor, tuple(options.items()))
    if key not in _worlds:
        world = VirtualWorld(*shape)
        _worlds[key] = world, world.buffers(16, 1, num_local_experts, executor=executor, timeout_s=60, **options)
    return _worlds[key]


def check_world(ex: Example, executor: str = "host", want=None, **options) -> None:
    want = want or expected(ex)
    world, buffers = buffers_of((ex.num_nodes, ex.num_local_ranks), ex.num_local_experts, executor, **options)
    world.poison(buffers)
    world.run(lambda rank, _: check(buffers[rank], rank, ex, want))


@pytest.mark.parametrize("shape", SHAPES)
def test_examples(shape):
    @given(ex=examples(*shape))
    def run(ex):
        check_world(ex)

    run()


@pytest.mark.parametrize("shape", [(1, 3), (2, 2)])
def test_examples_with_a_static_budget(shape):
    @given(ex=examples(*shape, budget=True))
    def run(ex):
        check_world(ex)

    run()


@pytest.mark.parametrize("executor", [e for e in _core.executors() if e != "host"])
@pytest.mark.parametrize("shape", [(1, 2), (2, 2), (3, 1)])
def test_checking_executors(shape, executor):
    """Loads that complete late and in any order, stores as late as legal."""

    @settings(max_examples=6)
    @given(ex=examples(*shape, max_tokens=12))
    def run(ex):
        check_world(ex, executor)

    run()


@pytest.mark.parametrize("shape", [(8, 8), (4, 8), (8, 2), (1, 16), (16, 1)])
def test_large_worlds(shape):
    num_ranks = shape[0] * shape[1]
    tokens = tuple((7 * r) % 5 for r in range(num_ranks))
    for seed, skew in ((1, "uniform"), (2, "one_rank")):
        check_world(Example(*shape, 2, tokens, 6, 32, seed=seed, skew=skew, pad_multiple=4))


@pytest.mark.parametrize("executor", ["host", "host_checked_lanes32"])
@pytest.mark.parametrize("num_local_experts, topk", [(200, 6), (4000, 3), (30, 40)])
def test_routing_of_more_experts_than_a_warp_has_lanes(executor, num_local_experts, topk):
    """16 warps count pairs in 24 KiB of shared memory here: of 400 experts 15 of them can, of 8000 one. A token's 40
    pairs are two for some lanes."""
    check_world(Example(1, 2, num_local_experts, (70, 13), topk, 16, seed=8), executor)


@pytest.mark.parametrize("num_blocks", [1, 2, 3, 8])
@pytest.mark.parametrize("shape", [(2, 2), (3, 1)])
def test_results_do_not_depend_on_the_number_of_blocks(shape, num_blocks):
    num_ranks = shape[0] * shape[1]
    ex = Example(*shape, 3, tuple(30 * r + 5 for r in range(num_ranks)), 3, 64, scale_columns=1, pad_multiple=8, seed=9)
    check_world(ex, num_sms_dispatch_api=num_blocks, num_sms_combine_api=num_blocks)
    check_world(
        ex,
        num_sms_dispatch_api=2,
        num_sms_combine_api=2,
        num_blocks_permute=num_blocks,
        num_blocks_unpermute=num_blocks,
    )


def test_more_tokens_than_the_rail_ring_holds():
    check_world(Example(2, 2, 2, (700, 1, 0, 611), 2, 16, seed=4, pad_multiple=16))
    check_world(Example(3, 1, 2, (700, 1, 611), 4, 16, "fp32", seed=5))


@pytest.mark.parametrize("wrong", sorted(WRONG))
def test_the_comparison_notices(wrong):
    ex = Example(2, 2, 2, (6, 9, 12, 3), 3, scale_columns=1, pad_multiple=8, seed=5)
    with pytest.raises(AssertionError):
        check_world(ex, want=WRONG[wrong](ex, expected(ex)))
    check_world(ex)


def test_a_buffer_says_what_it_is():
    world = VirtualWorld(1, 2)
    first, second = world.buffers(16, 8, 3, timeout_s=30)
    assert repr(second) == "<HybridEPBuffer: rank 1 of 2, hidden 16, 6 experts, executor 'host'>"
    for buffer in (first, second):
        buffer.destroy()
    assert repr(first).endswith("executor 'host', closed>")
    assert repr(HybridEPBuffer.__new__(HybridEPBuffer)) == "<HybridEPBuffer that was never set up>"
