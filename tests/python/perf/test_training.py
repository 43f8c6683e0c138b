"""Published training steps: efficiencies are those that half of the rows give; the committed residuals are right."""

from __future__ import annotations

import collections
import csv
import sys
from dataclasses import astuple, replace
from pathlib import Path
from unittest import mock

import pytest

from hybrid_ep.hardware import clusters
from hybrid_ep.perf import efficiency, model, models, training
from hybrid_ep.perf.shape import Shape
from hybrid_ep.perf.step_time import Job, launches_us, said_of_compute, step

ROOT = Path(__file__).parents[3]


def gpu(row) -> str:
    return efficiency.gpu_word(row.job.cluster)


def numbers(fitted):
    return pytest.approx(astuple(fitted), rel=6e-4)


def test_what_compute_costs_is_what_both_halves_of_the_rows_give():
    assert astuple(efficiency.FITTED) == numbers(training.fit())
    kinds = collections.Counter((row.kind, row.half) for row in training.rows())
    assert kinds == {("fits", 1): 25, ("fits", 2): 25, ("older", 1): 18, ("older", 2): 26, ("assumed", 0): 24}


def test_a_row_is_held_out_by_the_half_without_its_configuration(monkeypatch):
    """Also one of older software. Rates of that half alone change it, those of its own do not."""

    def held_out(row, changed):
        rows = tuple(
            replace(
                other, tokens_per_s=other.tokens_per_s / (3 if other.half == changed and other.job != row.job else 1)
            )
            for other in training.rows()
        )
        with mock.patch.object(training, "rows", return_value=rows):
            return row.held_out

    for row in (training.of_kind("fits")[0], training.of_kind("older")[-1]):
        before = row.held_out
        assert held_out(row, row.half) == before and held_out(row, 3 - row.half) < before - 0.3
    with pytest.raises(ValueError, match="its exchange is assumed"):
        _ = training.of_kind("assumed")[0].held_out


def test_the_exchange_of_rows_is_what_their_recipes_say():
    """As read in Megatron Bridge's recipes at the dates of its summaries: a slip would change a fit and no more."""
    bridge = [row for row in training.rows() if row.source.startswith("Megatron Bridge")]
    known = {(row.source.split()[-1], row.job.model.name, gpu(row), row.job.ep): row for row in bridge}
    for (version, name, where, ep), how in {
        ("26.02", "qwen3_235b_a22b", "B200", 8): "alltoall",
        ("26.02.01", "qwen3_235b_a22b", "H100", 32): "alltoall, overlapped",
        ("26.02", "qwen3_30b_a3b", "B200", 8): "alltoall, partial CUDA graphs",
        ("26.02.01", "qwen3_30b_a3b", "B200", 8): "hybrid_ep, partial CUDA graphs",
        ("26.04", "qwen3_235b_a22b", "B300", 8): "alltoall",
        ("26.04.01", "qwen3_235b_a22b", "B300", 8): "hybrid_ep",
        ("26.04.01", "deepseek_v3", "B200", 32): "deepep, overlapped, partial CUDA graphs",
        ("26.06", "deepseek_v3", "B300", 8): "hybrid_ep, partial CUDA graphs",
        ("26.06", "qwen3_30b_a3b", "B300", 8): "hybrid_ep, overlapped, iteration CUDA graphs",
    }.items():
        assert known[version, name, where, ep].how == how


