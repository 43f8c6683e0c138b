"""Placement of experts and replicas that stays for a while: offline plans, and the slow loop's next step.

    plan = plan_placement(load, num_slots=288, num_ranks=32)                   # fresh
    plan = plan_placement(load, 288, 32, current=plan.phy2log)                 # as few changed slots as possible
    phy2log, log2phy, logcnt = rebalance_experts(weight, 288, 8, 4, 32)        # EPLB's call

Loads split evenly over replicas here; exact quotas are the micro-batch planner's business. The arithmetic is
`csrc/balance/placement.cpp` and `improve.cpp`, `twin_placement.py` is the same to read.
"""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import numpy as np

from hybrid_ep import _core
from hybrid_ep.balance import bounds, coactivation, fixed_point, inputs
from hybrid_ep.balance.microbatch import PPM, ratio

NEAR_FRESH = 0.01  # of the mean above a fresh plan: where a placement that keeps what it can may end
_Sum = Callable[[np.ndarray], np.ndarray]  # float32 [L, groups, experts of each] -> sums over the last axis


@dataclass(frozen=True)
class PlacementPlan:
    """Where experts and replicas live, layer by layer.

    * `phy2log` int64 [L, slots]: the expert of every slot, slots / ranks consecutive ones a rank.
    * `load` float64 [L, E]: what was planned for, in the caller's unit.
    * `moved` int64 [L]: slots that differ from `current`; all of them for a fresh plan.
    * `kept` bool [L]: hysteresis left the layer as it was, although a better placement exists.
    * `fresh` float64 [L]: imbalance that a fresh plan leaves, whatever it moves; what this one is measured against.
    """

    phy2log: np.ndarray
    load: np.ndarray
    num_ranks: int
    moved: np.ndarray
    kept: np.ndarray
    fresh: np.ndarray
    target: float = 0.0

    @property
    def logcnt(self) -> np.ndarray:
        """int64 [L, E]: replicas of each expert."""
        return _counts(self.phy2log, self.load.shape[1])

    @property
    def log2phy(self) -> np.ndarray:
        """int64 [L, E, max replicas]: slots of each expert in ascending order, padded with -1."""
        return _slots_of_experts(self.phy2log, self.logcnt)

    def tokens_of_ranks(self, load: Any = None) -> np.ndarray:
        """float64 [L, R]: load of each rank, split evenly; of other loads [L, E] on this placement when given.
        ValueError: another shape, a load that is negative or not finite."""
        return rank_loads(self._of(load), self.phy2log, self.num_ranks)

    def imbalance(self, load: Any = None) -> np.ndarray:
        """float64 [L]: (max - mean) / mean over ranks. ValueError as `tokens_of_ranks`."""
        return _imbalance(self._of(load), self.phy2log, self.num_ranks)

    def _of(self, load: Any) -> np.ndarray:
        num_layers, num_experts = self.load.shape
        return self.load if load is None else fixed_point.checked(load, (num_layers, num_experts))

    @property
    def stopped(self) -> tuple[str, ...]:
        """Why each layer ended where it did: "target"; "near_fresh", above the target and within 1 % of the mean of
        what a fresh plan leaves; "kept" by hysteresis; "max_moves", where as many slots do not get there."""
        done, (_, num_slots) = self.imbalance(), self.phy2log.shape
        rounded = 4 * num_slots / fixed_point.largest(self.load.shape[1])  # of a mean, by the core's shares
        return tuple(
            "target"
            if now <= self.target + rounded
            else "near_fresh"
            if now <= fresh + NEAR_FRESH + rounded
            else "kept"
            if kept
            else "max_moves"
            for now, fresh, kept in zip(done, self.fresh, self.kept, strict=True)
        )

    def split_bound(self) -> np.ndarray:
        """float64 [L]: imbalance of this placement under the best possible split of every expert."""
        scaled = fixed_point.integers(self.load)
        best = [bounds.fixed_placement(w, p, self.num_ranks) for w, p in zip(scaled, self.phy2log, strict=True)]
        mean = scaled.sum(axis=1) / self.num_ranks
        return np.divide(best, mean, out=np.ones(len(best)), where=mean > 0) - 1


def _imbalance(load: np.ndarray, phy2log: np.ndarray, num_ranks: int) -> np.ndarray:
    return np.array([ratio(row) for row in rank_loads(fixed_point.normalised(load), phy2log, num_ranks)])


def _counts(phy2log: np.ndarray, num_experts: int) -> np.ndarray:
    num_layers = len(phy2log)
    offset = np.arange(num_layers)[:, None] * num_experts
    return np.bincount((phy2log + offset).ravel(), minlength=num_layers * num_experts).reshape(num_layers, num_experts)


