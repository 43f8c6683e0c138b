"""Virtual ranks and hardware queues: streams that share one stand behind each other, which a new world finds out."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BEGIN = """
import sys, threading, time
sys.path[:0] = ["tests/ptx", "tests/python", "."]
import torch, torch_cuda
from ptx_machine import Choices
from hybrid_ep import _core
from hybrid_ep.errors import DeadlineError
from hybrid_ep.testing import VirtualWorld
library = torch_cuda.install(Choices())
"""
MAKE = """
with library.modes():
    world = VirtualWorld(2, 2)
    try:
        world.buffers(16, 1, 2, executor="cuda")
        print("made", len({stream.cuda_stream for stream in world.streams}))
    except ValueError as error:
        print(error)
"""
# Two launches of a rank at once: of two ranks that share a queue, one stands behind a dispatch that waits for it.
UNTRIED = """
_core.cuda.run_at_once = lambda *_: True
with library.modes(), library.queued():
    world = VirtualWorld(1, 2)
    buffers = world.buffers(16, 8, 2, executor="cuda", timeout_s=1.0)
    x, idx = torch.ones(5, 16, dtype=torch.bfloat16, device="cuda"), (torch.arange(5) % 4)[:, None].cuda()
    call = dict(hidden=x, topk_idx=idx, num_of_experts=4)
    world.run(lambda rank, _: buffers[rank].dispatch_with_permute(**call) and None)
    ahead = threading.Event()
    def work(rank, _):
        while rank and not ahead.is_set():
            time.sleep(0.01)
        try:
            buffers[rank].dispatch_with_permute(**call, num_permuted_tokens=16, non_blocking=True)
        finally:
            ahead.set()
        torch.cuda.current_stream().synchronize()
        buffers[rank].dispatch_with_permute(**call) and None
    errors = world.run(work, return_errors=True)
    print("a deadline" if any(isinstance(e, DeadlineError) for e in errors) else errors)
"""
UPLOADS = """
with library.modes():
    world = VirtualWorld(1, 2)
    world.on_device()
    library.hold_copies(True)
    release = threading.Timer(1.5, library.hold_copies, (False,))
    began = time.monotonic()
    release.start()
    world.buffers(16, 8, 2, executor="cuda")
    print("waited" if time.monotonic() - began >= 1.4 else "did not wait")
"""


def say(program: str, queues: int) -> str:
    done = subprocess.run(
        [sys.executable, "-c", BEGIN + program],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, "CUDA_DEVICE_MAX_CONNECTIONS": str(queues)},
    )
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-3000:]
    return done.stdout.strip()


def test_a_world_of_more_ranks_than_queues_is_refused():
    said = say(MAKE, 3)
    assert "num_nodes=2, num_local_ranks=2" in said and "CUDA_DEVICE_MAX_CONNECTIONS=32" in said


def test_ranks_that_share_a_queue_wait_for_each_other_until_their_deadlines():
    assert say(UNTRIED, 1) == "a deadline"


def test_a_queue_for_each_rank_is_enough_and_uploads_end_before_the_ranks_meet():
    assert say(MAKE + UPLOADS + UNTRIED, 4).split("\n") == ["made 4", "waited", "[None, None]"]
