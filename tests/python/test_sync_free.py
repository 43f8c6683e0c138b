"""Plans whose counts the host never reads, on the host's executors as if those ran beside it: what a GPU does with
non_blocking=True, bit for bit against the reference; and the launches that operations take."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from examples import WRONG, Example, check, check_permuted, examples, expected, make_inputs, same
from hypothesis import given, settings

from hybrid_ep.errors import DeadlineError
from hybrid_ep.testing import VirtualWorld

WORLDS = [
    ((1, 1), "host", 8),
    ((1, 3), "host", 10),
    ((2, 2), "host", 12),
    ((3, 1), "host", 8),
    ((2, 2), "host_checked", 3),
    ((2, 1), "host_checked_lanes32", 3),
]  # shape, executor, examples
_worlds: dict = {}
pytestmark = pytest.mark.usefixtures("poisoned_plans", "unread_plans")


def buffers_of(shape, num_local_experts: int, kept: bool = True, tokens: int = 1, **options):
    key = (shape, num_local_experts, tuple(options.items()))
    if not kept or key not in _worlds:
        world = VirtualWorld(*shape)
        buffers = world.buffers(16, tokens, num_local_experts, timeout_s=60, **options)
        for buffer in buffers:
            buffer._session.runs_beside = True
        if not kept:
            return world, buffers
        _worlds[key] = world, buffers
    return _worlds[key]


@pytest.mark.parametrize("shape, executor, rounds", WORLDS)
def test_examples(shape, executor, rounds):
    @settings(max_examples=rounds)
    @given(ex=examples(*shape, max_tokens=40 if executor == "host" else 12, budget=True))
    def run(ex):
        world, buffers = buffers_of(shape, ex.num_local_experts, executor=executor)
        world.poison(buffers)
        world.run(lambda rank, _: check(buffers[rank], rank, ex, expected(ex)))

    run()


def test_blocks_do_not_change_results():
    ex = Example(2, 2, 3, (70, 0, 93, 5), 3, 48, pad_multiple=8, budget=160, seed=3)
    for blocks, own in ((1, None), (5, None), (2, 4)):
        world, buffers = buffers_of(
            (2, 2),
            3,
            kept=False,
            num_sms_dispatch_api=blocks,
            num_sms_combine_api=blocks,
            num_blocks_permute=own,
            num_blocks_unpermute=own,
        )
        world.run(lambda rank, _, b=buffers: check(b[rank], rank, ex, expected(ex)))


@pytest.mark.parametrize("few", [0, 9])
def test_blocks_of_an_exchange_do_not_change_results(few):
    """At a GPU's width, several tokens a step and in registers (few choices) or not; a rank may have more blocks than
    tokens. A host's buffer would take one block: the template is where a number is not asked for its executor."""
    ex = Example(2, 1, 12, (2, 90), 9 if few else 3, 16, pad_multiple=8, budget=2000, seed=3)
    world, buffers = buffers_of((2, 1), 12, kept=False, executor="host_checked_lanes32")
    for rank, buffer in enumerate(buffers):
        buffer.config.num_of_blocks_preprocessing_api = 3 - rank
    world.run(lambda rank, _: check(buffers[rank], rank, ex, expected(ex)))


def test_a_host_takes_one_block_for_an_exchange_and_a_gpu_one_for_128_tokens():
    _, [buffer] = buffers_of((1, 1), 2, kept=False, num_sms_preprocessing_api=108)
    session, template = buffer._session, buffer.config
    assert session.exchange_blocks(4096, template) == 1
    template.num_of_blocks_preprocessing_api = None  # a GPU's with ranks of its own
    assert [session.exchange_blocks(n, template) for n in (0, 1, 128, 129, 4096, 99999)] == [1, 1, 1, 2, 32, 32]
    template.num_of_blocks_preprocessing_api = 108
    assert session.exchange_blocks(4, template) == 32


def test_the_comparison_notices():
    ex = Example(2, 1, 2, (20, 20), 2, budget=64, pad_multiple=8, seed=1)
    other = WRONG["one bit of one row"](ex, expected(ex))
    world, buffers = buffers_of((2, 1), 2)
    with pytest.raises(AssertionError, match="permuted rows"):
        world.run(lambda rank, _: check(buffers[rank], rank, ex, other))


def one(buffer, rank: int, ex: Example, **more):
    mine = make_inputs(ex, rank)
    return buffer.dispatch_with_permute(
        hidden=mine.hidden,
        num_of_experts=ex.world.num_experts,
        non_blocking=True,
        num_permuted_tokens=ex.budget,
        **{"pad_multiple": ex.pad_multiple or None, **mine.routing(), **more},
    )


