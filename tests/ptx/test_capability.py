"""Devices whose compute capability no PTX of the library names."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
OF_10_3 = """
import sys
sys.path.insert(0, "tests/ptx")
import counts
executed, size, texts = counts.run(counts.parser().parse_args(["--target", "103"]))
import torch
from hybrid_ep.runtime import devices
assert torch.cuda.get_device_capability() == (10, 3)
assert devices.name_and_capability(devices.current())[1] == (10, 3)
assert all(".target sm_100" in text for text in texts), texts[0][:200]
assert {line.kernel for line in executed} >= {"exchange", "dispatch", "combine"} and size["rows"] > 0
"""


def test_a_device_of_10_3_runs_the_kernels_of_10_0():
    """B300 and GB300: a driver takes the code of 10.0 for them, and so must everything that asks for the capability."""
    done = subprocess.run(
        [sys.executable, "-c", OF_10_3], cwd=ROOT, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
