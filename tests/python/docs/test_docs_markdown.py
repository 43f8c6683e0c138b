"""What Sphinx does not see in the pages: rows that fell out of their table, links of pages outside the site, and tables
and counts that another file has too."""

from __future__ import annotations

import re
from itertools import groupby

import pytest
from docs_pages import PAGES, ROOT, code_and_prose

RULE = re.compile(r"\|(\s*:?-+:?\s*\|)+")
LINK = re.compile(r"\]\(([^)#\s]+)")


def stray_rows(text: str) -> list[int]:
    """Numbers of lines that begin with | and are no rows: no header and rule above them, or another number of cells."""
    _, prose = code_and_prose(text)
    numbered = [(number, line.strip()) for number, line in enumerate(prose, 1)]
    stray = []
    for is_table, group in groupby(numbered, lambda pair: pair[1].startswith("|")):
        rows = list(group)
        if not is_table:
            continue
        columns = [len(re.findall(r"(?<!\\)\|", line)) for _, line in rows]
        ruled = len(rows) > 1 and RULE.fullmatch(rows[1][1])
        stray += [number for (number, _), n in zip(rows, columns, strict=True) if not ruled or n != columns[0]]
    return stray


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_rows_stand_in_tables(page):
    assert stray_rows(page.read_text()) == []


def test_stray_rows_are_found():
    table = "| a | b |\n|---|--:|\n| 1 | `x \\| y` |\n"
    assert stray_rows(table) == []
    assert stray_rows(table + "\n| 2 | 3 |\n") == [5]
    assert stray_rows(table + "| 2 | 3 | 4 |\n") == [4]
    assert stray_rows(f"```\n{table}\n| 2 |\n```\n") == []


WIDEST_OUTPUT = 104  # columns that a page of 1280 pixels shows; all languages but "output" wrap (docs/_static)
WIDER = {"docs/benchmark.md": 183}  # an unedited table of `bench`, which scrolls


def fences(text: str) -> list[tuple[int, str, int]]:
    """(line, language, widest line) of every block of code; an indented one has the language "indented"."""
    found, inside, item = [], False, False
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith("```"):
            inside = not inside
            if inside:
                found.append([number, line.lstrip()[3:], 0])
        elif inside:
            found[-1][2] = max(found[-1][2], len(line))
        elif line.startswith("    ") and not item:
            found.append([number, "indented", len(line)])
        elif line and not line.startswith(" "):
            item = bool(re.match(r"[*-] |\d+\. ", line))
    return [tuple(one) for one in found]


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CONTRIBUTING.md"], ids=lambda page: str(page.relative_to(ROOT)))
def test_code_names_its_language_and_fits(page):
    name = str(page.relative_to(ROOT))
    for line, language, width in fences(page.read_text()):
        assert language not in ("", "indented"), f"{name}:{line}: a fence with its language"
        if language == "output":
            assert width <= WIDER.get(name, WIDEST_OUTPUT), f"{name}:{line}: {width} columns are more than a page shows"


def test_fences_are_found():
    page = "a\n\n    indented\n\n```\nx\n```\n* item\n\n    of the item\n\nb\n\n```bash\nls -l\n```\n"
    assert fences(page) == [(3, "indented", 12), (5, "", 1), (14, "bash", 5)]


@pytest.mark.parametrize(
    "picture",
    sorted((ROOT / "docs").glob("[!_]*.svg")) + sorted(ROOT.glob("docs/results/*.svg")),
    ids=lambda picture: picture.name,
)
def test_a_picture_follows_a_dark_page(picture):
    svg = picture.read_text()
    assert "@media (prefers-color-scheme: dark)" in svg and ("#131416" in svg)  # the page's own dark, docs/_static


def test_pages_show_pictures_that_follow():
    shown = {link for page in PAGES for link in re.findall(r"!\[[^]]*\]\(([^)]+)\)", page.read_text())}
    assert shown and {link for link in shown if not link.endswith(".svg")} == set()


@pytest.mark.parametrize("page", [*ROOT.glob("*.md"), *(ROOT / "csrc").rglob("*.md")], ids=lambda page: page.name)
def test_links_outside_the_site(page):
    links = [link for link in LINK.findall(page.read_text()) if "://" not in link]
    assert [link for link in links if not (page.parent / link).exists()] == []


def test_extras():
    tomllib = pytest.importorskip("tomllib")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = {
        name: {re.match(r"[\w-]+", one)[0] for one in wanted}
        for name, wanted in project["optional-dependencies"].items()
    }
    page = (ROOT / "docs" / "install.md").read_text().partition("| extra |")[2].partition("\n\n")[0]
    rows = re.findall(r"^\| `(\w+)` \| ([^|]+) \|", page, re.M)
    assert {name: set(brings.split(", ")) for name, brings in rows} == extras


def test_mutants():
    """The simulator's page lists all that one lane can show, and counts as the README does."""
    lists = dict(re.findall(r"(\w+)\[\] = \{([^}]+)\}", (ROOT / "tests" / "cpp" / "mutants.h").read_text()))
    parts = ("kWorldBugs", "kSimBugs", "kLatencyBugs", "kLatencyRailBugs", "kCloneBugs")
    all_of_them = set(re.findall(r"Bug::(\w+)", "".join(lists[name] for name in parts)))
    hidden = set(re.findall(r"Bug::(\w+)", lists["kNeedMoreLanes"]))
    page, readme = (ROOT / "docs" / "simulator.md").read_text(), (ROOT / "README.md").read_text()
    listed = re.findall(r"^\| (k\w+) \|", page.partition("seeds-to-catch: begin")[2], re.M)
    assert set(listed) == all_of_them - hidden and len(hidden) == 9
    assert f"{len(listed)} of {len(all_of_them)}" in page
    assert (
        f"{len(listed)} of the {len(all_of_them)}" in readme and "the other nine" in readme and "the other nine" in page
    )
