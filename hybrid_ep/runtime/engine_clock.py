"""Kernel time: what a buffer's engine spends in the launches themselves, apart from the Python around them.

On the host a launch runs inside the call, so the clock is the call's; on a GPU two events stand around the launch on
its stream."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

_LAUNCHES = (
    "place",
    "dispatch",
    "combine",
    "latency_route",
    "latency_dispatch",
    "latency_combine",
    "plan_clones",
    "push_weights",
    "await_weights",
    "collect_gradients",
)


class EngineClock:
    """Seconds in the launches of a buffer's engines."""

    def __init__(self, on_gpu: bool) -> None:
        self._on_gpu = on_gpu
        self._seconds = 0.0
        self._events: list[tuple[Any, Any]] = []

    def around(self, engine: Any) -> TimedEngine:
        """The engine, with its launches timed."""
        return TimedEngine(engine, self)

    def seconds(self) -> float:
        """In launches so far; waits for those under way."""
        if self._events:
            self._events[-1][1].synchronize()
            self._seconds += sum(a.elapsed_time(b) for a, b in self._events) / 1e3
            self._events.clear()
        return self._seconds

    def timed(self, launch: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            if self._on_gpu:
                first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                first.record()
                result = launch(*args, **kwargs)
                last.record()
                self._events.append((first, last))
                return result
            start = time.perf_counter()
            result = launch(*args, **kwargs)
            self._seconds += time.perf_counter() - start
            return result

        return run


class TimedEngine:
    """Stands in for an engine and passes everything on."""

    def __init__(self, engine: Any, clock: EngineClock) -> None:
        self._engine, self._clock = engine, clock

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._engine, name)
        return self._clock.timed(attribute) if name in _LAUNCHES else attribute
