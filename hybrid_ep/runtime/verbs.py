"""What verbs of a buffer have in common: the plan that a dispatch goes by, its rows, and the sum of either combine."""

from __future__ import annotations

import torch
from torch import Tensor

from hybrid_ep import _core
from hybrid_ep.config import HybridEpConfigInstance
from hybrid_ep.runtime import placing, plan_weights, validation
from hybrid_ep.runtime.call import Call
from hybrid_ep.runtime.handle_kinds import HandleKind
from hybrid_ep.runtime.plan import Plan, Routed
from hybrid_ep.runtime.routing import Given, routing_of_call, routing_of_known
from hybrid_ep.runtime.session import Session
from hybrid_ep.runtime.signatures import Combined, Handle, Received
from hybrid_ep.runtime.tensors import aligned, pad_rows, padded_row_bytes, row_bytes, unpad_rows


def returned(handle: Handle | Routed | None) -> Handle | None:
    """What a call that was given this as its handle returns for it; None: a new one."""
    return None if isinstance(handle, Routed) else handle


def plan_or_route(
    session: Session,
    kind: HandleKind,
    handle: Handle | Routed | None,
    given: Given,
    call: Call,
    config: HybridEpConfigInstance,
) -> tuple[Plan, Tensor | None, bool, bool]:
    """(plan, new weights in plan order or None, whether weights are those that the routing brought, whether the call is
    known: its tensors are as the core wants them, and there is room for it)."""
    asked = placing.Asked(None, None)
    if handle is None:
        session.require_capturable(call.non_blocking)
        key, known = session.known.find(call, given, session.map_width, config)
        if known is not None:
            routing = routing_of_known(given, known.num_experts, look=not session.runs_beside)
            plan = session.route(routing, call, config, placing.Asked(key, known))
            return plan, None, plan.has_weights, True
        asked = placing.Asked(key, None)
    x = validation.hidden_rows("hidden", call.hidden)
    if call.scale is not None:
        validation.scales(call.scale, x)
    validation.fp8_agrees(call.use_fp8, x)
    if handle is not None:
        plan = validation.handle(handle, kind, session.topology)
        validation.hidden_rows("hidden", x, plan.num_tokens)
        fresh = plan_weights.in_plan_order(plan, given.topk_idx, given.topk_weights, given.probs)
        return plan, fresh, isinstance(handle, Routed) and plan.has_weights and fresh is None, False
    routing = routing_of_call(
        x, given, config=config, num_ranks=session.topology.num_ranks, look=not session.runs_beside
    )
    if not routing.is_as_given(given):  # converted: what is known of such calls would not be of their arguments
        asked = placing.Asked(None, None)
    plan = session.route(routing, call, config, asked)
    return plan, None, plan.has_weights, False


def scatter(
    session: Session,
    plan: Plan,
    hidden: Tensor,
    scale: Tensor | None,
    weights: Tensor | None,
    routed: bool,
    num_permuted: int | None,
    blocks: tuple[int, int | None],
    known: bool,
    by_lines: bool = False,
) -> Received:
    """Moves the rows of a plan; num_permuted: rows of the permuted result, None for receive order. known: as
    plan_or_route says. by_lines: on the latency path."""
    x = hidden if known else aligned(hidden)
    padded_scale = None if scale is None else pad_rows(scale)
    width, scale_bytes = row_bytes(x), 0 if scale is None else padded_row_bytes(scale)
    if not known:
        session.fit_plan(plan, row_bytes=width, scale_bytes=scale_bytes)
    rows = plan.num_recv_rows if num_permuted is None else num_permuted
    columns = 0 if not routed and weights is None else plan.num_node_experts if num_permuted is None else None
    received, out_scale, out_weights = session.results.dispatched(
        rows, width, x.dtype, scale_bytes, columns, num_permuted is not None and plan.has_holes
    )
    launch = session.launch("dispatch", blocks, by_lines)
    request = _core.DispatchRequest.of(
        x,
        padded_scale,
        weights,
        routed,
        received,
        out_scale,
        out_weights,
        width,
        scale_bytes,
        num_permuted,
        launch,
        known,
    )
    (session.engine.latency_dispatch if by_lines else session.engine.dispatch)(plan.core, request)
    scales = None if scale is None or out_scale is None else unpad_rows(out_scale, scale)
    return received, out_weights, scales


def gather(
    session: Session,
    plan: Plan,
    hidden: Tensor,
    weights: Tensor | None,
    *,
    permuted: bool,
    weighted: bool = False,
    fp32_partials: bool,
    blocks: tuple[int, int | None],
    by_lines: bool = False,
) -> Combined:
    """The sums of a plan's rows. by_lines: on the latency path."""
    validation.flag("fp32_partials", fp32_partials)
    x, w = aligned(hidden), None if weights is None else aligned(weights)
    bytes_of_sum = x.shape[1] * (4 if fp32_partials else x.element_size())
    session.fit_plan(plan, partial_row_bytes=bytes_of_sum)
    out = session.results.empty(plan.num_tokens, row_bytes(x), x.dtype)
    returned = (
        None if w is None else torch.empty(plan.num_tokens, plan.weight_stride, dtype=torch.float32, device=x.device)
    )
    launch = session.launch("combine", blocks, by_lines)
    request = _core.CombineRequest.of(x, x.shape[1], w, out, returned, permuted, weighted, fp32_partials, launch)
    (session.engine.latency_combine if by_lines else session.engine.combine)(plan.core, request)
    return out, None if returned is None else plan_weights.to_dense(plan, returned)
