"""`hybrid-ep simulate` as a user meets it: what it prints and writes, and what it says to bad input."""

import json
import re
import sys
import warnings

import pytest

from hybrid_ep.cli import EXIT_OK, EXIT_USAGE, main
from hybrid_ep.cli.parser import Parser
from hybrid_ep.cli.simulate import command
from hybrid_ep.perf import events, recommend, trace

SMALL = [
    "simulate",
    "--cluster",
    "h100_8x400g",
    "--nodes",
    "2",
    "--ranks-per-node",
    "2",
    "--tokens",
    "128",
    "--hidden",
    "512",
    "--topk",
    "2",
    "--experts",
    "8",
    "--num-sms",
    "2",
]
ISSUE = [
    "simulate",
    "--cluster",
    "h100_8x400g",
    "--nodes",
    "8",
    "--tokens",
    "4096",
    "--hidden",
    "7168",
    "--topk",
    "8",
    "--experts",
    "256",
    "--num-sms",
    "8",
]


def test_ep64_report(capsys, tmp_path):
    assert main([*ISSUE, "--engine", "model", "--json", str(tmp_path / "out.json")]) == EXIT_OK
    text = capsys.readouterr().out
    for word in ("EP 64 (8 x 8)", "engine model", "binds: NIC", "physical", "logical", "suggested: --num-sms"):
        assert word in text
    document = json.loads((tmp_path / "out.json").read_text())
    dispatch = document["operations"]["dispatch"]
    assert dispatch["binds"] == "NIC" and dispatch["kernel_us"] > dispatch["bounds_us"]["NIC"] > 5000
    assert dispatch["physical_gb_per_s"]["rail"] < 50


def test_large_worlds_say_which_engine_and_why(capsys):
    assert main(ISSUE) == EXIT_OK
    text = capsys.readouterr().out
    assert "engine model (" in text and ("too many rows" in text or "core" in text)


def test_kernels_of_the_published_measurements(capsys, tmp_path):
    times = {}
    for kernels in ("ours", "published"):
        assert main([*SMALL, "--engine", "model", "--kernels", kernels, "--json", str(tmp_path / kernels)]) == EXIT_OK
        document = json.loads((tmp_path / kernels).read_text())
        assert f"# kernels {document['kernels']}: " in capsys.readouterr().out
        times[document["kernels"]] = document["operations"]["combine"]["kernel_us"]
    assert times["published_hybrid_ep"] != times["hybrid_ep"]
    assert main([*SMALL, "--kernels", "published"]) == EXIT_OK  # auto: no engine runs them
    assert "engine model (only this library's own kernels" in capsys.readouterr().out
    assert main([*SMALL, "--engine", "events", "--kernels", "published"]) == EXIT_USAGE
    assert main(["simulate", "--recommend", "mixtral_8x7b", "--gpus", "64", "--kernels", "published"]) == EXIT_USAGE


@pytest.mark.parametrize(
    "flags, ranks, experts",
    [
        (["--cluster", "gb200_nvl72"], 72, 288),
        (["--cluster", "gb300_nvl72"], 72, 288),
        (["--cluster", "gb200_nvl36"], 36, 288),
        (["--nodes", "64"], 512, 512),
        (["--nodes", "8"], 64, 256),
    ],
)
def test_experts_that_are_not_given_fit_the_ranks(flags, ranks, experts, capsys):
    assert main(["simulate", *flags, "--tokens", "64", "--engine", "model"]) == EXIT_OK
    said = capsys.readouterr().out
    assert f"topk 8/{experts} " in said
    assert (f"# --experts {experts}, not given: {ranks} ranks do not share 256 evenly\n" in said) == (experts != 256)


@pytest.mark.parametrize("engine", ["model", "auto"])
def test_trace(engine, capsys, tmp_path):
    path = tmp_path / "trace.json"
    assert main([*SMALL, "--engine", engine, "--trace", str(path)]) == EXIT_OK
    trace.check(json.loads(path.read_text()))
    assert "ui.perfetto.dev" in capsys.readouterr().out


@pytest.mark.skipif(events.missing() is not None, reason=str(events.missing()))
def test_small_worlds_are_simulated(capsys):
    assert main(SMALL) == EXIT_OK
    text = capsys.readouterr().out
    assert "engine events (every token of every rank)" in text and "(model " in text


def test_events_asked_for_where_there_are_none(monkeypatch, capsys):
    monkeypatch.setattr(events, "missing", lambda: "this build of the core has no simulator")
    assert main([*SMALL, "--engine", "events"]) == EXIT_USAGE
    assert "use --engine model" in capsys.readouterr().err
    assert main(SMALL) == EXIT_OK
    assert "engine model (this build of the core has no simulator)" in capsys.readouterr().out


