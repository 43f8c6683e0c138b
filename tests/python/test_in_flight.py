"""Overlapped micro-batches: several dispatches before their combines, on one buffer and on two, bit for bit what one
after the other gives."""

from __future__ import annotations

import threading

import pytest
import torch
from examples import Example, expected, make_inputs, same

from hybrid_ep import HybridEPBuffer
from hybrid_ep.errors import DeadlineError
from hybrid_ep.testing import VirtualWorld

SHAPE = (2, 2)
A = Example(*SHAPE, 3, (30, 0, 17, 9), 3, 64, pad_multiple=4, seed=11)
B = Example(*SHAPE, 3, (5, 21, 40, 1), 2, 64, pad_multiple=8, seed=12)


def send(buffer, rank: int, ex: Example):
    mine = make_inputs(ex, rank)
    return buffer.dispatch_with_permute(
        hidden=mine.hidden, num_of_experts=ex.world.num_experts, pad_multiple=ex.pad_multiple, **mine.routing()
    )


def gather(buffer, sent):
    return buffer.combine_with_unpermute(hidden=sent[0] * 2, probs=sent[1], handle=sent[-1])


def outcome(sent, back) -> list:
    return [*sent[:2], sent[3], *back]


def alone(buffers, world, ex: Example) -> list:
    def work(rank, _):
        sent = send(buffers[rank], rank, ex)
        return outcome(sent, gather(buffers[rank], sent))

    return world.run(work)


def buffers_of(world):
    return world.buffers(64, 40, 3, timeout_s=60)


def compare(results, *wanted) -> None:
    for rank, got in enumerate(results):
        for which, (g, w) in enumerate(zip(got, [want[rank] for want in wanted], strict=True)):
            for i, (x, y) in enumerate(zip(g, w, strict=True)):
                same(f"micro-batch {which}, rank {rank}, element {i}", x, y)


@pytest.mark.parametrize("num_buffers", [1, 2])
def test_two_dispatches_before_their_combines(num_buffers):
    world = VirtualWorld(*SHAPE)
    first = buffers_of(world)
    second = first if num_buffers == 1 else buffers_of(world)
    wanted = alone(first, world, A), alone(second, world, B)

    def work(rank, _):
        a, b = send(first[rank], rank, A), send(second[rank], rank, B)
        world_poison(rank)  # whatever a combine needs of its dispatch is in the handle, not in the buffer
        return outcome(a, gather(first[rank], a)), outcome(b, gather(second[rank], b))

    def world_poison(rank):
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # a dispatch whose counts are here may still be under way
        meet.wait(60)
        for buffers in {id(first): first, id(second): second}.values():
            buffers[rank]._session.engine.poison()
        meet.wait(60)

    meet = threading.Barrier(world.size)
    compare(world.run(work), *wanted)


def test_two_buffers_at_the_same_time():
    """A thread for each buffer on every rank: their operations really overlap, and do not meet."""
    world = VirtualWorld(*SHAPE)
    first, second = buffers_of(world), buffers_of(world)
    wanted = alone(first, world, A), alone(second, world, B)

    def many(buffer, rank, ex):
        for _ in range(8):
            sent = send(buffer, rank, ex)
            result = outcome(sent, gather(buffer, sent))
        return result

    def work(rank, _):
        results = {}
        thread = threading.Thread(target=lambda: results.update(a=many(first[rank], rank, A)))
        thread.start()
        results["b"] = many(second[rank], rank, B)
        thread.join()
        return results["a"], results["b"]

    compare(world.run(work), *wanted)


def test_two_buffers_take_twice_the_memory_of_one():
    world = VirtualWorld(*SHAPE)
    reports = [b.memory_report().total_bytes for buffers in (buffers_of(world), buffers_of(world)) for b in buffers]
    assert len(set(reports)) == 1 and len(reports) == 2 * world.size


def _in_processes(ctx, overlapped: bool):
    group = ctx.group(4)
    options = dict(timeout_s=50, num_of_hybrid_ep_ranks_per_nvlink_domain=2)
    with HybridEPBuffer(group, 64, 40, 3, **options) as first, HybridEPBuffer(group, 64, 40, 3, **options) as second:
        a = send(first, ctx.rank, A)
        if not overlapped:
            a = outcome(a, gather(first, a))
        b = send(second, ctx.rank, B)
        if overlapped:
            a = outcome(a, gather(first, a))
        return a, outcome(b, gather(second, b))


def test_two_buffers_of_real_processes(world):
    overlapped, sequential = (world.run(_in_processes, o, ranks=range(4)) for o in (True, False))
    compare(overlapped, [r[0] for r in sequential], [r[1] for r in sequential])
    for rank in range(4):
        same("rows", overlapped[rank][0][0], expected(A).permuted[rank][0])


