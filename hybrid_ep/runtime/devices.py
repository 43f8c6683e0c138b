"""GPUs: loading the CUDA library, and registered device memory that the ranks of a group map.

The library is loaded when an executor of it is named. It may be missing (no nvcc when hybrid_ep was built), or there
may be no device: then ValueError says which of the two, and everything else works.

Memory is shared between processes in one of three ways, best first: "fabric" handles, which also work between the
hosts of one NVLink domain, "file" descriptors, and CUDA "ipc". A way counts as working when a small allocation of it
has really been made, shared and, where the API lets a process map its own, mapped; the ranks then take the best that
works on all of them and reaches all their peers. Where nodes share no such path, NVSHMEM is started."""

from __future__ import annotations

import contextlib
import functools
import os
import secrets
import socket
import struct
import threading
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
import torch.distributed as dist

from hybrid_ep import _core
from hybrid_ep.hardware.clusters import with_article
from hybrid_ep.runtime import nvshmem
from hybrid_ep.runtime.bootstrap import Rendezvous
from hybrid_ep.runtime.topology import Topology

LIBRARY = Path(__file__).parents[1] / "libhybrid_ep_cuda.so"
KINDS = ("fabric", "file", "ipc")
ARENALESS = "; arena_mib=0 (or HYBRID_EP_ARENA_MIB=0) does without an arena, which is what this is for"
_PROBE_BYTES = 1 << 21
_CONNECT_S = 30.0
_ORDER_FOR_ALL_DEVICES = 200  # cudaGPUDirectRDMAWritesOrderingAllDevices


def is_cuda(executor: str) -> bool:
    """Whether an executor of this name runs on a GPU."""
    return executor.startswith("cuda")


@functools.cache
def load() -> dict[str, Any]:
    """Loads the CUDA library: {"devices": [{"name", "capability", "num_sms", "supported", "rdma_order"}],
    "why_none": str}.

    RuntimeError when it was not built or does not load."""
    if not LIBRARY.is_file():
        raise RuntimeError(
            f"{LIBRARY.name} is not there; in a checkout of the sources, on a machine with nvcc, "
            "'python scripts/build_cuda.py' builds it, and so does 'pip install .'"
        )
    return _core.cuda.load(str(LIBRARY))


def current() -> torch.device:
    """This thread's CUDA device, ready for the CUDA executors. ValueError when there is none they can use."""
    try:
        loaded = load()
    except RuntimeError as error:
        raise ValueError(f"executor='cuda' cannot be used here: {error}") from error
    if not loaded["devices"]:
        raise ValueError(f"executor='cuda' needs a GPU and finds none: {loaded['why_none']}")
    if not torch.cuda.is_available():
        raise ValueError("executor='cuda' takes CUDA tensors, and this torch has no CUDA: install one that has")
    device = torch.device("cuda", torch.cuda.current_device())
    found = loaded["devices"][device.index]
    if not found["supported"]:
        major, minor = found["capability"]
        raise ValueError(
            f"executor='cuda' has kernels for compute capability 9.0 and 10.x; {device} is "
            f"{with_article(found['name'])} of {major}.{minor}"
        )
    return device


def name_and_capability(device: torch.device) -> tuple[str, tuple[int, int]]:
    info = load()["devices"][device.index]
    return info["name"], tuple(info["capability"])


def orders_rdma_for_peers(device: torch.device) -> bool:
    """Whether others may read over NVLink what a NIC wrote to this GPU, once it has itself seen the signal."""
    return bool(load()["devices"][device.index]["rdma_order"] >= _ORDER_FOR_ALL_DEVICES)


def enter(device: torch.device) -> int:
    """Makes the device current for the library in this thread; the address of torch's current stream on it."""
    _core.cuda.set_device(device.index)
    return torch.cuda.current_stream(device).cuda_stream


def borrow(device: torch.device) -> torch.cuda.device | None:
    """Makes the device torch's current one in this thread; what gives the one before back, where it was another."""
    if torch.cuda.current_device() == device.index:
        return None
    borrowed = torch.cuda.device(device)
    borrowed.__enter__()
    return borrowed


def give_back(borrowed: torch.cuda.device | None) -> None:
    if borrowed is not None:
        borrowed.__exit__(None, None, None)


@contextlib.contextmanager
def on(device: torch.device) -> Iterator[None]:
    """The library's calls, and torch's, are of this device, which may not be the thread's."""
    borrowed = borrow(device)
    try:
        enter(device)
        yield
    finally:
        give_back(borrowed)


