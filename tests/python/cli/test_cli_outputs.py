"""--json and --plot mean the same in every command: FILE or - for stdout, a folder; checked before the work."""

from __future__ import annotations

import argparse
import io
import json
import sys

import pytest

from hybrid_ep import cli
from hybrid_ep.cli import EXIT_OK, UsageError, outputs, progress

RUNS = {
    "simulate": ["simulate", "--engine", "model", "--nodes", "2"],
    "bench": ["bench", "--backend", "sim", "--tokens", "64", "--experts", "64"],
    "report": ["report", "scaling", "--simulate", "qwen3_30b_a3b", "--gpus", "32,64"],
}


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


WRITERS = {
    "balance plan": ["balance", "plan", "nowhere.jsonl", "--ep", "2", "--num-slots", "4", "-o"],
    "tune": ["tune", "--backend", "sim", "-o"],
    "simulate --trace": ["simulate", "--trace"],
    "simulate --json": ["simulate", "--json"],
    "report": ["report", "scaling", "nowhere", "--json"],
    "bench": ["bench", "--json"],
}


@pytest.mark.parametrize("command", WRITERS)
def test_a_file_that_cannot_be_written_is_refused_before_the_work(command, tmp_path, capsys, monkeypatch):
    for place, words in ((tmp_path / "no" / "x", "no such folder; create it first"), (tmp_path, "is a folder; name a")):
        assert cli.main([*WRITERS[command], str(place)]) == cli.EXIT_USAGE
        said = capsys.readouterr().err
        assert f"{WRITERS[command][-1]} {place}: {words}" in said and said.count("\n") == 1
    monkeypatch.setattr(outputs.os, "access", lambda path, _: path != tmp_path)  # root may write everywhere
    assert cli.main([*WRITERS[command], str(tmp_path / "x")]) == cli.EXIT_FAILED
    assert capsys.readouterr().err == f"hybrid-ep: {tmp_path / 'x'}: Permission denied\n"


