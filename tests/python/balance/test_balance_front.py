"""Incremental placements end near a fresh plan or say why not; what fewer moves cost; fresh plans of steep loads."""

from __future__ import annotations

import warnings

import numpy as np
import pytest

from hybrid_ep import balance
from hybrid_ep.balance import bounds, fixed_point, loads
from hybrid_ep.balance.placement import NEAR_FRESH

ROUNDED = 1e-6  # of a mean, by shares in integers

# (kind, value, experts, slots, ranks, nodes, groups, drift): None for loads of an unrelated layer
MOVES = [
    ("zipf", 2.0, 256, 288, 32, 1, 0, 0.5),
    ("zipf", 1.2, 256, 288, 32, 4, 8, None),
    ("lognormal", 2.0, 256, 320, 64, 1, 0, 0.5),
    ("zipf", 0.8, 256, 272, 16, 1, 0, None),
    ("zipf", 1.2, 256, 256, 32, 1, 0, 0.5),
    ("lognormal", 1.0, 64, 80, 16, 4, 8, 0.5),
    ("zipf", 2.5, 32, 40, 8, 1, 0, 0.5),
]


def moving(kind, value, experts, slots, ranks, nodes, groups, drift, layers=3):
    """(placement in force, loads now, further arguments)"""
    rng = np.random.default_rng(experts + slots)
    share = loads.popularity(rng, layers, experts, kind, value)
    later = share[::-1].copy() if drift is None else loads.drift(rng, share, drift)
    first = balance.plan_placement(share, slots, ranks, nodes, num_groups=groups)
    return first.phy2log, later, dict(num_slots=slots, num_ranks=ranks, num_nodes=nodes, num_groups=groups)


@pytest.mark.parametrize("case", MOVES, ids=lambda c: f"{c[0]}{c[1]}-EP{c[4]}-{c[7]}")
def test_an_improvement_ends_near_a_fresh_plan(case):
    current, load, shape = moving(*case)
    fresh = balance.plan_placement(load, **shape)
    plan = balance.plan_placement(load, current=current, **shape)
    assert plan.fresh == pytest.approx(fresh.imbalance())
    assert (plan.imbalance() <= np.maximum(0.02, fresh.imbalance() + NEAR_FRESH) + ROUNDED).all()
    assert set(plan.stopped) <= {"target", "near_fresh"}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        few = balance.plan_placement(load, current=current, max_moves=3, **shape)
    said = [str(w.message) for w in caught]
    assert bool(said) == ("max_moves" in few.stopped) and all("max_moves is 3" in s for s in said)
    assert (few.moved <= 3).all()
    before = balance.PlacementPlan(current, load, shape["num_ranks"], few.moved, few.kept, few.fresh).imbalance()
    assert (few.imbalance() <= before + 1e-12).all()
    for reason, now, best in zip(few.stopped, few.imbalance(), few.fresh, strict=True):
        assert (reason == "max_moves") == (now > max(0.02, best + NEAR_FRESH) + ROUNDED)


# Where single steps stick and the way back from a fresh plan is long: 143, 112 and 180 slots when it was cut short.
@pytest.mark.parametrize(
    "kind, value, slots, ranks, drift, seed, most",
    [
        ("zipf", 1.2, 320, 64, 0.15, 3, 80),
        ("zipf", 2.0, 272, 16, 0.15, 4, 40),
        ("lognormal", 2.0, 320, 64, 0.5, 5, 110),
    ],
)
def test_few_slots_change_where_steps_stick(kind, value, slots, ranks, drift, seed, most):
    rng = np.random.default_rng(seed)
    share = loads.popularity(rng, 4, 256, kind, value)
    later = loads.drift(rng, share, drift)
    first = balance.plan_placement(share, slots, ranks)
    assert balance.plan_placement(later, slots, ranks, current=first.phy2log).moved.max() <= most


