"""`launch`, `simulate --recommend` and `report scaling` say the same of one job; launch shows what it beats."""

from __future__ import annotations

import json
import re
import shlex

import pytest

from hybrid_ep import cli
from hybrid_ep.perf import recommend, step_time
from recipes import CLUSTER_RECIPES, cluster_summary, memory
from recipes.hardware import HARDWARE

VARIANTS = [(name, hardware) for name in CLUSTER_RECIPES for hardware in HARDWARE]


def reported(line, tmp_path):
    """The first row of the report that a printed `hybrid-ep report scaling ...` asks for."""
    return answered(line, "report scaling", tmp_path)["rows"][0]


def answered(line, verb, tmp_path):
    """The document of the command that stands in a line."""
    words = shlex.split(line[line.index("hybrid-ep ") :])
    assert " ".join(words[1:]).startswith(verb)
    assert cli.main([*words[1:], "--json", str(tmp_path / "r.json")]) == 0
    return json.loads((tmp_path / "r.json").read_text())


A_PLAN = recommend.Plan(8, 1, 8, 24, 16, "bf16", "tokens", 1.0, 1.0, 1000.0, 1.0, "")


def line_of(said, start):
    (line,) = [x for x in said.splitlines() if x.startswith(start)]
    return line


@pytest.mark.parametrize("name, hardware", VARIANTS)
def test_launch_report_and_recommend_agree(name, hardware, tmp_path, capsys, monkeypatch):
    """Of --recommend the row "yours"; the search for better plans, which takes seconds, is left out."""
    monkeypatch.setattr(recommend, "recommend", lambda *_, **__: [A_PLAN])
    run = CLUSTER_RECIPES[name](hardware)
    said = cluster_summary.predict(run)
    row = reported(line_of(said, "the same by another verb: "), tmp_path)
    yours = answered(line_of(said, "among other layouts: "), "simulate --recommend", tmp_path)["yours"]
    assert yours["step_s"] == row["step_s"] and yours["tokens_per_s_per_gpu"] == row["tokens_per_s_per_gpu"]
    assert row["fits"] and row["memory_bytes"] == 1e9 * yours["state_gb"]
    assert f"{row['step_s']:.2f} s with " in capsys.readouterr().out
    assert row["step_s"] == step_time.step(cluster_summary.job_of(run)).seconds
    assert f"step time: {row['step_s']:.2f} s" in said
    assert row["tokens_per_step"] == pytest.approx(run.global_batch_size * run.seq_length)


@pytest.mark.parametrize("change", [{}, {"tensor": 2}, {"tensor": 8}, {"precision": "fp8"}, {"precision": "mxfp8"}])
def test_memory_of_state_is_what_launch_counts(change):
    """One pipeline stage, so that the fullest is the average one."""
    run = CLUSTER_RECIPES["qwen3_30b_a3b"]("b200_8x400g").derive(pipeline=1, virtual_pipeline=1, **change)
    need = memory.per_gpu(run)
    launched = (need.weights + need.gradients + need.optimizer) / 1e9
    assert recommend.state_gb(cluster_summary.job_of(run)) == pytest.approx(launched, rel=0.02)


def test_recompute_that_counts_as_nothing_is_said_all_the_same(tmp_path, capsys):
    run = CLUSTER_RECIPES["deepseek_v3"]("h100_8x400g")
    said = cluster_summary.predict(run)
    assert run.recompute == "selective" and recommend.STATE_HOLDS in said
    for start in ("the same by another verb: ", "among other layouts: "):
        assert "--recompute selective" in line_of(said, start)
    assert (
        reported(line_of(said, "the same by"), tmp_path)["step_s"]
        == step_time.step(cluster_summary.job_of(run)).seconds
    )
    out = capsys.readouterr().out
    assert "recompute selective (counted: none)" in out and recommend.STATE_HOLDS.split(",")[0] in out


def test_all_commands_that_launch_prints_are_of_the_hosts_asked_for():
    recipe = CLUSTER_RECIPES["qwen3_30b_a3b"]("h100_8x400g")
    fitting = "those of them that fit: "
    assert "--nodes" not in line_of(cluster_summary.predict(recipe), fitting)
    said = cluster_summary.predict(recipe.derive(num_hosts=2 * recipe.num_hosts))
    assert f"--nodes {2 * recipe.num_hosts} --layouts, with" in line_of(said, fitting)
    assert said.count(f"--gpus {2 * recipe.num_gpus} ") == 2


