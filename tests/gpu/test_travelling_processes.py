"""Weights that travel between processes that map each other's device memory, by every kind that works here; a rank that
is killed is named."""

from __future__ import annotations

import os
import signal
from unittest import mock

import pytest
import torch
from test_processes import why_not
from travelling import SHAPES, own_weights, used_in_training
from world import ProcessWorld

from hybrid_ep.errors import DeadlineError
from hybrid_ep.runtime import devices
from hybrid_ep.weights import ExpertStore, WeightLayout, WeightPrefetcher

LAYERS, TIMEOUT_S = 3, 20.0


@pytest.fixture(scope="module")
def processes():
    with ProcessWorld(2) as world:
        yield world


def make(ctx, kind):
    layout = WeightLayout(5, ctx.size, LAYERS, SHAPES, torch.bfloat16, 3)
    with mock.patch.object(devices, "KINDS", (kind,)):  # of no other kind
        store = ExpertStore(ctx.group(ctx.size), layout, timeout_s=TIMEOUT_S, executor="cuda")
    store.open_gradients()
    ctx.kept["prefetcher"] = WeightPrefetcher(store, slice_bytes=64)
    return store.memory.kind


def step(ctx, version, timeout_s=TIMEOUT_S, die=None):
    """Forward and backward with the values checked; the sums that came home, by layer and matrix."""
    prefetcher = ctx.kept["prefetcher"]
    store, layout = prefetcher.store, prefetcher.layout
    prefetcher.publish(own_weights(layout, ctx.rank, version, "cuda"))
    used_in_training(prefetcher, version, LAYERS)
    given = layout.num_experts - layout.own(ctx.rank)
    for layer in range(LAYERS):
        stacks = [torch.full((given, *shape), 10.0 * layer + ctx.rank, device="cuda") for shape in SHAPES]
        store.add_gradients(layer, [[stack] for stack in stacks])
    if ctx.rank == die:
        os.kill(os.getpid(), signal.SIGKILL)
    store.timeout_s = timeout_s
    found = {}
    store.bring_home(lambda layer, n, parts: found.update({(layer, n): [part.cpu() for part in parts]}))
    return (
        all(
            bool((part == 10.0 * layer + 1 - ctx.rank).all()) and part.shape == (layout.own(ctx.rank), *SHAPES[n])
            for (layer, n), parts in found.items()
            for part in parts
        )
        and len(found) == len(SHAPES) * LAYERS
    )


def close(ctx):
    ctx.kept.pop("prefetcher").close()


@pytest.mark.parametrize("kind", devices.KINDS)
def test_processes_that_map_each_others_memory(processes, kind):
    if why := processes.run(why_not, kind, ranks=[0])[0]:
        pytest.skip(f"no {kind} handles here: {why}")
    assert processes.run(make, kind) == [kind] * 2
    for version in range(2):
        assert processes.run(step, version) == [True, True]
    processes.run(close)


def test_a_rank_that_is_killed_is_named():
    with ProcessWorld(2) as world:
        kind = next(kind for kind in devices.KINDS if world.run(why_not, kind, ranks=[0])[0] is None)
        world.run(make, kind)
        assert world.run(step, 0) == [True, True]
        world.start(step, 1, timeout_s=2.0, die=1)
        (error,) = world.collect([0], timeout_s=60.0, return_errors=True)
        assert error["type"] == DeadlineError.__name__ and error["peer"] == 1, error
        assert "gradients come late from rank 1" in error["message"]
        (again,) = world.run(step, 2, ranks=[0], return_errors=True)
        assert again["type"] == "BufferFailedError" and "rank 1" in again["message"], again
        world.run(close, ranks=[0])
