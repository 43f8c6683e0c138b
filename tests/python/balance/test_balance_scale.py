"""Loads of any scale get the same placement where the unit changes by a power of two, and the same of our own for whole
numbers in any unit; EPLB's, which is made in float32, may differ. No float input gets one worse than EPLB's."""

from __future__ import annotations

import sys
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybrid_ep import balance
from hybrid_ep.balance import fixed_point, loads, twin_placement
from hybrid_ep.balance.placement import _candidates

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "scripts"))
from balance_peers import eplb  # noqa: E402

# (experts, slots, ranks, nodes, groups)
SHAPES = [(16, 20, 4, 1, 0), (24, 32, 4, 2, 4), (12, 12, 3, 1, 0), (8, 24, 6, 1, 0), (32, 40, 8, 1, 0)]
KINDS = ["flat", "lognormal", "zipf", "mixed", "whole", "ties"]


def layer_of(kind, experts, rng):
    """float64 [E], of order 1."""
    if kind == "flat":
        return np.full(experts, 0.1)
    if kind == "mixed":  # 1e-30 to 1
        return 10.0 ** rng.uniform(-30, 0, experts)
    if kind == "ties":
        return rng.integers(0, 3, experts) * 0.1
    if kind == "whole":
        return rng.integers(0, 1000, experts).astype(float)
    return loads.popularity(rng, 1, experts, kind, rng.uniform(0.3, 2.5))[0]


def exact_imbalance(load, phy2log, ranks):
    """(max - mean) / mean as a Fraction, of loads as they are."""
    count = np.bincount(phy2log, minlength=len(load))
    by_rank = [sum(Fraction(float(load[e])) / int(count[e]) for e in mine) for mine in phy2log.reshape(ranks, -1)]
    return max(by_rank) / (sum(by_rank) / ranks) - 1 if any(by_rank) else Fraction(0)


@settings(max_examples=60)
@given(
    st.sampled_from(SHAPES),
    st.sampled_from(KINDS),
    st.integers(0, 2**32),
    st.integers(-900, 900),
    st.floats(1e-30, 1e30),
)
def test_the_scale_of_a_layer_does_not_change_its_plan(shape, kind, seed, exponent, factor):
    experts, slots, ranks, nodes, groups = shape
    rng = np.random.default_rng(seed)
    load = np.stack([layer_of(kind, experts, rng), layer_of("lognormal", experts, rng)])
    plan = balance.plan_placement(load, slots, ranks, nodes, num_groups=groups)
    true = [float(exact_imbalance(w, p, ranks)) for w, p in zip(load, plan.phy2log, strict=True)]
    assert plan.imbalance() == pytest.approx(true, abs=1e-12)

    other = np.stack([np.ldexp(load[0], exponent), load[1]])  # a power of two is exact; the other layer keeps its unit
    again = balance.plan_placement(other, slots, ranks, nodes, num_groups=groups)
    assert (again.phy2log == plan.phy2log).all() and (again.imbalance() == plan.imbalance()).all()
    drifted = load * np.exp(rng.normal(0, 0.3, load.shape))
    moved = [
        balance.plan_placement(np.ldexp(drifted, e), slots, ranks, nodes, plan.phy2log, num_groups=groups).phy2log
        for e in (0, exponent)
    ]
    assert (moved[0] == moved[1]).all()

    assert np.abs(fixed_point.integers(load * factor) - fixed_point.integers(load)).max() <= 1


@settings(max_examples=60)
@given(st.sampled_from(SHAPES), st.sampled_from([10, 1000, 100_000]), st.integers(0, 2**32), st.floats(1e-30, 1e30))
def test_whole_loads_keep_our_plan_under_any_factor(shape, most, seed, factor):
    """Also where sums of loads tie, as sums of small numbers do: those ties decide between swaps. EPLB's placement,
    which is taken where it is lower, is in float32, where a factor may break ties."""
    experts, slots, ranks, nodes, groups = shape
    load = np.random.default_rng(seed).integers(0, most, (3, experts)).astype(float)
    load[:, 0] = most  # sixteenths to hundred thousandths
    plans = [
        _candidates(unit * load, dict(num_slots=slots, num_ranks=ranks, num_nodes=nodes, num_groups=groups))[0]
        for unit in (1.0, factor)
    ]
    assert (plans[0] == plans[1]).all()


@settings(max_examples=60)
@given(st.sampled_from(SHAPES), st.sampled_from([10, 1000, 100_000]), st.integers(0, 2**32), st.floats(1e-30, 1e30))
def test_plans_differ_with_a_factor_only_where_eplbs_placement_is_taken(shape, most, seed, factor):
    experts, slots, ranks, nodes, groups = shape
    load = np.random.default_rng(seed).integers(0, most, (3, experts)).astype(float)
    load[:, 0] = most
    arguments = dict(num_slots=slots, num_ranks=ranks, num_nodes=nodes, num_groups=groups)
    plans, own = [], []
    for unit in (1.0, factor):
        plans.append(balance.plan_placement(unit * load, **arguments).phy2log)
        called = balance.rebalance_experts(torch.from_numpy(unit * load), slots, groups, nodes, ranks)[0].numpy()
        ours, theirs, _ = _candidates(unit * load, arguments, lambda grouped: torch.from_numpy(grouped).sum(-1).numpy())
        for placed in (plans[-1], called):
            assert all((p == a).all() or (p == b).all() for p, a, b in zip(placed, ours, theirs, strict=True))
        own.append((plans[-1] == ours).all(axis=1))
    assert (plans[0] == plans[1])[own[0] & own[1]].all()


