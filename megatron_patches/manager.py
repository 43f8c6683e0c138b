"""The communication manager behind Megatron's flex dispatcher, on hybrid_ep's autograd operators.

The manager is duck-typed: Megatron's abstract base gains methods between
releases, and what counts is the set of attributes that the dispatcher, the 1F1B schedule, CUDA graphs and
the paged stash touch.

    setup_metadata -> dispatch -> get_permuted... -> (experts) -> get_restored... -> combine
    token_probs       handle      dispatched_probs                                   handle dropped
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.transformer.moe.moe_utils import get_align_size_for_quantization, get_capacity

from hybrid_ep import env, functional
from hybrid_ep.buffer_sizes import FIRST_TOPK
from hybrid_ep.payload import quantize
from hybrid_ep.runtime.handle_kinds import OVERFLOW_FLAG
from hybrid_ep.runtime.validation import ROW_ALIGNMENT
from megatron_patches import buffers, recompute, settings

if TYPE_CHECKING:
    import torch.distributed as dist
    from megatron.core.transformer.transformer_config import TransformerConfig

    from hybrid_ep import HybridEPBuffer
    from hybrid_ep.streams import EventOverlap
    from megatron_patches.settings import Settings


_PROMISE = (
    "moe_pad_expert_input_to_capacity promises {} rows for each local expert, the map gave {}: it needs the same "
    "number of tokens on every rank, and maps that were padded"
)


class HybridEPManager:
    """Dispatch and combine of one MoE layer. Holds the tensors of the forward pass that is under way.

    group: tensor x expert parallel ranks, R of them. num_experts: columns of the map, R * num_local_experts.
    router_topk: pairs a token can have in that map (tensor parallel size x the router's top-k).
    Attributes Megatron reads or overwrites between the steps:
      token_probs fp32 [T, num_experts]: read at dispatch, so the 1F1B schedule may put a detached copy here.
      routing_map bool [T, num_experts].
      dispatched_probs fp32 [P]: returned with the permuted rows, may be replaced by a detached copy too.
      over_budget bool [1]: set when the rank capacity budget dropped tokens, until Megatron resets it.
      moe_expert_rank_capacity_factor: may be set to None to rerun a step without a budget.
    event: of the operation under way; see `wait`.
    last_plan: of the balancer, the latest micro-batch's; None without one.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        num_local_experts: int,
        num_experts: int,
        router_topk: int,
        config: TransformerConfig,
    ) -> None:
        self.group, self.hidden = group, 0
        self.num_local_experts = num_local_experts
        self.num_experts = num_experts
        self.router_topk = router_topk
        self.config = config
        self.settings = settings.current()
        self.drop_and_pad = config.moe_pad_expert_input_to_capacity
        if self.drop_and_pad and config.moe_expert_capacity_factor is None:
            raise ValueError("moe_pad_expert_input_to_capacity is set without moe_expert_capacity_factor: give one")
        _check_at_start(config, self.settings)
        buffers.num_nodes(group, self.settings)  # ValueError for a group that straddles nodes unevenly
        self.moe_expert_rank_capacity_factor = getattr(config, "moe_expert_rank_capacity_factor", None)
        self.over_budget = torch.zeros(1, dtype=torch.bool, device=_device())
        self.pad_multiple = _pad_multiple(config, self.settings.experts.grouped)
        self.asynchronous = self.settings.exchange.async_finish
        self.last_plan: Any = None
        self.reset_transient_forward_state()

    def reset_transient_forward_state(self) -> None:
        """Forget the forward pass under way; what accumulates over a step (over_budget) stays."""
        self.token_probs: torch.Tensor | None = None
        self.routing_map: torch.Tensor | None = None
        self.dispatched_probs: torch.Tensor | None = None
        self.tokens_per_expert: torch.Tensor | None = None
        self.handle: tuple[Any, ...] | None = None
        self.buffer: HybridEPBuffer | None = None
        self.output_is_read = True
        self.event: EventOverlap | None = None
        self._promised: tuple[torch.Tensor, int] | None = None  # counts on a device, and what each of them must be

    def setup_metadata(self, routing_map: torch.Tensor, probs: torch.Tensor) -> None:
        """Take the map and probabilities of T tokens, [T, num_experts] or [T, R, num_local_experts] each.

        No communication and no look at values: Megatron compiles this step and captures it in CUDA graphs.
        """
        num_tokens = routing_map.shape[0]
        self.routing_map = routing_map.reshape(num_tokens, self.num_experts)
        self.token_probs = probs.reshape(num_tokens, self.num_experts)

    def routed(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(routing_map, token_probs) of the forward pass under way. RuntimeError before setup_metadata."""
        if self.routing_map is None or self.token_probs is None:
            raise RuntimeError("no routing to dispatch by: call setup_metadata(routing_map, probs) before dispatch")
        return self.routing_map, self.token_probs

    def _static_rows(self, num_tokens: int) -> tuple[int, int | None] | tuple[None, None]:
        """(P, rows per local expert) known without looking at the map, each None where only the map tells.

        Computed here and not in setup_metadata, whose Python does not run when a CUDA graph replays that
        step.
        """
        if self.drop_and_pad:  # each expert takes `capacity` rows of every rank; all ranks bring the same T
            num_experts = self.num_experts * self.config.moe_router_topk // self.router_topk
            capacity = get_capacity(
                num_tokens * self.config.moe_router_topk, num_experts, self.config.moe_expert_capacity_factor
            )
            rows = min(capacity, num_tokens) * self.group.size()  # a router has no more rows to give than tokens
            rows += -rows % (self.pad_multiple or 1)
            return rows * self.num_local_experts, rows
        if self.moe_expert_rank_capacity_factor is not None:
            budget = int(num_tokens * self.router_topk * self.moe_expert_rank_capacity_factor)
            return budget + -budget % max(get_align_size_for_quantization(self.config), 1), None
        return None, None

    def _tokens_of_ranks(self, num_tokens: int, num_rows: int | None) -> int | None:
        """Tokens of every rank, by which a buffer chooses its path; None where they may differ, or are not asked for.
        Only with sequences of one length is a rank's own number that of all, which the first micro-batch shows.
        Collective in it."""
        asked = self.settings.exchange.latency_tokens is not None and num_rows is not None
        if not asked or getattr(self.config, "variable_seq_lengths", False) or torch.compiler.is_compiling():
            return None
        return num_tokens if buffers.tokens_alike(self.group, num_tokens, self.settings) else None

    def dispatch(
        self, hidden_states: torch.Tensor, async_finish: bool = True, allocate_on_comm_stream: bool = True
    ) -> torch.Tensor:
        """Send rows to their experts: [T, H] -> [P, H] grouped by local expert, groups padded with zeros.

        Collective over the group; T may differ between ranks and be 0. The two stream arguments belong to
        another backend and have no effect here, as in Megatron's own HybridEP manager: Megatron gives them always and
        waits at once. With the setting `async_finish` the result is there when `wait` has been called.
        """
        routing_map, probs = self.routed()
        if probs.dtype != torch.float32:
            _warn_probs_dtype(probs.dtype)
            self.token_probs = probs = probs.float()
        buffer = self.buffer_for(hidden_states)
        num_tokens, self.hidden = hidden_states.shape
        hidden_states = _whole_units(hidden_states)
        num_rows, rows_per_expert = self._static_rows(num_tokens)
        first = recompute.first_run(self)
        rows, self.dispatched_probs, _, counts, handle, *event = functional.dispatch_with_permute(
            buffer,
            hidden_states,
            routing_map=routing_map if first is None else None,
            probs=probs if first is None else recompute.checked(first, routing_map, probs, look=not probs.is_cuda),
            handle=None if first is None else first.handle,
            num_of_experts_per_rank=self.num_local_experts,
            pad_multiple=self.pad_multiple,
            num_permuted_tokens=num_rows,
            non_blocking=num_rows is not None,
            num_of_tokens_per_rank=self._tokens_of_ranks(num_tokens, num_rows),
            dispatch_dtype=self.settings.exchange.dispatch_dtype,
            **self._order(),
        )
        self.event = event[0] if event else None
        self.buffer, self.handle = buffer, handle
        buffers.serve(buffer, hidden_states.shape[1], hidden_states.dtype)
        self.output_is_read = recompute.dispatched(self, first, handle, routing_map, self.last_plan)
        if self.moe_expert_rank_capacity_factor is not None:
            self.wait()
            self.over_budget |= (handle[OVERFLOW_FLAG] != 0).to(self.over_budget.device)
        counts = counts.to(torch.int64)
        self.tokens_per_expert = counts if rows_per_expert is None else self._promised_rows(rows_per_expert, counts)
        return self._trimmed(rows)

    def buffer_for(self, hidden_states: torch.Tensor) -> HybridEPBuffer:
        """The buffer of a dispatch of these rows [T, H]. Collective where there is none yet."""
        num_tokens, hidden = hidden_states.shape
        return buffers.get(
            self.group,
            hidden=hidden + _missing(hidden_states),
            dtype=hidden_states.dtype,
            num_tokens=num_tokens,
            num_local_experts=self.num_local_experts,
            num_sms=_num_sms(self.config),
            configured={**_local_pass(self.config), **self._streams(hidden_states), **self._width()},
            wanted=self.settings,
        )

    def _width(self) -> dict[str, int]:
        """Experts of a token in the map, where they are more than a buffer has room for by itself: calls of static size
        cannot make more. Padding to capacity gives experts tokens that did not choose them, any number of them one."""
        most = self.num_experts if self.drop_and_pad else min(self.router_topk, self.num_experts)
        return {"topk": most} if most > FIRST_TOPK else {}

    def _streams(self, like: torch.Tensor) -> dict[str, int]:
        """On a GPU where dispatch and combine have a stream beside the experts': for how many there are results. Of an
        arena whose size was chosen for it: the default, which is limited, is better one stream's than none's."""
        beside = self.asynchronous or getattr(self.config, "overlap_moe_expert_parallel_comm", False)
        sized = self.settings.exchange.arena_mib or env.get("HYBRID_EP_ARENA_MIB")
        return {"arena_streams": 2} if beside and like.is_cuda and sized else {}

    def _order(self) -> dict[str, Any]:
        """What an operator is told of streams. It starts when what the layer's stream holds so far has passed, which is
        where its inputs are ready: Megatron queues nothing in between that an earlier event would let it pass."""
        return {"async_finish": True} if self.asynchronous else {}

    def wait(self) -> None:
        """The current stream waits for the operation under way, if there is one; nothing of it may be read before."""
        if self.event is not None:
            self.event.current_stream_wait()
        self.event = None

    def _trimmed(self, rows: torch.Tensor) -> torch.Tensor:
        """The first `hidden` columns; rows themselves where they have no more, since schedules free what is no view."""
        if rows.shape[1] == self.hidden:
            return rows
        self.wait()
        return rows[:, : self.hidden].contiguous()

    def _promised_rows(self, rows: int, counted: torch.Tensor) -> torch.Tensor:
        """Drop and pad: the counts are a host constant, so that no one waits for the device to learn them."""
        if counted.device.type != "cpu":
            self._promised = counted, rows
        elif (counted != rows).any():
            raise ValueError(_PROMISE.format(rows, counted.tolist()))
        return torch.full((self.num_local_experts,), rows, dtype=torch.int64, device="cpu")

    def get_permuted_hidden_states_by_experts(
        self, hidden_states: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """([P, H], fp32 [P]): the rows are expert-major already."""
        self.wait()
        if self._promised is not None:  # on a device, which ends there, rather than that rows meet other experts
            (counted, rows), self._promised = self._promised, None
            torch._assert_async((counted == rows).all(), _PROMISE.format(rows, "others"))
        return hidden_states, self.dispatched_probs

    def get_number_of_tokens_per_expert(self) -> torch.Tensor | None:
        """int64 [num_local_experts], padding included; sums to P unless a budget left slack at the end."""
        return self.tokens_per_expert

    def get_restored_hidden_states_by_experts(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """[P, H] unchanged: combine undoes the permutation."""
        return hidden_states

    def combine(
        self, hidden_states: torch.Tensor, async_finish: bool = True, allocate_on_comm_stream: bool = True
    ) -> torch.Tensor:
        """Bring expert outputs back and sum them, unweighted: [P, H] -> [T, H]. Collective over the group. As dispatch,
        with the setting `async_finish`, to be waited for."""
        if self.buffer is None or self.handle is None:
            raise RuntimeError("nothing was dispatched to combine: call dispatch first, and combine once")
        self.wait()
        buffers.serve(None)
        dead = not self.output_is_read and not torch.compiler.is_compiling()  # whose graphs exchange in any case
        output, _, *event = functional.combine_with_unpermute(
            self.buffer,
            _whole_units(hidden_states),
            self.handle,
            **({"backward_only": True} if dead else self._order()),
        )
        self.event = event[0] if event else None
        self.handle = self.buffer = None
        return self._trimmed(output)


def _device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def _num_sms(config: TransformerConfig) -> int | None:
    """Megatron's SM count: one flag since 0.19, the hybridep one before (0.16: 16 unasked). None on a CPU."""
    if not torch.cuda.is_available():
        return None
    value = getattr(config, "moe_flex_dispatcher_num_sms", None)
    return value if value is not None else getattr(config, "moe_hybridep_num_sms", None)


def _local_pass(config: TransformerConfig) -> dict[str, int]:
    """Megatron's blocks of permute and unpermute (since 0.17), where somebody asked for them."""
    wished = {
        name: getattr(config, f"moe_hybridep_{name}", None) for name in ("num_blocks_permute", "num_blocks_unpermute")
    }
    return {name: blocks for name, blocks in wished.items() if blocks is not None}


def _pad_multiple(config: TransformerConfig, own_experts: bool) -> int | None:
    """Rows to which an expert's group is padded, or None. Megatron leaves it to the dispatcher since 0.18.

    Without fp8, fp4, the grouped kernels of Transformer Engine or its grouped tensors nothing asks for it (0.16 and
    0.17 answer 16 then). own_experts: those of --hybrid-ep-grouped-gemm compute, which take groups of any size, in fp8,
    too: padding would be rows for nothing, and more than static rows have.
    """
    if own_experts:
        return None
    asked = config.fp8 or any(
        getattr(config, name, None) for name in ("fp4", "use_transformer_engine_op_fuser", "moe_use_grouped_tensor")
    )
    multiple = get_align_size_for_quantization(config) if asked else 0
    return multiple or None


def _check_at_start(config: TransformerConfig, wanted: Settings) -> None:
    """ValueError, when the layer is built, for what its first forward would refuse."""
    hidden = getattr(config, "moe_latent_size", None) or config.hidden_size
    quantize.format_of(wanted.exchange.dispatch_dtype, hidden)
    if wanted.exchange.async_finish and getattr(config, "overlap_moe_expert_parallel_comm", False):
        raise ValueError(
            "async_finish (--hybrid-ep-async-finish) does not work with --overlap-moe-expert-parallel-comm, which has "
            "a stream for the exchange and frees what is dispatched when that stream is through: drop one of them"
        )
    if wanted.exchange.async_finish and wanted.exchange.dispatch_dtype not in (None, "bf16"):
        raise ValueError(
            f"async_finish (--hybrid-ep-async-finish) does not work with dispatch_dtype="
            f"{wanted.exchange.dispatch_dtype!r}, whose rows are dequantised at once: drop one of them"
        )
    step = ROW_ALIGNMENT // config.params_dtype.itemsize
    if hidden % step:
        _warn_once(
            f"rows of {hidden} {config.params_dtype} values are no multiple of {ROW_ALIGNMENT} bytes: hybrid_ep pads "
            f"them to {hidden + -hidden % step} values, which costs a copy in every dispatch and combine; a hidden "
            f"size that is a multiple of {step} needs none"
        )


def _whole_units(rows: torch.Tensor) -> torch.Tensor:
    """Rows [T, H], padded with zeros to a multiple of 16 bytes where they are none. Gradients of the padding drop out.

    Zeros stay zeros through dispatch and combine, which move and add columns one by one."""
    missing = _missing(rows)
    return torch.nn.functional.pad(rows, (0, missing)) if missing else rows


def _missing(rows: torch.Tensor) -> int:
    """Elements that a row lacks to such a multiple."""
    return -rows.shape[1] % (ROW_ALIGNMENT // rows.element_size())


_warned: set[str] = set()


def _warn_once(text: str) -> None:
    if text not in _warned:
        _warned.add(text)
        warnings.warn(text, stacklevel=4)


def _warn_probs_dtype(dtype: torch.dtype) -> None:
    _warn_once(
        f"router probabilities are {dtype} and are converted to float32 in every dispatch: set --moe-router-dtype fp32"
    )
