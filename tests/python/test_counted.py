"""Blocking calls on the host's executors as if those ran beside the host: what a GPU does. The engine polls
the notification of the counts, nobody has looked at the choices before, and results are bit for bit the reference's,
maps of the handles included."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection

import pytest
import torch
from examples import WRONG, Example, check, examples, expected, make_inputs, same
from hypothesis import given, settings

from hybrid_ep.errors import CapacityError
from hybrid_ep.testing import VirtualWorld

WORLDS = [
    ((1, 1), "host", 8),
    ((1, 3), "host", 10),
    ((2, 2), "host", 14),
    ((3, 2), "host", 8),
    ((4, 1), "host", 6),
    ((2, 2), "host_checked", 3),
    ((2, 1), "host_checked_lanes32", 3),
]  # shape, executor, examples
_worlds: dict = {}
pytestmark = pytest.mark.usefixtures("poisoned_plans", "unread_plans")


def buffers_of(shape, num_local_experts: int, tokens: int = 1, **options):
    world = VirtualWorld(*shape)
    buffers = world.buffers(16, tokens, num_local_experts, timeout_s=60, **options)
    for buffer in buffers:
        buffer._session.runs_beside = True
    return world, buffers


def kept(shape, num_local_experts: int, executor: str):
    """Later examples find the flags, the notification and the counters of earlier ones."""
    key = (shape, executor)
    if key not in _worlds:
        _worlds[key] = buffers_of(shape, num_local_experts, executor=executor)
    return _worlds[key]


@pytest.mark.parametrize("shape, executor, rounds", WORLDS)
def test_examples(shape, executor, rounds):
    @settings(max_examples=rounds)
    @given(ex=examples(*shape, max_tokens=40 if executor == "host" else 12))
    def run(ex):
        world, buffers = kept(shape, ex.num_local_experts, executor)
        world.poison(buffers)
        world.run(lambda rank, _: check(buffers[rank], rank, ex, expected(ex)))

    run()


@pytest.mark.parametrize("shape", [(2, 2), (3, 1)])
def test_everything_a_call_returns_is_the_same_on_lanes_of_a_gpus_width(shape):
    """Also the handles' maps over the rail, of which the reference says nothing, and the bytes that crossed links."""
    same_everywhere(everything(shape, executor="host_checked_lanes32"), everything(shape, executor="host"))


def everything(shape, **options) -> list:
    """By rank: the elements of two calls' results and of their handles, and the traffic."""
    ranks = shape[0] * shape[1]
    ex = Example(
        *shape, 3, tuple((7 * r + 5) % 23 for r in range(ranks)), 3, 48, scale_columns=1, pad_multiple=4, seed=8
    )
    world, buffers = buffers_of(shape, 3, **options)

    def work(rank, _):
        mine, buffer = make_inputs(ex, rank), buffers[rank]
        common = dict(num_of_experts=ex.world.num_experts, **mine.routing())
        dense = buffer.dispatch(mine.hidden, mine.scale, **common)
        permuted = buffer.dispatch_with_permute(hidden=mine.hidden, pad_multiple=4, **common)
        found = [*dense[:3], *permuted[:4], *dense[3][:6], *permuted[4][:9], permuted[4][-1]]
        return [x.cpu() if isinstance(x, torch.Tensor) else x for x in found], buffer.traffic()

    return world.run(work)


def same_everywhere(now: list, then: list, but: Collection[str] = ("count_bytes",)) -> None:
    """but: counters that may differ."""
    for rank, ((got, bytes_now), (want, bytes_then)) in enumerate(zip(now, then, strict=True)):
        for i, (g, w) in enumerate(zip(got, want, strict=True)):
            if isinstance(w, torch.Tensor):
                same(f"element {i} of rank {rank}", g, w)
            else:
                assert g == w
        assert {k: v for k, v in bytes_now.items() if k not in but} == {
            k: v for k, v in bytes_then.items() if k not in but
        }


@pytest.mark.parametrize("kind", ["topk", "map"])
def test_growth_costs_one_more_exchange_and_then_none(kind):
    small = Example(2, 1, 2, (4, 3), 2, 32, routing=kind, seed=2)
    large = dataclasses.replace(small, tokens=(40, 3), topk=4, hidden=256)
    world, buffers = buffers_of((2, 1), 2, tokens=4)

    def launches(rank, ex):
        before = buffers[rank]._session.num_launches()
        mine = make_inputs(ex, rank)
        rows, *_ = buffers[rank].dispatch_with_permute(hidden=mine.hidden, num_of_experts=4, **mine.routing())
        same("rows", rows, expected(ex).permuted[rank][0])
        return buffers[rank]._session.num_launches() - before

    counts = [world.run(lambda rank, _, e=ex: launches(rank, e)) for ex in (small, small, large, large, small)]
    assert [c[0] for c in counts] == [c[1] for c in counts]
    assert counts[1] == counts[3] == counts[4] == [2, 2] and counts[2][0] > 2


