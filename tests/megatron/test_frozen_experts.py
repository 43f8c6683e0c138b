"""Balancing and weights that travel where not all experts are trained, where parameters were replaced, and where only
gradients of inputs are asked for."""

import parity_world
import pytest
from test_dispatcher import Program

pytestmark = pytest.mark.version_free


def run(name, num_ranks, *arguments):
    return parity_world.run_world(Program(name, "frozen_programs"), num_ranks, arguments, timeout_s=150)


@pytest.mark.parametrize("frozen, inputs", [(2, True), (2, False), (1, False)])
def test_gradients_go_home_from_a_rank_whose_own_experts_are_frozen(frozen, inputs):
    assert run("experts_of_one_rank", 2, 2, frozen, inputs) == [[], []]


def test_main_grad_of_a_frozen_matrix_stays_as_it_is():
    assert run("behind_ddp", 2, 2) == [[], []]


def test_parameters_that_are_replaced_behind_the_building_are_those_that_travel():
    assert run("replaced", 2, 2) == [[], []]


def test_gradients_of_inputs_alone_bring_none_of_experts_home():
    assert run("of_inputs_alone", 2, 2) == [[], []]


def test_experts_that_are_converted_behind_the_building_are_refused_before_anything_is_sent():
    for said in run("converted", 2, 2):
        assert len(said) == 3 and all("are torch.bfloat16, and --hybrid-ep-balance exact" in text for text in said)


def test_weights_that_changed_unseen_name_the_call_that_says_so():
    for said in run("changed_unseen", 2, 2):
        assert "megatron_patches.weights.changed()" in said and "megatron_patches.weights.bring_home()" in said


def test_slow_balancing_refuses_a_layer_of_which_some_experts_are_trained():
    """An expert would be trained or not as the parameter is that it comes to. At the first step, on all ranks."""
    for said in run("slow", 2, 2, "some"):
        assert "in MoE layers [0, 1] of this pipeline stage, counted from 0, some are frozen" in said
        assert "freeze all of a layer's" in said


def test_slow_balancing_moves_matrices_that_are_frozen_everywhere():
    assert run("slow", 2, 2, "all") == [None, None]


def test_experts_that_are_frozen_everywhere_cost_no_gradient_memory_and_travel_no_more_often():
    """Until they are trained."""
    for all_layers, the_first in run("everywhere", 2, 2):
        same, seen = all_layers
        assert same == [True] * 4
        assert [memory for memory, _ in seen] == [False, False, True, True]
        versions = [version for _, version in seen]
        assert versions[0] == versions[1], "weights that nothing changed were published anew"
        assert the_first[0] == [True] * 4 and all(memory for memory, _ in the_first[1])
