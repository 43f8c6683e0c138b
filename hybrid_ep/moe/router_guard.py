"""Guards against a router that does not choose: zero or equal gate rows, ties at the top-k boundary, collapsed load.

A gate whose rows are all equal (zeros above all: memory that was never initialised, a checkpoint that was loaded
over nothing) gives every expert the same score. Then top-k is a tie that sorting decides, the same for every token:
all go to the same experts, on the same ranks, whose memory overflows, and a bias for balance only moves all of them
together. `check_gates` finds it before the first step, `routing_statistics` while training,
`tie_break` decides exact ties by a hash, deterministic and spread, and touches nothing else.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Any

import torch

from hybrid_ep.moe import checks

log = logging.getLogger("hybrid_ep.moe")

STATISTICS = 3  # numbers a layer adds to a reduction
_EFFECT = (
    "every expert then gets the same score, top-k becomes a tie that sorting decides, and all tokens go to the "
    "same experts on the same ranks"
)


class RouterError(ValueError):
    """A gate that cannot route, or routing that collapsed while training."""


def check_gates(gates: Mapping[str, torch.Tensor], *, distinct: bool = True) -> None:
    """Raises RouterError unless every gate can tell experts apart. Call it after initialisation and after loading.

    gates: name -> weight [num_experts, hidden]. Every weight must be finite, not all equal, and have no two equal
    rows (two experts with one row tie on every token). A gate of one expert may be anything finite. distinct: False
    asks for finite weights alone, for routers whose ties `tie_break` decides. One result per gate is read on the host,
    in one transfer per device."""
    verdicts: dict[torch.device, list] = {}
    for name, weight in gates.items():
        if weight.dim() != 2:
            raise RouterError(f"gate {name} has shape {tuple(weight.shape)}; it must be [num_experts, hidden]")
        if weight.is_meta:
            raise RouterError(f"gate {name} is on the meta device, that is, not initialised; initialise or load it")
        verdicts.setdefault(weight.device, []).append((name, _facts(weight.detach())))
    problems = []
    for of_device in verdicts.values():
        for (name, _), (finite, flat, twins) in zip(
            of_device, torch.stack([f for _, f in of_device]).tolist(), strict=True
        ):
            if not finite:
                problems.append(f"{name} holds values that are not finite")
            elif not distinct:
                continue
            elif flat:
                problems.append(f"{name} has all weights equal (zeros are the usual case): {_EFFECT}")
            elif twins:
                problems.append(
                    f"{name} has {int(twins)} rows equal to another expert's: those experts tie on every token"
                )
    if problems:
        raise RouterError(
            f"the router cannot route: {'; '.join(problems)}. Initialise the gates (Megatron: "
            "perform_initialization) or load a checkpoint that has them"
        )


def _facts(weight: torch.Tensor) -> torch.Tensor:
    """fp64 [3]: all finite, all equal, rows that equal an earlier one."""
    num_experts = weight.shape[0]
    if num_experts < 2 or weight.numel() == 0:
        return torch.stack(
            [
                weight.isfinite().all().double(),
                weight.new_zeros((), dtype=torch.float64),
                weight.new_zeros((), dtype=torch.float64),
            ]
        )
    finite, flat = weight.isfinite().all(), (weight == weight[0, 0]).all()
    distinct = torch.unique(weight, dim=0).shape[0]
    twins = weight.new_full((), num_experts - distinct, dtype=torch.float64)
    return torch.stack([finite.double(), flat.double(), twins])


def routing_statistics(scores: torch.Tensor, topk: int, chosen: torch.Tensor | None = None) -> torch.Tensor:
    """fp32 [3 + num_experts], summable over ranks: tokens, tokens whose k-th and next score tie exactly, tokens that
    chose nothing finite, then choices per expert. Stays on the device; append it to a reduction that exists anyway
    (Megatron reduces its auxiliary losses), and give the sum to RouterGuard.

    scores [T, num_experts], what top-k is taken of. chosen: int64 [T, topk], the experts that tokens went to, where
    more than the scores decided (tie_break, groups of experts); None: the scores' top-k. Raises ValueError when topk is
    not in 1..num_experts or chosen has another shape."""
    num_tokens, num_experts = scores.shape
    if not 1 <= topk <= num_experts:
        raise ValueError(f"topk={topk!r} must be 1 to the {num_experts} columns of scores")
    if chosen is not None and chosen.shape != (num_tokens, topk):
        raise ValueError(f"chosen {tuple(chosen.shape)} must be [{num_tokens}, {topk}], topk experts for each token")
    scores = scores.detach()
    best = scores.topk(min(topk + 1, num_experts), dim=1)
    chosen = (best.indices[:, :topk] if chosen is None else chosen).flatten()
    load = torch.zeros(num_experts, device=scores.device, dtype=torch.float32).index_add_(
        0, chosen, torch.ones(chosen.numel(), device=scores.device, dtype=torch.float32)
    )
    tie = torch.zeros((), device=scores.device, dtype=torch.float32)
    if topk < num_experts:
        tie = (best.values[:, topk - 1] == best.values[:, topk]).sum().float()
    lost = (~scores.isfinite().any(dim=1)).sum().float()
    return torch.cat([torch.stack([tie.new_full((), num_tokens), tie, lost]), load])


@dataclass
class RouterGuard:
    """Judges summed routing statistics, step by step.

    * `max_tie_fraction`: of tokens with an exact tie at the top-k boundary. fp32 scores tie practically never, bf16
      scores in some percent of tokens. `max_load_ratio`: busiest expert's choices over the mean; num_experts / topk
      is the most there is. None switches a threshold off.
    * `patience`: steps in a row above a threshold before the guard acts. `action`: "warn" (once per streak) or "stop"
      (RouterError)."""

    max_tie_fraction: float | None = 0.5
    max_load_ratio: float | None = None
    patience: int = 3
    action: str = "stop"
    _streak: int = 0

    def __post_init__(self) -> None:
        if self.action not in ("warn", "stop"):
            raise ValueError(f"action={self.action!r} must be 'warn' or 'stop'")
        if isinstance(self.patience, bool) or not isinstance(self.patience, int) or self.patience < 1:
            raise ValueError(f"patience={self.patience!r} must be an integer, at least 1 step")
        if self.max_tie_fraction is not None and not _within(self.max_tie_fraction, 0, 1):
            raise ValueError(f"max_tie_fraction={self.max_tie_fraction!r} must lie in 0..1, or be None")
        if self.max_load_ratio is not None and not _within(self.max_load_ratio, 1, float("inf")):
            raise ValueError(
                f"max_load_ratio={self.max_load_ratio!r} must be at least 1, the ratio of perfect balance, or None"
            )

    def step(self, summed: torch.Tensor, layer: str = "router") -> dict[str, float]:
        """{"tie_fraction", "load_ratio"} of routing_statistics summed over ranks (fp32 [3 + num_experts]).

        Reads the numbers on the host: call it where the step's metrics are read anyway. Raises RouterError when
        action is "stop" and a threshold was passed for `patience` steps in a row, ValueError for numbers that are no
        such sums."""
        numbers = checks.tensor("summed", summed, "routing_statistics summed over ranks, [3 + num_experts]").tolist()
        if summed.dim() != 1 or len(numbers) <= STATISTICS or not all(0 <= n < float("inf") for n in numbers):
            raise ValueError(
                f"summed {tuple(summed.shape)} {str(numbers):.60} must be [{STATISTICS} + num_experts] finite numbers "
                "of at least 0; give what routing_statistics returns, summed over ranks"
            )
        tokens, ties, lost = numbers[:STATISTICS]
        load = numbers[STATISTICS:]
        mean = sum(load) / len(load)
        seen = {"tie_fraction": ties / tokens if tokens else 0.0, "load_ratio": max(load) / mean if mean else 1.0}
        over = [
            f"{name} {seen[name]:.3g} > {limit:g}"
            for name, limit in (("tie_fraction", self.max_tie_fraction), ("load_ratio", self.max_load_ratio))
            if limit is not None and seen[name] > limit
        ]
        if lost:
            over.append(f"{int(lost)} tokens with no finite score")
        self._streak = self._streak + 1 if over else 0
        if self._streak == self.patience or (self._streak > self.patience and self.action == "stop"):
            said = (
                f"{layer}: {', '.join(over)} in {self._streak} steps running; exact ties send tokens to the same "
                "experts. Check the gate's initialisation, keep the router in fp32, or turn the tie-break on"
            )
            if self.action == "stop":
                raise RouterError(said)
            log.warning("%s", said)
        return seen


def _within(value: Any, low: float, high: float) -> bool:
    """NaN and what is no number lie nowhere."""
    return isinstance(value, Real) and not isinstance(value, bool) and low <= float(value) <= high


def tie_break(scores: torch.Tensor, first_token: int | torch.Tensor = 0) -> torch.Tensor:
    """int64 [T, num_experts]: the place of every score among its token's, 0 for the smallest; no two are equal.

    scores [T, num_experts], floating. Unequal scores keep their order, however close they are and whatever their
    size: no score is changed. Equal scores (0 and -0 too) are ordered by a hash of (global token, expert). Take top-k's
    indices of the result and probabilities of the scores: the chosen set differs from the scores' own only where the
    k-th and the next score are equal. NaN counts as the largest, as in torch.topk, and as equal to NaN.

    first_token: global index of row 0, so that replicas of a token (tensor and expert parallel ranks, recomputation)
    agree. Deterministic, no generator, no gradient, no host synchronisation: two sorts of every row. ValueError for
    scores of another kind."""
    if scores.dim() != 2 or not scores.is_floating_point():
        raise ValueError(
            f"scores {scores.dtype} {tuple(scores.shape)} must be floating [T, num_experts]; give what "
            "top-k is taken of, in its own dtype"
        )
    num_tokens, num_experts = scores.shape
    token = torch.arange(num_tokens, device=scores.device, dtype=torch.int64)[:, None] + first_token
    expert = torch.arange(num_experts, device=scores.device, dtype=torch.int64)[None, :]
    # For one token a bijection of 32-bit values (odd factors): no two experts have one hash, so no tie is left.
    by_hash = _mix((token * 0x9E3779B1 + expert * 0x85EBCA77 + 1) & 0xFFFFFFFF).argsort(dim=1)
    # A stable sort of what lies in the order of the hash; + 0.0 makes -0 a 0, which sorts by bits may tell apart.
    order = by_hash.gather(1, (scores.detach() + 0.0).gather(1, by_hash).sort(dim=1, stable=True).indices)
    return torch.empty_like(order).scatter_(1, order, expert.expand_as(order))


def _mix(x: torch.Tensor) -> torch.Tensor:
    """A 32-bit finaliser (Murmur3's: Appleby, public domain) on int64 holding 32-bit values, without overflow."""
    x = x ^ (x >> 16)
    x = _times(x, 0x85EBCA6B)
    x = x ^ (x >> 13)
    x = _times(x, 0xC2B2AE35)
    return x ^ (x >> 16)


def _times(x: torch.Tensor, factor: int) -> torch.Tensor:
    """x * factor mod 2^32, in halves, so that no product leaves int64."""
    low, high = factor & 0xFFFF, factor >> 16
    return (x * low + (((x * high) & 0xFFFF) << 16)) & 0xFFFFFFFF