def test_what_is_no_name_of_a_file_or_folder_is_refused(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert cli.main(["simulate", "--json", ""]) == cli.EXIT_USAGE
    assert "--json '': is a folder; name a file in it" in capsys.readouterr().err
    assert cli.main(["simulate", "--sweep", str(tmp_path / "file" / "x")]) == cli.EXIT_USAGE
    assert f"{tmp_path / 'file'} is a file; name a folder that can be made" in capsys.readouterr().err


def test_folders_for_pictures_are_asked_for_too(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(outputs.os, "access", lambda path, _: path != tmp_path)
    assert cli.main(["simulate", "--sweep", str(tmp_path / "a" / "b")]) == cli.EXIT_FAILED
    assert cli.main(["balance", "report", "nowhere", "--plot", str(tmp_path / "p")]) == cli.EXIT_FAILED
    assert capsys.readouterr().err.count("Permission denied") == 2
    outputs.check_file("--json", "/dev/stdout")


def test_a_picture_s_file_still_works_where_it_did_with_a_warning(tmp_path, capsys):
    assert outputs.picture(str(tmp_path / "old.png"), "scaling") == tmp_path / "old"
    assert "still works, write --plot FOLDER" in capsys.readouterr().err
    assert outputs.picture(str(tmp_path / "new"), "scaling") == tmp_path / "new" / "scaling"
    assert (tmp_path / "new").is_dir() and capsys.readouterr().err == ""
    (tmp_path / "old.png").write_text("")
    outputs.check(argparse.Namespace(plot=str(tmp_path / "old.png")), picture_files=True)
    with pytest.raises(UsageError, match="is a file"):
        outputs.check(argparse.Namespace(plot=str(tmp_path / "old.png")))


# One name may mean two things only where another tool's word is kept: --nodes of launch is Slurm's, hosts.
KINDS_MAY_DIFFER = {"--nodes": {"launch"}}


def flags_of_every_command(monkeypatch):
    """{flag: {command: (type without "list of", metavar, unit words of the help's start)}}."""
    monkeypatch.setitem(cli.COMMANDS, "launch", cli.Command("recipes.launch_command", "train a recipe"))
    found: dict[str, dict[str, tuple]] = {}

    def walk(parser, name):
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction):
                for inner, sub in action.choices.items():
                    walk(sub, f"{name} {inner}")
            for flag in action.option_strings:
                kind = getattr(action.type, "__name__", "str").replace("int_list", "int")
                found.setdefault(flag, {})[name] = (kind, action.metavar, action.help or "")

    for command in cli.COMMANDS:
        walk(cli.build_parser(command)._subparsers._group_actions[0].choices[command], command)
    return found


def test_a_flag_is_the_same_thing_in_every_command_that_has_it(monkeypatch):
    found = flags_of_every_command(monkeypatch)
    for flag, by_command in found.items():
        if flag not in ("-h", "--help"):
            alike = {c: k[:2] for c, k in by_command.items() if c.split()[0] not in KINDS_MAY_DIFFER.get(flag, ())}
            assert len(set(alike.values())) == 1, f"{flag}: {alike}"
    assert len(found["--plot"]) >= 3 and len(found["--json"]) >= 4 and len(found["--cluster"]) >= 5
    for one_thing in (
        ("--ep", "--ep-size"),
        ("--experts", "--num-experts"),
        ("--chunk", "--chunks"),
        ("--out", "--output"),
        ("--nodes", "--num-nodes"),
    ):
        assert len(set(one_thing) & set(found)) == 1, f"two names of one thing: {one_thing}"


def test_hardware_has_the_same_names_everywhere():
    from hybrid_ep.hardware import clusters
    from recipes.hardware import HARDWARE

    assert set(HARDWARE) <= set(clusters.CLUSTERS)


@pytest.mark.parametrize("command", ["simulate", "bench", "tune", "report scaling", "launch"])
def test_every_command_takes_the_same_names_of_clusters(command, monkeypatch, capsys):
    monkeypatch.setitem(cli.COMMANDS, "launch", cli.Command("recipes.launch_command", "train a recipe"))
    words = command.split()
    parser = cli.build_parser(words[0])
    for name in ("gb200_nvl36", "b200_8x400g"):
        assert parser.parse_args([*words, "--cluster", name]).cluster == name
    assert capsys.readouterr().err == ""
    assert parser.parse_args([*words, "--cluster", "b200_8"]).cluster == "b200_8x400g"
    assert "warning: --cluster b200_8 still works, write --cluster b200_8x400g" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        parser.parse_args([*words, "--cluster", "abacus"])
    assert "invalid choice: 'abacus'" in capsys.readouterr().err


@pytest.mark.parametrize(
    "argv, old, new",
    [
        (["balance", "report", "nowhere", "--ep-size", "4"], "balance report --ep-size", "--ep"),
        (["tune", "--backend", "sim", "--chunks=0"], "tune --chunks", "--chunk"),
        (
            ["balance", "plan", "nowhere", "--ep", "4", "--num-slots", "8", "-o", "p.yaml", "--num-nodes", "2"],
            "balance plan --num-nodes",
            "--nodes",
        ),
    ],
)
def test_flags_by_their_old_names_work_with_a_warning(argv, old, new, capsys):
    assert cli.main(argv) == cli.EXIT_USAGE  # for what is wrong with their values
    said = capsys.readouterr().err
    assert f"warning: {old} still works, write {new} from now on" in said and "unrecognized" not in said


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_progress_is_a_bar_on_a_terminal_and_nothing_elsewhere(monkeypatch):
    pytest.importorskip("rich")
    for stream, shown in ((Terminal(), True), (io.StringIO(), False)):
        monkeypatch.setattr("sys.stderr", stream)
        assert list(progress.track(range(5), "layouts")) == [0, 1, 2, 3, 4]
        progress.say("more")
        assert ("layouts" in stream.getvalue() and "5/5" in stream.getvalue()) == shown == ("more" in stream.getvalue())


@pytest.fixture
def clock(monkeypatch):
    """clock(items, seconds): the items, each of which takes as long as said."""
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])

    def each(watched, seconds):
        for _, takes in zip(watched, seconds, strict=True):
            now[0] += takes

    return each


