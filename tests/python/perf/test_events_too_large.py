"""A simulated world that this machine has no room for."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

LIMIT = Path("/proc/sys/vm/max_map_count")
# Takes all memory mappings of its process but 300, then asks for a world of more lanes than that.
PROGRAM = """
import ctypes, sys
from hybrid_ep.perf import events
from hybrid_ep.perf.shape import Shape
from hybrid_ep.hardware import clusters

mmap = ctypes.CDLL(None).mmap
mmap.restype, mmap.argtypes = ctypes.c_void_p, [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
with open("/proc/self/maps") as maps:
    left = int(sys.argv[1]) - len(maps.readlines()) - 300
for n in range(left):
    mmap(None, 4096, 1 if n % 2 else 3, 0x22, -1, 0)
try:
    events.measure(Shape(16, 16, 64, 512, 2, 16), clusters.get("gb200_nvl72"), num_sms=16)
except MemoryError as error:
    print(error)
"""


@pytest.mark.skipif(not LIMIT.is_file(), reason="this system says no number of memory mappings")
def test_a_world_with_too_many_lanes_says_so():
    limit = int(LIMIT.read_text())
    if limit > 200_000:
        pytest.skip(f"vm.max_map_count={limit}: too many mappings to use up")
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(limit)], capture_output=True, text=True, timeout=120, env=os.environ
    )
    assert done.returncode == 0, done.stderr
    assert "too large for this machine" in done.stdout and "vm.max_map_count" in done.stdout
    assert "take fewer ranks or blocks" in done.stdout
