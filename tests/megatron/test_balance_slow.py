"""Experts that move between steps train the same model: weights, moments, losses bit for bit, on gloo ranks."""

import parity_world
import pytest
from test_dispatcher import Program


def run(name, num_ranks, *arguments):
    return parity_world.run_world(Program(name, "slow_programs"), num_ranks, arguments, timeout_s=150)


BF16 = {"dtype": "bf16"}
RECOMPUTED = {"after": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}}


@pytest.mark.parametrize("num_ranks, ep, variants", [
    (2, 2, [{}, {"distributed": False}]),
    (4, 4, [BF16]),
    (4, 2, [{}, BF16, {"distributed": False, **BF16}, RECOMPUTED]),  # two ranks cut every expert's optimizer state
])
def test_moving_experts_changes_no_bit(num_ranks, ep, variants):
    run("bit_equality", num_ranks, ep, variants)


def test_pipeline_parallel():
    run("bit_equality", 4, 2, [{}], 2)


def test_broken_movers_are_noticed():
    assert run("mutants", 2, 2)[0] == []
