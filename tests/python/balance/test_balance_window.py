"""The decayed window of loads, the owners of experts, and the incremental planner on permutations."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybrid_ep.balance import plan_placement
from hybrid_ep.balance.owners import Owners
from hybrid_ep.balance.window import LoadWindow


def by_definition(steps, decay):
    """Average tokens a step, weights decay^age, in floating point."""
    weights = decay ** np.arange(len(steps))[::-1]
    return (np.array(steps) * weights[:, None, None]).sum(0) / weights.sum()


@pytest.mark.parametrize("decay", [0.0, 0.5, 0.9, 1.0])
def test_window_is_the_weighted_mean_of_steps(decay):
    rng = np.random.default_rng(1)
    window, steps = LoadWindow(2, 5, decay), []
    for _ in range(12):
        micro_batches = rng.integers(0, 100_000, (3, 2, 5))
        for counts in micro_batches:
            for layer in range(2):
                window.add(layer, torch.from_numpy(counts[layer]))
        steps.append(micro_batches.sum(0))
        window.advance()
        np.testing.assert_allclose(window.reduced(), by_definition(steps, decay), rtol=2e-4, atol=0.1)


def test_windows_of_ranks_add_up_exactly_in_any_order():
    rng = np.random.default_rng(2)
    windows = [LoadWindow(1, 4) for _ in range(5)]
    for _ in range(7):
        for window in windows:
            window.add(0, torch.from_numpy(rng.integers(0, 1 << 24, 4)))
            window.advance()
    sums = [sum(windows[i].state()[0] for i in order) for order in ([0, 1, 2, 3, 4], [4, 2, 0, 3, 1])]
    assert torch.equal(*sums) and sums[0].dtype == torch.int64


def test_a_restored_window_continues_as_the_first():
    one, other = LoadWindow(1, 3), LoadWindow(1, 3)
    one.add(0, torch.tensor([5, 6, 7]))
    one.advance()
    other.restore(one.state())
    for window in (one, other):
        window.add(0, torch.tensor([1, 0, 9]))
        window.advance()
    assert (one.reduced() == other.reduced()).all() and one.reduced().any()


def test_an_empty_window_is_zero_and_bad_ones_are_refused():
    assert not LoadWindow(2, 3).reduced().any()
    for arguments, name in (((0, 3), "num_layers"), ((1, 3, 1.5), "decay")):
        with pytest.raises(ValueError, match=name):
            LoadWindow(*arguments)
    with pytest.raises(ValueError, match="shape"):
        LoadWindow(1, 3).restore(LoadWindow(2, 3).state())


@pytest.mark.parametrize("covariance", [False, True])
@pytest.mark.parametrize(
    "layer, counts, said",
    [
        (0, torch.tensor(5), r"counts is torch.int64 \(\): give a tensor of integers \(4,\)"),
        (0, torch.tensor([5]), r"counts is torch.int64 \(1,\)"),
        (0, torch.ones(4), "counts is torch.float32"),
        (0, [1, 2, 3, 4], r"counts is \[1, 2, 3, 4\]"),
        (0, None, "counts is None"),
        (0, torch.tensor([1, 0, -3, 2]), r"counts\[2\] is -3: give tokens, 0 or more"),
        (-1, torch.ones(4, dtype=torch.int64), "layer is -1: give an integer from 0 to 1"),
        (2, torch.ones(4, dtype=torch.int64), "layer is 2"),
        (0.0, torch.ones(4, dtype=torch.int64), "layer is 0.0"),
    ],
)
def test_what_is_no_count_of_every_expert_is_refused_and_changes_nothing(layer, counts, said, covariance):
    window = LoadWindow(2, 4, covariance=covariance)
    with pytest.raises(ValueError, match=said):
        window.add(layer, counts)
    window.advance()
    assert not window.reduced().any()
    assert not covariance or not window.covariance().any()


@settings(deadline=None, max_examples=50)
@given(st.sampled_from([(2, 4), (4, 8), (8, 64), (4, 32)]), st.integers(0, 2**32 - 1))
def test_re_homing_is_a_permutation_that_never_loads_the_fullest_rank_more(shape, seed):
    ranks, experts = shape
    rng = np.random.default_rng(seed)
    load = rng.lognormal(0, 1.5, (3, experts))
    current = np.stack([rng.permutation(experts) for _ in range(3)])
    plan = plan_placement(load, experts, ranks, current=current)
    before = np.take_along_axis(load, current, 1).reshape(3, ranks, -1).sum(2).max(1)
    after = np.take_along_axis(load, plan.phy2log, 1).reshape(3, ranks, -1).sum(2).max(1)
    assert (np.sort(plan.phy2log, axis=1) == np.arange(experts)).all()
    assert (after <= before * (1 + 1e-9)).all()


def test_owners_and_their_columns():
    owners = Owners(6, 3)
    assert owners.is_identity and owners.columns(1, torch.device("cpu")).tolist() == [0, 1, 3, 4, 6, 7]
    owners.assign([5, 0, 1, 4, 3, 2])
    assert owners.slot_of == (1, 2, 5, 4, 3, 0) and owners.rank_of.tolist() == [0, 1, 2, 2, 1, 0]
    assert owners.experts_of(1) == (1, 4) and not owners.is_identity
    assert owners.columns(1, torch.device("cpu")).tolist() == [1, 3, 7, 6, 4, 0]
    for bad in ([0, 1, 2, 3, 4, 4], [0, 1, 2]):
        with pytest.raises(ValueError, match="exactly one slot"):
            owners.assign(bad)
    with pytest.raises(ValueError, match="multiple"):
        Owners(5, 2)
