"""Experts that are hot together: second moments of the window, and swaps that keep them apart."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybrid_ep.balance import MicrobatchPlanner, plan_placement
from hybrid_ep.balance.coactivation import LEAST_GAIN, calmed, rank_variances
from hybrid_ep.balance.window import LoadWindow


def blocks_of_heat(rng, experts, blocks, sigma, number, tokens=32768 * 16):
    """Loads [number, experts] whose consecutive blocks are hot together, anew in every micro-batch."""
    heat = np.repeat(rng.normal(0, sigma, (number, blocks)), experts // blocks, axis=1)
    share = np.exp(heat + rng.normal(0, 0.3, experts))
    return rng.multinomial(tokens, share / share.sum(axis=1, keepdims=True))


# ---- the window


@pytest.mark.parametrize("decay", [0.0, 0.5, 0.9])
def test_the_window_has_the_weighted_covariance_of_micro_batches(decay):
    rng = np.random.default_rng(1)
    window, seen = LoadWindow(2, 5, decay, covariance=True), []
    for step in range(6):
        for _ in range(4):
            counts = rng.integers(0, 5000, 5)
            counts[1] = counts[0] // 2
            seen.append((step, counts))
            window.add(0, torch.from_numpy(counts))
        if step < 5:
            window.advance()  # the last step still runs
    weights = np.array([float(decay) ** (5 - step) for step, _ in seen])
    expected = np.cov(np.array([c for _, c in seen]).T, aweights=weights, ddof=0)
    got = window.covariance()
    np.testing.assert_allclose(got[0], expected, rtol=2e-3, atol=2e-3 * np.abs(expected).max())
    assert not got[1].any() and (got == got.swapaxes(1, 2)).all()


def test_ranks_add_up_and_a_restored_window_continues():
    rng = np.random.default_rng(2)
    one, other = LoadWindow(1, 3, covariance=True), LoadWindow(1, 3, covariance=True)
    for _ in range(5):
        one.add(0, torch.from_numpy(rng.integers(0, 100, 3)))
    one.advance()
    other.restore(one.state())
    for window in (one, other):
        window.add(0, torch.tensor([1, 0, 9]))
        window.advance()
    assert (one.covariance() == other.covariance()).all() and one.covariance().any()
    assert (one.reduced() == other.reduced()).all()
    plain = LoadWindow(1, 3)
    plain.add(0, torch.tensor([5, 5, 5]))
    plain.advance()
    one.restore(plain.state())  # a checkpoint of a run without covariance
    plain.restore(other.state())  # and the other way round
    assert (plain.reduced() == other.reduced()).all()
    with pytest.raises(ValueError, match="covariance=True"):
        plain.covariance()


def test_large_loads_do_not_overflow():
    window = LoadWindow(1, 2, 0.9, covariance=True)
    for _ in range(40):
        for n in range(64):
            window.add(0, torch.tensor([1 << 17, (n % 2) << 17]))
        window.advance()
    got = window.covariance()[0]
    assert got[0, 0] <= 1e-6 * 2.0**34 and got[1, 1] == pytest.approx(2.0**32, rel=1e-3)


# ---- swaps


def by_hand(placed, covariance, ranks):
    """The sum over ranks of the variance of their load, expert by expert."""
    count = np.bincount(placed, minlength=len(covariance))
    total = 0.0
    for mine in placed.reshape(ranks, -1):
        total += sum(covariance[a, b] / count[a] / count[b] for a in mine for b in mine)
    return total


def fullest(placed, load, ranks):
    count = np.bincount(placed, minlength=len(load))
    return (load / count)[placed].reshape(ranks, -1).sum(axis=1).max()


@st.composite
def layers(draw):
    ranks, per_rank, extra = draw(st.sampled_from([(2, 2, 0), (4, 2, 0), (3, 3, 0), (4, 2, 2), (4, 3, 1)]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    slots = ranks * per_rank
    experts = slots - extra
    load = rng.lognormal(0, draw(st.sampled_from([0.0, 0.3, 1.0])), experts)
    factor = rng.normal(size=(experts, draw(st.integers(1, 3))))
    covariance = factor @ factor.T + np.diag(rng.uniform(0, 0.3, experts))
    placed = plan_placement(load[None], slots, ranks).phy2log[0]
    return load, (covariance + covariance.T) / 2, placed, ranks


@settings(deadline=None, max_examples=150)
@given(layers())
def test_swaps_end_where_none_that_is_allowed_helps(layer):
    load, covariance, placed, ranks = layer
    limit = 1.02 * load.sum() / ranks
    got = calmed(placed, load, covariance, ranks, limit=limit)
    most = max(limit, fullest(placed, load, ranks)) * (1 + 1e-9)
    assert (np.sort(got.phy2log) == np.sort(placed)).all()
    assert all(len(set(mine)) == len(mine) for mine in got.phy2log.reshape(ranks, -1).tolist())
    assert fullest(got.phy2log, load, ranks) <= most
    assert got.before == pytest.approx(by_hand(placed, covariance, ranks))
    assert got.after == pytest.approx(by_hand(got.phy2log, covariance, ranks)) and got.after <= got.before
    assert rank_variances(got.phy2log, covariance, ranks).sum() == pytest.approx(got.after)
    count = np.bincount(placed, minlength=len(load))
    least = LEAST_GAIN * (np.diag(covariance) / count).sum() * (1 + 1e-6) + 1e-9
    for i in range(len(placed)):
        for j in range(i):
            other = got.phy2log.copy()
            other[i], other[j] = other[j], other[i]
            twins = any(len(set(mine)) < len(mine) for mine in other.reshape(ranks, -1).tolist())
            if not twins and fullest(other, load, ranks) <= most * (1 - 2e-9):
                assert by_hand(other, covariance, ranks) >= got.after - least


@settings(deadline=None, max_examples=60)
@given(layers(), st.integers(0, 6))
def test_moves_and_nodes_are_limits(layer, most):
    load, covariance, placed, ranks = layer
    got = calmed(placed, load, covariance, ranks, limit=np.inf, current=placed, max_moves=most)
    assert (got.phy2log != placed).sum() <= most
    if ranks == 4:
        inside = calmed(placed, load, covariance, ranks, limit=np.inf, num_nodes=2).phy2log
        assert (np.sort(inside.reshape(2, -1)) == np.sort(placed.reshape(2, -1))).all()


@settings(deadline=None, max_examples=40)
@given(layers(), st.floats(1e-12, 1e12))
def test_without_covariance_nothing_changes_and_a_factor_changes_nothing(layer, factor):
    load, covariance, placed, ranks = layer
    slots = len(placed)
    plain = plan_placement(load[None], slots, ranks, current=placed[None])
    for idle in (np.zeros_like(covariance), np.diag(np.diag(covariance)) if slots == len(load) else covariance * 0):
        same = plan_placement(load[None], slots, ranks, current=placed[None], covariance=idle[None])
        assert (same.phy2log == plain.phy2log).all() and (same.moved == plain.moved).all()
    one = calmed(placed, load, covariance, ranks, limit=np.inf)
    assert (
        calmed(placed, load, covariance * 2.0 ** round(np.log2(factor)), ranks, limit=np.inf).phy2log == one.phy2log
    ).all()


def above(counts, placed, ranks):
    """Micro-batches that exact plans with one slot leave above 1 %."""
    owner = np.empty(len(placed), np.int32)
    owner[placed] = np.arange(len(placed)) // (len(placed) // ranks)
    planner = MicrobatchPlanner(ranks, len(placed), owner, spare_slots=1)
    by_rank, over = np.zeros((ranks, len(placed)), np.int64), 0
    for by_rank[0] in counts:
        over += planner.plan(by_rank).imbalance() > 0.0101
    return over


@pytest.mark.parametrize("ranks, blocks", [(16, 16), (16, 8)])
def test_one_slot_is_enough_where_experts_that_are_hot_together_live_apart(ranks, blocks):
    rng = np.random.default_rng(3)
    past = blocks_of_heat(rng, 128, blocks, 0.6, 200)
    rng = np.random.default_rng(3)
    now = blocks_of_heat(rng, 128, blocks, 0.6, 230)[200:]
    load, joint = past.mean(axis=0, keepdims=True), np.cov(past.T.astype(float))[None]
    call = dict(num_slots=128, num_ranks=ranks, current=np.arange(128)[None])
    plain = plan_placement(load, **call)
    apart = plan_placement(load, **call, covariance=joint)
    assert apart.imbalance()[0] <= max(0.02, plain.imbalance()[0]) + 1e-9
    before, after = (above(now, plan.phy2log[0], ranks) for plan in (plain, apart))
    assert before >= 10 and after <= before // 5
    # The proof that this could fail: covariances of the wrong experts cure nothing.
    wrong = rng.permutation(128)
    astray = plan_placement(load, **call, covariance=joint[:, wrong][:, :, wrong])
    assert above(now, astray.phy2log[0], ranks) > after


def test_bad_covariances_are_refused():
    load = np.ones((1, 4))
    for bad, word in (
        (np.zeros((4, 4)), "shape"),
        (np.full((1, 4, 4), np.nan), "finite"),
        (np.triu(np.ones((1, 4, 4))), "symmetric"),
        (-np.eye(4)[None], "negative"),
    ):
        with pytest.raises(ValueError, match=word):
            plan_placement(load, 4, 2, covariance=bad)


@pytest.mark.parametrize("unit", [1e-300, 1e-9, 1.0, 1e300])
def test_covariances_are_symmetric_or_not_in_any_unit(unit):
    load, even = np.ones((2, 4)), np.stack([np.eye(4), 1e6 * np.eye(4)])
    even[:, 0, 1] = even[:, 1, 0] = 0.25
    even[0, 0, 1] *= 1 + 1e-12  # rounded otherwise than its twin
    plan_placement(load, 4, 2, covariance=even * unit)
    uneven = even.copy()
    uneven[0, 2, 3] = 0.5
    with pytest.raises(ValueError, match="symmetric"):
        plan_placement(load, 4, 2, covariance=uneven * unit)
