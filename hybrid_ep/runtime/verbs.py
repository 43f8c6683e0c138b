"""What verbs of a buffer have in common: the plan that a dispatch goes by, its rows, and the sum of either combine."""

from __future__ import annotations

import torch
from torch import Tensor

from hybrid_ep import _core
from hybrid_ep.config import HybridEpConfigInstance
from hybrid_ep.runtime import plan_weights, validation
from hybrid_ep.runtime.handle_kinds import HandleKind
from hybrid_ep.runtime.plan import Plan, Routed
from hybrid_ep.runtime.routing import Given, routing_of_call
from hybrid_ep.runtime.session import Call, Session
from hybrid_ep.runtime.signatures import Combined, Handle, Received
from hybrid_ep.runtime.tensors import aligned, pad_rows, padded_row_bytes, row_bytes, unpad_rows


def plan_or_route(
    session: Session,
    kind: HandleKind,
    handle: Handle | Routed | None,
    given: Given,
    call: Call,
    config: HybridEpConfigInstance,
) -> tuple[Plan, Tensor | None, bool]:
    """(plan, new weights in plan order or None, whether weights are those that the routing brought)."""
    x = validation.hidden_rows("hidden", call.hidden)
    if call.scale is not None:
        validation.scales(call.scale, x)
    validation.fp8_agrees(call.use_fp8, x)
    if handle is not None:
        plan = validation.handle(handle, kind, session.topology)
        validation.hidden_rows("hidden", x, plan.num_tokens)
        fresh = plan_weights.in_plan_order(plan, given.topk_idx, given.topk_weights, given.probs)
        return plan, fresh, isinstance(handle, Routed) and plan.has_weights and fresh is None
    session.require_capturable(call.non_blocking)
    routing = routing_of_call(
        x, given, config=config, num_ranks=session.topology.num_ranks, look=not session.runs_beside
    )
    plan = session.route(routing, call, config)
    return plan, None, plan.has_weights


def scatter(
    session: Session,
    plan: Plan,
    hidden: Tensor,
    scale: Tensor | None,
    weights: Tensor | None,
    routed: bool,
    num_permuted: int | None,
    blocks: tuple[int, int | None],
) -> Received:
    """Moves the rows of a plan; num_permuted: rows of the permuted result, None for receive order."""
    x = aligned(hidden)
    padded_scale = None if scale is None else pad_rows(scale)
    width, scale_bytes = row_bytes(x), 0 if scale is None else padded_row_bytes(scale)
    session.fit_plan(plan, row_bytes=width, scale_bytes=scale_bytes)
    rows = plan.num_recv_rows if num_permuted is None else num_permuted
    columns = 0 if not routed and weights is None else plan.num_node_experts if num_permuted is None else 1
    out, out_scale, out_weights = session.dispatched(
        rows, width, scale_bytes, columns, num_permuted is not None and plan.has_holes
    )
    received = out.view(x.dtype)
    request = _core.DispatchRequest(
        x=x,
        scale=padded_scale,
        weights=weights,
        routed_weights=routed,
        out_x=received,
        out_scale=out_scale,
        out_weights=out_weights,
        row_bytes=width,
        scale_bytes=scale_bytes,
        permuted=num_permuted,
        launch=session.launch("dispatch", blocks),
    )
    session.engine.dispatch(plan.core, request)
    out_weights = out_weights if num_permuted is None or out_weights is None else out_weights.view(rows)
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
) -> Combined:
    """The sums of a plan's rows."""
    validation.flag("fp32_partials", fp32_partials)
    x, w = aligned(hidden), None if weights is None else aligned(weights)
    bytes_of_sum = x.shape[1] * (4 if fp32_partials else x.element_size())
    session.fit_plan(plan, partial_row_bytes=bytes_of_sum)
    out = session.results.empty(plan.num_tokens, row_bytes(x), x.dtype)
    returned = (
        None if w is None else torch.empty(plan.num_tokens, plan.weight_stride, dtype=torch.float32, device=x.device)
    )
    request = _core.CombineRequest(
        x=x,
        hidden=x.shape[1],
        weights=w,
        out_x=out,
        out_weights=returned,
        permuted=permuted,
        multiply=weighted,
        fp32_partials=fp32_partials,
        launch=session.launch("combine", blocks),
    )
    session.engine.combine(plan.core, request)
    return out, None if returned is None else plan_weights.to_dense(plan, returned)
