"""The grouped experts against SequentialMLP: values, gradients, layouts, checkpoints; the router guards in training."""

import importlib.metadata

import parity_world
import pytest
from test_dispatcher import Program

MEGATRON_MINOR = int(importlib.metadata.version("megatron-core").split(".")[1])


def run(name, num_ranks, *arguments, module="experts_programs"):
    return parity_world.run_world(Program(name, module), num_ranks, arguments, timeout_s=240)[0]


def test_values_and_gradients_are_those_of_sequential_mlp():
    assert run("values_and_gradients", 1) < 3e-6


def test_one_rank_at_a_time():
    short, wrong, extra = run("several", 1, ("rows_behind_the_last_group", "layouts"))[1]
    assert "local_experts.3.linear_fc2.weight" in short and "Missing" in short
    assert "size mismatch for local_experts.0.linear_fc1.weight" in wrong
    assert "Unexpected" in extra and "local_experts.9.linear_fc1.weight" in extra


def test_the_backend_that_was_asked_for_multiplies():
    calls = run("backends", 1)
    assert calls == {"auto": ["torch"], "torch": ["torch"], "loop": ["loop"]}


def test_refusals_and_moved_hooks_are_said():
    refused, moved = run("several", 1, ("refusals", "moved"))
    for text, flag in zip(
        refused,
        (
            "--disable-bias-linear",
            "quick_gelu with a gate",
            "squared_relu with a gate",
            "--overlap-dispatch-backward-with-experts-wgrad",
            "--expert-tensor-parallel-num-weight-shards",
            "activation_func_fp8_input_store, --moe-paged-stash",
        ),
        strict=True,
    ):
        assert flag in text
    assert [text.split("nothing was changed. ")[1].split(":")[0] for text in moved] == ["experts", "router"]


def test_whole_layers_and_sharded_entries_on_four_ranks(tmp_path):
    """Expert tensor parallelism folded by the dispatcher; entries of a checkpoint equal to SequentialMLP's and to what
    Megatron's own code for TEGroupedMLP makes of the same weights."""
    assert run("layers", 4, 2, 2, "hybrid_ep")
    assert run("sharded_entries_equal", 4)


@pytest.mark.parametrize("writer", ["grouped", "sequential"])
def test_distributed_checkpoint_loads_at_other_sizes_in_both_classes(tmp_path, writer):
    """Saved at EP 4; read at EP 2, at EP 1, and at EP 2 with the experts' matrices split in two."""
    assert run("distributed_checkpoint", 4, str(tmp_path), writer, 4, ((2, 1), (1, 1), (2, 2)))


def test_router_guards_inside_training():
    said = run("in_training", 2, module="router_programs")
    assert "all weights equal" in said["gate"], "a gate of zeros is caught before the first step"
    assert said["collectives_off"] == said["collectives_on"] > 0, "statistics ride on a reduction that exists"
    assert "tie_fraction 1 > 0.5 in 3 steps" in said["stopped"] and "layer 1" in said["stopped"]
    assert said["loss_off"] == said["loss_on"], "what Megatron logs is what it logged before"
    assert said["statistics"] == {"tie_fraction": 0.0, "load_ratio": said["load_of_all_ranks"]}


@pytest.mark.skipif(MEGATRON_MINOR < 17, reason="Megatron before 0.17 marks no layer that predicts further tokens")
def test_router_guards_tell_a_layer_that_predicts_further_tokens_from_the_first():
    assert run("with_a_layer_that_predicts_further", 2, module="router_programs") == {1: 0.0, 3: 0.5}


def test_a_router_of_zeros_trains_with_the_tie_break():
    said = run("tie_broken", 2, module="router_programs")
    assert said["first_ratio"] < 1.6 and said["without"] == 4.0, "8 experts, top-2: all at two of them"
    assert said["changed"] == 0, "no choice among scores that differ"
    assert said["probabilities"] and said["last_loss"] < 0.8 * said["first_loss"]


def test_with_the_tie_break_gates_must_still_be_finite():
    zeros, nan, inf = run("finite_with_the_tie_break", 1, module="router_programs")
    assert zeros == "" and all("layer 1 holds values that are not finite" in said for said in (nan, inf))


def test_the_tie_break_among_groups_of_experts():
    assert run("groups_of_experts", 1, module="router_programs") < 1.2


def test_router_guards_refuse_what_chooses_elsewhere():
    said = run("refused", 1, module="router_programs")
    assert "--moe-router-load-balancing-type sinkhorn" in said
