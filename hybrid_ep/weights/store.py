"""ExpertStore: registered memory in which each rank's own experts lie for the others to read.

Ranks tell one another by four counters in that memory, and by nothing else: no collective, no message.

    weights     the owner writes version v ── PUBLISHED = v ─► others pull it, as often as they like ── READ = v ─►
                the owner may write v + 1
    gradients   every rank sums its own, fp32, for all other homes ── GIVEN = g ─► homes add those of the ranks in
                ascending order ── TAKEN = g ─► the rank may begin anew

A rank that is late delays nobody who reads its weights, which lie there; it is waited for where gradients go home."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from hybrid_ep import env
from hybrid_ep.errors import BufferFailedError, DeadlineError, HybridEPError
from hybrid_ep.runtime.bootstrap import GroupView, Rendezvous, agree, open_segments
from hybrid_ep.weights import layout as places

if TYPE_CHECKING:
    import torch.distributed as dist

    from hybrid_ep import _core
    from hybrid_ep.runtime.signatures import GroupLike
    from hybrid_ep.weights.layout import WeightLayout

_SAMPLES = 64  # elements of a matrix stack that are compared with what was published
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 2e-5, 2e-3


class ExpertStore:
    """The experts of all layers of a group of ranks on one host.

    group: torch process group, or what stands for one (`GroupView.of`). layout: the same on every rank. timeout_s: of
    every wait, `HYBRID_EP_TIMEOUT_S` when None. Collective, through the group's store. Raises ValueError where layouts
    differ or the group has another size, BootstrapError where ranks are missing, MemoryError where /dev/shm is full.

    version: of the weights that are published, 0 before the first.
    """

    def __init__(
        self, group: dist.ProcessGroup | GroupLike, layout: WeightLayout, *, timeout_s: float | None = None
    ) -> None:
        view = GroupView.of(group)
        self.rank, self.layout = view.rank, layout
        self.timeout_s = float(env.get("HYBRID_EP_TIMEOUT_S") if timeout_s is None else timeout_s)
        if not 0 < self.timeout_s < float("inf"):
            raise ValueError(f"timeout_s={timeout_s} must be seconds above 0")
        self._view, self._meet = view, (meet := Rendezvous(view, self.timeout_s))
        try:
            if layout.num_ranks != view.size:
                raise ValueError(
                    f"layout.num_ranks={layout.num_ranks} must be the {view.size} ranks of group {view.name!r}"
                )
        except ValueError as error:
            meet.refuse("layout", error)
            raise
        agree([{"layout": said} for said in meet.exchange("layout", repr(layout))], "ExpertStore")
        self.segments = self._opened(0, layout.registered_bytes, "own experts")
        self._outboxes: list[_core.Segment] = []  # of all ranks, once there are gradients
        self.version = self._given = 0
        self._touched: set[int] = set()  # layers with gradients of the step under way
        self._failed: HybridEPError | None = None
        self.closing = threading.Event()  # ends the waits of other threads

    # ---- weights

    def publish(self, weights: Sequence[Sequence[torch.Tensor]]) -> None:
        """Show the others this rank's experts: weights[layer][n] is `[own experts, *shapes[n]]`.

        Every rank calls it, each as soon as it has read the version before for the last time; it waits until the others
        have, too. DeadlineError names a rank that has not. ValueError for weights of other shapes."""
        self.check_usable()
        own = self.layout.own(self.rank)
        wanted = [[(own, *shape) for shape in self.layout.shapes]] * self.layout.num_layers
        given = [[tuple(stack.shape) for stack in layer] for layer in weights]
        if given != wanted or any(stack.dtype != self.layout.dtype for layer in weights for stack in layer):
            raise ValueError(
                f"weights must be {self.layout.num_layers} layers of {self.layout.dtype} {wanted[0]}, not "
                f"{[[stack.dtype for stack in layer] for layer in weights][:1]} {given}"
            )
        self.segments[self.rank].publish(places.READ, self.version)
        self.wait(places.READ, self.version, "weights are still read by")
        with torch.no_grad():
            for layer, stacks in enumerate(weights):
                for n, stack in enumerate(stacks):
                    self._own(layer, n).copy_(stack)
        self.version += 1
        self.segments[self.rank].publish(places.PUBLISHED, self.version)

    def _own(self, layer: int, n: int) -> torch.Tensor:
        shape = (self.layout.own(self.rank), *self.layout.shapes[n])
        return region(self.segments[self.rank], self.layout.own_at(layer, n), shape, self.layout.dtype)

    def check_unchanged(self, layer: int, weights: Sequence[torch.Tensor]) -> None:
        """RuntimeError where this rank's weights are not those that the others read. Looks at some elements of each
        matrix: an optimizer changes nearly all."""
        bits = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[self.layout.dtype.itemsize]
        for n, stack in enumerate(weights):
            now, shown = (t.detach().reshape(-1) for t in (stack, self._own(layer, n)))
            step = max(1, now.numel() // _SAMPLES)
            if not torch.equal(now[::step].view(bits), shown[::step].view(bits)):
                raise RuntimeError(
                    f"the weights of layer {layer} on rank {self.rank} have changed since they were published, and the "
                    "other ranks still compute with the old ones: publish on every rank after an optimizer's step or "
                    "after loading"
                )

    # ---- gradients

    @property
    def takes_gradients(self) -> bool:
        return bool(self._outboxes)

    def open_gradients(self) -> None:
        """Register the memory for gradients, where there is none yet; evaluation needs none. Collective, through the
        group's store. MemoryError where /dev/shm is full."""
        self.check_usable()
        if not self._outboxes:
            self._outboxes = self._opened(1, self.layout.gradient_bytes, "gradients of other owners' experts, in fp32")

    def _opened(self, generation: int, num_bytes: int, what: str) -> list[_core.Segment]:
        """Everybody's segment. MemoryError says what does not fit, and what would be less."""
        try:
            return open_segments(self._meet, self._view.segments, generation, num_bytes, lambda segments: segments)
        except MemoryError as error:
            raise MemoryError(
                f"{num_bytes >> 20} MiB a rank for {what} of {self.layout.num_layers} layers do not fit into /dev/shm: "
                "enlarge it (mount -o remount,size=16g /dev/shm, docker run --shm-size=16g), give more pipeline "
                "stages or ranks, or move tokens"
            ) from error

    def add_gradients(self, layer: int, gradients: Sequence[Sequence[torch.Tensor]]) -> None:
        """Add this rank's gradients of a layer's other experts to what goes home at the end of the step.

        gradients[n]: stacks of matrix n, the experts in this rank's order from the first that is not its own; together
        `[E - own, *shapes[n]]`. Summed in fp32, in the order of the calls."""
        if not self._touched:
            self.wait(places.TAKEN, self._given, "gradients are still taken home by")
        for n, stacks in enumerate(gradients):
            total, at = self._outgoing(layer, n), 0
            for stack in stacks:
                part = total[at : at + len(stack)]
                part.add_(stack) if layer in self._touched else part.copy_(stack)
                at += len(stack)
            if at != len(total):
                raise ValueError(f"gradients[{n}] has {at} experts; give the {len(total)} that are not this rank's own")
        self._touched.add(layer)

    def _outgoing(self, layer: int, n: int) -> torch.Tensor:
        if not self._outboxes:
            raise RuntimeError("there is no memory for gradients: call open_gradients on every rank")
        shape = (self.layout.num_experts - self.layout.own(self.rank), *self.layout.shapes[n])
        return region(self._outboxes[self.rank], self.layout.gradient_at(layer, n), shape, torch.float32)

    def bring_home(self, add: Callable[[int, int, list[torch.Tensor]], None]) -> None:
        """Take home the gradients of this rank's experts: add(layer, n, parts) for every layer and matrix, a part
        fp32 `[own experts, *shapes[n]]` of every other rank, ascending. They are those ranks' memory: do not keep them.

        Every rank calls it once a step, before gradients are reduced over data-parallel ranks, and waits for each other
        one to come. DeadlineError names the one that does not."""
        self.check_usable()
        if not self._touched:
            self.wait(places.TAKEN, self._given, "gradients are still taken home by")
        for layer in set(range(self.layout.num_layers)) - self._touched:
            for n in range(len(self.layout.shapes)):
                self._outgoing(layer, n).zero_()
        self._touched.clear()
        self._given += 1
        self.segments[self.rank].publish(places.GIVEN, self._given)
        self.wait(places.GIVEN, self._given, "gradients come late from")
        lay, others = self.layout, [rank for rank in range(self.layout.num_ranks) if rank != self.rank]
        for layer in range(lay.num_layers):
            for n in range(len(lay.shapes)):
                add(layer, n, [self._coming(rank, layer, n) for rank in others])
        self.segments[self.rank].publish(places.TAKEN, self._given)

    def _coming(self, rank: int, layer: int, n: int) -> torch.Tensor:
        """What another rank has for this one."""
        lay = self.layout
        position = (lay.first(self.rank) - lay.first(rank)) % lay.num_experts - lay.own(rank)
        at = lay.gradient_at(layer, n) + position * lay.expert_bytes(n, 4)
        return region(self._outboxes[rank], at, (lay.own(self.rank), *lay.shapes[n]), torch.float32)

    # ---- waits

    def check_usable(self) -> None:
        """BufferFailedError after a wait that failed, or `close`."""
        if self._failed is not None:
            raise BufferFailedError(f"this store of expert weights failed before: {self._failed}") from self._failed

    def wait(self, counter: int, value: int, what: str, ranks: Sequence[int] | None = None) -> None:
        """Until the counter of all ranks (of `ranks`) has come to the value. DeadlineError names one that has not."""
        started, pause = time.monotonic(), _FIRST_PAUSE_S
        for rank in range(self.layout.num_ranks) if ranks is None else ranks:
            while (seen := self.segments[rank].observe(counter)) < value:
                waited = time.monotonic() - started
                if self.closing.is_set():
                    raise BufferFailedError("this store of expert weights was closed while a wait was under way")
                if waited > self.timeout_s:
                    raise self.fail(
                        DeadlineError(
                            f"{what} rank {rank}: rank {self.rank} waited {waited:.1f} s of {self.timeout_s:g} s for "
                            f"step {value} and saw {seen}; rank {rank} has ended, hangs, or calls something else",
                            site=what,
                            rank=self.rank,
                            peer=rank,
                            expected=value,
                            seen=seen,
                            waited_s=waited,
                        )
                    )
                time.sleep(pause)
                pause = min(pause * 1.5, _LONGEST_PAUSE_S)

    def fail(self, error: HybridEPError) -> HybridEPError:
        """Refuse further use: ranks are out of step. Returns the error, for raising."""
        self._failed = self._failed or error
        return error

    def close(self) -> None:
        """End the waits of other threads and refuse further use; the memory goes when nothing refers to it."""
        self.fail(BufferFailedError("closed"))
        self.closing.set()


def region(segment: _core.Segment, at: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Bytes of a segment from `at` on as a tensor, which keeps the segment."""
    count = 1
    for length in shape:
        count *= length
    if count == 0:
        return torch.empty(tuple(shape), dtype=dtype, device="cpu")
    return torch.frombuffer(segment, dtype=dtype, count=count, offset=at).view(tuple(shape))
