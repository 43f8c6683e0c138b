"""scripts/receive_rows.py: the pages show what it computes, a buffer agrees, and the counts are those of a formula."""

import json
import math
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "scripts"))
import receive_rows

from hybrid_ep.testing import VirtualWorld

DOCS = Path(__file__).resolve().parents[3] / "docs"
PAGE = DOCS / "results" / "2026-11-25-receive-rows.md"
FOUND = json.loads(PAGE.with_suffix(".json").read_text(encoding="utf-8"))


def test_the_pages_show_what_the_layout_takes():
    now = receive_rows.memory_rows()
    assert now == [row for row in FOUND if row["kind"] == "memory"]
    totals = [round(row["total"] / receive_rows.MIB) for row in now]
    assert totals == [4668, 1935, 4704, 1981]
    table = receive_rows.memory_table(now)
    for page in (DOCS / "design.md", PAGE):
        assert table in page.read_text(encoding="utf-8")


def test_the_page_shows_what_its_file_says(capsys):
    assert receive_rows.main(["--from", str(PAGE.with_suffix(".json"))]) == 0
    tables = capsys.readouterr().out.rstrip("\n").split("\n\n")
    assert len(tables) == 2 and all(table in PAGE.read_text(encoding="utf-8") for table in tables)
    design = (DOCS / "design.md").read_text(encoding="utf-8")
    for row in FOUND:
        if row["kind"] == "partials":
            assert f"{100 * row['share']:.{row['share'] < 0.1:d}f}" in design


def test_a_buffer_has_the_bytes_of_its_layout(monkeypatch):
    for name, value in (("TOKENS", 64), ("HIDDEN", 64), ("ROW_BYTES", 128), ("TOPK", 8), ("EXPERTS", 16)):
        monkeypatch.setattr(receive_rows, name, value)
    got = VirtualWorld(num_nodes=1, num_local_ranks=4).buffers(64, 64, 4)[0].memory_report()
    rows = receive_rows.first_recv_rows(None, 64, 8, 4)
    want = receive_rows.report(1, 4, rows)
    assert (got.regions, got.total_bytes) == (want.regions, want.total_bytes)


@pytest.mark.parametrize("ranks", [8, 64])
def test_rows_with_several_experts_are_as_many_as_chance_has_it(ranks):
    got = receive_rows.shares(ranks, limited=False)
    here, k, all_ = receive_rows.EXPERTS // ranks, receive_rows.TOPK, receive_rows.EXPERTS
    none, one = (math.comb(here, n) * math.comb(all_ - here, k - n) / math.comb(all_, k) for n in (0, 1))
    assert got["share"] == pytest.approx((1 - none - one) / (1 - none), rel=0.03)
    assert got["received_mean"] == pytest.approx(ranks * receive_rows.TOKENS * (1 - none), rel=0.01)
    (committed,) = (r for r in FOUND if (r.get("ranks"), r.get("routing")) == (ranks, "uniform"))
    assert got == committed


def test_limited_routing_keeps_to_its_groups():
    choices = receive_rows.drawn(np.random.default_rng(1), limited=True)
    size = receive_rows.EXPERTS // receive_rows.GROUPS
    assert all(len(set(token // size)) <= receive_rows.LIMIT for token in choices)
    assert all(len(set(token)) == receive_rows.TOPK for token in choices.tolist())
    assert np.bincount(choices.ravel(), minlength=receive_rows.EXPERTS).min() > 0


@pytest.mark.parametrize("flags", [["--from", "x.json", "--json", "y.json"], ["--json", "/nowhere/x.json"]])
def test_flags_that_cannot_be_are_refused(flags, capsys):
    with pytest.raises(SystemExit):
        receive_rows.main(flags)
    assert flags[0] in capsys.readouterr().err