def test_whole_loads_of_many_experts_keep_their_integers_under_any_factor():
    rng = np.random.default_rng(0)
    for _ in range(200):
        load = rng.integers(0, rng.integers(2, 100_000), (4, 256)).astype(float)
        factor = 10.0 ** rng.uniform(-30, 30)
        assert (fixed_point.integers(load * factor) == fixed_point.integers(load)).all()


@pytest.mark.parametrize("total", [5e-324, 1e-310, 1e-30, 1e-6, 1e-3, 0.1, 1e30, 1e308])
def test_small_and_large_sums_are_planned_as_well_as_tokens(total):
    """256 experts on 288 slots. Also where doubles have few bits left, and where their sum is no double."""
    share = loads.popularity(np.random.default_rng(1), 4, 256, "lognormal", 1.0)
    load = np.maximum(share * 1e3 * total, total) if total < 1e-300 else share / share.max() * total
    plan = balance.plan_placement(load, 288, 32)
    true = max(float(exact_imbalance(w, p, 32)) for w, p in zip(load, plan.phy2log, strict=True))
    assert true < (0.03 if total == 5e-324 else 0.001)
    assert plan.imbalance().max() == pytest.approx(true, rel=1e-6, abs=1e-12)
    later = balance.plan_placement(load[::-1], 288, 32, current=plan.phy2log)
    assert later.imbalance().max() < (0.05 if total == 5e-324 else 0.0201)
    phy2log, _, _ = balance.rebalance_experts(torch.from_numpy(load), 288, 1, 1, 32)
    assert (phy2log.numpy() == plan.phy2log).all()


@settings(max_examples=40)
@given(st.sampled_from(SHAPES), st.sampled_from(KINDS), st.integers(0, 2**32), st.sampled_from([1e-300, 1.0, 1e300]))
def test_core_and_twin_scale_alike(shape, kind, seed, unit):
    experts, slots, ranks, nodes, groups = shape
    load = layer_of(kind, experts, np.random.default_rng(seed)) * unit
    assert fixed_point.integers(load[None])[0].tolist() == twin_placement.fixed_point(load.tolist())
    ours = _candidates(load[None], dict(num_slots=slots, num_ranks=ranks, num_nodes=nodes, num_groups=groups))[0]
    assert ours[0].tolist() == twin_placement.Placement(load.tolist(), slots, ranks, nodes, groups).fresh()


@settings(max_examples=150)
@given(st.sampled_from(SHAPES), st.sampled_from(KINDS), st.integers(0, 2**32), st.sampled_from([1e-5, 1.0, 1e-3, 1e34]))
def test_never_worse_than_eplb_for_any_floats(shape, kind, seed, unit):
    """Exact fractions of the doubles given; EPLB in its float32."""
    experts, slots, ranks, nodes, groups = shape
    weight = torch.from_numpy(layer_of(kind, experts, np.random.default_rng(seed))[None] * unit)
    theirs = eplb.place(weight, slots, groups or 1, nodes, ranks).numpy()
    phy2log = balance.rebalance_experts(weight, slots, groups, nodes, ranks)[0].numpy()
    load = weight[0].numpy()
    assert exact_imbalance(load, phy2log[0], ranks) <= exact_imbalance(load, theirs[0], ranks)
    plan = balance.plan_placement(weight.numpy(), slots, ranks, nodes, num_groups=groups)
    if not any(len(set(m)) < len(m) for m in theirs[0].reshape(ranks, -1)):
        assert exact_imbalance(load, plan.phy2log[0], ranks) <= exact_imbalance(load, theirs[0], ranks)


@pytest.mark.parametrize(
    "experts, slots, groups, nodes, ranks",
    [(256, 288, 8, 4, 32), (256, 288, 1, 1, 36), (256, 320, 8, 8, 64), (64, 80, 1, 1, 16), (256, 256, 8, 4, 32)],
)
def test_the_core_has_eplb_to_the_last_bit(experts, slots, groups, nodes, ranks):
    """Against the description written anew with torch: floats, ties, zeros, thirty magnitudes in a layer."""
    rng = np.random.default_rng(ranks)
    load = np.stack([layer_of(kind, experts, rng) for kind in KINDS] + [rng.lognormal(0, 1, experts) * 1e30])
    shape = dict(num_slots=slots, num_ranks=ranks, num_nodes=nodes, num_groups=groups if groups > 1 else 0)
    theirs = _candidates(load, shape, lambda grouped: torch.from_numpy(grouped).sum(-1).numpy())[1]
    assert (theirs == eplb.place(torch.from_numpy(load), slots, groups, nodes, ranks).numpy()).all()


def test_eplbs_own_placement_is_returned_where_it_is_lower():
    """Loads 10, 6 and 4 on two ranks of two slots: A+A, B+C is level. plan_placement keeps replicas apart: 11."""
    weight = torch.tensor([[10.0, 6, 4]])
    phy2log = balance.rebalance_experts(weight, 4, 1, 1, 2)[0]
    assert sorted(sorted(m) for m in phy2log.reshape(2, 2).tolist()) == [[0, 0], [1, 2]]
    assert balance.plan_placement(weight.numpy(), 4, 2).tokens_of_ranks().max() == 11


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, -1e-300])
def test_a_bad_load_is_named_by_entry(bad):
    load = np.ones((3, 16))
    plan = balance.plan_placement(load, 20, 4)
    load[2, 11] = bad
    for call in (
        lambda: balance.plan_placement(load, 20, 4),
        lambda: plan.imbalance(load),
        lambda: balance.plan_placement(load, 20, 4, current=plan.phy2log),
        lambda: balance.rebalance_experts(torch.from_numpy(load), 20, 1, 1, 4),
    ):
        with pytest.raises(ValueError, match=r"(load|weight)\[2, 11\] is"):
            call()