def _slots_of_experts(phy2log: np.ndarray, counts: np.ndarray) -> np.ndarray:
    # Numbers of two bytes have a stable sort in linear time.
    order = np.argsort(phy2log.astype(np.uint16) if counts.shape[1] <= 1 << 16 else phy2log, axis=1, kind="stable")
    layer = np.arange(len(phy2log))[:, None]
    experts, first = phy2log[layer, order], np.cumsum(counts, axis=1) - counts
    table = np.full((*counts.shape, int(counts.max())), -1, np.int64)
    table[layer, experts, np.arange(phy2log.shape[1]) - first[layer, experts]] = order
    return table


def slot_loads(load: Any, phy2log: Any) -> np.ndarray:
    """float64 [L, slots]: each expert's load [L, E] split evenly over its slots [L, slots]."""
    load, phy2log = np.asarray(load, np.float64), np.asarray(phy2log)
    share = load / np.maximum(_counts(phy2log, load.shape[1]), 1)
    return np.take_along_axis(share, phy2log, axis=1)


def rank_loads(load: Any, phy2log: Any, num_ranks: int) -> np.ndarray:
    """float64 [L, R]: slot loads summed over each rank's consecutive slots."""
    slots = slot_loads(load, phy2log)
    return slots.reshape(len(slots), num_ranks, -1).sum(axis=2)


def _fullest(load: np.ndarray, phy2log: np.ndarray, num_ranks: int) -> Fraction:
    """The fullest rank of one layer, exactly: load [E] of doubles, each split evenly."""
    ranks = phy2log.reshape(num_ranks, -1)
    count = np.bincount(phy2log, minlength=len(load))
    with np.errstate(over="ignore"):  # ranks whose sum is no double are all looked at
        double = (load / np.maximum(count, 1))[ranks].sum(axis=1)
    close = ranks[double >= double.max() * (1 - 1e-9)]
    alike = {tuple(sorted((float(load[e]), int(count[e])) for e in mine)) for mine in close}  # few, in flat loads
    return max(sum((Fraction(w) / c * n for (w, c), n in Counter(mine).items()), Fraction()) for mine in alike)


def _candidates(load: np.ndarray, shape: dict[str, int], sums: _Sum | None = None) -> tuple[np.ndarray, ...]:
    """(ours, EPLB's, which): placements int32 [L, slots]; which < 0: ours is lower, > 0: EPLB's is, 0: too close for
    integers. sums: what sums float32 [L, groups, experts of each] over the last axis, in EPLB's order of adding."""
    num_layers, num_experts = load.shape
    single = fixed_point.singles(load)
    groups = shape["num_groups"] if shape["num_groups"] > 0 and num_experts % shape["num_groups"] == 0 else 1
    grouped = single.reshape(num_layers, groups, -1)  # any other number of groups is refused by the core
    group_load = np.ascontiguousarray(sums(grouped) if sums else grouped.sum(axis=2))
    return _core.place_layers(
        load=fixed_point.integers(load),
        single=single,
        group=group_load,
        num_layers=num_layers,
        num_experts=num_experts,
        **shape,
    )


def _shape(**given: Any) -> dict[str, int]:
    """What the core takes for a shape: integers, of which it says itself whether they go together."""
    return {name: inputs.integer(name, value, int(name != "num_groups")) for name, value in given.items()}


def _fresh(load: np.ndarray, shape: dict[str, int], sums: _Sum | None = None, twins: bool = False) -> np.ndarray:
    """int64 [L, slots]: a fresh placement of each layer, or EPLB's where its fullest rank is lower, exactly.
    twins: then even if that holds two replicas of an expert on one rank."""
    ours, theirs, which = _candidates(load, shape, sums)
    num_ranks = shape["num_ranks"]
    for layer in np.flatnonzero(which >= 0):
        mine, other = ours[layer], theirs[layer]
        if not twins and any(len(set(m)) < len(m) for m in other.reshape(num_ranks, -1).tolist()):
            continue
        if which[layer] > 0 or _fullest(load[layer], other, num_ranks) < _fullest(load[layer], mine, num_ranks):
            ours[layer] = other
    return ours.astype(np.int64)


