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


def test_the_bench_s_table_fits_120_columns_unless_it_is_wide():
    from hybrid_ep.cli.bench import report

    row = report.Row(65536, 24, "unpermute", "megatron-alltoall", 1 << 35, *[1234567.8] * 6, *[1234.56] * 5, 1.0, 0.9,
                     1.1, 1234567)  # fmt: skip
    narrow, wide = (report.row_line(row, choice) for choice in (False, True))
    assert len(narrow) == len(report._titles(False)) <= 120 < len(wide) == len(report._titles(True))
    for kept in ("time", "t_p90", "busbw", "vs_first", "#wrong"):
        assert kept in report._titles(False)
    long = "# " + "word " * 60
    assert all(len(line) <= 120 and line.startswith("#") for line in report.fitted(long, False).splitlines())
    assert report.fitted(long, True) == long


def test_peers_come_with_the_packages_and_not_from_a_folder_of_the_sources(monkeypatch, tmp_path):
    """As from a wheel: another folder is the current one, and the module is found by its name."""
    from hybrid_ep.cli.bench import plugins

    monkeypatch.chdir(tmp_path)
    assert "recipes.bench_peer_megatron" in plugins.find_plugins()
    assert [peer.name for peer in plugins.load_plugin("recipes.bench_peer_megatron")] == ["megatron-alltoall"]
