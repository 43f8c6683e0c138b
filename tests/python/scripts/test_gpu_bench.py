"""The GPU benchmarks on the host: every case runs and says what its numbers are of; inputs and formulas by hand."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPTS = Path(__file__).parents[3] / "scripts"
sys.path.insert(0, str(SCRIPTS))

import gpu_bench  # noqa: E402  (scripts)
import gpu_bench_stages as stages  # noqa: E402


def test_every_case_runs_and_is_named(tmp_path):
    out = tmp_path / "rows.json"
    done = subprocess.run(
        [sys.executable, SCRIPTS / "gpu_bench.py", "--executor", "host", "--quick", "--repeats", "2", "--out", out],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads(out.read_text())["rows"]
    assert {r["name"] for r in rows} == {"one_of_8", "8_of_8", "one_of_72"} and not any("error" in r for r in rows)
    lone = next(r for r in rows if r["name"] == "one_of_72")
    token = lone["hidden"] + lone["hidden"] // 128 * 4
    assert lone["dispatch"]["delivered_bytes"] == lone["dispatch"]["rows"] * token
    # 64 tokens of 8 choices among 72 ranks: hardly ever two on one rank
    assert 0.9 * 64 * 8 < lone["dispatch"]["rows"] == lone["combine"]["rows"] <= 64 * 8


def test_the_seed_conditions_over_sms():
    cases = [c for c in gpu_bench.cases(False, False) if c.name.startswith("seed")]
    assert {(c.hidden, c.tokens, c.num_experts, c.num_ranks, c.topk, c.dtype) for c in cases} == {
        (8192, 4096, 16, 8, 8, "bf16")
    }
    assert {c.num_sms for c in cases if c.active == 1} >= {1, 8, 32}
    assert all(c.num_sms * c.active <= 132 for c in gpu_bench.cases(False, True)), "blocks wait for one another"


def test_a_rank_that_fails_is_a_row_and_an_exit_status(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(stages, "route", lambda *_: 1 / 0)
    assert stages.main(["--executor", "host", "--quick", "--repeats", "1", "--out", str(tmp_path / "o.json")]) == 1
    rows = json.loads((tmp_path / "o.json").read_text())["rows"]
    assert [r["error"] for r in rows if "error" in r] == ["ZeroDivisionError: division by zero"] * 2
    assert any(r["stage"] == "host combine" for r in rows)
    capsys.readouterr()


def test_stages_on_the_host(capsys):
    assert stages.main(["--executor", "host", "--quick", "--repeats", "1"]) == 0
    said = capsys.readouterr().out
    for stage in ("permute", "unpermute", "route 1x64", "route 8x8", "host cached dispatch", "host combine"):
        assert any(line.startswith(stage) for line in said.splitlines()), stage
    # 63 vectors of align(4 (16 + 64 + 1 or 8 + 256), 64) bytes; 63 maps of 64 tokens and 256 experts
    assert said.count("receives 88,704 B; as maps 1,032,192 B") == 2


def test_what_one_rank_of_eight_receives():
    idx = stages.received_by_one(512)
    assert idx.shape[1] == 8 and ((idx >= -1) & (idx < 32)).all() and (idx >= 0).any(1).all()
    # 8 (1 - C(224, 8) / C(256, 8)) = 5.34 ranks a token, of which each has 8 / 5.34 experts
    assert len(idx) == pytest.approx(5.34 * 512, rel=0.04)
    assert int((idx >= 0).sum()) == pytest.approx(8 * 512, rel=0.04)


def test_share_of_the_floor():
    row = stages.of_floor({"kernel_us": 250.0}, 860_000_000, 4.3e12)
    assert row["floor_us"] == pytest.approx(200.0) and row["share"] == pytest.approx(0.8)
    assert stages.of_floor({"kernel_us": None}, 1, 1.0)["share"] is None


@pytest.mark.parametrize(
    "seen, kernel",
    [
        ([("void hep::dispatch_entry<hep::P2p>(...)", 7.0), ("fill", 99.0)], 7.0),
        ([("void hep::exchange_entry<hep::P2p>(...)", 7.0)], None),
    ],
)
def test_a_kernel_is_timed_by_its_name(monkeypatch, seen, kernel):
    class Profile:
        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

        def key_averages(self):
            return [type("Event", (), {"key": key, "self_device_time_total": us}) for key, us in seen]

    monkeypatch.setattr(torch.profiler, "profile", lambda **_: Profile())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    if kernel is None:
        with pytest.raises(RuntimeError, match="no kernel dispatch_entry"):
            stages.timed(lambda: None, "dispatch", True, 2)
    else:
        assert stages.timed(lambda: None, "dispatch", True, 2)["kernel_us"] == kernel
