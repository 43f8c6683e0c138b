"""Exact balancing with a static number of permuted rows: they hold, and what does not fit is as was asked for."""

import contextlib
import types

import parity_world
import pytest
import torch
from test_dispatcher import Program

from hybrid_ep.balance import plan_microbatch
from megatron_patches import settings
from megatron_patches.static_rows import ROUNDING, StaticRows, filled

pytestmark = pytest.mark.balance


def run(name, num_ranks, *arguments):
    return parity_world.run_world(Program(name, "static_programs"), num_ranks, arguments, timeout_s=150)


@pytest.mark.parametrize("ep, grouped", [pytest.param(4, False, marks=pytest.mark.version_free), (2, True), (4, True)])
def test_rows_are_the_same_in_every_micro_batch_and_the_bits_are_those_of_off(ep, grouped):
    run("rows_stay", ep, ep, grouped)


@pytest.mark.parametrize("grouped", [pytest.param(False, marks=pytest.mark.version_free), True])
def test_what_does_not_fit_is_kept_dropped_or_refused(grouped):
    counted = run("overflows", 4, 4, grouped)
    assert len(set(counted)) == 1 and counted[0] > 0


def test_what_the_kernels_plans_leave_over_is_kept_dropped_or_refused():
    counted = run("kernels_overflow", 4, 4)
    assert len(set(counted)) == 1 and counted[0] > 0


@pytest.mark.version_free
@pytest.mark.parametrize("ranks_per_node", [4, 2])
def test_few_tokens_take_the_latency_path(ranks_per_node):
    assert run("by_lines", 4, 4, ranks_per_node) == [[True, True, False]] * 4


def test_quantised_rows_go_to_clones_as_to_their_experts():
    said = run("quantised", 4, 4)
    assert said == [[False, True, True, True]] * 4, "rounding shows; then the same with any plan"


@pytest.mark.version_free
def test_a_tail_that_goes_astray_is_noticed():
    assert run("broken", 4, 4)[0] == []


@pytest.mark.version_free
def test_what_cannot_be_static_is_refused_by_name():
    run("refusals", 2, 2)


@pytest.mark.version_free
@pytest.mark.parametrize("epsilon", [0.0, 0.01, 0.013, 0.5])
@pytest.mark.parametrize("pairs", [0, 1, 99, 100, 1000, 32768])
def test_the_constant_is_the_target_of_the_planner(pairs, epsilon):
    static = StaticRows(settings.Balance(mode="exact", epsilon=epsilon, static_rows="grow"), object())
    counts = torch.zeros(4, 8, dtype=torch.int64)
    counts[:, 0] = pairs
    target = plan_microbatch(counts, epsilon=epsilon).target
    assert target <= static.rows(pairs) < target + ROUNDING


@pytest.mark.version_free
def test_the_rest_goes_to_the_last_expert_that_runs():
    counts = torch.tensor([3, 0, 5, 0])
    assert filled(counts, 10, 3, has_clones=False).tolist() == [3, 0, 7, 0]
    assert filled(counts, 10, 3, has_clones=True).tolist() == [3, 0, 5, 2]
    assert counts.tolist() == [3, 0, 5, 0]


@pytest.mark.version_free
def test_with_drop_the_host_asks_nothing_of_the_kernels_plan():
    """On a GPU it would wait for the device in every layer."""
    assert run("host_reads", 4, 4) == [[]] * 4


class Arrived(list):
    """The copy on the host, as something that may be looked at."""

    def copy_(self, source, non_blocking):
        assert non_blocking and source.device.type == "meta"


@pytest.mark.version_free
@pytest.mark.parametrize("policy, looks", [("drop", False), ("grow", True), ("raise", True)])
def test_only_drop_does_not_look_at_what_is_on_the_device(policy, looks):
    """Loads without values: whatever asks for one raises."""
    static = StaticRows(settings.Balance(mode="exact", static_rows=policy), object())
    static._counts, static._arrived = torch.zeros(4, dtype=torch.int64, device="meta"), Arrived([0, 0, 0, 0])
    plan = types.SimpleNamespace(load_of_ranks=lambda: torch.zeros(4, dtype=torch.int64, device="meta"))
    with pytest.raises((NotImplementedError, RuntimeError)) if looks else contextlib.nullcontext():
        assert static.admit(plan, 0, 100) == static.rows(100)