def plan_placement(
    load: Any,
    num_slots: int,
    num_ranks: int,
    num_nodes: int = 1,
    current: Any = None,
    *,
    num_groups: int = 0,
    target: float = 0.02,
    max_moves: int | None = None,
    move_cost: float = 0.0,
    horizon: int = 0,
    covariance: Any = None,
) -> PlacementPlan:
    """Experts and replicas for `num_slots` slots on `num_ranks` ranks, layer by layer. Pure and deterministic.

    * `load`: [L, E] tokens per layer and expert (counts, averages or a decayed window).
    * `num_groups`: 0 for experts anywhere; else consecutive groups of experts each stay on one of `num_nodes` nodes.
    * `current`: placement in force [L, slots]. Then few slots change, by single replicas and pair swaps, the most gain
      a changed slot first, until every rank is within `target` of the mean or, where that takes more than a fresh plan
      can do, within 1 % of the mean of a fresh plan's fullest rank. Where such steps stick, the way back from a fresh
      plan is taken, at the price of many slots. `max_moves` limits the changed slots of a layer; `plan.stopped` says
      which of these ended it, `placement_front` what other prices buy.
    * `move_cost`, `horizon`: hysteresis. A layer changes only if (fullest rank before - after) * horizon exceeds
      changed slots * move_cost: both in units of load, horizon in micro-batches until the next placement.
      horizon 0 switches it off.
    * `covariance`: [L, E, E], of the loads of micro-batches (`LoadWindow.covariance`; any unit, a factor changes
      nothing). Then slots of the placement that levels the averages are swapped as long as that lowers how far ranks'
      loads vary and no rank comes above the target, or above what was the fullest (`hybrid_ep.balance.coactivation`);
      `max_moves` holds; a layer kept by hysteresis is kept as it is, else these moves are not weighed against
      `move_cost`. None: the averages alone.

    No rank ever holds two replicas of an expert. ValueError: shapes that do not divide, more slots than one of
    each expert a rank, a bad `current` or `covariance`. UserWarning: `max_moves` leaves a layer above what a fresh plan
    would.
    """
    plan = _planned(load, num_slots, num_ranks, num_nodes, current, num_groups, target, max_moves, move_cost, horizon)
    if covariance is not None:
        plan = _calmed(plan, covariance, num_nodes if num_groups else 1, current, target, max_moves)
    if max_moves is None:
        return plan
    short = [layer for layer, why in enumerate(plan.stopped) if why == "max_moves"]
    if short:
        worst = max(short, key=lambda layer: plan.imbalance()[layer] - plan.fresh[layer])
        warnings.warn(
            f"max_moves is {max_moves}: {len(short)} layers stay more than {NEAR_FRESH:.0%} of the mean "
            f"above a fresh plan, layer {worst} at {plan.imbalance()[worst]:.3f} where that leaves "
            f"{plan.fresh[worst]:.3f}; placement_front lists what more changed slots buy",
            stacklevel=2,
        )
    return plan


def _calmed(
    plan: PlacementPlan, covariance: Any, num_nodes: int, current: Any, target: float, max_moves: int | None
) -> PlacementPlan:
    """The plan with experts that are hot together on different ranks, and with what then moves."""
    joint = coactivation.checked(covariance, *plan.load.shape)
    before = None if current is None else inputs.array("current", current, "give integers").astype(np.int64)
    placed = plan.phy2log.copy()
    for layer in np.flatnonzero(~plan.kept):
        load = plan.load[layer] / max(float(plan.load[layer].max()), np.finfo(np.float64).tiny)
        placed[layer] = coactivation.calmed(
            placed[layer],
            load,
            joint[layer],
            plan.num_ranks,
            limit=float(load.sum()) / plan.num_ranks * (1 + target),
            num_nodes=num_nodes,
            current=None if before is None else before[layer],
            max_moves=max_moves,
        ).phy2log
    moved = plan.moved if before is None else (placed != before).sum(axis=1)
    return replace(plan, phy2log=placed, moved=moved)


def _in_force(current: Any, num_layers: int, num_slots: int, num_experts: int) -> np.ndarray:
    """int32 [L, slots]."""
    remedy = "the expert of every slot, [layers, slots]"
    return inputs.integers("current", current, (num_layers, num_slots), 0, num_experts - 1, remedy, np.int32)


def _pays(
    load: np.ndarray,
    before: np.ndarray,
    placed: np.ndarray,
    num_ranks: int,
    moved: np.ndarray,
    move_cost: float,
    horizon: int,
) -> np.ndarray:
    """bool [L]: what the fullest rank saves over the horizon is more than what the changed slots cost."""
    # In a unit of each layer's own, for the sum of large loads is no double; a power of two, which rounds nothing.
    exponent = np.frexp(load.max(axis=1))[1]
    unit = np.ldexp(load, -exponent[:, None])
    gain = rank_loads(unit, before, num_ranks).max(axis=1) - rank_loads(unit, placed, num_ranks).max(axis=1)
    with np.errstate(over="ignore"):  # a cost that is no double beside tiny loads is more than any gain
        cost = np.maximum(moved, 1) * np.ldexp(move_cost, -exponent)
    return np.asarray(gain * horizon > cost)


