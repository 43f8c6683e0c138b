"""--cuda-graph: an implementation's operations captured once and replayed, so that the host is out of the way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from hybrid_ep.cli import Failure
from hybrid_ep.cli.bench.implementations import Implementation

_WARM_UP = 3
CAPTURED = ("dispatch", "combine", "pair")


class CaptureError(Failure):
    """An operation that cannot be captured; names it and the implementation."""


def capture(each: Implementation, ops: tuple[str, ...]) -> dict[str, Callable[[], Any]]:
    """Replays by op for the ops that can be captured; {} for an implementation that offers none. Collective."""
    replays = {}
    for op in ops:
        call = each.captured(op) if op in CAPTURED else None
        if call is not None:
            replays[op] = _capture(call, f"{each.name} {op}")
    return replays


def _capture(call: Callable[[], Any], what: str) -> Callable[[], Any]:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(_WARM_UP):
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            call()
    except RuntimeError as error:
        raise CaptureError(
            f"--cuda-graph: {what} cannot be captured ({error}); drop the flag to time it without a graph"
        ) from error
    return graph.replay
