"""scripts/link_shares.py: the page shows what its file says, and a share is the port's time over the kernel's."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "scripts"))
import link_shares

from hybrid_ep.cli.bench.presets import CONDITIONS
from hybrid_ep.hardware import clusters
from hybrid_ep.perf import events

DOCS = Path(__file__).resolve().parents[3] / "docs"
NAMES = (
    "2026-11-25-link-shares",
    "2026-11-26-link-shares",
    "2026-11-26-short-chunks",
    "2026-11-27-looks",
    "2026-11-28-arena-over-nics",
    "2026-11-28-stages",
)
PAGES = [DOCS / "results" / f"{name}.md" for name in NAMES]
FOUND = json.loads(PAGES[-1].with_suffix(".json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("file", PAGES, ids=lambda file: file.stem)
def test_the_page_shows_what_its_file_says(file, capsys):
    assert link_shares.main(["--from", str(file.with_suffix(".json"))]) == 0
    page = file.read_text(encoding="utf-8")
    tables = capsys.readouterr().out.rstrip("\n").split("\n\n")
    assert len(tables) == 4 and all(table in page for table in tables)


def test_the_page_of_the_model_shows_both_engines():
    text = (DOCS / "performance_model.md").read_text(encoding="utf-8")
    rows = {row.split(",")[0].removeprefix("  | "): row for row in text.splitlines() if " SMs, of " in row}
    shares = {
        (r["world"].removeprefix("hybrid-ep-blog-"), r["op"], r["rows"]): r for r in link_shares.of(FOUND, "share")
    }
    for world, name in (("h100-8", "8 H100"), ("h100-32", "32 H100"), ("gb200-36", "36 GB200")):
        there = next(r for (w, op, _), r in shares.items() if (w, op) == (world, "dispatch"))
        back = [r for (w, op, _), r in shares.items() if (w, op) == (world, "combine")]
        for r in (there, *back):
            assert f"{100 * r['share']:.0f}" in rows[name].split("|")[2]
        assert f"| {100 * there['model']:.0f} / {100 * back[0]['model']:.0f} % |" in rows[name]
        published = f"{100 * there['published_by_model']:.0f} / {100 * back[0]['published_by_model']:.0f} %"
        assert f"| {published} |" in rows[name]


def test_a_share_is_the_ports_time_over_the_kernels():
    c = replace(CONDITIONS["hybrid-ep-blog-h100-8"], tokens=64, hidden=1024)
    rows = list(link_shares.shares(c))
    there, formed, in_place = link_shares.of(rows, "share")
    whole = [
        events.measure(link_shares.shape_of(c), clusters.get(c.cluster), num_sms=c.num_sms, in_place=in_place)
        for in_place in (False, True)
    ]
    for got, back in zip(whole, (formed, in_place), strict=True):
        assert (got.kernel_us["dispatch"], got.kernel_us["combine"]) == (there["kernel_us"], back["kernel_us"])
        port = max(us for name, us in got.link_us.items() if name.startswith("nvlink"))
        # another rank's port may be the busiest in each
        assert port <= there["busy_us"] + back["busy_us"] <= 1.1 * port
    assert there["share"] == there["busy_us"] / there["kernel_us"] < 1
    for row in link_shares.of(rows, "waits"):
        assert 0.9 < sum(row["of"].values()) < 1.0001


def test_what_is_free_takes_no_longer_where_it_binds(capsys, tmp_path):
    file = tmp_path / "rows.json"
    assert link_shares.main(["--quick", "--json", str(file)]) == 0
    rows = json.loads(file.read_text())
    of = {r["free"]: r for r in link_shares.of(rows, "ablation") if r["rows"] == "formed"}
    assert of["lanes that feed links"]["combine_us"] < 0.8 * of["nothing"]["combine_us"]
    assert "| nothing |" in capsys.readouterr().out
    assert {r["tokens"] for r in rows} == {64}


@pytest.mark.parametrize(
    "flags",
    [
        ["--only", "nosuch"],
        ["--from", "x.json", "--quick"],
        ["--from", "x.json", "--shares"],
        ["--json", "/nowhere/x.json"],
    ],
)
def test_flags_that_cannot_be_are_refused(flags, capsys):
    with pytest.raises(SystemExit):
        link_shares.main(flags)
    assert flags[0] in capsys.readouterr().err


@pytest.mark.parametrize("flags", [["--tokens", "64"], ["--shares", "--tokens", "0"]])
def test_tokens_of_ones_own_are_for_shares(flags, capsys):
    with pytest.raises(SystemExit):
        link_shares.main(flags)
    assert "--tokens" in capsys.readouterr().err
