"""torch.cuda.graph on the PTX machine. Kernels, copies and fills are recorded by the stand-in. An operation of torch's,
which runs on the CPU here, becomes a host function of the graph: it runs again at every replay, in its place, into the
tensors that the capture made. During the capture it runs once to learn what it makes, into copies of what it writes."""

from __future__ import annotations

import ctypes
import gc
import threading
import time
from collections.abc import Callable

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

_state = threading.local()
_MODES = {"global": 0, "thread_local": 1, "relaxed": 2}
_HOST_FUNCTION = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_queue: Callable[[], Recording] | None = None
_SLICE_S = 1e-3  # the stand-in runs a host function under its lock, so a long one is cut


def recording() -> Recording | None:
    """Where an operation of this thread's goes instead of running at once: its capture, or the queue of all threads."""
    return getattr(_state, "recording", None) or (_queue and _queue())


def _written(func, args, kwargs) -> list[torch.Tensor]:
    """What an operation writes of its arguments."""
    found = []
    for i, a in enumerate(func._schema.arguments):
        if a.alias_info is not None and a.alias_info.is_write:
            found += [x for x in tree_leaves(args[i] if i < len(args) else kwargs.get(a.name)) if x is not None]
    return found


def _shaped_like(func, args, kwargs):
    """What an operation returns, but for the values."""

    def described(x):
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")

    def made(x):
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype)

    args, kwargs = (tree_map_only(torch.Tensor, described, part) for part in (args, kwargs))
    return tree_map_only(torch.Tensor, made, func(*args, **kwargs))


def _results_in(func, written):
    """What an operation returns that writes its arguments: these, or nothing."""
    return None if not func._schema.returns else written[0] if len(written) == 1 else tuple(written)


class Recording:
    """What one captured graph needs for as long as it lives. memory_stream: of its tensors, which is not captured."""

    def __init__(self, runtime, stream: int, memory_stream: int):
        self.runtime, self.stream, self.memory_stream = runtime, stream, memory_stream
        self.kept: list = []
        self.errors: list[BaseException] = []

    def once(self, func, args, kwargs):
        """What an operation returns, of which nothing may be written: an operation before it, on another stream of a
        queue, may write the same tensor meanwhile, and what it wrote would be lost."""
        written = _written(func, args, kwargs)
        copies = [x.clone() for x in written]
        apart = {id(x): copy for x, copy in zip(written, copies, strict=True)}
        back = {id(copy): x for x, copy in zip(written, copies, strict=True)}
        there = tree_map_only(torch.Tensor, lambda x: apart.get(id(x), x), (args, kwargs))
        try:
            out = func(*there[0], **there[1])
        except (RuntimeError, IndexError):  # for its operands' values, which are there at a replay: a GPU looks then
            return _results_in(func, written) if written else _shaped_like(func, args, kwargs)
        return tree_map_only(torch.Tensor, lambda x: back.get(id(x), x), out)

    def again(self, func, args, kwargs, out, placed) -> None:
        """Enqueues the operation. placed: what the caller gets, out with tensors of its own in the place of some."""
        places = [
            (i, to) for i, (x, to) in enumerate(zip(tree_leaves(out), tree_leaves(placed), strict=True)) if x is not to
        ]
        if not places and not func._schema.is_mutable:
            return  # a view

        def run(_):
            try:
                with torch.no_grad():
                    results = tree_leaves(func(*args, **kwargs))
                    for i, to in places:
                        to.copy_(results[i])
            except BaseException as error:  # nothing can be raised through the machine's thread
                self.errors.append(error)

        function = _HOST_FUNCTION(run)
        self.kept += [function, placed]
        self.runtime.call("cudaLaunchHostFunc", self.stream, function, 0)


class Queue:
    """While it is open, operations of torch's are host functions of the current stream, outside captures too: the host
    waits for nothing but values, as on a GPU. For tests of who waits for whom; what was queued is kept to the end."""

    def __init__(self, runtime, stream: Callable[[], int]):
        self.runtime, self.stream, self.kept, self.errors = runtime, stream, [], []

    def __enter__(self) -> Queue:
        global _queue
        _queue = self._recording
        return self

    def __exit__(self, *raised) -> None:
        global _queue
        _queue = None
        self.runtime.call("cudaDeviceSynchronize")
        if self.errors and raised[0] is None:
            raise self.errors[0]

    def _recording(self) -> Recording:
        here = Recording(self.runtime, self.stream(), self.stream())
        here.kept, here.errors = self.kept, self.errors
        return here

    def sleep(self, seconds: float) -> None:
        function = _HOST_FUNCTION(lambda _: time.sleep(_SLICE_S))
        self.kept.append(function)
        for _ in range(max(1, round(seconds / _SLICE_S))):
            self.runtime.call("cudaLaunchHostFunc", self.stream(), function, 0)


def classes(library, memory, current_stream, stream_context, make_stream) -> tuple[type, type]:
    """(torch.cuda.CUDAGraph, torch.cuda.graph) of the machine."""

    class CUDAGraph:
        def __init__(self, keep_graph: bool = False):
            self._recording, self._exec, self.retained = None, None, []

        @staticmethod
        def get_currently_capturing_graph():
            if getattr(_state, "graph", None) is None:
                raise RuntimeError("The current stream is not currently capturing.")
            return _state.graph

        def capture_begin(self, pool=None, capture_error_mode: str = "global") -> None:
            handle = current_stream().cuda_stream
            library.call("cudaStreamBeginCapture", handle, _MODES[capture_error_mode])
            _state.recording = self._recording = Recording(library, handle, make_stream().cuda_stream)
            _state.graph = self

        def capture_end(self) -> None:
            _state.recording = _state.graph = None
            graph, made = ctypes.c_uint64(), ctypes.c_uint64()
            try:
                library.call("cudaStreamEndCapture", self._recording.stream, ctypes.byref(graph))
            finally:
                memory.free_deferred()
            library.call("cudaGraphInstantiateWithFlags", ctypes.byref(made), graph, 0)
            library.call("cudaGraphDestroy", graph)
            self._exec = made.value

        def replay(self) -> None:
            if self._recording.errors:
                raise self._recording.errors[0]
            library.call("cudaGraphLaunch", self._exec, current_stream().cuda_stream)

    class graph:  # noqa: N801  torch's name
        def __init__(self, cuda_graph, pool=None, stream=None, capture_error_mode: str = "global"):
            self._graph, self._mode = cuda_graph, capture_error_mode
            self._context = stream_context(stream or make_stream())

        def __enter__(self) -> None:
            library.call("cudaDeviceSynchronize")
            gc.collect()
            self._context.__enter__()
            self._graph.capture_begin(capture_error_mode=self._mode)

        def __exit__(self, *raised) -> None:
            try:
                self._graph.capture_end()
            finally:
                self._context.__exit__(*raised)

    return CUDAGraph, graph
