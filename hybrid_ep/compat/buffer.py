"""deep_ep.Buffer, the older interface, for high-throughput (training) callers: a thin layer over HybridEPBuffer.

A row that arrives carries its token's whole topk_idx and topk_weights beside the hidden elements, in the place of
scaling factors, so that recv_topk_idx and recv_topk_weights keep the caller's columns. Everything else is
HybridEPBuffer's dispatch and combine, without permute."""

from __future__ import annotations

import itertools
import weakref
from typing import Any, NoReturn

import torch

from hybrid_ep.compat import hybrid
from hybrid_ep.compat import over_hybrid as rows
from hybrid_ep.compat.events import Config, EventHandle, EventOverlap, wait_for
from hybrid_ep.compat.over_hybrid import OverHybrid
from hybrid_ep.runtime import validation

_FIRST_HIDDEN = 8  # what a buffer makes room for before it has seen a call; calls grow it


class _Key(bytearray):
    """The storage of a handle's first tensor; `kept` lives as long as any tensor that shares it, detached ones of
    activation checkpointing included."""

    kept: tuple[Any, ...]


_serial = itertools.count(1)
_keys: weakref.WeakValueDictionary[int, _Key] = weakref.WeakValueDictionary()


class Buffer(OverHybrid):
    """deep_ep.Buffer without its low-latency half. Collective, as HybridEPBuffer is: every rank of the group
    constructs it and makes the same calls in the same order.

    num_nvl_bytes and num_rdma_bytes are kept as attributes and have no effect, nor have low_latency_mode (but the
    low-latency verbs raise NotImplementedError), num_qps_per_rank, allow_nvlink_for_low_latency_mode, allow_mnnvl,
    use_fabric and explicitly_destroy: registered memory is sized by the calls and grows with them, and destroy() may be
    called in any case. NotImplementedError for allow_nvlink_for_normal_mode=False, for comm (MPI) and for V2's
    enable_shrink=True. As everywhere, HYBRID_EP_RANKS_PER_NODE says where nodes end when it is not by host.

    async_finish works as in HybridEPBuffer, except that dispatch waits on the host for the counts, which it returns as
    a list. allocate_on_comm_stream has no effect on results and none on memory."""

    num_sms: int = 20  # what callers read; a call takes it only after set_num_sms
    _num_sms_was_set = False

    def __init__(
        self,
        group: Any,
        num_nvl_bytes: int = 0,
        num_rdma_bytes: int = 0,
        low_latency_mode: bool = False,
        num_qps_per_rank: int = 24,
        allow_nvlink_for_normal_mode: bool = True,
        allow_nvlink_for_low_latency_mode: bool = True,
        allow_mnnvl: bool = False,
        use_fabric: bool = False,
        explicitly_destroy: bool = False,
        comm: Any = None,
        *,
        enable_shrink: bool = False,
    ):
        if comm is not None or group is None:
            raise NotImplementedError("Buffer(comm=...) builds on MPI; give a torch.distributed group instead")
        if not allow_nvlink_for_normal_mode:
            raise NotImplementedError(
                "allow_nvlink_for_normal_mode=False: tokens between ranks of a node always go "
                "through their shared memory; leave it True"
            )
        if enable_shrink:
            raise NotImplementedError(
                f"enable_shrink={enable_shrink!r}: the low-latency calls, whose ranks it masks, are not served; "
                "leave it False"
            )
        validation.integer("num_nvl_bytes", num_nvl_bytes, 0)
        validation.integer("num_rdma_bytes", num_rdma_bytes, 0)
        self._hybrid = hybrid.HybridEPBuffer(group, _FIRST_HIDDEN, 1, 1)
        self.runtime = self._hybrid.runtime
        self.group, self.rank, self.group_size = group, self._hybrid.rank, self._hybrid.group_size
        self.num_nvl_bytes, self.num_rdma_bytes = num_nvl_bytes, num_rdma_bytes
        self.low_latency_mode, self.explicitly_destroy = low_latency_mode, explicitly_destroy
        self.enable_shrink = False
        self.disable_nvlink_for_normal_mode = False

    # ---- what is asked of the class
    @staticmethod
    def is_sm90_compiled() -> bool:
        """True: callers take it to mean that groups may span nodes."""
        return True

    @staticmethod
    def set_num_sms(new_num_sms: int) -> None:
        """Blocks of every later call of every Buffer, where it is given no config."""
        Buffer.num_sms = validation.integer("new_num_sms", new_num_sms, 1)
        Buffer._num_sms_was_set = True

    @staticmethod
    def capture() -> EventOverlap:
        """An event of what the current stream holds so far, to be a previous_event."""
        return EventOverlap(EventHandle())

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> Config:
        """For any number of ranks."""
        validation.integer("num_ranks", num_ranks, 1)
        return Config(Buffer.num_sms)

    @staticmethod
    def get_combine_config(num_ranks: int) -> Config:
        """For any number of ranks."""
        return Buffer.get_dispatch_config(num_ranks)

    @staticmethod
    def get_low_latency_rdma_size_hint(
        num_max_dispatch_tokens_per_rank: int, hidden: int, num_ranks: int, num_experts: int
    ) -> int:
        """0, for callers that size one buffer for both modes; see Config.get_nvl_buffer_size_hint."""
        return 0

    # ---- the verbs
    def get_dispatch_layout(
        self,
        topk_idx: torch.Tensor,
        num_experts: int,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple:
        """What this rank is about to send: (num_tokens_per_rank int32 [ranks], num_tokens_per_rdma_rank int32 [nodes]
        or None with one node, num_tokens_per_expert int32 [num_experts], is_token_in_rank bool [T, ranks], event).

        topk_idx int64 [T, K], -1 drops a choice. Local: plain operations on the current stream."""
        self._flags(async_finish, allocate_on_comm_stream)
        wait_for(previous_event)
        num_experts = validation.experts_of_group("num_experts", num_experts, self.group_size)
        idx = rows.checked_topk(topk_idx, topk_idx.shape[0], num_experts)
        kept = idx >= 0
        per_expert = torch.zeros(num_experts, dtype=torch.int32, device=idx.device).scatter_add(
            0, idx.clamp(min=0).flatten(), kept.int().flatten()
        )
        in_rank = _marks(idx.clamp(min=0) // (num_experts // self.group_size), kept, self.group_size)
        per_node = None
        if (nodes := self._hybrid.num_of_nodes) > 1:
            per_node = in_rank.view(len(idx), nodes, self.group_size // nodes).any(2).sum(0, dtype=torch.int32)
        return (
            in_rank.sum(0, dtype=torch.int32),
            per_node,
            per_expert,
            in_rank,
            EventOverlap(EventHandle() if async_finish else None),
        )

    def dispatch(
        self,
        x: Any,
        handle: tuple | None = None,
        num_tokens_per_rank: torch.Tensor | None = None,
        num_tokens_per_rdma_rank: torch.Tensor | None = None,
        is_token_in_rank: torch.Tensor | None = None,
        num_tokens_per_expert: torch.Tensor | None = None,
        topk_idx: torch.Tensor | None = None,
        topk_weights: torch.Tensor | None = None,
        expert_alignment: int = 1,
        num_worst_tokens: int = 0,
        config: Config | None = None,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple:
        """Sends each token once to every rank that holds one of its experts: (recv_x, recv_topk_idx,
        recv_topk_weights, num_recv_tokens_per_expert_list, handle, event).

        x [T, H] as HybridEPBuffer.dispatch takes it, or (x, scales [T, S] of a 4-byte dtype). Rows arrive by source
        rank, then token. recv_topk_idx int64 [M, K]: numbers of this rank's experts from 0, -1 where a choice is
        another rank's or dropped; recv_topk_weights fp32 [M, K], 0 there (None without topk_weights). The list holds
        the rows of each local expert, rounded up to expert_alignment. The handle is opaque, a tuple of tensors.

        The layout arguments are those that get_dispatch_layout returned for topk_idx; on CPU tensors that is checked.
        With a handle, which takes the place of topk_idx and the layout, the result is (recv_x, None, None, None, None,
        event). ValueError for what does not fit together; NotImplementedError for num_worst_tokens, for routing
        without topk_idx and for NVFP4 triples."""
        self._flags(async_finish, allocate_on_comm_stream)
        if num_worst_tokens:
            raise NotImplementedError(
                f"num_worst_tokens={num_worst_tokens} promises a dispatch without host waits; "
                "use HybridEPBuffer.dispatch_with_permute(non_blocking=True, "
                "num_permuted_tokens=...)"
            )
        alignment = validation.integer("expert_alignment", expert_alignment, 1)
        x, scales = rows.rows_and_scales(x)
        wait_for(previous_event)
        if handle is not None:
            if topk_idx is not None or topk_weights is not None:
                raise ValueError(
                    "handle and topk_idx or topk_weights are given; a handle stands for its routing: "
                    "leave the others out"
                )
            (recv, _, scales, _), done = self._call(
                "dispatch", _sms(config), async_finish, hidden=x, scaling_factor=scales, handle=self._kept(handle)[0]
            )
            return recv if scales is None else (recv, scales), None, None, None, None, done
        if topk_idx is None or num_tokens_per_rank is None or is_token_in_rank is None or num_tokens_per_expert is None:
            missing = "topk_idx" if topk_idx is None else "what get_dispatch_layout returned"
            raise NotImplementedError(
                f"a dispatch without handle needs {missing}; give topk_idx, num_tokens_per_rank, "
                "is_token_in_rank and num_tokens_per_expert"
            )
        num_experts = validation.experts_of_group(
            "num_tokens_per_expert's length", num_tokens_per_expert.numel(), self.group_size
        )
        idx = rows.checked_topk(topk_idx, x.shape[0], num_experts)
        self._same_layout(idx, num_experts, is_token_in_rank, num_tokens_per_expert)
        weights = rows.checked_weights(topk_weights, tuple(idx.shape))
        (recv, _, packed, inner), done = self._call(
            "dispatch",
            _sms(config),
            async_finish,
            hidden=x,
            topk_idx=idx,
            num_of_experts=num_experts,
            scaling_factor=rows.pack(idx.int(), weights, scales),
        )
        with self._after(done):
            topk = idx.shape[1]
            _, recv_weights, scales = rows.unpack(
                packed,
                (topk, torch.int32),
                None if weights is None else (topk, torch.float32),
                None if scales is None else (-1, scales.dtype),
            )
            recv_idx = rows.local_choices(packed[:, :topk], self.rank, num_experts // self.group_size)
            if recv_weights is not None:
                recv_weights = recv_weights.masked_fill(recv_idx < 0, 0.0)
            counts = [-(-n // alignment) * alignment for n in inner[6].plan.padded_tokens_per_expert.tolist()]
            outer = (_key(inner, topk), idx, recv_idx, is_token_in_rank)
            done = EventOverlap(EventHandle()) if async_finish else done
        self._hand_over(done, recv_idx, recv_weights, scales)
        return recv if scales is None else (recv, scales), recv_idx, recv_weights, counts, outer, done

    def combine(
        self,
        x: torch.Tensor,
        handle: tuple,
        topk_weights: torch.Tensor | None = None,
        bias: Any = None,
        config: Config | None = None,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple:
        """The sum, without weights, of what the ranks return for each token: (combined_x [T, H], combined_topk_weights
        fp32 [T, K] or None, event).

        x [M, H] bf16, fp16 or fp32 in the order of the dispatch. topk_weights fp32 [M, K] come back to the columns of
        the dispatch's topk_idx, which is the backward of recv_topk_weights; entries where recv_topk_idx is -1 do not
        count. bias, one tensor [T, H] or two, is added to the sum: rounded once more than deep_ep does."""
        self._flags(async_finish, allocate_on_comm_stream)
        wait_for(previous_event)
        inner, topk = self._kept(handle)
        plan, probs, (_, idx, recv_idx, *_) = inner[6].plan, None, handle
        added = rows.checked_bias(bias, len(idx), x)
        if topk_weights is not None:
            given = validation.weights("topk_weights", topk_weights, (recv_idx.shape[0], topk))
            first = self._hybrid.local_rank * plan.num_local_experts
            probs = given.new_zeros(recv_idx.shape[0], plan.num_node_experts).scatter_add(
                1, recv_idx.clamp(min=0) + first, given.detach().masked_fill(recv_idx < 0, 0.0)
            )
        (out, returned), done = self._call("combine", _sms(config), async_finish, hidden=x, probs=probs, handle=inner)
        with self._after(done):
            out, returned = rows.add_bias(out, added), rows.of_choices(returned, idx)
            done = EventOverlap(EventHandle()) if async_finish else done
        self._hand_over(done, out, returned)
        return out, returned, done

    # ---- what is not there
    def _low_latency(self, *_: Any, **__: Any) -> NoReturn:
        raise NotImplementedError(
            "deep_ep.Buffer's low-latency calls are not served; use "
            "HybridEPBuffer.dispatch_with_permute(non_blocking=True, num_permuted_tokens=...) "
            "and combine_with_unpermute, which make no host wait"
        )

    low_latency_dispatch = low_latency_combine = clean_low_latency_buffer = _low_latency
    get_next_low_latency_combine_buffer = low_latency_update_mask_buffer = low_latency_query_mask_buffer = _low_latency
    low_latency_clean_mask_buffer = _low_latency

    def get_local_buffer_tensor(self, *_: Any, **__: Any) -> NoReturn:
        raise NotImplementedError("registered memory is not handed out; results are tensors of their own")

    # ---- how they work
    @staticmethod
    def _flags(async_finish: Any, allocate_on_comm_stream: Any) -> None:
        validation.flag("async_finish", async_finish)
        validation.flag("allocate_on_comm_stream", allocate_on_comm_stream)

    def _same_layout(self, idx: torch.Tensor, num_experts: int, in_rank: Any, per_expert: Any) -> None:
        if tuple(in_rank.shape) != (len(idx), self.group_size):
            raise ValueError(
                f"is_token_in_rank has shape {tuple(in_rank.shape)}; it must have "
                f"{(len(idx), self.group_size)}: give what get_dispatch_layout returned for topk_idx"
            )
        if idx.device.type != "cpu":
            return  # looking would wait for the device
        _, _, want_per_expert, want_in_rank, _ = self.get_dispatch_layout(idx, num_experts)
        for name, given, want in (
            ("is_token_in_rank", in_rank, want_in_rank),
            ("num_tokens_per_expert", per_expert, want_per_expert),
        ):
            if not torch.equal(given, want):
                raise ValueError(
                    f"{name} is not the layout of topk_idx; give what get_dispatch_layout returned for it "
                    "(a choice that is to be dropped is -1 in topk_idx)"
                )

    @staticmethod
    def _kept(handle: Any) -> tuple[tuple, int]:
        """(HybridEPBuffer's handle, K) of one of ours."""
        if not isinstance(handle, (tuple, list)) or len(handle) != 4 or handle[0].dtype != torch.int64:
            raise ValueError("handle is not one that Buffer.dispatch returned; hand its handle on unchanged")
        key = _keys.get(int(handle[0]))
        if key is None:
            raise ValueError(
                "handle's dispatch is forgotten: its first tensor was copied (to a device, by clone or by "
                "pickle) and the original dropped; keep the tensors of a handle as they are"
            )
        return key.kept


def _marks(columns: torch.Tensor, kept: torch.Tensor, width: int) -> torch.Tensor:
    """bool [T, width]: which columns a row names."""
    counts = torch.zeros(len(columns), width, dtype=torch.int32, device=columns.device)
    return counts.scatter_add(1, columns, kept.int()).bool()


def _sms(config: Any) -> int | None:
    """Blocks of a call; None: the buffer's."""
    if config is None:
        return Buffer.num_sms if Buffer._num_sms_was_set else None
    if not hasattr(config, "num_sms"):
        raise ValueError(f"config is {validation.describe(config)}; give a deep_ep.Config, or None")
    return config.num_sms


def _key(inner: tuple, topk: int) -> torch.Tensor:
    """The tensor by which a handle finds (inner, K) again: int64 [1], on the CPU."""
    key = _Key(next(_serial).to_bytes(8, "little"))
    key.kept = (inner, topk)
    tensor = torch.frombuffer(key, dtype=torch.int64)
    _keys[int(tensor)] = key
    return tensor
