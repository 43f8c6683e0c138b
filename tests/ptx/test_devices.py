"""Several GPUs in a process: calls of a buffer leave the thread's current device as it was, and make no context on
another."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BEGIN = """
import sys, threading
sys.path[:0] = ["tests/ptx", "tests/python", "."]
import torch, torch_cuda
from ptx_machine import Choices
from hybrid_ep import _core
from hybrid_ep.testing import VirtualWorld
library = torch_cuda.install(Choices(num_devices=2))
"""
CALLS = """
with library.modes():
    world = VirtualWorld(1, 1)
    [buffer] = world.buffers(16, 8, 2, executor="cuda")
    x, idx = torch.ones(5, 16, dtype=torch.bfloat16, device="cuda"), (torch.arange(5) % 2)[:, None].cuda()
    def call(hidden):
        with torch.cuda.stream(world.streams[0]):
            rows = buffer.dispatch_with_permute(hidden=hidden, topk_idx=idx, num_of_experts=2)[0]
            torch.cuda.current_stream().synchronize()
            return rows.cpu().sum().item()
    torch.cuda.set_device(1)
    print(call(x), torch.cuda.current_device())
    try:
        call(x[0])
    except ValueError as refused:
        print(str(refused)[:6], torch.cuda.current_device())
    print(buffer.traffic()["self_rows"] > 0, torch.cuda.current_device())
"""
READER = """
from hybrid_ep.runtime import devices
with library.modes():
    torch.cuda.set_device(1)
    devices.load()
    _core.cuda.set_device(1)
    reader, segment = _core.cuda.CounterReader(), _core.cuda.DeviceMemory.create("none", 4096).segment()
    copies = _core.cuda.CopyStream()
    def look(device):
        if device is not None:
            torch.cuda.set_device(device)
        seen = reader.observe(segment, 0, 10.0)
        copies.pull(segment.address + 64, 64, [segment], [(0, 0, 0, 64)])
        print(seen, torch.cuda.current_device())
    for device in (None, 1, 0):  # a new thread's device is the first, on which nobody has a context
        thread = threading.Thread(target=look, args=(device,))
        thread.start(); thread.join()
"""


def say(program: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", BEGIN + program], cwd=ROOT, capture_output=True, text=True, timeout=120, env=os.environ
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.split("\n")[:-1]


def test_calls_leave_the_threads_device_as_it_was():
    assert say(CALLS) == ["80.0 1", "hidden 1", "True 1"]


def test_reading_and_copying_leave_it_too_unless_it_has_no_context():
    assert say(READER) == ["0 1", "0 1", "0 0"]
