"""How prefetchers end: closed while somebody waits, or dropped."""

from __future__ import annotations

import gc
import threading
import time

import pytest
import torch
from travelling import SHAPES, own_weights

from hybrid_ep.errors import BufferFailedError
from hybrid_ep.testing import VirtualWorld
from hybrid_ep.weights import ExpertStore, WeightLayout, WeightPrefetcher


def test_a_prefetcher_that_is_dropped_takes_its_thread_along_and_leaves_the_store():
    layout = WeightLayout(4, 1, 2, SHAPES, torch.float32, 4)

    def run(rank, group):
        store = ExpertStore(group, layout, timeout_s=20)
        prefetcher = WeightPrefetcher(store)
        thread = prefetcher._thread._thread
        del prefetcher
        gc.collect()
        thread.join(10)
        assert not thread.is_alive()
        another = WeightPrefetcher(store)
        another.publish(own_weights(layout, rank, 0))
        another.close()

    VirtualWorld(1, 1).run(run)


def test_a_close_ends_a_wait():
    layout = WeightLayout(2, 2, 1, SHAPES, torch.float32, 1)

    def run(rank, group):
        store = ExpertStore(group, layout, timeout_s=60)
        if rank == 1:
            return 0.0
        prefetcher = WeightPrefetcher(store)
        prefetcher.publish(own_weights(layout, rank, 0))
        started = time.monotonic()
        threading.Timer(0.2, prefetcher.close).start()
        with pytest.raises(BufferFailedError, match="closed"):
            prefetcher.acquire(0)
        return time.monotonic() - started

    assert VirtualWorld(1, 2).run(run)[0] < 20
