"""The published table of recorded routers is that of the counts beside it, and one that is not is refused."""

from __future__ import annotations

import copy
import json
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "scripts"))
import static_rows_tables
from balance_peers import traces

(PAGE,) = (Path(__file__).resolve().parents[3] / "docs" / "results").glob("*-router-traces.md")


@pytest.fixture(scope="module")
def table():
    return json.loads(PAGE.with_suffix(".json").read_text())["traces"]


@pytest.fixture(scope="module")
def counts():
    return traces.load(PAGE.with_suffix(".npz"))[0]


def test_the_table_is_that_of_the_counts(table, counts):
    traces.check(table, counts)
    text = PAGE.read_text()
    assert traces.markdown(table) in text
    assert f"there are {sum(run.shape[1] for run in counts.values())}, of {len(counts)} runs" in text.replace("\n", " ")
    assert all(run.shape[0] == 208 for run in counts.values())


def test_a_few_lines_of_what_static_rows_lose(counts):
    some = {name: counts[name] for name in ("tiny_no_loss", "megatron_loss")}
    lines = static_rows_tables.table(["run"], static_rows_tables.trace_rows(some)).splitlines()[2:]
    assert len(lines) == 2 and all(line in PAGE.read_text() for line in lines)


def test_how_often_static_rows_overflow(counts):
    rows = static_rows_tables.overflow_rows(counts)
    assert static_rows_tables.table(static_rows_tables.OVERFLOW_HEAD, rows) in PAGE.read_text()
    assert [row[3] for row in rows] == ["23", "0", "324", "0"]  # the numbers of docs/balancer.md


def test_experts_kept_apart(counts):
    page = PAGE.with_name("2026-11-27-router-traces-apart.md")
    written = json.loads(page.with_suffix(".json").read_text())["apart"]
    assert traces.apart_markdown(written) in page.read_text()
    some = {name: counts[name] for name in ("tiny_no_loss", "larger_groups")}
    assert list(traces.apart_rows(some)) == [row for row in written if row["run"] in some]
    total = {word: sum(row[f"above, {word}"] for row in written) for word in traces.PLACED}
    said = f"{total['home']} are above the target", f"{total['slow']} where", f"{total['apart']} where"
    assert all(text in page.read_text().replace("\n", " ") for text in said)


def _lacks_a_row(table, counts):
    del table[-1]


def _lacks_a_run(table, counts):
    del counts["tiny"]


def _another_mean(table, counts):
    table[3]["exact +1 mean"] += 0.001


def _another_trace(table, counts):
    table[5]["by trace"]["none"].reverse()


def _another_placement(table, counts):
    table[0]["most by trace"]["EPLB stale 10"][0] += 0.002
    table[0]["EPLB stale 10 most"] = max(table[0]["most by trace"]["EPLB stale 10"])


def _another_size(table, counts):
    table[1]["pairs a rank"] *= 2


def _other_counts(table, counts):
    counts["larger_groups"] = np.roll(counts["larger_groups"], 1, axis=2)


def _fewer_traces(table, counts):
    counts["megatron_loss"] = counts["megatron_loss"][:, 1:]


@pytest.mark.parametrize(
    "mutant, text",
    [
        (_lacks_a_row, "table has rows of"),
        (_lacks_a_run, "table has rows of"),
        (_another_mean, r"row tiny_no_loss at EP4: exact \+1 mean is"),
        (_another_trace, "row larger_loss at EP16: none of trace 0, mean is"),
        (_another_placement, "row tiny at EP4: EPLB stale 10 of trace 0, most is"),
        (_another_size, "row tiny_seed at EP4: pairs a rank is 4096"),
        (_other_counts, "row larger_groups at EP16"),
        (_fewer_traces, "row megatron_loss at EP8: traces is 8, its counts have 7"),
    ],
)
def test_a_table_that_disagrees_with_its_traces_is_refused(table, counts, mutant, text):
    table, counts = copy.deepcopy(table), dict(counts)
    mutant(table, counts)
    with pytest.raises(ValueError, match=text):
        traces.check(table, counts)
