"""torch.cuda on the PTX machine: its streams, events and devices are the stand-in's. install() puts them in torch's
place, for a process of tests; then hybrid_ep's CUDA executors run with torch's CPU build and no GPU."""

from __future__ import annotations

import contextlib
import ctypes
import threading
import types

import device_tensors
import graphs
import mem_pool
import torch
from ptx_machine import Choices, Library

_state = threading.local()
library: Library | None = None


def raw(stream) -> int:
    return stream.cuda_stream


class Event:
    def __init__(self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False):
        self._event = library.made("cudaEventCreateWithFlags", 0 if enable_timing else 2)

    def record(self, stream: Stream | None = None) -> None:
        library.call("cudaEventRecord", self._event, raw(stream or current_stream()))

    def wait(self, stream: Stream | None = None) -> None:
        library.call("cudaStreamWaitEvent", raw(stream or current_stream()), self._event, 0)

    def query(self) -> bool:
        return library.ready("cudaEventQuery", self._event)

    def synchronize(self) -> None:
        library.call("cudaEventSynchronize", self._event)

    def __del__(self):
        library.status("cudaEventDestroy", self._event)


class Stream:
    """Of the machine's first device. Kept for ever, as torch keeps its own."""

    device = device_tensors.CUDA

    def __init__(self, device=None, priority: int = 0, handle: int | None = None):
        self.cuda_stream = library.made("cudaStreamCreateWithFlags", 1) if handle is None else handle

    def query(self) -> bool:
        return library.ready("cudaStreamQuery", self.cuda_stream)

    def synchronize(self) -> None:
        library.call("cudaStreamSynchronize", self.cuda_stream)

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        event.wait(self)

    def wait_stream(self, stream: Stream) -> None:
        self.wait_event(stream.record_event())

    def __eq__(self, other) -> bool:
        return isinstance(other, Stream) and other.cuda_stream == self.cuda_stream

    def __hash__(self) -> int:
        return hash(self.cuda_stream)


def current_stream(device=None) -> Stream:
    """Each thread has a default stream of its own: virtual ranks that shared one would wait for each other for ever."""
    if getattr(_state, "stream", None) is None:
        _state.stream = Stream()
    return _state.stream


@contextlib.contextmanager
def stream(chosen: Stream | None):
    before = current_stream()
    _state.stream = chosen or before
    try:
        yield
    finally:
        _state.stream = before


def current_device() -> int:
    device = ctypes.c_int()
    library.call("cudaGetDevice", ctypes.byref(device))
    return device.value


def exchange_device(device: int) -> int:
    before = current_device()
    library.call("cudaSetDevice", device)
    return before


def is_current_stream_capturing() -> bool:
    status = ctypes.c_int()
    library.call("cudaStreamIsCapturing", raw(current_stream()), ctypes.byref(status))
    return status.value != 0


def mem_get_info(device=None) -> tuple[int, int]:
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    library.call("cudaMemGetInfo", ctypes.byref(free), ctypes.byref(total))
    return free.value, total.value


def _properties(device=None):
    major, minor = divmod(library.choices.target, 10)
    sms = 132 if major == 9 else 148
    return types.SimpleNamespace(name="PTX machine (a CPU)", multi_processor_count=sms, major=major, minor=minor)


RACES_ARE_SLOWER, MEANT_TO_PASS_S = 30, 5.0


def _scale_deadlines(choices: Choices) -> None:
    """Kernels and the host wait for as many seconds as the test says, times the speed of the machine's clock: a host
    that is not given the CPU must not run out of patience before the kernels that it waits for. With happens-before
    everything takes longer, and a deadline that no test means to see pass must not."""
    from hybrid_ep import _core
    from hybrid_ep.runtime import devices

    engine = _core.Engine

    def scaled(rank, shape, segments, timeout_s, executor, *more):
        if devices.is_cuda(executor):
            long = choices.races and timeout_s > MEANT_TO_PASS_S
            timeout_s *= choices.clock_speed * (RACES_ARE_SLOWER if long else 1)
        return engine(rank, shape, segments, timeout_s, executor, *more)

    _core.Engine = scaled


def _set_sync_debug_mode(mode: str) -> None:
    device_tensors.OnMachine.refuses_to_wait = mode == "error"


@contextlib.contextmanager
def _queued(handle):
    """torch's operations join their streams instead of waiting for them; see graphs.Queue."""
    with graphs.Queue(library, handle) as library.queue:
        try:
            yield
        finally:
            library.queue = None


def install(choices: Choices) -> Library:
    """Once a process, before hybrid_ep makes a buffer."""
    global library
    from hybrid_ep import _core
    from hybrid_ep.runtime import devices

    _core.exchange_tensors(False)  # it asks torch's own memory of a tensor, which here is a CPU's, and not the tensor
    library = Library(choices)
    devices.LIBRARY = library.path
    _scale_deadlines(choices)
    cuda = torch.cuda
    cuda.Stream, cuda.Event, torch.Stream, torch.Event = Stream, Event, Stream, Event
    cuda.ExternalStream = lambda stream_ptr, device=None: Stream(handle=stream_ptr)
    cuda.stream, cuda.current_stream = stream, current_stream
    cuda.default_stream = lambda device=None: Stream(handle=0)
    cuda.is_available, cuda.device_count = lambda: True, lambda: choices.num_devices
    cuda.current_device = current_device
    # Each a function of its own: torch.compile keeps a table of torch's functions and will have no two names for one.
    cuda.set_device = lambda device: library.call("cudaSetDevice", torch.device(device).index)
    cuda._exchange_device, cuda._maybe_exchange_device = exchange_device, lambda device: exchange_device(device)
    cuda._lazy_init, cuda.empty_cache = lambda: None, lambda: None
    cuda.is_current_stream_capturing, cuda.mem_get_info = is_current_stream_capturing, mem_get_info
    cuda.synchronize = lambda device=None: library.call("cudaDeviceSynchronize")
    cuda.get_device_properties = _properties
    cuda.get_device_capability = lambda device=None: divmod(library.choices.target, 10)
    cuda.get_device_name = lambda device=None: _properties().name
    # Which stream goes first is the seed's choice; the queue of torch's operations has sleeps of a clock of 2 GHz.
    cuda._sleep = lambda cycles: library.queue.sleep(cycles / 2e9) if library.queue else None
    cuda.set_sync_debug_mode = _set_sync_debug_mode
    memory = device_tensors.Memory(library)
    handle = lambda: raw(current_stream())  # noqa: E731
    cuda.memory.CUDAPluggableAllocator = mem_pool.PluggableAllocator
    cuda.MemPool, cuda.use_mem_pool = mem_pool.classes(library, memory)
    cuda.CUDAGraph, cuda.graph = graphs.classes(library, memory, current_stream, stream, Stream)
    device_tensors.patch_tensors(memory, handle)
    device_tensors.patch_as_tensor(memory)
    # torch's own also tells its compiler, whose import takes longer than most tests.
    torch.use_deterministic_algorithms = lambda mode, warn_only=False: torch._C._set_deterministic_algorithms(
        mode, warn_only=warn_only
    )
    device_tensors.in_every_thread(memory, handle)
    library.modes = lambda: device_tensors.OnMachine(memory, handle)
    library.queue = None
    library.queued = lambda: _queued(handle)
    return library
