"""scripts/host_shares.py on a run whose figures are known."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[3] / "scripts"))
import host_shares  # noqa: E402


def of(op, name, *by_rank):
    return {"op": op, "implementation": name, "by_rank": [list(one) for one in by_rank]}


def document():
    """Two ranks, two iterations. memmove runs for half its time, a dispatch of 10 and 8 ms for a quarter."""
    return {
        "cases": [
            {
                "limits": [
                    {"op": "dispatch", "implementation": "hybrid_ep", "one_pass_us": 4000.0, "one_pass_share": 0.4},
                    {"op": "dispatch", "implementation": "other", "one_pass_us": 4000.0, "one_pass_share": 0.1},
                ],
                "samples_s": [
                    of("dispatch", "hybrid_ep", (0.010, 0.010), (0.008, 0.008)),
                    of("dispatch", "other", (0.040, 0.040), (0.040, 0.040)),
                    of("copy", "memcpy", (0.020, 0.020), (0.020, 0.020)),
                ],
                "running_samples_s": [
                    of("dispatch", "hybrid_ep", (0.003, 0.002), (0.002, 0.002)),
                    of("copy", "memcpy", (0.010, 0.010), (0.010, 0.010)),
                ],
                "queued_samples_s": [
                    of("dispatch", "hybrid_ep", (0.005, 0.005), (0.004, 0.004)),
                    of("copy", "memcpy", (0.010, 0.010), (0.010, 0.010)),
                ],
            }
        ]
    }


def test_the_row_by_hand(tmp_path, capsys):
    (row,) = host_shares.rows(document())
    assert row["ranks"] == 2 and row["call_us"] == pytest.approx(10_000) and row["share"] == 0.4
    assert row["ran"] == pytest.approx(0.25) and row["no_core"] == pytest.approx(0.5) and row["copy_ran"] == 0.5
    # memmove's bytes take 2 ms of a core, the mean call 2.25
    assert row["share_on_cores"] == pytest.approx(2.0 / 2.25)
    (tmp_path / "f.json").write_text(json.dumps(document()))
    assert host_shares.main([str(tmp_path / "f.json")]) == 0
    assert "| 2 | dispatch | 10000 | 40% | 25% | 50% | 25% | 50% | 89% |" in capsys.readouterr().out


def test_a_run_without_cores_is_refused(tmp_path, capsys):
    old = document()
    old["cases"][0]["queued_samples_s"] = []
    (tmp_path / "old.json").write_text(json.dumps(old))
    with pytest.raises(SystemExit):
        host_shares.main([str(tmp_path / "old.json")])
    assert "no times on cores" in capsys.readouterr().err
