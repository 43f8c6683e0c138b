"""What plan_clones asks of the core, and what comes of it; the verb is in hybrid_ep/clones.py."""

from __future__ import annotations

import functools
import zlib
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from hybrid_ep.runtime import validation
from hybrid_ep.runtime.tensors import aligned

if TYPE_CHECKING:
    from hybrid_ep.config import HybridEpConfigInstance
    from hybrid_ep.runtime.session import Session
    from hybrid_ep.runtime.topology import Topology


_MOST_OWNERS = 1024  # whose columns a session keeps


class PlannerOptions(Protocol):
    """hybrid_ep.balance.MicrobatchOptions."""

    @property
    def spare_slots(self) -> int: ...
    def on_nodes(self, num_nodes: int) -> PlannerOptions: ...
    def shape(self, num_ranks: int, num_experts: int) -> Any: ...


class ExpertOwners(Protocol):
    """hybrid_ep.balance.owners.Owners: who owns which expert, the same on all ranks."""

    num_ranks: int
    per_rank: int

    def host_columns(self, spare_slots: int) -> np.ndarray: ...


class Columns(NamedTuple):
    """Of each expert's owner in a map over physical slots: int64 [E] on the device, and a digest that ranks compare."""

    on_device: Tensor
    digest: int


class ClonePlan(NamedTuple):
    """The clones of one micro-batch, on the buffer's device; of R ranks, S spare slots each, E logical experts.

    * `slot_expert` int32 [R, S]: logical expert cloned to a slot, -1 for an empty one. `slot_tokens` int64 [R, S]:
      tokens of the group that the clone computes; its owner computes the rest. Both are the same on all ranks.
    * `take`, `first` int64 [R, S]: of this rank's tokens for that expert, in order, so many go there, from that number.
    * `counts` int64 [R, E]: tokens of each rank for each expert, which was planned for.
    * `numbers` int64 [4]: tokens of the fullest rank without the plan, with it, and what the planner aimed at; the
      fourth is the kernel's.
    * `slots` int64 [3, R, S]: slot_tokens, take and first, in one piece.
    """

    slot_expert: Tensor
    slot_tokens: Tensor
    take: Tensor
    first: Tensor
    counts: Tensor
    numbers: Tensor
    slots: Tensor


class ClonedRouting(NamedTuple):
    """This rank's routing over physical slots, for a dispatch: a rank has its E / R owners, then its S spare slots.

    * `topk_idx` int64 [T, K] or `routing_map` bool [T, E + R * S]: of the kind that was given; the other is None.
    * `columns` int64 [T, E], of a map: the column of every pair; where none was chosen, the owner's. So weights follow
      by torch.zeros(...).scatter(1, columns, probs), through which gradients flow. Those of topk_idx stay as they are.
    * `plan`: what came of it.
    """

    topk_idx: Tensor | None
    routing_map: Tensor | None
    columns: Tensor | None
    plan: ClonePlan


def checked_options(clones: Any, num_local_experts: int) -> PlannerOptions | None:
    """The constructor's argument. ValueError, naming it, for what nobody could plan with."""
    if clones is None:
        return None
    if not hasattr(clones, "on_nodes") or not hasattr(clones, "spare_slots"):
        raise ValueError(f"clones={clones!r} must be hybrid_ep.balance.MicrobatchOptions, or None to plan no clones")
    if not 1 <= clones.spare_slots < num_local_experts:
        raise ValueError(
            f"clones has spare_slots={clones.spare_slots}, and num_local_experts={num_local_experts} counts a rank's "
            "spare slots and at least one expert of its own; give 1 spare slot or more, and num_local_experts with them"
        )
    return clones


def core_shape(clones: PlannerOptions | None, num_local_experts: int, where: Topology) -> Any:
    """What the core lays memory out for; None without clones."""
    if clones is None:
        return None
    experts = (num_local_experts - clones.spare_slots) * where.num_ranks
    return clones.on_nodes(where.num_nodes).shape(where.num_ranks, experts)


