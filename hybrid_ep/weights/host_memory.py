"""Memory of ranks of one host: POSIX shared memory, copied by whoever asks. What a call does is done when it returns,
so that there are no marks to wait for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from hybrid_ep import _core

if TYPE_CHECKING:
    from hybrid_ep.runtime.bootstrap import GroupView, Rendezvous
    from hybrid_ep.runtime.signatures import Segments


class NoMarks:
    """Of memory that nobody touches behind the host's back."""

    def add(self) -> None: ...

    def take(self, others: Any) -> None: ...

    def join(self) -> None: ...

    def passed(self) -> bool:
        return True


_NONE = NoMarks()


class HostBuffer:
    """Memory that is pulled into."""

    marks = _NONE

    def __init__(self, segment: _core.Segment) -> None:
        self.segment = segment
        self.address, self.num_bytes = segment.address, segment.num_bytes

    def tensor(self, at: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return region(self.segment, at, shape, dtype)


class HostRegistered(HostBuffer):
    def __init__(self, segments: list[_core.Segment], rank: int) -> None:
        super().__init__(segments[rank])
        self.segments = segments

    def tell(self, counter: int, value: int) -> None:
        self.segment.publish(counter, value)

    def seen(self, rank: int, counter: int, wanted: int) -> int:
        return self.segments[rank].observe(counter)


class HostPulls:
    """Done when a call returns."""

    def pull(self, sources: HostRegistered, work: Any) -> NoMarks:
        for buffer, pieces, _ in work:
            buffer.segment.pull(sources.segments, pieces)
        return _NONE

    def tell_behind(self, registered: HostRegistered, counter: int, value: int, others: Sequence[Any] = ()) -> None:
        registered.tell(counter, value)


class Known:
    """A verdict that is there at once."""

    def __init__(self, differs: bool) -> None:
        self._differs = differs

    def is_known(self) -> bool:
        return True

    def differs(self) -> bool:
        return self._differs


class HostMemory:
    """See machine.Machine."""

    device = torch.device("cpu")
    no_room = (
        "do not fit into /dev/shm: enlarge it (mount -o remount,size=16g /dev/shm, docker run --shm-size=16g), give "
        "more pipeline stages or ranks, or move tokens"
    )

    def __init__(self, view: GroupView) -> None:
        self._view = view
        self.pulls = self.keeping = self.homeward = HostPulls()

    def meet(self, meet: Rendezvous) -> None: ...

    def segments(self) -> Segments:
        return self._view.segments

    def over(self, maker: Any, found: list[_core.Segment], staging_bytes: int = 0) -> HostRegistered:
        return HostRegistered(found, self._view.rank)

    def buffer(self, num_bytes: int) -> HostBuffer:
        return HostBuffer(_core.Segment.private(num_bytes))

    def marks(self) -> NoMarks:
        return _NONE

    def compare(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Known:
        return Known(not all(torch.equal(*pair) for pair in pairs))

    def incoming(self, sources: HostRegistered, stacks: Sequence[Any]) -> Iterator[list[torch.Tensor]]:
        """Parts are other ranks' memory: nothing is copied."""
        for shape, places in stacks:
            yield [region(sources.segments[rank], at, shape, torch.float32) for rank, at in places]

    def close(self, registered: Sequence[Any], marks: Sequence[Any], timeout_s: float) -> None:
        """It goes when nothing refers to it."""


def region(segment: _core.Segment, at: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Bytes of a segment from `at` on as a tensor, which keeps the segment."""
    count = 1
    for length in shape:
        count *= length
    if count == 0:
        return torch.empty(tuple(shape), dtype=dtype, device="cpu")
    return torch.frombuffer(segment, dtype=dtype, count=count, offset=at).view(tuple(shape))
