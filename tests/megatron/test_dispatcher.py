"""The contract of the six dispatcher steps: ours against Megatron's alltoall dispatcher, values and
gradients."""

import importlib

import parity_world
import pytest


class Program:
    """A function by name: this process must not import Megatron, the ranks do."""

    def __init__(self, name, module="rank_programs"):
        self.name, self.module = name, module

    def __call__(self, *arguments):
        return getattr(importlib.import_module(self.module), self.name)(*arguments)


def run(name, num_ranks, *arguments):
    return parity_world.run_world(Program(name), num_ranks, arguments, timeout_s=120)


def run_shapes(name, num_ranks, *arguments):
    return parity_world.run_world(Program(name, "shape_programs"), num_ranks, arguments, timeout_s=120)


@pytest.mark.parametrize("ep, ranks_per_node", [(1, 1), (2, 1), (4, 2)])
def test_six_steps_equal_alltoall(ep, ranks_per_node):
    run("contract", ep, ep, 1, ranks_per_node)


@pytest.mark.parametrize("ranks_per_node", [2, 4])
def test_expert_tensor_parallelism_is_folded_into_the_group(ranks_per_node):
    run("contract", 4, 2, 2, ranks_per_node)


def test_capacity_and_pad_to_capacity():
    run("capacity", 2, 2)


def test_rank_capacity_budget_sets_over_budget():
    run("rank_budget", 2, 2)


def test_small_micro_batches_take_the_latency_path():
    run("latency", 2, 2)
    run("unlike_tokens", 2, 2)


@pytest.mark.parametrize("ranks_per_node", [2, 1])
@pytest.mark.parametrize("program", ["capacity", "rank_budget"])
def test_static_rows_by_the_latency_path_are_those_of_the_other(program, ranks_per_node):
    run(program, 2, 2, 32, ranks_per_node)


@pytest.mark.parametrize("pad", [True, False], ids=["padded", "budget"])
@pytest.mark.parametrize("latency_tokens, as_on_gpu", [(None, True), (32, True), (32, False)])
def test_tokens_of_many_experts_reach_all_of_them_in_calls_of_static_size(pad, latency_tokens, as_on_gpu):
    parity_world.run_world(Program("wide_maps", "wide_programs"), 2, (2, pad, latency_tokens, as_on_gpu), timeout_s=120)


def test_quantization_alignment_pads_segments_with_zeros():
    run("quantization_padding", 2, 2)


def test_attributes_that_megatron_reads_and_overwrites():
    run("attributes", 2, 2)


def test_dispatch_dtype_rounds_the_rows_and_nothing_else():
    run("quantised_dispatch", 2, 2)


def test_experts_write_into_the_buffer_of_their_layer():
    run("rows_for_outputs", 2, 2)


def test_layers_share_buffers_and_handles_outlive_them():
    run("shared_buffers", 2, 2)


def test_dispatches_of_layers_that_share_a_buffer_may_overlap():
    run("two_in_flight", 2, 2)


def test_refusals_instead_of_another_dispatcher():
    not_installed, wrong_backend, uneven, uneven_hosts, differ = run("built_by_moe_layer", 4, 4)[0]
    assert "HybridEP is not installed" in not_installed  # off: Megatron's own manager, which has no deep_ep here
    assert "moe_flex_dispatcher_backend is 'deepep'" in wrong_backend
    assert "--hybrid-ep-ranks-per-node)=3" in uneven and "nodes [0, 0, 0, 1]" in uneven
    assert "hosts ['a', 'a', 'a', 'b']" in uneven_hosts and "HYBRID_EP_RANKS_PER_NODE" in uneven_hosts
    assert "must be the same on every rank, but is None on ranks [0, 1, 3]; 1 on ranks [2]" in differ


@pytest.mark.parametrize("declared", ["flag", "environment"])
def test_groups_inside_a_node_are_one_node(declared):
    """A node of 8 ranks and expert parallel groups of 2 and 4; nodes of 2 ranks and groups of 4."""
    run_shapes("nodes", 4, declared)


def test_a_dispatch_dtype_that_does_not_fit_is_refused_when_the_layer_is_built():
    assert all("blocks of 128" in message for message in run_shapes("refused_dtype", 1))


@pytest.mark.parametrize("hidden, dtype", [(12, "float32"), (4, "bfloat16"), (12, "bfloat16"), (3, "float32")])
def test_rows_of_any_width(hidden, dtype):
    warned = run_shapes("width", 2, hidden, dtype)
    assert warned == [0 if hidden * (4 if dtype == "float32" else 2) % 16 == 0 else 1] * 2
