"""NVSHMEM, for the rail of a group whose nodes have no mapped path between them: found, started, and its symmetric
heap shared by this process's buffers.

Everything collective is preceded by a meeting through the group's store and has a deadline. Which PEs: *all* ranks of
the group, PE = rank, although puts go along the rail alone. A segment is one allocation in which NICs (rings, counts)
and NVLink peers (rows, flags, the same counts) write side by side; with rails as worlds of their own, N PEs each, it
would have to be torn into two allocations, the counts would be copied from one to the other in every exchange, and
NVSHMEM's memory, which lends out no handles, could not be mapped by the node. With all ranks, nvshmem_ptr gives that
mapping. The price is queue pairs to PEs that nobody puts to, some memory of the NIC.

One process has one NVSHMEM, so all its buffers that need it must have the same ranks."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from hybrid_ep import _core
from hybrid_ep.errors import BootstrapError
from hybrid_ep.runtime import rail_nic
from hybrid_ep.runtime.bootstrap import Rendezvous
from hybrid_ep.runtime.topology import Topology

EXECUTOR = "cuda_nvshmem"
KERNELS = Path(__file__).parents[1] / "libhybrid_ep_nvshmem.so"
HOST_LIBRARY = "libnvshmem_host.so.3"


def package() -> str:
    """The pip package that carries NVSHMEM for this torch's CUDA."""
    return f"nvidia-nvshmem-cu{(torch.version.cuda or '13').split('.')[0]}"


def host_library() -> Path | None:
    """NVSHMEM's host library among this Python's packages."""
    with contextlib.suppress(ModuleNotFoundError):
        spec = importlib.util.find_spec("nvidia.nvshmem")
        for folder in (spec.submodule_search_locations or ()) if spec else ():
            if (path := Path(folder) / "lib" / HOST_LIBRARY).is_file():
                return path
    return None


def load() -> Any:
    """The library and our kernels over it, loaded. RuntimeError says what is missing and how to get it."""
    library = host_library()
    if library is None:
        raise RuntimeError(f"NVSHMEM is not installed; pip install {package()}")
    if not KERNELS.is_file():
        raise RuntimeError(
            f"{KERNELS.name} is not there; 'python scripts/build_cuda.py --nvshmem' in a checkout of"
            f" the sources builds it and needs nvcc and {package()}"
        )
    return _core.NvshmemWorld(str(library), str(KERNELS))


