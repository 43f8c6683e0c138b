"""`hybrid-ep report scaling`: tables from run folders and from the step model, marked which, and what is refused."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from hybrid_ep.cli import EXIT_OK, EXIT_USAGE, main, plotting
from hybrid_ep.cli.report.scaling import MODES, Row, split
from hybrid_ep.hardware import clusters
from hybrid_ep.perf import models, recommend
from hybrid_ep.perf.step_time import Job, step

yaml = pytest.importorskip("yaml")


def run_folder(root, name, ranks, local, tokens_a_step, step_s, memory=None, **changes):
    """A folder as recipes leave it: ten steps, the first two slow."""
    folder = root / name
    folder.mkdir()
    config = {
        "parallel": {"num_ranks": ranks, "ranks_per_node": local},
        "runtime": {"device": "cpu"},
        "model": {"hidden_size": 8, **changes},
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    lines = [{"step": 0, "held_out_loss": 5.5}]
    for i in range(1, 11):
        seconds = 9.0 if i < 3 else step_s
        lines.append({"step": i, "step_s": seconds, "tokens_per_s": tokens_a_step / seconds})
        if memory:
            lines[-1]["memory_bytes"] = memory + i
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / "metrics.jsonl").write_text(text + '{"step": 11, "st')  # a crash cut the last line short
    return str(folder)


def rows_of(out):
    return [line.split() for line in out.splitlines() if not line.startswith("#")]


def test_tables_from_runs(tmp_path, capsys):
    runs = [
        run_folder(tmp_path, "b4", 4, 2, 400, 1.25, memory=5 * 10**9),
        run_folder(tmp_path, "a2", 2, 2, 200, 1.0),
        run_folder(tmp_path, "c4", 4, 2, 200, 0.625),
        run_folder(tmp_path, "odd", 8, 2, 77, 1.0),
    ]
    out = tmp_path / "s.json"
    assert main(["report", "scaling", *runs, "--skip", "2", "--json", str(out)]) == EXIT_OK
    printed = capsys.readouterr().out
    for words in ("# MEASURED: 4 runs on cpu", "no claim about GPUs", "# odd keeps neither"):
        assert words in printed
    found = {(r["mode"], r["job"]): r for r in json.loads(out.read_text())["rows"]}
    assert set(found) == {("weak", "a2"), ("weak", "b4"), ("strong", "a2"), ("strong", "c4")}
    weak, strong = found["weak", "b4"], found["strong", "c4"]
    assert (weak["nodes"], weak["gpus"], weak["tokens_per_s"]) == (2, 4, 320.0)
    assert weak["efficiency"] == pytest.approx(0.8) and weak["speedup"] == pytest.approx(1.6)
    assert weak["tflops_per_gpu"] is None, "a run folder does not say what a token costs"
    assert weak["memory_bytes"] == 5 * 10**9 + 10 and found["weak", "a2"]["memory_bytes"] is None
    assert strong["efficiency"] == pytest.approx(0.8) and strong["speedup"] == pytest.approx(1.6)
    assert [r[0] for r in rows_of(printed)] == ["weak", "weak", "strong", "strong"] and "5.00" in printed


def test_one_run_alone_is_said(tmp_path, capsys):
    assert main(["report", "scaling", run_folder(tmp_path, "a", 2, 2, 200, 1.0)]) == EXIT_OK
    assert capsys.readouterr().out.count("# one job alone") == 2


def test_a_run_that_is_given_twice_counts_once(tmp_path, capsys):
    run = run_folder(tmp_path, "a", 2, 2, 200, 1.0)
    assert main(["report", "scaling", run, f"{run}/", run]) == EXIT_OK
    out = capsys.readouterr().out
    assert "# MEASURED: 1 run on cpu" in out and len(rows_of(out)) == 2
    assert "# 3 runs were given, 1 of them different: each counts once" in out


def test_repeated_sizes_stay_and_a_base_begins_both_tables():
    rows = [Row("x", 1, 4, 400, 1.0, None), Row("y", 1, 2, 200, 1.0, None), Row("z", 1, 4, 400, 1.1, None)]
    found, neither = split(rows)
    assert [r.name for r in found["weak"]] == ["y", "x", "z"] and not neither
    assert [r.name for r in found["strong"]] == ["y"]


def test_tables_from_the_simulator_are_the_step_model_s(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    out = tmp_path / "s.json"
    run = ["report", "scaling", "--simulate", "qwen3_30b_a3b", "--cluster", "b200_8x400g", "--gpus", "16,8,64",
           "--json", str(out), "--plot", str(tmp_path / "p")]  # fmt: skip
    assert main(run) == EXIT_OK
    printed = capsys.readouterr().out
    assert "# SIMULATED" in printed and (tmp_path / "p" / "scaling.png").exists()
    assert "simulated" in (tmp_path / "p" / "scaling.svg").read_text()
    document = json.loads(out.read_text())
    assert document["simulated"] is True
    by = {(r["mode"], r["gpus"]): r for r in document["rows"]}
    for mode, gpus, batches in (("weak", 64, 32), ("strong", 64, 4), ("strong", 8, 32)):
        model, cluster = models.get("qwen3_30b_a3b"), clusters.get("b200_8x400g")
        job = recommend.tuned(Job(model, cluster, gpus, 8, micro_batches=batches, cv_slow=0.034))
        assert by[mode, gpus]["step_s"] == step(job).seconds
        assert by[mode, gpus]["tokens_per_step"] == 4096 * batches * gpus
        assert by[mode, gpus]["tokens_per_s_per_gpu"] == pytest.approx(step(job).tokens_per_s_per_gpu, rel=1e-9)
        assert by[mode, gpus]["tflops_per_gpu"] == pytest.approx(step(job).tflops_per_gpu, rel=1e-9)
        assert f"{step(job).tflops_per_gpu:.0f}" in [
            line.split()[7] for line in printed.splitlines() if mode in line[:7]
        ]
    assert by["strong", 64]["efficiency"] < by["weak", 64]["efficiency"] < 1
    assert by["weak", 8]["memory_bytes"] > by["weak", 64]["memory_bytes"] > 0


HALF = ["report", "scaling", "--simulate", "deepseek_v3", "--gpus", "64,2048", "--ep", "64", "--tensor", "8"]


def test_a_job_that_fits_no_gpu_is_marked_and_not_drawn(tmp_path, capsys, monkeypatch):
    pytest.importorskip("matplotlib")
    out, drawn = tmp_path / "s.json", []
    monkeypatch.setattr(plotting, "save", lambda figure, _: drawn.append(figure) or [])
    asked = [*HALF, "--cluster", "b200_8x400g", "--precision", "mxfp8"]
    assert main([*asked, "--json", str(out), "--plot", str(tmp_path / "p")]) == EXIT_OK
    printed = capsys.readouterr().out
    assert max(map(len, printed.splitlines())) <= 120
    assert " domains " in printed and " nodes " not in printed
    said = " ".join(printed.replace("\n#", "").split())
    assert "deepseek_v3 does not fit 64 GPUs, for they take 2" in said
    fewest = int(re.search(r"TP 8 are (\d+): give --gpus \1 or more", said)[1])
    rows = json.loads(out.read_text())["rows"]
    assert [(r["gpus"], r["fits"]) for r in rows] == [(64, False), (2048, True)] * 2 and 64 < fewest <= 2048
    for row in rows:
        assert all((row[name] is None) != row["fits"] for name in ("step_s", "tokens_per_s", "speedup", "efficiency"))
        assert (row["memory_bytes"] <= 162e9) == row["fits"]
    marked = [words for words in rows_of(printed) if words[-3:] == ["does", "not", "fit"]]
    assert len(marked) == 2 and all(words[4:10] == ["-"] * 6 for words in marked)
    assert [list(line.get_xdata()) for line in drawn[0].axes[0].lines] == [[2048]] * 2, "one size has no ideal line"


@pytest.mark.parametrize("mode", ["weak", "strong", "both"])
@pytest.mark.parametrize("simulated", [True, False])
def test_every_mode_is_drawn_with_its_own_lines_alone(tmp_path, capsys, mode, simulated):
    pytest.importorskip("matplotlib")
    jobs = (
        ["--simulate", "qwen3_30b_a3b", "--cluster", "b200_8x400g", "--gpus", "8,16"]
        if simulated
        else [run_folder(tmp_path, "a2", 2, 2, 200, 1.0), run_folder(tmp_path, "b4", 4, 2, 400, 1.0)]
    )
    drawn = tmp_path / "pictures" / "scaling"
    assert main(["report", "scaling", *jobs, "--mode", mode, "--plot", str(drawn.parent)]) == EXIT_OK
    assert capsys.readouterr().out.count("# written: ") == 2 and drawn.with_suffix(".png").stat().st_size > 0
    svg = drawn.with_suffix(".svg").read_text()
    for other in MODES:
        assert (f"{other} scaling" in svg) == (mode in (other, "both"))


def test_a_picture_says_ranks_of_cpus_and_hides_no_line(tmp_path, monkeypatch, capsys):
    """Two runs with the same tokens a rank and in all would be one; here the picture is asked."""
    pytest.importorskip("matplotlib")
    kept = []
    monkeypatch.setattr(plotting, "save", lambda figure, stem: kept.append(figure.axes[0]) or [])
    jobs = [run_folder(tmp_path, "a2", 2, 2, 200, 1.0), run_folder(tmp_path, "b4", 4, 2, 400, 1.0)]
    assert main(["report", "scaling", *jobs, "--plot", str(tmp_path)]) == EXIT_OK
    assert main(["report", "scaling", jobs[0], "--plot", str(tmp_path)]) == EXIT_OK
    assert (
        main(["report", "scaling", "--simulate", "qwen3_30b_a3b", "--gpus", "32,64", "--plot", str(tmp_path)])
        == EXIT_OK
    )
    several, one, simulated = kept
    assert [panel.get_xlabel() for panel in kept] == ["ranks", "ranks", "GPUs"]
    weak, strong = several.lines[:2]
    assert weak.get_linewidth() > 2 * strong.get_linewidth() and weak.get_markersize() > strong.get_markersize() + 2
    assert weak.get_zorder() <= strong.get_zorder()
    told = [[text.get_text() for text in panel.get_legend().get_texts()] for panel in (several, one)]
    assert told == [["weak scaling", "strong scaling", "ideal"], ["weak scaling", "strong scaling"]]


@pytest.mark.parametrize(
    "flags, words",
    [
        ([], "give run folders"),
        (["x", "--simulate", "deepseek_v3"], "one of the two"),
        (["/nowhere"], "no run folder"),
        (["x", "--skip", "-1"], "--skip -1"),
        (["x", "--json", "/nowhere/x"], "no such folder"),
        (["x", "--cluster", "gb200_nvl72"], "--cluster gb200_nvl72: only --simulate takes it, a table of run folders"),
        (["x", "--ep", "4"], "--ep 4: only --simulate takes it"),
        (["x", "--gpus", "8,16"], "--gpus 8,16: only --simulate takes it"),
        (["--simulate", "qwen3_30b_a3b", "--skip", "2"], "--skip 2: only a table of run folders takes it"),
        (["--simulate", "qwen3_30b_a3b", "--gpus", "0"], "--gpus 0"),
        (["--simulate", "qwen3_30b_a3b", "--gpus", "64,8,64"], "--gpus 64,8,64: names 64 twice"),
        (["--simulate", "deepseek_v3", "--gpus", "8,16"], "--gpus 8,16: deepseek_v3 does not fit 8, 16 GPUs"),
        (["--simulate", "deepseek_v3", "--gpus", "8,16"], "give a larger --ep, --pp or --tensor"),
        (
            ["--simulate", "qwen3_30b_a3b", "--gpus", "8", "--ep", "8"],
            "with EP 8, PP 1 and TP 1 are 24: give --gpus 24",
        ),
        (
            ["--simulate", "qwen3_30b_a3b", "--gpus", "12"],
            "--gpus 12 must be a positive multiple of --ep 8 x --pp 1 = 8; give --gpus 8 or",
        ),
        (
            ["--simulate", "qwen3_30b_a3b", "--ep", "7"],
            "--ep 7 must divide the 128 experts of qwen3_30b_a3b; give --ep 4 or --ep 8",
        ),
        (["--simulate", "qwen3_30b_a3b", "--micro-batches", "0"], "--micro-batches 0"),
        (["--simulate", "qwen3_30b_a3b", "--num-sms", "-1"], "--num-sms -1: must be at least 0"),
        (["--simulate", "qwen3_30b_a3b", "--gpus", "8,1024", "--micro-batches", "32"], "give --micro-batches 128, or"),
        (["--simulate", "qwen3_30b_a3b", "--gpus", "64,96"], "96 GPUs for strong scaling; give --micro-batches 30 or"),
        (["--simulate", "qwen3_30b_a3b", "--gpus", "64", "--tensor", "7"], "give --tensor 4 or --tensor 8"),
        (["--simulate", "qwen3_30b_a3b", "--overlap", "2"], "--overlap 2.0 must be in 0 .. 1"),
        (["--simulate", "qwen3_30b_a3b", "--pipeline-layout", "xx"], "--pipeline-layout xx must have"),
    ],
)
def test_bad_input_costs_one_sentence(flags, words, capsys):
    assert main(["report", "scaling", *flags]) == EXIT_USAGE
    said = capsys.readouterr().err.strip()
    assert said.startswith("hybrid-ep report: ") and "\n" not in said and words in said


def test_the_documentation_names_the_columns():
    page = (Path(__file__).parents[3] / "docs" / "benchmark.md").read_text()
    columns = page.partition("\nColumns: ")[2].partition("From runs")[0]
    titles = (
        "domains",
        "GPUs",
        "tokens a step",
        "seconds",
        "tokens/s/GPU",
        "TFLOP/s",
        "speed-up",
        "efficiency",
        "memory",
    )
    assert [title for title in titles if title not in columns] == []


def test_runs_that_cannot_be_compared_are_named(tmp_path, capsys):
    one = run_folder(tmp_path, "a", 2, 2, 200, 1.0)
    other = run_folder(tmp_path, "b", 4, 2, 200, 1.0, hidden_size=16)
    assert main(["report", "scaling", one, other]) == EXIT_USAGE
    assert "model.hidden_size is 16" in capsys.readouterr().err
    assert main(["report", "scaling", one, "--skip", "9"]) == EXIT_USAGE
    assert "has 1 step after the 9" in capsys.readouterr().err
    (tmp_path / "b" / "config.yaml").write_text("- 1\n")
    assert main(["report", "scaling", other]) == EXIT_USAGE
    assert "its config.yaml is none of a run" in capsys.readouterr().err
    (tmp_path / "b" / "config.yaml").write_text("a: 1\nb: [1\n")
    assert main(["report", "scaling", other]) == EXIT_USAGE
    said = capsys.readouterr().err
    assert "config.yaml: not valid YAML (" in said and "line 3, column 1" in said and said.count("\n") == 1
    (tmp_path / "a" / "metrics.jsonl").unlink()
    assert main(["report", "scaling", one]) == EXIT_USAGE
    assert "no metrics.jsonl" in capsys.readouterr().err


def simulated(capsys, tmp_path, *flags):
    """(header, rows) of a small job."""
    asked = ["report", "scaling", "--simulate", "qwen3_30b_a3b", "--gpus", "64", "--mode", "weak", *flags]
    assert main([*asked, "--json", str(tmp_path / "s.json")]) == EXIT_OK
    return capsys.readouterr().out, json.loads((tmp_path / "s.json").read_text())["rows"]


def test_the_names_of_launch_are_understood(tmp_path, capsys):
    by = {flags: simulated(capsys, tmp_path, *flags.split()) for flags in (
        "--dispatcher a2a", "--dispatcher alltoall", "--recompute selective", "--recompute none",
        "--recompute mla_up_proj,moe", "--recompute moe", "--num-sms 0", "",
    )}  # fmt: skip
    assert by["--dispatcher a2a"] == by["--dispatcher alltoall"] and "  alltoall, bf16" in by["--dispatcher a2a"][0]
    for given, counted in (("selective", "none"), ("mla_up_proj,moe", "moe")):
        assert f"recompute {given} (time counted: {counted})" in by[f"--recompute {given}"][0]
        rows, others = (by[f"--recompute {words}"][1] for words in (given, counted))
        assert [row["step_s"] for row in rows] == [row["step_s"] for row in others]
        assert (rows[0]["memory_bytes"] < others[0]["memory_bytes"]) == (given == "selective")
    assert (
        by["--recompute moe"][1] != by[""][1] and by["--recompute selective"] == by[""] and by["--num-sms 0"] == by[""]
    )


@pytest.mark.parametrize(
    "flags, words",
    [
        (["--dispatcher", "allgather"], "allgather is known to CPU recipes of launch"),
        (["--dispatcher", "x"], "use one of hybrid_ep, published_hybrid_ep, node_dedup, alltoall, deepep_v1;"),
        (["--recompute", "some"], "'some': use none, selective, full, or some of core_attn,"),
    ],
)
def test_names_that_mean_nothing_here_say_where_they_do(flags, words, capsys):
    with pytest.raises(SystemExit):
        main(["report", "scaling", "--simulate", "deepseek_v3", *flags])
    said = capsys.readouterr().err
    assert words in said and said.count("\n") == 1
