"""A tiny Megatron training through the CUDA library's PTX gives the losses of the host's executor, bit for bit."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
STEPS = 2


def test_a_training_through_the_ptx_is_the_hosts_bit_for_bit():
    pytest.importorskip("megatron.core")
    sys.path.insert(0, str(ROOT / "scripts"))
    import megatron_world
    import parity_world

    host = parity_world.run_world(megatron_world.losses, 2, ("host", 0, STEPS))
    machine = parity_world.run_world(megatron_world.losses, 2, ("machine", 3, STEPS))
    for rank, (ours, theirs) in enumerate(zip(machine, host, strict=True)):
        assert ours.pop("launches") > 0 == theirs.pop("launches"), rank
        assert ours == theirs, rank
    assert len(set(host[0]["loss"])) == STEPS, "nothing was learned: the runs would agree in any case"
