"""Whom a rank waited for: the late one, on every other rank, through growth; and nobody where nobody is late."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from hybrid_ep.balance import MicrobatchOptions
from hybrid_ep.meters import WAITED_IN
from hybrid_ep.testing import VirtualWorld

H, EXPERTS_OF_RANK, DELAY, FAR_LESS = 64, 2, 0.4, 0.2


def routing(rank, tokens, num_experts):
    generator = torch.Generator().manual_seed(rank)
    return torch.rand(tokens, num_experts, generator=generator).topk(2).indices


def waits(shape, late, call, **options):
    """wait_seconds() of every rank after call(rank, buffer), for which all but `late` are in time."""
    world = VirtualWorld(*shape)
    buffers = world.buffers(H, 16, EXPERTS_OF_RANK + ("clones" in options), timeout_s=30, **options)
    meet = threading.Barrier(world.size)

    def work(rank, _):
        meet.wait(30)
        if rank == late:
            time.sleep(DELAY)
        call(rank, buffers[rank])
        return buffers[rank].wait_seconds()

    found = world.run(work)
    assert all(len(one) == world.size for one in found)
    return found, buffers, world


def dispatch(rank, buffer, tokens=16):
    num_experts = EXPERTS_OF_RANK * buffer.group_size
    buffer.dispatch_with_permute(
        hidden=torch.ones(tokens, H).bfloat16(), topk_idx=routing(rank, tokens, num_experts), num_of_experts=num_experts
    )


def only_the_late_one(found, late):
    for rank, seconds in enumerate(found):
        if rank == late:
            assert sum(seconds) < FAR_LESS, (rank, seconds)
            continue
        assert DELAY / 2 < seconds[late] < 10 * DELAY, (rank, seconds)
        assert seconds[rank] == 0
        assert all(waited < FAR_LESS for other, waited in enumerate(seconds) if other != late), (rank, seconds)


@pytest.mark.parametrize("shape, late", [((1, 2), 0), ((1, 4), 3), ((2, 2), 1), ((3, 1), 2), ((2, 2), 2)])
def test_every_rank_waits_for_the_late_one_alone(shape, late):
    only_the_late_one(waits(shape, late, dispatch)[0], late)


@pytest.mark.parametrize("shape, late", [((1, 2), 0), ((1, 4), 3), ((2, 2), 1), ((3, 1), 2), ((2, 2), 2), ((2, 3), 5)])
def test_every_rank_waits_for_the_late_one_alone_on_the_latency_path(shape, late):
    """Also where another rank of its node hands its counts on."""

    def dispatch_by_lines(rank, buffer):
        num_experts = EXPERTS_OF_RANK * buffer.group_size
        buffer.dispatch_with_permute(
            hidden=torch.ones(16, H).bfloat16(),
            topk_idx=routing(rank, 16, num_experts),
            num_of_experts=num_experts,
            num_permuted_tokens=32 * buffer.group_size,
            non_blocking=True,
            path="latency",
        )

    found, buffers, _ = waits(shape, late, dispatch_by_lines, latency_tokens=16)
    only_the_late_one(found, late)
    for rank, buffer in enumerate(buffers):
        assert buffer.wait_seconds("exchange") == found[rank]


def test_planning_clones_waits_likewise():
    def plan(rank, buffer):
        buffer.plan_clones(topk_idx=routing(rank, 16, EXPERTS_OF_RANK * buffer.group_size))

    only_the_late_one(waits((1, 3), 1, plan, clones=MicrobatchOptions(spare_slots=1))[0], 1)


def test_counts_stay_through_growth_and_go_with_a_reset():
    late = 1
    before, buffers, world = waits((1, 2), late, dispatch)
    world.run(lambda rank, _: dispatch(rank, buffers[rank], tokens=500))
    after = [buffer.wait_seconds() for buffer in buffers]
    assert all(b >= a for one, two in zip(before, after, strict=True) for a, b in zip(one, two, strict=True))
    assert after[0][late] >= DELAY / 2
    for buffer in buffers:
        buffer.reset_traffic()
        assert buffer.wait_seconds() == [0.0, 0.0]


def late_in(shape, late, step, blocks):
    """wait_seconds(kind) of all kinds and ranks, of one call: `late` sleeps before step(buffer, x, handle). None is
    more than the call took, whatever the number of blocks, which all wait."""
    world = VirtualWorld(*shape)
    sms = dict.fromkeys(("num_sms_dispatch_api", "num_sms_combine_api"), blocks)
    buffers = world.buffers(H, 16, EXPERTS_OF_RANK, timeout_s=30, **sms)

    def work(rank, _):
        buffer, x = buffers[rank], torch.ones(16, H, dtype=torch.bfloat16)
        num_experts = EXPERTS_OF_RANK * world.size
        rows, *_, handle = buffer.dispatch_with_permute(
            hidden=x, topk_idx=routing(rank, 16, num_experts), num_of_experts=num_experts
        )
        buffer.reset_traffic()
        if rank == late:
            time.sleep(DELAY)
        begin = time.monotonic()
        step(buffer, x, rows, handle)
        assert max(buffer.wait_seconds()) <= time.monotonic() - begin
        assert buffer.wait_seconds() == [sum(s) for s in zip(*map(buffer.wait_seconds, WAITED_IN), strict=True)]
        return {kind: buffer.wait_seconds(kind) for kind in WAITED_IN}

    found = world.run(work)
    return {kind: [of_rank[kind] for of_rank in found] for kind in WAITED_IN}


def by_handle(buffer, x, _, handle):
    buffer.dispatch_with_permute(hidden=x, handle=handle)


def combines(buffer, _, rows, handle):
    buffer.combine_with_unpermute(hidden=rows, handle=handle)


@pytest.mark.parametrize("kind, step", [("dispatch", by_handle), ("combine", combines)])
@pytest.mark.parametrize("shape, late", [((1, 2), 1), ((1, 4), 2), ((2, 2), 3)])
@pytest.mark.parametrize("blocks", [1, 5])
def test_ranks_of_a_node_wait_for_who_begins_an_operation_late(shape, late, kind, step, blocks):
    found = late_in(shape, late, step, blocks)
    own = slice(late // shape[1] * shape[1], (late // shape[1] + 1) * shape[1])
    for waited_in, of_ranks in found.items():
        if waited_in == kind:
            only_the_late_one([seconds[own] for seconds in of_ranks[own]], late - own.start)
            of_ranks = [*of_ranks[: own.start], *of_ranks[own.stop :]]  # those of the other node wait for its rows
        assert all(seconds[late] == 0 for seconds in of_ranks), (waited_in, of_ranks)
    assert sum(map(sum, found["exchange"])) == 0


def test_a_kind_that_there_is_not_is_refused():
    buffer = VirtualWorld(1, 1).buffers(H, 16, EXPERTS_OF_RANK)[0]
    with pytest.raises(ValueError, match="during='permute' must be one of .*'combine'"):
        buffer.wait_seconds("permute")


def test_counts_can_be_asked_for_while_memory_grows():
    """By another thread; nothing that was counted is lost."""
    before, buffers, world = waits((1, 2), 1, dispatch)
    asked, ends = [], threading.Event()

    def ask():
        while not ends.is_set():
            asked.append((buffers[0].traffic(), buffers[0].wait_seconds()))

    with ThreadPoolExecutor(1) as pool:
        asking = pool.submit(ask)
        try:
            for tokens in (100, 1000, 10_000):
                world.run(lambda rank, _, tokens=tokens: dispatch(rank, buffers[rank], tokens=tokens))
        finally:
            ends.set()
        asking.result(30)
    asked.append((buffers[0].traffic(), buffers[0].wait_seconds()))
    assert all(waited[1] >= before[0][1] and sent.keys() == asked[-1][0].keys() for sent, waited in asked)
