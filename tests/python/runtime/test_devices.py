"""What can be said of GPUs without one: refusals, the choice of shared memory, the hand-over of file descriptors."""

from __future__ import annotations

import dataclasses
import os
import socket
import struct
import subprocess
import sys
import threading
import time
import warnings
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from hybrid_ep import _core
from hybrid_ep.runtime import devices, options
from hybrid_ep.runtime.bootstrap import GroupView, Part, PosixSegments, Rendezvous, open_segments
from hybrid_ep.runtime.topology import Topology, resolve, warn_of_cut_domains
from hybrid_ep.testing import VirtualWorld

ALL = ["fabric", "file", "ipc"]


def _near(kinds: list[list[str]], *machines: int) -> devices.Reach:
    """Whom ranks on these machines reach where no fabric joins machines."""
    same = [[p for p, m in enumerate(machines) if m == mine] for mine in machines]
    return devices.Reach(kinds, same, same, same)


def _joined(kinds: list[list[str]], *machines: int, racks: list[int] | None = None) -> devices.Reach:
    """The same, where the fabric joins the machines of a rack."""
    racks = racks or [0] * len(machines)
    return dataclasses.replace(
        _near(kinds, *machines), fabric=[[p for p, r in enumerate(racks) if r == mine] for mine in racks]
    )


@pytest.mark.parametrize(
    "reach, local, expected",
    [
        (_near([ALL, ALL], 0, 0), 2, ("fabric", True)),
        (_near([["file", "ipc"], ALL], 0, 0), 2, ("file", True)),
        (_near([["ipc"], ["ipc"]], 0, 0), 1, ("ipc", True)),  # two nodes on one machine
        (_near([ALL] * 4, 0, 0, 1, 1), 2, (None, False)),  # a NIC between the machines
        (_joined([ALL] * 4, 0, 0, 1, 1), 2, ("fabric", True)),  # an NVLink domain of both
        (_joined([ALL] * 4, 0, 0, 1, 1), 4, ("fabric", True)),  # one node that spans hosts
        (_joined([["file"]] * 4, 0, 0, 1, 1), 2, (None, False)),  # the fabric that no one can make handles of
    ],
)
def test_the_best_path_that_every_rank_has_to_all_its_peers(reach, local, expected):
    paths = devices.choose_paths(reach, Topology(0, len(reach.kinds), local))
    assert (paths.kind, paths.mapped_rail) == expected


def test_a_node_whose_ranks_cannot_map_one_another_is_an_error():
    with pytest.raises(RuntimeError, match=r"rank 0: fabric; rank 1: none"):
        devices.choose_paths(_near([["fabric"], []], 0, 0), Topology(0, 2, 2))


def test_only_a_fabric_handle_that_was_mapped_counts(monkeypatch):
    monkeypatch.setattr(devices, "machine", lambda: threading.current_thread().name)  # every rank has its own
    world = VirtualWorld(2, 1)

    def find(rank, group, mappable):
        reach = devices.find_reach(
            Rendezvous(GroupView.of(group), 30),
            {"kinds": ALL, "fabric": f"of {rank}", "file": ""},
            lambda handle: mappable and handle == f"of {1 - rank}",
            lambda name: False,
        )
        return devices.choose_paths(reach, Topology(rank, 2, 1))

    assert world.run(lambda rank, group: find(rank, group, True)) == [devices.Paths("fabric", True)] * 2
    assert world.run(lambda rank, group: find(rank, group, False)) == [devices.Paths(None, False)] * 2


