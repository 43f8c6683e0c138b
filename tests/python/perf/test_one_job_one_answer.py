"""`launch`, `simulate --recommend` and `report scaling` say the same of one job; launch shows what it beats."""

from __future__ import annotations

import argparse
import json
import re
import shlex
from dataclasses import replace
from fractions import Fraction

import pytest

from hybrid_ep import cli
from hybrid_ep.cli.report import command as report
from hybrid_ep.cli.simulate import job as job_flags
from hybrid_ep.hardware import clusters
from hybrid_ep.perf import memory as counted
from hybrid_ep.perf import models, recommend, stages, step_time
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


A_PLAN = recommend.Plan(8, 1, 8, 24, 16, "bf16", "tokens", 1.0, 1.0, 1000.0, 1.0, 1.0, 1, 1, 8, "", "")


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
    need = memory.check_fits(run)
    assert row["fits"] and yours["fits"]
    assert row["memory_bytes"] == need.total and row["state_bytes"] == need.state
    assert yours["memory_gb"] == need.total / 1e9 and yours["state_gb"] == need.state / 1e9
    out = capsys.readouterr().out
    assert f"{row['step_s']:.2f} s with " in out
    said_of = dict(re.findall(r"^  (state|total) +([\d.]+) GB$", cluster_summary.describe(run), re.M))
    of_report, of_yours = (next(x for x in out.splitlines() if x.startswith(w)).split() for w in ("   weak", "yours"))
    assert of_report[-2:] == [said_of["total"], said_of["state"]]
    assert of_yours[-2:] == [said_of["state"], said_of["total"]]
    assert row["step_s"] == step_time.step(cluster_summary.job_of(run)).seconds
    assert f"step time: {row['step_s']:.2f} s" in said
    assert row["tokens_per_step"] == pytest.approx(run.global_batch_size * run.seq_length)


PLAIN = {"pipeline": 1, "virtual_pipeline": 1, "pipeline_layout": "", "overlap": False}
CHANGES = [
    {"tensor": 2},
    {"precision": "fp8", "fp8_params": "yes"},
    {"precision": "fp8", "moments": "bf16"},
    {"precision": "bf16", "moments": "fp32"},
    {"precision": "mxfp8", "fp8_params": "no"},
    {"dispatch_dtype": "fp8", "micro_batch_size": 2},
    {"dispatcher": "alltoall"},
    {"recompute": "none"},
    {"recompute": "moe,layernorm", "overlap": False},
    {"recompute": "full", "overlap": False},
    {"recompute": "core_attn"},
    PLAIN,
]


@pytest.mark.parametrize("change", CHANGES, ids=str)
@pytest.mark.parametrize("name", CLUSTER_RECIPES)
def test_a_changed_run_has_one_memory_in_all_verbs(name, change):
    """Through the command that launch prints: its flags say all that memory depends on."""
    run = CLUSTER_RECIPES[name]("b200_8x400g").derive(**change)
    args = parsed(job_flags.command_of(cluster_summary.job_of(run)))
    asked = job_flags.from_flags(args, args.simulate, run.num_gpus)
    assert counted.per_gpu(asked) == memory.per_gpu(run)
    assert counted.budget_bytes(asked.cluster) == memory.budget_bytes(run)


def parsed(command):
    parser = argparse.ArgumentParser()
    report.add_arguments(parser)
    return parser.parse_args(shlex.split(command)[2:])


