"""The implementations that come along: this library, its reference, and what one writes with torch alone."""

from __future__ import annotations

import importlib
from typing import Any, ClassVar, NamedTuple

import torch
import torch.distributed as dist

from hybrid_ep.cli.bench.implementations import (
    LINKS,
    BufferImplementation,
    Case,
    Dispatched,
    Implementation,
    Setting,
    Timed,
)


class HybridEp(BufferImplementation):
    """This library: HybridEPBuffer."""

    name = "hybrid_ep"
    wire = "hierarchical"
    _counts = False

    @classmethod
    def unavailable(cls, setting: Setting) -> str | None:
        return _import_problem("hybrid_ep.buffer", "build the library: pip install .")

    def make_buffer(self) -> Any:
        from hybrid_ep.buffer import HybridEPBuffer

        sms = self.case.num_sms or None
        return HybridEPBuffer(
            self.case.group,
            self.case.hidden,
            max(self.case.max_tokens, 1),
            self.case.num_local_experts,
            num_sms_dispatch_api=sms,
            num_sms_combine_api=sms,
            num_of_hybrid_ep_ranks_per_nvlink_domain=self.case.num_local_ranks,
            executor=self.case.executor,
            **self._options(),
        )

    def _options(self) -> dict[str, Any]:
        return {}

    def stage(self, op: str) -> Timed | None:
        """Route alone is what a dispatch does before it sends a row: counts exchanged, every row placed."""
        if op != "route":
            return super().stage(op)
        case, permute = self.case, self.case.permute
        return Timed(
            lambda: self.buffer.route(
                case.x, permute=permute, scaling_factor=case.scales, num_of_experts=case.num_experts, **self._routing
            )
        )

    def start_kernel_clock(self) -> None:
        self._counts = True

    def kernel_seconds(self) -> float | None:
        return self.buffer.kernel_seconds() if self._counts else None

    def buffer_bytes(self) -> int:
        return self.buffer.memory_report().total_bytes

    def link_rows(self) -> dict[str, int] | None:
        counters = self.buffer.traffic()
        return {link: counters[f"{link}_rows"] for link in LINKS}

    def close(self) -> None:
        self.buffer.destroy()


class HybridEpByLines(HybridEp):
    """The same by its latency path, for few tokens. Its results have a static size: here what the rank with most rows
    has, and no more."""

    name = "hybrid_ep-latency"

    @classmethod
    def unavailable(cls, setting: Setting) -> str | None:
        if not setting.permute:
            return "the latency path is one of the permuted verbs"
        return super().unavailable(setting)

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        rows = case.routing_map.sum(0)
        dist.all_reduce(rows, group=case.group)
        self._most_rows = int(rows.view(case.num_ranks, -1).sum(1).max())

    def _options(self) -> dict[str, Any]:
        return {"latency_tokens": max(self.case.max_tokens, 1)}

    def _dispatch(self, permute: bool) -> Dispatched:
        case = self.case
        rows, weights, scales, padded, handle = self.buffer.dispatch_with_permute(
            hidden=case.x,
            scaling_factor=case.scales,
            num_of_experts=case.num_experts,
            num_permuted_tokens=self._most_rows,
            non_blocking=True,
            path="latency",
            **self._routing,
        )
        own = rows.shape[0] if padded.is_cuda else int(padded.sum())  # on a host a rank's own, without waiting
        return Dispatched(rows[:own], None if weights is None else weights[:own], handle, scales)

    def stage(self, op: str) -> Timed | None:
        return None  # one launch has no stages


class Reference(BufferImplementation):
    """hybrid_ep.reference: the same interface on plain torch.distributed, written to be obvious."""

    name = "reference"
    wire = None  # every rank gathers everything
    max_gathered_bytes: ClassVar[int] = 1 << 30

    @classmethod
    def unavailable(cls, setting: Setting) -> str | None:
        # Combine pickles every rank's rows to every rank: bytes grow with the square of the number of ranks.
        gathered = setting.num_ranks**2 * setting.max_tokens * setting.topk * setting.row_bytes
        if gathered > cls.max_gathered_bytes:
            return (
                f"it would gather {gathered >> 20} MiB over all ranks "
                f"(limit {cls.max_gathered_bytes >> 20} MiB); use fewer tokens"
            )
        return _import_problem("hybrid_ep.reference", "reinstall hybrid_ep")

    def make_buffer(self) -> Any:
        from hybrid_ep.reference import ReferenceBuffer

        return ReferenceBuffer(
            self.case.group,
            self.case.hidden,
            max(self.case.max_tokens, 1),
            self.case.num_local_experts,
            num_of_hybrid_ep_ranks_per_nvlink_domain=self.case.num_local_ranks,
        )


