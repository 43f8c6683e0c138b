"""The latency path of a buffer with latency_tokens: which operations take it, and dispatches that route in the same
launch. docs/latency.md says what it is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hybrid_ep.runtime import placing, validation
from hybrid_ep.runtime.plan import Routed
from hybrid_ep.runtime.routing import Given, routing_of_call, routing_of_known
from hybrid_ep.runtime.tensors import aligned, pad_rows, unpad_rows

if TYPE_CHECKING:
    from hybrid_ep.config import HybridEpConfigInstance
    from hybrid_ep.runtime.call import Call
    from hybrid_ep.runtime.plan import Plan
    from hybrid_ep.runtime.session import Session
    from hybrid_ep.runtime.signatures import Handle, Received

AUTO = "auto"
PATHS = (AUTO, "throughput", "latency")


def takes_routed(session: Session, path: Any, call: Call, most_tokens: Any) -> bool:
    """Whether a dispatch that routes goes by lines. most_tokens: num_of_tokens_per_rank, checked, or None. All that is
    asked is the same on all ranks, but for a rank with too many tokens, which refuses alone. ValueError."""
    limit = session.options.auto_latency_tokens
    if path is AUTO and not limit:  # nearly every call
        return False
    if _is_auto(path):
        return bool(limit) and call.non_blocking and most_tokens is not None and int(most_tokens) <= limit
    if path == "throughput":
        return False
    if not call.non_blocking:
        raise ValueError(
            "path='latency' gives results of a static size; give non_blocking=True and num_permuted_tokens, or another "
            "path"
        )
    _require_room(session, len(call.hidden), "; where the other ranks went on, this buffer is lost as theirs are")
    return True


def takes_planned(session: Session, path: Any, plan: Plan, handle: Handle | Routed | None) -> bool:
    """Whether an operation on the plan of a handle goes by lines: by default as the handle's dispatch did, where this
    buffer, which may be another than that one's, has room for it. ValueError. All ranks find the same: plan.max_tokens
    is of all ranks, of a GPU's static plan the most that its buffer takes."""
    if _is_auto(path):
        return plan.by_lines and plan.max_tokens <= session.options.latency_tokens
    if path == "throughput":
        return False
    if isinstance(handle, Routed):
        raise ValueError("path='latency': the first dispatch of what route() returned takes path='throughput'")
    _require_room(session, plan.max_tokens)
    return True


def _is_auto(path: Any) -> bool:
    if not isinstance(path, str) or path not in PATHS:
        raise ValueError(f"path={path!r} must be one of {PATHS}")
    return path == AUTO


def _require_room(session: Session, tokens: int, alone: str = "") -> None:
    """ValueError with too many tokens. alone: what to add where other ranks may have gone on."""
    limit = session.options.latency_tokens
    if not limit:
        raise ValueError("path='latency' needs a buffer with latency_tokens; give it the most tokens of a rank")
    if tokens > limit:
        raise ValueError(
            f"path='latency' with {tokens} tokens on a rank, but latency_tokens={limit}; make the buffer with more, or "
            f"give path='throughput' on all ranks{alone}"
        )


def dispatch(
    session: Session, call: Call, given: Given, config: HybridEpConfigInstance, blocks: tuple[int, int | None]
) -> tuple[Plan, Received]:
    """Routes and dispatches in one launch: (the plan, the permuted rows, their weights and scales). Collective."""
    key, known = session.known_by_lines.find(call, given, session.map_width, config)
    if known is None:
        x = validation.hidden_rows("hidden", call.hidden)
        if call.scale is not None:
            validation.scales(call.scale, x)
        validation.fp8_agrees(call.use_fp8, x)
        look, num_ranks = not session.runs_beside, session.topology.num_ranks
        routing = routing_of_call(x, given, config=config, num_ranks=num_ranks, look=look)
        if not routing.is_as_given(given):  # converted: what is known of such calls would not be of their arguments
            key = None
        call = call._replace(hidden=aligned(x))
    else:
        routing = routing_of_known(given, known.num_experts, look=not session.runs_beside)
    scale = None if call.scale is None else pad_rows(call.scale)
    asked = placing.Asked(key, known)
    plan, (rows, weights, scales) = placing.latency_plan(session, routing, call, scale, config, blocks, asked)
    if call.scale is not None and scales is not None:
        scales = unpad_rows(scales, call.scale)
    return plan, (rows, weights, scales)
