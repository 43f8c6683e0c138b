"""Exact balancing through the real dispatcher on gloo ranks: the same bits as off, for any plan."""

import parity_world
import pytest
from test_dispatcher import Program


def run(name, num_ranks, *arguments):
    return parity_world.run_world(Program(name, "balance_programs"), num_ranks, arguments, timeout_s=150)


@pytest.mark.parametrize(
    "ep, spare_slots, grouped", [pytest.param(4, 2, False, marks=pytest.mark.version_free), (2, 1, False), (4, 2, True)]
)
def test_any_plan_gives_the_bits_of_off(ep, spare_slots, grouped):
    run("bit_equality", ep, ep, spare_slots, grouped)


@pytest.mark.version_free
@pytest.mark.parametrize("grouped", [False, True])
def test_broken_balancers_are_noticed(grouped):
    assert run("mutants", 4, 4, grouped)[0] == []


def test_clone_gradients_are_there_before_ddp_counts_a_parameter():
    run("main_grad_is_complete_before_ddp", 2, 2)


def test_unsupported_combinations_name_their_flag():
    run("refusals", 2, 2)


RECOMPUTED = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


@pytest.mark.parametrize(
    "num_ranks, pp, options, tolerance, grouped",
    [
        (2, 1, {"after": RECOMPUTED}, 1e-6, False),
        (2, 1, {"dtype": "bf16"}, 2e-2, False),  # a clone's weight gradient is rounded apart from the owner's
        (2, 1, {"dtype": "bf16", "after": RECOMPUTED}, 2e-2, True),
        pytest.param(4, 2, {}, 1e-6, False, marks=pytest.mark.version_free),
        (4, 2, {}, 1e-6, True),
    ],
)
def test_a_gpt_under_ddp_has_the_gradients_of_off(num_ranks, pp, options, tolerance, grouped):
    """Three micro-batches, of which two do not synchronise; recomputed, in bf16, in a 1F1B pipeline of two stages."""
    arguments = 2, pp, tolerance, options, grouped
    programs = Program("clones_give_the_gradients_of_off", "slow_programs")
    worst = parity_world.run_world(programs, num_ranks, arguments, timeout_s=150)[0]
    assert 0 < worst["exact"] < tolerance and 0 < worst["both"] < tolerance, worst


@pytest.mark.version_free
def test_all_modes_agree_with_a_plain_fp64_implementation():
    program = Program("balanced_against_reference", "reference_programs")
    assert max(parity_world.run_world(program, 4, (4,), timeout_s=150)) < 2e-6


@pytest.mark.version_free
def test_a_rank_killed_while_weights_are_pushed_ends_the_wait_of_the_others():
    with pytest.raises(parity_world.WorldError) as failed:
        run("killed_in_a_push", 2, 2)
    text = str(failed.value)
    assert "exit code -9" in text and text.count("DeadlineError: weight push: rank") >= 1, text


def test_a_silent_peer_ends_the_push():
    run("silent_peer", 2, 2)
