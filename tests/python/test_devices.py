"""What can be said of GPUs without one: refusals, the choice of shared memory, the hand-over of file descriptors."""

from __future__ import annotations

import os
import socket
import struct
import threading
import time

import pytest
import torch

from hybrid_ep import _core, devices
from hybrid_ep.bootstrap import GroupView, Rendezvous, open_segments
from hybrid_ep.testing import VirtualWorld
from hybrid_ep.topology import Topology


def _near(*machines: int):
    """Whom ranks on these machines reach, by handle kind, where no fabric joins machines."""
    same = [[p for p, m in enumerate(machines) if m == mine] for mine in machines]
    return [{"near": ranks, "fabric": ranks} for ranks in same]


def _joined(size: int, *machines: int):
    return [{**f, "fabric": list(range(size))} for f in _near(*machines)]


ALL = ["fabric", "file", "ipc"]


@pytest.mark.parametrize("kinds, reach, local, expected", [
    ([ALL, ALL], _near(0, 0), 2, ("fabric", True)),
    ([["file", "ipc"], ALL], _near(0, 0), 2, ("file", True)),
    ([["ipc"], ["ipc"]], _near(0, 0), 1, ("ipc", True)),  # two nodes on one machine
    ([ALL] * 4, _near(0, 0, 1, 1), 2, (None, False)),  # a NIC between the machines
    ([ALL] * 4, _joined(4, 0, 0, 1, 1), 2, ("fabric", True)),  # an NVLink domain of both
    ([ALL] * 4, _joined(4, 0, 0, 1, 1), 4, ("fabric", True)),  # one node that spans hosts
    ([["file"]] * 4, _joined(4, 0, 0, 1, 1), 2, (None, False)),  # the fabric that no one can make handles of
])
def test_the_best_path_that_every_rank_has_to_all_its_peers(kinds, reach, local, expected):
    paths = devices.choose_paths(kinds, reach, Topology(0, len(kinds), local))
    assert (paths.kind, paths.mapped_rail) == expected


def test_a_node_whose_ranks_cannot_map_one_another_is_an_error():
    with pytest.raises(RuntimeError, match=r"rank 0: fabric; rank 1: none"):
        devices.choose_paths([["fabric"], []], _near(0, 0), Topology(0, 2, 2))


def test_only_a_fabric_handle_that_was_mapped_counts(monkeypatch):
    monkeypatch.setattr(devices, "machine", lambda: threading.current_thread().name)  # every rank has its own
    world = VirtualWorld(2, 1)

    def find(rank, group, mappable):
        return devices.find_paths(
            Rendezvous(GroupView.of(group), 30), Topology(rank, 2, 1),
            lambda: {"kinds": ALL, "fabric": f"of {rank}"}, lambda handle: mappable and handle == f"of {1 - rank}")

    assert world.run(lambda rank, group: find(rank, group, True)) == [devices.Paths("fabric", True)] * 2
    assert world.run(lambda rank, group: find(rank, group, False)) == [devices.Paths(None, False)] * 2


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


def test_a_file_descriptor_goes_to_no_other_user(monkeypatch):
    reader, writer = os.pipe()
    name = f"/hybrid_ep.test.users.{os.getpid()}"
    server, own_check = devices._serve(name, writer), devices._same_user
    asked = []

    def refuse_clients(peer):  # the server's end of a connection is the one that has the server's address
        asked.append(peer.getsockname() == devices._address(name).encode())
        return not asked[-1]

    with monkeypatch.context() as other:
        other.setattr(devices, "_same_user", refuse_clients)
        with pytest.raises(RuntimeError, match="sent no file descriptor; .* of its user"):
            devices._receive(name)
        assert sorted(asked) == [False, True]
        other.setattr(devices, "_same_user", lambda peer: False)
        with pytest.raises(RuntimeError, match="of another user"):
            devices._receive(name)
    os.close(devices._receive(name))  # and the server has survived both
    ours, theirs = socket.socketpair(socket.AF_UNIX)
    with ours, theirs:
        assert own_check(ours)
        monkeypatch.setattr(devices.os, "geteuid", lambda: os.getuid() + 1)
        assert not own_check(ours)
        pid, _, _ = struct.unpack("iII", ours.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        assert pid == os.getpid()
    server.shutdown(socket.SHUT_RDWR)
    server.close()
    os.close(reader)


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


def test_a_gpu_without_kernels_is_named(monkeypatch):
    old = {"name": "A100", "capability": (8, 0), "num_sms": 108, "supported": False}
    monkeypatch.setattr(devices, "load", lambda: {"devices": [old], "why_none": ""})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    with pytest.raises(ValueError, match=r"capability 9\.0 and 10\.x; cuda:0 is a A100 of 8\.0"):
        devices.current()


class FakeMemory:
    """Device memory that notes when it is given back: a rank's own is freed, a peer's is closed."""

    log: list[tuple[str, bytes]]

    def __init__(self, handle: bytes, last_word: str):
        self.handle, self.last_word = handle, last_word

    @classmethod
    def create(cls, kind, num_bytes):
        return cls(os.urandom(4), "freed")

    @classmethod
    def attach(cls, kind, num_bytes, handle, fd):
        return cls(handle, "closed")

    def share(self):
        return self.handle, -1

    def segment(self):
        return self

    def __del__(self):
        self.log.append((self.last_word, self.handle))


def test_memory_that_grows_is_freed_when_its_peers_have_closed_it(monkeypatch):
    monkeypatch.setattr(_core.cuda, "DeviceMemory", FakeMemory)
    FakeMemory.log = log = []
    world = VirtualWorld(1, 3)

    def grow(rank, group):
        meet = Rendezvous(GroupView.of(group), timeout_s=30)
        segments = devices.DeviceSegments(group.store, "ipc")
        for generation in range(3):
            time.sleep(0.05 * rank)  # the others let go late
            engine = None
            engine = open_segments(meet, segments, generation, 64, list)
            assert len(engine) == 3
        meet.exchange("last", None)
        segments.close(together=True)

    world.run(grow)
    of_first_two = [handle for what, handle in log if what == "freed"][:6]
    for handle in of_first_two:
        assert [what for what, of in log if of == handle] == ["closed", "closed", "freed"]
    assert sum(what == "freed" for what, _ in log) == 9