class Heap:
    """This process's NVSHMEM and the blocks of its symmetric heap.

    Blocks are numbered in the order of their allocation, which is the same on all ranks. A buffer that goes away
    without meeting the others leaves its block behind; the next meeting frees what everybody has left."""

    def __init__(self, library: Callable[[], Any]) -> None:
        self._library = library
        self._world: _core.NvshmemWorld | None = None
        self.identity = ""  # the unique id of the running world, "" when it is not running
        self.failure = ""  # why NVSHMEM cannot be used any more in this process
        self._blocks: dict[int, int] = {}  # number: address
        self._left: set[int] = set()
        self._next = 0

    @property
    def num_blocks(self) -> int:
        return len(self._blocks)

    def start(self, meet: Rendezvous, topic: str, device: int) -> None:
        """Collective. Starts NVSHMEM over the ranks of `meet`, or finds it running over exactly these."""
        problem = self._load()
        answers = meet.exchange(
            f"{topic}/state",
            {"problem": problem, "identity": self.identity, "version": self._world and list(self._world.running)},
        )
        _agree_to_start(answers)
        if self.identity:
            return
        if device >= 0:
            rail_nic.bind(device)
        said = meet.exchange(f"{topic}/id", self._unique_id() if meet.view.rank == 0 else None)[0]
        if "error" in said:
            raise BootstrapError(f"rank 0 has no unique id for NVSHMEM: {said['error']}", (0,))
        self._together(
            meet,
            f"{topic}/started",
            "starting NVSHMEM",
            lambda: self._running.start(bytes.fromhex(said["id"]), meet.view.rank, meet.view.size, device),
        )
        self.identity, self._next = said["id"], 0

    def allocate(self, meet: Rendezvous, topic: str, num_bytes: int) -> tuple[int, int]:
        """Collective: (number, address) of zeroed memory, as large on every rank as the largest wish. First frees what
        all ranks have left."""
        answers = self._meet(meet, f"{topic}/wish", num_bytes)
        largest = max(f["bytes"] for f in answers)
        self._free_common(meet, topic, answers)
        address = self._together(
            meet, f"{topic}/allocated", f"nvshmem_malloc of {largest} bytes", lambda: self._running.allocate(largest)
        )
        number, self._next = self._next, self._next + 1
        self._blocks[number] = address
        return number, address

    def leave(self, number: int) -> None:
        """Local: this rank needs the block no more."""
        if number in self._blocks:
            self._left.add(number)

    def free(self, meet: Rendezvous, topic: str) -> None:
        """Collective: frees what all ranks have left, and stops NVSHMEM when nothing remains, which gives the heap's
        memory back to the device."""
        self._free_common(meet, topic, self._meet(meet, f"{topic}/left", 0))
        if not self._blocks and self.identity:
            self._together(meet, f"{topic}/stopped", "nvshmem_finalize", self._running.stop)
            self.identity = ""

    def peer(self, address: int, num_bytes: int, rank: int) -> Any:
        return self._running.peer(address, num_bytes, rank)

    def own(self, address: int, num_bytes: int) -> Any:
        return self._running.own(address, num_bytes)

    # ---- meetings
    def _load(self) -> str:
        if self._world is None and not self.failure:
            try:
                self._world = self._library()
            except RuntimeError as error:
                return str(error)
        return self.failure

    @property
    def _running(self) -> _core.NvshmemWorld:
        """The world that _load() has loaded. RuntimeError before it."""
        if self._world is None:
            raise RuntimeError("NVSHMEM is not loaded in this process: start() comes first")
        return self._world

    def _unique_id(self) -> dict[str, str]:
        try:
            return {"id": self._running.unique_id().hex()}
        except RuntimeError as error:
            return {"error": str(error)}

    def _meet(self, meet: Rendezvous, topic: str, num_bytes: int) -> list[dict[str, Any]]:
        answers = meet.exchange(topic, {"bytes": num_bytes, "left": sorted(self._left), "failure": self.failure})
        if bad := [rank for rank, f in enumerate(answers) if f["failure"]]:
            raise BootstrapError(f"NVSHMEM failed earlier on ranks {bad}: {answers[bad[0]]['failure']}", bad)
        return answers

    def _free_common(self, meet: Rendezvous, topic: str, answers: list[dict[str, Any]]) -> None:
        common = sorted(set.intersection(*(set(f["left"]) for f in answers)))
        # Kernels end with puts and credits in flight. All have left the blocks, so that no kernel adds to them; they
        # are complete on every rank before any rank frees.
        if common:
            self._together(meet, f"{topic}/quiet", "nvshmem_quiet", self._running.quiet)
        for number in common:
            self._together(
                meet,
                f"{topic}/freed/{number}",
                "nvshmem_free",
                functools.partial(self._running.free, self._blocks[number]),
            )
            del self._blocks[number]
            self._left.discard(number)

    def _together(self, meet: Rendezvous, topic: str, what: str, call: Callable[[], Any]) -> Any:
        """A collective call of NVSHMEM on every rank: its result, or an error on every rank that says whose call failed
        and how. NVSHMEM's collectives have no deadline, so the call runs in a thread that is given up."""
        outcome: dict[str, Any] = {}

        def body() -> None:
            try:
                outcome["value"] = call()
            except RuntimeError as error:
                outcome["error"] = str(error)

        started = time.monotonic()
        thread = threading.Thread(target=body, name=what, daemon=True)
        thread.start()
        thread.join(meet.timeout_s)
        if late := thread.is_alive():
            outcome["error"] = (
                f"{what} did not come back within {time.monotonic() - started:.1f} s on rank "
                f"{meet.view.rank} (deadline: timeout_s or HYBRID_EP_TIMEOUT_S)"
            )
        # Those who came back must outwait those who gave up.
        said = meet.exchange(topic, [outcome.get("error"), late], 2 * meet.timeout_s)
        bad = [rank for rank, (error, _) in enumerate(said) if error is not None]
        if bad:
            first = min(bad, key=lambda rank: said[rank][1])  # who waited is not to blame where somebody failed
            what = f"{what} failed on ranks {bad}; rank {first} says: {said[first][0]}"
            if len(bad) < len(said) or any(late for _, late in said):  # else all ranks are where they were before
                self.failure = what
            raise BootstrapError(what, bad)
        return outcome["value"]


