"""Experts that move between steps train the same model: weights, moments, losses bit for bit, on gloo ranks."""

import parity_world
import pytest
from test_dispatcher import Program


def run(name, num_ranks, *arguments, module="slow_programs"):
    return parity_world.run_world(Program(name, module), num_ranks, arguments, timeout_s=150)


BF16 = {"dtype": "bf16"}
STACKED = {"grouped": True}
RECOMPUTED = {"after": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}}


@pytest.mark.parametrize(
    "num_ranks, ep, variants",
    [
        (2, 2, [{}, {"distributed": False}]),
        pytest.param(4, 4, [{}, BF16], marks=pytest.mark.version_free),
        # two ranks cut every expert's optimizer state
        pytest.param(4, 2, [{}, BF16, {"distributed": False, **BF16}, RECOMPUTED], marks=pytest.mark.version_free),
        (4, 2, [{**BF16, **STACKED}, {"distributed": False, **RECOMPUTED, **STACKED}]),
    ],
)
def test_moving_experts_changes_no_bit(num_ranks, ep, variants):
    run("bit_equality", num_ranks, ep, variants)


@pytest.mark.version_free
@pytest.mark.parametrize("grouped", [False, True])
def test_on_a_gpu_streams_wait_and_the_host_asks_before_the_next_step(grouped):
    """Nothing is asked of the host between a move's beginning and the step that it has to end before."""
    for asked in run("queued", 2, 2, grouped):
        once = [(name, what) for name in ("follow", "wait") for what in ("weights", "state")]
        assert len(asked) >= 2 * len(once) and asked == once * (len(asked) // len(once))


def test_pipeline_parallel():
    run("bit_equality", 4, 2, [{}, STACKED], 2)


@pytest.mark.parametrize("options", [{}, pytest.param(BF16, marks=pytest.mark.version_free), STACKED])
def test_checkpoints_load_in_any_layout(tmp_path, options):
    run("save_and_load", 4, str(tmp_path), options, module="checkpoint_programs")


def test_megatrons_state_dicts_are_logical_or_refused():
    run("names_in_megatrons_checkpoints", 2, 2, module="checkpoint_programs")


@pytest.mark.version_free
@pytest.mark.parametrize("dispatcher", ["alltoall", "flex"])  # the first is Megatron without any patch: the control
def test_megatrons_default_optimizer_checkpoint_stays_at_its_expert_parallel_size(tmp_path, dispatcher):
    pytest.importorskip("psutil", reason="Megatron's writer of checkpoints needs it")
    outcomes, *_ = run("megatrons_own", 2, str(tmp_path), dispatcher, "dp_reshardable", module="checkpoint_programs")
    assert outcomes[2] == "same" and "from model not in state dict: ['chained_0." in outcomes[1], outcomes


@pytest.mark.version_free
def test_a_move_that_one_rank_cannot_prepare_happens_nowhere():
    run("failed_move", 2, 2, module="checkpoint_programs")


@pytest.mark.version_free
def test_a_rank_killed_in_a_move_ends_the_wait_of_the_others():
    with pytest.raises(parity_world.WorldError) as failed:
        run("killed_in_a_move", 2, 2, module="checkpoint_programs")
    text = str(failed.value)
    assert "exit code -9" in text and "unchanged: True, " in text and "DeadlineError" in text, text


@pytest.mark.version_free
def test_a_rank_killed_while_experts_travel_ends_the_next_forward_of_the_others():
    with pytest.raises(parity_world.WorldError) as failed:
        run("killed_under_way", 2, 2, module="checkpoint_programs")
    text = str(failed.value)
    assert "exit code -9" in text and "site: move of experts: weights" in text and "DeadlineError" in text, text


@pytest.mark.version_free
def test_moves_follow_the_interval_and_the_gain():
    run("schedule", 4, 2)


def test_covariances_are_those_of_all_ranks_and_reach_the_planner():
    run("apart", 2, 2)


def test_unsupported_combinations_name_their_flag():
    run("refusals", 2, 2)


@pytest.mark.version_free
@pytest.mark.parametrize("grouped", [False, True])
def test_broken_movers_are_noticed(grouped):
    assert run("mutants", 2, 2, grouped)[0] == []
