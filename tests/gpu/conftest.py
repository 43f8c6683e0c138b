"""GPU tests: everything here is marked gpu, and skips with a reason where there is no GPU that the library serves.
With --ptx-machine they run without one, on an interpreter of the library's PTX (docs/ptx_machine.md).

Virtual ranks share one device: each has a stream of its own, and there must be a hardware queue for each, or a rank's
kernel would wait in line behind one that waits for it. Nor may a kernel be loaded while others wait for its launch.
Both variables are read when CUDA starts, hence set here."""

from __future__ import annotations

import os

os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
os.environ.setdefault("CUDA_MODULE_LOADING", "EAGER")

import gc
import sys
from pathlib import Path

sys.path.extend(
    str(Path(__file__).resolve().parents[1] / folder)
    for folder in ("python", "python/moe", "python/payload", "python/runtime", "python/weights", "ptx", "megatron")
)  # whose tests run here once more, and what they are made of

import pytest
import torch
from hypothesis import HealthCheck, settings

from hybrid_ep.runtime import devices

settings.register_profile(
    "gpu",
    deadline=None,
    print_blob=True,
    suppress_health_check=list(HealthCheck),
    max_examples=int(os.environ.get("HYBRID_EP_TEST_EXAMPLES", "12")),
)
settings.load_profile("gpu")


def pytest_addoption(parser):
    group = parser.getgroup("PTX machine")
    group.addoption("--ptx-machine", action="store_true", help="run on the PTX machine, without a GPU")
    group.addoption("--ptx-seed", type=int, default=0, help="of the order in which its streams and warps take turns")
    group.addoption("--ptx-races", action="store_true", help="it judges happens-before, too: 5 to 30 times slower")
    group.addoption("--ptx-everyday", action="store_true", help="only the tests that CI runs there")
    group.addoption("--ptx-target", type=int, choices=(90, 100), default=90, help="whose PTX: sm_90a or sm_100")


def pytest_configure(config):
    if config.getoption("--ptx-machine", default=False):  # unknown where pytest began elsewhere
        import pytest_machine

        config.pluginmanager.register(pytest_machine.Plugin(config), "ptx machine")


def _why_not() -> str | None:
    if not torch.cuda.is_available():
        return "no CUDA device, or a torch without CUDA"
    try:
        devices.current()
    except ValueError as error:
        return str(error)
    return None


def pytest_collection_modifyitems(items):
    ours = [Path(__file__).parent in Path(item.path).parents for item in items]
    if any(ours) and not all(ours) and Path("/dev/nvidiactl").exists():
        raise pytest.UsageError("tests of the host hide the GPUs from their process: run tests/gpu in one of its own")
    why = _why_not()
    for item in items:
        if Path(__file__).parent in Path(item.path).parents:
            item.add_marker(pytest.mark.gpu)
            if why:
                item.add_marker(pytest.mark.skip(reason=why))


@pytest.fixture(scope="session", autouse=True)
def _cheap_collections():
    """Later ones look at what tests made, not at all modules."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _nothing_is_freed_later():
    """Freeing device memory waits for all kernels: a world that only an old traceback holds must not go while ranks of
    the next one wait for each other."""
    yield
    gc.collect()


@pytest.fixture(autouse=True)
def _poisoned_outputs():
    """Fresh tensors hold NaN, or the largest integer: a row that nobody wrote shows."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(False)