def test_skewed_routing_and_load_files(capsys, tmp_path):
    assert main([*SMALL, "--engine", "model", "--routing", "zipf:1.2"]) == EXIT_OK
    assert "imbalance ratio 0.00" not in capsys.readouterr().out
    (tmp_path / "load.txt").write_text("\n".join(["9", *["1"] * 7]))
    assert main([*SMALL, "--engine", "model", "--load", str(tmp_path / "load.txt")]) == EXIT_OK
    assert "routing file:" in capsys.readouterr().out


def test_sweep_draws(capsys, tmp_path):
    pytest.importorskip("matplotlib")
    assert main([*SMALL, "--sweep", str(tmp_path / "plots"), "--json", str(tmp_path / "sweep.json")]) == EXIT_OK
    assert (tmp_path / "plots" / "sweep.png").read_bytes()[:4] == b"\x89PNG"
    sweeps = json.loads((tmp_path / "sweep.json").read_text())["sweeps"]
    by_sms = [p["dispatch_us"] for p in sweeps["num_sms"]]
    assert len(by_sms) > 5 and by_sms[0] > by_sms[3]
    assert [p["ranks"] for p in sweeps["ranks"]] == [2, 4, 8]


def test_sweep_without_matplotlib_names_the_extra(monkeypatch, capsys, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main([*SMALL, "--sweep", str(tmp_path)]) == EXIT_USAGE
    assert "hybrid_ep[bench]" in capsys.readouterr().err


def test_recommend(capsys, tmp_path):
    flags = ["simulate", "--recommend", "qwen3_30b_a3b", "--cluster", "gb200_nvl36", "--gpus", "32"]
    assert main([*flags, "--json", str(tmp_path / "plan.json")]) == EXIT_OK
    assert "tokens/s/GPU" in capsys.readouterr().out
    plans = json.loads((tmp_path / "plan.json").read_text())["plans"]
    assert len(plans) >= 3 and plans[0]["why"] and plans[0]["step_seconds"] == min(p["step_seconds"] for p in plans)


def test_sources(capsys):
    assert main(["simulate", "--sources", "--cluster", "gb200_nvl72"]) == EXIT_OK
    text = capsys.readouterr().out
    assert "fitted" in text and "datasheet" in text and "gpu.nvlink_gb_per_s" in text


@pytest.mark.parametrize(
    "flags, word",
    [
        (["--nodes", "0"], "--nodes 0"),
        (["--num-sms", "-1"], "--num-sms -1"),
        (["--num-sms", "500"], "--num-sms 500 must be in 1 .. 132"),
        (
            ["--experts", "7"],
            "--experts 7: must be a positive multiple of the 8 ranks of --nodes 1 --ranks-per-node 8; "
            "give --experts 8 or --ranks-per-node 7",
        ),
        (["--experts", "0"], "give --experts 8"),
        (["--experts", "256", "--cluster", "gb200_nvl72"], "give --experts 216, --experts 288 or --ranks-per-node 64"),
        (["--topk", "900"], "--topk 900 must be at most --experts 256"),
        (["--hidden", "3"], "--hidden 3 must"),
        (["--ranks-per-node", "9"], "NVLink domains of 8"),
        (["--hidden", "12"], "whole 16-byte units; give --hidden 8 or --hidden 16"),
        (["--tokens", "0"], "--tokens 0 must"),
        (["--routing", "hot"], "--routing hot: use"),
        (["--routing", "zipf:-1"], "--routing zipf:-1: "),
        (["--chunk", "0"], "--chunk 0 must"),
        (["--load", "/nowhere"], "--load /nowhere: does not exist"),
        (["--routing", "file:/nowhere"], "--routing file:/nowhere: does not exist"),
        (["--move", "auto", "--length-cv", "-1"], "--length-cv -1.0 must be at least 0"),
        (["--move", "auto", "--shortest", "2"], "--shortest 2.0 must be above 0"),
        (["--move", "auto", "--cluster", "gb200_nvl72"], "--ranks-per-node 72: must divide the 256 experts"),
        (["--path", "latency", "--num-sms", "200"], "--num-sms 200: must be at most 132, the SMs of an H100"),
        (["--seed", "-1", "--routing", "zipf:1"], "--seed: '-1' is not an integer from 0"),
        (["--trace", "/nowhere/t.json"], "no such folder"),
        (["--load", "x", "--routing", "zipf:1"], "one of them"),
        (["--recommend", "mixtral_8x7b"], "--gpus"),
        (["--recommend", "deepseek_v3", "--gpus", "64", "--ep", "48"], "--ep 48 must divide the 256 experts"),
        (["--recommend", "mixtral_8x7b", "--gpus", "32", "--ep", "16"], "; give --ep 8\n"),
        (["--recommend", "deepseek_v3", "--gpus", "0"], "--gpus 0: must be at least 1"),
        (["--recommend", "deepseek_v3", "--gpus", "8"], "give --gpus 256, the nearest that fit"),
        (["--recommend", "deepseek_v3", "--gpus", "99999"], "give --gpus 99968 or --gpus 100096, the nearest"),
        (["--recommend", "deepseek_v3", "--recompute", "moe,mpl"], "'mpl': use none, selective, full, or some of"),
        (["--trace", "/"], "--trace /: is a folder"),
        (["--sweep", __file__], "is a file; name a folder"),
        (["--ep", "64"], "--ep 64: only --recommend takes it, one exchange does not; leave it out"),
        (["--precision", "fp8"], "--precision fp8: only --recommend takes it"),
        (["--gpus", "64", "--sweep", "s"], "--gpus 64: only --recommend takes it, --sweep does not"),
        (["--sequences", "4"], "--sequences 4: only --move takes it"),
        (["--model", "mixtral_8x7b"], "--model mixtral_8x7b: only --move takes it"),
        (["--move", "auto", "--hidden", "7"], "only one exchange, --sweep and --path latency take it, --move does not"),
        (
            ["--recommend", "mixtral_8x7b", "--gpus", "64", "--trace", "t"],
            "--trace t: only one exchange and --move take",
        ),
        (["--recommend", "mixtral_8x7b", "--gpus", "64", "--nodes", "2"], "--nodes 2: only"),
        (["--recommend", "mixtral_8x7b", "--gpus", "64", "--num-sms", "8"], "give --ep too"),
        (["--recommend", "mixtral_8x7b", "--gpus", "64", "--sweep", "s"], "a question of its own; leave out --sweep"),
        (["--path", "latency", "--num-sms", "8", "--trace", "t"], "--path latency does not"),
        (["--sources", "--json", "-"], "--sources does not"),
        (["--sources", "--move", "auto"], "--sources: is a question of its own; leave out --move"),
        (["--sweep", "s", "--engine", "events"], "--engine events: --sweep asks the model"),
        (["--json", "nowhere.json", "--trace", "./nowhere.json"], "is where --json writes"),
    ],
)
def test_bad_input_is_one_sentence(flags, word, capsys):
    try:
        code = main(["simulate", *flags])
    except SystemExit as error:  # of the parser
        code = error.code
    assert code == EXIT_USAGE
    error = capsys.readouterr().err
    assert word in error and "Traceback" not in error and error.count("\n") == 1


def test_an_empty_load_file_is_one_sentence(capsys, tmp_path):
    (tmp_path / "load").write_text("# no number\n")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert main([*SMALL, "--load", str(tmp_path / "load")]) == EXIT_USAGE
    error = capsys.readouterr().err
    assert f"--load {tmp_path / 'load'}: is empty; give 8 numbers" in error and error.count("\n") == 1


def test_every_flag_says_to_which_question_it_belongs():
    parser = Parser()
    command.add_arguments(parser)
    flags = {max(action.option_strings, key=len) for action in parser._actions}
    assert flags == {"--help", "--cluster", *command.TAKERS, *command.QUESTIONS}
    assert not set(command.TAKERS) & set(command.QUESTIONS)


@pytest.mark.parametrize("gpus", [8, 99999])
@pytest.mark.parametrize("cluster", ["h100_8x400g", "gb200_nvl72"])
def test_the_numbers_of_gpus_that_an_error_names_fit(gpus, cluster, capsys, monkeypatch):
    asked = ["simulate", "--recommend", "deepseek_v3", "--cluster", cluster, "--gpus"]
    assert main([*asked, str(gpus)]) == EXIT_USAGE
    wrong, *named = re.findall(r"--gpus (\d+)", capsys.readouterr().err)
    assert named and wrong == str(gpus) not in named
    found = recommend.recommend
    monkeypatch.setattr(recommend, "recommend", lambda *a, **o: found(*a, **{**o, "watch": _first}))
    for number in named:
        assert main([*asked, number]) == EXIT_OK


def _first(layouts):
    """One layout is enough to see that there are some."""
    return list(layouts)[:1]