def test_ranks_of_unlike_width_agree():
    """One rank names two experts a token, the other three: records have room for three on both."""
    world, buffers = buffers_of((1, 2), 2, tokens=4)
    idx = [torch.tensor([[0, 3], [1, -1]]), torch.tensor([[3, 1, 0], [-1, 2, -1]])]
    x = torch.arange(2 * 2 * 16).view(2, 2, 16).bfloat16()

    def work(rank, _):
        rows, _, _, padded, handle = buffers[rank].dispatch_with_permute(
            hidden=x[rank], topk_idx=idx[rank], num_of_experts=4
        )
        return rows, padded.tolist(), buffers[rank].combine_with_unpermute(hidden=rows, handle=handle)[0]

    (rows0, padded0, out0), (rows1, padded1, out1) = world.run(work)
    assert padded0 == [2, 2] and padded1 == [1, 2]
    same("rows of rank 0", rows0, torch.stack([x[0, 0], x[1, 0], x[0, 1], x[1, 0]]))
    same("rows of rank 1", rows1, torch.stack([x[1, 1], x[0, 0], x[1, 0]]))
    same("sums", out0, x[0] * torch.tensor([[2.0], [1.0]]).bfloat16())
    same("sums", out1, x[1] * torch.tensor([[3.0], [1.0]]).bfloat16())


def test_bad_calls_are_refused_on_every_rank_and_harm_nothing():
    ex = Example(1, 2, 2, (4, 4), 2, seed=3)
    world, buffers = buffers_of((1, 2), 2, tokens=4)

    def call(rank, **changes):
        mine = make_inputs(ex, rank)
        return buffers[rank].dispatch_with_permute(
            **{"hidden": mine.hidden, "num_of_experts": 4, **mine.routing(), **changes}
        )

    def refused(*, match, **changes_of_rank_1):
        errors = world.run(lambda rank, _: call(rank, **(changes_of_rank_1 if rank else {})), return_errors=True)
        assert all(isinstance(e, ValueError) and match in str(e) for e in errors), errors

    for wrong in (4, -2):
        idx = make_inputs(ex, 1).topk_idx.clone()
        idx[2, 1] = wrong
        refused(topk_idx=idx, match="1 on rank 1")
    refused(pad_multiple=7, match="pad_multiple")
    refused(topk_weights=None, match="weights")
    errors = world.run(lambda rank, _: call(rank, num_permuted_tokens=2), return_errors=True)
    assert all(isinstance(e, CapacityError) and "num_permuted_tokens=2" in str(e) for e in errors), errors
    world.run(lambda rank, _: check(buffers[rank], rank, ex, expected(ex)))


def test_capacity_is_the_same_error_and_the_same_drop():
    same_capacity({"executor": "host_checked_lanes32"}, {"executor": "host"})


def same_capacity(here: dict, there: dict) -> None:
    """Of buffers with these options."""
    ex = Example(1, 2, 2, (8, 8), 2, skew="one_rank", seed=1)
    mine = [make_inputs(ex, rank) for rank in range(2)]

    def run(options, overflow):
        world, buffers = buffers_of((1, 2), 2, tokens=8, capacity_factor=1.0, overflow=overflow, **options)
        return world.run(
            lambda rank, _: buffers[rank].dispatch_with_permute(
                hidden=mine[rank].hidden, num_of_experts=4, **mine[rank].routing()
            ),
            return_errors=True,
        )

    errors = run(here, "raise"), run(there, "raise")
    assert [str(e) for e in errors[0]] == [str(e) for e in errors[1]]
    assert all(isinstance(e, CapacityError) for e in errors[0]), errors[0]
    for got, want in zip(run(here, "drop"), run(there, "drop"), strict=True):
        for i in (0, 1, 3):
            same(f"result {i}", got[i], want[i])
        assert int(got[-1][-1]) == int(want[-1][-1])


def test_a_plan_takes_memory_for_the_rows_that_came():
    """Not, as a sync-free one must, for every token of every rank."""
    ex = Example(1, 4, 2, (64,) * 4, 1, seed=5)
    world, buffers = buffers_of((1, 4), 2, tokens=64)

    def work(rank, _):
        mine = make_inputs(ex, rank)
        common = dict(hidden=mine.hidden, num_of_experts=8, **mine.routing())
        counted = buffers[rank].dispatch_with_permute(**common)[-1][-2].plan
        unseen = buffers[rank].dispatch_with_permute(non_blocking=True, num_permuted_tokens=256, **common)[-1][-2].plan
        record = 16 + 8 + 8  # header, a destination, a pair
        assert counted.learned.block.nbytes <= counted.num_recv_rows * (record + 16) + 512
        assert unseen.memory.block.nbytes - counted.memory.block.nbytes == 256 * (record + 16)

    world.run(work)


def test_the_comparison_notices():
    ex = Example(2, 1, 2, (20, 20), 2, pad_multiple=8, seed=1)
    world, buffers = buffers_of((2, 1), 2)
    with pytest.raises(AssertionError, match="permuted rows"):
        world.run(lambda rank, _: check(buffers[rank], rank, ex, WRONG["one bit of one row"](ex, expected(ex))))
