"""WeightPrefetcher: the experts that a rank lacks, in a few buffers, a layer ahead of the one that computes.

    layer      0        1        2        3
    compute    ██████   ██████   ██████   ██████
    buffer 0   0 ready ─────►done│ pull 2 ... ready      "done" of layer l licenses the pull of l + 2 into its buffer,
    buffer 1   1 ready ─────────────────►done│ pull 3    which has the whole of layer l + 1 to end in

Layers are used to and fro in training (0 1 2 3, then 3 2 1 0 in the backward), round and round in evaluation, and as a
pipeline's schedule has them: after a step its order is known (`order.py`). What will be used next is what is pulled
next, so that the turn of the way costs nothing: those layers are still there. One thread copies, or on a GPU hands the
copies to the engines. It takes a slice from each owner in turn, beginning behind its own rank, so that ranks do not all
read from the same owner at the same time."""

from __future__ import annotations

import contextlib
import itertools
import queue
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from hybrid_ep.errors import BufferFailedError, DeadlineError, HybridEPError
from hybrid_ep.runtime import validation
from hybrid_ep.weights import layout as places
from hybrid_ep.weights.layout import DEFAULT_SLICE_BYTES
from hybrid_ep.weights.order import Order
from hybrid_ep.weights.store import ExpertStore

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hybrid_ep.weights.layout import Piece
    from hybrid_ep.weights.machine import Buffer, Marks, Work

Place = tuple[int, int, int, torch.dtype, torch.Size, tuple[int, ...]]  # layer, memory, element, dtype, size, stride


@dataclass
class Fetched:
    """A layer's experts that are not this rank's own, in the order of the rank (`WeightLayout`), until `release`. By
    matrix: kept[n] `[K, *shape]`, then fetched[n] `[S, *shape]`. On a GPU for work of the stream that was current at
    `acquire`, and will be at `release`."""

    kept: list[torch.Tensor]
    fetched: list[torch.Tensor]


@dataclass
class Statistics:
    """Since the prefetcher was made. pulls: layers pulled; pulled_bytes: in all. hits: layers that were ready when they
    were acquired; late: those under way; missed: those that nobody had asked for. waited_s: for the latter two.
    copied_s: seconds of the copying thread. On a GPU the host is what waits and copies here: until a pull has begun,
    and for handing it to the engines."""

    pulls: int = 0
    pulled_bytes: int = 0
    hits: int = 0
    late: int = 0
    missed: int = 0
    waited_s: float = 0.0
    copied_s: float = 0.0


@dataclass
class _Job:
    """A layer on its way into a buffer, and into the memory of kept copies where those are old."""

    version: int
    work: Work
    num_bytes: int
    sources: list[int]
    ready: threading.Event = field(default_factory=threading.Event)  # begun, at least
    arrived: Marks | None = None  # then
    error: Exception | None = None


class _Slot:
    """A buffer: the layer in it, how many use it, when it was last released."""

    def __init__(self, memory: Buffer) -> None:
        self.memory = memory
        self.layer, self.users, self.released = -1, 0, 0
        self.job: _Job | None = None