def working_kinds() -> list[str]:
    """The kinds of shared memory that work on the current device, best first."""
    kinds = []
    for kind in KINDS:
        with contextlib.suppress(RuntimeError, MemoryError):
            memory = _core.cuda.DeviceMemory.create(kind, _PROBE_BYTES)
            handle, fd = memory.share()
            if kind != "ipc":  # CUDA refuses to open a process's own IPC handle
                try:
                    _core.cuda.DeviceMemory.attach(kind, _PROBE_BYTES, handle, fd)
                finally:
                    _close(fd)
            kinds.append(kind)
    return kinds


@dataclass(frozen=True)
class Reach:
    """Whose memory a rank's handles reach, by rank. kinds: what works there; near: the ranks on its machine, which
    "ipc" needs, which is not tried; file: those of them whose file descriptor it really received; fabric: the ranks
    whose fabric handles it really mapped, and those near, of which that is assumed."""

    kinds: list[list[str]]
    near: list[list[int]]
    file: list[list[int]]
    fabric: list[list[int]]

    def domains(self) -> list[int]:
        """The NVLink domain of every rank, as the first rank of it.

        Ranks that all mapped one another through fabric handles are one domain, however many hosts they lie on (an
        NVL72 is 18); where fabric handles do not join them into such groups, the ranks of a machine are one."""
        works = ["fabric" in kinds for kinds in self.kinds]
        mutual = [
            {p for p in self.fabric[r] if r in self.fabric[p] and works[p]} if works[r] else set(self.near[r])
            for r in range(len(self.kinds))
        ]
        if any(mutual[p] != mutual[r] for r in range(len(mutual)) for p in mutual[r]):
            mutual = [set(near) for near in self.near]
        return [min(group) for group in mutual]


def find_reach(
    meet: Rendezvous, offer: dict[str, Any], maps_fabric: Callable[[str], bool], maps_file: Callable[[str], bool]
) -> Reach:
    """Collective; the same on every rank. offer: {"kinds": working kinds, "fabric": hex handle of some memory, or "",
    "file": name under which its descriptor is served, or ""}; maps_fabric(handle), maps_file(name): whether this
    process gets at that memory. Only what was really mapped counts: a driver that offers fabric handles says nothing of
    whether two hosts share a domain, and containers of one machine may not see one another's sockets."""
    offers = meet.exchange("memory", {"machine": machine(), **offer})
    me = meet.view.rank
    near = [r for r, f in enumerate(offers) if f["machine"] == offers[me]["machine"]]
    file = [r for r in near if r == me or (offers[r]["file"] and maps_file(offers[r]["file"]))]
    fabric = [r for r, f in enumerate(offers) if r in near or (f["fabric"] and maps_fabric(f["fabric"]))]
    said = meet.exchange("memory/mapped", {"near": near, "file": file, "fabric": fabric})
    return Reach([f["kinds"] for f in offers], *([s[name] for s in said] for name in ("near", "file", "fabric")))


def is_probed(executor: str) -> bool:
    """Whether ranks of this executor find out whom their memory reaches before they know their nodes; not where NVSHMEM
    was asked for by name, which does so later, for an arena."""
    return is_cuda(executor) and executor != nvshmem.EXECUTOR


def probe(meet: Rendezvous, device: torch.device) -> Reach:
    """find_reach with memory of this device. A rank whose memory fails offers none, so that nobody waits for it."""
    offer: dict[str, Any] = {"kinds": [], "fabric": "", "file": ""}
    held, server = {}, None
    try:
        try:
            enter(device)
            kinds = working_kinds()
            held = {kind: _core.cuda.DeviceMemory.create(kind, _PROBE_BYTES) for kind in kinds if kind != "ipc"}
            if "file" in held:
                offer["file"] = f"hybrid_ep.probe.{os.getpid()}.{secrets.token_hex(8)}"
                server = _serve(offer["file"], held["file"].share()[1])
            if "fabric" in held:
                offer["fabric"] = held["fabric"].share()[0].hex()
            offer["kinds"] = kinds
        except (RuntimeError, OSError, MemoryError) as error:
            warnings.warn(f"rank {meet.view.rank} can share no memory of {device}: {error}", stacklevel=2)
        return find_reach(meet, offer, _maps_fabric, _maps_file)
    finally:  # all have tried to map it, or this rank gives up
        _hang_up(server)


@dataclass(frozen=True)
class Paths:
    """How ranks reach one another's memory. kind: that of the node's mappings; None: NVSHMEM makes them. mapped_rail:
    the same mappings reach the other nodes, too."""

    kind: str | None
    mapped_rail: bool