def test_the_comparison_notices():
    world = VirtualWorld(*SHAPE)
    buffers = buffers_of(world)
    wanted = alone(buffers, world, A)
    with pytest.raises(AssertionError, match="micro-batch 0, rank 0, element 0"):
        compare([[[r[0] + 1, *r[1:]]] for r in wanted], wanted)
    swapped = [[alone_b] for alone_b in alone(buffers, world, B)]
    with pytest.raises((AssertionError, RuntimeError)):
        compare(swapped, wanted)


def test_a_rank_in_another_operation_gets_no_rows():
    """A rank whose call is refused, and that goes on, is out of step with the others. Their rows would land where it
    wanted those of its last dispatch: in results that it keeps, or that belong to somebody else by now."""
    world = VirtualWorld(1, 2)
    buffers = world.buffers(64, 16, 2, timeout_s=2)
    idx, kept, sent = torch.tensor([[0, 2], [1, 3]]), [None, None], torch.ones(2, 64, dtype=torch.bfloat16)

    def work(rank, _):
        buffer, call = buffers[rank], {"num_of_experts": 4, "topk_idx": idx, "topk_weights": torch.ones(2, 2)}
        rows, _, _, _, handle = buffer.dispatch_with_permute(hidden=sent, **call)
        kept[rank] = rows, rows.clone()
        if rank:
            with pytest.raises(ValueError, match="hidden"):
                buffer.dispatch_with_permute(hidden=sent[:1], handle=handle)
            return buffer.combine_with_unpermute(hidden=rows, handle=handle)
        return buffer.dispatch_with_permute(hidden=2 * sent, handle=handle)

    errors = world.run(work, return_errors=True)
    assert all(isinstance(e, DeadlineError) for e in errors) and errors[0].site == "landing_differs", errors
    assert all(torch.equal(rows, clone) for rows, clone in kept)


@pytest.mark.parametrize("others", ["fp16", "fp32", "fp32 of half the width", "fp32 partials"])
def test_ranks_that_combine_rows_of_different_types_get_no_sums(others):
    """A rank that was sent no row makes its empty outputs in torch's default type, say: others' bf16 is not that."""
    world = VirtualWorld(1, 2)
    buffers = world.buffers(256, 16, 2, timeout_s=2)
    idx = torch.tensor([[0], [1], [0], [1]])  # all to the experts of rank 0
    made = {
        "fp16": (torch.zeros(0, 64, dtype=torch.float16), {}),
        "fp32": (torch.zeros(0, 64), {}),
        "fp32 of half the width": (torch.zeros(0, 32), {}),
        "fp32 partials": (torch.zeros(0, 64, dtype=torch.bfloat16), {"fp32_partials": True}),
    }

    def work(rank, _):
        sent = torch.ones(4, 64, dtype=torch.bfloat16)
        rows, *_, handle = buffers[rank].dispatch_with_permute(hidden=sent, topk_idx=idx, num_of_experts=4)
        empty, options = made[others]
        assert (len(rows) == 0) == (rank == 1)
        hidden, options = (rows, {}) if rank == 0 else (empty, options)
        return buffers[rank].combine_with_unpermute(hidden=hidden, handle=handle, **options)

    errors = world.run(work, return_errors=True)
    assert all(isinstance(e, DeadlineError) for e in errors), errors
    assert (errors[1].site, errors[1].peer) == ("partial_rows", 0), "rank 0 sums its own rows, and misses rank 1"


def test_a_rail_peer_in_another_operation_sends_no_rows():
    """The same between nodes: its chunks are of a combine, or of rows with weights, where this rank reads those of a
    dispatch without."""
    idx, sent = torch.tensor([[0, 2], [1, 3]]), torch.ones(2, 64, dtype=torch.bfloat16)
    for other in ("combine", "wider rows"):
        world = VirtualWorld(2, 1)
        buffers = world.buffers(64, 16, 2, timeout_s=2)

        def work(rank, _, buffers=buffers, other=other):
            buffer, call = buffers[rank], {"num_of_experts": 4, "topk_idx": idx, "topk_weights": torch.ones(2, 2)}
            rows, _, _, _, handle = buffer.dispatch_with_permute(hidden=sent, **call)
            if rank == 0:
                return buffer.dispatch_with_permute(hidden=2 * sent, handle=handle)
            if other == "combine":
                return buffer.combine_with_unpermute(hidden=rows, handle=handle)
            return buffer.dispatch_with_permute(hidden=sent, probs=torch.ones(2, 4), handle=handle)

        errors = world.run(work, return_errors=True)
        assert all(isinstance(e, DeadlineError) and e.site == "rail_differs" for e in errors), errors
        assert [e.peer for e in errors] == [1, 0]
