"""How well the performance model fits, as the README and its page say it, is what its table of published rows gives."""

from __future__ import annotations

import re

import pytest
from docs_pages import ROOT

from hybrid_ep.hardware import clusters
from hybrid_ep.perf import published

README = re.sub(r"\s+", " ", (ROOT / "README.md").read_text())
PAGE = (ROOT / "docs" / "performance_model.md").read_text()


def fitted(row) -> bool:
    said = (
        f"Hybrid-EP README, {row.gpu}, {row.ranks} ranks, {row.num_sms} SMs, {row.op} {row.dtype}, {row.scope}: "
        f"{row.gb_per_s:.2f} GB/s"
    )
    return row.own_kernels and said in clusters.FITTED_FROM.values()


@pytest.fixture(scope="module")
def answers():
    return published.answers()


def percent(answers) -> tuple[int, str, str]:
    median, worst = published.spread(answers)
    return len(answers), f"{median:.1%}".replace("%", " %"), f"{worst:.1%}".replace("%", " %")


def test_every_number_was_fitted_to_a_row_of_the_table(answers):
    assert sum(fitted(a.row) for a in answers) == len(clusters.FITTED_FROM)


def test_rows_that_nothing_was_fitted_to(answers):
    count, median, worst = percent([a for a in answers if a.row.own_kernels and not fitted(a.row)])
    worst = f"{float(worst.split()[0]):.0f} %"
    assert f"| {count} | {median} | {worst} " in PAGE
    assert f"{count} published rows that nothing was fitted to" in README and f"{median}, worst {worst}" in README


def test_rows_of_h100_in_bf16(answers):
    rows = published.floor_rows(answers)
    count, median, worst = percent(rows)
    assert f"| {count} | {median} | {worst} |" in PAGE
    assert f"the {count} of H100 in bf16, three of them fitted: {median} and {worst}" in README
    count, median, worst = percent([a for a in rows if not fitted(a.row)])
    assert f"| {count} | {median} | {worst} |" in PAGE
