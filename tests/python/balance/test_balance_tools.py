"""Statistics formats, the report, placement files, the command and the committed experiment."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from hybrid_ep.balance import collector, loads, plan_file, report, sources, statistics
from hybrid_ep.cli import main

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def stats():
    """6 iterations from 100 on, layers 3 to 6, 16 experts."""
    rng = np.random.default_rng(0)
    share = loads.popularity(rng, 4, 16, "lognormal", 1.0)
    counts = np.stack([np.stack([rng.multinomial(5000, row) for row in share]) for _ in range(6)])
    return statistics.LoadStatistics(counts, tuple(range(100, 106)), (3, 4, 5, 6))


def same(a, b):
    return (a.counts == b.counts).all() and a.iterations == b.iterations and a.layers == b.layers


def test_jsonl_round_trip(stats, tmp_path):
    statistics.save_jsonl(tmp_path / "s.jsonl", stats)
    assert same(statistics.load(tmp_path / "s.jsonl"), stats)


def test_tensorrt_round_trip_and_sum_over_ranks(stats, tmp_path):
    pytest.importorskip("safetensors")
    half = statistics.LoadStatistics(stats.counts // 2, stats.iterations, stats.layers)
    rest = statistics.LoadStatistics(stats.counts - stats.counts // 2, stats.iterations, stats.layers)
    statistics.save_tensorrt(tmp_path, half, topk=4, rank=0)
    statistics.save_tensorrt(tmp_path, rest, topk=4, rank=1)
    assert same(statistics.load(tmp_path), stats)
    (tmp_path / "meta_info.json").write_text('{"num_experts": 8}')
    with pytest.raises(ValueError, match="8 experts"):
        statistics.load(tmp_path)


def test_megatron_trace_is_counted(tmp_path):
    lines = [{"step": 7, "layer": 1, "rank": r, "top_indices": [[r, 2], [0, -1]]} for r in (0, 1)]
    (tmp_path / "t.jsonl").write_text("\n".join(map(json.dumps, lines)))
    read = statistics.load(tmp_path / "t.jsonl", num_experts=4)
    assert read.counts.tolist() == [[[3, 1, 2, 0]]] and read.iterations == (7,) and read.layers == (1,)
    assert statistics.load(tmp_path / "t.jsonl").counts.shape[2] == 3
    with pytest.raises(ValueError, match="num_experts"):
        statistics.load(tmp_path / "t.jsonl", num_experts=2)


def test_metrics_of_a_run_are_read(tmp_path):
    lines = [{"step": 0, "held_out_loss": 5.0}, {"step": 1, "train_loss": 5.0, "expert_load": [[1, 2], [3, 0]]}]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
    read = statistics.load(tmp_path / "metrics.jsonl")
    assert read.counts.tolist() == [[[1, 2], [3, 0]]] and read.iterations == (1,) and read.layers == (1, 2)


def test_ranks_that_nobody_gave_are_those_of_the_run_or_said_to_be_assumed(tmp_path, capsys):
    """Sixteen experts of a run with four ranks: without --ep the report was of 16 ranks, and said nothing."""
    pytest.importorskip("yaml")
    file = tmp_path / "metrics.jsonl"
    file.write_text(json.dumps({"step": 1, "expert_load": [[40, *range(15)]]}))

    def said(*flags):
        code = main(["balance", "report", str(file), *flags])
        printed = capsys.readouterr()
        return code, printed.out.partition(";")[0] + printed.err

    assumed = "16 ranks (one expert a rank is assumed"
    assert assumed in said()[1]
    code, error = said("--layout", "tensorrt")
    assert code == 0 and "hybrid-ep: 16 ranks: one expert a rank is assumed; --ep gives" in error
    config = tmp_path / "config.yaml"
    config.write_text("parallel: {num_ranks: 8, expert_parallel_size: 4}")
    assert f"16 experts, 4 ranks (parallel.expert_parallel_size of {config})" in " ".join(said()[1].split())
    assert main(["balance", "report", str(tmp_path)]) == 0, "a run's folder is as good as its metrics"
    assert "4 ranks (parallel.expert_parallel_size of" in " ".join(capsys.readouterr().out.split())
    assert said("--ep", "2") == (0, "1 iteration, 1 layer, 16 experts, 2 ranks")
    config.write_text("parallel: {}")
    assert said() == (2, f"hybrid-ep balance: {config}: says no parallel.expert_parallel_size; give --ep\n")


def collected(path, first, last, run, said):
    """A collector that has seen iterations `run`: in iteration i, i tokens for expert 0 and one for expert 1."""
    c = collector.LoadCollector(path, first, last, topk=1, say=said.append)
    for i in run:
        c.begin(i)
        routing_map = torch.zeros(i + 1, 3, dtype=torch.bool)
        routing_map[:i, 0] = routing_map[i, 1] = True
        c.add(4, routing_map[: i // 2])
        c.add(4, routing_map[i // 2 :])
        c.end()
    return c


def test_collector_keeps_to_its_range(tmp_path):
    said, path = [], tmp_path / "s.jsonl"
    collected(path, 3, 5, [1, 2, 3, 4, 4, 5, 6], said).close("the run ended")  # 4 was repeated: counted once
    read = statistics.load(path)
    assert read.iterations == (3, 4, 5) and read.layers == (4,)
    assert read.counts[:, 0].tolist() == [[3, 1, 0], [4, 1, 0], [5, 1, 0]]
    assert len(said) == 1 and "iterations 3-5 (1 layers, 3 experts, 1 ranks)" in said[0]
    # Iterations that pass over the last one end the range too; the earlier file is kept.
    collected(path, 3, 5, [4, 7], said)
    assert statistics.load(path).iterations == (4,) and "is of an earlier run" in said[1]
    assert sources.load(path, 3).tolist() == [[4, 1, 0]]
    assert statistics.load(tmp_path / "s.jsonl.1").iterations == (3, 4, 5)


def test_collector_that_ends_early_and_parts_that_differ(tmp_path):
    said, path = [], tmp_path / "s.jsonl"
    c = collected(path, 3, 5, [3, 4], said)
    c.begin(5)  # never completed
    c.add(4, torch.ones(9, 3, dtype=torch.bool))
    c.close("SIGTERM")
    c.close("again")
    assert said == [
        f"SIGTERM: expert loads of iterations 3-4 of 3-5, rank 0 of 1, are in "
        f"{tmp_path}/s.jsonl.parts/rank0of1.jsonl; read {path}"
    ]
    part = statistics.parts_folder(path) / "rank0of1.jsonl"
    assert statistics.load(path).counts.tolist() == [[[3, 1, 0]], [[4, 1, 0]]]
    lines = part.read_text().splitlines()
    part.unlink()
    (part.parent / "rank0of2.jsonl").write_text("\n".join(lines))
    (part.parent / "rank1of2.jsonl").write_text(lines[0])  # this rank had not completed iteration 4
    with pytest.warns(UserWarning, match=r"iterations \[4\] are not in the files of all ranks"):
        assert statistics.load(path).counts.tolist() == [[[6, 2, 0]]]
    idle = collected(path, 3, 5, [1, 2], said)
    idle.close("the run ended")
    assert len(said) == 1


@pytest.mark.parametrize("first, last", [(5, 3), (-1, 3), (0, 10_000)])
def test_collector_refuses_ranges(tmp_path, first, last):
    with pytest.raises(ValueError, match=f"iterations {first}-{last}"):
        collector.LoadCollector(tmp_path / "s.jsonl", first, last, topk=1)


@pytest.mark.parametrize(
    "text, message",
    [
        ("", "no expert counts"),
        ("{}", ":1:"),
        ("nonsense", ":1:"),
        ('{"iteration":1,"layer":0,"counts":[1,-2]}', "whole numbers"),
        ('{"iteration":1,"layer":0,"counts":[1]}\n{"iteration":1,"layer":1,"counts":[1,2]}', "experts"),
        ('{"iteration":1,"layer":0,"counts":[1]}\n{"iteration":2,"layer":1,"counts":[1]}', "lacks layer"),
        ('{"iteration":1,"layer":0,"counts":[1e30]}', "counts of iteration 1, layer 0 .* from 0 to 281474976710656"),
        ('{"iteration":1,"layer":0,"counts":[18446744073709551615]}', "whole numbers from 0 to"),
        ('{"iteration":1,"layer":0,"counts":[1e999]}', "whole numbers"),
        ('{"iteration":1,"layer":0,"counts":[]}', "are of no expert"),
        ('{"iteration":1.5,"layer":0,"counts":[1]}', "s.jsonl: iteration is 1.5: give an integer"),
        ('{"iteration":1,"layer":"3","counts":[1]}', "s.jsonl: layer is '3': give an integer"),
        (
            '{"step":1,"layer":0,"rank":0,"top_indices":[[99999999999]]}',
            "s.jsonl:1: names expert 99999999999, but there",
        ),
        ('{"step":1,"layer":0,"rank":0,"top_indices":[[1.5]]}', "s.jsonl:1: top_indices are float64"),
        ('{"step":1,"layer":0,"rank":0,"top_indices":[[-1]]}', r"no token chose an expert: give num_experts \(--exp"),
    ],
)
def test_bad_statistics_are_named(tmp_path, text, message):
    (tmp_path / "s.jsonl").write_text(text)
    with pytest.raises(ValueError, match=message):
        statistics.load(tmp_path / "s.jsonl")


def test_counts_whose_sum_no_integer_holds_are_refused():
    with pytest.raises(ValueError, match="s: counts add up to 4.76e"):
        statistics.from_records([(i, 0, np.full(512, 2**48)) for i in range(33)], "s")


def test_ranges(stats):
    assert statistics.parse_range("100-200") == (100, 200) and statistics.parse_range("7") == (7, 7)
    for bad in ("x", "5-3", "-1", "1-", ""):
        with pytest.raises(ValueError, match="range"):
            statistics.parse_range(bad)
    assert stats.between(101, 103).iterations == (101, 102, 103)
    with pytest.raises(ValueError, match="hold 100 to 105"):
        stats.between(7, 9)


def test_report_by_hand():
    """Two iterations; ratios per iteration, then averaged: rank loads (6, 2) and (4, 4) -> (0.5 + 0) / 2."""
    stats = statistics.LoadStatistics(np.array([[[4, 2, 1, 1]], [[2, 2, 2, 2]]]), (1, 2), (0,))
    row = report.report(stats, 2)[0]
    assert (row.mean, row.by_rank, row.by_slot) == (4.0, 0.25, 0.5)
    assert row.std == 1.0
    # A replica of expert 0 on both ranks: slots 2 2 1 | 2 1 0 in the first iteration.
    row = report.report(stats, 2, np.array([[0, 1, 2, 0, 3, 3]]))[0]
    assert row.by_rank == pytest.approx(((2 + 2 + 1) / 4 - 1 + (1 + 2 + 2) / 4 - 1) / 2)


def test_report_command(stats, tmp_path, capsys):
    statistics.save_jsonl(tmp_path / "s.jsonl", stats)
    plot = tmp_path / "pictures"
    assert (
        main(
            [
                "balance",
                "report",
                str(tmp_path / "s.jsonl"),
                "--ep",
                "4",
                "--spare-slots",
                "1",
                "--between",
                "101-104",
                "--plot",
                str(plot),
                "--per-expert",
            ]
        )
        == 0
    )
    out = capsys.readouterr().out
    assert f"# written: {plot / 'balance.png'}" in out
    assert "4 iterations, 4 layers, 16 experts, 4 ranks" in out and "| average |" in out and "layer 6:" in out
    assert (plot / "balance.png").read_bytes().startswith(b"\x89PNG")
    assert "<svg" in (plot / "balance.svg").read_text()
    rows = report.report(stats, 4, spare_slots=1)
    assert all(r.exact <= r.by_rank for r in rows) and rows[0].exact < 0.2


def test_plan_command_and_projection(stats, tmp_path, capsys):
    pytest.importorskip("yaml")
    source, plan = tmp_path / "s.jsonl", tmp_path / "plan.yaml"
    statistics.save_jsonl(source, stats)
    assert (
        main(
            [
                "balance",
                "plan",
                str(source),
                "--ep",
                "4",
                "--num-slots",
                "20",
                "-o",
                str(plan),
                "--layer-updates-per-iter",
                "2",
            ]
        )
        == 0
    )
    import yaml

    said = " ".join(capsys.readouterr().out.split())
    assert "slots changed" not in said, "nothing was in force"
    assert "imbalance by rank of loads summed over 6 iterations: " in said and "their mean imbalance" in said
    content = yaml.safe_load(plan.read_text())
    assert content["num_slots"] == 20 and content["layer_updates_per_iter"] == 2
    assert sorted(content["initial_global_assignments"]) == [3, 4, 5, 6]
    phy2log, layers = plan_file.load(plan)
    assert layers == (3, 4, 5, 6) and all(set(row) == set(range(16)) for row in phy2log.tolist())
    before = report.average(report.report(stats, 4)).by_rank
    after = report.average(report.report(stats, 4, phy2log)).by_rank
    assert after < before / 4
    capsys.readouterr()
    assert main(["balance", "report", str(source), "--ep", "4", "--plan", str(plan)]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert f"{after:.3f}" in said and f", projected onto the placement of {plan}; imbalance" in said
    assert "| mean imbalance by rank |" in said
    assert main(["balance", "report", str(source), "--ep", "4", "--plan", str(plan), "--layout", "tensorrt"]) == 0
    assert f"projected onto the placement of {plan}" in capsys.readouterr().err
    again = tmp_path / "again.yaml"
    assert (
        main(
            ["balance", "plan", str(source), "--ep", "4", "--num-slots", "20", "-o", str(again), "--current", str(plan)]
        )
        == 0
    )
    assert "slots changed: 0" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["report", "nowhere"], "no such file"),
        (["report", "."], "is no folder of statistics: it has neither rank*of*.jsonl"),
        (["report", "PNG"], "PNG: is no text; give JSONL of counts"),
        (["report", "S", "--ep", "5"], "--ep 5: must be 1 or more and divide the 16 experts"),
        (["report", "S", "--between", "b"], "range"),
        (["report", "S", "--plan", "nowhere"], "--plan nowhere: no such file"),
        (["report", "S", "--plan", "PNG"], "PNG: not a placement file (no text); hybrid-ep balance plan writes"),
        (["report", "S", "--plan", "FEWER"], "FEWER: its experts are not the 16 of the statistics; plan these"),
        (["report", "S", "--plan", "MANY", "--ep", "3"], "--ep 3: must be 1 or more and divide the 16 slots of --plan"),
        (["report", "S", "--plan", "EMPTY"], "EMPTY: not a placement file (no initial_global_assignments); hybrid"),
        (
            ["plan", "S", "--ep", "4", "--num-slots", "15", "-o", "x"],
            "--num-slots 15: must be a multiple of --ep 4 from",
        ),
        (["plan", "S", "--ep", "4", "--num-slots", "12", "-o", "x"], "from 16 to 64, which is one slot of each of 16"),
        (["plan", "S", "--ep", "4", "--num-slots", "68", "-o", "x"], "--num-slots 68: must be a multiple"),
        (["plan", "S", "--ep", "0", "--num-slots", "16", "-o", "x"], "--ep 0: must be 1 or more"),
        (
            ["plan", "S", "--ep", "4", "--num-slots", "16", "--nodes", "3", "-o", "x"],
            "--nodes 3: must be 1 or more and",
        ),
        (
            ["plan", "S", "--ep", "4", "--num-slots", "16", "--num-groups", "3", "-o", "x"],
            "--num-groups 3: must be 1 or more and divide the 16 experts",
        ),
        (
            ["plan", "S", "--ep", "4", "--num-slots", "40", "--num-groups", "4", "--nodes", "2", "-o", "x"],
            "--num-slots 40: must be a multiple of --ep 4 from 16 to 32",
        ),
        (["plan", "S", "--ep", "4", "--num-slots", "20", "-o", "x", "--layer-updates-per-iter", "-1"], "updates"),
    ],
)
def test_bad_usage_is_one_line(stats, tmp_path, capsys, arguments, message):
    statistics.save_jsonl(tmp_path / "S", stats)
    (tmp_path / "PNG").write_bytes(b"\x89PNG\r\n")
    (tmp_path / "EMPTY").touch()
    for name, experts in (("FEWER", 8), ("MANY", 16)):
        plan_file.save(tmp_path / name, np.tile(np.arange(16) % experts, (4, 1)), stats.layers)
    arguments = [str(tmp_path / a) if a.isupper() else a for a in arguments]
    assert main(["balance", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_a_plan_of_loads_without_tokens_has_no_imbalance(tmp_path, capsys):
    pytest.importorskip("yaml")
    (tmp_path / "s.jsonl").write_text('{"iteration":1,"layer":0,"counts":[0,0,0,0]}')
    plan = str(tmp_path / "plan.yaml")
    assert main(["balance", "plan", str(tmp_path / "s.jsonl"), "--ep", "2", "--num-slots", "4", "-o", plan]) == 0
    assert "by slot at least 0.000 in the worst layer" in capsys.readouterr().out


@pytest.mark.parametrize(
    "text, said",
    [
        ('{"num_slots": 4', "expected ',' or '}', but got '<stream end>', line 1, column 16"),
        ("num_slots: 2\n  x: [1\n", "mapping values are not allowed here, line 2, column 4"),
        ("num_slots: 2\n\x01", "special characters are not allowed, line 2, column 1"),
    ],
)
def test_a_broken_plan_is_one_line_that_says_where(stats, tmp_path, capsys, text, said):
    pytest.importorskip("yaml")
    statistics.save_jsonl(tmp_path / "s.jsonl", stats)
    plan = tmp_path / "plan.yaml"
    plan.write_text(text)
    assert main(["balance", "report", str(tmp_path / "s.jsonl"), "--ep", "4", "--plan", str(plan)]) == 2
    told = f"hybrid-ep balance: --plan {plan}: not a placement file ({said}); hybrid-ep balance plan writes them\n"
    assert capsys.readouterr().err == told


def test_scripts_with_the_names_users_know(stats, tmp_path):
    pytest.importorskip("safetensors")
    statistics.save_tensorrt(tmp_path / "stats", stats, topk=4)
    common = ["--expert_statistic_path", str(tmp_path / "stats"), "--ep_size", "4", "--iter_start", "100"]
    plan = str(tmp_path / "plan.yaml")
    for script, extra in (
        ("generate_eplb_config", ["--output_path", plan, "--num_slots", "20"]),
        ("report_load_statistics", ["--projection_eplb_config_path", plan, "--iter_stop", "103"]),
    ):
        done = subprocess.run(
            [sys.executable, str(ROOT / "scripts" / f"{script}.py"), *common, *extra],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
            env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"},
        )
        assert done.returncode == 0, done.stderr
    assert "Load statistics:" in done.stdout and "average" in done.stdout.splitlines()[-1]


def test_experiment_shows_the_published_effect():
    """No balancing far off, a placement from the past near the noise floor, exact far below it."""
    module = runpy.run_path(str(ROOT / "scripts" / "experiment_balance.py"))
    arguments = type("A", (), dict(layers=6, iterations=16, sigma=1.12, delta=0.1, seed=1))
    rows = {(r["case"], r["ranks"]): r for r in module["run"](arguments)}
    floor = rows["no balancing", 32]["noise_floor"]
    assert 0.06 < floor < 0.07
    assert rows["no balancing", 32]["by_rank"] > 1.2
    static = [r["by_rank"] for (case, _), r in rows.items() if case.startswith("288 slots, planned")]
    assert len(static) == 2 and all(floor < v < 0.16 for v in static)
    assert rows["exact, 1 spare slot (288)", 32]["by_rank"] < 0.011
