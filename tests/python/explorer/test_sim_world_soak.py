"""The soak: a failing world is made small, and the printed command replays it."""

from __future__ import annotations

import shlex

import pytest

from hybrid_ep.explorer import soak
from hybrid_ep.explorer.world import Failure, explore, random_spec, spec_of


def without_deadlines(spec):
    return explore(spec, timeout_s=0).failure


def test_a_failing_world_is_made_small():
    """A put that is lost: two nodes of one rank and one token are enough to show it."""
    spec = spec_of(num_nodes=4, num_local_ranks=3, tokens=20, topk=4, rounds=3, plans=2, num_blocks=3, hidden=256,
                   fault="put_lost", fault_rank=0, fault_node=1, fault_at=1, dense=1, scale_bytes=32)  # fmt: skip
    small, failure = soak.minimise(spec, without_deadlines)
    assert failure.kind == "deadlock" and without_deadlines(small) == failure
    assert (small["num_nodes"], small["num_local_ranks"], small["num_blocks"], small["plans"]) == (2, 1, 1, 1)
    assert small["tokens"] <= 2 and small["hidden"] == 8 and small["dense"] == 0


def test_minimise_keeps_what_the_failure_needs():
    def needs(spec):
        return Failure("rule", "made_up", "") if spec["topk"] >= 3 and spec["num_nodes"] >= 2 else None

    small, _ = soak.minimise(spec_of(num_nodes=4, topk=8, tokens=30, strategy="pct"), needs)
    assert (small["topk"], small["num_nodes"], small["tokens"], small["strategy"]) == (3, 2, 1, 0)


def test_minimise_refuses_a_world_that_is_right():
    with pytest.raises(ValueError, match="does not fail"):
        soak.minimise(spec_of())


def test_the_replay_command_is_the_world(capsys):
    spec = random_spec(123)
    assert soak.parse_replay(soak.replay_text(spec)) == spec
    assert soak.replay_text(spec_of()) == "seed=0"
    spec = spec_of(num_nodes=2, num_local_ranks=1, tokens=2, fault="rank_dies", fault_rank=1, fault_at=40)
    arguments = shlex.split(soak.replay_command(spec))
    assert arguments[:3] == ["python", "-m", "hybrid_ep.explorer.soak"]
    assert soak.main(arguments[3:]) == 0
    printed = capsys.readouterr().out
    assert "rank 1 dies" in printed and "rank 0 (node 0) waited" in printed and "n2n" in printed


def test_soak_reports_its_speed(capsys):
    assert soak.main(["--seeds", "40", "--first", "900"]) == 0
    assert "40 worlds" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [["--replay", "nonsense"], ["--replay", "colour=1"], ["--seeds", "0"]])
def test_bad_usage(arguments):
    with pytest.raises(SystemExit) as error:
        soak.main(arguments)
    assert error.value.code == 2
