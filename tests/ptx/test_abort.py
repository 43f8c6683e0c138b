"""A rank that the host gives up while copies to the device wait: its kernel ends, long before its deadline."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """
import signal, sys, time
sys.path[:0] = ["tests/ptx", "tests/gpu", "tests/python", "."]
import torch, torch_cuda
from gpu_world import GpuWorld
from ptx_machine import Choices
library = torch_cuda.install(Choices())
with library.modes():
    world = GpuWorld(1, 2, 2, skew=0, timeout_s=60)
    x, idx = torch.ones(5, 64, dtype=torch.bfloat16, device="cuda"), (torch.arange(5) % 4)[:, None].cuda()
    call = dict(hidden=x, topk_idx=idx, num_of_experts=4)
    world.run(lambda rank, _: world.raw[rank].dispatch_with_permute(**call) and None)  # makes room
    torch.cuda.synchronize()
    library.hold_copies(True)
    started = time.monotonic()
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.setitimer(signal.ITIMER_REAL, 0.5)
    with torch.cuda.stream(world.streams[0]):
        try:
            world.raw[0].dispatch_with_permute(**call)  # rank 1 never comes
            raise SystemExit("was not interrupted")
        except KeyboardInterrupt:
            pass
    world.streams[0].synchronize()  # which the end of the buffer has waited for, too
    seconds = time.monotonic() - started
    if seconds > 20:
        raise SystemExit(f"the kernel of a rank that was given up ran on for {seconds:.0f} s")
    library.hold_copies(False)
    assert not library.reports(), library.reports()
"""


def test_an_abort_needs_no_copy():
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "CUDA_DEVICE_MAX_CONNECTIONS": "32"},
    )
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-3000:]