@pytest.mark.parametrize("seconds, said", [
    ([2.0, *[0.25] * 40], "hybrid-ep: layouts: 5 of 41 done in 3 s; at this pace 9 s more\n"),
    ([0.5] * 1000, "hybrid-ep: layouts: 20 of 1000 done in 10 s; at this pace 490 s more\n"),
    ([2.0, *[0.01] * 99], ""),  # the first alone is slow
    ([6.0, 6.0], "hybrid-ep: layouts: 1 of 2 done in 6 s; at this pace 6 s more\n"),
    ([0.1, 9.0], ""),  # and now it is too late
])  # fmt: skip
def test_what_takes_long_is_one_line_where_there_is_no_terminal(seconds, said, clock, monkeypatch):
    monkeypatch.setattr("sys.stderr", stream := io.StringIO())
    clock(progress.track(seconds, "layouts"), seconds)
    assert stream.getvalue() == said
    progress.say("simulating, 4 s", 4.0)
    progress.say("simulating, 6 s", 6.0)
    assert stream.getvalue() == said + "hybrid-ep: simulating, 6 s\n"


def test_a_bar_is_drawn_five_times_a_second_at_most(clock, monkeypatch):
    pytest.importorskip("rich")
    monkeypatch.setattr("sys.stderr", stream := Terminal())
    seconds = [0.01] * 300
    clock(progress.track(seconds, "layouts"), seconds)
    assert 10 <= stream.getvalue().count("layouts") <= 3.0 / 0.2 + 2  # the first and the last besides


def test_without_rich_the_bar_is_said_to_be_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "rich.console", None)
    monkeypatch.setattr("sys.stderr", stream := Terminal())
    assert list(progress.track("ab", "layouts")) == ["a", "b"]
    assert "2 to do" in stream.getvalue() and "pip install 'hybrid_ep[bench]'" in stream.getvalue()


def test_one_is_no_plural():
    assert [outputs.count(n, "node") for n in (0, 1, 2)] == ["0 nodes", "1 node", "2 nodes"]


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


def test_a_rate_below_two_decimals_has_its_first_digit():
    from hybrid_ep.cli.bench import report

    row = report.Row(4, 0, "pair", "hybrid_ep", 64, *[9.0] * 6, 0.0, 0.0043, 0.000071, 0.094, 0.095, 1.0, 1, 1, 0)
    assert report.row_line(row).split()[-7:-2] == ["0.00", "0.004", "7e-05", "0.09", "0.10"]


def test_peers_come_with_the_packages_and_not_from_a_folder_of_the_sources(monkeypatch, tmp_path):
    """As from a wheel: another folder is the current one, and the module is found by its name."""
    from hybrid_ep.cli.bench import plugins

    monkeypatch.chdir(tmp_path)
    assert "recipes.bench_peer_megatron" in plugins.find_plugins()
    assert [peer.name for peer in plugins.load_plugin("recipes.bench_peer_megatron")] == ["megatron-alltoall"]


def test_long_prose_is_broken_and_commands_are_not():
    prose = "step time: " + "assumes much, " * 20 + "--set a=1"
    said = outputs.narrowed(f"{prose}\n# {prose}\nthe same: hybrid-ep {'--flag x ' * 30}\nshort").splitlines()
    assert said[-2].count("--flag x") == 30 and said[-1] == "short"
    assert max(map(len, said[:-2])) <= outputs.WIDTH and [s[:2] for s in said[:2]] == ["st", "  "]
    assert " ".join(line.removeprefix("#").strip() for line in said[:-2]) == f"{prose} {prose}"
    for width in range(90, 130):
        for kept in ("--set a=1", "git clone https://x.y/z", "pip install --no-build-isolation 'a[b]'"):
            assert kept in outputs.narrowed("y" * width + f" {kept}, or words")
    said = outputs.narrowed("# prose of hybrid-ep launch " + "words " * 30 + f"\n  in {prose}").splitlines()
    assert max(map(len, said)) <= outputs.WIDTH and [line[:4] for line in said] == [
        "# pr",
        "#   ",
        "  in",
        *["    "] * 2,
    ]
    assert outputs.narrowed("x " * 90, "@ ").splitlines()[1].startswith("@ x x")
