"""Interleaved pipelines: with two virtual stages a rank, two layers each, clones and travelling weights give the losses
and gradients of neither, and a step's order of layers is known from the step before."""

import parity_world
import pytest
from test_balance_exact import RECOMPUTED
from test_dispatcher import Program


@pytest.mark.version_free
@pytest.mark.parametrize("after", [{}, RECOMPUTED])
def test_clones_and_travelling_weights_in_virtual_stages(after):
    program = Program("clones_and_weights", "virtual_programs")
    ranks = parity_world.run_world(program, 4, (after,), timeout_s=200)[0]
    for worst, copies, (first, *later) in ranks:
        assert 0 < worst["exact"] < 1e-6 and 0 < worst["weights"] < 2e-6 and copies > 0
        assert first > 0 and later == [0, 0]
