"""Whom a rank waited for, counted by the lane that waits: the rank whose launch comes late."""

from __future__ import annotations

import threading
import time

import pytest
import torch
from gpu_world import GpuWorld

DELAY_S = 0.3


def routed(buffer, call, _):
    buffer.dispatch_with_permute(**call, non_blocking=True)


def by_lines(buffer, call, _):
    buffer.dispatch_with_permute(**call, non_blocking=True, path="latency")


def by_handle(buffer, call, handle):
    buffer.dispatch_with_permute(hidden=call["hidden"], handle=handle, num_permuted_tokens=call["num_permuted_tokens"])


def combined(buffer, call, handle):
    rows = torch.ones(call["num_permuted_tokens"], 64, dtype=torch.bfloat16, device="cuda")
    buffer.combine_with_unpermute(hidden=rows, handle=handle)


STEPS = {"exchange": routed, "lines": by_lines, "dispatch": by_handle, "combine": combined}


@pytest.mark.parametrize(
    "kind, shape, late",
    [("exchange", (1, 3), 1), ("exchange", (2, 2), 2), ("dispatch", (1, 3), 2), ("combine", (1, 3), 1)]
    + [("lines", (1, 3), 1), ("lines", (2, 2), 2)],
)
def test_every_other_rank_waits_for_the_late_one(kind, shape, late):
    world = GpuWorld(*shape, 2, skew=0, latency_tokens=8)
    size = world.world.size
    meet = threading.Barrier(size)

    def work(rank, _):
        buffer, stream = world.raw[rank], world.streams[rank]
        x = torch.ones(8, 64, dtype=torch.bfloat16, device="cuda")
        idx = torch.arange(16, device="cuda").view(8, 2) % (2 * size)
        call = {"hidden": x, "topk_idx": idx, "num_of_experts": 2 * size, "num_permuted_tokens": 64 * size}
        buffer.dispatch_with_permute(hidden=x, topk_idx=idx, num_of_experts=2 * size)  # makes room
        *_, handle = buffer.dispatch_with_permute(**call, non_blocking=True)
        combined(buffer, call, handle)  # whose first call loads its kernel
        by_lines(buffer, call, None)
        stream.synchronize()
        buffer.reset_traffic()
        meet.wait(60)
        if rank == late:
            time.sleep(DELAY_S)
        STEPS[kind](buffer, call, handle)
        stream.synchronize()
        if kind not in ("exchange", "lines"):
            assert not any(buffer.wait_seconds("exchange"))
        return buffer.wait_seconds("exchange" if kind == "lines" else kind)

    found = world.run(work)
    world.close()
    for rank, seconds in enumerate(found):
        assert seconds[rank] == 0
        others = [waited for other, waited in enumerate(seconds) if other not in (rank, late)]
        if rank == late:
            assert max(seconds) < min(one[late] for n, one in enumerate(found) if n != late) / 2, found
        else:
            assert seconds[late] > 2 * max(others), (rank, seconds)