def test_state_is_counted_on_the_fullest_stage_with_moments_and_8_bit_weights():
    """By hand, from the fullest stage's parameters: the average of the stages is another number."""
    run = CLUSTER_RECIPES["deepseek_v3"]("gb200_nvl72")
    job = cluster_summary.job_of(run)
    dense, experts = counted.parameters(job)[0]
    state = (2 + 4) * (dense + experts) + 8 * (-(-dense // 64) + experts)
    assert counted.per_gpu(job).state == state == 67_011_071_904
    plain = replace(job, moments="fp32", fp8_params="no")
    assert counted.per_gpu(plain).state == state + 2 * (dense + experts) + 4 * (-(-dense // 64) + experts)


def plans_of(run, **more):
    asked = {"dtype": run.precision, "moments": run.moments, "overlap": 0.9 if run.overlap else 0.0, **more}
    job = cluster_summary.job_of(run)
    asked |= {"recompute": job.recompute, "recompute_modules": job.recompute_modules}
    asked |= {"batches": Fraction(job.micro_batches, job.pp * job.tensor), "tokens": job.tokens * job.tensor}
    return recommend.recommend(job.model, job.cluster, run.num_gpus, **asked)


@pytest.mark.parametrize("name, hardware", VARIANTS)
def test_launch_takes_every_plan_of_recommend_with_the_same_memory(name, hardware, monkeypatch):
    """Also that the batch is the run's. No plan is timed here, so that all are looked at, not the fastest five."""
    monkeypatch.setattr(recommend, "step", lambda _: step_time.Step(1.0, 1.0, 1.0, 1.0, {}))
    monkeypatch.setattr(recommend, "_tune_sms", lambda *_: 8)
    run = CLUSTER_RECIPES[name](hardware)
    plans = plans_of(run, top=1000)
    moved = [p for p in plans if p.move == "tokens"]
    assert moved
    for plan in moved:
        made = launched(run, plan)
        need = memory.check_fits(made)
        assert (need.state / 1e9, need.total / 1e9) == (plan.state_gb, plan.memory_gb)
        assert made.num_microbatches == plan.micro_batches
    assert all(p.memory_gb * 1e9 <= memory.budget_bytes(run) for p in plans)


def launched(run, plan):
    return run.derive(
        tensor=plan.tensor,
        pipeline=plan.pp,
        virtual_pipeline=plan.virtual_pp,
        expert=plan.ep,
        pipeline_layout=plan.layout,
        dispatch_dtype=plan.dispatch_dtype,
    )


def test_what_launch_refuses_is_no_plan():
    """The layout that stood first, with 38 GB of state: activations make it 120 GB."""
    run = CLUSTER_RECIPES["qwen3_235b_a22b"]("h100_8x400g").derive(overlap=False)
    with pytest.raises(ValueError, match=r"needs 120\.0 GB .* over the 72\.0 GB"):
        memory.check_fits(run.derive(tensor=1, expert=8, pipeline=8, virtual_pipeline=4))
    model, cluster = models.get("qwen3_235b_a22b"), clusters.get("h100_8x400g")
    again = {"recompute_modules": ("layernorm", "moe_act")}
    plans = recommend.recommend(model, cluster, 256, **again)
    assert plans and (8, 8, 1) not in {(p.ep, p.pp, p.tensor) for p in plans}
    for plan in plans:
        assert plan.move != "tokens" or memory.check_fits(launched(run, plan))


@pytest.mark.parametrize("model", models.MODELS.values(), ids=models.MODELS)
@pytest.mark.parametrize("batches", [Fraction(1), Fraction(8), Fraction(3, 2), Fraction(1, 4)])
def test_megatron_accepts_the_jobs_of_plans(model, batches):
    cluster, found = clusters.get("gb200_nvl72"), 0
    for ep, pp in recommend.candidates(model, cluster, 256):
        for tensor in (1, 2, 4):
            job = recommend.job_of(model, cluster, 256, ep, pp, tensor, batches=batches)
            if job is None:
                assert (batches * tensor * pp).denominator > 1 or batches * tensor < 1 or model.mtp_layers or pp == 32
                continue
            found += 1
            assert job.micro_batches == batches * pp * tensor and job.micro_batches >= pp
            assert job.virtual_pp == 1 or (pp > 1 and job.micro_batches % pp == 0)
            assert job.layout or stages.splits(model.num_layers, pp * job.virtual_pp)
            assert job.tokens * job.micro_batches * 256 // pp == 4096 * 256 * batches
            assert all(chunk for rank in job.chunks for chunk in rank)
    assert found


def test_a_batch_of_yours_is_that_of_the_plans(tmp_path, capsys):
    asked = ["simulate", "--recommend", "mixtral_8x7b", "--gpus", "64", "--json", str(tmp_path / "a.json")]
    for yours, sequences, whose in (
        ([], 512, "8 micro-batches a GPU, the default"),
        (["--ep", "8", "--pp", "4", "--virtual-pp", "8", "--micro-batches", "64"], 1024, "yours"),
        (["--ep", "8", "--pp", "4", "--tensor", "2", "--tokens", "2048", "--micro-batches", "64"], 512, "yours"),
    ):
        assert cli.main([*asked, *yours]) == 0
        document, out = json.loads((tmp_path / "a.json").read_text()), " ".join(capsys.readouterr().out.split())
        assert document["tokens_per_step"] == 4096 * sequences
        assert f"a step of {sequences:,} sequences of 4096 ({whose})" in out.replace("# ", "")
        assert {p["micro_batches"] * 64 / p["pp"] / p["tensor"] for p in document["plans"]} == {sequences}


def test_experts_that_are_recomputed_hide_no_exchange(capsys):
    asked = ["simulate", "--recommend", "mixtral_8x7b", "--gpus", "64", "--overlap", "0.5", "--recompute", "full"]
    assert cli.main(asked) == cli.EXIT_USAGE
    assert "here --recompute full; give" in capsys.readouterr().err


def test_recompute_that_counts_as_nothing_is_said_all_the_same(tmp_path, capsys):
    run = CLUSTER_RECIPES["deepseek_v3"]("h100_8x400g")
    said = cluster_summary.predict(run)
    assert run.recompute == "selective" and "--recompute" not in said, "the default of all verbs"
    none = cluster_summary.predict(run.derive(recompute="none"))
    modules = cluster_summary.predict(run.derive(recompute="mlp,layernorm"))
    for start in ("the same by another verb: ", "among other layouts: "):
        assert "--recompute none" in line_of(none, start) and "--recompute mlp,layernorm" in line_of(modules, start)
    assert (
        reported(line_of(said, "the same by"), tmp_path)["step_s"]
        == step_time.step(cluster_summary.job_of(run)).seconds
    )
    out = capsys.readouterr().out
    assert "recompute selective (time counted: none)" in out and counted.STATE_HOLDS in " ".join(
        out.replace("#", "").split()
    )


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
