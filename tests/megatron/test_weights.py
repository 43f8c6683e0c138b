"""Weights that travel, in Megatron: the bits of moving tokens, no collective, late and dead ranks."""

import parity_world
import pytest
from test_dispatcher import Program


def run(name, num_ranks, *arguments):
    return parity_world.run_world(Program(name, "weights_programs"), num_ranks, arguments, timeout_s=150)


@pytest.mark.parametrize("ep", [1, 2, pytest.param(4, marks=pytest.mark.version_free)])
def test_weights_give_the_bits_of_tokens(ep):
    run("bit_equality", ep, ep)
