"""Puts the repository and its scripts on the path; Megatron itself is only imported inside short-lived
worlds. GPUs are hidden: these worlds are of CPUs, wherever they run."""

import importlib.metadata
import os
import sys
from pathlib import Path

import pytest
from hypothesis import settings

os.environ["CUDA_VISIBLE_DEVICES"] = ""
ROOT = Path(__file__).resolve().parents[2]
for folder in (ROOT, ROOT / "scripts", Path(__file__).resolve().parent):
    if str(folder) not in sys.path:
        sys.path.append(str(folder))

import parity_world  # noqa: E402  (of this checkout)

# Programs of many tests import them, each rank for itself.
parity_world.PRELOAD += ["pytest", "hybrid_ep.cli.parser", "hybrid_ep.perf.dwdp", "hybrid_ep.testing", "recipes.model"]

# As everywhere here no test is timed: an example may have to wait for a core.
settings.register_profile("megatron", parent=settings(), deadline=None)
settings.load_profile("megatron")


@pytest.fixture
def megatron_flags():
    """Skips where megatron.training cannot make its own flags, whoever asks."""
    release = importlib.metadata.version("megatron-core")
    if sys.version_info >= (3, 14) and tuple(map(int, release.split(".")[:2])) <= (0, 19):
        pytest.skip(f"megatron.training {release} gives argparse a flag that Python 3.14 refuses")
