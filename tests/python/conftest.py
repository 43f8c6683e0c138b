"""Fixtures: one world of processes for the whole run, and every example reproducible. GPUs are hidden: what needs one
is in tests/gpu."""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ["CUDA_VISIBLE_DEVICES"] = ""
sys.path.insert(0, str(Path(__file__).parent))

import pytest
import torch
from hypothesis import HealthCheck, settings
from shm_names import ShmNames
from world import ProcessWorld

from hybrid_ep.runtime.plan import Plan, PlanMemory

torch.set_num_threads(1)
settings.register_profile(
    "default",
    deadline=None,
    print_blob=True,
    suppress_health_check=list(HealthCheck),
    max_examples=int(os.environ.get("HYBRID_EP_TEST_EXAMPLES", "12")),
)
settings.load_profile("default")


class _Worlds:
    """The shared world of six processes; a new one after it had to be ended."""

    def __init__(self) -> None:
        self._world: ProcessWorld | None = None

    def six(self) -> ProcessWorld:
        if self._world is None or not all(p.is_alive() for p in self._world.processes):
            self.close()
            self._world = ProcessWorld(6)
        return self._world

    def close(self) -> None:
        if self._world is not None:
            self._world.close()
            self._world = None


@pytest.fixture(scope="session")
def _worlds():
    worlds = _Worlds()
    yield worlds
    worlds.close()


@pytest.fixture
def shm_names() -> ShmNames:
    return ShmNames()


@pytest.fixture
def world(_worlds) -> ProcessWorld:
    """Six real processes on gloo; groups of the first 1, 2, 3, 4 and 6 of them."""
    return _worlds.six()


@pytest.fixture
def poisoned_plans(monkeypatch):
    """The memory of every plan starts as 0xFF, and that of results."""
    real, memory = torch.empty, PlanMemory.of

    def empty(*args, **kwargs):
        made = real(*args, **kwargs)
        return made.fill_(0xFF) if made.dtype == torch.uint8 else made

    def of(at, device):
        made = memory(at, device)
        made.block.fill_(0xFF)
        return made

    monkeypatch.setattr(torch, "empty", empty)
    monkeypatch.setattr(PlanMemory, "of", of)


@pytest.fixture
def unread_plans(monkeypatch):
    """Torch makes maps and weights, as of a plan that lies on a GPU."""
    monkeypatch.setattr(Plan, "host_reads", False)


@pytest.fixture(autouse=True)
def _torch_defaults_stay():
    """A test that leaves another default dtype behind fails itself, not those after it."""
    yield
    left = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    assert left == torch.float32, f"the test left {left} as torch's default dtype"