def _agree_to_start(answers: list[dict[str, Any]]) -> None:
    """BootstrapError or ValueError, the same on every rank, where they cannot use one NVSHMEM."""
    bad = [rank for rank, f in enumerate(answers) if f["problem"]]
    if bad:
        raise BootstrapError(
            f"the rail needs NVSHMEM, which ranks {bad} cannot use; rank {bad[0]} says: {answers[bad[0]]['problem']}",
            bad,
        )
    if len({f["identity"] for f in answers}) > 1:
        busy = [rank for rank, f in enumerate(answers) if f["identity"]]
        raise ValueError(
            f"NVSHMEM already runs in the processes of ranks {busy} for a group of other ranks, and a "
            "process has one NVSHMEM only; destroy the buffers of that group first, or give both the same "
            "ranks"
        )
    if len({tuple(f["version"] or ()) for f in answers}) > 1:
        versions = {rank: ".".join(map(str, f["version"])) for rank, f in enumerate(answers)}
        raise ValueError(f"the ranks have different versions of NVSHMEM ({versions}); install one {package()} on all")


@functools.cache
def heap() -> Heap:
    return Heap(load)


class NvshmemSegments:
    """Segments of one buffer in the symmetric heap; what bootstrap.open_segments asks for. All but unlink() of every
    rank at the same time."""

    def __init__(self, heap: Heap, meet: Rendezvous, topology: Topology, device: int = -1) -> None:
        self._heap, self._meet, self._topology, self._device = heap, meet, topology, device
        self._meetings = 0
        self._number: int | None = None
        self._address = 0

    def create(self, name: str, num_bytes: int) -> Any:
        """Gives this buffer's last block up for the new one."""
        self._heap.start(self._meet, self._topic(), self._device)
        self._leave()
        self._number, self._address = self._heap.allocate(self._meet, self._topic(), num_bytes)
        return self._heap.own(self._address, num_bytes)

    def attach(self, name: str, num_bytes: int) -> Any:
        """The rank's segment as mapped here. Of another node's rank, which only the NIC reaches, the own one in its
        place: puts name their target by PE and offset."""
        rank = int(name.rpartition(".")[2])
        segment = self._heap.peer(self._address, num_bytes, rank)
        if segment is None and rank // self._topology.num_local_ranks == self._topology.node:
            raise RuntimeError(
                f"NVSHMEM gives rank {self._topology.rank} no mapped path to rank {rank} of the same "
                "node; is there NVLink between them, and is NVSHMEM_DISABLE_P2P unset?"
            )
        return self._heap.own(self._address, num_bytes) if segment is None else segment

    def unlink(self, name: str) -> None:
        """Nothing: the heap has no names."""

    def close(self, together: bool) -> None:
        """After the engine. together: every rank does it now, and the memory goes back at once; else at the next
        meeting of the heap's users."""
        self._leave()
        if together:
            self._heap.free(self._meet, self._topic())

    def _leave(self) -> None:
        if self._number is not None:
            self._heap.leave(self._number)
        self._number = None

    def _topic(self) -> str:
        self._meetings += 1
        return f"nvshmem/{self._meetings}"