class TorchAllToAll(Implementation):
    """What one writes with torch alone: index_select, all_to_all_single, index_select, and the inverse.

    With permute a row travels once per expert copy and is sorted by local expert on arrival; without,
    once per destination rank. The number of rows is exchanged by an all_to_all_single of its own.
    """

    name = "torch-alltoall"
    wire = "per-expert"

    def dispatch(self) -> Dispatched:
        plan, case = self._plan(), self.case
        if case.scales is None:
            return Dispatched(*self._send(plan, case.x, plan.pair_weights), plan)
        message = torch.cat([case.x.view(torch.uint8), case.scales.view(torch.uint8)], 1)  # one message a row
        received, weights = self._send(plan, message, plan.pair_weights)
        rows = received[:, : case.hidden].contiguous().view(case.x.dtype)
        return Dispatched(rows, weights, plan, received[:, case.hidden :].contiguous().view(case.scales.dtype))

    def stage(self, op: str) -> Timed | None:
        """Its stages are calls of their own: the plan, and moving rows between the orders of arrival and of experts."""
        if op == "route":
            return Timed(self._plan)
        done = self.dispatch()
        order, rows = done.state.expert_order, self.expert_output(done)
        if order is None:
            return None
        if op == "permute":
            return Timed(lambda: done.rows.view(torch.uint8).index_select(0, order))
        return Timed(lambda: torch.empty_like(rows).index_copy_(0, order, rows))

    def combine(self, dispatched: Dispatched, rows: torch.Tensor) -> torch.Tensor:
        return self._send_back(dispatched.state, rows)[0]

    def step(self) -> None:
        done = self.dispatch()
        gradient, _ = self._send_back(done.state, self.expert_output(done))
        rows, _ = self._send(done.state, gradient, None)
        self._send_back(done.state, rows, done.weights)

    def _plan(self) -> _AllToAllPlan:
        """Send order: by destination (expert with permute, rank without), then token."""
        case = self.case
        if case.permute:
            destinations = case.routing_map.t()
            probs = case.probs.t()
        else:
            destinations = case.routing_map.view(-1, case.num_ranks, case.num_local_experts).any(2).t()
            probs = None
        pairs = destinations.nonzero()
        send_counts = destinations.sum(1).view(case.num_ranks, -1).contiguous()
        recv_counts = torch.empty_like(send_counts)
        dist.all_to_all_single(recv_counts, send_counts, group=case.group)
        return _AllToAllPlan(
            tokens=pairs[:, 1],
            pair_weights=None if probs is None else probs[destinations],
            send_splits=send_counts.sum(1).tolist(),
            recv_splits=recv_counts.sum(1).tolist(),
            expert_order=_expert_major(recv_counts) if case.permute else None,
        )

    def _send(
        self, plan: _AllToAllPlan, x: torch.Tensor, weights: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        rows = self._exchange(x.index_select(0, plan.tokens), plan.recv_splits, plan.send_splits)
        if weights is not None:
            weights = self._exchange(weights, plan.recv_splits, plan.send_splits)
        if plan.expert_order is not None:
            rows = rows.index_select(0, plan.expert_order)
            weights = None if weights is None else weights.index_select(0, plan.expert_order)
        return rows, weights

    def _send_back(
        self, plan: _AllToAllPlan, rows: torch.Tensor, weights: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        if plan.expert_order is not None:
            rows = torch.empty_like(rows).index_copy_(0, plan.expert_order, rows)
            if weights is not None:
                weights = torch.empty_like(weights).index_copy_(0, plan.expert_order, weights)
        rows = self._exchange(rows, plan.send_splits, plan.recv_splits)
        if weights is not None:
            weights = self._exchange(weights, plan.send_splits, plan.recv_splits)
        return rows.new_zeros(self.case.x.shape).index_add_(0, plan.tokens, rows), weights

    def _exchange(self, rows: torch.Tensor, recv_splits: list[int], send_splits: list[int]) -> torch.Tensor:
        received = rows.new_empty((sum(recv_splits), *rows.shape[1:]))
        dist.all_to_all_single(received, rows, recv_splits, send_splits, group=self.case.group)
        return received


class _AllToAllPlan(NamedTuple):
    tokens: torch.Tensor  # int64 [pairs]: the token of every row sent
    pair_weights: torch.Tensor | None  # fp32 [pairs]
    send_splits: list[int]
    recv_splits: list[int]
    expert_order: torch.Tensor | None  # int64 [received]: arrival index of every expert-major row


def _expert_major(recv_counts: torch.Tensor) -> torch.Tensor:
    """recv_counts [source rank, local expert], the order of arrival -> indices ordered by expert first."""
    num_sources, num_experts = recv_counts.shape
    experts = torch.arange(num_experts, dtype=torch.int64, device=recv_counts.device).repeat(num_sources)
    return torch.sort(experts.repeat_interleave(recv_counts.flatten()), stable=True).indices


def _import_problem(module: str, remedy: str) -> str | None:
    try:
        importlib.import_module(module)
    except ImportError as error:
        return f"{error}; {remedy}"
    return None


BUILT_IN: tuple[type[Implementation], ...] = (HybridEp, HybridEpByLines, Reference, TorchAllToAll)