def _nvl72(*, fabric: bool = True) -> devices.Reach:
    """Two racks of 18 trays of 4 GPUs."""
    trays, racks = [r // 4 for r in range(144)], [r // 72 for r in range(144)]
    kinds = [ALL if fabric else ["file", "ipc"]] * 144
    return _joined(kinds, *trays, racks=racks) if fabric else _near(kinds, *trays)


def test_a_rack_is_one_node_however_many_hosts_it_has():
    domains = _nvl72().domains()
    assert domains == [0] * 72 + [72] * 72
    found = resolve(100, [f"tray{r // 4}" for r in range(144)], None, "", domains=domains)
    assert (found.num_nodes, found.num_local_ranks, found.node, found.local_rank) == (2, 72, 1, 28)
    assert devices.choose_paths(_nvl72(), found) == devices.Paths(None, False)  # NVLink in the rack, a NIC between
    assert _nvl72(fabric=False).domains() == [4 * (r // 4) for r in range(144)]


def test_ranks_that_do_not_all_map_one_another_are_no_domain():
    """One rank whose handles the others of its rack cannot map: hosts are the nodes, on all ranks alike."""
    reach = _nvl72()
    reach.fabric[5:6] = [reach.near[5]]
    assert reach.domains() == [4 * (r // 4) for r in range(144)]
    kinds = list(_nvl72().kinds)
    kinds[7] = ["file"]
    assert dataclasses.replace(_nvl72(), kinds=kinds).domains() == [4 * (r // 4) for r in range(144)]


def test_uneven_domains_are_refused_by_name():
    with pytest.raises(ValueError, match=r"NVLink domains that begin with ranks \[0, 0, 0, 3\]"):
        resolve(0, ["a"] * 4, None, "", domains=[0, 0, 0, 3])


def test_ranks_find_their_domain_and_a_number_that_cuts_it_is_warned_of(monkeypatch):
    """Eight ranks on four hosts whose handles all map, through the options of a buffer."""
    world, host = VirtualWorld(8, 1), threading.local()
    monkeypatch.setattr(devices, "current", lambda: torch.device("cuda:0"))
    monkeypatch.setattr(_core, "executors", lambda: ["cuda"])
    monkeypatch.setattr(devices, "machine", lambda: host.name)
    monkeypatch.setattr(
        devices,
        "probe",
        lambda meet, device: devices.find_reach(
            meet, {"kinds": ALL, "fabric": "one", "file": ""}, lambda handle: handle == "one", lambda name: False
        ),
    )
    monkeypatch.setattr(options.socket, "gethostname", lambda: host.name)

    def agree(rank, group, ranks_per_node):
        host.name = f"tray{rank // 2}"
        view = dataclasses.replace(GroupView.of(group), segments=PosixSegments)
        o = options.parse(
            hidden_dim=64,
            max_num_of_tokens_per_rank=8,
            num_local_experts=1,
            use_fp8=False,
            num_sms_dispatch_api=None,
            num_sms_combine_api=None,
            num_blocks_permute=None,
            num_blocks_unpermute=None,
            ranks_per_node=ranks_per_node,
            capacity_factor=None,
            overflow="raise",
            timeout_s=30,
            executor="cuda",
            tuning_file="",
        )
        return o.agree(Rendezvous(view, 30)).num_local_ranks

    assert world.run(lambda rank, group: agree(rank, group, None)) == [8] * 8
    with pytest.warns(UserWarning, match="ranks_per_nvlink_domain=2 cuts an NVLink domain.*8 ranks of this group"):
        assert world.run(lambda rank, group: agree(rank, group, 2)) == [2] * 8


def test_a_cut_domain_is_told_in_the_group_s_own_ranks():
    """Every second rank of a domain of 8, with 4 declared: the number counts ranks of the job."""
    found = resolve(0, ["a"] * 4, 4, "N", [0, 2, 4, 6])
    with pytest.warns(UserWarning, match="N=4 cuts.*4 ranks of this group share it, 2 of them a node; leave"):
        warn_of_cut_domains(found, [0] * 4, "N=4")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_cut_domains(resolve(0, ["a"] * 4, 8, "N", [0, 2, 4, 6]), [0] * 4, "N=8")


def test_a_rank_whose_memory_fails_offers_none_and_nobody_waits(monkeypatch):
    world, here = VirtualWorld(2, 1), threading.local()

    def working_kinds():
        if here.rank == 1:
            raise RuntimeError("no memory left")
        return ["ipc"]

    monkeypatch.setattr(devices, "enter", lambda device: None)
    monkeypatch.setattr(devices, "working_kinds", working_kinds)

    def probe(rank, group):
        here.rank = rank
        return devices.probe(Rendezvous(GroupView.of(group), 200), torch.device("cuda:0")).kinds

    with pytest.warns(UserWarning, match="rank 1 can share no memory of cuda:0: no memory left"):
        assert world.run(probe) == [[["ipc"], []]] * 2


NAMESPACES = """
import os, sys, torch.distributed as dist
from hybrid_ep.runtime import devices
from hybrid_ep.runtime.bootstrap import GroupView, Rendezvous
rank, store = int(sys.argv[1]), dist.FileStore(sys.argv[2], 2)
name = f"hybrid_ep.test.{os.getpid()}"
server = devices._serve(name, os.memfd_create("probe"))
def maps(name):
    try:
        os.close(devices._receive(name))
    except OSError:
        return False
    return True
meet = Rendezvous(GroupView(rank, 2, "pair", store, None, rank), 60)
reach = devices.find_reach(meet, {"kinds": ["file", "ipc"], "fabric": "", "file": name}, lambda handle: False, maps)
print(reach.near, reach.file)
devices._hang_up(server)
"""


@pytest.mark.parametrize("apart", [False, True])
def test_file_descriptors_that_cannot_be_handed_over_are_no_path(tmp_path, apart):
    """Two ranks of one machine, the second in the same network namespace or in one of its own, as containers are."""
    unshare = ["unshare", "--net"] if apart else []
    if apart and subprocess.run([*unshare, "true"], capture_output=True).returncode:
        pytest.skip("this user may not make network namespaces")
    ranks = [
        subprocess.Popen(
            [*prefix, sys.executable, "-c", NAMESPACES, str(rank), str(tmp_path / "store")],
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for rank, prefix in enumerate(([], unshare))
    ]
    for rank in ranks:
        said, errors = rank.communicate(timeout=120)
        assert said.strip() == ("[[0, 1], [0, 1]] [[0], [1]]" if apart else "[[0, 1], [0, 1]] [[0, 1], [0, 1]]"), errors
    reach = devices.Reach([["file", "ipc"]] * 2, [[0, 1]] * 2, [[0], [1]] if apart else [[0, 1]] * 2, [[0, 1]] * 2)
    assert devices.choose_paths(reach, Topology(0, 2, 2)).kind == ("ipc" if apart else "file")


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
    segments = devices.DeviceSegments(dist.HashStore(), "file", range(2))
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
    with pytest.raises(ValueError, match=r"capability 9\.0 and 10\.x; cuda:0 is an A100 of 8\.0"):
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
        segments = devices.DeviceSegments(group.store, "ipc", range(3))
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


def test_memory_of_a_closed_buffer_is_freed_when_its_peers_have_closed_it(monkeypatch):
    monkeypatch.setattr(_core.cuda, "DeviceMemory", FakeMemory)
    FakeMemory.log = log = []

    def close(rank, group):
        meet = Rendezvous(GroupView.of(group), timeout_s=30)
        segments = devices.DeviceSegments(group.store, "ipc", range(3))
        engine = open_segments(meet, segments, 0, 64, list)
        for turn in range(3):  # one after the other, without a meeting of their own
            if rank == turn:
                engine = None
                segments.close(together=False)
            meet.exchange(f"turn/{turn}", None)
        assert engine is None

    VirtualWorld(1, 3).run(close)
    freed = [at for at, (what, _) in enumerate(log) if what == "freed"]
    assert len(freed) == 3 and not devices.DeviceSegments._orphans
    for at in freed:
        assert [what for what, of in log[:at] if of == log[at][1]] == ["closed", "closed"]


class Failing(devices.DeviceSegments):
    """Of one part of a rank's memory, which fails where it is told to."""

    def __init__(self, group, of: range, fails: str):
        super().__init__(group.store, "ipc", of)
        self.fails = fails

    def create(self, name, num_bytes):
        made = super().create(name, num_bytes)  # peers may come to know of it
        if self.fails == "create":
            self._lent = None
            raise MemoryError("no room")
        return made

    def attach(self, name, num_bytes):
        if self.fails == "attach" and name.endswith("2"):  # the last one's
            raise RuntimeError("cannot map")
        return super().attach(name, num_bytes)


@pytest.mark.parametrize("generations", [1, 2])
@pytest.mark.parametrize("fails", [("create", ""), ("", "create"), ("attach", ""), ("", "attach"), ("", "", "engine")])
def test_a_set_up_that_fails_on_one_rank_frees_all_and_nothing_early(monkeypatch, fails, generations):
    """Of a segment and what lies beside it, when each rank closes them while it still has the error."""
    monkeypatch.setattr(_core.cuda, "DeviceMemory", FakeMemory)
    FakeMemory.log = log = []

    def body(rank, group):
        meet = Rendezvous(GroupView.of(group), timeout_s=30)
        parts = [Failing(group, range(3), "") for _ in range(2)]
        told, engine = [], None
        for generation in range(generations):
            last = generation == generations - 1
            if rank == 1 and last:
                for part, how in zip(parts, fails, strict=False):
                    part.fails = how

            def make(*memory, last=last):
                if rank == 1 and last and "engine" in fails:
                    raise ValueError("refused")
                return memory

            engine = None
            try:
                beside = Part(parts[1], 64, range(3), "; do without")
                engine = open_segments(meet, parts[0], generation, 64, make, beside=beside)
            except Exception as error:
                told.append(error)
                time.sleep(0.02 * rank)
                for part in reversed(parts):
                    part.close(together=False)
        assert engine is None and len(told) == 1
        meet.exchange("all closed", None)
        parts[0]._free_orphans()
        return str(told[0])

    said = VirtualWorld(1, 3).run(body)
    assert ("; do without" in said[1]) == (fails == ("", "attach"))
    assert not devices.DeviceSegments._orphans
    for at, (what, handle) in enumerate(log):
        if what == "freed":  # by then nobody maps it, nor will
            assert (("closed", handle)) not in log[at:]
    made = {handle for _, handle in log}
    assert {handle for what, handle in log if what == "freed"} == made


def test_a_device_without_room_offers_no_kind(monkeypatch):
    full = type("Full", (), {"create": mock.Mock(side_effect=MemoryError("does not fit"))})
    monkeypatch.setattr(_core.cuda, "DeviceMemory", full)
    assert devices.working_kinds() == []


def test_a_store_keeps_no_keys_of_segments_that_are_unlinked():
    store = dist.HashStore()
    store.set("segments/a.0", "-")
    for _ in range(2):  # every rank unlinks every name
        devices.DeviceSegments(store, "none", range(2)).unlink("/a.0")
    assert not store.check(["segments/a.0"])
