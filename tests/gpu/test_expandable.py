"""PyTorch's expandable segments (docs/cuda.md): the caller's tensors and the plans then lie in memory that is mapped
piece by piece. Other tests of this folder once more, in a process whose allocator works that way."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
ENVIRONMENT = {**os.environ, "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
ALLOCATES = """
import torch
kept = torch.ones(1 << 22, device="cuda")
print({s["is_expandable"] for s in torch.cuda.memory_snapshot()})
"""


def run(*command: str) -> str:
    done = subprocess.run(
        [sys.executable, *command],
        env=ENVIRONMENT,
        cwd=HERE.parents[1],
        capture_output=True,
        text=True,
        timeout=160,
        check=False,
    )
    assert done.returncode == 0, f"{' '.join(command)}:\n{done.stdout[-4000:]}\n{done.stderr[-2000:]}"
    return done.stdout


TESTS = (
    "test_virtual.py::test_rows_of_training_size_and_rows_of_several_tiles",
    "test_graph.py::test_a_replay_with_other_routing_gives_its_results",
    "test_streams.py::test_async_results_are_right_once_their_event_was_waited_for",
    "test_processes.py::test_examples",
)


def test_under_expandable_segments():
    assert "True" in run("-c", ALLOCATES), "this torch has no expandable segments here"
    said = run("-m", "pytest", "-q", "-p", "no:cacheprovider", *(str(HERE / name) for name in TESTS))
    assert " passed" in said and "skipped" not in said, said