def test_rows_of_h100_in_bf16_are_those_of_their_recipes():
    """As read in examples/moe_recipes of Megatron-LM and best_practice/qwen3 of Megatron-MoE-ModelZoo."""
    found = [
        (row.source, row.job.gpus, row.job.tensor, row.job.micro_batches, row.how, row.recompute, row.kind)
        for row in training.rows()
        if row.job.dtype == "bf16" and gpu(row) == "H100" and not row.source.endswith("26.07")
    ]
    zoo, recipes, modules = "Megatron-MoE-ModelZoo 25.05", "Megatron-LM moe_recipes 26.06", "layernorm moe_act"
    assert found == [
        (zoo, 256, 2, 128, "deepep", modules, "fits"),
        (zoo, 256, 2, 128, "deepep, overlapped", modules, "fits"),
        (zoo, 256, 2, 4, "deepep, full recompute", "full", "assumed"),
        (zoo, 256, 2, 512, "alltoall", modules, "fits"),
        (zoo, 256, 4, 256, "deepep", "none", "fits"),
        (recipes, 256, 2, 128, "hybrid_ep, overlapped, partial CUDA graphs", "moe_act layernorm", "fits"),
        (recipes, 32, 1, 8, "hybrid_ep", "none", "fits"),
    ]
    assert all(row.note for row in training.rows() if not row.source.startswith("Megatron Bridge"))


def test_recompute_of_all_layers_counts_and_that_of_modules_is_free():
    (full,) = [row for row in training.rows() if row.recompute == "full"]
    assert full.job.recompute == "full" and full.tokens_per_s == pytest.approx(2048 * 4096 / 17.6 / 256)
    without = replace(full, job=replace(full.job, recompute="none"))
    assert without.predicted() > 1.2 * full.predicted()
    assert {row.job.recompute for row in training.rows() if row is not full} == {"none"}
    with training.CSV.open(newline="") as file:
        record = next(csv.DictReader(file))
    for said, counted in (("none", "none"), ("full", "full"), ("moe_act layernorm", "none"), ("layernorm moe", "moe")):
        assert training._job(record | {"recompute": said}).recompute == counted


def test_a_job_is_in_one_half_whatever_dispatcher_the_model_takes_for_another():
    """Or else a row would be held out from its own rate: the model has one job for DeepEP and Hybrid-EP."""
    halves = collections.defaultdict(set)
    for row in training.of_kind("fits", "older"):
        halves[row.job].add(row.half)
    assert all(len(found) == 1 for found in halves.values())
    (job,) = {
        row.job for row in training.of_kind("fits") if row.tokens_per_s == pytest.approx(2048 * 4096 / 17.6 / 256)
    }
    assert {row.dispatcher for row in training.of_kind("fits") if row.job == job} == {"deepep", "hybrid_ep"}


def test_a_number_of_its_own_for_bf16_is_found():
    """In rows that the model made itself; rows with the same number for both need none."""
    made = efficiency.Compute(0.6, 6.0, 3000.0, 600.0)
    own = {"fp8": made, "bf16": replace(made, layer_us_x86=1000.0)}
    rows = [
        replace(row, tokens_per_s=row.predicted(own[efficiency.precision_class(row.job.dtype)]))
        for row in training.of_kind("fits")
    ]
    found = training.fit_apart(rows, "layer_us_x86")
    for precision, numbers_of in own.items():
        assert astuple(found[precision]) == pytest.approx(astuple(numbers_of), rel=0.05)


def test_launches_that_a_published_step_shows_give_its_rate():
    job = Job(models.get("qwen3_30b_a3b"), clusters.get("h100_8x400g"), 32, 8)
    row, us = training.launches_shown(job)
    assert (row.job.gpus, row.job.dtype, gpu(row), row.kind) == (32, "bf16", "H100", "fits")
    assert 0 < us < 0.5 * efficiency.FITTED.layer_us_x86
    assert row.predicted(efficiency.with_layer_us("x86", us)) == pytest.approx(row.tokens_per_s)
    gb300 = replace(job, cluster=clusters.get("gb300_nvl72"), dtype="mxfp8")
    assert training.launches_shown(gb300)[0].graphs == "partial"  # those of graphs of iterations show nothing
    assert training.launches_shown(replace(job, model=models.get("mixtral_8x7b"))) is None


def test_a_fit_finds_the_numbers_that_made_its_rows():
    """Rows that the model made itself with other numbers, far from all starts and from what is published."""
    made = efficiency.Compute(0.83, 3.3, 900.0, 2100.0)
    found = training.fit([replace(row, tokens_per_s=row.predicted(made)) for row in training.rows()])
    assert astuple(found) == pytest.approx(astuple(made), rel=0.02)


