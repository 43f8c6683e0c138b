"""From a routed call to its plan. The exchange kernel places the rows; the host reads none of them.

A call that waits learns the counts, which the kernel posts to host memory while the stream runs on, and makes tensors
of that size (blocking_plan). On a GPU non_blocking=True does not even wait for those (static_plan): no host
synchronisation from the routing to the rows, so that dispatch, experts and combine can be captured in one CUDA graph; a
replay with other routing in the same tensors gives other, right results. The price: results have their static size,
nothing can grow, and what a waiting call refuses with an exception comes as overflow (too many rows, an expert that
does not exist) or as a DeadlineError of the site headers_differ (ranks that mean different calls)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from hybrid_ep import _core
from hybrid_ep.runtime.known import Known
from hybrid_ep.runtime.plan import BlockingPlan, Plan, PlanMemory, StaticPlan
from hybrid_ep.runtime.tensors import padded_row_bytes, row_bytes

if TYPE_CHECKING:
    import torch

    from hybrid_ep._core import CallHeader, Placed
    from hybrid_ep.config import HybridEpConfigInstance
    from hybrid_ep.runtime.call import Call
    from hybrid_ep.runtime.routing import Routing
    from hybrid_ep.runtime.session import Session
    from hybrid_ep.runtime.signatures import Received

_P = TypeVar("_P", bound=Plan)


class Asked(NamedTuple):
    """A routed call by its key, None if it is out of the ordinary, and what is known of such calls."""

    key: bytes | None
    known: Known | None


_MOST_EXCHANGES = 8  # experts, a wide map, unlike widths and growth take one each, and the last one places


def static_plan(
    session: Session, routing: Routing, call: Call, template: HybridEpConfigInstance, asked: Asked
) -> StaticPlan:
    """For a host that waits for nothing. Collective. ValueError, on the rank concerned alone and before anything is
    sent, when the call does not fit what the buffer was laid out for."""
    told = asked.known or _fitted(session, routing, call, template, session.shape.max_tokens)
    placed, memory = _launch(session, routing, told, asked.known is not None, count=False)
    if asked.known is None:
        session.remember(asked.key, told)
    return _made(
        StaticPlan,
        session,
        routing,
        call,
        core=placed.complete,
        memory=memory,
        max_tokens=session.shape.max_tokens,
        capped=session.options.capacity_factor is not None,
    )


def latency_plan(
    session: Session,
    routing: Routing,
    call: Call,
    scale: torch.Tensor | None,
    template: HybridEpConfigInstance,
    blocks: tuple[int, int | None],
    asked: Asked,
) -> tuple[Plan, Received]:
    """The latency path: the plan, the permuted rows and what goes with them, of one launch. Collective. ValueError on
    the rank concerned alone where the call does not fit. call.hidden, scale: rows as the core wants them."""
    told = asked.known or _fitted(session, routing, call, template, session.options.latency_tokens)
    memory = PlanMemory.of(told.at, session.options.device)
    width, scale_bytes = row_bytes(call.hidden), 0 if call.scale is None else padded_row_bytes(call.scale)
    capped = session.options.capacity_factor is not None
    received, out_scale, out_weights = session.results.dispatched(
        call.budget or 0, width, call.hidden.dtype, scale_bytes, None if routing.weights is not None else 0, capped
    )
    rows = _core.DispatchRequest.of(
        call.hidden,
        scale,
        None,
        routing.weights is not None,
        received,
        out_scale,
        out_weights,
        width,
        scale_bytes,
        call.budget,
        session.launch("dispatch", blocks, by_lines=True),
        asked.known is not None,
    )
    given = routing if asked.known else routing.aligned()
    place = given.request(told.header, memory.block, False, 1, asked.known is not None)
    core = session.engine.latency_route(place, rows)
    if asked.key is not None and asked.known is None:
        session.known_by_lines.add(asked.key, told)
    common = {"core": core, "memory": memory, "by_lines": True}
    plan: Plan
    if session.runs_beside:
        most = min(session.shape.max_tokens, session.options.latency_tokens)
        plan = _made(StaticPlan, session, routing, call, max_tokens=most, capped=capped, **common)
    else:  # the launch has ended, and its counts are there
        learned = {"learned": memory, "from_nodes": core.from_nodes, "max_tokens": max(1, core.most_tokens)}
        plan = _made(BlockingPlan, session, routing, call, **learned, **common)
    return plan, (received, out_weights, out_scale)


def _fitted(
    session: Session, routing: Routing, call: Call, template: HybridEpConfigInstance, most_tokens: int
) -> Known:
    """What an exchange of the call tells, in memory that has room for it: for whatever ranks with so many tokens send
    one of them, since nobody will know before the rows are on their way."""
    if routing.num_tokens > session.shape.max_tokens:
        raise ValueError(
            f"hidden has {routing.num_tokens} rows, but the buffer is laid out for {session.shape.max_tokens} tokens a "
            "rank, and non_blocking=True cannot make it grow; raise max_num_of_tokens_per_rank, or run a blocking "
            "dispatch of that size first"
        )
    # Ranks agree on each of these, hence grow together. A map's rows are as wide as the widest token so far.
    topk = session.shape.max_topk if routing.topk_idx is None else routing.topk_idx.shape[1]
    topk = min(topk, routing.num_experts)
    if not session.runs_beside and (widest := _widest(routing)) > topk:  # a GPU drops them, and sets the overflow flag
        raise ValueError(
            f"routing_map has a token with {widest} experts, but the buffer is laid out for {topk} a token, and the "
            "latency path cannot make it grow; give topk_idx, make the buffer with topk= the most of any token, or run "
            "a blocking dispatch of that width first, on all ranks; ranks without such a token wait for this one until "
            "their deadlines"
        )
    session.fit(
        num_experts=routing.num_experts,
        max_topk=topk,
        row_bytes=row_bytes(call.hidden),
        scale_bytes=0 if call.scale is None else padded_row_bytes(call.scale),
        recv_rows=session.recv_capacity(most_tokens),
    )
    return _told(session, routing, call, template, topk, count=False)


def blocking_plan(
    session: Session, routing: Routing, call: Call, template: HybridEpConfigInstance, asked: Asked
) -> BlockingPlan:
    """For a host that waits for the counts and nothing else. Collective.

    The kernel places rows when all calls fit together and the buffer. Where they do not, every rank learns from the
    headers what each of the others does: raise, grow, or take wider rows, and exchange again. ValueError and
    CapacityError are raised on all ranks alike."""
    told = asked.known
    first = topk = told.topk if told else _first_width(session, routing)
    counted = routing.topk_idx is not None
    for _ in range(_MOST_EXCHANGES):
        capacity = session.shape.recv_rows
        if told is None:
            told = _told(session, routing, call, template, topk, count=True)
        placed, memory = _launch(session, routing, told, asked.known is not None, count=True)
        if asked.known and placed.settled(topk, told.most_tokens, told.most_hidden, capacity):
            session.chunks = told.chunks
            return _counted(session, routing, call, placed, memory)
        asked = asked._replace(known=None)  # of another rank's call nothing is known: as if this one were the first
        session.check_headers(placed)
        ranges = placed.ranges
        if routing.num_experts != session.shape.num_experts:  # all ranks' were another than the buffer's
            session.fit(num_experts=routing.num_experts)
        elif ranges.excess:
            if counted:
                raise ValueError(_unknown_experts(placed.headers, routing.num_experts))
            topk, counted = max(ranges.most_topk, _widest(routing)), True
        elif ranges.least_topk != ranges.most_topk:
            topk = ranges.most_topk
        else:
            session.fit_call(ranges, topk, call, template)
            if placed.placed:
                session.fit_rows(placed)
            if placed.placed and session.shape.recv_rows == capacity:
                break
        told = None
    else:
        raise RuntimeError(
            f"{_MOST_EXCHANGES} exchanges did not place the rows; please report this, with "
            f"{[(h.num_tokens, h.topk, h.excess) for h in placed.headers]}"
        )
    if routing.topk_idx is None:
        session.map_width = max(session.map_width, topk)
    session.check_capacity(placed, call)
    if told.topk == first:  # else other ranks asked for wider rows, and may not the next time
        session.remember(asked.key, told)
    return _counted(session, routing, call, placed, memory)


def _counted(session: Session, routing: Routing, call: Call, placed: Placed, memory: PlanMemory) -> BlockingPlan:
    """The plan of a call whose rows were placed."""
    learned = PlanMemory.of(placed.learned, session.options.device)
    return _made(
        BlockingPlan,
        session,
        routing,
        call,
        core=placed.plan(_core.TensorView.of("memory", learned.block)),
        memory=memory,
        learned=learned,
        from_nodes=placed.from_nodes,
        max_tokens=max(1, placed.most_tokens),
    )


def _made(kind: type[_P], session: Session, routing: Routing, call: Call, **rest: Any) -> _P:
    """A plan: the same object as kind(...), without a function call for each of its frozen fields."""
    plan = object.__new__(kind)
    plan.__dict__.update(
        session.where,
        num_experts=routing.num_experts,
        pad_multiple=call.pad_multiple,
        has_weights=routing.weights is not None,
        **rest,
    )
    return plan


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


def _told(
    session: Session, routing: Routing, call: Call, template: HybridEpConfigInstance, topk: int, count: bool
) -> Known:
    """Of an exchange of this width. With another number of experts than the engine's, a rank sends its header alone."""
    shape = session.shape
    tokens = routing.num_tokens if routing.num_experts == shape.num_experts else 0
    return Known(
        num_experts=routing.num_experts,
        topk=topk,
        header=call.header(routing, template, tokens, topk),
        at=session.engine.plan_memory(tokens, topk, not count),
        num_blocks=session.exchange_blocks(tokens, template),
        chunks={operation: template.chunk(operation) for operation in ("dispatch", "combine")},
        most_tokens=shape.max_tokens,
        most_hidden=shape.row_bytes // 2,
    )


def _launch(session: Session, routing: Routing, told: Known, plain: bool, count: bool) -> tuple[Placed, PlanMemory]:
    """(what the exchange kernel was asked to place, where). plain: the routing's tensors are as the core wants them."""
    memory = PlanMemory.of(told.at, session.options.device)
    given = routing if plain else routing.aligned()
    return session.engine.place(given.request(told.header, memory.block, count, told.num_blocks, plain)), memory
