"""The latency path tells the host nothing: no word of a kernel's goes to memory of the host, eager or replayed with
other routing. A blocking dispatch, which does tell its counts, shows that they are counted."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """
import sys
sys.path[:0] = ["tests/ptx", "tests/gpu", "tests/python", "."]
import torch, torch_cuda
from ptx_machine import Choices
library = torch_cuda.install(Choices(seed=4, apart=True))
from examples import make_inputs
from test_by_lines import EXAMPLES, replay_with_other_routing, world_of
with library.modes():
    replay_with_other_routing(2, "bf16")
    replayed = library.counts()
    ex = EXAMPLES["fp32"]
    world = world_of(ex)
    def dispatch(rank, buffer):
        mine = make_inputs(ex, rank)
        buffer.dispatch_with_permute(hidden=mine.hidden, num_of_experts=ex.world.num_experts, **mine.routing())
    world.run(dispatch)
    world.close()
assert not library.reports(), library.reports()
print(replayed["launches"], replayed["told_host"], library.counts()["told_host"])
"""


def test_the_host_is_told_nothing():
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    launches, by_lines, blocking = map(int, done.stdout.split())
    # Of two ranks: a step and six replays of two launches each, and what a new world tries its streams with.
    assert launches >= 2 * 2 * 7 and by_lines == 0 < blocking
