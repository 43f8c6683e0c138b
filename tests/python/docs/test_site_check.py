"""scripts/site_check.py on pages that are wrong on purpose: what it is there to find, it finds."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
sys.path.append(str(ROOT / "scripts"))
import chromium  # noqa: E402
import site_check  # noqa: E402

PROGRAM = chromium.find(install=False)
pytestmark = pytest.mark.skipif(PROGRAM is None, reason="no Chromium here; scripts/site_check.py gets one through apt")

GOOD = (
    '<article><p>text</p><div style="overflow-x:auto"><pre style="width:2000px">wide, and scrolls</pre></div></article>'
)
WIDE = '<article><pre style="width:600px">wider than a telephone</pre></article>'
CUT = '<article><pre style="overflow:hidden;white-space:pre;width:200px">{}</pre></article>'.format("word " * 50)
NO_PICTURE = '<article><img src="nowhere.png" width="20" height="20"></article>'


def site(folder: Path, **pages: str) -> Path:
    for name, body in pages.items():
        text = f'<!doctype html><meta name="viewport" content="width=device-width"><body style="margin:0">{body}</body>'
        (folder / f"{name}.html").write_text(text)
    return folder


def test_what_is_wrong_is_found_where_it_is_wrong(tmp_path):
    found = site_check.look(
        site(tmp_path, index=GOOD, wide=WIDE, cut=CUT, picture=NO_PICTURE), PROGRAM, [1280, 390], 60
    )
    assert not [line for line in found if line.startswith("index.html")]
    of = {name: [line for line in found if line.startswith(f"{name}.html")] for name in ("wide", "cut", "picture")}
    assert of["wide"] and all("at 390 px" in line for line in of["wide"])
    assert any("scrolls sideways" in line for line in of["wide"]) and any("hangs out" in line for line in of["wide"])
    assert len(of["cut"]) == 2 and all('"word word' in line and "is cut off" in line for line in of["cut"])
    assert len(of["picture"]) == 2 and all("no picture nowhere.png" in line for line in of["picture"])


def test_a_search_that_finds_nothing_is_a_finding(tmp_path):
    results = '<div id="search-results"><p>Search finished, found one page</p><ul><li><a>Simulator</a></li></ul></div>'
    (line,) = site_check.look(site(tmp_path, index=GOOD, search=results), PROGRAM, [390], 60)
    assert line == "search.html: 'timeout' does not find Troubleshooting, but ['Simulator']"


def test_a_site_that_is_not_built_and_a_browser_that_does_not_answer(tmp_path, capsys):
    with pytest.raises(SystemExit):
        site_check.main([str(tmp_path)])
    assert "build it with make docs" in capsys.readouterr().err
    with pytest.raises(TimeoutError, match="did not look at 1 pages"):
        site_check.look(site(tmp_path, index=GOOD), "/bin/true", [390], 0.5)
