"""torch.cuda.graph on the machine: torch's operations are recorded, not done; each replay does them in their order."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """
import sys
sys.path[:0] = ["tests/ptx", "."]
import torch, torch_cuda
from ptx_machine import Choices, CudaError
library = torch_cuda.install(Choices())
with library.modes():
    x, stream = torch.ones(4, device="cuda"), torch.cuda.Stream()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        x.add_(1)
        y = x * 2
        z = torch.zeros(4, device="cuda") + y[:2].sum()
    assert x.tolist() == [1] * 4, "the capture did what it should record"
    with torch.cuda.stream(stream):
        for n in (2, 3, 4):
            y.fill_(-1), z.fill_(-1)
            graph.replay()
            stream.synchronize()
            assert (x.tolist(), y.tolist(), z.tolist()) == ([n] * 4, [2 * n] * 4, [4 * n] * 4), (n, x, y, z)
    try:
        with torch.cuda.graph(torch.cuda.CUDAGraph(), stream=stream):
            x.sum().item()  # would have to wait for what is only recorded
        raise SystemExit("a captured stream was synchronised")
    except CudaError:
        pass
    with torch.cuda.stream(stream):
        assert (x + 1).tolist() == [5] * 4  # and the stream works on
"""


def test_operations_are_recorded_and_replayed():
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
