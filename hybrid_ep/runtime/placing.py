"""From a routed call to its plan. The exchange kernel places the rows; the host reads none of them.

A call that waits learns the counts, which the kernel posts to host memory while the stream runs on, and makes tensors
of that size (blocking_plan). On a GPU non_blocking=True does not even wait for those (static_plan): no host
synchronisation from the routing to the rows, so that dispatch, experts and combine can be captured in one CUDA graph; a
replay with other routing in the same tensors gives other, right results. The price: results have their static size,
nothing can grow, and what a waiting call refuses with an exception comes as overflow (too many rows, an expert that
does not exist) or as a DeadlineError of the site headers_differ (ranks that mean different calls)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hybrid_ep.runtime.plan import BlockingPlan, PlanMemory, StaticPlan
from hybrid_ep.runtime.tensors import padded_row_bytes, row_bytes, view

if TYPE_CHECKING:
    from hybrid_ep._core import CallHeader, Placed
    from hybrid_ep.config import HybridEpConfigInstance
    from hybrid_ep.runtime.session import Call, Routing, Session

_MOST_EXCHANGES = 8  # experts, a wide map, unlike widths and growth take one each, and the last one places


def static_plan(session: Session, routing: Routing, call: Call, template: HybridEpConfigInstance) -> StaticPlan:
    """For a host that waits for nothing. Collective. ValueError, on the rank concerned alone and before anything is
    sent, when the call does not fit what the buffer was laid out for."""
    if routing.num_tokens > session.shape.max_tokens:
        raise ValueError(
            f"hidden has {routing.num_tokens} rows, but the buffer is laid out for {session.shape.max_tokens} tokens a "
            "rank, and non_blocking=True cannot make it grow; raise max_num_of_tokens_per_rank, or run a blocking "
            "dispatch of that size first"
        )
    # Ranks agree on each of these, hence grow together. A map's rows are as wide as the widest token so far.
    topk = session.shape.max_topk if routing.topk_idx is None else routing.topk_idx.shape[1]
    topk = min(topk, routing.num_experts)
    session.fit(
        num_experts=routing.num_experts,
        max_topk=topk,
        row_bytes=row_bytes(call.hidden),
        scale_bytes=0 if call.scale is None else padded_row_bytes(call.scale),
    )
    placed, memory = _launch(session, routing, call, template, topk, count=False)
    return StaticPlan(
        **_common(session, routing, call),
        core=placed.complete,
        memory=memory,
        max_tokens=session.shape.max_tokens,
        capped=session.options.capacity_factor is not None,
    )


def blocking_plan(session: Session, routing: Routing, call: Call, template: HybridEpConfigInstance) -> BlockingPlan:
    """For a host that waits for the counts and nothing else. Collective.

    The kernel places rows when all calls fit together and the buffer. Where they do not, every rank learns from the
    headers what each of the others does: raise, grow, or take wider rows, and exchange again. ValueError and
    CapacityError are raised on all ranks alike."""
    topk, known = _first_width(session, routing), routing.topk_idx is not None
    for _ in range(_MOST_EXCHANGES):
        capacity = session.shape.recv_rows
        placed, memory = _launch(session, routing, call, template, topk, count=True)
        session.check_headers(placed)
        ranges = placed.ranges
        if routing.num_experts != session.shape.num_experts:  # all ranks' were another than the buffer's
            session.fit(num_experts=routing.num_experts)
        elif ranges.excess:
            if known:
                raise ValueError(_unknown_experts(placed.headers, routing.num_experts))
            topk, known = max(ranges.most_topk, _widest(routing)), True
        elif ranges.least_topk != ranges.most_topk:
            topk = ranges.most_topk
        else:
            session.fit_call(ranges, topk, call, template)
            if placed.placed and session.shape.recv_rows == capacity:
                break
    else:
        raise RuntimeError(
            f"{_MOST_EXCHANGES} exchanges did not place the rows; please report this, with "
            f"{[(h.num_tokens, h.topk, h.excess) for h in placed.headers]}"
        )
    if routing.topk_idx is None:
        session.map_width = max(session.map_width, topk)
    session.check_capacity(placed, call)
    learned = PlanMemory.of(placed.learned, session.options.device)
    block = view("memory", learned.block)
    assert block is not None  # a view of a tensor
    return BlockingPlan(
        **_common(session, routing, call),
        core=placed.plan(block),
        memory=memory,
        learned=learned,
        from_nodes=placed.from_nodes,
        max_tokens=max(1, ranges.most_tokens),
    )


def _common(session: Session, routing: Routing, call: Call) -> dict[str, Any]:
    """What plans of both kinds are told."""
    where = session.topology
    return dict(
        rank=where.rank,
        num_ranks=where.num_ranks,
        num_local_ranks=where.num_local_ranks,
        num_experts=routing.num_experts,
        pad_multiple=call.pad_multiple,
        has_weights=routing.weights is not None,
    )


def _first_width(session: Session, routing: Routing) -> int:
    """Pairs of a token to make room for: a map's are as many as any before had, once one has been looked at."""
    if routing.topk_idx is not None:
        return max(1, min(routing.topk_idx.shape[1], routing.num_experts))
    return min(session.map_width or _widest(routing), routing.num_experts)


def _widest(routing: Routing) -> int:
    """Most pairs of a token of this rank. Waits for the device."""
    if routing.topk_idx is not None:
        return max(1, min(routing.topk_idx.shape[1], routing.num_experts))
    if routing.routing_map is None or not routing.num_tokens:
        return 1
    return max(1, int(routing.routing_map.sum(1).max()))


def _unknown_experts(headers: list[CallHeader], num_experts: int) -> str:
    said = ", ".join(f"{h.excess} on rank {rank}" for rank, h in enumerate(headers) if h.excess)
    return f"topk_idx holds choices outside the experts 0..{num_experts - 1} ({said}); -1 drops a choice"


def _launch(
    session: Session, routing: Routing, call: Call, template: HybridEpConfigInstance, topk: int, count: bool
) -> tuple[Placed, PlanMemory]:
    """(what the exchange kernel was asked to place, where). With another number of experts than the engine's, a rank
    sends its header alone."""
    tokens = routing.num_tokens if routing.num_experts == session.shape.num_experts else 0
    memory = PlanMemory.of(session.engine.plan_memory(tokens, topk, not count), session.options.device)
    header = call.header(routing, template, tokens, topk)
    return session.engine.place(
        routing.request(header, memory.block, count, session.exchange_blocks(tokens, template))
    ), memory
