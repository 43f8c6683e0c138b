"""scripts/latency_tables.py: its rows, the page that shows them, and how an operation's SMs are parted."""

import json
import sys
from pathlib import Path

import pytest

from hybrid_ep.hardware import clusters
from hybrid_ep.perf import latency_events
from hybrid_ep.perf.model import permute_blocks
from hybrid_ep.perf.shape import Shape

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "scripts"))
import latency_tables

PAGE = Path(__file__).resolve().parents[3] / "docs" / "results" / "2026-11-25-latency-nodes.md"


def test_the_page_shows_what_its_file_says(capsys):
    assert latency_tables.main(["--from", str(PAGE.with_suffix(".json"))]) == 0
    assert capsys.readouterr().out in PAGE.read_text(encoding="utf-8")


def test_a_row_has_the_times_of_both_paths_with_as_many_sms(tmp_path, capsys):
    file = tmp_path / "rows.json"
    assert latency_tables.main(["--quick", "--json", str(file)]) == 0
    (row,) = json.loads(file.read_text())
    cluster, shape = clusters.get(row["cluster"]), Shape(16, 8, 4, 7168, 8, 256)
    got = latency_events.measure(shape, cluster, num_sms=8)
    assert (row["dispatch_us"], row["combine_us"], row["nic_bytes"]) == (got.dispatch_us, got.combine_us, got.nic_bytes)
    assert row["throughput_dispatch_us"] > 0 and f"| {got.dispatch_us:.1f} |" in capsys.readouterr().out


@pytest.mark.parametrize("op", ["dispatch", "combine"])
@pytest.mark.parametrize("num_sms", [8, 32, 128])
def test_both_kinds_of_blocks_are_the_sms_of_an_operation(op, num_sms):
    cluster = clusters.get("h100_8x400g")
    n = latency_tables.feeding(cluster, num_sms, op)
    assert num_sms - 3 <= n + permute_blocks(cluster, n, op=op) <= num_sms


def test_flags_that_cannot_be_are_refused(capsys):
    for flags in (["--from", "x.json", "--quick"], ["--json", "/nowhere/x.json"]):
        with pytest.raises(SystemExit):
            latency_tables.main(flags)
        assert flags[0] in capsys.readouterr().err
