"""Real processes that share one GPU, over memory that they map from each other: bit for bit against the reference.

The device takes the processes in turns, so this shows that memory is shared rightly, not how fast anything is."""

from __future__ import annotations

import gc

import pytest
import torch
from examples import Example, check
from gpu_world import OnDevice
from world import ProcessWorld

from hybrid_ep import HybridEPBuffer, devices


@pytest.fixture(scope="module")
def processes():
    with ProcessWorld(4) as world:
        yield world


def _make(ctx, ex: Example) -> HybridEPBuffer:
    return HybridEPBuffer(ctx.group(ex.world.num_ranks), 16, 1, ex.num_local_experts, executor="cuda", timeout_s=30,
                          num_of_hybrid_ep_ranks_per_nvlink_domain=ex.num_local_ranks)


def _check(ctx, ex: Example) -> str:
    buffer = _make(ctx, ex)
    check(OnDevice(buffer, torch.cuda.Stream(), ctx.rank, 0), ctx.rank, ex)
    kind = buffer._session._segments.kind
    buffer.destroy()
    return kind


def _free_after(ctx, ex: Example, rounds: int) -> int:
    """Device memory that `rounds` buffers leave in use."""
    _make(ctx, ex).destroy()
    gc.collect()
    before, _ = torch.cuda.mem_get_info()
    for _ in range(rounds):
        _make(ctx, ex).destroy()
    gc.collect()
    return before - torch.cuda.mem_get_info()[0]


@pytest.mark.parametrize("shape", [(1, 2), (2, 1), (1, 4), (2, 2)])
def test_processes_that_map_each_others_memory(processes, shape):
    num_ranks = shape[0] * shape[1]
    ex = Example(*shape, 2, tuple(9 * r + 5 for r in range(num_ranks)), 3, 64, scale_columns=1, pad_multiple=4, seed=6)
    kinds = processes.run(_check, ex, ranks=range(num_ranks), timeout_s=110.0)
    assert len(set(kinds)) == 1 and kinds[0] in devices.KINDS


def test_destroyed_buffers_leave_nothing(processes):
    left = processes.run(_free_after, Example(1, 2, tokens=(1, 1)), 100, ranks=range(2), timeout_s=110.0)
    assert max(left) < 64 << 20, f"bytes in use after 100 buffers: {left}"
