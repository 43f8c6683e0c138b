"""hybrid_ep.testing without a device: what its ranks share."""

from __future__ import annotations

import types

import pytest
import torch

from hybrid_ep import _core
from hybrid_ep.runtime import devices
from hybrid_ep.testing import PrivateSegments, VirtualWorld


def test_ranks_of_a_world_share_their_segments_on_a_device():
    """They are asked for before the first rank has made one, when the set is still empty."""
    world = VirtualWorld(1, 2)
    first, second = (group.segments.on_device() for group in world.groups)
    assert len(first) == 0 and first is second
    made = PrivateSegments(lambda num_bytes: bytearray(num_bytes))
    assert made.create("a", 16) is made.attach("a", 16)


@pytest.mark.parametrize("streams, at_once, said", [(2, True, "torch has 2 streams"), (4, False, "must run at once")])
def test_a_world_whose_streams_do_not_run_at_once_is_refused(monkeypatch, streams, at_once, said):
    pool = iter(range(100))  # which goes round
    monkeypatch.setattr(devices, "current", lambda: torch.device("cuda", 0))
    monkeypatch.setattr(devices, "enter", lambda device: 0)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: types.SimpleNamespace(cuda_stream=next(pool) % streams))
    monkeypatch.setattr(_core.cuda, "run_at_once", lambda handles, patience_s: at_once)
    world = VirtualWorld(2, 2)
    with pytest.raises(ValueError, match=rf"num_nodes=2, num_local_ranks=2.*{said}.*CUDA_DEVICE_MAX_CONNECTIONS=32"):
        world.on_device()
    assert world.streams is None
    with pytest.raises(ValueError, match="CUDA_DEVICE_MAX_CONNECTIONS"):
        world.buffers(16, 8, 2, executor="cuda")


def test_a_world_of_the_host_makes_no_streams():
    world = VirtualWorld(1, 2)
    world.buffers(16, 8, 2, executor="host")
    assert world.streams is None
