"""`hybrid-ep --help`: every subcommand with its summary, those of other packages too, and none of them imported."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path

import pytest

from hybrid_ep import cli

ROOT = Path(__file__).parents[3]


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
        monkeypatch.setattr("importlib.metadata.entry_points", lambda group: found)

    return add


def test_a_plug_in_s_summary_is_shown_without_importing_it(plug_ins):
    plug_ins(
        abroad__deep='"""A command."""\nSUMMARY = "does things elsewhere"',
        alone='SUMMARY = "one file"',
        silent__deep="NAME = 1",
    )
    said = " ".join(cli.build_parser().format_help().split())
    assert "does things elsewhere" in said and "one file" in said and "silent.deep: has no SUMMARY" in said
    assert all(command.summary in said for command in cli.COMMANDS.values())


def test_a_command_looks_for_plug_ins_once(monkeypatch):
    real, looked = entry_points, []
    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: looked.append(group) or real(group=group))
    assert cli.main(["simulate", "--tokens", "64"]) == 0
    assert looked == ["hybrid_ep.commands"]


def test_one_that_is_gone_is_called_so(plug_ins, monkeypatch):
    plug_ins(abroad__deep="SUMMARY = 'x'")
    assert cli.declared_summary("abroad.deep") == "x"
    assert cli.declared_summary("abroad.other") == "abroad.other: not installed"
    assert cli.declared_summary("nowhere_at_all.deep") == "nowhere_at_all.deep: not installed"


def test_the_launcher_of_this_tree_says_what_it_does_and_help_loads_no_torch():
    program = (
        "import sys; from hybrid_ep import cli; s = cli.declared_summary('recipes.launch_command'); "
        "cli.build_parser(); print(s, 'torch' in sys.modules, 'recipes' in sys.modules)"
    )
    said = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, text=True, capture_output=True, check=True, timeout=60
    )
    from recipes.launch_command import SUMMARY

    assert said.stdout.strip() == f"{SUMMARY} False False"


REFUSED = {
    "balance": ["report", "nowhere", "--ep", "0"],
    "bench": ["--hidden", "7"],
    "doctor": ["--multi", "--require-gpu"],
    "launch": ["nosuch"],
    "report": ["scaling"],
    "simulate": ["--nodes", "0"],
    "tune": ["--tokens", "0"],
}


@pytest.mark.parametrize("command", REFUSED)
def test_help_and_refusals_of_every_command_load_no_torch(command):
    """The import of torch takes seconds, in which nothing is said."""
    assert set(REFUSED) == {*cli.commands()} | {"launch"}
    program = (
        "import sys\nfrom hybrid_ep import cli\n"
        "cli.COMMANDS['launch'] = cli.Command('recipes.launch_command', 'train a recipe')\n"
        "for argv in ['--help'], ['--nosuch'], sys.argv[2:]:\n"
        "    try:\n        code = cli.main([sys.argv[1], *argv])\n"
        "    except SystemExit as stopped:\n        code = stopped.code\n"
        "    print(argv[0], code, 'torch' in sys.modules, file=sys.stderr)\n"
    )
    done = subprocess.run([sys.executable, "-c", program, command, *REFUSED[command]], cwd=ROOT, text=True,
                          capture_output=True, timeout=60)  # fmt: skip
    said = [line for line in done.stderr.splitlines() if line.endswith(("True", "False"))]
    assert said == ["--help 0 False", "--nosuch 2 False", f"{REFUSED[command][0]} 2 False"], done.stderr


@pytest.mark.parametrize("argv, said", [
    (["bench", "extra"], "hybrid-ep bench: unrecognized arguments: extra"),
    (["bench", "--op", "nope"], "hybrid-ep bench: argument --op: 'nope'"),
    (["report", "scaling", "--nope"], "hybrid-ep report scaling: unrecognized arguments: --nope"),
    (["nosuch"], "hybrid-ep: argument COMMAND: invalid choice: 'nosuch'"),
    ([], "hybrid-ep: the following arguments are required: COMMAND"),
])  # fmt: skip
def test_a_wrong_command_line_is_one_line_of_the_command_that_was_meant(argv, said, capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main(argv)
    error = capsys.readouterr().err
    assert stopped.value.code == cli.EXIT_USAGE
    assert error.startswith(said) and error.count("\n") == 1 and "--help" in error


def test_version_and_defaults_are_said_once(capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main(["--version"])
    assert stopped.value.code == 0 and capsys.readouterr().out == f"hybrid-ep {cli.__version__}\n"
    help_of_bench = " ".join(
        cli.build_parser("bench")._subparsers._group_actions[0].choices["bench"].format_help().split()
    )
    assert "(default: None)" not in help_of_bench and "(default: [])" not in help_of_bench
    assert "torch threads a rank (default: cores / ranks) -" not in help_of_bench  # no second default follows
    assert "0 = auto (default: 0)" in help_of_bench


@pytest.mark.parametrize("command", REFUSED)
def test_help_fits_the_columns_of_a_terminal(command, monkeypatch):
    """Also a flag with many names to choose from; they stand in its help, which breaks."""
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setitem(cli.COMMANDS, "launch", cli.Command("recipes.launch_command", "train a recipe"))
    parsers = [cli.build_parser(command)._subparsers._group_actions[0].choices[command]]
    for parser in parsers:
        for inner in parser._subparsers._group_actions if parser._subparsers else ():
            parsers += inner.choices.values()
        said = parser.format_help()
        assert max(map(len, said.splitlines())) <= 80, said
        if "--cluster" in said:
            assert "gb200_nvl72" in " ".join(said.split())


@pytest.mark.parametrize("columns", range(60, 140, 8))
def test_names_in_a_help_are_not_broken_at_hyphens(columns, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(columns))
    said = cli.build_parser("bench")._subparsers._group_actions[0].choices["bench"].format_help()
    assert {"hybrid-ep-blog,", "hybrid-ep-blog-h100-8,", "hybrid-ep-blog-gb200-36"} <= {*said.split()}


def test_little_is_imported_before_main_which_answers_ctrl_c():
    program = "import sys; old = {*sys.modules}; import hybrid_ep.cli; print(*{*sys.modules} - old)"
    done = subprocess.run([sys.executable, "-S", "-c", program], cwd=ROOT, text=True, capture_output=True, check=True,
                          timeout=60)  # fmt: skip
    found = {*done.stdout.split()}
    assert "hybrid_ep.cli" in found and not found & {"argparse", "importlib.metadata", "pathlib", "re"}, found


def test_ctrl_c_ends_with_one_line_and_130(monkeypatch, capsys):
    def interrupted(args, argv):
        raise KeyboardInterrupt

    monkeypatch.setattr("hybrid_ep.cli.simulate.command.run", interrupted)
    assert cli.main(["simulate"]) == cli.EXIT_INTERRUPTED
    assert capsys.readouterr().err == "hybrid-ep: interrupted\n"
