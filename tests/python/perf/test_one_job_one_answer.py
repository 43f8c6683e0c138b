"""`launch`, `simulate --recommend` and `report scaling` say the same of one job; launch shows what it beats."""

from __future__ import annotations

import json
import re
import shlex

import pytest

from hybrid_ep import cli
from hybrid_ep.perf import step_time
from recipes import CLUSTER_RECIPES, cluster_summary
from recipes.cluster import HARDWARE

VARIANTS = [(name, hardware) for name in CLUSTER_RECIPES for hardware in HARDWARE]


def reported(line, tmp_path):
    """The first row of the report that a printed `hybrid-ep report scaling ...` asks for."""
    words = shlex.split(line[line.index("hybrid-ep "):])
    assert words[:3] == ["hybrid-ep", "report", "scaling"]
    assert cli.main([*words[1:], "--json", str(tmp_path / "r.json")]) == 0
    return json.loads((tmp_path / "r.json").read_text())["rows"][0]


@pytest.mark.parametrize("name, hardware", VARIANTS)
def test_launch_and_report_agree(name, hardware, tmp_path, capsys):
    run = CLUSTER_RECIPES[name](hardware)
    said = cluster_summary.predict(run)
    row = reported(said.splitlines()[-1], tmp_path)
    assert row["step_s"] == step_time.step(cluster_summary.job_of(run)).seconds
    assert f"step time: {row['step_s']:.2f} s" in said
    assert row["tokens_per_step"] == pytest.approx(run.global_batch_size * run.seq_length)


def test_precision_and_recompute_reach_the_report_and_are_printed(tmp_path, capsys):
    base = CLUSTER_RECIPES["deepseek_v3"]("gb200_nvl72")
    times = {}
    for precision in ("bf16", "mxfp8"):
        line = cluster_summary.predict(base.derive(precision=precision)).splitlines()[-1]
        times[precision] = reported(line, tmp_path)["step_s"]
        assert f"{precision}, recompute full" in capsys.readouterr().out
    assert times["bf16"] > 1.3 * times["mxfp8"]


def test_recommend_and_report_agree(tmp_path, capsys):
    assert cli.main(["simulate", "--cluster", "gb200_nvl72", "--recommend", "qwen3_30b_a3b", "--gpus", "64",
                     "--precision", "fp8", "--json", str(tmp_path / "a.json")]) == 0
    (line,) = [x for x in capsys.readouterr().out.splitlines() if "by another verb" in x]
    best = json.loads((tmp_path / "a.json").read_text())["plans"][0]
    assert reported(line, tmp_path)["tokens_per_s_per_gpu"] == pytest.approx(best["tokens_per_s_per_gpu"], rel=1e-9)


def test_candidates_stand_side_by_side_and_a_loss_is_a_warning():
    losing = CLUSTER_RECIPES["qwen3_30b_a3b"]("gb200_nvl72").derive(num_sms=24)
    said = cluster_summary.predict(losing)
    found = {(c.name, c.num_sms): c for c in cluster_summary.candidates(losing, cluster_summary.job_of(losing))}
    assert found["alltoall", 0].seconds < found["hybrid_ep", 24].seconds
    assert "WARNING: alltoall is predicted faster than hybrid_ep as it is here" in said
    remedy = re.search(r"; --set (\S+) is predicted to take ([\d.]+) s", said)
    better = losing.derive(num_sms=int(remedy[1].partition("=")[2]))
    assert f"step time: {remedy[2]} s" in cluster_summary.predict(better)
    assert "WARNING" not in cluster_summary.predict(better)
    other = cluster_summary.predict(CLUSTER_RECIPES["qwen3_30b_a3b"]("h100_8x400g").derive(dispatcher="alltoall"))
    assert "WARNING: hybrid_ep is predicted faster than alltoall" in other and "--set dispatcher=hybrid_ep" in other


def test_a_rate_published_inside_one_domain_is_not_used_between_nodes():
    run = CLUSTER_RECIPES["deepseek_v3"]("b200_8x400g")  # EP 32 over four nodes
    names = [c.name for c in cluster_summary.candidates(run, cluster_summary.job_of(run))]
    assert "deepep_v1" not in names and "alltoall" in names
