"""deep_ep.ElasticBuffer, the interface of DeepEP V2, for its dispatch and combine: a thin layer over HybridEPBuffer.

Compact results are HybridEPBuffer.dispatch's rows, expanded ones those of dispatch_with_permute. A row carries its
token's number, topk_idx and topk_weights beside the hidden elements, in the place of scaling factors."""

from __future__ import annotations

from functools import cached_property
from typing import Any, NoReturn

import torch

from hybrid_ep.compat import envs, hybrid
from hybrid_ep.compat import over_hybrid as rows
from hybrid_ep.compat.events import EventHandle, EventOverlap, wait_for
from hybrid_ep.compat.over_hybrid import OverHybrid
from hybrid_ep.runtime import validation
from hybrid_ep.runtime.bootstrap import GroupView
from hybrid_ep.runtime.plan import BlockingPlan

_FIRST_HIDDEN = 8  # what a buffer makes room for that is told no sizes; calls grow it
_PAGE = 2 << 20  # bytes, of which deep_ep's size hints are multiples
_MOST_TOPK = 32  # for which deep_ep's hints make room where they are told none
_SCALE_ALIGNMENT = 4  # scales of a column, of 4 bytes: what a TMA copy reads begins at 16 bytes


def _up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


class EPHandle:
    """What ElasticBuffer.dispatch returns for its combine and for dispatches of the same routing. With K choices a
    token, Er local experts, M received tokens, and A = expert_alignment:

    do_expand, num_experts, expert_alignment, num_max_tokens_per_rank, num_sms: of the dispatch. topk_idx int64 [T, K].
    Where ranks gave different num_max_tokens_per_rank, numbers of tokens and sums by their ranks below are void.
    num_recv_tokens, num_expanded_tokens: rows of a compact and of an expanded result; without do_cpu_sync limits.
    num_recv_tokens_per_expert_list: [Er], rounded up to A; without do_cpu_sync empty.
    num_unaligned_recv_tokens_per_expert int32 [Er].
    psum_num_recv_tokens_per_expert int32 [Er]: where an expert's rows end, with its padding in a compact handle and
    without it in an expanded one.
    psum_num_recv_tokens_per_scaleup_rank int32 [ranks of a node]: sums over received tokens by the source's rank within
    its node; int32 [ranks] by the source's rank without allow_hybrid_mode.
    recv_src_metadata int32 [M, K + 2]: number of the token, that is source rank x num_max_tokens_per_rank + its row
    there; row among the received; of each choice the row of the expanded result, -1 where it is another rank's (all of
    them in a compact handle).
    dst_buffer_slot_idx: HybridEPBuffer's sparse_to_dense_map. token_metadata_at_forward, channel_linked_list: None.

    The last three that are tensors are made when they are read. On a GPU NotImplementedError says that a dispatch
    without do_cpu_sync does not know them."""

    token_metadata_at_forward = None
    channel_linked_list = None

    def __init__(
        self,
        inner: Any,  # HybridEPBuffer's handle
        packed: torch.Tensor,
        topk_idx: torch.Tensor,
        num_scaleup_ranks: int,
        do_expand: bool,
        expert_alignment: int,
        num_max_tokens_per_rank: int,
        num_sms: int,
        num_rows: int,
        counts_known: bool,
    ):
        plan = inner[9 if do_expand else 6].plan
        self._inner, self._packed, self._plan, self._num_scaleup_ranks = inner, packed, plan, num_scaleup_ranks
        self.do_expand, self.num_experts, self.expert_alignment = do_expand, plan.num_experts, expert_alignment
        self.num_max_tokens_per_rank, self.num_sms = num_max_tokens_per_rank, num_sms
        self.topk_idx = topk_idx
        self.num_unaligned_recv_tokens_per_expert = plan.tokens_per_expert
        aligned = (self.num_unaligned_recv_tokens_per_expert + (expert_alignment - 1)) // expert_alignment
        ends = (aligned * expert_alignment).cumsum(0, dtype=torch.int32)
        if do_expand:
            ends = ends - aligned * expert_alignment + self.num_unaligned_recv_tokens_per_expert
        self.psum_num_recv_tokens_per_expert = ends
        self.num_recv_tokens = plan.num_ranks * num_max_tokens_per_rank
        self.num_expanded_tokens = num_rows
        self.num_recv_tokens_per_expert_list: list[int] = []
        if counts_known:
            counts = [_up(n, expert_alignment) for n in plan.padded_tokens_per_expert.tolist()]
            self.num_recv_tokens, self.num_expanded_tokens = plan.num_recv_rows, sum(counts)
            self.num_recv_tokens_per_expert_list = counts

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Those that are made with it."""
        counts = self.num_unaligned_recv_tokens_per_expert, self.psum_num_recv_tokens_per_expert
        return *counts, self.topk_idx, self._packed

    def _require_sync(self, name: str) -> None:
        if not isinstance(self._plan, BlockingPlan):
            raise NotImplementedError(
                f"handle.{name} is not known of a dispatch with do_cpu_sync=False; give do_cpu_sync=True"
            )

    @cached_property
    def _received(self) -> torch.Tensor:
        """int32 [M, 1 + K ..]: what came beside each received token."""
        if not self.do_expand:
            return self._packed
        row = self._inner.dense_to_expert_map.max(1).values if len(self._inner.dense_to_expert_map) else None
        return self._packed[:0] if row is None else self._packed.index_select(0, row.long())

    @cached_property
    def recv_src_metadata(self) -> torch.Tensor:
        self._require_sync("recv_src_metadata")
        received, topk = self._received, self.topk_idx.shape[1]
        slots = received.new_full((len(received), topk), -1)
        if self.do_expand and len(received):
            local = rows.local_choices(received[:, 1 : 1 + topk], self._plan.rank, self._plan.num_local_experts)
            found = self._inner.dense_to_expert_map.gather(1, local.clamp(min=0))
            slots = torch.where(local < 0, slots, found.to(slots.dtype))
        numbers = torch.arange(len(received), dtype=torch.int32, device=received.device)
        return torch.cat([received[:, :1], numbers[:, None], slots], dim=1)

    @cached_property
    def psum_num_recv_tokens_per_scaleup_rank(self) -> torch.Tensor:
        self._require_sync("psum_num_recv_tokens_per_scaleup_rank")
        source = self._received[:, 0].long() // self.num_max_tokens_per_rank % self._num_scaleup_ranks
        counts = source.new_zeros(self._num_scaleup_ranks).scatter_add(0, source, torch.ones_like(source))
        return counts.cumsum(0, dtype=torch.int32)

    @cached_property
    def dst_buffer_slot_idx(self) -> torch.Tensor:
        self._require_sync("dst_buffer_slot_idx")
        return self._inner.sparse_to_dense_map


class ElasticBuffer(OverHybrid):
    """deep_ep.ElasticBuffer's dispatch and combine. Collective, as HybridEPBuffer is: every rank of the group makes it,
    and the same calls in the same order.

    num_max_tokens_per_rank and hidden size the registered memory, which calls grow where they need more; num_topk,
    use_fp8_dispatch and num_bytes have no effect on it. num_gpu_timeout_secs is the deadline of every wait.
    allow_multiple_reduction=False: sums are rounded once, at the token's own rank (fp32_partials of HybridEPBuffer's
    combine). deterministic has no effect, for rows come by source rank, then token, and sums have one order, always.
    Nor have prefer_overlap_with_compute, sl_idx, num_allocated_qps, num_cpu_timeout_secs and explicitly_destroy:
    destroy() may be called in any case. allow_hybrid_mode=False changes what is said of scale-out and scale-up ranks
    alone, (1, all ranks): rows take the same ways. As everywhere, HYBRID_EP_RANKS_PER_NODE says where nodes end when it
    is not by NVLink domain or host.

    NotImplementedError for num_cpu_bytes and for what is not expert parallelism: Engram, pipeline send and receive,
    all-gather sessions."""

    def __init__(
        self,
        group: Any,
        num_bytes: int | None = None,
        num_cpu_bytes: int = 0,
        num_max_tokens_per_rank: int = 0,
        hidden: int = 0,
        num_topk: int = 0,
        use_fp8_dispatch: bool = False,
        deterministic: bool = False,
        allow_hybrid_mode: bool = True,
        allow_multiple_reduction: bool = True,
        prefer_overlap_with_compute: bool = True,
        sl_idx: int = 3,
        num_allocated_qps: int = 0,
        num_cpu_timeout_secs: int = 300,
        num_gpu_timeout_secs: int = 100,
        explicitly_destroy: bool = False,
    ):
        if num_cpu_bytes:
            raise NotImplementedError(f"num_cpu_bytes={num_cpu_bytes} is for Engram, which is not served; leave it 0")
        tokens = validation.integer("num_max_tokens_per_rank", num_max_tokens_per_rank, 0)
        hidden = validation.integer("hidden", hidden, 0)
        if num_bytes is None:
            if not tokens or not hidden:
                raise ValueError(
                    f"num_bytes is None, num_max_tokens_per_rank={tokens} and hidden={hidden}; give the latter two"
                )
            num_bytes = self.get_buffer_size_hint(group, tokens, hidden, num_topk, use_fp8_dispatch)
        self._hybrid = hybrid.HybridEPBuffer(
            group, hidden or _FIRST_HIDDEN, tokens or 1, 1, timeout_s=float(num_gpu_timeout_secs)
        )
        self.runtime = self._hybrid.runtime
        self.group, self.rank_idx, self.num_ranks = group, self._hybrid.rank, self._hybrid.group_size
        self.num_bytes, self.num_max_tokens_per_rank = num_bytes, tokens
        self.deterministic, self.allow_hybrid_mode = deterministic, allow_hybrid_mode
        self.allow_multiple_reduction = bool(allow_multiple_reduction)
        self.prefer_overlap_with_compute = prefer_overlap_with_compute
        self.num_allocated_qps, self.explicitly_destroy = num_allocated_qps or 1, explicitly_destroy
        self.num_scaleout_ranks, self.num_scaleup_ranks = self.get_logical_domain_size()
        self.scaleout_rank_idx, self.scaleup_rank_idx = divmod(self.rank_idx, self.num_scaleup_ranks)
        self.num_rdma_ranks, self.num_nvlink_ranks = self.get_physical_domain_size()

    # ---- what is asked of it
    @staticmethod
    def get_buffer_size_hint(
        group: Any,
        num_max_tokens_per_rank: int,
        hidden: int,
        num_topk: int = 0,
        use_fp8_dispatch: bool = False,
        allow_hybrid_mode: bool = True,
        allow_multiple_reduction: bool = True,
    ) -> int:
        """Bytes, a multiple of 2 MiB: of all ranks' tokens as bf16 rows of this rank. It grows with tokens, hidden and
        topk, for callers that compare it with num_bytes of a buffer they have; HybridEPBuffer.memory_report() says what
        is registered. 0 tokens, of a rank that has none, count as 1. The flags have no effect."""
        tokens = validation.integer("num_max_tokens_per_rank", num_max_tokens_per_rank, 0) or 1
        hidden = validation.integer("hidden", hidden, 1)
        topk = validation.integer("num_topk", num_topk, 0) or _MOST_TOPK
        return _up(GroupView.of(group).size * tokens * (2 * hidden + 8 * topk + 16), _PAGE)

    @staticmethod
    def capture() -> EventHandle:
        """What the current stream holds so far, to be a previous_event."""
        return EventHandle()

    def get_physical_domain_size(self) -> tuple[int, int]:
        """(nodes, ranks of a node)."""
        return self._hybrid.num_of_nodes, self.num_ranks // self._hybrid.num_of_nodes

    def get_logical_domain_size(self) -> tuple[int, int]:
        """(nodes, ranks of a node); without allow_hybrid_mode (1, all ranks)."""
        return envs.logical(self.get_physical_domain_size(), self.allow_hybrid_mode)

    def get_theoretical_num_sms(
        self,
        num_experts: int,
        num_topk: int,
        num_scaleout_topk: int = 0,
        rdma_gbs: float = 0,
        nvlink_gbs: float = 0,
        sm_read_gbs: float = 200,
        sm_write_gbs: float = 50,
    ) -> int:
        """What calls with num_sms=0 take: the buffer's own choice (HybridEPBuffer.sm_plan), whatever the arguments."""
        return self._hybrid.config.num_of_blocks_dispatch_api

    def get_theoretical_num_qps(self, num_sms: int) -> int:
        """num_allocated_qps; the number has no effect."""
        return self.num_allocated_qps

    def barrier(self, use_comm_stream: bool = True, with_cpu_sync: bool = False, sequential: bool = True) -> None:
        """Returns when every rank of the group has come, and what its device held before is done. BootstrapError names
        ranks that have not come by the deadline."""
        self._hybrid.barrier()

    # ---- the verbs
    def dispatch(
        self,
        x: Any,
        topk_idx: torch.Tensor | None = None,
        topk_weights: torch.Tensor | None = None,
        cumulative_local_expert_recv_stats: torch.Tensor | None = None,
        num_experts: int | None = None,
        num_max_tokens_per_rank: int | None = None,
        expert_alignment: int | None = None,
        num_sms: int = 0,
        num_qps: int = 0,
        previous_event: Any = None,
        previous_event_before_epilogue: Any = None,
        async_with_compute_stream: bool = False,
        allocate_on_comm_stream: bool = False,
        handle: EPHandle | None = None,
        do_handle_copy: bool = True,
        do_cpu_sync: bool | None = None,
        do_expand: bool = False,
        do_zero_padding: bool = False,
        use_tma_aligned_col_major_sf: bool = False,
    ) -> tuple:
        """Sends each token once to every rank that holds one of its experts: (recv_x, recv_topk_idx,
        recv_topk_weights, handle, event).

        x [T, H] as HybridEPBuffer.dispatch takes it, or (x, scales [T, S] of a 4-byte dtype, of any strides). Rows come
        by source rank, then token: compact one for each token, with recv_topk_idx int64 [M, K], numbers of this rank's
        experts from 0 or -1, and recv_topk_weights fp32 [M, K], 0 there; with do_expand one for each choice of this
        rank's experts, by expert, padded with zero rows to expert_alignment (default 1), with recv_topk_idx None and
        recv_topk_weights fp32 [rows]. Weights are None where none were given.

        handle: in place of topk_idx; a new expanded or compact result as the handle's was, with topk_weights if given;
        the handle itself comes back. do_cpu_sync=False (with do_expand): no wait for counts; rows for the worst case,
        zero behind the last. cumulative_local_expert_recv_stats int32 [local experts]: tokens received are added, but
        not with a handle. use_tma_aligned_col_major_sf: of the scales that come back strides are (1, rows rounded up to
        4). previous_event_before_epilogue is waited for before the dispatch. do_handle_copy=False: the handle holds
        topk_idx itself. num_qps, allocate_on_comm_stream and do_zero_padding have no effect.

        ValueError for what does not fit together; NotImplementedError for a compact dispatch with do_cpu_sync=False."""
        asynchronous = bool(async_with_compute_stream)
        blocks = validation.integer("num_sms", num_sms, 0) or None
        x, scales = rows.rows_and_scales(x)
        wait_for(previous_event)
        wait_for(previous_event_before_epilogue)
        if handle is not None:
            self._agrees(handle, topk_idx, num_experts, num_max_tokens_per_rank, expert_alignment, do_cpu_sync)
            if bool(do_expand) != handle.do_expand:
                raise ValueError(f"do_expand={bool(do_expand)} but the handle's dispatch had {handle.do_expand}")
            recv, idx, weights, scales, done = self._again(x, scales, handle, topk_weights, blocks, asynchronous)
        else:
            if topk_idx is None or num_experts is None:
                raise ValueError("topk_idx or num_experts is None; give both, or the handle of an earlier dispatch")
            experts = validation.experts_of_group("num_experts", num_experts, self.num_ranks)
            most = self._most_tokens(num_max_tokens_per_rank, x)
            alignment = 1 if expert_alignment is None else validation.integer("expert_alignment", expert_alignment, 1)
            chosen = rows.checked_topk(topk_idx, x.shape[0], experts)
            weights = rows.checked_weights(topk_weights, tuple(chosen.shape))
            number = torch.arange(len(chosen), dtype=torch.int32, device=chosen.device) + self.rank_idx * most
            beside = number[:, None], chosen.int()
            if do_expand:
                sync = do_cpu_sync is None or bool(do_cpu_sync)
                budget = None if sync else self._worst_case(chosen.shape[1], experts, most, alignment)
                (recv, weights, packed, _, inner), done = self._call(
                    "dispatch_with_permute", blocks, asynchronous, hidden=x, topk_idx=chosen, topk_weights=weights,
                    num_of_experts=experts, scaling_factor=rows.pack(*beside, scales), pad_multiple=alignment,
                    non_blocking=not sync, num_permuted_tokens=budget,
                )  # fmt: skip
            else:
                if do_cpu_sync is not None and not do_cpu_sync:
                    raise NotImplementedError(
                        "a compact dispatch with do_cpu_sync=False is not served; give do_expand=True, or let it wait"
                    )
                (recv, _, packed, inner), done = self._call(
                    "dispatch", blocks, asynchronous, hidden=x, topk_idx=chosen, num_of_experts=experts,
                    scaling_factor=rows.pack(*beside, weights, scales),
                )  # fmt: skip
            with self._after(done):
                of_handle = topk_idx if topk_idx.dtype == chosen.dtype and not do_handle_copy else chosen.clone()
                handle = EPHandle(
                    inner, packed, of_handle, self.num_scaleup_ranks, bool(do_expand), alignment, most,
                    blocks or self.get_theoretical_num_sms(experts, chosen.shape[1]), len(recv),
                    counts_known=do_cpu_sync is None or bool(do_cpu_sync),
                )  # fmt: skip
                idx, weights, scales = self._parted(handle, weights, scales)
                if cumulative_local_expert_recv_stats is not None:
                    cumulative_local_expert_recv_stats.add_(handle.num_unaligned_recv_tokens_per_expert)
        with self._after(done):
            if scales is not None and use_tma_aligned_col_major_sf:
                scales = _column_major(scales)
            done = EventOverlap(EventHandle()) if asynchronous else done
        self._hand_over(done, idx, weights, scales, *handle.tensors())
        return recv if scales is None else (recv, scales), idx, weights, handle, done

    def combine(
        self,
        x: torch.Tensor,
        handle: EPHandle,
        topk_weights: torch.Tensor | None = None,
        bias: Any = None,
        num_sms: int = 0,
        num_qps: int = 0,
        previous_event: Any = None,
        previous_event_before_epilogue: Any = None,
        async_with_compute_stream: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple:
        """The sum, without weights, of what the ranks return for each token: (combined_x [T, H], combined_topk_weights
        fp32 [T, K] or None, event).

        x bf16, fp16 or fp32, rows as the handle's dispatch laid them out. topk_weights fp32, [M, K] of a compact handle
        and [rows] of an expanded one, come back to the columns of topk_idx, 0 where a choice was dropped. bias, one
        tensor [T, H] or two, is added to the sum: rounded once more than deep_ep does. num_sms=0: the handle's."""
        asynchronous = bool(async_with_compute_stream)
        if not isinstance(handle, EPHandle):
            raise ValueError(f"handle is {validation.describe(handle)}; give what dispatch returned")
        blocks = validation.integer("num_sms", num_sms, 0) or handle.num_sms
        added = rows.checked_bias(bias, handle.topk_idx.shape[0], x)
        wait_for(previous_event)
        wait_for(previous_event_before_epilogue)
        inner, probs = handle._inner, topk_weights
        if handle.do_expand:
            verb = "combine_with_unpermute"
        else:
            verb = "combine"
            if topk_weights is not None:
                idx = self._local(handle)
                given = validation.weights("topk_weights", topk_weights, tuple(idx.shape)).detach()
                given = given.masked_fill(idx < 0, 0.0)
                first, width = self._hybrid.local_rank * handle._plan.num_local_experts, handle._plan.num_node_experts
                probs = given.new_zeros(len(idx), width).scatter_add(1, idx.clamp(min=0) + first, given)
        (out, returned), done = self._call(
            verb, blocks, asynchronous, hidden=x, probs=probs, handle=inner,
            fp32_partials=not self.allow_multiple_reduction,
        )  # fmt: skip
        with self._after(done):
            out, returned = rows.add_bias(out, added), rows.of_choices(returned, handle.topk_idx)
            done = EventOverlap(EventHandle()) if asynchronous else done
        self._hand_over(done, out, returned)
        return out, returned, done

    # ---- what is not there
    @staticmethod  # deep_ep's size hints are asked of the class, before there is a buffer
    def _not_served(*_: Any, **__: Any) -> NoReturn:
        raise NotImplementedError(
            "of deep_ep.ElasticBuffer dispatch and combine are served; not Engram, pipeline send and receive, "
            "nor all-gather sessions"
        )

    engram_write = engram_fetch = pp_set_config = pp_send = pp_recv = _not_served
    create_agrs_session = destroy_agrs_session = agrs_new_session = agrs_set_config = _not_served
    agrs_get_inplace_tensor = all_gather = _not_served
    get_engram_storage_size_hint = get_pp_buffer_size_hint = _not_served
    get_agrs_num_max_session_bytes = get_agrs_buffer_size_hint = _not_served

    # ---- how they work
    def _most_tokens(self, given: int | None, x: torch.Tensor) -> int:
        most = self.num_max_tokens_per_rank
        if given is not None and (validation.integer("num_max_tokens_per_rank", given, 0) or len(x)):
            most = given
        elif given is not None:  # a caller that gives the rows of x, on a rank without any
            return max(most, 1)
        if most < len(x) or most < 1:
            raise ValueError(
                f"num_max_tokens_per_rank={most} but x has {len(x)} rows; give the largest number of any rank, the "
                "same on all, here or to the constructor"
            )
        return most

    def _worst_case(self, topk: int, experts: int, most: int, alignment: int) -> int:
        """Rows of an expanded result, however the tokens are routed."""
        local = experts // self.num_ranks
        return _up(self.num_ranks * most * min(topk, local) + (alignment - 1) * local, alignment)

    @staticmethod
    def _agrees(handle: EPHandle, topk_idx: Any, experts: Any, most: Any, alignment: Any, sync: Any) -> None:
        if not isinstance(handle, EPHandle):
            raise ValueError(f"handle is {validation.describe(handle)}; give what dispatch returned")
        if topk_idx is not None or sync:
            name = "topk_idx" if topk_idx is not None else "do_cpu_sync=True"
            raise ValueError(
                f"handle and {name} are given; a handle stands for its routing and its counts: leave it out"
            )
        for name, given in (
            ("num_experts", experts), ("num_max_tokens_per_rank", most or None), ("expert_alignment", alignment),
        ):  # fmt: skip
            if given is not None and given != getattr(handle, name):
                raise ValueError(f"{name}={given} but the handle's dispatch had {getattr(handle, name)}; leave it out")

    def _again(
        self, x: torch.Tensor, scales: Any, handle: EPHandle, topk_weights: Any, blocks: int | None, asynchronous: bool
    ) -> tuple:
        """(rows, choices or None, weights or None, scales or None, event) by a handle."""
        given = rows.checked_weights(topk_weights, tuple(handle.topk_idx.shape))
        if handle.do_expand:
            new = {} if given is None else {"topk_idx": handle.topk_idx, "topk_weights": given}
            (recv, weights, packed, _, _), done = self._call(
                "dispatch_with_permute", blocks, asynchronous, hidden=x, scaling_factor=scales, handle=handle._inner,
                num_permuted_tokens=handle.num_expanded_tokens, **new,
            )  # fmt: skip
            return recv, None, None if given is None else weights, packed, done
        (recv, _, packed, _), done = self._call(
            "dispatch", blocks, asynchronous, hidden=x, scaling_factor=rows.pack(given, scales), handle=handle._inner
        )
        with self._after(done):
            idx = self._local(handle)
            weights, scales = rows.unpack(
                packed,
                None if given is None else (handle.topk_idx.shape[1], torch.float32),
                None if scales is None else (-1, scales.dtype),
            )
            return recv, idx, None if weights is None else weights.masked_fill(idx < 0, 0.0), scales, done

    @staticmethod
    def _local(handle: EPHandle) -> torch.Tensor:
        """int64 [M, K] of a compact handle."""
        topk = handle.topk_idx.shape[1]
        return rows.local_choices(handle._packed[:, 1 : 1 + topk], handle._plan.rank, handle._plan.num_local_experts)

    def _parted(self, handle: EPHandle, weights: Any, scales: Any) -> tuple:
        """(choices or None, weights or None, scales or None) of a new result; weights: of an expanded one as they came,
        of a compact one those that were sent."""
        topk = handle.topk_idx.shape[1]
        columns = [(1 + topk, torch.int32)]
        rest = None if scales is None else (-1, scales.dtype)
        if handle.do_expand:
            return None, weights, rows.unpack(handle._packed, *columns, rest)[1]
        idx = self._local(handle)
        sent = None if weights is None else (topk, torch.float32)
        _, weights, scales = rows.unpack(handle._packed, *columns, sent, rest)
        return idx, None if weights is None else weights.masked_fill(idx < 0, 0.0), scales


def _column_major(scales: torch.Tensor) -> torch.Tensor:
    """The same numbers with strides (1, rows rounded up)."""
    strides = 1, _up(len(scales), _SCALE_ALIGNMENT)
    return torch.empty_strided(scales.shape, strides, dtype=scales.dtype, device=scales.device).copy_(scales)
