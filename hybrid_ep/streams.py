"""Calls on a communication stream of their own, and the events that order them with the caller's.

For example::

    rows, *_, handle, event = buffer.dispatch_with_permute(..., async_finish=True)
    independent_work()               # on the caller's stream, beside the dispatch
    event.current_stream_wait()      # from here on the caller's stream may use the results

The call starts when previous_event has passed, or, without one, when what the caller's stream holds so far has. On a
CPU there are no streams: a call has ended when it returns, and its event has passed."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from hybrid_ep import recording
from hybrid_ep.runtime import validation
from hybrid_ep.runtime.handle import HandleTuple

OWN = "own"


class EventOverlap:
    """A point on a stream. EventOverlap.here(): of what the caller's stream holds so far, to be a previous_event.

    Keeps the tensors alive that the work before it uses, until a stream has waited for it or it is dropped."""

    def __init__(self, event: torch.cuda.Event | None = None, keep: Iterable[torch.Tensor] = ()):
        self.event = event  # None: passed
        self._keep = tuple(keep)

    @staticmethod
    def here(device: torch.device | str | None = None) -> EventOverlap:
        """device: whose current stream; default: CUDA's current device where there is one, else the CPU."""
        chosen = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        if chosen.type != "cuda":
            return EventOverlap()
        return EventOverlap(torch.cuda.current_stream(chosen).record_event())

    def current_stream_wait(self) -> None:
        """Work that is launched on the current stream from here on waits for the event; the host does not."""
        if self.event is not None:
            torch.cuda.current_stream().wait_event(self.event)
        self._keep = ()

    def __enter__(self) -> EventOverlap:
        return self

    def __exit__(self, *_: Any) -> None:
        """`with event:` - what is in between overlaps, what comes after does not."""
        self.current_stream_wait()


def chosen(comm_stream: Any, device: torch.device) -> Any:
    """The constructor's comm_stream, checked: None, OWN, or a stream of this device."""
    if comm_stream is None or (isinstance(comm_stream, str) and comm_stream == OWN):
        return comm_stream
    if not isinstance(comm_stream, torch.Stream):
        raise ValueError(
            f"comm_stream={comm_stream!r} must be a torch.cuda.Stream, '{OWN}' (the buffer makes one), or "
            "None (calls run on the current stream)"
        )
    if comm_stream.device != device:
        raise ValueError(
            f"comm_stream is a stream of {comm_stream.device}, but this buffer runs on {device}; give one "
            f"of {device}, or '{OWN}'"
        )
    return comm_stream


def on_comm_stream(verb: Callable) -> Callable:
    """A buffer's verb, with two keywords more, async_finish and previous_event; see the class. Selective checkpointing
    is not shown what it is made of."""
    names = [p.name for p in inspect.signature(verb).parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD][1:]

    @functools.wraps(verb)
    def call(
        buffer: Any, *args: Any, async_finish: bool = False, previous_event: EventOverlap | None = None, **kwargs: Any
    ) -> Any:
        if torch._C._len_torch_dispatch_stack() and recording.recorded():  # the first is nearly always 0
            with recording.unrecorded():
                return call(buffer, *args, async_finish=async_finish, previous_event=previous_event, **kwargs)
        here = buffer.comm_stream is None and async_finish is False  # on the current stream
        if not here or previous_event is not None:
            validation.flag("async_finish", async_finish)
            _check_event(previous_event, async_finish, buffer.comm_stream)
        if here:
            handle = {**dict(zip(names, args, strict=False)), **kwargs}.get("handle") if args else kwargs.get("handle")
            if handle is not None:
                for tensor in _tensors(handle):  # which a call on another stream may have made
                    tensor.record_stream(torch.cuda.current_stream(tensor.device))
            return verb(buffer, *args, **kwargs)
        stream = buffer.stream_of_calls()
        if stream is None:  # a CPU
            result = verb(buffer, *args, **kwargs)
            return (*_parts(result), EventOverlap()) if async_finish else result
        caller = torch.cuda.current_stream(stream.device)
        if stream == caller:
            raise ValueError(
                "the current stream is the buffer's comm_stream, which would wait for itself; make the "
                "call on another stream, or give the buffer comm_stream=None"
            )
        before = caller.record_event() if previous_event is None else previous_event.event
        if before is not None:
            stream.wait_event(before)
        with torch.cuda.stream(stream):
            result = verb(buffer, *args, **kwargs)
            done = stream.record_event()
        used = list(_tensors((args, tuple(kwargs.values()))))
        for tensor in used:  # memory of the caller's stream, not to be given out again before the call has read it
            tensor.record_stream(stream)
        for tensor in _tensors(result):
            tensor.record_stream(caller)
        if async_finish:
            return *_parts(result), EventOverlap(done, used)
        caller.wait_event(done)
        return result

    return call


def _parts(result: Any) -> tuple:
    return result if isinstance(result, tuple) else (result,)


def _check_event(previous_event: Any, async_finish: bool, comm_stream: Any) -> None:
    if previous_event is None:
        return
    if not isinstance(previous_event, EventOverlap):
        raise ValueError(
            f"previous_event is {validation.describe(previous_event)}; give the EventOverlap that a call "
            "with async_finish=True returned, or EventOverlap.here()"
        )
    if not async_finish and comm_stream is None:
        raise ValueError(
            "previous_event is given, but this call runs on the current stream, which is in order anyway; "
            "give async_finish=True, or make the buffer with a comm_stream"
        )


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """CUDA tensors in nested tuples and lists. A handle is one, whose config carries the plan and its memory."""
    if isinstance(value, torch.Tensor):
        if value.is_cuda:
            yield value
    elif isinstance(value, HandleTuple):  # what nobody has read yet is made of the plan's memory
        if not value.config.plan.host_reads:
            yield from _tensors(tuple(value.there()))
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors(item)
    elif (plan := getattr(value, "plan", None)) is not None:
        yield from _tensors(plan.tensors())
