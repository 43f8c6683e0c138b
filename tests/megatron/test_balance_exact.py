"""Exact balancing through the real dispatcher on gloo ranks: the same bits as off, for any plan."""

import parity_world
import pytest
from test_dispatcher import Program


def run(name, num_ranks, *arguments):
    return parity_world.run_world(Program(name, "balance_programs"), num_ranks, arguments, timeout_s=150)


@pytest.mark.parametrize("ep, spare_slots", [(4, 2), (2, 1)])
def test_any_plan_gives_the_bits_of_off(ep, spare_slots):
    run("bit_equality", ep, ep, spare_slots)


@pytest.mark.version_free
def test_broken_balancers_are_noticed():
    assert run("mutants", 4, 4)[0] == []


def test_clone_gradients_are_there_before_ddp_counts_a_parameter():
    run("main_grad_is_complete_before_ddp", 2, 2)


def test_unsupported_combinations_name_their_flag():
    run("refusals", 2, 2)


def test_a_silent_peer_ends_the_push():
    run("silent_peer", 2, 2)
