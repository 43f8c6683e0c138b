"""deep_ep's events and its Config, whose fields other libraries fill in.

EventHandle() is the point that the caller's stream has reached; on a CPU, where a call has ended when it returns, a
point that has passed. EventOverlap carries one, or none."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from hybrid_ep import streams
from hybrid_ep.runtime import validation

topk_idx_t = torch.int64  # the dtype of topk_idx


class EventHandle:
    """The point that the current stream has reached when this is made; or the given one."""

    def __init__(self, here: streams.EventOverlap | None = None) -> None:
        self.here = streams.EventOverlap.here() if here is None else here

    def current_stream_wait(self) -> None:
        """Work launched on the current stream from here on waits for the point; the host does not."""
        self.here.current_stream_wait()


class EventOverlap:
    """An EventHandle, or None, that callers hand around; `event` may be set later. extra_tensors stay alive with it."""

    def __init__(self, event: EventHandle | None = None, extra_tensors: tuple[torch.Tensor, ...] | None = None) -> None:
        self.event, self.extra_tensors = event, extra_tensors
        self._hook: Callable[[], object] | None = None
        self._release = False

    def current_stream_wait(self, release_handle: bool = False) -> None:
        """RuntimeError where there is no event: a wait for nothing would hide that nobody recorded one.
        release_handle: the event, and what lives with it, is let go behind the wait."""
        if self.event is None:
            raise RuntimeError(
                "this EventOverlap holds no event: the call that returned it was not asynchronous (async_finish or "
                "async_with_compute_stream), so that its results are in order already; wait only behind those that were"
            )
        self.event.current_stream_wait()
        hook, self._hook = self._hook, None
        if hook is not None:
            hook()
        if release_handle:
            self.event = None

    def register_hook_after_wait(self, hook_after_wait: Callable[[], object]) -> None:
        """Called once, behind the next wait. RuntimeError for a second one before that."""
        if self._hook is not None:
            raise RuntimeError("this EventOverlap has a hook already; wait for its event before you register another")
        self._hook = hook_after_wait

    def __call__(self, release_handle: bool = False) -> EventOverlap:
        """For `with event(release_handle=True):`."""
        self._release = release_handle
        return self

    def __enter__(self) -> EventOverlap:
        return self

    def __exit__(self, *_: Any) -> None:
        """`with event:` - what is in between overlaps, what comes after does not."""
        release, self._release = self._release, False
        if self.event is not None:
            self.current_stream_wait(release)


def wait_for(previous_event: Any) -> None:
    """The current stream waits for a caller's previous_event: an EventHandle, as ElasticBuffer.capture() gives, an
    EventOverlap, with or without an event, or None."""
    if previous_event is None:
        return
    if isinstance(previous_event, EventHandle):
        previous_event.current_stream_wait()
        return
    if not isinstance(previous_event, EventOverlap):
        raise ValueError(
            f"previous_event is {validation.describe(previous_event)}; give an EventOverlap: that of an "
            "earlier call, or what capture() returns"
        )
    if previous_event.event is not None:
        previous_event.event.current_stream_wait()


@dataclass
class Config:
    """Tuning of a call of Buffer. num_sms counts; the numbers of tokens in a chunk, which size deep_ep's rings, are
    kept and have no effect: ours are set by `hybrid-ep tune`."""

    num_sms: int = 20
    num_max_nvl_chunked_send_tokens: int = 6
    num_max_nvl_chunked_recv_tokens: int = 256
    num_max_rdma_chunked_send_tokens: int = 6
    num_max_rdma_chunked_recv_tokens: int = 256

    def __post_init__(self) -> None:
        validation.integer("num_sms", self.num_sms, 1)

    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        """0: no memory has to be set aside by the caller. A Buffer takes what its calls need and grows with them."""
        return 0

    def get_rdma_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        """0; see get_nvl_buffer_size_hint."""
        return 0
