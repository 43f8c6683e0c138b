"""--json and --plot mean the same in every command: FILE or - for stdout, a folder; checked before the work."""

from __future__ import annotations

import argparse
import json

import pytest

from hybrid_ep import cli
from hybrid_ep.cli import EXIT_OK, UsageError, outputs

RUNS = {"simulate": ["simulate", "--engine", "model", "--nodes", "2"],
        "bench": ["bench", "--backend", "sim", "--tokens", "64", "--experts", "64"],
        "report": ["report", "scaling", "--simulate", "qwen3_30b_a3b", "--gpus", "8,16"]}


@pytest.mark.parametrize("command", RUNS)
def test_a_dash_puts_the_document_on_stdout_and_the_text_on_stderr(command, capsys):
    assert cli.main([*RUNS[command], "--json", "-"]) == EXIT_OK
    printed = capsys.readouterr()
    assert json.loads(printed.out) and printed.err.startswith("#")


@pytest.mark.parametrize("command", RUNS)
def test_a_file_is_said_in_one_form(command, capsys, tmp_path):
    assert cli.main([*RUNS[command], "--json", str(tmp_path / "x.json")]) == EXIT_OK
    assert f"# written: {tmp_path / 'x.json'}" in capsys.readouterr().out.splitlines()
    assert json.loads((tmp_path / "x.json").read_text())


def test_a_plot_that_cannot_be_written_is_refused_before_the_work(tmp_path, capsys, monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr("hybrid_ep.cli.launch.run_ranks", lambda *_, **__: pytest.fail("the run began"))
    (tmp_path / "file").write_text("mine")
    assert cli.main(["bench", "--plot", str(tmp_path / "file")]) == cli.EXIT_USAGE
    assert "is a file; name a folder" in capsys.readouterr().err and (tmp_path / "file").read_text() == "mine"


def test_a_picture_s_file_still_works_where_it_did_with_a_warning(tmp_path, capsys):
    assert outputs.picture(str(tmp_path / "old.png"), "scaling") == tmp_path / "old"
    assert "still works, write --plot FOLDER" in capsys.readouterr().err
    assert outputs.picture(str(tmp_path / "new"), "scaling") == tmp_path / "new" / "scaling"
    assert (tmp_path / "new").is_dir() and capsys.readouterr().err == ""
    (tmp_path / "old.png").write_text("")
    outputs.check(argparse.Namespace(plot=str(tmp_path / "old.png")), picture_files=True)
    with pytest.raises(UsageError, match="is a file"):
        outputs.check(argparse.Namespace(plot=str(tmp_path / "old.png")))
