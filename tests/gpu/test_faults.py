"""A rank that never comes: whoever waits for it reports it within the deadline, and the CUDA context lives."""

from __future__ import annotations

import time

import pytest
import torch
from gpu_world import GpuWorld

from hybrid_ep.errors import BufferFailedError, DeadlineError


def routed(buffer, num_experts: int):
    return buffer.dispatch_with_permute(
        hidden=torch.ones(5, 64, dtype=torch.bfloat16),
        topk_idx=torch.arange(5)[:, None] % num_experts,
        num_of_experts=num_experts,
    )


@pytest.mark.parametrize("shape, site", [((1, 2), "counts_from_node"), ((2, 1), "counts_from_rail")])
def test_a_missing_rank_is_named_and_the_context_survives(shape, site):
    world = GpuWorld(*shape, 2, timeout_s=1.5, skew=0)
    started = time.monotonic()
    errors = world.run(lambda rank, buffer: routed(buffer, 4) if rank == 0 else None, return_errors=True)
    assert isinstance(errors[0], DeadlineError), errors[0]
    assert (errors[0].site, errors[0].rank, errors[0].peer) == (site, 0, 1)
    assert 1.0 < errors[0].waited_s < 10 and time.monotonic() - started < 30
    with pytest.raises(BufferFailedError):
        routed(world.buffers[0], 4)
    assert torch.ones(1000, device="cuda").sum().item() == 1000  # no sticky error
    other = GpuWorld(*shape, 2, skew=0)
    results = other.run(lambda rank, buffer: routed(buffer, 4)[0].float().sum().item())
    assert sum(results) == 2 * 5 * 64


def test_calls_queued_behind_one_that_dies_take_no_part():
    timeout_s, calls = 1.5, 8
    world = GpuWorld(1, 2, 2, timeout_s=timeout_s, skew=0)

    def both(rank, buffer):
        rows, *_, handle = routed(buffer, 4)
        buffer.combine_with_unpermute(hidden=rows, handle=handle)

    world.run(both)  # makes room, which needs both ranks
    x = torch.ones(5, 64, dtype=torch.bfloat16, device="cuda")
    idx = (torch.arange(5) % 4)[:, None].cuda()

    def lonely(rank, _):
        if rank == 1:
            return
        started = time.monotonic()
        for _ in range(calls):  # the first one's exchange waits for rank 1; the others are on the stream before it dies
            rows, *_, handle = world.raw[0].dispatch_with_permute(
                hidden=x, topk_idx=idx, num_of_experts=4, num_permuted_tokens=16, non_blocking=True
            )
            world.raw[0].combine_with_unpermute(hidden=rows, handle=handle)
        torch.cuda.synchronize()
        # One deadline, and what the rest take on a busy machine; all deadlines, if each of them waited.
        assert time.monotonic() - started < calls * timeout_s / 2, "more than one of them has waited"
        with pytest.raises(DeadlineError) as error:
            routed(world.buffers[0], 4)
        assert (error.value.site, error.value.peer) == ("counts_from_node", 1)

    world.run(lonely)
    assert torch.ones(1000, device="cuda").sum().item() == 1000  # no sticky error, though no plan was ever made
    world.close()


# A dispatch waits for rank 1 twice: its blocks that feed links for its "ready", which names it, and those of local work
# for rows, which may be anybody's.
@pytest.mark.parametrize("operation", ["dispatch", "combine"])
def test_an_operation_nobody_waits_for_is_reported_by_the_next_call(operation):
    world = GpuWorld(1, 2, 1, timeout_s=1.5, skew=0)

    def both(rank, buffer):
        rows, *_, handle = routed(buffer, 2)
        buffer.combine_with_unpermute(hidden=rows, handle=handle)  # makes room, which needs both ranks
        return rows, handle

    handles = world.run(both)

    def lonely(rank, buffer):
        if rank == 1:
            return None
        rows, handle = handles[0]
        if operation == "dispatch":
            x = torch.ones(5, 64, dtype=torch.bfloat16, device="cuda")
            buffer._buffer.dispatch_with_permute(hidden=x, handle=handle)
        else:
            buffer._buffer.combine_with_unpermute(hidden=rows.cuda(), handle=handle)
        torch.cuda.synchronize()
        return routed(buffer, 2)

    errors = world.run(lonely, return_errors=True)
    assert isinstance(errors[0], DeadlineError) and errors[0].peer == 1, errors[0]