def test_the_front_trades_slots_for_balance():
    current, load, shape = moving("zipf", 1.2, 64, 80, 16, 1, 0, 0.5)
    for layer, points in enumerate(balance.placement_front(load, current=current, **shape)):
        assert points[0].moved == 0 and (points[0].phy2log == current[layer]).all() and len(points) >= 4
        for a, b in zip(points, points[1:], strict=False):
            assert a.moved < b.moved and a.imbalance > b.imbalance
        for p in points:
            assert (p.phy2log != current[layer]).sum() == p.moved
        fresh = balance.plan_placement(load[layer : layer + 1], **shape).imbalance()[0]
        assert points[-1].imbalance <= fresh + NEAR_FRESH + ROUNDED
    with pytest.raises(ValueError, match="current"):
        balance.placement_front(load, **shape)


# What a fresh plan may leave: 1 to 4 %, where it was 9 to 43 %.
STEEP = [
    ("zipf", 2.0, 256, 288, 32, 0.0083),
    ("zipf", 2.0, 256, 320, 64, 0.035),
    ("zipf", 2.5, 256, 272, 16, 0.0001),
    ("zipf", 2.5, 256, 288, 32, 0.039),
    ("zipf", 3.0, 256, 288, 32, 0.025),
    ("zipf", 3.0, 32, 40, 8, 0.035),
    ("zipf", 2.5, 32, 40, 8, 0.017),
]


@pytest.mark.parametrize("kind, value, experts, slots, ranks, most", STEEP)
def test_a_fresh_plan_of_steep_loads(kind, value, experts, slots, ranks, most):
    share = loads.popularity(np.random.default_rng(0), 2, experts, kind, value)
    fresh = balance.plan_placement(share, slots, ranks)
    assert fresh.imbalance().max() <= most


# (experts, slots, ranks, tens of layers of each load)
NEAR_THE_BOUND = [
    (32, 40, 8, 20),
    (32, 48, 8, 10),
    (64, 72, 8, 15),
    (64, 80, 16, 10),
    (64, 128, 32, 2),
    (128, 144, 16, 5),
    (128, 160, 32, 2),
    (128, 192, 64, 1),
    (256, 264, 8, 3),
    (256, 272, 16, 3),
    (256, 288, 32, 2),
    (256, 288, 36, 2),
    (256, 320, 64, 1),
]


@pytest.mark.parametrize("experts, slots, ranks, tens", NEAR_THE_BOUND)
def test_a_fresh_plan_is_near_what_no_even_split_beats(experts, slots, ranks, tens):
    """So no improvement of another placement finds one that is much lower. At (32, 40, 8) and sigma 3 the fifth layer
    of the fourteenth ten is 0.146 above the bound, which knows nothing of what fits together on a rank."""
    kinds = [("zipf", v) for v in (1.2, 1.4, 2.0, 2.5, 3.0)] + [("lognormal", v) for v in (1.0, 2.0, 3.0)]
    for kind, value in kinds:
        drawn = [loads.popularity(np.random.default_rng(n), 10, experts, kind, value) for n in range(tens)]
        share = np.concatenate(drawn)
        whole = fixed_point.integers(share)
        floor = [max(1, bounds.slots(w, slots) * ranks / w.sum()) - 1 for w in whole]
        most = 0.15 if (kind, value) == ("lognormal", 3.0) else 0.06
        assert (balance.plan_placement(share, slots, ranks).imbalance() <= np.add(floor, most)).all(), (kind, value)


def test_a_limit_of_moves_takes_the_lowest_that_stood_on_the_way():
    """A step lowers what stands above the limit on all ranks together, and may lift the fullest."""
    rng = np.random.default_rng(5)
    load = rng.random((1, 32)) * 1000
    current = balance.plan_placement(rng.random((1, 32)), 40, 8).phy2log
    left = []
    for most in range(6):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            plan = balance.plan_placement(load, 40, 8, current=current, target=0.0, max_moves=most)
        assert plan.moved[0] <= most
        left.append(plan.imbalance()[0])
    assert left == sorted(left, reverse=True) and left[-1] < left[0]
