"""Real processes that share one GPU, over memory that they map from each other: bit for bit against the reference.

The device takes the processes in turns, so this shows that memory is shared rightly, not how fast anything is. No
option chooses the kind of shared memory; a test that wants one leaves its ranks no other."""

from __future__ import annotations

import gc
import os
import threading
from unittest import mock

import pytest
import torch
from examples import Example, check, examples
from gpu_world import OnDevice
from hypothesis import given, settings
from world import ProcessWorld

from hybrid_ep import HybridEPBuffer, _core
from hybrid_ep.runtime import devices

SHAPES = [(1, 2), (2, 1), (1, 4), (2, 2)]


@pytest.fixture(scope="module")
def processes():
    with ProcessWorld(4) as world:
        yield world


def why_not(ctx, kind: str) -> str | None:
    """Why memory of this kind cannot be shared here."""
    devices.current()
    if kind in devices.working_kinds():
        return None
    try:
        _core.cuda.DeviceMemory.create(kind, 1 << 21).share()
    except RuntimeError as error:
        return str(error)
    return "its handles cannot be mapped"


@pytest.fixture(params=devices.KINDS)
def kind(request, processes) -> str:
    if why := processes.run(why_not, request.param, ranks=[0])[0]:
        pytest.skip(f"no {request.param} handles here: {why}")
    return request.param


def _only(kind: str | None):
    """In this process: memory of this kind or none; None: as users have it."""
    return mock.patch.object(devices, "KINDS", devices.KINDS if kind is None else (kind,))


def _make(ctx, ex: Example, kind: str | None, tokens: int = 1) -> HybridEPBuffer:
    with _only(kind):
        return HybridEPBuffer(
            ctx.group(ex.world.num_ranks),
            ex.hidden,
            tokens,
            ex.num_local_experts,
            executor="cuda",
            timeout_s=30,
            num_of_hybrid_ep_ranks_per_nvlink_domain=ex.num_local_ranks,
        )


def _check(ctx, ex: Example, kind: str | None) -> str:
    """The kind in use, after every verb; growth included."""
    buffer = _make(ctx, ex, kind)
    check(OnDevice(buffer, torch.cuda.Stream(), ctx.rank, 0), ctx.rank, ex)
    used = buffer._session._segments.kind
    buffer.destroy()
    return used


def _held() -> dict[str, int]:
    gc.collect()
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    return {
        "device bytes": total - free,
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": threading.active_count(),
    }


def _left(ctx, ex: Example, kind: str | None, rounds: int, leak: bool) -> dict[str, int]:
    """What `rounds` buffers leave, each of which has moved tokens. A segment has more than 2 MiB."""
    idx = torch.arange(8, device="cuda")[:, None] % ex.world.num_experts
    x, kept = torch.ones(8, ex.hidden, dtype=torch.bfloat16, device="cuda"), []
    for i in range(rounds + 5):
        if i == 5:  # by then caches have filled
            before = _held()
        buffer = _make(ctx, ex, kind, tokens=512)
        rows, *_, handle = buffer.dispatch_with_permute(hidden=x, topk_idx=idx, num_of_experts=ex.world.num_experts)
        buffer.combine_with_unpermute(hidden=rows, handle=handle)
        kept.append(buffer) if leak else buffer.destroy()
    del buffer, rows, handle
    after = _held()
    for buffer in kept:
        buffer.destroy()
    return {name: after[name] - before[name] for name in after}


def _nothing_left(answers) -> None:
    for left in answers:  # the device's memory is everybody's: a peer's last buffer may still be there
        assert left["device bytes"] < 64 << 20 and left["descriptors"] < 5 and left["threads"] < 5, left


@pytest.mark.parametrize("shape", SHAPES)
def test_processes_that_map_each_others_memory(processes, shape, kind):
    num_ranks = shape[0] * shape[1]
    ex = Example(*shape, 2, tuple(9 * r + 5 for r in range(num_ranks)), 3, 64, scale_columns=1, pad_multiple=4, seed=6)
    kinds = processes.run(_check, ex, kind, ranks=range(num_ranks), timeout_s=110.0)
    assert set(kinds) == {kind}


@pytest.mark.parametrize("shape", [(1, 4), (2, 2)])
def test_examples(processes, shape):
    """With the kind of memory that the ranks choose."""

    @settings(max_examples=4)
    @given(ex=examples(*shape))
    def run(ex):
        assert set(processes.run(_check, ex, None, ranks=range(4), timeout_s=110.0)) <= set(devices.KINDS)

    run()


def test_a_hundred_buffers_leave_nothing(processes):
    _nothing_left(processes.run(_left, Example(1, 2, hidden=1024), None, 100, False, ranks=range(2), timeout_s=110.0))


def test_buffers_of_every_kind_leave_nothing(processes, kind):
    _nothing_left(processes.run(_left, Example(1, 2, hidden=1024), kind, 10, False, ranks=range(2), timeout_s=110.0))


def test_a_leak_is_noticed(processes):
    with pytest.raises(AssertionError, match="device bytes"):
        _nothing_left(processes.run(_left, Example(1, 2, hidden=1024), None, 20, True, ranks=range(2), timeout_s=110.0))
