"""What a buffer begins with and registers, from numbers alone: no tensor, no device and no torch is asked."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

from hybrid_ep import _core

# Of torch's allocator (c10/cuda/CUDACachingAllocator.cpp): sizes up to the first are served by segments of their own,
# of 2 MiB; from the second on a segment is as large as what is asked for, in units of the third.
SMALL, LARGE, UNIT = 1 << 20, 10 << 20, 2 << 20
_MOST_DEFAULT_ARENA = 1 << 30  # bytes
FIRST_TOPK = 8  # room for this many experts a token before the first growth


def whole_bytes(num_bytes: int, streams: int = 1) -> int:
    """The least arena that holds num_bytes in so many parts, each of which torch's allocator takes whole; 0 of 0."""
    return streams * max(-(-num_bytes // (streams * UNIT)) * UNIT, LARGE) if num_bytes else 0


def default_arena_bytes(shape: dict[str, int], streams: int = 1) -> int:
    """Two and a half results of each of so many streams, at most 1 GiB; none where a stream's part of that would not
    hold one. Few tokens are as wide as the widest of a map may be: where results of that width are too large, those of
    FIRST_TOPK experts a token count."""
    for topk in (shape["max_topk"], min(shape["max_topk"], FIRST_TOPK)):
        rows = shape["max_tokens"] * topk  # of a result, where ranks receive alike
        one = rows * (shape["row_bytes"] + shape["scale_bytes"])
        if streams * one <= _MOST_DEFAULT_ARENA:
            return min(streams * 5 * one // 2, _MOST_DEFAULT_ARENA)
    return 0


def recv_capacity(capacity_factor: float | None, max_tokens: int, num_ranks: int) -> int:
    """Receive rows of a rank: capacity_factor * max_tokens, at most (None: exactly) every token of every
    rank."""
    worst = max(1, max_tokens * num_ranks)
    return worst if capacity_factor is None else min(worst, max(1, math.ceil(capacity_factor * max_tokens)))


def first_recv_rows(capacity_factor: float | None, max_tokens: int, max_topk: int, num_ranks: int) -> int:
    """Receive rows to begin with: all that capacity_factor admits; without one, twice what a rank receives where all
    receive alike. That is every token of every rank in groups of up to 2 * max_topk ranks; in larger ones, calls
    that receive more make the memory grow, see Session.fit_rows."""
    most = recv_capacity(capacity_factor, max_tokens, num_ranks)
    return most if capacity_factor is not None else min(most, 2 * max_tokens * max_topk)


@lru_cache(maxsize=4096)
def registered_bytes(
    num_nodes: int,
    num_local_ranks: int,
    num_experts: int,
    tokens: int,
    topk: int,
    row_bytes: int,
    scale_bytes: int = 0,
    spare_slots: int = 0,
    clones: Any = None,
) -> int:
    """Bytes that a GPU's buffer registers on each rank, to the byte, from the compiled layout itself.

    One buffer serves all layers. tokens: of a rank and call; row_bytes: of a token as the model has it; scale_bytes: of
    its scales where the dispatch is quantised, which stand beside its rows from its first call on. spare_slots: on
    every rank, columns of the map as its experts are; clones: the planner's `MicrobatchOptions.shape`. Its receive rows
    are those that it begins with: for twice the mean of the group, or every token of the group if that is less; a rank
    that receives more makes all ranks' grow. Its arena is the default. It opens for eight experts a token and grows
    when a call brings more.
    """
    ranks = num_nodes * num_local_ranks
    call = {
        "max_tokens": tokens,
        "max_topk": min(max(FIRST_TOPK, topk), num_experts),
        "row_bytes": row_bytes,
        "scale_bytes": 0,
    }
    shape = _core.BufferShape(
        num_nodes=num_nodes,
        num_local_ranks=num_local_ranks,
        num_experts=num_experts + ranks * spare_slots,
        recv_rows=first_recv_rows(None, tokens, call["max_topk"], ranks),
        partial_row_bytes=row_bytes,
        arena_bytes=whole_bytes(default_arena_bytes(call)),
        clones=clones,
        max_tokens=tokens,
        max_topk=call["max_topk"],
        row_bytes=row_bytes,
        scale_bytes=scale_bytes,
    )
    return int(shape.total_bytes)
