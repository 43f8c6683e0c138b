"""The tests of tests/gpu that need nothing of a device but its buffers, with the host in its place: their own machinery
works, and so does every body that they share with the host's tests where the kernel places the rows."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.mark.slow
@pytest.mark.parametrize(
    "file, chosen", [("test_host_tests.py", ""), ("test_virtual.py", "examples or large or routing or ring or notices")]
)
def test_they_pass_on_a_stand_in(file, chosen):
    path = os.pathsep.join((str(ROOT), str(ROOT / "tests" / "gpu")))
    command = [sys.executable, "-m", "pytest", "-p", "stand_in", "-q", "-p", "no:cacheprovider", f"tests/gpu/{file}"]
    done = subprocess.run(
        [*command, "-k", chosen] if chosen else command,
        cwd=ROOT,
        text=True,
        capture_output=True,
        timeout=280,
        check=False,
        env={**os.environ, "PYTHONPATH": path, "HYBRID_EP_TEST_EXAMPLES": "2"},
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert " passed" in done.stdout and "skipped" not in done.stdout, done.stdout[-400:]
