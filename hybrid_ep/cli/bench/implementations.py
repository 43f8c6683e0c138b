"""What is timed: one small class per implementation of dispatch and combine, behind one face.

A peer outside this package is a Python file or module with a list `PEERS` of `Implementation`
subclasses; `--peer FILE.py` or `--peer package.module` adds it to the run.
"""

from __future__ import annotations

import abc
import importlib
import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
import torch.distributed as dist

from hybrid_ep.cli import UsageError

LINKS = ("rail", "node", "self")
PLUGIN_FOLDER = Path("scripts") / "bench_peers"


@dataclass(frozen=True)
class Case:
    """One point of the sweep as one rank sees it; what an implementation is built from."""

    group: dist.ProcessGroup
    rank: int
    num_ranks: int
    num_local_ranks: int
    num_experts: int
    topk: int
    max_tokens: int  # largest num_tokens over the ranks
    num_sms: int  # 0: the implementation's default
    permute: bool
    route_as: str  # "map": dense routing_map and probs; "topk": topk_idx and topk_weights
    timeout_s: float
    x: torch.Tensor  # [num_tokens, hidden]
    topk_idx: torch.Tensor  # int64 [num_tokens, topk]
    topk_weights: torch.Tensor  # fp32 [num_tokens, topk]
    routing_map: torch.Tensor  # bool [num_tokens, num_experts]
    probs: torch.Tensor  # fp32 [num_tokens, num_experts]

    @property
    def hidden(self) -> int:
        return self.x.shape[1]

    @property
    def num_local_experts(self) -> int:
        return self.num_experts // self.num_ranks


@dataclass(frozen=True)
class Setting:
    """The size of a case, known before anything is allocated: what `unavailable` decides by."""

    num_ranks: int
    max_tokens: int
    topk: int
    row_bytes: int
    permute: bool


class Dispatched(NamedTuple):
    """What dispatch gave: `rows` and `weights` in the layout below, `state` for combine's private use.

    permute: rows [permuted_rows, hidden] expert-major, within an expert by (source rank, token);
    weights fp32 [permuted_rows]. No permute: rows [recv_rows, hidden] by (source rank, token);
    weights are not compared.
    """

    rows: torch.Tensor
    weights: torch.Tensor | None
    state: Any


class Implementation(abc.ABC):
    """One way to dispatch and combine. All methods but the reports are collective."""

    name: ClassVar[str]
    wire: ClassVar[str | None]  # one of ledger.WIRES: the rows it puts on the wire; None: not accounted

    def __init__(self, case: Case) -> None:
        self.case = case

    @classmethod
    def unavailable(cls, setting: Setting) -> str | None:
        """Why this implementation cannot run here or at this size, or None."""
        return None

    @abc.abstractmethod
    def dispatch(self) -> Dispatched:
        """Take the case's tokens to the ranks of their experts, routing metadata included."""

    @abc.abstractmethod
    def combine(self, dispatched: Dispatched, rows: torch.Tensor) -> torch.Tensor:
        """Sum `rows` (the layout of `dispatched.rows`) back to their tokens -> [num_tokens, hidden]."""

    @abc.abstractmethod
    def train(self) -> None:
        """The pair forward, then backward: gradients of the hidden states and of the weights."""

    def buffer_bytes(self) -> int:
        """Bytes that the implementation keeps allocated on this rank between calls."""
        return 0

    def link_rows(self) -> dict[str, int] | None:
        """Rows that this rank has sent so far by kind of link (rail, node, self), counted as they were sent;
        None where nothing counts. The run compares their growth with the closed form."""
        return None

    def close(self) -> None:
        """Free what the implementation keeps; it is not used afterwards."""


