"""Memory of GPUs that map each other's: registered device memory, pulled by copy engines on streams that only copy.

No kernel and no stream waits for another rank. A rank stores its counters behind its own work, in stream order, and the
host of whoever waits for them reads them, with a deadline; then it hands the copies to the engines and goes on. From
there events order everything: copies begin behind the last use of what they overwrite, and the stream that computes
begins behind the copies.

Two streams copy, slice by slice in turn: an engine reads one source at a time, and where that is busy with other
readers, another engine goes on with another source. Copies that are kept come on streams of their own: behind a layer's
they would wait for this rank's compute, for whose buffer that layer waits, and other ranks for them."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from hybrid_ep import _core
from hybrid_ep.runtime import devices
from hybrid_ep.runtime.topology import Topology
from hybrid_ep.weights.layout import DEFAULT_SLICE_BYTES, Piece, in_turns, whole_lines

if TYPE_CHECKING:
    from hybrid_ep.runtime.bootstrap import GroupView, Rendezvous
    from hybrid_ep.weights.machine import Incoming, Work

_STREAMS = 2
_PATIENCE_S = 1e-3  # for a copy of eight bytes; whoever waits for a counter has a deadline of its own
_stuck: list[Any] = []  # what could not be given back, for it was in use for too long


class StreamMarks:
    """The last event of every stream that has touched some memory."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._events: dict[int, torch.cuda.Event] = {}

    def add(self, stream: torch.cuda.Stream | None = None) -> None:
        stream = stream or torch.cuda.current_stream(self._device)
        event = torch.cuda.Event()
        event.record(stream)
        self._events[stream.cuda_stream] = event

    def take(self, others: StreamMarks) -> None:
        self._events.update(others._events)

    def join(self, stream: torch.cuda.Stream | None = None) -> None:
        stream = stream or torch.cuda.current_stream(self._device)
        for handle, event in self._events.items():
            if handle != stream.cuda_stream:
                stream.wait_event(event)

    def passed(self) -> bool:
        return all(event.query() for event in self._events.values())