def _planned(
    load: Any,
    num_slots: int,
    num_ranks: int,
    num_nodes: int,
    current: Any,
    num_groups: int = 0,
    target: float = 0.02,
    max_moves: int | None = None,
    move_cost: float = 0.0,
    horizon: int = 0,
) -> PlacementPlan:
    """`plan_placement` without its warning."""
    array = fixed_point.checked(load)
    num_layers, num_experts = array.shape
    shape = _shape(num_slots=num_slots, num_groups=num_groups, num_nodes=num_nodes, num_ranks=num_ranks)
    num_slots, num_ranks = shape["num_slots"], shape["num_ranks"]
    target = inputs.number("target", target, 0, 1, "a fraction from 0 to 1")
    if max_moves is not None:
        max_moves = inputs.integer("max_moves", max_moves, 0, remedy="a number of slots, or None for no limit")
    move_cost = inputs.number("move_cost", move_cost, 0, math.inf, "what a changed slot costs, in load, 0 or more")
    horizon = inputs.integer("horizon", horizon, 0, remedy="micro-batches until the next placement")
    unchanged = np.zeros(num_layers, bool)
    if current is None:
        fresh = _fresh(array, shape)
        left = _imbalance(array, fresh, num_ranks)
        return PlacementPlan(fresh, array, num_ranks, np.full(num_layers, num_slots), unchanged, left)
    before = _in_force(current, num_layers, num_slots, num_experts)
    fresh = _fresh(array, shape)
    limit = num_slots * num_ranks if max_moves is None else max_moves
    placed = _core.improve_layers(
        load=fixed_point.integers(array),
        current=before,
        fresh=fresh.astype(np.int32),
        target_ppm=round(target * PPM),
        max_moves=limit,
        num_layers=num_layers,
        num_experts=num_experts,
        **shape,
    )
    moved = (placed != before).sum(axis=1)
    if horizon > 0:
        unchanged = (moved > 0) & ~_pays(array, before, placed, num_ranks, moved, move_cost, horizon)
        placed[unchanged] = before[unchanged]
        moved[unchanged] = 0
    return PlacementPlan(
        placed.astype(np.int64), array, num_ranks, moved, unchanged, _imbalance(array, fresh, num_ranks), target
    )


def rebalance_experts(weight: Any, num_replicas: int, num_groups: int, num_nodes: int, num_gpus: int) -> tuple:
    """EPLB's call, with its shapes: experts of [L, E] loads onto `num_replicas` slots of `num_gpus` ranks.

    Hierarchical when num_groups is a multiple of num_nodes, global otherwise, as EPLB decides. Returns int64
    tensors phy2log [L, num_replicas], log2phy [L, E, max replicas] padded with -1, logcnt [L, E].

    No layer's fullest rank is above that of EPLB in its float32 arithmetic (equal loads in order; loads of 1e-35 to
    1e35 or 0, which float32 can divide), compared exactly on the loads given: where EPLB's placement is lower, it is
    returned. Only there may a rank hold two replicas of an expert. ValueError as `plan_placement`.
    """
    import torch

    asked = _shape(num_replicas=num_replicas, num_groups=num_groups, num_nodes=num_nodes, num_gpus=num_gpus)
    num_groups, num_nodes = asked["num_groups"], asked["num_nodes"]
    hierarchical = num_groups > 0 and num_groups % num_nodes == 0
    groups, nodes = (num_groups, num_nodes) if hierarchical else (0, 1)
    load = fixed_point.checked(weight, name="weight")
    shape = dict(num_slots=asked["num_replicas"], num_groups=groups, num_nodes=nodes, num_ranks=asked["num_gpus"])
    try:
        phy2log = _fresh(load, shape, lambda grouped: torch.from_numpy(grouped).sum(-1).numpy(), twins=True)
    except ValueError as error:  # under the names of this call
        raise ValueError(str(error).replace("num_slots", "num_replicas").replace("num_ranks", "num_gpus")) from None
    logcnt = _counts(phy2log, load.shape[1])
    log2phy = _slots_of_experts(phy2log, logcnt)
    return tuple(torch.from_numpy(np.ascontiguousarray(x, dtype=np.int64)) for x in (phy2log, log2phy, logcnt))