class WeightPrefetcher:
    """Pulls layers of an ExpertStore.

    num_buffers: layers that can be there at once, at least 2; with as many as there are layers each is pulled once a
    version. slice_bytes: of a copy from one owner before the next owner's turn. Local; `publish` is the ranks' common
    step. Raises ValueError for numbers that cannot be, MemoryError where a GPU has no room for the buffers.
    """

    def __init__(self, store: ExpertStore, *, num_buffers: int = 2, slice_bytes: int = DEFAULT_SLICE_BYTES) -> None:
        num_buffers = validation.integer("num_buffers", num_buffers, 2, "one computes while the other is filled")
        self.slice_bytes = validation.integer("slice_bytes", slice_bytes, 1)
        self.store, self.layout = store, store.layout
        self.statistics = Statistics()
        lay, rank, memory = self.layout, store.rank, store.memory
        num_bytes = max(lay.stack_bytes(lay.fetched), places.LINE)
        self._slots = [_Slot(memory.buffer(num_bytes)) for _ in range(min(num_buffers, max(2, lay.num_layers)))]
        self._kept_layer = lay.stack_bytes(lay.kept(rank))
        self._kept = memory.buffer(max(self._kept_layer * lay.num_layers, places.LINE))
        self._kept_versions = [0] * lay.num_layers
        self._kept_marks = [memory.marks() for _ in range(lay.num_layers)]
        for marks in self._kept_marks:
            marks.take(self._kept.marks)
        self._lock, self._clock = threading.Lock(), itertools.count(1)
        self._order = Order()
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=_copy, args=(store, self._jobs, self.statistics), daemon=True)
        self._thread.name = f"weights of rank {rank}"
        self._thread.start()

    # ---- steps

    def publish(self, weights: Sequence[Sequence[torch.Tensor]]) -> None:
        """`ExpertStore.publish`, and the pulls of the first layers begin. RuntimeError while a layer is in use."""
        self.store.check_usable()
        with self._lock:
            used = [slot.layer for slot in self._slots if slot.users]
            jobs = [slot.job for slot in self._slots if slot.job is not None]
        if used:
            raise RuntimeError(f"layers {used} are in use: release them before their weights change")
        for job in jobs:
            self._wait(job)
        for slot in self._slots:
            slot.layer, slot.job = -1, None
        self.store.publish(weights)
        self._order.new_step()
        self._prefetch(range(self.layout.num_layers))

    def acquire(self, layer: int) -> Fetched:
        """The weights of a layer, when they are there; every acquire is followed by its release.

        DeadlineError names the owner who has not published them. RuntimeError where all buffers are in use."""
        self.store.check_usable()
        layer = self._layer(layer)
        if self.store.version == 0:
            raise RuntimeError("no weights were published: call publish before acquire")
        with self._lock:
            slot = self._holding(layer)
            known = slot is not None
            slot = slot or self._request(layer, {layer})
            if slot is None or slot.job is None:
                raise RuntimeError(
                    f"layer {layer} finds no buffer: layers {[s.layer for s in self._slots]} are in use; make the "
                    "prefetcher with more num_buffers"
                )
            slot.users += 1
            self._order.used(layer)
            job = slot.job
            at_once = job.arrived is not None and job.arrived.passed()
        counted = self.statistics
        counted.hits, counted.late = counted.hits + (known and at_once), counted.late + (known and not at_once)
        counted.missed += not known
        try:
            self._wait(job)
        except BaseException:
            with self._lock:
                slot.users -= 1
            raise
        assert job.arrived is not None  # or the wait had raised
        job.arrived.join()
        return self._fetched(layer, slot)

    def release(self, layer: int, *, backward: bool = False, training: bool = True) -> None:
        """The layer's weights were used; what comes after it is pulled into buffers that nobody uses.

        That is what came after it in the step before. Where none was like this one: backward: the layer ran in the
        backward. training: a backward follows the forward, so that the way turns at the last layer; evaluation goes
        round. A wrong guess costs time, never a result."""
        layer = self._layer(layer)
        with self._lock:
            slot = self._holding(layer)
            if slot is None or not slot.users:
                raise RuntimeError(f"layer {layer} is not in use: it was released more often than acquired")
            slot.memory.marks.add()
            self._kept_marks[layer].add()
            slot.users -= 1
            slot.released = next(self._clock)
        self._prefetch(_way(layer, self.layout.num_layers, backward, training))

    def close(self) -> None:
        """End the thread. The store is refused from then on, since its memory may go."""
        self.store.refuse()
        self._jobs.put(None)
        self._thread.join(self.store.timeout_s)
        self.store.close()

    # ---- what autograd keeps of a buffer

    def place_of(self, layer: int, tensor: torch.Tensor) -> Place | None:
        """Where a tensor lies in a layer's buffer or among its kept copies; None for any other."""
        found = self._holding(layer)
        at = tensor.untyped_storage().data_ptr() + tensor.storage_offset() * tensor.element_size()
        for number, memory in enumerate((found.memory if found else None, self._kept)):
            if memory is not None and memory.address <= at < memory.address + memory.num_bytes:
                first = (at - memory.address) // tensor.element_size()
                return layer, number, int(first), tensor.dtype, tensor.size(), tensor.stride()
        return None

    def at(self, place: Place) -> torch.Tensor:
        """The tensor at a place, wherever the layer's buffer is now. RuntimeError where the layer is not in use."""
        layer, number, first, dtype, size, stride = place
        slot = self._holding(layer)
        if slot is None or not slot.users:
            raise RuntimeError(f"the backward of layer {layer} reads weights that were not acquired for it")
        memory = self._kept if number else slot.memory
        whole = memory.tensor(0, (memory.num_bytes // dtype.itemsize,), dtype)
        return whole.as_strided(size, stride, first)

    # ---- buffers

    def _layer(self, layer: int) -> int:
        return validation.integer("layer", layer, 0, "give a layer of the store", self.layout.num_layers - 1)

    def _holding(self, layer: int) -> _Slot | None:
        return next((slot for slot in self._slots if slot.layer == layer), None)

    def _prefetch(self, way: Iterator[int] | range) -> None:
        """Ask for as many of the next layers as there are buffers. way: which they are, where the past does not say."""
        wanted: dict[int, None] = {}
        most = 2 * self.layout.num_layers + 2
        with self._lock:
            for layer in itertools.chain(self._order.following(most), itertools.islice(way, most)):
                wanted.setdefault(layer)
                if len(wanted) == len(self._slots):
                    break
            for layer in wanted:
                if self._holding(layer) is None:
                    self._request(layer, set(wanted))

    def _request(self, layer: int, wanted: set[int]) -> _Slot | None:
        """Have a layer pulled into a buffer that is free and holds nothing of what is wanted; None without one."""
        free = [slot for slot in self._slots if not slot.users and slot.layer not in wanted]
        if not free:
            return None
        slot = min(free, key=lambda slot: (slot.layer != -1, slot.released))
        lay, rank = self.layout, self.store.rank
        work = [(slot.memory, self._pieces(layer, lay.held, lay.num_experts, 0), slot.memory.marks)]
        if self._kept_versions[layer] != self.store.version:
            self._kept_versions[layer] = self.store.version
            pieces = self._pieces(layer, lay.own(rank), lay.held, layer * self._kept_layer)
            work.append((self._kept, pieces, self._kept_marks[layer]))
        sources = sorted({source for _, pieces, _ in work for source, *_ in pieces})
        num_bytes = sum(piece[3] for _, pieces, _ in work for piece in pieces)
        slot.layer, slot.job = layer, _Job(self.store.version, work, num_bytes, sources)
        self._jobs.put(slot.job)
        return slot

    def _pieces(self, layer: int, begin: int, end: int, base: int) -> list[Piece]:
        """Slices of the experts at positions begin to end, an owner after the other, into memory from `base` on. Owners
        come in the order of the rank: from the next one on."""
        lay, stretches = self.layout, []
        for at, owner, index, count in lay.runs(self.store.rank, begin, end):
            for n in range(len(lay.shapes)):
                size = lay.expert_bytes(n)
                source = lay.own_at(layer, n) + index * size
                target = base + lay.stack_at(end - begin, n) + (at - begin) * size
                stretches.append((owner, source, target, count * size))
        return places.in_turns(stretches, self.slice_bytes)

    def _wait(self, job: _Job) -> None:
        """Until a job is done. The thread's own wait for an owner ends before this one."""
        started = time.monotonic()
        if not job.ready.wait(2 * self.store.timeout_s):
            raise self.store.fail(
                DeadlineError(
                    f"rank {self.store.rank} waited {2 * self.store.timeout_s:g} s for its own copying thread",
                    site="weights are pulled",
                    rank=self.store.rank,
                    waited_s=2 * self.store.timeout_s,
                )
            )
        self.statistics.waited_s += time.monotonic() - started
        if job.error is not None:
            raise job.error

    def _fetched(self, layer: int, slot: _Slot) -> Fetched:
        lay = self.layout
        kept, fetched = [], []
        for n, shape in enumerate(lay.shapes):
            num_kept = lay.kept(self.store.rank)
            at = layer * self._kept_layer + lay.stack_at(num_kept, n)
            kept.append(self._kept.tensor(at, (num_kept, *shape), lay.dtype))
            fetched.append(slot.memory.tensor(lay.stack_at(lay.fetched, n), (lay.fetched, *shape), lay.dtype))
        return Fetched(kept, fetched)


def _way(layer: int, num_layers: int, backward: bool, training: bool) -> Iterator[int]:
    """The layers that will be used after one: to and fro in training, round and round else."""
    if not training:
        return ((layer + i) % num_layers for i in itertools.count(1))
    forth, back = range(num_layers), range(num_layers - 1, -1, -1)
    rest = back[num_layers - layer :] if backward else forth[layer + 1 :]
    return itertools.chain(rest, forth if backward else back, back if backward else forth)


def _copy(store: ExpertStore, jobs: queue.SimpleQueue[_Job | None], counted: Statistics) -> None:
    """What the thread does: jobs in their order, until None."""
    while (job := jobs.get()) is not None:
        try:
            store.check_usable()
            store.wait(places.PUBLISHED, job.version, "weights are not published by", job.sources)
            started = time.monotonic()
            job.arrived = store.memory.pulls.pull(store.shared, job.work)
            counted.copied_s += time.monotonic() - started
            counted.pulled_bytes += job.num_bytes
            counted.pulls += 1
        except Exception as error:  # whoever waits for the layer raises it
            job.error = error
            if not isinstance(error, HybridEPError):  # of the device, of which nobody knows what it has done
                store.fail(BufferFailedError(f"pulling weights failed: {error}"))
        job.ready.set()
    with contextlib.suppress(queue.Empty):
        while (left := jobs.get_nowait()) is not None:
            left.error = BufferFailedError("this store of expert weights was closed")
            left.ready.set()
