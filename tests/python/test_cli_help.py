"""`hybrid-ep --help`: every subcommand with its summary, those of other packages too, and none of them imported."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from hybrid_ep import cli

ROOT = Path(__file__).parents[2]


@pytest.fixture
def plug_ins(monkeypatch, tmp_path):
    """Packages on the path whose import is an error, each a subcommand."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def add(**sources: str) -> None:
        for name, source in sources.items():
            file = tmp_path / (name.replace("__", "/") + ".py")
            file.parent.mkdir(exist_ok=True)
            file.write_text(f"{source}\nraise SystemExit('imported')\n")
        found = [EntryPoint(name, name.replace("__", "."), "hybrid_ep.commands") for name in sources]
        monkeypatch.setattr(cli.importlib.metadata, "entry_points", lambda group: found)

    return add


def test_a_plug_in_s_summary_is_shown_without_importing_it(plug_ins):
    plug_ins(abroad__deep='"""A command."""\nSUMMARY = "does things elsewhere"', alone='SUMMARY = "one file"',
             silent__deep="NAME = 1")
    said = " ".join(cli.build_parser().format_help().split())
    assert "does things elsewhere" in said and "one file" in said and "silent.deep: has no SUMMARY" in said
    assert all(command.summary in said for command in cli.COMMANDS.values())


def test_one_that_is_gone_is_called_so(plug_ins, monkeypatch):
    plug_ins(abroad__deep="SUMMARY = 'x'")
    assert cli.declared_summary("abroad.deep") == "x"
    assert cli.declared_summary("abroad.other") == "abroad.other: not installed"
    assert cli.declared_summary("nowhere_at_all.deep") == "nowhere_at_all.deep: not installed"


def test_the_launcher_of_this_tree_says_what_it_does_and_help_loads_no_torch():
    program = ("import sys; from hybrid_ep import cli; s = cli.declared_summary('recipes.launch_command'); "
               "cli.build_parser(); print(s, 'torch' in sys.modules, 'recipes' in sys.modules)")
    said = subprocess.run([sys.executable, "-c", program], cwd=ROOT, text=True, capture_output=True, check=True,
                          timeout=60)
    from recipes.launch_command import SUMMARY

    assert said.stdout.strip() == f"{SUMMARY} False False"
