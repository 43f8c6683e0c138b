"""HybridEPBuffer: the four verbs with deep_ep.HybridEPBuffer's names, order, defaults and results.

A rank of T tokens sends each to the ranks of its chosen experts (dispatch) and gets the sum of what they
return (combine). Rows arrive by source rank, then token; after permute by expert, then source rank, then
token. T may differ between ranks and be 0. Bad arguments raise ValueError and leave the buffer usable."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

try:
    from hybrid_ep import _core  # noqa: F401  (said once, clearly, before anything else needs it)
except ImportError as error:
    raise ImportError(
        f"hybrid_ep's compiled core (hybrid_ep._core) is missing or does not load; build it with 'pip "
        f"install .' in the source tree ({error})"
    ) from error
from hybrid_ep import memory, streams
from hybrid_ep.clones import PlannerOptions, PlansClones
from hybrid_ep.config import Configurer, HybridEpConfigInstance
from hybrid_ep.errors import BufferFailedError
from hybrid_ep.lending import LendsMemory
from hybrid_ep.meters import Meters
from hybrid_ep.runtime import latency, options, validation, verbs
from hybrid_ep.runtime.bootstrap import GroupView, Rendezvous
from hybrid_ep.runtime.call import Call
from hybrid_ep.runtime.handle import dispatch_handle, permute_handle
from hybrid_ep.runtime.handle_kinds import DISPATCHED, PERMUTED
from hybrid_ep.runtime.names import Named
from hybrid_ep.runtime.plan import Routed
from hybrid_ep.runtime.routing import Given
from hybrid_ep.runtime.session import Session
from hybrid_ep.runtime.signatures import Combined, Dispatched, GroupLike, Handle, Permuted


class HybridEPBuffer(LendsMemory, PlansClones, Meters, Named):
    """Registered memory of one group and the operations on it. Collective: every rank of the group constructs
    it and makes the same calls in the same order. Not re-entrant: operations that run at the same time need a
    buffer each; dispatches that wait for their combines may be many on one.

    * `group`: torch.distributed process group whose ranks are numbered node by node.
    * `hidden_dim`, `max_num_of_tokens_per_rank`, `num_local_experts`: what to make room for at first; larger calls
      grow the memory, on all ranks together.
    * `num_sms_dispatch_api`, `num_sms_combine_api`: blocks of an operation, unless its num_sms says otherwise
      (default: HYBRID_EP_NUM_BLOCKS, else what fills the links; print(buffer.sm_plan)). `num_blocks_permute`: blocks
      of a dispatch beside those, for its local work, as rows land (default: on GPUs with ranks of their own half as
      many again as feed links, 8 + 12, as far as the device has SMs; else those that feed links).
      `num_blocks_unpermute`: likewise of a combine, whose local work forms partial sums. `num_sms_preprocessing_api`:
      blocks of the exchange kernel, which routes, on a GPU (default: one for 128 tokens of the call, 1 for virtual
      ranks); of more than 32 it takes 32. A host's has one. `load_cached_kernels`, `use_shared_buffer`,
      `enable_custom_allgather` and `use_mnnvl` are accepted for compatibility and have no effect.
    * `num_of_hybrid_ep_ranks_per_nvlink_domain`: ranks a node (default: environment, else NVLink domain's or host's).
    * `capacity_factor`: receive rows per rank, as a multiple of max_num_of_tokens_per_rank (None: as many as come,
      docs/design.md#memory). `overflow`: what a blocking call does with more rows than capacity_factor or
      num_permuted_tokens admits: "raise" CapacityError on every rank, or "drop" the last ones, flagged in the handle.
    * `timeout_s`: deadline of every wait (default HYBRID_EP_TIMEOUT_S, 100). `executor`: one of _core.executors()
      (default HYBRID_EP_EXECUTOR, else cuda for a group of nccl, host for others).
    * `comm_stream`: where calls run, in order with the caller's stream on both ends: a torch.cuda.Stream, "own" (one is
      made), or None, the current stream. Every verb also takes `async_finish` (True: the result has one element more, a
      streams.EventOverlap; without waiting for it the result is not to be used on another stream) and `previous_event`
      (an EventOverlap: start after it, not after the whole current stream). ValueError where they make no sense.
    * `tuning`: a file of `hybrid-ep tune` (default HYBRID_EP_TUNING; "": none): chunks, and blocks where num_sms_* say
      nothing. ValueError without an entry for this device and shape.
    * `arena_mib`: registered MiB where dispatched rows land to stay, and of empty() (default HYBRID_EP_ARENA_MIB, else
      2.5 balanced results a stream, at most 1 GiB). On hosts storages there cannot be resized. Without room: a copy,
      see traffic(). `arena_streams`, 1 to 8: on GPUs it has room for calls on so many streams, the first that take of
      it, in equal parts of at least 10 MiB, and for CUDA graphs.
    * `landing`: permuted rows land in the arena for "all" of a token's experts on the rank, or for the "first", and the
      rank copies (default HYBRID_EP_LANDING, else all on hosts, first on GPUs). Ranks may differ; bits are the same.
    * `topk`: experts of a token for which there is room before any call (default 8). Whatever waits for counts makes
      more; non_blocking calls and the latency path do not, with a routing map, and drop what is wider.
    * `latency_tokens`: most tokens of a rank on the latency path (docs/latency.md), which permuted verbs take by their
      `path`; the buffer takes at least so many tokens a rank on either path. 0: there is none. Without a tuning file
      of `hybrid-ep tune --latency-tokens`, path="auto" goes by it alone, whichever path is faster.
    * `clones`: hybrid_ep.balance.MicrobatchOptions, for plan_clones; num_local_experts counts the spare slots too.

    Belongs to the process that made it: a forked child may only drop it. Neither copied nor pickled (TypeError).
    Raises ValueError when an argument is wrong or differs between ranks, BootstrapError when ranks are missing,
    DeadlineError when a rank stops in an operation (after it this buffer is unusable)."""

    _asked_executor = staticmethod(options.asked_executor)

    def __init__(
        self,
        group: dist.ProcessGroup | GroupLike,
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
        capacity_factor: float | None = None,
        overflow: str = "raise",
        timeout_s: float | None = None,
        executor: str | None = None,
        tuning: str | None = None,
        comm_stream: torch.cuda.Stream | str | None = None,
        arena_mib: int | None = None,
        arena_streams: int = 1,
        topk: int | None = None,
        latency_tokens: int = 0,
        clones: PlannerOptions | None = None,
        landing: str | None = None,
    ) -> None:
        self._session: Session | None = None
        self._own_stream: Any = None
        if use_mnnvl is not None:
            validation.deprecated("use_mnnvl", "has no effect")
        view = GroupView.of(group)
        try:
            o = options.parse(
                hidden_dim=hidden_dim,
                max_num_of_tokens_per_rank=max_num_of_tokens_per_rank,
                num_local_experts=num_local_experts,
                use_fp8=use_fp8,
                num_sms_dispatch_api=num_sms_dispatch_api,
                num_sms_combine_api=num_sms_combine_api,
                num_blocks_permute=num_blocks_permute,
                num_blocks_unpermute=num_blocks_unpermute,
                ranks_per_node=num_of_hybrid_ep_ranks_per_nvlink_domain,
                capacity_factor=capacity_factor,
                overflow=overflow,
                timeout_s=timeout_s,
                executor=self._asked_executor(executor, view),
                tuning_file=tuning,
                arena_mib=arena_mib,
                arena_streams=arena_streams,
                num_sms_preprocessing_api=num_sms_preprocessing_api,
                topk=topk,
                latency_tokens=latency_tokens,
                clones=clones,
                landing=landing,
            )
            self.comm_stream = streams.chosen(comm_stream, o.device)
        except Exception as error:
            with contextlib.suppress(Exception):  # the first error is what the caller must hear of
                Rendezvous(view, 0.0).refuse(options.TOPIC, error)
            raise
        meet = Rendezvous(view, o.timeout_s)
        topology = o.agree(meet)
        self._topology, self._timeout_s = topology, o.timeout_s
        self.sm_plan = o.choose_blocks(topology, view.virtual)  # str() explains the choice; or None
        self.group, self.rank, self.group_size = group, view.rank, view.size
        self.num_of_hybrid_ep_ranks_per_nvlink_domain = topology.num_local_ranks
        self.local_rank, self.node_rank = topology.local_rank, topology.node
        self.num_of_nodes = topology.num_nodes
        self.config = o.template(topology)
        self.configurer = Configurer(self.config)
        self._session = Session(meet, topology, o)

    # ---- the four verbs
    @streams.on_comm_stream
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
        handle: Handle | Routed | None = None,
        num_of_tokens_per_rank: int | None = None,
        *,
        num_sms: int | None = None,
    ) -> Dispatched:
        """Sends each token once to every rank that holds one of its experts.

        hidden [T, H] bf16, fp16, fp32, fp64, fp8, int8 to int64 or uint8, rows of a multiple of 16 bytes.
        scaling_factor [T, S] travels along. Routing: topk_idx [T, K], signed integers (-1 drops a choice; weights of an
        expert named twice are added) with topk_weights fp32 [T, K] or probs fp32 [T, E] or neither; or routing_map
        [T, E], bool or uint8 (not 0: chosen), with probs or None, which goes before topk_idx if both are given; or what
        route() or an earlier dispatch returned as handle (then probs, or topk_idx with topk_weights, may give new
        weights). Returns (rows [M, H], weights fp32 [M, experts of this node] or None, scales [M, S] or None, handle);
        weights are 0 where the token did not choose the expert. num_dispatched_tokens* are ignored.
        num_of_tokens_per_rank, where deep_ep needs a limit of T for all ranks, is only checked. Raises ValueError,
        CapacityError, DeadlineError."""
        if num_of_tokens_per_rank is not None:
            validation.token_slots(num_of_tokens_per_rank, hidden)
        if num_dispatched_tokens_tensor is not None:
            validation.deprecated("num_dispatched_tokens_tensor", "is ignored")
        with self._busy() as session:
            blocks = session.blocks("dispatch", num_sms, self.config)
            given = Given(topk_idx, topk_weights, num_of_experts, probs, routing_map)
            plan, fresh, routed, known = verbs.plan_or_route(
                session, DISPATCHED, handle, given, Call(hidden, scaling_factor, False), self.config
            )
            rows, weights, scales = verbs.scatter(
                session, plan, hidden, scaling_factor, fresh, routed, None, blocks, known
            )
        return rows, weights, scales, verbs.returned(handle) or dispatch_handle(plan, self.config)

    @streams.on_comm_stream
    def combine(
        self,
        hidden: Tensor,
        probs: Tensor | None = None,
        handle: Handle | None = None,
        *,
        fp32_partials: bool = False,
        num_sms: int | None = None,
    ) -> Combined:
        """The sum of what the ranks return for each token of the handle's dispatch: ([T, H], probs or None).

        hidden [M, H] bf16, fp16 or fp32, in the order of dispatch's rows. Sums are fp32 in a fixed order (a
        node's ranks ascending, rounded; own node first, then the others ascending, rounded once);
        fp32_partials sends unrounded node sums. probs fp32 [M, experts of this node]: the returned probs fp32
        [T, E] hold, for each chosen expert, the sum of what the ranks of its node say (the adjoint of
        dispatch's weights). Raises ValueError, DeadlineError."""
        with self._busy() as session:
            plan = validation.handle(handle, DISPATCHED, self._topology)
            x = validation.summable_rows("hidden", hidden, plan.num_recv_rows, at_least=False)
            shape = x.shape[0], plan.num_node_experts
            w = None if probs is None else validation.weights("probs", probs, shape)
            blocks = session.blocks("combine", num_sms, self.config)
            return verbs.gather(session, plan, x, w, permuted=False, fp32_partials=fp32_partials, blocks=blocks)

    @streams.on_comm_stream
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
        num_of_tokens_per_rank: int | None = None,
        handle: Handle | Routed | None = None,
        non_blocking: bool = False,
        fuse_permute_dispatch: bool = False,
        num_dispatched_tokens: int | None = None,
        use_host_meta: bool | None = None,
        pad_empty_experts: bool = False,
        num_sms: int | None = None,
        path: str = "auto",
    ) -> Permuted:
        """dispatch, with the rows laid out by local expert, each group padded to pad_multiple with zero rows.

        Arguments as in dispatch. num_permuted_tokens: rows of the result (an integer or 0-d tensor; default:
        exactly as many as there are); rows beyond the groups are zero. non_blocking: num_permuted_tokens is a
        static budget; rows beyond it are dropped and flagged, later experts first, and nothing is raised.
        pad_empty_experts: an expert that nobody chose gets pad_multiple zero rows too (they count against a
        budget), so that no grouped GEMM sees an empty group. With a handle both paddings are the handle's.
        path: "throughput"; "latency" (one launch; with routing only if non_blocking); "auto": latency with routing if
        non_blocking and num_of_tokens_per_rank <= latency_tokens (and a tuning file's crossover); a handle's as made.
        Returns (rows [P, H], weights fp32 [P] or None, scales [P, S] or None, padded_tokens_per_expert int64
        [num_local_experts], handle); handle[10] is the overflow flag, int32 [1].
        Raises ValueError, CapacityError (blocking with overflow="raise"), DeadlineError."""
        if num_of_tokens_per_rank is not None:
            validation.token_slots(num_of_tokens_per_rank, hidden)
        if num_dispatched_tokens is not None:
            validation.deprecated("num_dispatched_tokens", "is ignored")
        if use_host_meta is not None:
            validation.deprecated("use_host_meta", "means non_blocking = not use_host_meta")
            non_blocking = not use_host_meta
        if num_of_experts_per_rank is not None:
            num_of_experts = validation.group_experts(num_of_experts, num_of_experts_per_rank, self.group_size)
        call = Call.permuted(
            hidden,
            scaling_factor,
            num_permuted_tokens=num_permuted_tokens,
            pad_multiple=pad_multiple,
            use_fp8=use_fp8,
            non_blocking=non_blocking,
            pad_empty_experts=pad_empty_experts,
            routed=handle is None,
        )
        given, budget = Given(topk_idx, topk_weights, num_of_experts, probs, routing_map), call.budget
        with self._busy() as session:
            blocks = session.blocks("dispatch", num_sms, self.config)
            if handle is None and latency.takes_routed(session, path, call, num_of_tokens_per_rank):
                plan, (rows, weights, scales) = latency.dispatch(session, call, given, self.config, blocks)
            else:
                plan, fresh, routed, known = verbs.plan_or_route(session, PERMUTED, handle, given, call, self.config)
                if budget is not None and budget < plan.num_permuted_rows:
                    raise ValueError(
                        f"num_permuted_tokens={budget} is less than the {plan.num_permuted_rows} rows of "
                        "the handle; give at least as many, or None"
                    )
                lines = handle is not None and latency.takes_planned(session, path, plan, handle)
                num_rows = plan.num_permuted_rows if budget is None else budget
                rows, weights, scales = verbs.scatter(
                    session, plan, hidden, scaling_factor, fresh, routed, num_rows, blocks, known, lines
                )
        return (
            rows,
            weights,
            scales,
            plan.padded_tokens_per_expert,
            verbs.returned(handle) or permute_handle(plan, self.config),
        )

    @streams.on_comm_stream
    def route(
        self,
        hidden: Tensor,
        *,
        permute: bool,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        num_of_experts: int | None = None,
        probs: Tensor | None = None,
        routing_map: Tensor | None = None,
        scaling_factor: Tensor | None = None,
        num_permuted_tokens: int | Tensor | None = None,
        pad_multiple: int | None = None,
        non_blocking: bool = False,
        pad_empty_experts: bool = False,
    ) -> Routed:
        """What a dispatch does before it sends a row: ranks exchange their counts, and every row is placed.

        Arguments as in the verb that is to follow, dispatch_with_permute (permute=True) or dispatch; of hidden and
        scaling_factor the shapes and dtypes alone count. Collective. Returns what the verb takes as its handle,
        with hidden and without routing, any number of times; such a call returns what one with this routing does, a
        handle for combine included. Opaque. Raises ValueError, CapacityError, DeadlineError."""
        validation.flag("permute", permute)
        call = Call(hidden, scaling_factor, False)
        if permute:
            call = Call.permuted(
                hidden,
                scaling_factor,
                num_permuted_tokens=num_permuted_tokens,
                pad_multiple=pad_multiple,
                non_blocking=non_blocking,
                pad_empty_experts=pad_empty_experts,
                routed=True,
            )
        kind = PERMUTED if permute else DISPATCHED
        with self._busy() as session:
            given = Given(topk_idx, topk_weights, num_of_experts, probs, routing_map)
            return Routed(verbs.plan_or_route(session, kind, None, given, call, self.config)[0], kind)

    @streams.on_comm_stream
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
        num_sms: int | None = None,
        path: str = "auto",
        non_blocking: bool = False,
    ) -> Combined:
        """combine for rows laid out by dispatch_with_permute: ([T, H], probs fp32 [T, E] or None).

        hidden [P, H] bf16, fp16 or fp32; rows beyond the handle's are ignored, as are padding rows. A rank's
        experts are added first (ascending, rounded; fp32_partials: not rounded), then as in combine. probs
        fp32 [P] come back as [T, E], 0 where not chosen or dropped. weighted: every row is first multiplied,
        in fp32, by the weight that the handle's dispatch brought for it; probs must then be None. path as there.
        non_blocking has no effect: no combine waits for the device. Raises ValueError, DeadlineError."""
        if num_dispatched_tokens is not None:
            validation.deprecated("num_dispatched_tokens", "is ignored")
        with self._busy() as session:
            plan = validation.handle(handle, PERMUTED, self._topology)
            x = validation.summable_rows("hidden", hidden, plan.num_permuted_rows, at_least=True)
            w = None if probs is None else validation.weights("probs", probs, (plan.num_permuted_rows,), at_least=True)
            validation.flag("non_blocking", non_blocking)
            if validation.flag("weighted", weighted) and (w is not None or not plan.has_weights):
                raise ValueError(
                    "weighted=True multiplies by the weights of the handle's dispatch, which had "
                    f"{'some' if plan.has_weights else 'none'}, and probs is "
                    f"{validation.describe(probs)}; give weights to dispatch_with_permute and none here"
                )
            blocks = session.blocks("combine", num_sms, self.config)
            lines = latency.takes_planned(session, path, plan, handle)
            how = {"permuted": True, "weighted": weighted, "fp32_partials": fp32_partials, "by_lines": lines}
            return verbs.gather(session, plan, x, w, blocks=blocks, **how)

    # ---- configuration, reports, life
    def update_template_config(
        self,
        hidden_dim: int | None = None,
        num_of_tokens_per_rank: int | None = None,
        num_local_experts: int | None = None,
        pad_multiple: int | None = None,
        use_fp8: bool | None = None,
        fuse_permute_dispatch: bool = False,
        **kwargs: Any,
    ) -> HybridEpConfigInstance:
        """Raises the capacities that the next routed dispatch makes room for and sets template fields by name.

        Local: the growth itself happens in that dispatch, for all ranks together. Returns a copy of the template."""
        self._open_session()
        config = copy.copy(self.config)
        if hidden_dim is not None:
            config.hidden_dim = max(config.hidden_dim, validation.hidden_dim(hidden_dim))
        if num_of_tokens_per_rank is not None:
            config.max_num_of_tokens_per_rank = max(
                config.max_num_of_tokens_per_rank,
                validation.integer("num_of_tokens_per_rank", num_of_tokens_per_rank, 0, most=validation.MOST),
            )
        if num_local_experts is not None:
            most = validation.MOST_EXPERTS
            config.num_of_experts_per_rank = validation.integer("num_local_experts", num_local_experts, 1, most=most)
        if pad_multiple is not None:
            config.pad_multiple = validation.integer("pad_multiple", pad_multiple, 0, most=validation.MOST_PADDING)
        if use_fp8 is not None:
            config.use_fp8 = validation.flag("use_fp8", use_fp8)
        config.set(**kwargs)
        validation.template(config)
        self.config = self.configurer.buffer_config = config
        return copy.copy(config)

    def memory_report(self) -> memory.MemoryReport:
        """Registered bytes of this rank by region, exact; str() says what the large ones are for. The receive rows are
        for what the arena has no room for, too, so that neither gets smaller for the other."""
        return memory.report(self._open_session().shape, self.group_size)

    @property
    def is_usable(self) -> bool:
        """Whether it was neither destroyed nor has failed."""
        return self._session is not None and not self._session.why_closed

    def poison(self) -> None:
        """For tests, between operations: 0xFF into the rings and receive rows; results in the arena are left alone."""
        self._open_session().engine.poison()

    def destroy(self) -> None:
        """Gives the registered memory back; may be called twice. Handles stay valid for other buffers. Local, but
        collective where the rail is NVSHMEM, whose memory all ranks give back together."""
        if self._session is not None:
            self._session.close(together=True)

    def __enter__(self) -> HybridEPBuffer:
        self._open_session()
        return self

    def __exit__(self, error_type: Any, *_: Any) -> None:
        if self._session is not None:
            self._session.close(together=error_type is None)  # after an error others may not come

    def __repr__(self) -> str:
        session = getattr(self, "_session", None)  # a constructor that raised may have set nothing
        if session is None:
            return f"<{type(self).__name__} that was never set up>"
        o, closed = session.options, ", closed" if session.why_closed else ""
        return (
            f"<{type(self).__name__}: rank {self.rank} of {self.group_size}, hidden {o.hidden_dim}, "
            f"{o.num_local_experts * self.group_size} experts, executor {o.executor!r}{closed}>"
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        """A buffer has no copies: copy, deepcopy and pickle (torch.save, arguments of spawned processes) end here."""
        raise TypeError(
            f"a {type(self).__name__} cannot be copied or pickled: it is registered memory that all ranks of a group "
            "made together. Use it by reference (keep it in a global or a registry, not in the module that is copied "
            "or saved), or construct a new one on all ranks"
        )

    def stream_of_calls(self) -> torch.cuda.Stream | None:
        """The stream of calls that leave the current one: comm_stream, or the buffer's own. None on a CPU."""
        device = self._open_session().options.device
        if device.type != "cuda":
            return None
        if isinstance(self.comm_stream, torch.cuda.Stream):
            return self.comm_stream
        self._own_stream = self._own_stream or torch.cuda.Stream(device)
        return self._own_stream

    # ---- how they work
    def _open_session(self) -> Session:
        if self._session is not None:
            self._session.require_own_process()
        if self._session is None or self._session.why_closed:
            raise BufferFailedError(self._session.why_closed if self._session else "this buffer was never set up")
        return self._session

    def _busy(self) -> Session:
        return self._session or self._open_session()  # whose `with` checks that it is open
