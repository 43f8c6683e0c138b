"""The price of a better placement: changed slots against imbalance, for the caller to choose from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from hybrid_ep.balance import fixed_point
from hybrid_ep.balance.placement import PlacementPlan, _planned

TARGETS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5)
MOVES = (4, 8, 16, 32, 64, 128)


@dataclass(frozen=True)
class FrontPoint:
    """One placement of a layer: `moved` slots changed, `imbalance` left, `phy2log` int64 [slots]."""

    moved: int
    imbalance: float
    phy2log: np.ndarray


def placement_front(
    load: Any, num_slots: int, num_ranks: int, num_nodes: int = 1, current: Any = None, *, num_groups: int = 0
) -> list[list[FrontPoint]]:
    """For each layer placements of which none has both fewer changed slots and less imbalance than another.

    Arguments as `plan_placement`, which is called with several targets and limits of moves. The first point of a layer
    is `current` itself, the last is within 1 % of the mean of a fresh plan, or better. Some hundred milliseconds a
    layer at 288 slots. ValueError as plan_placement, and without `current`.
    """
    if current is None:
        raise ValueError("current is None: a front leads away from a placement, give the one in force")
    layers = fixed_point.checked(load)

    def plan(**options: Any) -> PlacementPlan:
        return _planned(layers, num_slots, num_ranks, num_nodes, current, num_groups, **options)

    plans = [plan(max_moves=0), *(plan(target=t) for t in TARGETS), *(plan(target=0.0, max_moves=m) for m in MOVES)]
    left = [p.imbalance() for p in plans]
    front = []
    for layer in range(len(layers)):
        points: list[FrontPoint] = []
        for i in sorted(range(len(plans)), key=lambda i: (plans[i].moved[layer], left[i][layer])):
            if not points or left[i][layer] < points[-1].imbalance:
                point = int(plans[i].moved[layer]), float(left[i][layer]), plans[i].phy2log[layer]
                points.append(FrontPoint(*point))
        front.append(points)
    return front