def test_rows_are_fitted_once_and_with_the_numbers_of_steps(monkeypatch):
    rows = training.rows()[:2]
    found = training.fit(rows)
    monkeypatch.setattr(training, "_descend", lambda *_: pytest.fail("fitted again"))
    assert training.fit(iter(rows)) is found
    for row in training.rows()[::5]:
        assert row.predicted(found) == step(row.job, fitted=found).tokens_per_s_per_gpu


def test_an_outlier_moves_a_fit_little():
    rows = training.of_kind("fits")
    wild = training.fit([replace(rows[0], tokens_per_s=rows[0].tokens_per_s * 5), *rows[1:]])
    assert astuple(wild)[:3] == pytest.approx(astuple(efficiency.FITTED)[:3], rel=0.35)


def test_the_committed_table_is_that_of_the_script(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    import training_tables

    assert training_tables.OUT.read_text() == training_tables.text()
    sys.modules.pop("training_tables")


def test_held_out_rows_are_nearer_than_at_half_of_peak():
    rows = training.of_kind("fits")
    median, worst = training.spread(row.held_out for row in rows)
    assert median < 0.14 and worst < 0.9
    before, _ = training.spread(
        step(replace(row.job, efficiency=0.5)).tokens_per_s_per_gpu / row.tokens_per_s - 1 for row in rows
    )
    assert before > 4 * median


def release(row) -> tuple[int, ...]:
    return tuple(map(int, row.source.rpartition(" ")[2].split(".")))


def test_a_row_counts_once_and_the_newest_does():
    newest = {row.configuration: row for row in training.of_kind("fits")}
    older = training.of_kind("older")
    assert len(newest) == 50 and all(release(row) <= release(newest[row.configuration]) for row in older)
    assert all(row.half == newest[row.configuration].half for row in older)
    median, worst = training.spread(row.held_out for row in older)
    assert median < 0.11 and worst < 0.75


def test_a_prediction_says_what_the_model_knows_of_the_row_beside_it():
    said = {kind: training._with_residual(training.of_kind(kind)[0]) for kind in training.KINDS}
    fitted = "(the model is fitted to this configuration)"
    assert said["fits"].endswith(fitted) and said["older"].endswith(fitted)
    plain = next(row for row in training.of_kind("assumed") if not row.note)
    assert training._with_residual(plain).endswith("(how it exchanged is assumed)")
    assert said["assumed"].endswith("(FSDP: the model has no gathers of sharded weights)")
    job = training.of_kind("fits")[-1].job
    assert training.said_of(job).splitlines()[0].endswith(fitted)


def test_the_pages_say_how_far_held_out_rows_are_off():
    median, worst = training.spread(row.held_out for row in training.of_kind("fits"))
    text = (ROOT / "docs" / "performance_model.md").read_text()
    assert f"held out are {median:.0%} off in the median and {worst:.0%} at worst".replace("%", " %") in text
    fitted = efficiency.FITTED
    for said in (
        f"{fitted.gemm:.0%}".replace("%", " %"),
        f"{fitted.passes:.1f} times",
        f"{fitted.layer_us_x86 / 1e3:.1f} ms",
        f"{fitted.layer_us_grace / 1e3:.1f} ms",
    ):
        assert said in text, said


def test_a_published_layout_that_beats_the_nearest_is_shown():
    """DeepSeek-V3 on B200 went 18 % faster with EP 32, the exchange overlapped: the recipe's own is EP 8."""
    job = Job(models.get("deepseek_v3"), clusters.get("b200_8x400g"), 256, 8, 16, dtype="mxfp8")
    near, best = training.said_of(job).splitlines()
    assert "EP 8, PP 16" in near and near.startswith("nearest published step: ") and "tokens/s a GPU" in near
    assert best.startswith("fastest published") and "EP 32, PP 8 x 2" in best and "overlapped" in best
    assert all(abs(row.residual) < 0.1 for row in (training.nearest(job), training.fastest(job)))
    assert len(training.said_of(training.fastest(job).job).splitlines()) == 1


def test_launches_are_of_layers_and_micro_batches_and_gone_in_a_graph_of_iterations():
    job = Job(models.get("qwen3_30b_a3b"), clusters.get("b200_8x400g"), 8, 8, micro_batches=64)
    larger = replace(job, tokens=4 * job.tokens, micro_batches=16)
    graphed = replace(job, iteration_graph=True)
    saved = [step(one).seconds for one in (job, larger, graphed)]
    launches = 64 * 48 * efficiency.FITTED.layer_us_x86 / 1e6
    assert saved[0] - saved[2] == pytest.approx(launches, rel=1e-6)
    assert 0.74 * launches < saved[0] - saved[1] < 0.85 * launches  # beside them fuller tiles, fewer exchanges
    assert step(replace(job, efficiency=0.3)).shares["launches"] == step(graphed).shares["launches"] == 0
    (stage,) = job.stages
    mine = launches_us(job, stage)
    assert launches_us(replace(job, recompute="full"), stage) == pytest.approx(4 / 3 * mine)
    grace = launches_us(replace(job, cluster=clusters.get("gb200_nvl72")), stage)
    assert grace < 0.2 * mine and "nothing of launches" in said_of_compute(graphed)


def test_of_equally_near_steps_the_newest_is_named():
    job = next(row for row in training.rows() if row.source.endswith("26.08")).job
    same = [row for row in training.rows() if training.distance(row, job) == (0, False, False, 0)]
    assert len(same) > 3 and training.nearest(job).source == "Megatron Bridge 26.08"


def test_every_model_cluster_and_precision_reaches_a_share_of_peak():
    for cluster in clusters.CLUSTERS.values():
        for name in models.MODELS:
            shares = [efficiency.share_of_peak(models.get(name), cluster, dtype) for dtype in ("fp8", "mxfp8", "bf16")]
            assert 0 < shares[0] == shares[1] < shares[2] < 1


def test_the_nearest_step_is_of_the_same_gpu_then_model():
    job = Job(models.get("deepseek_v3"), clusters.get("gb200_nvl72"), 256, 64, 4, dtype="mxfp8")
    assert "deepseek_v3 on 256 GB200, mxfp8, EP 64, PP 4" in training.said_of(job)
    mixtral = Job(models.get("mixtral_8x7b"), clusters.get("b200_8x400g"), 16, 8)
    assert efficiency.gpu_word(training.nearest(mixtral).job.cluster) == "B200"


def test_a_gpu_without_rows_is_compared_with_one_of_its_architecture():
    for name, theirs in (("h200_8x400g", "H100"), ("h800_8x400g", "H100"), ("gb300_nvl72", "GB300")):
        job = Job(models.get("qwen3_235b_a22b"), clusters.get(name), 256, 32, 4, dtype="fp8")
        assert efficiency.gpu_word(training.nearest(job).job.cluster) == theirs, name


@pytest.mark.parametrize("name", ["h100_8x400g", "b200_8x400g", "b300_8x800g", "gb200_nvl72"])
def test_no_gpu_is_faster_in_bf16(name):
    def seconds(dtype):
        return step(Job(models.get("deepseek_v3"), clusters.get(name), 512, 32, 4, dtype=dtype)).seconds

    assert seconds("bf16") > seconds("fp8")


def test_a_gb300_is_a_gb200_with_more_memory_and_a_faster_rail():
    gb200, gb300 = clusters.get("gb200_nvl72"), clusters.get("gb300_nvl72")
    differ = {name for (name, a), (_, b) in zip(gb200.quantities(), gb300.quantities(), strict=True) if a != b}
    assert differ == {"gpu.hbm_gb", "nic.gb_per_s"} and gb300.ranks_per_node == 72
    one, two = Shape(64, 64, 4096, 7168, 8, 256), Shape(128, 64, 4096, 7168, 8, 256)
    times = [[model.predict("dispatch", s, c, num_sms=32).kernel_us for c in (gb200, gb300)] for s in (one, two)]
    assert times[0][0] == times[0][1] and times[1][1] < 0.7 * times[1][0]