def plan(
    session: Session,
    topk_idx: Any,
    routing_map: Any,
    owners: ExpertOwners | None,
    by: ClonePlan | None,
    template: HybridEpConfigInstance,
) -> ClonedRouting:
    """What plan_clones does inside of the guard; by: the plan to go by, None: one is made. Collective without."""
    options, device = session.options, session.options.device
    if options.clones is None:
        raise ValueError(
            "this buffer plans no clones: make it with clones=hybrid_ep.balance.MicrobatchOptions(spare_slots=...), "
            "and num_local_experts with the spare slots of a rank in it"
        )
    if (topk_idx is None) == (routing_map is None):
        raise ValueError("topk_idx, routing_map: both or none are given; give one of them to say where tokens go")
    num_ranks, spare = session.topology.num_ranks, options.clones.spare_slots
    per_rank = options.num_local_experts - spare
    num_experts, slots = per_rank * num_ranks, (num_ranks, spare)
    where, digest = columns(session, owners, per_rank, spare)
    num_choices, out_columns = 0, None
    if topk_idx is not None:
        idx = validation.tensor("topk_idx", topk_idx, 2, "integers [num_tokens, topk]")
        given = aligned(validation.topk(idx, idx.shape[0], num_experts, look=not session.runs_beside))
        num_choices = given.shape[1]
        out = torch.empty_like(given)
    else:
        route = validation.tensor("routing_map", routing_map, 2, "bool [num_tokens, num_experts]")
        given = aligned(validation.routing_map(route, route.shape[0], num_experts, num_ranks))
        out = session.results.empty(given.shape[0], num_experts + num_ranks * spare, torch.bool)
        out_columns = session.results.empty(given.shape[0], 8 * num_experts, torch.int64)
    made = _empty_plan(slots, num_experts, device) if by is None else _checked_plan(by, slots, num_experts, device)
    session.engine.plan_clones(
        given if topk_idx is not None else None,
        given if topk_idx is None else None,
        given.shape[0],
        num_choices,
        where,
        digest,
        out,
        out_columns,
        made.slot_expert,
        made.slots,
        made.counts,
        made.numbers,
        by is not None,
        session.exchange_blocks(given.shape[0], template),
    )
    if routing_map is None:
        return ClonedRouting(out, None, None, made)
    return ClonedRouting(None, out, out_columns, made)


def _empty_plan(slots: tuple[int, int], num_experts: int, device: torch.device) -> ClonePlan:
    parts = torch.empty(3, *slots, dtype=torch.int64, device=device)
    slot_tokens, take, first = parts.unbind()
    return ClonePlan(
        torch.empty(slots, dtype=torch.int32, device=device),
        slot_tokens,
        take,
        first,
        torch.empty(slots[0], num_experts, dtype=torch.int64, device=device),
        torch.empty(4, dtype=torch.int64, device=device),
        parts,
    )


def _checked_plan(plan: Any, slots: tuple[int, int], num_experts: int, device: torch.device) -> ClonePlan:
    if not isinstance(plan, ClonePlan):
        raise ValueError(f"plan is {validation.describe(plan)}; give the plan of an earlier plan_clones, or None")
    if tuple(plan.slot_expert.shape) != slots or plan.counts.shape[1] != num_experts:
        raise ValueError(
            f"plan is of {plan.counts.shape[1]} experts and slots {tuple(plan.slot_expert.shape)}, this buffer plans "
            f"for {num_experts} and {slots}; give a plan of a buffer like this one"
        )
    if plan.slot_expert.device != device:
        raise ValueError(
            f"plan lies on {plan.slot_expert.device}, but this buffer runs on {device}; give one from there"
        )
    return plan


def host_columns(owners: ExpertOwners | None, num_ranks: int, per_rank: int, spare: int) -> np.ndarray:
    """int64 [E]: of each expert's owner in a map over physical slots; owners None: experts live in their order.
    ValueError for owners of other ranks."""
    if owners is None:
        return _identity(num_ranks, per_rank, spare)
    if not hasattr(owners, "host_columns"):
        raise ValueError(f"owners={owners!r:.80} must be hybrid_ep.balance.owners.Owners, or None: in their order")
    if (owners.num_ranks, owners.per_rank) == (num_ranks, per_rank):
        return owners.host_columns(spare)
    raise ValueError(
        f"owners are of {owners.num_ranks} ranks with {owners.per_rank} experts each, this buffer has {num_ranks} "
        f"with {per_rank} beside their spare slots; give owners of that"
    )


def columns(session: Session, owners: ExpertOwners | None, per_rank: int, spare: int) -> Columns:
    """The same tensor for the same owners: a CUDA graph may hold its address, and calls of a session are in order with
    the copy that made it, whatever their streams."""
    on_host = host_columns(owners, session.topology.num_ranks, per_rank, spare)
    key = on_host.tobytes()
    if key not in session.clone_columns:
        if len(session.clone_columns) >= _MOST_OWNERS and not session.captured:
            session.clone_columns.clear()
        with torch.inference_mode(False):
            on_device = torch.from_numpy(on_host).to(session.options.device)
        session.clone_columns[key] = Columns(on_device, zlib.crc32(key))
    return session.clone_columns[key]


@functools.lru_cache(maxsize=64)
def _identity(num_ranks: int, per_rank: int, spare: int) -> np.ndarray:
    slot = np.arange(num_ranks * per_rank, dtype=np.int64)
    return slot + slot // per_rank * spare
