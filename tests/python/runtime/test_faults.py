"""Ranks that die or stop: the survivors raise in time, say who is missing, and nothing stays in shared
memory."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch
from world import ProcessWorld

from hybrid_ep import HybridEPBuffer
from hybrid_ep.errors import BootstrapError, BufferFailedError, DeadlineError
from hybrid_ep.testing import VirtualWorld

TIMEOUT_S = 6.0  # long enough for a busy machine to start the ranks


def make(ctx, ranks_per_node: int):
    ctx.kept["buffer"] = HybridEPBuffer(
        ctx.group(ctx.size), 4096, 512, 2, timeout_s=TIMEOUT_S, num_of_hybrid_ep_ranks_per_nvlink_domain=ranks_per_node
    )


def dispatch(ctx):
    x = torch.ones(512, 4096)
    idx = torch.arange(512 * 2).view(512, 2) % (2 * ctx.size)
    ctx.kept["buffer"].dispatch_with_permute(hidden=x, topk_idx=idx)


def dispatch_for_ever(ctx):
    """Never returns normally: ends with the exception that a dispatch raises."""
    while True:
        dispatch(ctx)


def use_again(ctx):
    idx = torch.zeros(1, 1, dtype=torch.int64)
    ctx.kept["buffer"].dispatch_with_permute(hidden=torch.ones(1, 4096), topk_idx=idx)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("ranks_per_node", [4, 2])
def test_a_rank_ends_in_the_middle_of_dispatch(number, ranks_per_node, shm_names):
    with ProcessWorld(4) as world:
        world.run(make, ranks_per_node)
        world.run(dispatch)  # the buffer has grown then, however busy the machine: that ends with another error
        world.start(dispatch_for_ever)
        time.sleep(1.0)
        world.signal(2, number)
        hit = time.monotonic()
        errors = world.collect([0, 1, 3], timeout_s=TIMEOUT_S * 6, return_errors=True)
        # A survivor may wait for one that waits for the lost rank, so a few deadlines may follow each other.
        assert time.monotonic() - hit < TIMEOUT_S * 5
        assert [e["type"] for e in errors] == ["DeadlineError"] * 3, errors
        for rank, error in zip([0, 1, 3], errors, strict=True):
            # When one wait of a rank runs out, the one that names another rank is reported, though it began later.
            assert error["rank"] == rank and error["waited_s"] >= TIMEOUT_S / 2
            assert error["site"] and error["role"] and f"rank {rank}" in error["message"]
        assert any(e["peer"] == 2 for e in errors), [e["message"] for e in errors]
        again = world.run(use_again, ranks=[0, 1, 3], return_errors=True)
        assert {e["type"] for e in again} == {"BufferFailedError"}
        assert all("this buffer failed earlier" in e["message"] for e in again)
        assert shm_names.new() == []
        if number == signal.SIGSTOP:
            world.signal(2, signal.SIGKILL)


def construct_without_two(ctx):
    if ctx.rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    make(ctx, 4)


def test_a_rank_that_never_comes_to_the_constructor(shm_names):
    with ProcessWorld(4) as world:
        world.start(construct_without_two)
        errors = world.collect([0, 1, 3], timeout_s=TIMEOUT_S * 5, return_errors=True)
        assert [e["type"] for e in errors] == ["BootstrapError"] * 3
        assert all(tuple(e["missing"]) == (2,) and "[2]" in e["message"] for e in errors)
        assert shm_names.new() == []


def die_after_creating(ctx):
    """Rank 2 dies when its segment exists and its name is still there."""
    from hybrid_ep.runtime import bootstrap

    if ctx.rank == 2:
        create = bootstrap.PosixSegments.create

        def create_and_die(name, num_bytes):
            create(name, num_bytes)
            os.kill(os.getpid(), signal.SIGKILL)

        bootstrap.PosixSegments.create = staticmethod(create_and_die)
    make(ctx, 4)


def test_a_rank_that_dies_while_its_name_exists_leaves_nothing(shm_names):
    with ProcessWorld(4) as world:
        world.start(die_after_creating)
        errors = world.collect([0, 1, 3], timeout_s=TIMEOUT_S * 5, return_errors=True)
        assert [e["type"] for e in errors] == ["BootstrapError"] * 3 and shm_names.new() == []


def test_a_rank_without_memory_is_named_by_all():
    world = VirtualWorld(1, 3)
    create = world.segments.create

    def no_memory(name, num_bytes):
        if name.endswith(".1"):
            raise MemoryError("no room in shared memory; free some or lower capacity_factor")
        return create(name, num_bytes)

    world.segments.create = no_memory
    errors = world.run(lambda rank, group: HybridEPBuffer(group, 16, 8, 2, timeout_s=20), return_errors=True)
    assert [type(e) for e in errors] == [BootstrapError, MemoryError, BootstrapError]
    assert all("no room in shared memory" in str(e) for e in errors) and errors[0].missing == (1,)
    assert len(world.segments) == 0


def test_a_rank_that_does_not_dispatch():
    world = VirtualWorld(2, 1)
    buffers = world.buffers(16, 8, 2, timeout_s=1.0)

    def work(rank, _):
        if rank == 0:
            buffers[0].dispatch(torch.ones(2, 16), topk_idx=torch.tensor([[0], [2]]))

    error = world.run(work, return_errors=True)[0]
    assert type(error) is DeadlineError and (error.rank, error.peer, error.node, error.peer_node) == (0, 1, 0, 1)
    assert 1.0 <= error.waited_s < 5.0 and error.expected > error.seen and error.site and error.role
    with pytest.raises(BufferFailedError, match="failed earlier"):
        buffers[0].traffic()
