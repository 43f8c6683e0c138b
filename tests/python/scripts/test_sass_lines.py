"""What a warp of the latency path issues for its lines, against the table that the performance model charges."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "scripts"))

import sass_lines

COMMITTED = json.loads(sass_lines.TABLE.read_text())


def kernels(**changes):
    now = COMMITTED["sm_90a"] | changes
    parts = {"latency_dispatch": ("send", "receive"), "latency_combine": ("partial", "sum")}
    return [
        SimpleNamespace(
            name=name, rail="P2PDevice", arch="sm_90a", lines={what: now[what] for what in parts[name] if what in now}
        )
        for name in parts
    ]


def test_the_committed_table_is_its_own():
    assert list(sass_lines.table_problems(kernels())) == []
    assert sass_lines.table(kernels()) == {"sm_90a": COMMITTED["sm_90a"]}


@pytest.mark.parametrize("what", ["send", "receive", "partial", "sum"])
@pytest.mark.parametrize("factor", [1.1, 0.7, 0])  # dearer, a stale table, a loop that is not found
def test_loops_that_the_model_does_not_charge_are_named(what, factor):
    (problem,) = sass_lines.table_problems(kernels(**{what: COMMITTED["sm_90a"][what] * factor}))
    assert f"to {what} lines" in problem and "--write-table" in problem


def test_a_loop_that_is_not_there_is_left_out():
    assert sass_lines.issued("latency_dispatch", [(0, "NOP"), (16, "EXIT")]) == {}
    assert sass_lines.issued("latency_combine", [(0, "NOP"), (16, "EXIT")]) == {}
