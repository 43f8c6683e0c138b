"""Our grouped experts in fp8 inside Megatron: the reference's products, clones, training, and Megatron's own flag."""

import math

import parity_world
import pytest
from test_dispatcher import Program


def run(num_ranks, *programs):
    """What every rank answers."""
    return parity_world.run_world(Program("several", "fp8_programs"), num_ranks, (programs,), timeout_s=240)


@pytest.fixture(scope="module")
def alone():
    return run(1, ("products",), ("clones",))[0]


@pytest.fixture(scope="module")
def on_two_ranks():
    return run(2, ("training", 2, 6), ("one_expert_a_token", 2), ("travelling", 2), ("with_megatrons_flag", 2))


def test_experts_multiply_as_the_reference_does(alone):
    assert "products" in alone, "which compares by itself"


def test_a_clone_gives_its_owners_bits_and_a_gradient_of_other_blocks(alone):
    assert 1e-3 < alone["clones"][100] < 0.06, "blocks of rows begin elsewhere"
    assert alone["clones"][128] < 1e-6, "the same blocks, added in two sums"


def test_training_is_near_that_of_fp32_and_balancing_changes_nothing_but_roundings(on_two_ranks):
    (params, fp8, exact), of_fp8, of_exact = on_two_ranks[0]["training"]
    assert all(map(math.isfinite, (*params, *fp8, *exact))) and params[-1] < 0.7 * params[0]
    pairs = (fp8, params), (exact, fp8)
    apart = [max(abs(a - b) / b for a, b in zip(one, other, strict=True)) for one, other in pairs]
    assert 0 < apart[0] < 5e-4, "measured 1.0e-4 in six steps"
    assert exact[0] == pytest.approx(fp8[0], rel=1e-6) and apart[1] < 3e-4, "measured 4.3e-5"
    assert 1e-2 < of_fp8 < 0.12, "measured 6.3e-2, of the parameter that differs most"
    assert of_exact < 0.03, "measured 1.5e-2: clones' blocks of rows are others"


def test_balancing_keeps_every_bit_that_no_block_of_rows_is_in(on_two_ranks):
    assert 0 < max(rank["one_expert_a_token"] for rank in on_two_ranks) < 0.06


def test_weights_may_travel_to_products_in_fp8(on_two_ranks):
    assert max(rank["travelling"] for rank in on_two_ranks) < 0.05


def test_megatrons_fp8_needs_a_word_about_these_experts(on_two_ranks):
    ours, balanced = on_two_ranks[0]["with_megatrons_flag"]
    assert "--fp8-format e4m3 without --hybrid-ep-grouped-gemm-precision (give fp8" in ours and "or params" in ours
    assert "--hybrid-ep-grouped-gemm and --hybrid-ep-grouped-gemm-precision fp8 or params" in balanced
