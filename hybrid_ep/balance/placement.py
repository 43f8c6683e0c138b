"""Placement of experts and replicas that stays for a while: offline plans, and the slow loop's next step.

    plan = plan_placement(load, num_slots=288, num_ranks=32)                   # fresh
    plan = plan_placement(load, 288, 32, current=plan.phy2log)                 # as few changed slots as possible
    phy2log, log2phy, logcnt = rebalance_experts(weight, 288, 8, 4, 32)        # EPLB's call

Loads split evenly over replicas here; exact quotas are the micro-batch planner's business. The arithmetic is
`csrc/balance/placement.cpp` and `improve.cpp`, `twin_placement.py` is the same to read.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from hybrid_ep import _core
from hybrid_ep.balance import bounds
from hybrid_ep.balance.microbatch import PPM, imbalance_ratio

# Loads become integers with this sum at most: a share in 1/65536 token still fits 64 bits.
_MAX_SUM = (1 << 40) - 1


@dataclass(frozen=True)
class PlacementPlan:
    """Where experts and replicas live, layer by layer.

    * `phy2log` int64 [L, slots]: the expert of every slot, slots / ranks consecutive ones a rank.
    * `load` int64 [L, E]: what was planned for (fractional loads scaled to integers).
    * `moved` int64 [L]: slots that differ from `current`; all of them for a fresh plan.
    * `kept` bool [L]: hysteresis left the layer as it was, although a better placement exists.
    """

    phy2log: np.ndarray
    load: np.ndarray
    num_ranks: int
    moved: np.ndarray
    kept: np.ndarray

    @property
    def logcnt(self) -> np.ndarray:
        """int64 [L, E]: replicas of each expert."""
        return _counts(self.phy2log, self.load.shape[1])

    @property
    def log2phy(self) -> np.ndarray:
        """int64 [L, E, max replicas]: slots of each expert in ascending order, padded with -1."""
        return _slots_of_experts(self.phy2log, self.logcnt)

    def tokens_of_ranks(self, load: Any = None) -> np.ndarray:
        """float64 [L, R]: load of each rank, split evenly; of other loads on this placement when given."""
        return rank_loads(self.load if load is None else load, self.phy2log, self.num_ranks)

    def imbalance(self, load: Any = None) -> np.ndarray:
        """float64 [L]: (max - mean) / mean over ranks."""
        return np.array([imbalance_ratio(row) for row in self.tokens_of_ranks(load)])

    def split_bound(self) -> np.ndarray:
        """float64 [L]: imbalance of this placement under the best possible split of every expert."""
        best = [bounds.fixed_placement(w, p, self.num_ranks) for w, p in zip(self.load, self.phy2log, strict=True)]
        mean = self.load.sum(axis=1) / self.num_ranks
        return np.divide(best, mean, out=np.ones(len(best)), where=mean > 0) - 1


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


def _integer_load(load: Any) -> np.ndarray:
    """int64 [L, E], C-contiguous; fractions are scaled up so that rounding does not matter."""
    array = np.asarray(load)
    if array.ndim != 2 or array.dtype.kind not in "iuf" or 0 in array.shape:
        raise ValueError(f"load is {array.dtype} {array.shape}: give numbers [layers, experts]")
    if not np.isfinite(array).all() or (array < 0).any():
        raise ValueError("load holds a negative or non-finite number: give counts or averages of counts")
    total = float(array.sum(axis=1, dtype=np.float64).max())
    if array.dtype.kind == "f" or total > _MAX_SUM:
        scale = min(_MAX_SUM / 2 / total, 65536.0) if total else 1.0
        array = np.rint(array.astype(np.float64) * scale)
    return np.ascontiguousarray(array, dtype=np.int64)


def plan_placement(load: Any, num_slots: int, num_ranks: int, num_nodes: int = 1, current: Any = None, *,
                   num_groups: int = 0, target: float = 0.02, max_moves: int | None = None, move_cost: float = 0.0,
                   horizon: int = 0) -> PlacementPlan:
    """Experts and replicas for `num_slots` slots on `num_ranks` ranks, layer by layer. Pure and deterministic.

    * `load`: [L, E] tokens per layer and expert (counts, averages or a decayed window).
    * `num_groups`: 0 for experts anywhere; else consecutive groups of experts each stay on one of `num_nodes` nodes.
    * `current`: placement in force [L, slots]; then only single replicas and pair swaps change it, the most gain a
      changed slot first, until every rank is within `target` of the mean or `max_moves` slots of the layer
      have changed. The result may hold a replica anywhere a slot was free of that expert.
    * `move_cost`, `horizon`: hysteresis. A layer changes only if (fullest rank before - after) * horizon exceeds
      changed slots * move_cost: both in units of load, horizon in micro-batches until the next placement.
      horizon 0 switches it off.

    No rank ever holds two replicas of an expert. ValueError: shapes that do not divide, more slots than one of
    each expert a rank, a bad `current`.
    """
    array = _integer_load(load)
    num_layers, num_experts = array.shape
    shape = dict(num_layers=num_layers, num_experts=num_experts, num_slots=num_slots, num_groups=num_groups,
                 num_nodes=num_nodes, num_ranks=num_ranks)
    unchanged = np.zeros(num_layers, bool)
    if current is None:
        placed = _core.place_layers(load=array, **shape)
        return PlacementPlan(placed.astype(np.int64), array, num_ranks, np.full(num_layers, num_slots), unchanged)
    before = np.asarray(current)
    if before.shape != (num_layers, num_slots) or before.dtype.kind not in "iu":
        raise ValueError(f"current is {before.dtype} {before.shape}: give integers {(num_layers, num_slots)}, "
                         "[layers, slots]")
    if not 0 <= target <= 1:
        raise ValueError(f"target is {target!r}: give a fraction from 0 to 1")
    if max_moves is not None and max_moves < 0:
        raise ValueError(f"max_moves is {max_moves!r}: give a number of slots, or None for no limit")
    limit = num_slots * num_ranks if max_moves is None else max_moves
    placed = _core.improve_layers(load=array, current=np.ascontiguousarray(before, dtype=np.int32),
                                  target_ppm=round(target * PPM), max_moves=limit, **shape)
    moved = (placed != before).sum(axis=1)
    if horizon > 0:
        given = np.asarray(load, dtype=np.float64)  # gain in the caller's unit
        gain = (rank_loads(given, before, num_ranks).max(axis=1) - rank_loads(given, placed, num_ranks).max(axis=1))
        unchanged = (moved > 0) & (gain * horizon <= moved * move_cost)
        placed[unchanged] = before[unchanged]
        moved[unchanged] = 0
    return PlacementPlan(placed.astype(np.int64), array, num_ranks, moved, unchanged)


def rebalance_experts(weight: Any, num_replicas: int, num_groups: int, num_nodes: int, num_gpus: int) -> tuple:
    """EPLB's call, with its shapes: experts of [L, E] loads onto `num_replicas` slots of `num_gpus` ranks.

    Hierarchical when num_groups is a multiple of num_nodes, global otherwise, as EPLB decides. Returns int64
    tensors phy2log [L, num_replicas], log2phy [L, E, max replicas] padded with -1, logcnt [L, E].
    """
    import torch

    hierarchical = num_groups > 0 and num_groups % num_nodes == 0
    load = weight.detach().cpu().numpy() if torch.is_tensor(weight) else np.asarray(weight)
    plan = plan_placement(load, num_replicas, num_gpus, num_nodes if hierarchical else 1,
                          num_groups=num_groups if hierarchical else 0)
    logcnt = plan.logcnt
    log2phy = _slots_of_experts(plan.phy2log, logcnt)
    return tuple(torch.from_numpy(np.ascontiguousarray(x, dtype=np.int64)) for x in (plan.phy2log, log2phy, logcnt))
