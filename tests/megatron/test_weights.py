"""Weights that travel, in Megatron: the bits of moving tokens, no collective, late and dead ranks."""

import parity_world
import pytest
from test_dispatcher import Program


def run(name, num_ranks, *arguments):
    return parity_world.run_world(Program(name, "weights_programs"), num_ranks, arguments, timeout_s=150)


@pytest.mark.parametrize("ep", [1, 2, pytest.param(4, marks=pytest.mark.version_free)])
def test_weights_give_the_bits_of_tokens(ep):
    run("bit_equality", ep, ep)


@pytest.mark.version_free
def test_broken_movers_are_noticed():
    assert run("mutants", 2, 2)[0] == []


@pytest.mark.version_free
def test_no_collective_in_forward_and_backward():
    for counted, of_one, missed in run("no_collective", 4, 4):
        assert counted == [0, 0] and of_one == 1 and missed == [0]


RECOMPUTED = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


@pytest.mark.parametrize(
    "num_ranks, ep, pp, tolerance, options",
    [
        (2, 2, 1, 2e-6, {"distributed": True}),
        pytest.param(4, 2, 1, 2e-6, {"job": {"after": RECOMPUTED}}, marks=pytest.mark.version_free),
        pytest.param(4, 2, 2, 2e-6, {}, marks=pytest.mark.version_free),
        pytest.param(2, 2, 1, 3e-2, {"job": {"dtype": "bf16"}}, marks=pytest.mark.version_free),
    ],
)
def test_a_gpt_under_ddp_trains_and_evaluates_as_with_tokens(num_ranks, ep, pp, tolerance, options):
    """Micro-batches that do not synchronise, weights that are loaded, a pipeline, data-parallel copies, recompute."""
    worst = run("gpt", num_ranks, ep, pp, tolerance, options)
    assert max(worst) <= tolerance


@pytest.mark.version_free
def test_evaluation_alone_registers_no_memory_for_gradients():
    assert run("evaluation_alone", 2, 2) == [(False, True)] * 2


@pytest.mark.version_free
def test_a_backward_that_ends_half_way_keeps_no_buffer_and_brings_nothing_home():
    calls, kept, dropped, by_ddp = zip(*run("stopped_backward", 2, 2), strict=True)
    assert calls == ([1, 0], [1, 0]) and all(dropped) and all(by_ddp)
    assert not kept[0]  # of a step that drops nothing: experts of rank 0 have gradients of the layer that was through


@pytest.mark.version_free
@pytest.mark.usefixtures("megatron_flags")
def test_flags_put_the_parts_in_place_and_revert_takes_them_out():
    ((patched, undone),) = run("by_flags", 1)
    ddp = "weights: DistributedDataParallel"
    assert patched == ["weights: MoELayer.__init__", f"{ddp}.finish_grad_sync", f"{ddp}.zero_grad_buffer"] and undone


@pytest.mark.version_free
def test_a_rank_that_dies_is_named_and_training_ends():
    with pytest.raises(parity_world.WorldError) as failed:
        run("killed_owner", 4, 4)
    text = str(failed.value)
    assert "exit code -9" in text and text.count("AssertionError: ended cleanly") == 3, text


@pytest.mark.version_free
def test_an_owner_that_does_not_publish_is_named():
    run("unpublished_owner", 2, 2)


@pytest.mark.version_free
def test_the_roofline_chooses_and_either_choice_gives_the_same_bits():
    assert run("chosen_by_the_roofline", 2, 2) == [[[True] * 2] * 2] * 2, "two layers, asked once, on both ranks"


@pytest.mark.version_free
def test_the_roofline_is_asked_of_a_training_step_with_what_is_kept():
    plain, kept = [True, 1, None, True, None], [True, 6, 7, True, 2]  # two buffers have room for both layers
    assert run("chosen_for_training", 2, 2) == [[*[plain] * 2, *[kept] * 2]] * 2


@pytest.mark.version_free
def test_refusals_name_their_flag():
    run("refusals", 2, 2)
    run("refused_by_ddp", 2, 2)
