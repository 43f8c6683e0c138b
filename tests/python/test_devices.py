"""What can be said of GPUs without one: refusals, the choice of shared memory, the hand-over of file descriptors."""

from __future__ import annotations

import os
import threading

import pytest
import torch

from hybrid_ep import devices
from hybrid_ep.testing import VirtualWorld


def test_the_best_kind_that_works_everywhere():
    assert devices.choose_kind([["fabric", "file", "ipc"], ["fabric", "file"]]) == "fabric"
    assert devices.choose_kind([["file", "ipc"], ["fabric", "file"]]) == "file"
    assert devices.choose_kind([["ipc"]]) == "ipc"
    with pytest.raises(RuntimeError, match=r"rank 0: fabric; rank 1: none"):
        devices.choose_kind([["fabric"], []])


def test_a_file_descriptor_reaches_every_peer_and_the_server_ends():
    reader, writer = os.pipe()
    name = f"/hybrid_ep.test.{os.getpid()}"
    server = devices._serve(name, writer)
    for text in (b"one", b"two"):
        fd = devices._receive(name)
        assert fd != writer
        os.write(fd, text)
        os.close(fd)
        assert os.read(reader, 16) == text
    segments = devices.DeviceSegments(None, "file")
    segments._servers[name] = server
    segments.unlink(name)
    for thread in [t for t in threading.enumerate() if t.name == f"serve {name}"]:
        thread.join(timeout=10)
        assert not thread.is_alive()
    assert os.read(reader, 16) == b""  # every copy of the writing end is closed
    os.close(reader)
    with pytest.raises(OSError):
        devices._receive(name)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_cuda_executor_is_refused_with_its_reason():
    world = VirtualWorld(1, 1)
    with pytest.raises(ValueError, match="executor='cuda'"):
        world.buffers(16, 1, 1, executor="cuda")


def test_tensors_must_lie_where_the_buffer_runs():
    world = VirtualWorld(1, 1)
    (buffer,) = world.buffers(16, 1, 1)
    with pytest.raises(ValueError, match="hidden is .* on meta, but this buffer runs on cpu"):
        buffer.dispatch(torch.empty(1, 16, dtype=torch.bfloat16, device="meta"), topk_idx=torch.zeros(1, 1).long())