class BufferImplementation(Implementation):
    """Anything with the face of HybridEPBuffer; `make_buffer` says which."""

    @abc.abstractmethod
    def make_buffer(self) -> Any: ...

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self.buffer = self.make_buffer()
        if case.route_as == "topk":
            self._routing = {"topk_idx": case.topk_idx, "topk_weights": case.topk_weights}
        else:
            self._routing = {"routing_map": case.routing_map, "probs": case.probs}

    def dispatch(self) -> Dispatched:
        if self.case.permute:
            rows, weights, _, _, handle = self.buffer.dispatch_with_permute(
                hidden=self.case.x, num_of_experts=self.case.num_experts, **self._routing
            )
        else:
            rows, weights, _, handle = self.buffer.dispatch(
                hidden=self.case.x, num_of_experts=self.case.num_experts, **self._routing
            )
        return Dispatched(rows, weights, handle)

    def combine(self, dispatched: Dispatched, rows: torch.Tensor) -> torch.Tensor:
        if self.case.permute:
            return self.buffer.combine_with_unpermute(hidden=rows, handle=dispatched.state)[0]
        return self.buffer.combine(hidden=rows, handle=dispatched.state)[0]

    def train(self) -> None:
        """Dispatch and combine are each other's backward: four calls, the last two with the cached handle."""
        done = self.dispatch()
        gradient = self.combine(done, done.rows)
        if self.case.permute:
            backward = self.buffer.dispatch_with_permute(
                hidden=gradient, handle=done.state, num_permuted_tokens=done.rows.shape[0]
            )
            self.buffer.combine_with_unpermute(hidden=backward[0], probs=done.weights, handle=done.state)
        else:
            backward = self.buffer.dispatch(hidden=gradient, handle=done.state)
            self.buffer.combine(hidden=backward[0], probs=done.weights, handle=done.state)


class HybridEp(BufferImplementation):
    """This library: HybridEPBuffer on the host executor."""

    name = "hybrid_ep"
    wire = "hierarchical"

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
        )

    def buffer_bytes(self) -> int:
        return self.buffer.memory_report().total_bytes

    def link_rows(self) -> dict[str, int] | None:
        counters = self.buffer.traffic()
        return {link: counters[f"{link}_rows"] for link in LINKS}

    def close(self) -> None:
        self.buffer.destroy()


class Reference(BufferImplementation):
    """hybrid_ep.reference: the same face on plain torch.distributed, written to be obvious."""

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
        plan = self._plan()
        rows, weights = self._send(plan, self.case.x, plan.pair_weights)
        return Dispatched(rows, weights, plan)

    def combine(self, dispatched: Dispatched, rows: torch.Tensor) -> torch.Tensor:
        return self._send_back(dispatched.state, rows)[0]

    def train(self) -> None:
        plan = self._plan()
        rows, weights = self._send(plan, self.case.x, plan.pair_weights)
        gradient, _ = self._send_back(plan, rows)
        rows, _ = self._send(plan, gradient, None)
        self._send_back(plan, rows, weights)

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
        return torch.zeros_like(self.case.x).index_add_(0, plan.tokens, rows), weights

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
    experts = torch.arange(recv_counts.shape[1]).repeat(recv_counts.shape[0])
    return torch.sort(experts.repeat_interleave(recv_counts.flatten()), stable=True).indices


def _import_problem(module: str, remedy: str) -> str | None:
    try:
        importlib.import_module(module)
    except ImportError as error:
        return f"{error}; {remedy}"
    return None


BUILT_IN: tuple[type[Implementation], ...] = (HybridEp, Reference, TorchAllToAll)


def load_plugin(spec: str) -> list[type[Implementation]]:
    """The `PEERS` of a plug-in given as FILE.py or as a module name; UsageError if it is not one."""
    try:
        if spec.endswith(".py"):
            location = importlib.util.spec_from_file_location(f"hybrid_ep_bench_peer_{Path(spec).stem}", spec)
            module = importlib.util.module_from_spec(location)
            location.loader.exec_module(module)
        else:
            module = importlib.import_module(spec)
    except (ImportError, FileNotFoundError) as error:
        raise UsageError(f"--peer {spec}: cannot be loaded ({error}); give FILE.py or a module") from error
    peers = getattr(module, "PEERS", None)
    if not isinstance(peers, list) or not all(issubclass(peer, Implementation) for peer in peers):
        raise UsageError(f"--peer {spec}: needs a list PEERS of Implementation subclasses")
    return peers


def find_plugins() -> list[str]:
    """Plug-in files of the source tree: scripts/bench_peers/*.py next to the package, else under the
    current folder."""
    for root in (Path(__file__).resolve().parents[3], Path.cwd()):
        if (root / PLUGIN_FOLDER).is_dir():
            return sorted(str(path) for path in (root / PLUGIN_FOLDER).glob("[a-z]*.py"))
    return []
