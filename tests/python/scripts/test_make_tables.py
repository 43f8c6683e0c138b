"""The script behind `make tables`: it fits what the model has, knows every picture, and its commands are the docs'."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest
from docs_pages import ROOT

sys.path.insert(0, str(ROOT / "scripts"))
import make_tables

sys.path.remove(str(ROOT / "scripts"))


def test_a_fit_of_what_is_fitted_changes_nothing_and_one_that_is_off_is_mended():
    source = make_tables.EFFICIENCY.read_text()
    assert make_tables.fit(source) == source
    assert make_tables.fit(source.replace("gemm=0.", "gemm=0.9")) == source
    with pytest.raises(ValueError, match="0 numbers for gemm"):
        make_tables.fit(source.replace("(gemm=", "(products="))


def test_every_picture_is_there_and_drawn_by_the_command_that_the_page_shows():
    page = " ".join((ROOT / "docs" / "benchmark.md").read_text().split())
    for command in (make_tables.BENCH, make_tables.SCALING):
        assert f"hybrid-ep {command}" in page
    for made in make_tables.PICTURES.values():
        for kept in made.values():
            assert (make_tables.RESULTS / kept).is_file() and f"results/{kept}" in page


def test_an_unknown_part_is_refused_with_those_there_are(capsys):
    with pytest.raises(SystemExit):
        make_tables.main(["--only", "training,plots"])
    assert "there is no 'plots'; use some of simulator, training, layouts, bench, scaling" in capsys.readouterr().err


def test_a_quick_run_keeps_what_the_event_engine_said(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    import simulate_tables

    page = make_tables.RESULTS / "simulator-model.md"
    section = simulate_tables.kept(page, "Event engine beside the model")
    assert section.startswith("| GPU | EP |") and section.endswith("without nodes' skew.")
    assert f"## Event engine beside the model\n\n{section}\n\n## Peers\n" in page.read_text()
    assert simulate_tables.kept(tmp_path / "none.md", "Peers").startswith("Not run")
    sys.modules.pop("simulate_tables")


def test_make_calls_it():
    assert "scripts/make_tables.py $(ARGS)" in (ROOT / "Makefile").read_text()


def test_a_new_fit_is_what_the_tables_of_that_run_go_by(tmp_path, monkeypatch):
    from hybrid_ep.perf import efficiency

    off = tmp_path / "efficiency.py"
    right = f"gemm={efficiency.FITTED.gemm:.4g}"
    off.write_text(make_tables.EFFICIENCY.read_text().replace(right, "gemm=0.1"))
    assert off.read_text() != make_tables.EFFICIENCY.read_text()
    monkeypatch.setattr(make_tables, "EFFICIENCY", off)
    monkeypatch.setattr(make_tables, "ROOT", tmp_path)
    monkeypatch.setattr(efficiency, "FITTED", replace(efficiency.FITTED, gemm=0.1))
    seen = []
    monkeypatch.setitem(make_tables.PARTS, "bench", lambda quick: seen.append(efficiency.FITTED))
    kept, before = list(sys.path), make_tables.fit(off.read_text())
    make_tables.main(["--fit", "--only", "bench"])
    sys.path[:] = kept
    assert off.read_text() == before and right in before and f"gemm={seen[0].gemm:.4g}" == right
