"""Which groups share a node, and where a few experts are steep: as low as what an improvement finds, and never above
what the greedy choices alone give."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from hybrid_ep import balance
from hybrid_ep.balance import loads, twin_placement

KINDS = [("zipf", 0.5), ("zipf", 1.0), ("zipf", 2.0), ("lognormal", 1.0), ("lognormal", 3.0)]
# experts, slots, ranks, nodes, groups; the last has more ways than steps.
SHAPES = [(48, 60, 12, 3, 12), (32, 48, 8, 2, 8), (32, 40, 8, 4, 8), (24, 36, 12, 1, 0), (48, 72, 8, 4, 24)]


class GreedyAlone(twin_placement.Placement):
    """The first assignment of groups to nodes stands, and what swaps and single replicas make of it."""

    def _even_groups(self, greedy):
        return greedy

    def _spread_hottest(self, nodes, ranks, far):
        pass


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kind, value", KINDS)
def test_core_and_twin_agree_and_are_never_above_the_greedy(shape, kind, value):
    experts, slots, ranks, nodes, groups = shape
    share = loads.popularity(np.random.default_rng(5), 2, experts, kind, value)
    plan = balance.plan_placement(share, slots, ranks, nodes, num_groups=groups)
    for load, placed, fullest in zip(share, plan.phy2log, plan.tokens_of_ranks().max(axis=1), strict=True):
        first, twin = (of(load, slots, ranks, nodes, groups) for of in (GreedyAlone, twin_placement.Placement))
        first.fresh()
        assert placed.tolist() == twin.fresh()
        assert twin._fullest(range(ranks)) <= first._fullest(range(ranks))
        if nodes > 1:
            held = [set(node // (experts // groups)) for node in placed.reshape(nodes, -1)]
            assert sum(map(len, held)) == groups and all(len(h) == groups // nodes for h in held)
        assert all(len(set(mine)) == len(mine) for mine in placed.reshape(ranks, -1).tolist())
        assert fullest >= load.sum() / ranks


def test_all_ways_to_place_few_groups_are_weighed():
    rng = np.random.default_rng(6)
    better = 0
    for _ in range(20):
        load = np.repeat(rng.pareto(1.5, 8), 2)
        placement = twin_placement.Placement(load, 24, 4, 2, 8)
        weight, greedy = placement._weights_of_groups(), placement._greedy_groups()
        least = min(
            placement._heaviest([list(half), [g for g in range(8) if g not in half]], weight)
            for half in itertools.combinations(range(8), 4)
        )
        found = placement._heaviest(placement._even_groups(greedy), weight)
        assert found == least <= placement._heaviest(greedy, weight)
        better += found < placement._heaviest(greedy, weight)
    assert better > 5


def test_where_steps_end_groups_of_the_heaviest_node_are_swapped(monkeypatch):
    monkeypatch.setattr(twin_placement, "GROUP_STEPS", 3)
    rng, better = np.random.default_rng(2), 0
    for _ in range(20):
        placement = twin_placement.Placement(np.repeat(rng.pareto(1.5, 12), 2), 36, 6, 3, 12)
        weight, greedy = placement._weights_of_groups(), placement._greedy_groups()
        even = placement._even_groups(greedy)
        assert placement._heaviest(even, weight) <= placement._heaviest(greedy, weight)
        assert sorted(g for node in even for g in node) == list(range(12)) and all(len(node) == 4 for node in even)
        better += placement._heaviest(even, weight) < placement._heaviest(greedy, weight)
    assert better


@pytest.mark.parametrize("kind, value, layers", [("zipf", 2.0, 500), ("zipf", 1.2, 50), ("lognormal", 2.0, 50)])
def test_an_improvement_finds_hardly_anything_below_a_fresh_plan(kind, value, layers):
    shape = (288, 32, 4)
    share = loads.popularity(np.random.default_rng(1), layers, 256, kind, value)
    fresh = balance.plan_placement(share, *shape, num_groups=8)
    other = np.roll(fresh.phy2log, 1, axis=0)  # a layer's from another's
    improved = balance.plan_placement(share, *shape, current=other, num_groups=8, target=0.0)
    assert (fresh.imbalance() - improved.imbalance()).max() < 0.02


@pytest.mark.parametrize(
    "slots, ranks, value, most", [(320, 64, 2.0, 0.010), (320, 64, 3.0, 0.015), (288, 36, 2.0, 0.010)]
)
def test_steep_loads_without_groups(slots, ranks, value, most):
    share = loads.popularity(np.random.default_rng(7), 5, 256, "zipf", value)
    assert balance.plan_placement(share, slots, ranks).imbalance().max() < most