@pytest.mark.parametrize("own", [None, 3])
def test_launches_of_every_verb(own):
    """Blocks for local work are in the one grid of a dispatch, and of a combine."""
    ex = Example(2, 2, 2, (9, 5, 0, 7), 2, budget=64, seed=4)
    world, buffers = buffers_of((2, 2), 2, kept=False, tokens=9, num_blocks_permute=own, num_blocks_unpermute=own)

    def work(rank, _):
        buffer, counts = buffers[rank], []

        def counted(verb):
            before = buffer._session.num_launches()
            result = verb()
            counts.append(buffer._session.num_launches() - before)
            return result

        mine = make_inputs(ex, rank)
        rows, *_, handle = counted(lambda: one(buffer, rank, ex))
        counted(lambda: buffer.combine_with_unpermute(hidden=rows, handle=handle))
        counted(lambda: buffer.dispatch_with_permute(hidden=mine.hidden, handle=handle, num_permuted_tokens=64))
        rows, *_, handle = counted(
            lambda: buffer.dispatch_with_permute(hidden=mine.hidden, num_of_experts=8, **mine.routing())
        )
        counted(lambda: buffer.combine_with_unpermute(hidden=rows, handle=handle))
        return counts

    assert world.run(work) == [[2, 1, 1, 2, 1]] * 4


def test_what_cannot_be_placed_is_dropped_and_flagged():
    """Experts that do not exist, and more choices in a row of the map than the buffer is laid out for."""
    ex = Example(1, 2, 8, (6, 6), 2, budget=64, weights=False)
    world, buffers = buffers_of((1, 2), 8, kept=False, tokens=6)
    idx = torch.arange(12).view(6, 2)
    bad = idx.clone()
    bad[3, 1] = 16
    allowed = bad.masked_fill(bad == 16, -1)

    def work(rank, _):
        got = one(buffers[rank], rank, ex, topk_idx=bad)
        want = one(buffers[rank], rank, ex, topk_idx=allowed)
        same("rows", got[0], want[0])
        full = one(buffers[rank], rank, ex, topk_idx=None, routing_map=torch.ones(6, 16, dtype=torch.bool))
        return int(got[-1][-1]), int(want[-1][-1]), int(full[-1][-1]), full[3].tolist()

    results = world.run(work)
    assert [r[:3] for r in results] == [(1, 0, 1)] * 2
    assert [sum(r[3]) for r in results] == [64, 0]  # 12 tokens choose the first 8 experts, a budget holds 64 rows


def test_ranks_that_differ_find_each_other_at_the_deadline():
    ex = Example(1, 2, 2, (4, 4), 1, budget=16)
    world = VirtualWorld(1, 2)
    buffers = world.buffers(16, 4, 2, timeout_s=0.5)
    for buffer in buffers:
        buffer._session.runs_beside = True

    def work(rank, _):
        for _ in range(2):  # where calls return before they have run, the second says how the first ended
            one(buffers[rank], rank, ex, pad_multiple=1 + rank)

    errors = world.run(work, return_errors=True)
    assert all(isinstance(e, DeadlineError) and e.site == "headers_differ" for e in errors), errors
    assert [(e.peer, e.expected, e.seen) for e in errors] == [(1, 1, 2), (0, 2, 1)]


def test_a_call_that_does_not_fit_is_refused_before_anything_is_sent():
    ex = Example(1, 1, 2, (5,), 1, budget=16)
    world, buffers = buffers_of((1, 1), 2, kept=False, tokens=4)
    with pytest.raises(ValueError, match="hidden has 5 rows.*max_num_of_tokens_per_rank"):
        world.run(lambda rank, _: one(buffers[0], 0, ex))
    fits = dataclasses.replace(ex, tokens=(4,))
    world.run(lambda rank, _: check_permuted(same, buffers[0], 0, fits, expected(fits)))


def test_growth_after_a_capture_is_refused():
    ex = Example(1, 1, 2, (4,), 1, budget=16)
    world, buffers = buffers_of((1, 1), 2, kept=False, tokens=4)
    world.run(lambda rank, _: one(buffers[0], 0, ex))
    buffers[0]._session.captured = True  # as an operation under capture leaves it
    world.run(lambda rank, _: one(buffers[0], 0, ex))
    wide = dataclasses.replace(ex, hidden=64)
    with pytest.raises(ValueError, match="row_bytes from 32 to 128.*CUDA graph"):
        world.run(lambda rank, _: one(buffers[0], 0, wide))
    buffers[0]._session.capturing = True
    with pytest.raises(ValueError, match="non_blocking=False waits"):
        world.run(
            lambda rank, _: buffers[0].dispatch_with_permute(
                hidden=torch.zeros(4, 16).bfloat16(), num_of_experts=2, topk_idx=torch.zeros(4, 1).long()
            )
        )
