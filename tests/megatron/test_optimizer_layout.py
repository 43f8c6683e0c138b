"""Whose it is that a checkpoint of the distributed optimizer does not change from EP2 to EP1: the control."""

import parity_world
import pytest
from test_dispatcher import Program


@pytest.mark.parametrize("kind", ["alltoall", "ours"])
def test_distributed_optimizer_between_expert_parallel_sizes(kind, tmp_path):
    outcomes = parity_world.run_world(Program("reload", "optimizer_layout_programs"), 2, (kind, str(tmp_path)),
                                      timeout_s=240)
    for outcome in outcomes:
        print(kind, outcome)
        assert outcome[2] == "loaded"
