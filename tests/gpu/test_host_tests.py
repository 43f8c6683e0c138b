"""Tests of tests/python once more, on virtual ranks of one GPU: their own bodies, with a DeviceWorld where they make a
VirtualWorld. Buffers take and return CPU tensors there, so that a body does not notice.

Not among them: what only a host can tell (signatures, deprecations, names in /dev/shm, poisoned plans), what needs
more ranks than the device has hardware queues (8 x 8), and what a GPU does otherwise and test_*.py here has of its own
(random examples, streams, deadlines, refused launches, captures)."""

from __future__ import annotations

import pytest
import test_bad_input as bad_input
import test_buffer_features as features
import test_combine_specials as specials
import test_counted as counted
import test_functional as functional
import test_in_flight as in_flight
import test_interrupt as interrupt
import test_moe_pad_empty as pad_empty
import test_quantize as quantize
import test_rail_streams as rail_streams
import test_scale_tiles as scale_tiles
import test_sync_free as sync_free
import test_traffic as traffic
import torch
from gpu_world import DeviceWorld

MODULES = (
    bad_input,
    features,
    specials,
    counted,
    functional,
    in_flight,
    interrupt,
    quantize,
    rail_streams,
    scale_tiles,
    sync_free,
    traffic,
)  # pad_empty makes its worlds by features


@pytest.fixture(autouse=True)
def _on_the_device(monkeypatch):
    for module in MODULES:
        monkeypatch.setattr(module, "VirtualWorld", DeviceWorld)
    yield
    for buffer in DeviceWorld.made:
        buffer.destroy()
    DeviceWorld.made.clear()


# Bodies that run as they are, by name, with their parameters.
test_handles_outlive = features.test_handles_outlive_later_calls_growth_and_the_buffer
test_handle_maps = features.test_handle_maps_say_where_the_rows_are
test_layouts = features.test_tokens_are_any_layout_and_alignment
test_new_weights = features.test_new_weights_through_a_handle
test_extra_rows = features.test_extra_rows_are_zero_and_ignored
test_small_budget = features.test_a_budget_that_is_too_small_raises_on_every_rank_alike
test_overflow = features.test_overflow_drop_flags_and_counts
test_capacity_factor = features.test_capacity_factor_bounds_memory_and_raises_or_drops
test_template = features.test_template_config_makes_room_at_the_next_dispatch
test_two_threads = features.test_two_threads_at_once_are_refused
test_destroyed = features.test_a_destroyed_buffer_says_so

test_growth_by_exchanges = counted.test_growth_costs_one_more_exchange_and_then_none
test_unlike_widths = counted.test_ranks_of_unlike_width_agree
test_bad_calls_of_one_rank = counted.test_bad_calls_are_refused_on_every_rank_and_harm_nothing
test_plan_memory = counted.test_a_plan_takes_memory_for_the_rows_that_came

test_blocks = sync_free.test_blocks_do_not_change_results
test_launches = sync_free.test_launches_of_every_verb
test_dropped_and_flagged = sync_free.test_what_cannot_be_placed_is_dropped_and_flagged
test_ranks_that_differ = sync_free.test_ranks_that_differ_find_each_other_at_the_deadline
test_no_room = sync_free.test_a_call_that_does_not_fit_is_refused_before_anything_is_sent

test_two_buffers = in_flight.test_two_buffers_at_the_same_time
test_interrupted = interrupt.test_a_signal_ends_the_wait_long_before_the_deadline
test_counters_and_growth = traffic.test_counters_survive_growth_and_can_be_reset

test_pad_empty = pad_empty.test_every_verb_agrees_with_the_reference
test_pad_empty_rows = pad_empty.test_each_expert_gets_rows_and_the_real_ones_are_those_of_the_plain_layout
test_pad_empty_gradients = pad_empty.test_gradients_through_padded_experts_are_those_of_the_dense_layer
test_gradients = functional.test_layer_and_gradients_equal_those_of_one_rank
test_adjoints = functional.test_each_is_the_adjoint_of_the_other
test_gradcheck = functional.test_gradcheck_on_one_rank
test_one_output = functional.test_only_one_output_used
test_quantised = quantize.test_a_quantised_dispatch_delivers_rounded_rows_and_whole_gradients
test_scale_tiles = scale_tiles.test_from_a_dispatch_to_the_gemms_operand


# Those of which a GPU needs other parameters, or another executor to be compared with.
@pytest.mark.parametrize("num_buffers", [1, 2])
def test_dispatches_before_combines(num_buffers):
    in_flight.test_two_dispatches_before_their_combines(num_buffers)


@pytest.mark.parametrize(
    "what", ["hidden", "dtype", "pad_multiple", "pad_empty_experts", "num_of_experts", "weights", "scaling_factor"]
)  # a verb that does not wait finds out at its deadline
def test_disagreement(what):
    features.test_ranks_that_disagree_about_a_call_are_named(what)


@pytest.mark.parametrize("executor", ["cuda", "cuda_loopback"])
@pytest.mark.parametrize("num_blocks", [1, 3])
def test_rail_streams(executor, num_blocks):
    rail_streams.test_skewed_streams_do_not_wait_for_each_other(executor, num_blocks)


@pytest.mark.parametrize("shape", [(2, 2), (3, 1)])
def test_everything_of_a_call(shape):
    but = ("count_bytes", "node_bytes", "self_bytes", "copied_rows", "copied_bytes")  # by the rows that land once
    counted.same_everywhere(counted.everything(shape), counted.everything(shape, executor="host"), but)


@pytest.mark.parametrize("shape", [(1, 1), (1, 4), (4, 1), (2, 2), (3, 2)])
@pytest.mark.parametrize("weights", [True, False])
@pytest.mark.parametrize("arena_mib", [None, 0])
def test_counters(shape, weights, arena_mib):
    traffic.same_counters(shape, weights, arena_mib, once=torch.cuda.is_available())  # else stand_in.py's host


@pytest.mark.parametrize("landing", ["first", "all"])
def test_counters_of_the_landing_asked_for(landing):
    traffic.test_counters_of_the_landing_asked_for((1, 4), landing)


def test_capacity():
    counted.same_capacity({}, {"executor": "host"})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("weighted, fp32_partials", [(False, False), (True, False), (False, True)])
def test_all_bit_patterns(dtype, weighted, fp32_partials):
    specials.same_sums(
        *(specials.combined(executor, dtype, weighted, fp32_partials) for executor in ("cuda", "host")), dtype
    )


# Where the host does not look at the values, and where a test's tensor cannot be brought to the device.
OTHERWISE = {"topk_idx too large", "topk_idx below -1", "hidden on another device"}


def test_bad_calls():
    (buffer,) = DeviceWorld(1, 1).buffers(bad_input.H, 8, bad_input.E, timeout_s=20)
    for what in sorted(set(bad_input.BAD_CALLS) - OTHERWISE):
        bad_input.test_bad_calls(buffer, what)
