"""What weights that travel ask of the machine that their memory lies in. host_memory.py is one, for ranks of one host:
shared memory, a thread that copies. device_memory.py is the other, for GPUs that map each other's memory: copy engines,
streams and events.

Work of torch's may run beside the host. So whoever touches memory leaves a mark of it, the stream's work so far, and
whoever touches the memory next, on another stream, has that stream wait for the marks. On a host there is nothing to
wait for: what a call does is done when it returns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch

from hybrid_ep.runtime import nvshmem, options
from hybrid_ep.weights.device_memory import DeviceMemory
from hybrid_ep.weights.host_memory import HostMemory

if TYPE_CHECKING:
    from hybrid_ep import _core
    from hybrid_ep.runtime.bootstrap import GroupView, Rendezvous
    from hybrid_ep.runtime.signatures import Segments
    from hybrid_ep.weights.layout import Piece


class Marks(Protocol):
    """How far streams have come with some memory."""

    def add(self) -> None:
        """What the current stream has so far."""

    def take(self, others: Any) -> None:
        """Those of other marks, too."""

    def join(self) -> None:
        """The current stream waits for them; the host does not."""

    def passed(self) -> bool:
        """Whether all of that work is done."""


class Buffer(Protocol):
    """Memory of this rank. marks: of all that touches it."""

    address: int
    num_bytes: int
    marks: Any

    def tensor(self, at: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Over the bytes from `at` on, for work of the current stream. It keeps the memory."""


class Registered(Buffer, Protocol):
    """A segment of every rank, mapped by all; as a Buffer this rank's own."""

    def tell(self, counter: int, value: int) -> None:
        """This rank's counter has come to the value, behind all that the current stream holds."""

    def seen(self, rank: int, counter: int, wanted: int) -> int | None:
        """Where a rank's counter is, or some value from `wanted` on; None: it cannot be read yet. Ranks see what the
        other wrote before it told."""


Work = Sequence[tuple[Any, Sequence["Piece"], Any]]  # into which Buffer, what, and the marks of its bytes


class Pulls(Protocol):
    """Copies out of other ranks' memory, in the order of the calls."""

    def pull(self, sources: Any, work: Work) -> Marks:
        """Begin them, each behind the marks of what it overwrites, which then have it, too. Marks of these alone."""

    def tell_behind(self, registered: Any, counter: int, value: int, others: Sequence[Any] = ()) -> None:
        """`Registered.tell`, behind all pulls so far, and those of others."""


class Verdict(Protocol):
    """What came of a comparison."""

    def is_known(self) -> bool: ...

    def differs(self) -> bool:
        """Once it is known."""


class Machine(Protocol):
    """device: where tensors lie. pulls, keeping, homeward: of layers' weights, of copies that are kept, of gradients;
    none is behind another. no_room: what to say where memory does not suffice, and what would help."""

    device: torch.device
    no_room: str
    pulls: Any
    keeping: Any
    homeward: Any

    def meet(self, meet: Rendezvous) -> None:
        """Once the ranks have agreed on the machine, collective: how they map each other's memory. ValueError, on all
        ranks alike, where they cannot."""

    def segments(self) -> Segments:
        """What makes and maps segments of one kind of content."""

    def over(self, maker: Any, found: list[_core.Segment], staging_bytes: int = 0) -> Registered:
        """Mapped segments, by rank. staging_bytes: that one stack of `incoming` takes at most."""

    def buffer(self, num_bytes: int) -> Buffer: ...

    def marks(self) -> Marks: ...

    def compare(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Verdict:
        """Whether any of the pairs differ; equal in shape and dtype, integers."""

    def incoming(self, sources: Any, stacks: Sequence[Incoming]) -> Iterator[list[torch.Tensor]]:
        """Each stack's parts, fp32, in the order of its places, for work of the current stream that is begun before the
        next stack is asked for."""

    def close(self, registered: Sequence[Any], marks: Sequence[Any], timeout_s: float) -> None:
        """Nobody begins anything with the registered memory any more; it goes when what was begun is done."""


Incoming = tuple[Sequence[int], Sequence[tuple[int, int]]]  # a part's shape; of each part its rank, and where it lies


def choose(executor: str | None, view: GroupView) -> tuple[str, Machine]:
    """The executor's name, as HybridEPBuffer takes it, and its machine. ValueError where it cannot be used here."""
    if executor == nvshmem.EXECUTOR:
        raise ValueError(
            f"executor={executor!r}: weights that travel are pulled out of memory that ranks map, and NVSHMEM's heap "
            "is not; give 'cuda'"
        )
    name, device = options.machine(options.asked_executor(executor, view))
    return name, HostMemory(view) if device.type == "cpu" else DeviceMemory(view, device)