@pytest.mark.parametrize("verb", ["report scaling --simulate", "simulate --recommend"])
def test_hopper_has_no_mxfp8_in_any_verb(verb, capsys):
    for ep in ([], ["--ep", "8"]):
        asked = [*verb.split(), "qwen3_30b_a3b", "--gpus", "64", "--precision", "mxfp8", *ep]
        assert cli.main(asked) == cli.EXIT_USAGE
        said = capsys.readouterr().err
        assert "--precision mxfp8: H100 SXM5 has no mxfp8 tensor cores; give --precision fp8" in said
        assert said.count("\n") == 1


def test_precision_and_recompute_reach_the_report_and_are_printed(tmp_path, capsys):
    base = CLUSTER_RECIPES["deepseek_v3"]("gb200_nvl72")
    times = {}
    for precision in ("bf16", "mxfp8"):
        run = base.derive(precision=precision, recompute="full")
        times[precision] = reported(line_of(cluster_summary.predict(run), "the same by"), tmp_path)["step_s"]
        assert f"{precision}, recompute full" in capsys.readouterr().out
        assert times[precision] == step_time.step(cluster_summary.job_of(run)).seconds
        assert times[precision] > step_time.step(cluster_summary.job_of(base.derive(precision=precision))).seconds
    assert times["bf16"] != times["mxfp8"]  # the faster is not known: bf16 has one fitted row


def test_recommend_and_report_agree(tmp_path, capsys):
    assert (
        cli.main(
            [
                "simulate",
                "--cluster",
                "gb200_nvl72",
                "--recommend",
                "qwen3_30b_a3b",
                "--gpus",
                "64",
                "--precision",
                "fp8",
                "--json",
                str(tmp_path / "a.json"),
            ]
        )
        == 0
    )
    (line,) = [x for x in capsys.readouterr().out.splitlines() if "by another verb" in x]
    best = json.loads((tmp_path / "a.json").read_text())["plans"][0]
    assert reported(line, tmp_path)["tokens_per_s_per_gpu"] == pytest.approx(best["tokens_per_s_per_gpu"], rel=1e-9)


def test_a_layout_without_ep_is_no_job(capsys):
    assert cli.main(["simulate", "--recommend", "mixtral_8x7b", "--gpus", "8", "--pp", "2"]) == cli.EXIT_USAGE
    assert "--pp: the plans have their own; give --ep too" in capsys.readouterr().err


@pytest.mark.parametrize("name, hardware", VARIANTS)
def test_no_recipe_ships_a_way_that_is_predicted_slower_than_another(name, hardware):
    said = cluster_summary.predict(CLUSTER_RECIPES[name](hardware))
    assert "alltoall" in said and "deepep_v1" in said
    assert "WARNING" not in said


def test_experts_that_are_computed_again_cost_their_exchange_too():
    base = CLUSTER_RECIPES["deepseek_v3"]("h100_8x400g")
    times = {
        r: step_time.step(cluster_summary.job_of(base.derive(recompute=r))).seconds
        for r in ("none", "layernorm,moe_act,mla_up_proj", "moe", "full")
    }
    assert times["none"] == times["layernorm,moe_act,mla_up_proj"] < times["moe"] < times["full"]
    moe = base.derive(recompute="moe")
    assert "experts computed twice, their rows dispatched again" in cluster_summary.predict(moe)
    assert "experts computed twice, their exchange too" in cluster_summary.predict(moe.derive(dispatcher="alltoall"))


def test_candidates_stand_side_by_side_and_a_loss_is_a_warning():
    losing = CLUSTER_RECIPES["qwen3_30b_a3b"]("gb200_nvl72").derive(num_sms=8)
    said = cluster_summary.predict(losing)
    found = {(c.name, c.num_sms): c for c in cluster_summary.candidates(losing, cluster_summary.job_of(losing))}
    assert found["alltoall", 0].seconds < found["hybrid_ep", 8].seconds
    assert "WARNING: alltoall is predicted faster than hybrid_ep as it is here" in said
    remedy = re.search(r"; --set (\S+) is predicted to take ([\d.]+) s", said)
    name, value = remedy[1].split("=")
    better = losing.derive(**{name: int(value) if value.isdigit() else value})
    assert f"step time: {remedy[2]} s" in cluster_summary.predict(better)
    assert "WARNING" not in cluster_summary.predict(better)
    other = cluster_summary.predict(CLUSTER_RECIPES["qwen3_30b_a3b"]("h100_8x400g").derive(dispatcher="alltoall"))
    assert "WARNING: hybrid_ep is predicted faster than alltoall" in other and "--set dispatcher=hybrid_ep" in other


def test_a_rate_published_inside_one_domain_is_not_used_between_nodes():
    run = CLUSTER_RECIPES["deepseek_v3"]("b200_8x400g").derive(expert=16)  # over two nodes
    names = [c.name for c in cluster_summary.candidates(run, cluster_summary.job_of(run))]
    assert "deepep_v1" not in names and "alltoall" in names
