"""docs/results/index.md has one line a page: what it has, where it ran, and for an older one the page in its place."""

from __future__ import annotations

import re

from docs_pages import ROOT

FOLDER = ROOT / "docs" / "results"
CELLS = r"^\| \[([\w-]+)\]\(([\w-]+)\.md\) \| ([^|]{20,}) \| ([^|]+) \|"
ROW = re.compile(CELLS + r"(?: \[[\w-]+\]\(([\w-]+)\.md\) \|)?$", re.M)  # the last one of superseded pages
PLACES = {"CPU processes", "event engine", "model", "counted"}


def sections(text: str) -> dict[str, list[tuple[str, ...]]]:
    """{heading: [(words of the link, its page, what it has, where it ran, superseded by or "")]}."""
    found = {}
    for part in text.split("\n## ")[1:]:
        heading, _, body = part.partition("\n")
        found[heading] = ROW.findall(body)
    return found


SECTIONS = sections((FOLDER / "index.md").read_text())
ROWS = [row for rows in SECTIONS.values() for row in rows]


def test_every_page_has_one_line():
    pages = sorted(page.stem for page in FOLDER.glob("*.md") if page.stem != "index")
    assert sorted(page for _, page, *_ in ROWS) == pages
    assert [(words, page) for words, page, *_ in ROWS if words != page] == []


def test_a_line_says_where_it_ran():
    assert [(page, where) for _, page, _, where, _ in ROWS if not set(where.split(", ")) <= PLACES] == []


def test_dated_pages_stand_newest_first():
    for rows in SECTIONS.values():
        dates = [page[:10] for _, page, *_ in rows if page[0].isdigit()]
        assert dates == sorted(dates, reverse=True)


def test_only_superseded_pages_name_another():
    pages = {page for _, page, *_ in ROWS}
    for heading, rows in SECTIONS.items():
        later = [by for *_, by in rows]
        assert set(later) <= pages if heading.startswith("Superseded") else not any(later)


def test_lines_are_found():
    row = "| [2026-01-01-a](2026-01-01-a.md) | twenty letters and more | event engine | [b](b.md) |"
    assert sections(f"# R\n\n## Old\n\n| page | what |\n|---|---|\n{row}\n| [c](c.md) | short | model |\n") == {
        "Old": [("2026-01-01-a", "2026-01-01-a", "twenty letters and more", "event engine", "b")]
    }
