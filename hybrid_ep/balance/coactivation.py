"""Experts that are hot together, kept apart: swaps that lower how far ranks' loads vary between micro-batches.

A placement by average loads levels ranks over many micro-batches. In one of them a rank is as hot as its experts are
together, and where their loads rise and fall together, by w' C w for the covariance C of loads and the rank's share w
of every expert, no single clone levels it. The sum of these variances over ranks depends on who lives with whom; that
of all experts together does not. So the placement that is level on average is changed by swaps of two slots, the one
that lowers the sum most first, as long as no rank comes above the limit on its average load.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from hybrid_ep.balance import inputs

# A swap gains at least this part of what the sum would be if experts were hot independently of one another: below it,
# experts follow the noise of an estimate.
LEAST_GAIN = 0.005
_SYMMETRY = 1e-9  # of a layer's largest covariance, by which rounding may make two entries differ


def checked(covariance: Any, num_layers: int, num_experts: int) -> np.ndarray:
    """float64 [L, E, E]. ValueError for another shape, values that are not finite, matrices that are not symmetric."""
    remedy = "covariances of loads, tokens squared"
    array = inputs.array("covariance", covariance, f"give {remedy}")
    if array.shape != (num_layers, num_experts, num_experts) or array.dtype.kind not in "iuf":
        raise ValueError(
            f"covariance has shape {array.shape} of {array.dtype}: give numbers "
            f"{(num_layers, num_experts, num_experts)}, [layers, experts, experts], as LoadWindow.covariance does"
        )
    array = array.astype(np.float64, copy=False)
    if not np.isfinite(array).all():
        raise ValueError(f"{inputs.entry('covariance', ~np.isfinite(array), array)}: give finite {remedy}")
    largest = np.abs(array).max(axis=(1, 2), keepdims=True, initial=0)  # of a layer: any unit will do
    scaled = array / np.where(largest > 0, largest, 1)
    uneven = np.abs(scaled - scaled.swapaxes(1, 2)) > _SYMMETRY
    if (np.diagonal(array, axis1=1, axis2=2) < 0).any() or uneven.any():
        raise ValueError("covariance is not symmetric, or a variance is negative: give C[i, j] = C[j, i], C[i, i] >= 0")
    return array


@dataclass(frozen=True)
class Calmed:
    """phy2log int64 [slots] of one layer; sums over ranks of the variance of their load, before and after."""

    phy2log: np.ndarray
    before: float
    after: float


def rank_variances(phy2log: np.ndarray, covariance: np.ndarray, num_ranks: int) -> np.ndarray:
    """float64 [R]: variance of each rank's load, with experts' loads split evenly over their slots."""
    share = _shares(phy2log, len(covariance), num_ranks)
    return np.einsum("re,ef,rf->r", share, covariance, share)


def calmed(
    phy2log: np.ndarray,
    load: np.ndarray,
    covariance: np.ndarray,
    num_ranks: int,
    *,
    limit: float,
    num_nodes: int = 1,
    current: np.ndarray | None = None,
    max_moves: int | None = None,
    least_gain: float = LEAST_GAIN,
) -> Calmed:
    """Swaps slots of one layer until none that is allowed lowers the sum of variances by least_gain of what it would be
    if experts were hot independently of one another.

    phy2log int [slots]: expert of every slot, slots / ranks consecutive ones a rank, none twice on a rank. load [E],
    covariance [E, E]: of the experts' loads. limit: no rank's average load ends above it, or above the fullest's now.
    num_nodes: slots are swapped inside consecutive nodes only. current, max_moves: at most so many slots differ from
    current in the end. Deterministic: of equal swaps the first slots are taken."""
    placed = np.array(phy2log, dtype=np.int64)
    slots, num_experts = len(placed), len(load)
    per_rank = slots // num_ranks
    rank = np.arange(slots) // per_rank
    node = rank // (num_ranks // num_nodes)
    count = np.bincount(placed, minlength=num_experts)
    weight = 1 / count[placed]
    share = _shares(placed, num_experts, num_ranks)
    loads = share @ load
    most = max(limit, float(loads.max())) * (1 + 1e-12)
    joint = covariance @ share.T  # [E, R]: of an expert's load with a rank's
    before = total = float(np.einsum("re,er->", share, joint))
    least = least_gain * float((np.diagonal(covariance) @ (share**2).T).sum())
    for _ in range(4 * slots):
        # Of slot i with expert a and slot j with expert b, w and v of their loads: what the sum changes by.
        mine = weight * load[placed]
        with_rank = weight[:, None] * joint[placed][:, rank]  # [i, j]: cov of i's part with the rank of j
        own = np.diagonal(with_rank)
        parts = weight[:, None] * covariance[np.ix_(placed, placed)] * weight
        alone = np.diagonal(parts)
        change = with_rank + with_rank.T - own[:, None] - own + alone[:, None] + alone - 2 * parts
        above = loads[rank][:, None] - mine[:, None] + mine  # the rank of i, with j's expert in place of i's
        allowed = (above <= most) & (above.T <= most) & (node[:, None] == node) & (rank[:, None] < rank)
        if slots > num_experts:
            held = share[:, placed] > 0  # [R, slots]
            allowed &= ~held[rank] & ~held[rank].T
        if max_moves is not None and current is not None:
            differs = placed[:, None] != current  # [i, j]: i's expert, were it in slot j
            now = np.diagonal(differs).astype(np.int64)
            allowed &= now.sum() - now[:, None] - now + differs + differs.T <= max_moves
        change = np.where(allowed, 2 * change, 0.0)
        i, j = np.unravel_index(int(np.argmin(change)), change.shape)
        if not change[i, j] < -least:
            break
        placed[i], placed[j] = placed[j], placed[i]
        weight[i], weight[j] = weight[j], weight[i]
        share = _shares(placed, num_experts, num_ranks)
        loads, joint = share @ load, covariance @ share.T
        total = float(np.einsum("re,er->", share, joint))
    return Calmed(placed, before, total)


def _shares(phy2log: np.ndarray, num_experts: int, num_ranks: int) -> np.ndarray:
    """float64 [R, E]: the part of each expert's load that a rank computes."""
    per_rank = len(phy2log) // num_ranks
    share = np.zeros((num_ranks, num_experts))
    np.add.at(share, (np.arange(len(phy2log)) // per_rank, phy2log), 1.0)
    return share / np.maximum(np.bincount(phy2log, minlength=num_experts), 1)
