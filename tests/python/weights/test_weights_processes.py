"""Weights between processes: a slow rank is not waited for before gradients go home; a dead one is named."""

from __future__ import annotations

import os
import signal
import time

import torch
from shm_names import ShmNames
from world import ProcessWorld

from hybrid_ep.errors import DeadlineError
from hybrid_ep.weights import ExpertStore, WeightLayout, WeightPrefetcher

LAYERS, COMPUTE_S, SHAPES = 6, 0.03, ((64, 64), (64, 64))
TIMEOUT_S = 3.0


def make(ctx):
    layout = WeightLayout(8, ctx.size, LAYERS, SHAPES, torch.float32, 3)
    store = ExpertStore(ctx.group(ctx.size), layout, timeout_s=TIMEOUT_S)
    store.open_gradients()
    ctx.kept["prefetcher"] = WeightPrefetcher(store, slice_bytes=4096)
    return ShmNames.now() if ctx.rank == 0 else []


def step(ctx, slowed=None, version=0, die_before=None):
    """Seconds from the publication to the gradients' way home, and those of waiting in them; the gradient's sum."""
    prefetcher = ctx.kept["prefetcher"]
    store, layout = prefetcher.store, prefetcher.layout
    own = layout.own(ctx.rank)
    prefetcher.publish([[torch.full((own, *shape), float(version)) for shape in SHAPES] for _ in range(LAYERS)])
    started, waited = time.monotonic(), prefetcher.statistics.waited_s
    for layer, backward in [(layer, False) for layer in range(LAYERS)] + [(i, True) for i in reversed(range(LAYERS))]:
        there = prefetcher.acquire(layer)
        assert all((part == version).all() for part in (*there.kept, *there.fetched))
        time.sleep(COMPUTE_S * (1.2 if ctx.rank == slowed else 1.0))
        if backward:
            store.add_gradients(
                layer,
                [
                    [torch.ones(len(k), *s), torch.ones(len(f), *s)]
                    for k, f, s in zip(there.kept, there.fetched, SHAPES, strict=True)
                ],
            )
        prefetcher.release(layer, backward=backward)
    seconds = time.monotonic() - started, prefetcher.statistics.waited_s - waited
    if ctx.rank == die_before:
        os.kill(os.getpid(), signal.SIGKILL)
    total = torch.zeros((), dtype=torch.float64)
    store.bring_home(lambda layer, n, parts: total.add_(sum(part.double().sum() for part in parts)))
    return *seconds, float(total) / own


def close(ctx):
    ctx.kept.pop("prefetcher").close()


def test_a_rank_slower_by_a_fifth_delays_nobody_before_the_gradients_go_home(shm_names):
    with ProcessWorld(3) as world:
        assert shm_names.new(world.run(make)[0]) == [], "no name is left in /dev/shm"
        even, slow, waits = [], [], []
        for version in range(1, 9):
            slowed = 1 if version % 2 == 0 else None
            found = world.run(step, slowed, version)
            assert {gradient for *_, gradient in found} == {2.0 * LAYERS * sum(a * b for a, b in SHAPES)}
            (even if slowed is None else slow).append(max(seconds for seconds, *_ in found[::2]))
            waits.append(found[0][1])
        delay = 0.2 * 2 * LAYERS * COMPUTE_S
        assert min(slow) - min(even) < delay / 2, (even, slow)
        assert min(waits) < delay / 2, waits
        world.run(close)


def test_the_dead_owner_is_named_and_the_others_end(shm_names):
    with ProcessWorld(3) as world:
        world.run(make)
        world.run(step)
        world.start(step, version=1, die_before=1)
        errors = world.collect([0, 2], timeout_s=10 * TIMEOUT_S, return_errors=True)
        for error in errors:
            assert error["type"] == DeadlineError.__name__ and error["peer"] == 1, error
            assert "gradients come late from rank 1" in error["message"]
        again = world.run(step, ranks=[0, 2], return_errors=True)
        assert [error["type"] for error in again] == ["BufferFailedError"] * 2
        world.run(close, ranks=[0, 2])
        assert shm_names.new() == []
