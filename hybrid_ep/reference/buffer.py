"""The reference behind HybridEPBuffer's verbs: every tensor of every rank is gathered everywhere."""

from __future__ import annotations

import io
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from hybrid_ep.reference.world import (
    SUMMED_DTYPES,
    World,
    WorldPlan,
    combine_world,
    densify,
    dispatch_world,
    plan_world,
)
from hybrid_ep.runtime import topology
from hybrid_ep.runtime.handle_kinds import DISPATCHED, PERMUTED, HandleKind
from hybrid_ep.runtime.names import Named
from hybrid_ep.runtime.signatures import Combined, Dispatched, Handle, Permuted, Received

_T = TypeVar("_T")


class ReferenceBuffer(Named):
    """hybrid_ep.HybridEPBuffer by gathering everything everywhere; same arguments, same results, no limits.

    Handles are tuples of the same lengths with the plan and the dispatched weights in the config element; of
    the documented tensors they hold those that one rank's plan says. Every call is collective."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        hidden_dim: int,
        max_num_of_tokens_per_rank: int,
        num_local_experts: int,
        use_fp8: bool = False,
        num_sms_dispatch_api: int | None = None,
        num_sms_combine_api: int | None = None,
        num_sms_preprocessing_api: int | None = None,
        num_blocks_permute: int | None = None,
        num_blocks_unpermute: int | None = None,
        load_cached_kernels: bool = False,
        use_shared_buffer: bool = True,
        enable_custom_allgather: bool = False,
        num_of_hybrid_ep_ranks_per_nvlink_domain: int | None = None,
        use_mnnvl: bool | None = None,
        *,
        overflow: str = "raise",
        **_: object,
    ) -> None:
        self.group, self.rank, self.group_size = group, group.rank(), group.size()
        declared = num_of_hybrid_ep_ranks_per_nvlink_domain
        ranks_per_node = (
            self.group_size
            if declared is None
            else topology.local_ranks(
                dist.get_process_group_ranks(group), declared, "num_of_hybrid_ep_ranks_per_nvlink_domain"
            )
        )
        self.num_of_hybrid_ep_ranks_per_nvlink_domain = ranks_per_node
        self.num_of_nodes = self.group_size // ranks_per_node
        self.node_rank, self.local_rank = divmod(self.rank, ranks_per_node)
        self.num_local_experts, self.overflow = num_local_experts, overflow

    def _gather(self, obj: _T) -> list[_T]:
        """Everybody's obj, by rank. As torch.save's bytes, which hold every dtype."""
        mine = io.BytesIO()
        torch.save(obj, mine)
        everyone = [b""] * self.group_size
        dist.all_gather_object(everyone, mine.getvalue(), group=self.group)
        return [torch.load(io.BytesIO(b), map_location="cpu") for b in everyone]

    def _route(
        self,
        topk_idx: Tensor | None,
        topk_weights: Tensor | None,
        num_experts: int | None,
        routing_map: Tensor | None,
        probs: Tensor | None,
        pad_multiple: int | None,
        budget: int | None,
        drop: bool,
        pad_empty_experts: bool = False,
    ) -> tuple[WorldPlan, Tensor | None]:
        if topk_idx is None:
            if routing_map is None:
                raise ValueError("give topk_idx (with num_of_experts), routing_map or handle")
            num_experts = routing_map.shape[1]
        num_experts = num_experts or self.num_local_experts * self.group_size
        world = World(self.num_of_nodes, self.num_of_hybrid_ep_ranks_per_nvlink_domain, num_experts // self.group_size)
        probs = probs if topk_idx is None else None
        route, weights = densify(world, topk_idx, topk_weights, routing_map, probs)
        everyone = self._gather((route, budget))
        plan = plan_world(
            world,
            [r for r, _ in everyone],
            pad_multiple or 1,
            [b for _, b in everyone],
            pad_empty_experts=pad_empty_experts,
        )
        late = [r for r in range(world.num_ranks) if plan.ranks[r].overflow]
        if late and not drop:
            raise ValueError(f"num_permuted_tokens is too small on ranks {late}; raise it, or drop (non_blocking)")
        return plan, weights

    def dispatch(
        self,
        hidden: Tensor,
        scaling_factor: Tensor | None = None,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        num_of_experts: int | None = None,
        probs: Tensor | None = None,
        routing_map: Tensor | None = None,
        num_dispatched_tokens_tensor: Tensor | None = None,
        num_dispatched_tokens: int | None = None,
        handle: Handle | None = None,
    ) -> Dispatched:
        """HybridEPBuffer.dispatch with the same arguments and results: (rows [M, H], weights fp32 [M, experts of this
        node] or None, scales [M, S] or None, handle). num_dispatched_tokens* are ignored. ValueError without
        routing."""
        if handle is None:
            plan, weights = self._route(topk_idx, topk_weights, num_of_experts, routing_map, probs, 1, None, True)
        else:
            (plan, _), weights = _plan_of(handle, DISPATCHED), probs
        rows, out_probs, scales = self._exchange(plan, hidden, weights, scaling_factor, False, None)
        mine = plan.ranks[self.rank]
        return (
            rows,
            out_probs,
            scales,
            (
                None,
                None,
                None,
                torch.tensor([mine.num_recv_rows], dtype=torch.int32, device="cpu"),
                mine.local_route,
                hidden.shape[0],
                (plan, None),
            )
            if handle is None
            else handle,
        )

    def dispatch_with_permute(
        self,
        *,
        hidden: Tensor,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        num_of_experts_per_rank: int | None = None,
        num_of_experts: int | None = None,
        use_fp8: bool | None = None,
        routing_map: Tensor | None = None,
        probs: Tensor | None = None,
        scaling_factor: Tensor | None = None,
        num_permuted_tokens: int | Tensor | None = None,
        pad_multiple: int | None = None,
        handle: Handle | None = None,
        non_blocking: bool = False,
        fuse_permute_dispatch: bool = False,
        num_dispatched_tokens: int | None = None,
        use_host_meta: bool | None = None,
        pad_empty_experts: bool = False,
    ) -> Permuted:
        """HybridEPBuffer.dispatch_with_permute with the same arguments and results: (rows [P, H], weights fp32 [P] or
        None, scales [P, S] or None, padded_tokens_per_expert int64 [local experts], handle). use_fp8,
        fuse_permute_dispatch, num_dispatched_tokens and use_host_meta change nothing. ValueError without routing, and
        for a num_permuted_tokens that is too small where nothing may be dropped."""
        out_rows = None if num_permuted_tokens is None else int(num_permuted_tokens)
        if handle is None:
            if num_of_experts is None and num_of_experts_per_rank is not None:
                num_of_experts = num_of_experts_per_rank * self.group_size
            plan, weights = self._route(
                topk_idx,
                topk_weights,
                num_of_experts,
                routing_map,
                probs,
                pad_multiple,
                out_rows,
                non_blocking or self.overflow == "drop",
                pad_empty_experts,
            )
        else:
            (plan, _), weights = _plan_of(handle, PERMUTED), probs
        mine = plan.ranks[self.rank]
        rows, out_probs, scales = self._exchange(plan, hidden, weights, scaling_factor, True, out_rows)
        if handle is None:
            ends = [int((mine.source <= s).sum()) for s in range(self.group_size)]
            handle = (
                None,
                None,
                None,
                torch.tensor([mine.num_recv_rows], dtype=torch.int32, device="cpu"),
                mine.local_route,
                torch.tensor(ends, dtype=torch.int32, device="cpu"),
                mine.dense_to_expert,
                mine.tokens_per_expert,
                hidden.shape[0],
                (plan, out_probs),
                torch.tensor([int(mine.overflow)], dtype=torch.int32, device="cpu"),
            )
        return rows, out_probs, scales, mine.padded_tokens_per_expert.clone(), handle

    def _exchange(
        self,
        plan: WorldPlan,
        hidden: Tensor,
        weights: Tensor | None,
        scales: Tensor | None,
        permute: bool,
        out_rows: int | None,
    ) -> Received:
        everyone = self._gather((hidden.detach(), weights, scales, out_rows))
        columns: list[Any] = [list(c) for c in zip(*everyone, strict=True)]
        return dispatch_world(
            plan,
            columns[0],
            columns[1] if weights is not None else None,
            columns[2] if scales is not None else None,
            permute,
            columns[3],
        )[self.rank]

    def combine(
        self, hidden: Tensor, probs: Tensor | None = None, handle: Handle | None = None, *, fp32_partials: bool = False
    ) -> Combined:
        """HybridEPBuffer.combine with the same arguments and results: the sums [T, H] of hidden [M, H], bf16, fp16 or
        fp32, and probs fp32 [T, E] or None. ValueError for another dtype or a handle of another verb."""
        return self._combine(_plan_of(handle, DISPATCHED)[0], hidden, probs, False, False, fp32_partials)

    def combine_with_unpermute(
        self,
        *,
        hidden: Tensor,
        probs: Tensor | None = None,
        handle: Handle | None = None,
        pad_multiple: int | None = None,
        fuse_unpermute_combine: bool = False,
        num_dispatched_tokens: int | None = None,
        weighted: bool = False,
        fp32_partials: bool = False,
    ) -> Combined:
        """HybridEPBuffer.combine_with_unpermute with the same arguments and results: the sums [T, H] of hidden [P, H],
        bf16, fp16 or fp32, and probs fp32 [T, E] or None; weighted multiplies rows by the dispatched weights.
        pad_multiple, fuse_unpermute_combine and num_dispatched_tokens change nothing. ValueError for another dtype, a
        handle of another verb, and for probs with weighted."""
        plan, dispatched = _plan_of(handle, PERMUTED)
        if weighted and probs is not None:
            raise ValueError("weighted=True multiplies by the dispatched weights; leave probs out")
        return self._combine(plan, hidden, dispatched if weighted else probs, True, weighted, fp32_partials)

    def _combine(
        self, plan: WorldPlan, hidden: Tensor, probs: Tensor | None, permuted: bool, weighted: bool, fp32_partials: bool
    ) -> Combined:
        if hidden.dtype not in SUMMED_DTYPES:
            raise ValueError(f"hidden has dtype {hidden.dtype}; combine sums bfloat16, float16 or float32")
        everyone = self._gather((hidden.detach(), probs))
        rows, weights = (list(column) for column in zip(*everyone, strict=True))
        return combine_world(plan, rows, weights, permuted, weighted, fp32_partials)[self.rank]


def _plan_of(handle: Handle | None, kind: HandleKind) -> tuple[WorldPlan, Tensor | None]:
    """(WorldPlan, the permuted weights that the dispatch returned)."""
    if not isinstance(handle, tuple) or len(handle) != kind.length:
        raise ValueError(f"handle must be the {kind.length}-tuple that the matching dispatch returned")
    return handle[kind.config]
