"""ExpertStore: registered memory in which each rank's own experts lie for the others to read.

Ranks tell one another by five counters in that memory, and by nothing else: no collective, no message.

    weights     the owner writes version v ── PUBLISHED = v ─► others pull it, as often as they like ── READ = v ─►
                the owner may write v + 1
    copies      where a group holds all experts, and is not all ranks: owners' PUBLISHED ─► each member pulls the copies
                that it keeps, layer by layer ── KEPT = so many layers ─► members pull those, too ── READ = v ─► the
                member may publish v + 1, and so pull other copies over these
    gradients   every rank sums its own, fp32, for all other homes ── GIVEN = g ─► homes add those of the ranks in
                ascending order ── TAKEN = g ─► the rank may begin anew

A rank that is late delays nobody who reads its weights, which lie there; it is waited for where gradients go home. On a
GPU a rank stores its counters behind its own work, in the order of streams, and it is the host of the other that reads
them: nothing on a device waits for another rank (machine.py, device_memory.py)."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch

from hybrid_ep.errors import BufferFailedError, DeadlineError, HybridEPError
from hybrid_ep.runtime import validation
from hybrid_ep.runtime.bootstrap import GroupView, Rendezvous, agree, open_segments
from hybrid_ep.runtime.options import seconds
from hybrid_ep.weights import layout as places
from hybrid_ep.weights import machine

if TYPE_CHECKING:
    import torch.distributed as dist

    from hybrid_ep.runtime.signatures import GroupLike
    from hybrid_ep.weights.layout import WeightLayout
    from hybrid_ep.weights.machine import Buffer, Incoming, Registered, Verdict

_SAMPLES = 64  # elements of a matrix stack that are compared with what was published
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 2e-5, 2e-3


class ExpertStore:
    """The experts of all layers of a group of ranks that map each other's memory: those of a host, or GPUs of a host or
    an NVLink domain.

    group: torch process group, or what stands for one (`GroupView.of`). layout: the same on every rank. timeout_s: of
    every wait, `HYBRID_EP_TIMEOUT_S` when None. executor: whose memory the weights lie in, chosen as for
    HybridEPBuffer: the host's, or with "cuda" that of the current device. Collective, through the group's store. Raises
    ValueError where layouts or executors differ, the group has another size, or GPUs do not reach
    each other; BootstrapError where ranks are missing; MemoryError where there is no room.

    On a GPU calls work on the caller's current stream, in its order, and may be made on several. CUDA graphs cannot
    hold them.

    version: of the weights that are published, 0 before the first. memory: the machine (`machine.Machine`). kept,
    kept_marks: where copies of others' experts lie (`WeightLayout.kept_at`), and what touches those of each layer.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | GroupLike,
        layout: WeightLayout,
        *,
        timeout_s: float | None = None,
        executor: str | None = None,
    ) -> None:
        view = GroupView.of(group)
        self.rank, self.layout = view.rank, layout
        try:
            if not isinstance(layout, places.WeightLayout):
                raise ValueError(f"layout={layout!r} must be a hybrid_ep.weights.WeightLayout")
            self.timeout_s = seconds(timeout_s)
        except Exception as error:  # the others hear of it, and count this set-up as this rank does
            Rendezvous(view, 0.0).refuse("layout", error)
            raise
        self._meet = meet = Rendezvous(view, self.timeout_s)
        try:
            if layout.num_ranks != view.size:
                raise ValueError(
                    f"layout.num_ranks={layout.num_ranks} must be the {view.size} ranks of group {view.name!r}"
                )
            executor, self.memory = machine.choose(executor, view)
        except Exception as error:
            meet.refuse("layout", error)
            raise
        agree(meet.exchange("layout", {"layout": repr(layout), "executor": executor}), "ExpertStore")
        self.memory.meet(meet)
        what = "own experts and copies of others'" if layout.copies_are_read else "own experts"
        self.shared = self._opened(0, layout.registered_bytes, what)
        self.kept: Buffer = (
            self.shared if layout.copies_are_read else self.memory.buffer(max(layout.kept_bytes, places.LINE))
        )
        self.kept_marks = [self.memory.marks() for _ in range(layout.num_layers)]
        for marks in self.kept_marks:
            marks.take(self.kept.marks)
        self._readers = layout.readers(self.rank)
        self._outboxes: Registered | None = None  # once there are gradients
        self.version = self._given = 0
        self._touched: set[int] = set()  # layers with gradients of the step under way
        self._own_marks, self._outbox_marks = self.memory.marks(), self.memory.marks()
        self._checks: deque[tuple[int, Verdict]] = deque()  # whose outcome is not known yet
        self._failed: HybridEPError | None = None
        self._closed = False
        self.closing = threading.Event()  # ends the waits of other threads

    # ---- weights

    def publish(self, weights: Sequence[Sequence[torch.Tensor]]) -> None:
        """Show the others this rank's experts: weights[layer][n] is `[own experts, *shapes[n]]`.

        Every rank calls it, each as soon as it has read the version before for the last time; it waits until those that
        read this rank's memory, its experts or its copies, have, too. DeadlineError names a rank that has not.
        ValueError for weights of other shapes."""
        self.check_usable()
        own, lay = self.layout.own(self.rank), self.layout
        weights = _listed(
            "weights", weights, f"{lay.num_layers} layers of a tensor for each of {len(lay.shapes)} matrices"
        )
        wanted = [[(own, *shape) for shape in self.layout.shapes]] * self.layout.num_layers
        given = [[tuple(stack.shape) for stack in layer] for layer in weights]
        if given != wanted or any(stack.dtype != self.layout.dtype for layer in weights for stack in layer):
            raise ValueError(
                f"weights must be {self.layout.num_layers} layers of {self.layout.dtype} {wanted[0]}, not "
                f"{[[stack.dtype for stack in layer] for layer in weights][:1]} {given}"
            )
        self._require_here("weights", [stack for layer in weights for stack in layer])
        self._raise_changed(all_of_them=True)
        self.memory.pulls.tell_behind(self.shared, places.READ, self.version, [self.memory.keeping])
        self.wait(places.READ, self.version, "weights are still read by", self._readers)
        self._own_marks.join()
        with torch.no_grad():
            for layer, stacks in enumerate(weights):
                for n, stack in enumerate(stacks):
                    self._own(layer, n).copy_(stack)
        self._own_marks.add()
        self.version += 1
        self.shared.tell(places.PUBLISHED, self.version)

    def _own(self, layer: int, n: int) -> torch.Tensor:
        shape = (self.layout.own(self.rank), *self.layout.shapes[n])
        return self.shared.tensor(self.layout.own_at(layer, n), shape, self.layout.dtype)

    def _require_here(self, name: str, given: Sequence[torch.Tensor]) -> None:
        for one in given:
            if one.device != self.memory.device:
                raise ValueError(
                    f"{name} lie on {one.device}, and this store's memory is on {self.memory.device}: give them there, "
                    "or make the store with the executor of their device (executor=, HYBRID_EP_EXECUTOR)"
                )

    def check_unchanged(self, layer: int, weights: Sequence[torch.Tensor]) -> None:
        """RuntimeError where this rank's weights are not those that the others read. Looks at some elements of each
        matrix: an optimizer changes nearly all. On a GPU the host does not wait for them: a later call raises, at the
        latest `publish` or `bring_home`."""
        bits = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[self.layout.dtype.itemsize]
        pairs = []
        self._own_marks.join()
        for n, stack in enumerate(weights):
            now, shown = (t.detach().reshape(-1) for t in (stack, self._own(layer, n)))
            step = max(1, now.numel() // _SAMPLES)
            pairs.append((now[::step].view(bits), shown[::step].view(bits)))
        self._checks.append((layer, self.memory.compare(pairs)))
        self._own_marks.add()
        self._raise_changed()

    def _raise_changed(self, all_of_them: bool = False) -> None:
        """Of checks whose outcome is known, or of all: then this rank's own device is waited for."""
        while self._checks:
            layer, verdict = self._checks[0]
            if all_of_them:
                self._await_own(verdict)
            elif not verdict.is_known():
                return
            self._checks.popleft()
            if verdict.differs():
                self._checks.clear()
                raise RuntimeError(
                    f"the weights of layer {layer} on rank {self.rank} have changed since they were published, and the "
                    "other ranks still compute with the old ones: publish on every rank after an optimizer's step or "
                    "after loading"
                )

    def _await_own(self, verdict: Verdict) -> None:
        started = time.monotonic()
        while not verdict.is_known():
            if (waited := time.monotonic() - started) > self.timeout_s:
                what = "weights are compared"
                raise self.fail(
                    DeadlineError(
                        f"{what}: rank {self.rank} waited {waited:.1f} s for its own stream, whose work before that "
                        "does not end",
                        site=what,
                        rank=self.rank,
                        waited_s=waited,
                    )
                )
            time.sleep(_FIRST_PAUSE_S)

    # ---- gradients

    @property
    def takes_gradients(self) -> bool:
        return self._outboxes is not None

    def open_gradients(self) -> None:
        """Register the memory for gradients, where there is none yet; evaluation needs none. Collective, through the
        group's store. MemoryError where there is no room for it."""
        self.check_usable()
        if self._outboxes is None:
            self._outboxes = self._opened(
                1,
                self.layout.gradient_bytes,
                "gradients of other owners' experts, in fp32",
                self.layout.staging_bytes(self.rank),
            )

    def _opened(self, generation: int, num_bytes: int, what: str, staging_bytes: int = 0) -> Registered:
        """Memory of everybody. MemoryError says what does not fit, and what would be less."""
        maker = self.memory.segments()
        try:
            return open_segments(
                self._meet,
                maker,
                generation,
                num_bytes,
                lambda segments: self.memory.over(maker, segments, staging_bytes),
            )
        except MemoryError as error:
            raise MemoryError(
                f"{num_bytes >> 20} MiB a rank for {what} of {self.layout.num_layers} layers {self.memory.no_room}"
            ) from error

    def add_gradients(self, layer: int, gradients: Sequence[Sequence[torch.Tensor]]) -> None:
        """Add this rank's gradients of a layer's other experts to what goes home at the end of the step.

        gradients[n]: stacks of matrix n, the experts in this rank's order from the first that is not its own; together
        `[E - own, *shapes[n]]`. Summed in fp32, in the order of the calls. ValueError, before anything is added, for
        another layer, number of matrices or shape, and for what is no dense tensor."""
        self.check_usable()
        gradients = _listed("gradients", gradients, f"the stacks of each of {len(self.layout.shapes)} matrices")
        self._check_gradients(layer, gradients)
        self._require_here("gradients", [stack for stacks in gradients for stack in stacks])
        if not self._touched:
            self.wait(places.TAKEN, self._given, "gradients are still taken home by")
        self._outbox_marks.join()
        for n, stacks in enumerate(gradients):
            total, at = self._outgoing(layer, n), 0
            for stack in stacks:
                for begin, end, there in self.layout.homeward(self.rank, at, at + len(stack)):
                    part, given = total[there : there + end - begin], stack[begin - at : end - at]
                    part.add_(given) if layer in self._touched else part.copy_(given)
                at += len(stack)
        self._outbox_marks.add()
        self._touched.add(layer)

    def drop_gradients(self) -> None:
        """Forget what `add_gradients` has added since the last `bring_home`, of a step that was given up. Every rank
        calls it, or none; it waits for nobody."""
        self._touched.clear()

    def _check_gradients(self, layer: int, gradients: Sequence[Sequence[torch.Tensor]]) -> None:
        lay, others = self.layout, self.layout.num_experts - self.layout.own(self.rank)
        validation.integer("layer", layer, 0, "give a layer of this store", lay.num_layers - 1)
        if len(gradients) != len(lay.shapes):
            raise ValueError(f"gradients has {len(gradients)} matrices; give the stacks of all {len(lay.shapes)}")
        for n, (stacks, shape) in enumerate(zip(gradients, lay.shapes, strict=True)):
            if wrong := [tuple(stack.shape) for stack in stacks if tuple(stack.shape[1:]) != tuple(shape)]:
                raise ValueError(f"gradients[{n}] has a stack {wrong[0]}; give [experts, {', '.join(map(str, shape))}]")
            if (count := sum(len(stack) for stack in stacks)) != others:
                raise ValueError(f"gradients[{n}] has {count} experts; give the {others} that are not this rank's own")

    def _outboxes_open(self) -> Registered:
        if self._outboxes is None:
            raise RuntimeError("there is no memory for gradients: call open_gradients on every rank")
        return self._outboxes

    def _outgoing(self, layer: int, n: int) -> torch.Tensor:
        shape = (self.layout.num_experts - self.layout.own(self.rank), *self.layout.shapes[n])
        return self._outboxes_open().tensor(self.layout.gradient_at(layer, n), shape, torch.float32)

    def bring_home(self, add: Callable[[int, int, list[torch.Tensor]], None]) -> None:
        """Take home the gradients of this rank's experts: add(layer, n, parts) for every layer and matrix, a part
        fp32 `[own experts, *shapes[n]]` of every other rank, ascending. They are those ranks' memory, or on a GPU a
        copy that later ones overwrite, in the order of the current stream: do not keep them.

        Every rank calls it once a step, before gradients are reduced over data-parallel ranks, and waits for each other
        one to come. DeadlineError names the one that does not."""
        self.check_usable()
        self._raise_changed(all_of_them=True)
        if not self._touched:
            self.wait(places.TAKEN, self._given, "gradients are still taken home by")
        self._outbox_marks.join()
        for layer in set(range(self.layout.num_layers)) - self._touched:
            for n in range(len(self.layout.shapes)):
                self._outgoing(layer, n).zero_()
        self._outbox_marks.add()
        self._touched.clear()
        self._given += 1
        self.shared.tell(places.GIVEN, self._given)
        self.wait(places.GIVEN, self._given, "gradients come late from")
        which = [(layer, n) for layer in range(self.layout.num_layers) for n in range(len(self.layout.shapes))]
        found: Iterator[list[torch.Tensor]] = self.memory.incoming(
            self._outboxes_open(), [self._coming(layer, n) for layer, n in which]
        )
        try:
            for (layer, n), parts in zip(which, found, strict=True):
                add(layer, n, parts)
        except BaseException as error:  # some gradients are home, others never will be
            self.fail(BufferFailedError(f"bring_home ended half-way: {type(error).__name__}: {error}"))
            raise
        self.memory.homeward.tell_behind(self.shared, places.TAKEN, self._given)

    def _coming(self, layer: int, n: int) -> Incoming:
        """What the other ranks have for this one."""
        lay, parts = self.layout, []
        for rank in range(lay.num_ranks):
            if rank != self.rank:
                position = (lay.first(self.rank) - lay.first(rank)) % lay.num_experts - lay.own(rank)
                parts.append((rank, lay.gradient_at(layer, n) + position * lay.expert_bytes(n, 4)))
        return (lay.own(self.rank), *lay.shapes[n]), parts

    # ---- waits

    @property
    def is_usable(self) -> bool:
        return self._failed is None

    def check_usable(self) -> None:
        """BufferFailedError after a wait that failed, or `close`."""
        if self._failed is not None:
            raise BufferFailedError(f"this store of expert weights failed before: {self._failed}") from self._failed

    def wait(
        self,
        counter: int,
        value: int,
        what: str,
        ranks: Sequence[int] | None = None,
        given_up: Callable[[], bool] | None = None,
    ) -> None:
        """Until the counter of all ranks (of `ranks`) has come to the value. DeadlineError names one that has not.
        BufferFailedError when it is given up, by default when the store is closed."""
        given_up = self.closing.is_set if given_up is None else given_up
        started, pause = time.monotonic(), _FIRST_PAUSE_S
        for rank in range(self.layout.num_ranks) if ranks is None else ranks:
            while (seen := self.shared.seen(rank, counter, value)) is None or seen < value:
                waited = time.monotonic() - started
                if given_up():
                    raise BufferFailedError("this store of expert weights was closed while a wait was under way")
                if waited > self.timeout_s:
                    raise self.fail(
                        DeadlineError(
                            f"{what} rank {rank}: rank {self.rank} waited {waited:.1f} s of {self.timeout_s:g} s for "
                            f"step {value} and saw {'nothing yet' if seen is None else seen}; rank {rank} has ended, "
                            "hangs, or calls something else",
                            site=what,
                            rank=self.rank,
                            peer=rank,
                            expected=value,
                            seen=seen or 0,
                            waited_s=waited,
                        )
                    )
                time.sleep(pause)
                pause = min(pause * 1.5, _LONGEST_PAUSE_S)

    def fail(self, error: HybridEPError) -> HybridEPError:
        """Refuse further use: ranks are out of step. Returns the error, for raising."""
        self._failed = self._failed or error
        return error

    def refuse(self) -> None:
        """End the waits of other threads and refuse further use."""
        self.fail(BufferFailedError("closed"))
        self.closing.set()

    def close(self) -> None:
        """`refuse`, and give the memory back: on a host when nothing refers to it, on a GPU when its work is done. Once
        no thread of a prefetcher pulls; may be called twice. Local."""
        self.refuse()
        registered = [one for one in (self.shared, self._outboxes) if one is not None]
        if not self._closed:
            self._closed = True
            self.memory.close(registered, [self._own_marks, self._outbox_marks, *self.kept_marks], self.timeout_s)


def _listed(name: str, given: Sequence[Sequence[torch.Tensor]], what: str) -> list[list[torch.Tensor]]:
    """Dense tensors in lists, for they are gone through several times, which a generator is not. ValueError."""
    try:
        listed = [list(stacks) for stacks in given]
    except TypeError:
        raise ValueError(f"{name} is {validation.describe(given)}; give {what}") from None
    for i, stacks in enumerate(listed):
        for n, stack in enumerate(stacks):
            if not isinstance(stack, torch.Tensor):
                raise ValueError(f"{name}[{i}][{n}] is {validation.describe(stack)}; give {what}")
            if stack.layout != torch.strided:
                raise ValueError(f"{name}[{i}][{n}] has layout {stack.layout}; give a dense tensor")
    return listed
