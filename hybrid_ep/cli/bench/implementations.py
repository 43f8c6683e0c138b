"""What is timed: one small class per implementation of dispatch and combine, behind one interface.

A peer outside this package is a Python file or module with a list `PEERS` of `Implementation`
subclasses; `--peer FILE.py` or `--peer package.module` adds it to the run.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
import torch.distributed as dist

from hybrid_ep.payload import quantize

LINKS = ("rail", "node", "self")


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
    executor: str  # "host" or "cuda"; where the tensors are
    dtype: str  # of dispatched rows: one of checks.DTYPES
    timeout_s: float
    x: torch.Tensor  # [num_tokens, hidden]; of a quantised dtype its e4m3 bytes
    scales: torch.Tensor | None  # [num_tokens, hidden / block] of a quantised dtype
    sum_dtype: torch.dtype  # of the rows that combine takes
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
    dtype: str = "bf16"
    executor: str = "host"
    num_nodes: int = 1

    @property
    def quantised(self) -> bool:
        return self.dtype in quantize.FORMATS


class Dispatched(NamedTuple):
    """What dispatch gave: `rows`, `weights`, `scales` in the layout below, `state` for combine's private use.

    permute: rows [permuted_rows, hidden] expert-major, within an expert by (source rank, token);
    weights fp32 [permuted_rows]. No permute: rows [recv_rows, hidden] by (source rank, token);
    weights are not compared.
    """

    rows: torch.Tensor
    weights: torch.Tensor | None
    state: Any
    scales: torch.Tensor | None = None


class Timed(NamedTuple):
    """A stage to time: `run`, less `less` where the stage exists only fused into something larger."""

    run: Callable[[], Any]
    less: Callable[[], Any] | None = None


class Implementation(abc.ABC):
    """One way to dispatch and combine. All methods but the reports are collective."""

    name: ClassVar[str]
    wire: ClassVar[str | None]  # one of ledger.WIRES: the rows it puts on the wire; None: not accounted
    ordered: ClassVar[bool] = True  # False: rows without permute come in an order of its own

    def __init__(self, case: Case) -> None:
        self.case = case
        self._expert_rows: torch.Tensor | None = None

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
    def step(self) -> None:
        """The pair forward, then backward: gradients of the hidden states and of the weights."""

    def expert_output(self, dispatched: Dispatched) -> torch.Tensor:
        """What the experts, the identity, hand to combine. Of quantised rows zeros of the sum's dtype, made once: an
        expert would write them, and dequantising is its first step."""
        if self.case.scales is None:
            return dispatched.rows
        if self._expert_rows is None or self._expert_rows.shape != dispatched.rows.shape:
            self._expert_rows = torch.zeros(
                dispatched.rows.shape, dtype=self.case.sum_dtype, device=dispatched.rows.device
            )
        return self._expert_rows

    def feed(self, x: torch.Tensor) -> None:
        """Makes `x` [num_tokens, hidden], a combine's result, the tokens of the next dispatch."""
        fmt, scales = quantize.FORMATS.get(self.case.dtype), None
        if fmt is not None:
            x, scales = quantize.quantize(x, fmt)
        self.case = dataclasses.replace(self.case, x=x, scales=scales)

    def stage(self, op: str) -> Timed | None:
        """What to time for route, permute or unpermute alone; None: it cannot be told apart. Collective."""
        return None

    def captured(self, op: str) -> Callable[[], Any] | None:
        """dispatch, combine or pair with the routing of an earlier dispatch and no wait for the host, fit for a CUDA
        graph; None: not offered. Collective."""
        return None

    def start_kernel_clock(self) -> None:
        """From here on kernel_seconds() counts."""

    def kernel_seconds(self) -> float | None:
        """Seconds inside this rank's kernels since start_kernel_clock(); None where nothing counts."""
        return None

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
    """Anything with the interface of HybridEPBuffer; `make_buffer` says which."""

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
        return self._dispatch(self.case.permute)

    def _dispatch(self, permute: bool) -> Dispatched:
        case = self.case
        rest = {"hidden": case.x, "scaling_factor": case.scales, "num_of_experts": case.num_experts, **self._routing}
        if permute:
            rows, weights, scales, _, handle = self.buffer.dispatch_with_permute(**rest)
        else:
            rows, weights, scales, handle = self.buffer.dispatch(**rest)
        return Dispatched(rows, weights, handle, scales)

    def _again(self, done: Dispatched, permute: bool) -> Callable[[], Any]:
        """The dispatch of `done` with its handle: no routing, no counts."""
        rest = {"hidden": self.case.x, "scaling_factor": self.case.scales, "handle": done.state}
        if permute:
            return lambda: self.buffer.dispatch_with_permute(**rest, num_permuted_tokens=done.rows.shape[0])
        return lambda: self.buffer.dispatch(**rest, num_dispatched_tokens=done.rows.shape[0])

    def combine(self, dispatched: Dispatched, rows: torch.Tensor) -> torch.Tensor:
        return self._combine(dispatched, rows, self.case.permute)

    def _combine(self, dispatched: Dispatched, rows: torch.Tensor, permute: bool) -> torch.Tensor:
        if permute:
            return self.buffer.combine_with_unpermute(hidden=rows, handle=dispatched.state)[0]
        return self.buffer.combine(hidden=rows, handle=dispatched.state)[0]

    def stage(self, op: str) -> Timed | None:
        """Permute and unpermute are part of the same kernels: with them, less without them, handles given."""
        if op not in ("permute", "unpermute"):
            return None
        both = {permute: self._dispatch(permute) for permute in (True, False)}
        if op == "permute":
            return Timed(self._again(both[True], True), self._again(both[False], False))
        rows = {
            permute: torch.zeros(done.rows.shape, dtype=self.case.sum_dtype, device=done.rows.device)
            for permute, done in both.items()
        }
        return Timed(
            lambda: self._combine(both[True], rows[True], True), lambda: self._combine(both[False], rows[False], False)
        )

    def captured(self, op: str) -> Callable[[], Any] | None:
        done = self.dispatch()
        dispatch, rows = self._again(done, self.case.permute), self.expert_output(done)
        calls = {
            "dispatch": dispatch,
            "combine": lambda: self.combine(done, rows),
            "pair": lambda: (dispatch(), self.combine(done, rows)),
        }
        return calls.get(op)

    def step(self) -> None:
        """Dispatch and combine are each other's backward: four calls, the last two with the cached handle."""
        done = self.dispatch()
        gradient = self.combine(done, self.expert_output(done))
        if self.case.permute:
            backward = self.buffer.dispatch_with_permute(
                hidden=gradient, handle=done.state, num_permuted_tokens=done.rows.shape[0]
            )
            self.buffer.combine_with_unpermute(hidden=backward[0], probs=done.weights, handle=done.state)
        else:
            backward = self.buffer.dispatch(hidden=gradient, handle=done.state)
            self.buffer.combine(hidden=backward[0], probs=done.weights, handle=done.state)