class CopyStreams:
    """Streams that only copy, and go in turn. torch has them for their events."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._copies = [_core.cuda.CopyStream() for _ in range(_STREAMS)]
        self.streams = [torch.cuda.ExternalStream(one.stream, device=device) for one in self._copies]

    def pull(self, sources: DeviceRegistered, work: Work) -> StreamMarks:
        began = StreamMarks(self._device)
        for buffer, pieces, marks in work:
            for n, (copies, stream) in enumerate(zip(self._copies, self.streams, strict=True)):
                marks.join(stream)
                copies.pull(buffer.address, buffer.num_bytes, sources.segments, pieces[n::_STREAMS])
        for stream in self.streams:
            began.add(stream)
        for _, _, marks in work:
            marks.take(began)
        return began

    def tell_behind(
        self, registered: DeviceRegistered, counter: int, value: int, others: Sequence[CopyStreams] = ()
    ) -> None:
        for one in (self, *others):
            one.so_far().join(self.streams[0])
        registered.tell(counter, value, self.streams[0])

    def so_far(self) -> StreamMarks:
        marks = StreamMarks(self._device)
        for stream in self.streams:
            marks.add(stream)
        return marks


class _Lent:
    """Registered memory as torch.as_tensor takes it, which keeps this object."""

    def __init__(self, segment: _core.Segment) -> None:
        self.segment = segment
        self.__cuda_array_interface__ = {
            "shape": (segment.num_bytes,),
            "typestr": "|u1",
            "data": (segment.address, False),
            "version": 3,
            "strides": None,
        }


class DeviceRegistered:
    """staging: two buffers, for what `DeviceMemory.incoming` has under way."""

    def __init__(
        self, memory: DeviceMemory, maker: Any, segments: list[_core.Segment], rank: int, staging: list[DeviceBuffer]
    ) -> None:
        self.segments, self.staging, self._maker = segments, staging, maker
        self._device, self._reader = memory.device, memory.reader
        self._own = segments[rank]
        self.address, self.num_bytes = self._own.address, self._own.num_bytes
        self.marks = StreamMarks(self._device)
        self._bytes = torch.as_tensor(_Lent(self._own), device=self._device)
        self._known: dict[tuple[int, int], int] = {}  # counters only grow

    def tensor(self, at: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return _view(self._bytes, at, shape, dtype)

    def tell(self, counter: int, value: int, stream: torch.cuda.Stream | None = None) -> None:
        stream = stream or torch.cuda.current_stream(self._device)
        with devices.on(self._device):
            _core.cuda.publish(self._own, counter, value, stream.cuda_stream)

    def seen(self, rank: int, counter: int, wanted: int) -> int | None:
        known = self._known.get((rank, counter))
        if known is None or known < wanted:
            now = self._reader.observe(self.segments[rank], counter, _PATIENCE_S)
            if now is None:
                return known
            known = self._known[rank, counter] = now
        return known

    def give_back(self) -> None:
        """Once nothing touches it."""
        self.segments, self.staging = [], []
        del self._own, self._bytes
        if hasattr(self._maker, "close"):  # of processes; threads find each other's segments by reference
            self._maker.close(False)


class DeviceBuffer:
    """Memory of torch's allocator, which copy streams write."""

    def __init__(self, num_bytes: int, device: torch.device, streams: Sequence[torch.cuda.Stream]) -> None:
        try:
            self._bytes = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        except torch.OutOfMemoryError as error:
            raise MemoryError(f"{num_bytes >> 20} MiB of buffers do not fit on {device}: {error}") from error
        self.address, self.num_bytes, self._device = self._bytes.data_ptr(), num_bytes, device
        self.marks = StreamMarks(device)
        self.marks.add()  # the block may be in use before, on this stream
        for stream in streams:
            self._bytes.record_stream(stream)

    def tensor(self, at: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        self._bytes.record_stream(torch.cuda.current_stream(self._device))
        return _view(self._bytes, at, shape, dtype)


class _Later:
    """A verdict that the current stream is on its way to."""

    def __init__(self, differs: torch.Tensor) -> None:
        self._differs = differs.to("cpu", non_blocking=True)  # pinned by torch
        self._event = torch.cuda.Event()
        self._event.record(torch.cuda.current_stream(differs.device))

    def is_known(self) -> bool:
        return self._event.query()

    def differs(self) -> bool:
        return bool(self._differs)


class DeviceMemory:
    """See machine.Machine. Of the CUDA device `device`, which is current. kind: of shared memory, among processes."""

    def __init__(self, view: GroupView, device: torch.device) -> None:
        self._view, self.device, self.kind = view, device, ""
        self.no_room = f"do not fit into the memory of {device}: give more pipeline stages or ranks, or move tokens"
        devices.enter(device)
        self.pulls, self.keeping, self.homeward = (CopyStreams(device) for _ in range(3))
        self.reader = _core.cuda.CounterReader()

    def meet(self, meet: Rendezvous) -> None:
        if self._view.virtual:
            return
        reach = devices.probe(meet, self.device)
        try:
            paths = devices.choose_paths(reach, Topology(self._view.rank, self._view.size, self._view.size))
        except RuntimeError as error:
            raise ValueError(
                f"weights that travel are pulled out of memory that all ranks of a group map, and those of group "
                f"{self._view.name!r} do not all reach each other's: {error}; give groups inside a host or an NVLink "
                "domain, or move tokens"
            ) from error
        assert paths.kind is not None  # of one node
        self.kind = paths.kind

    def segments(self) -> Any:
        devices.enter(self.device)
        if self._view.virtual:
            return self._view.segments.on_device()  # type: ignore[attr-defined]  # that is what makes it virtual
        return devices.DeviceSegments(self._view.store, self.kind, range(self._view.size))

    def over(self, maker: Any, found: list[_core.Segment], staging_bytes: int = 0) -> DeviceRegistered:
        staging = [self._buffer(staging_bytes, self.homeward.streams) for _ in range(2)] if staging_bytes else []
        return DeviceRegistered(self, maker, found, self._view.rank, staging)

    def buffer(self, num_bytes: int) -> DeviceBuffer:
        return self._buffer(num_bytes, [*self.pulls.streams, *self.keeping.streams])

    def _buffer(self, num_bytes: int, streams: Sequence[torch.cuda.Stream]) -> DeviceBuffer:
        return DeviceBuffer(num_bytes, self.device, streams)

    def marks(self) -> StreamMarks:
        return StreamMarks(self.device)

    def compare(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> _Later:
        return _Later(torch.stack([one.ne(other).any() for one, other in pairs]).any())

    def incoming(self, sources: DeviceRegistered, stacks: Sequence[Incoming]) -> Iterator[list[torch.Tensor]]:
        """Parts lie in staging memory. While one stack is summed, the next one comes."""
        for i in range(min(2, len(stacks))):
            self._fetch(sources, stacks[i], sources.staging[i])
        for i, stack in enumerate(stacks):
            shape, places = stack
            buffer, size = sources.staging[i % 2], _part_bytes(shape)
            buffer.marks.join()
            yield [buffer.tensor(k * size, shape, torch.float32) for k in range(len(places))]
            buffer.marks.add()
            if i + 2 < len(stacks):
                self._fetch(sources, stacks[i + 2], buffer)

    def _fetch(self, sources: DeviceRegistered, stack: Incoming, into: DeviceBuffer) -> None:
        """Slices in turn, from the rank behind this one on, as weights are fetched."""
        shape, places = stack
        size, num_bytes = _part_bytes(shape), 4 * math.prod(shape)
        stretches = [(rank, at, k * size, num_bytes) for k, (rank, at) in enumerate(places)]
        stretches.sort(key=lambda stretch: (stretch[0] - self._view.rank) % self._view.size)
        pieces: list[Piece] = in_turns(stretches, DEFAULT_SLICE_BYTES)
        self.homeward.pull(sources, [(into, pieces, into.marks)])

    def close(self, registered: Sequence[Any], marks: Sequence[Any], timeout_s: float) -> None:
        end = time.monotonic() + timeout_s
        under_way = [*marks, *(copies.so_far() for copies in (self.pulls, self.keeping, self.homeward))]
        while not all(one.passed() for one in under_way):
            if time.monotonic() > end:
                _stuck.extend(registered)
                said = f"registered memory of weights is kept: {self.device} still used it after {timeout_s:g} s"
                warnings.warn(said, RuntimeWarning, stacklevel=3)
                return
            time.sleep(1e-4)
        for one in registered:
            one.give_back()


def _part_bytes(shape: Sequence[int]) -> int:
    return whole_lines(4 * math.prod(shape))


def _view(whole: torch.Tensor, at: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Bytes from `at` on, as a tensor that autograd takes for no view of anything."""
    num_bytes = math.prod(shape) * dtype.itemsize
    return whole[at : at + num_bytes].view(dtype).view(tuple(shape)).data
