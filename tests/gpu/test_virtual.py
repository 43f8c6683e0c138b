"""Worlds of virtual ranks on one GPU, through the public API, bit for bit against the reference (as the host executor
is): the host's property tests, with start skew, over a tidy rail and over one that delays and scatters."""

from __future__ import annotations

import gc

import pytest
import torch
from examples import WRONG, Example, check, examples, expected, make_inputs
from gpu_world import GpuWorld
from hypothesis import given, settings

EXECUTORS = ("cuda", "cuda_loopback")
SHAPES = [(1, 1), (1, 2), (1, 4), (1, 8), (2, 1), (2, 2), (4, 1), (2, 3), (3, 2), (2, 4), (4, 2)]
_worlds: dict = {}


def check_world(ex: Example, executor: str, want=None, **options) -> None:
    want = want or expected(ex)
    key = (ex.num_nodes, ex.num_local_ranks, executor, tuple(options.items()))
    if key not in _worlds:
        _worlds[key] = GpuWorld(ex.num_nodes, ex.num_local_ranks, ex.num_local_experts, executor, **options)
    _worlds[key].world.poison(_worlds[key].raw)
    _worlds[key].run(lambda rank, buffer: check(buffer, rank, ex, want))


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("shape", SHAPES)
def test_examples(shape, executor):
    @given(ex=examples(*shape))
    def run(ex):
        check_world(ex, executor)

    run()


@pytest.mark.parametrize("shape", [(1, 3), (2, 2)])
@pytest.mark.parametrize("executor", EXECUTORS)
def test_examples_with_a_static_budget(shape, executor):
    @settings(max_examples=8)
    @given(ex=examples(*shape, budget=True))
    def run(ex):
        check_world(ex, executor)

    run()


@pytest.mark.parametrize("shape", [(8, 2), (1, 16), (16, 1)])
def test_large_worlds(shape):
    tokens = tuple((7 * r) % 5 for r in range(16))
    for seed, skew in ((1, "uniform"), (2, "one_rank")):
        check_world(Example(*shape, 2, tokens, 6, 32, seed=seed, skew=skew, pad_multiple=4), "cuda")


@pytest.mark.parametrize("num_local_experts, topk", [(200, 6), (4000, 3), (30, 40)])
def test_routing_of_more_experts_than_a_warp_has_lanes(num_local_experts, topk):
    check_world(Example(1, 2, num_local_experts, (70, 13), topk, 16, seed=8), "cuda")


@pytest.mark.parametrize("num_blocks", [1, 2, 3, 8, 16])
def test_results_do_not_depend_on_the_number_of_blocks(num_blocks):
    ex = Example(2, 2, 3, (95, 0, 700, 31), 3, 64, scale_columns=1, pad_multiple=8, seed=9)
    blocks = dict.fromkeys(("num_sms_dispatch_api", "num_sms_combine_api", "num_sms_preprocessing_api"), num_blocks)
    check_world(ex, "cuda", **blocks)
    check_world(
        ex,
        "cuda",
        num_sms_dispatch_api=2,
        num_sms_combine_api=2,
        num_blocks_permute=num_blocks,
        num_blocks_unpermute=num_blocks,
    )


@pytest.mark.parametrize("hidden", [7168, 8192, 16384 + 16])
def test_rows_of_training_size_and_rows_of_several_tiles(hidden):
    check_world(
        Example(1, 4, 4, (300, 40, 0, 511), 8, hidden, pad_multiple=16, seed=3),
        "cuda",
        num_sms_dispatch_api=4,
        num_sms_combine_api=4,
    )


def test_more_tokens_than_the_rail_ring_holds():
    check_world(Example(2, 2, 2, (700, 1, 0, 611), 2, 16, seed=4, pad_multiple=16), "cuda_loopback")
    check_world(Example(3, 1, 2, (700, 1, 611), 4, 16, "fp32", seed=5), "cuda_loopback")


def test_a_hundred_worlds_leave_nothing():
    """Each of which has grown and moved tokens. A segment has more than 2 MiB then."""
    ex = Example(1, 2, 2, (512, 512), 2, 1024, seed=7)
    mine = [make_inputs(ex, rank) for rank in range(2)]

    def work(rank, buffer):
        rows, *_, handle = buffer.dispatch_with_permute(
            hidden=mine[rank].hidden, num_of_experts=4, **mine[rank].routing()
        )
        buffer.combine_with_unpermute(hidden=rows, handle=handle)

    def bytes_after(rounds: int) -> int:
        for _ in range(rounds):
            world = GpuWorld(1, 2, 2, skew=0)
            world.run(work)
            world.close()
        del world
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info()
        return total - free

    before = bytes_after(5)
    assert bytes_after(100) - before < 64 << 20


@pytest.mark.parametrize("wrong", sorted(WRONG))
def test_the_comparison_notices(wrong):
    ex = Example(2, 2, 2, (6, 9, 12, 3), 3, scale_columns=1, pad_multiple=8, seed=5)
    with pytest.raises(AssertionError):
        check_world(ex, "cuda", want=WRONG[wrong](ex, expected(ex)))
    check_world(ex, "cuda")


def test_what_the_device_cannot_launch_is_refused_and_the_buffer_works_on():
    too_many = torch.cuda.get_device_properties(0).multi_processor_count + 1
    ex = Example(1, 2, 2, (40, 21), 2, 64, pad_multiple=8, seed=12)
    world, want = GpuWorld(1, 2, 2, skew=0), expected(ex)

    def work(rank, buffer):
        mine, session = want.inputs[rank], world.raw[rank]._session
        call = {"hidden": mine.hidden, "num_of_experts": ex.world.num_experts, **mine.routing()}
        before = session.num_launches()
        for bad in ({"num_sms": too_many}, {"num_sms": 0}):
            with pytest.raises(ValueError, match="num_sms"):
                buffer.dispatch_with_permute(**call, **bad)
            with pytest.raises(ValueError, match="num_sms"):
                buffer.dispatch(**call, **bad)
        assert session.num_launches() == before, "the other ranks would have met an exchange without its dispatch"
        with pytest.raises(ValueError, match="bytes of shared memory"):  # four stages of 120 KB
            buffer.dispatch(**call, scaling_factor=torch.ones(len(mine.hidden), 30_000))
        check(buffer, rank, ex, want)
        rows, *_, handle = buffer.dispatch_with_permute(**call)
        before = session.num_launches()
        with pytest.raises(ValueError, match="num_sms"):
            buffer.combine_with_unpermute(hidden=rows, handle=handle, num_sms=too_many)
        assert session.num_launches() == before
        check(buffer, rank, ex, want)

    world.run(work)
    world.close()


@pytest.mark.parametrize("name", ["num_sms_dispatch_api", "num_blocks_permute"])
def test_a_buffer_of_more_blocks_than_sms_says_so_at_every_call(name):
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    world = GpuWorld(1, 1, 1, **{name: sms + 1})
    for _ in range(2):
        with pytest.raises(ValueError, match="num_blocks"):
            world.run(
                lambda rank, buffer: buffer.dispatch(
                    torch.zeros(1, 16, dtype=torch.bfloat16), topk_idx=torch.zeros(1, 1).long(), num_of_experts=1
                )
            )
