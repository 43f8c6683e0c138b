"""The thread that copies: layers that were asked for, in their order, and between them the copies that this rank keeps.

    publish v ─► copies of layer 0 ► layer 0 ► copies of layer 1 ► layer 1 ► copies of 2, 3, ... in between
                 └─► KEPT, for the members of the group, who read them there

Copies come in ascending order of layers on every rank, whether the rank uses those layers or not, and before a layer is
fetched this rank's own copies of it are there. So no ring of ranks waits for one another: who waits for the copies of
layer l has its own of layers 0 to l, and waits for somebody who waits for those of an earlier layer, if at all."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hybrid_ep.errors import BufferFailedError, HybridEPError
from hybrid_ep.weights import layout as places

if TYPE_CHECKING:
    from hybrid_ep.weights.machine import Marks, Work
    from hybrid_ep.weights.store import ExpertStore

_LOOK_S = 5e-4  # how often copies of a layer that are on their way are looked at before those of the next one begin


@dataclass
class Statistics:
    """Since the prefetcher was made. pulls: layers pulled; pulled_bytes: in all; kept_bytes: of them those of copies
    that are kept. hits: layers that were ready when they were acquired; late: those under way; missed: those that
    nobody had asked for. waited_s: for the latter two. copied_s: seconds of the copying thread. On a GPU the host is
    what waits and copies here: until a pull has begun, and for handing it to the engines."""

    pulls: int = 0
    pulled_bytes: int = 0
    kept_bytes: int = 0
    hits: int = 0
    late: int = 0
    missed: int = 0
    waited_s: float = 0.0
    copied_s: float = 0.0


@dataclass
class Task:
    """What the thread is asked for. ready: done, on a GPU begun; with an error where there is one."""

    version: int
    ready: threading.Event = field(default_factory=threading.Event, init=False)
    error: Exception | None = field(default=None, init=False)

    def end(self, error: Exception | None = None) -> None:
        self.error = error
        self.ready.set()


@dataclass
class Pull(Task):
    """A layer on its way into a buffer. arrived: the marks of its pull, once it is ready."""

    layer: int
    work: Work
    arrived: Marks | None = field(default=None, init=False)


@dataclass
class Renewal(Task):
    """Copies of a new version over those of the old one, which nobody reads any more. arrived: by layer, the marks of
    its pull, of as many as have begun."""

    arrived: list[Marks] = field(default_factory=list, init=False)


class CopyingThread:
    """Pulls for one rank of a store. slice_bytes: of a copy from one rank before the next one's turn."""

    def __init__(self, store: ExpertStore, slice_bytes: int) -> None:
        lay, rank = store.layout, store.rank
        self.statistics = Statistics()
        self._store, self._slice_bytes = store, slice_bytes
        self._kept_owners = sorted({run.source for run in lay.read_once(rank)})
        self._owners = lay.owners_fetched(rank)
        self._holders = sorted({run.source for run in lay.read_by_layer(rank) if run.kept})
        self._tasks: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
        self._renewal = Renewal(0)  # before anything was published there is nothing to do
        self._renewal.ready.set()
        self._published = 0  # the version that all owners of what is fetched have published
        self._finishes = False  # what others read, when it is ended
        self._thread = threading.Thread(target=self._run, daemon=True, name=f"weights of rank {rank}")
        self._thread.start()

    def ask(self, task: Task) -> None:
        self._tasks.put(task)

    def close(self) -> None:
        """Refuse the store and end the thread. The group's members may still read this rank's copies: those come yet,
        unless the store has failed or an owner does not publish in time."""
        store = self._store
        self._finishes = self._finishes or (store.is_usable and store.layout.copies_are_read)
        store.refuse()
        self._tasks.put(None)
        self._thread.join(2 * store.timeout_s)

    def leave(self) -> None:
        """Nobody asks any more: the thread ends behind what it was asked for. The store stays as it is."""
        self._tasks.put(None)

    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def _run(self) -> None:
        while (task := self._next()) is not None:
            if isinstance(task, Renewal):
                self._renewal = task
                if not self._kept_owners:
                    task.end()
                continue
            assert isinstance(task, Pull)
            try:
                self._pull(task)
            except Exception as error:  # whoever waits for the layer raises it
                self._refuse(error)
                task.end(error)
            else:
                task.end()
        with contextlib.suppress(queue.Empty):
            while (left := self._tasks.get_nowait()) is not None:
                left.end(_closed())
        while not self._renewal.ready.is_set():
            self._keep_on() if self._finishes else self._renewal.end(_closed())

    def _next(self) -> Task | None:
        """The next task; while there is none, copies that are kept come."""
        while not self._renewal.ready.is_set():
            arrived = self._renewal.arrived
            idle = not arrived or arrived[-1].passed()
            with contextlib.suppress(queue.Empty):
                return self._tasks.get_nowait() if idle else self._tasks.get(timeout=_LOOK_S)
            if idle:
                self._keep_on()
        return self._tasks.get()

    def _keep_on(self) -> None:
        """Copies of the next layer; an error is raised by whoever waits for them."""
        with contextlib.suppress(Exception):
            self._keep()

    def _keep(self) -> None:
        renewal, store = self._renewal, self._store
        if renewal.error is not None:
            raise renewal.error
        try:
            layer = len(renewal.arrived)
            late = "weights are not published by"
            store.wait(places.PUBLISHED, renewal.version, late, self._kept_owners, self._given_up)
            pieces = store.layout.pieces_once(store.rank, layer, self._slice_bytes)
            started = time.monotonic()
            renewal.arrived.append(
                store.memory.keeping.pull(store.shared, [(store.kept, pieces, store.kept_marks[layer])])
            )
            if store.layout.copies_are_read:
                mark = store.layout.kept_mark(renewal.version, layer + 1)
                store.memory.keeping.tell_behind(store.shared, places.KEPT, mark)
        except Exception as error:
            self._refuse(error)
            renewal.end(error)
            raise
        num_bytes = sum(piece[3] for piece in pieces)
        self.statistics.copied_s += time.monotonic() - started
        self.statistics.pulled_bytes += num_bytes
        self.statistics.kept_bytes += num_bytes
        if layer + 1 == store.layout.num_layers:
            renewal.end()

    def _pull(self, task: Pull) -> None:
        store = self._store
        store.check_usable()
        while self._kept_owners and len(self._renewal.arrived) <= task.layer:
            self._keep()
        if self._published < task.version:
            # The owners of what holders keep are waited for, too: the one that is late is named, and not who waits
            # for it. Once a version, for those are out of the group.
            store.wait(places.PUBLISHED, task.version, "weights are not published by", self._owners)
            self._published = task.version
        mark = store.layout.kept_mark(task.version, task.layer + 1)
        store.wait(places.KEPT, mark, "copies of others' experts are not there yet on", self._holders)
        started = time.monotonic()
        task.arrived = store.memory.pulls.pull(store.shared, task.work)
        self.statistics.copied_s += time.monotonic() - started
        self.statistics.pulled_bytes += sum(piece[3] for _, pieces, _ in task.work for piece in pieces)
        self.statistics.pulls += 1

    def _given_up(self) -> bool:
        return self._store.closing.is_set() and not self._finishes

    def _refuse(self, error: Exception) -> None:
        if not isinstance(error, HybridEPError):  # of the device, of which nobody knows what it has done
            self._store.fail(BufferFailedError(f"pulling weights failed: {error}"))


def _closed() -> BufferFailedError:
    return BufferFailedError("this store of expert weights was closed")
