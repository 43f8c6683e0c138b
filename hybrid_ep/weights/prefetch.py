"""WeightPrefetcher: the experts that a rank lacks, in a few buffers, a layer ahead of the one that computes.

    layer      0        1        2        3
    compute    ██████   ██████   ██████   ██████
    buffer 0   0 ready ─────►done│ pull 2 ... ready      "done" of layer l licenses the pull of l + 2 into its buffer,
    buffer 1   1 ready ─────────────────►done│ pull 3    which has the whole of layer l + 1 to end in

Layers are used to and fro in training (0 1 2 3, then 3 2 1 0 in the backward), round and round in evaluation, and as a
pipeline's schedule has them: after a step its order is known (`order.py`). What will be used next is what is pulled
next, so that the turn of the way costs nothing: those layers are still there. One thread copies, or on a GPU hands the
copies to the engines (`copying.py`). It takes a slice from each rank in turn, beginning behind its own, so that ranks
do not all read from the same one at the same time."""

from __future__ import annotations

import itertools
import threading
import time
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from hybrid_ep.errors import DeadlineError
from hybrid_ep.runtime import validation
from hybrid_ep.weights import layout as places
from hybrid_ep.weights.copying import CopyingThread, Pull, Renewal
from hybrid_ep.weights.layout import DEFAULT_SLICE_BYTES
from hybrid_ep.weights.order import Order
from hybrid_ep.weights.store import ExpertStore

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hybrid_ep.weights.copying import Task
    from hybrid_ep.weights.machine import Buffer

Place = tuple[int, int, int, torch.dtype, torch.Size, tuple[int, ...]]  # layer, memory, element, dtype, size, stride


@dataclass
class Fetched:
    """A layer's experts that are not this rank's own, in the order of the rank (`WeightLayout`), until `release`. By
    matrix: kept[n] `[K, *shape]`, then fetched[n] `[S, *shape]`. On a GPU for work of the stream that was current at
    `acquire`, and will be at `release`."""

    kept: list[torch.Tensor]
    fetched: list[torch.Tensor]


class _Slot:
    """A buffer: the layer in it, how many use it, when it was last released."""

    def __init__(self, memory: Buffer) -> None:
        self.memory = memory
        self.layer, self.users, self.released = -1, 0, 0
        self.job: Pull | None = None


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
        lay, memory = self.layout, store.memory
        num_bytes = max(lay.stack_bytes(lay.fetched), places.LINE)
        self._slots = [_Slot(memory.buffer(num_bytes)) for _ in range(min(num_buffers, max(2, lay.num_layers)))]
        self._lock, self._clock = threading.Lock(), itertools.count(1)
        self._order = Order()
        self._renewal = Renewal(0)
        self._thread = CopyingThread(store, self.slice_bytes)
        self.statistics = self._thread.statistics
        weakref.finalize(self, self._thread.leave)  # of one that is dropped without close()

    # ---- steps

    def publish(self, weights: Sequence[Sequence[torch.Tensor]]) -> None:
        """`ExpertStore.publish`, and the pulls of the first layers begin, and of what is kept of all layers.
        RuntimeError while a layer is in use."""
        self.store.check_usable()
        with self._lock:
            used = [slot.layer for slot in self._slots if slot.users]
            jobs = [slot.job for slot in self._slots if slot.job is not None]
        if used:
            raise RuntimeError(f"layers {used} are in use: release them before their weights change")
        renewals = [self._renewal] if self._renewal.version else []
        for task in (*jobs, *renewals):  # copies, too, of layers that this rank has not used: others may
            self._wait(task)
        for slot in self._slots:
            slot.layer, slot.job = -1, None
        self.store.publish(weights)
        self._order.new_step()
        self._renewal = Renewal(self.store.version)
        self._thread.ask(self._renewal)
        self._prefetch(range(self.layout.num_layers))

    def acquire(self, layer: int) -> Fetched:
        """The weights of a layer, when they are there; every acquire is followed by its release.

        DeadlineError names the owner who has not published them, or the member of the group who has no copies yet.
        RuntimeError where all buffers are in use."""
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
        for arrived in self._renewal.arrived[layer : layer + 1]:  # none where none are kept
            arrived.join()
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
            self.store.kept_marks[layer].add()
            slot.users -= 1
            slot.released = next(self._clock)
        self._prefetch(_way(layer, self.layout.num_layers, backward, training))

    def close(self) -> None:
        """End the thread, behind the copies that the group's members may still read, for whose owners it waits. The
        store is refused from then on, since its memory may go."""
        self._thread.close()
        self.store.close()

    # ---- what autograd keeps of a buffer

    def place_of(self, layer: int, tensor: torch.Tensor) -> Place | None:
        """Where a tensor lies in a layer's buffer or among its kept copies; None for any other."""
        found = self._holding(layer)
        at = tensor.untyped_storage().data_ptr() + tensor.storage_offset() * tensor.element_size()
        for number, memory in enumerate((found.memory if found else None, self.store.kept)):
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
        memory = self.store.kept if number else slot.memory
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
        pieces = self.layout.pieces_by_layer(self.store.rank, layer, self.slice_bytes)
        slot.layer = layer
        slot.job = Pull(self.store.version, layer, [(slot.memory, pieces, slot.memory.marks)])
        self._thread.ask(slot.job)
        return slot

    def _wait(self, task: Task) -> None:
        """Until it is done. The thread's own waits, for owners and for their copies, end before this one."""
        started, limit = time.monotonic(), 3 * self.store.timeout_s
        if not task.ready.wait(limit):
            raise self.store.fail(
                DeadlineError(
                    f"rank {self.store.rank} waited {limit:g} s for its own copying thread",
                    site="weights are pulled",
                    rank=self.store.rank,
                    waited_s=limit,
                )
            )
        self.statistics.waited_s += time.monotonic() - started
        if task.error is not None:
            raise task.error

    def _fetched(self, layer: int, slot: _Slot) -> Fetched:
        lay = self.layout
        kept, fetched = [], []
        for n, shape in enumerate(lay.shapes):
            num_kept = lay.kept(self.store.rank)
            kept.append(self.store.kept.tensor(lay.kept_at(layer, n), (num_kept, *shape), lay.dtype))
            fetched.append(slot.memory.tensor(lay.stack_at(lay.fetched, n), (lay.fetched, *shape), lay.dtype))
        return Fetched(kept, fetched)


def _way(layer: int, num_layers: int, backward: bool, training: bool) -> Iterator[int]:
    """The layers that will be used after one: to and fro in training, round and round else."""
    if not training:
        return ((layer + i) % num_layers for i in itertools.count(1))
    forth, back = range(num_layers), range(num_layers - 1, -1, -1)
    rest = back[num_layers - layer :] if backward else forth[layer + 1 :]
    return itertools.chain(rest, forth if backward else back, back if backward else forth)
