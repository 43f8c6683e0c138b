"""The PTX machine's own rules, on small kernels (tests/ptx/machine/tests): its C++ tests, built and run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))


def test_machine():
    import build

    done = subprocess.run([build.build()], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout
