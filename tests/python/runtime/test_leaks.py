"""Two hundred buffers made and destroyed leave nothing: no name in /dev/shm, no descriptor, no mapping, no memory, no
thread, no key in the store."""

from __future__ import annotations

import gc
import os

import pytest
import torch
import torch.distributed as dist

from hybrid_ep import HybridEPBuffer
from hybrid_ep.runtime import bootstrap

ROUNDS, FIRST = 200, 10  # before the count begins, caches have filled
_kept: list = []


def _held() -> dict[str, int]:
    gc.collect()
    with open("/proc/self/maps") as maps:
        mappings = [line for line in maps if "hybrid_ep" in line or "/dev/shm" in line]
    with open("/proc/self/statm") as statm:
        resident = int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return {
        "fds": len(os.listdir("/proc/self/fd")),
        "mappings": len(mappings),
        "resident": resident,
        "threads": len(os.listdir("/proc/self/task")),
    }


def _keys(group) -> int:
    """Of the store, once all ranks have come here."""
    dist.barrier(group)
    return group.get_group_store().num_keys()


def _rounds(ctx, rounds: int, leak: str | None):
    """What `rounds` buffers leave, each of which has done something; and the names of all segments."""
    names, create = [], bootstrap.PosixSegments.create
    _kept.clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            bootstrap.PosixSegments, "create", staticmethod(lambda name, n: names.append(name) or create(name, n))
        )
        for i in range(rounds + FIRST):
            if i == FIRST:
                before = _held() | {"keys": _keys(ctx.group(2))}
            _one(ctx, leak if i >= FIRST else None)
    after = _held() | {"keys": _keys(ctx.group(2))}
    for kept in _kept:
        os.close(kept) if leak == "descriptors" else kept.destroy()
    _kept.clear()
    return {name: after[name] - before[name] for name in after}, names


def _one(ctx, leak: str | None) -> None:
    idx, x = torch.arange(8)[:, None] % 4, torch.ones(8, 1024, dtype=torch.bfloat16)
    buffer = HybridEPBuffer(ctx.group(2), 1024, 64, 2, timeout_s=50)
    rows, *_, handle = buffer.dispatch_with_permute(hidden=x, topk_idx=idx, num_of_experts=4)
    buffer.combine_with_unpermute(hidden=rows, handle=handle)
    if leak == "buffers":
        _kept.append(buffer)
        return
    if leak == "descriptors":
        _kept.append(os.dup(0))
    buffer.destroy()


def _check(answers, rounds: int) -> None:
    for left, names in answers:
        assert left["fds"] <= 0 and left["mappings"] <= 0 and left["threads"] <= 0 and left["keys"] <= 0, left
        assert left["resident"] < 8 << 20, left  # the segments of two hundred have 100 MiB
        assert len(names) == len(set(names)) == rounds + FIRST
        assert not {name.strip("/") for name in names} & set(os.listdir("/dev/shm"))


def test_two_hundred_buffers_leave_nothing(world):
    _check(world.run(_rounds, ROUNDS, None, ranks=range(2)), ROUNDS)


@pytest.mark.parametrize("leak, what", [("buffers", "'mappings': 1"), ("descriptors", "'fds': 5")])
def test_a_leak_is_noticed(world, leak, what):
    with pytest.raises(AssertionError, match=what):
        _check(world.run(_rounds, 5, leak, ranks=range(2)), 5)