def _best_kind(reach: Reach, topology: Topology, whom: Callable[[int, int], bool]) -> str | None:
    """The best kind of memory that works on every rank and by which rank r maps every p of whom(r, p)."""
    for kind, mapped in zip(KINDS, (reach.fabric, reach.file, reach.near), strict=True):
        if all(
            kind in reach.kinds[r] and whom(r, p) <= (p in mapped[r])
            for r in range(topology.num_ranks)
            for p in range(topology.num_ranks)
        ):
            return kind
    return None


def kind_in_nodes(reach: Reach, topology: Topology) -> str | None:
    """The best kind by which the ranks of every node map one another; None: there is none."""
    local = topology.num_local_ranks
    if local == 1:
        return "none"  # who is alone shares with nobody
    return _best_kind(reach, topology, lambda r, p: r // local == p // local)


def choose_paths(reach: Reach, topology: Topology) -> Paths:
    """The best kind that works on every rank and maps all its peers; if none reaches the other nodes, NVSHMEM is to.
    RuntimeError, the same on all ranks, when ranks of one node cannot map one another."""
    local = topology.num_local_ranks
    if kind := _best_kind(reach, topology, lambda r, p: r // local == p // local or r % local == p % local):
        return Paths(kind, True)
    if topology.num_nodes > 1:
        return Paths(None, False)
    raise RuntimeError(
        "no kind of shared device memory works on all ranks: "
        + "; ".join(f"rank {rank}: {', '.join(kinds) or 'none'}" for rank, kinds in enumerate(reach.kinds))
    )


def machine() -> str:
    """This boot of this kernel: what shared memory, file descriptors and IPC handles cannot leave. Host names will not
    do: containers and Slurm give one machine several. Where the kernel does not say it, the host name all the same."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return boot.read_text().strip() if boot.exists() else socket.gethostname()


class Memory(NamedTuple):
    """What makes and maps a group's registered memory, and the executor that goes with it. arenas: what makes an arena
    beside the segment, which ranks of a node alone map; None where it lies in the segment, if the executor has one."""

    segments: Any
    executor: str
    arenas: Any = None


def memory(
    meet: Rendezvous,
    topology: Topology,
    executor: str,
    device: torch.device,
    reach: Reach | None,
    wants_arena: bool = True,
) -> Memory:
    """Of this group on the current GPU. Collective. reach: None where NVSHMEM was asked for by name.

    Results outlive their buffer, and NVSHMEM's heap all ranks give back together: so it holds no arena."""
    store = meet.view.store
    if reach is not None:
        paths = choose_paths(reach, topology)
        if paths.mapped_rail and paths.kind is not None:
            whole, own_node = range(topology.num_ranks), topology.ranks_of_node
            return Memory(
                DeviceSegments(store, paths.kind, whole), executor, DeviceSegments(store, paths.kind, own_node)
            )
    heap = nvshmem.NvshmemSegments(nvshmem.heap(), meet, topology, device.index)
    if not wants_arena:
        return Memory(heap, nvshmem.EXECUTOR)
    kind = kind_in_nodes(probe(meet, device) if reach is None else reach, topology)
    if kind is None:
        warnings.warn(
            "NVSHMEM connects the nodes, and in some node ranks have no other memory in common, which an arena needs: "
            "dispatched rows are copied once more. Containers of one machine share some where they share its network "
            "namespace; arena_mib=0 does without",
            RuntimeWarning,
            stacklevel=5,
        )
        return Memory(heap, nvshmem.EXECUTOR)
    return Memory(heap, nvshmem.EXECUTOR, DeviceSegments(store, kind, topology.ranks_of_node))


def _maps_fabric(handle: str) -> bool:
    with contextlib.suppress(RuntimeError):
        _core.cuda.DeviceMemory.attach("fabric", _PROBE_BYTES, bytes.fromhex(handle), -1)
        return True
    return False


def _maps_file(name: str) -> bool:
    fd = -1
    try:
        fd = _receive(name)
        _core.cuda.DeviceMemory.attach("file", _PROBE_BYTES, b"", fd)
    except (RuntimeError, OSError):
        return False
    finally:
        _close(fd)  # the mapping keeps the memory
    return True


class DeviceSegments:
    """Segments of real processes in device memory. Handles travel through the group's store, file descriptors through
    an abstract Unix socket that the owner serves until unlink().

    CUDA IPC's memory must not be freed while a peer maps it. So the last segment outlives its engine until this rank
    makes the next one: the ranks have met between the two (bootstrap.open_segments), each without its old engine. One
    that is closed for good outlives it until all peers have said in the store that they let go, mapped or not, which
    this process looks for whenever it makes or closes segments. Mappings of the other kinds keep the memory."""

    _orphans: ClassVar[list[tuple[dist.Store, str, int, Any]]] = []  # of this process: key, peers to come, segment

    def __init__(self, store: dist.Store, kind: str, of: range) -> None:
        """of: the ranks that map one another's, this one among them."""
        self._store, self.kind, self._of = store, kind, of
        self._servers: dict[str, socket.socket] = {}
        self._lent: Any = None  # what peers may still map, of CUDA IPC
        self._name = ""  # of that generation, whose peers' differ in the rank at its end

    def create(self, name: str, num_bytes: int) -> _core.Segment:
        self._lent = None
        self._name = name  # whatever comes: peers of this generation count on this rank's word at its end
        self._free_orphans()
        memory = _core.cuda.DeviceMemory.create(self.kind, num_bytes)
        if len(self._of) == 1:
            return memory.segment()
        handle, fd = memory.share()
        if fd >= 0:
            self._servers[name] = _serve(name, fd)
        self._store.set(f"segments{name}", handle.hex() or "-")
        segment = memory.segment()
        if self.kind == "ipc":
            self._lent = segment
        return segment

    def attach(self, name: str, num_bytes: int) -> _core.Segment:
        said = self._store.get(f"segments{name}").decode()
        handle, fd = (b"", _receive(name)) if self.kind == "file" else (bytes.fromhex(said), -1)
        try:
            return _core.cuda.DeviceMemory.attach(self.kind, num_bytes, handle, fd).segment()
        finally:
            _close(fd)  # the mapping keeps the memory

    def unlink(self, name: str) -> None:
        _hang_up(self._servers.pop(name, None))
        with contextlib.suppress(dist.DistError, NotImplementedError):  # a store that cannot delete, or is gone
            self._store.delete_key(f"segments{name}")

    def close(self, together: bool) -> None:
        """After the engine, of each rank when it likes."""
        if self._name and self.kind == "ipc":
            if self._lent is not None:
                self._orphans.append((self._store, f"closed{self._name}", len(self._of) - 1, self._lent))
            stem, _, own = self._name.rpartition(".")
            with contextlib.suppress(dist.DistError):  # the store is gone: so may be its peers, and nobody frees
                for rank in self._of:
                    if rank != int(own):
                        self._store.add(f"closed{stem}.{rank}", 1)
        self._lent, self._name = None, ""
        self._free_orphans()

    @classmethod
    def _free_orphans(cls) -> None:
        for orphan in cls._orphans.copy():
            store, key, peers, _ = orphan
            # A store that is gone or cannot delete; ValueError: another thread was first.
            with contextlib.suppress(dist.DistError, NotImplementedError, ValueError):
                if store.add(key, 0) >= peers:
                    cls._orphans.remove(orphan)
                    store.delete_key(key)


def _close(fd: int) -> None:
    if fd >= 0:
        os.close(fd)


def _address(name: str) -> str:
    return "\0" + name.strip("/")  # abstract: no file, gone with its socket


def _same_user(peer: socket.socket) -> bool:
    """Whether the process at the other end runs as this one's user. Abstract sockets have no permissions: anybody in
    this network namespace may connect, or take the address first."""
    ucred = struct.Struct("iII")  # pid, uid, gid
    return ucred.unpack(peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, ucred.size))[1] == os.geteuid()


def _serve(name: str, fd: int) -> socket.socket:
    """A listening socket that hands `fd` to every process of this user that connects, until it is closed; then fd is
    closed. Others are hung up on."""
    server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        server.bind(_address(name))
        server.listen(64)
    except OSError:
        server.close()
        _close(fd)
        raise

    def run() -> None:
        try:
            while True:
                peer, _ = server.accept()
                with peer, contextlib.suppress(OSError):
                    if _same_user(peer):
                        socket.send_fds(peer, [b"x"], [fd])
        except OSError:  # closed
            pass
        finally:
            _close(fd)

    threading.Thread(target=run, name=f"serve {name}", daemon=True).start()
    return server


def _hang_up(server: socket.socket | None) -> None:
    if server is not None:
        server.shutdown(socket.SHUT_RDWR)  # wakes the thread in accept()
        server.close()


def _receive(name: str) -> int:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as peer:
        peer.settimeout(_CONNECT_S)
        peer.connect(_address(name))
        if not _same_user(peer):
            raise RuntimeError(
                f"the memory {name} is offered by a process of another user; run all ranks of a machine as one user"
            )
        _, fds, _, _ = socket.recv_fds(peer, 1, 1)
    if not fds:
        raise RuntimeError(f"the owner of {name} sent no file descriptor; it does so only to processes of its user")
    return fds[0]
