"""What each pipeline stage holds, and that a step goes at the pace of the slowest."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hybrid_ep.hardware import clusters
from hybrid_ep.perf import efficiency, models, step_time
from hybrid_ep.perf.stages import Stage, stages
from hybrid_ep.perf.step_time import Job, step
from recipes import CLUSTER_RECIPES
from recipes.cluster_summary import job_of
from recipes.hardware import HARDWARE

DEEPSEEK, QWEN = models.get("deepseek_v3"), models.get("qwen3_235b_a22b")
GB200, B200 = clusters.get("gb200_nvl72"), clusters.get("b200_8x400g")


def held(model, pp, virtual_pp=1, mtp=0, layout=""):
    return stages(model.num_layers, model.moe_layers, mtp, pp, virtual_pp, layout)


def test_stages_of_published_layouts():
    """Megatron Bridge's of DeepSeek-V3, given and left to the split; Megatron's own of 94 layers, ends counted."""
    bridge = "Et*4|(t*4|)*14tmL"
    for layout in ("", bridge):
        assert held(DEEPSEEK, 16, 1, 1, layout) == (Stage(1, 3), *[Stage(4)] * 14, Stage(2, 0, 1, 2))
    for layout in ("", bridge.replace("m", "")):
        assert held(DEEPSEEK, 4, 4, 0, layout) == (Stage(13, 3), Stage(16), Stage(16), Stage(13, heads=1))
    assert held(DEEPSEEK, 2, 8, 1, bridge) == (Stage(29, 3), Stage(30, 0, 1, 2))
    apart = held(DEEPSEEK, 16, 4, 1, "E|(t|)*61m|L")
    assert apart[:5] == (Stage(3), Stage(3, 1), Stage(3, 1), Stage(3, 1), Stage(4)) and set(apart[4:14]) == {Stage(4)}
    assert apart[14:] == (Stage(4, 0, 1, 1), Stage(3, heads=1))
    assert held(QWEN, 8, 4) == held(QWEN, 8) == (Stage(11), *[Stage(12)] * 6, Stage(11, heads=1))
    assert held(QWEN, 1) == (Stage(94, heads=1),) and held(QWEN, 2) == (Stage(47), Stage(47, heads=1))


def test_a_layout_of_another_model_or_another_number_of_chunks_is_refused():
    for change in ({"pp": 8}, {"virtual_pp": 2}, {"mtp_layers": 0}, {"model": QWEN}):
        with pytest.raises(ValueError, match="must have .* chunks with .* layers t, . of multi-token prediction m"):
            replace(Job(DEEPSEEK, B200, 256, 8, 16, layout="Et*4|(t*4|)*14tmL"), **change)


@pytest.mark.parametrize("model", models.MODELS.values(), ids=models.MODELS)
@pytest.mark.parametrize("pp", [1, 2, 3, 4, 8, 16, 32])
@pytest.mark.parametrize("virtual_pp", [1, 2, 4])
def test_stages_hold_the_whole_model(model, pp, virtual_pp):
    for mtp in (0, 1, 2):
        found = held(model, pp, virtual_pp, mtp)
        assert len(found) == pp and sum(s.layers for s in found) == model.num_layers + mtp
        assert sum(s.moe for s in found) == model.moe_layers + mtp and sum(s.heads for s in found) == 1 + mtp
        assert max(s.layers - s.mtp for s in found) == -(-model.num_layers // pp)
        assert all(s.heads == s.mtp == 0 for s in found[:-1]) and all(min(s) >= 0 for s in found)


@pytest.mark.parametrize("name", CLUSTER_RECIPES)
def test_stages_are_the_recipes_own(name):
    for hardware in HARDWARE:
        run = CLUSTER_RECIPES[name](hardware)
        theirs = ["".join(chunks) for chunks in run.stages()]
        assert [s.layers for s in job_of(run).stages] == [x.count("t") + x.count("m") for x in theirs]
        assert [s.heads for s in job_of(run).stages] == [x.count("L") + x.count("m") for x in theirs]


def test_a_step_is_the_slowest_stage_and_one_micro_batch_of_the_others():
    job = Job(DEEPSEEK, GB200, 256, 64, 4, virtual_pp=4, micro_batches=64, grad_overlap=1.0)
    exchange = 2 * job.exchange_us

    def micro_batch(stage):
        compute, launches = step_time.compute_us(job, stage), step_time.launches_us(job, stage)
        return compute + launches + stage.moe * exchange + step_time.pipeline_us(job)

    times = [micro_batch(stage) for stage in job.stages]
    by_hand = 64 * max(times) + (sum(times) - max(times)) / 4
    assert step(job).seconds == pytest.approx(by_hand / 1e6)
    assert step(job).shares["bubble"] == pytest.approx((sum(times) - max(times)) / 4 / by_hand)


def test_multi_token_prediction_is_one_more_layer_its_exchange_and_a_pass_of_the_output_layer():
    without = Job(DEEPSEEK, GB200, 64, 64, micro_batches=1, grad_overlap=1.0, mtp_layers=0)
    more = 1e6 * (step(replace(without, mtp_layers=1)).seconds - step(without).seconds)
    token = efficiency.per_token(DEEPSEEK, GB200, "bf16", 4096)
    a_layer = step_time.compute_us(without, Stage(1)) + efficiency.layer_us(GB200) + 2 * without.exchange_us
    assert more == pytest.approx(a_layer + 4096 * (token.mtp_more + token.head))
    assert step(replace(without, mtp_layers=None)).seconds == step(replace(without, mtp_layers=1)).seconds
    for mtp, flops in ((0, 249.8e9), (1, 260.0e9)):
        got = step(replace(without, mtp_layers=mtp))
        assert got.tflops_per_gpu == pytest.approx(got.tokens_per_s_per_gpu * flops / 1e12, rel=1e-3)


def test_a_last_stage_with_fewer_layers_has_room_for_the_output_layers():
    """DeepSeek-V3 over 16 stages: with two layers in the last, beside multi-token prediction, it is the slowest; with
    one the step is faster."""
    job = Job(DEEPSEEK, B200, 256, 8, 16, dtype="mxfp8", micro_batches=128)
    equal, left = (step(replace(job, layout=f"Et*{n}|(tttt|)*14t*{5 - n}mL")).seconds for n in (3, 4))
    assert equal > 1.05 * left and left == step(job).seconds


def test_the_output_layer_is_bf16_whatever_the_layers_are():
    for dtype in ("bf16", "mxfp8"):
        token = efficiency.per_token(DEEPSEEK, B200, dtype, 4096)
        rate = B200.gpu.bf16_tflops.value * efficiency.FITTED.gemm * 1e6
        crossing = efficiency.FITTED.passes * 2 * DEEPSEEK.vocab / (B200.gpu.hbm_rate * 1e3)
        assert token.head == pytest.approx(6 * 7168 * 129280 / rate + crossing)
    share = efficiency.at_share(DEEPSEEK, B200, "mxfp8", 4096, 0.5)
    whole = DEEPSEEK.train_flops_per_token(4096) / (B200.gpu.fp8_tflops.value * 0.5e6)
    assert share.of(DEEPSEEK) == pytest.approx(whole)


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("dtype", "fp32", "use one of bf16, fp8, mxfp8"),
        ("dispatch_dtype", "int4", "use one of"),
        ("micro_batches", -3, "a whole number of at least 1"),
        ("virtual_pp", 0, "a whole number of at least 1"),
        ("pp", 0, "a whole number of at least 1"),
        ("pp", -1, "a whole number of at least 1"),
        ("sequence", -1, "a whole number of at least 1"),
        ("tokens", 1.5, "a whole number of at least 1"),
        ("mtp_layers", 1.5, "a whole number of at least 0"),
        ("imbalance", float("inf"), "a finite number of at least 0"),
        ("cv_slow", float("nan"), "a finite number of at least 0"),
        ("efficiency", 0.0, "in (0, 1]"),
    ],
)
def test_a_job_is_asked_with_what_can_be(field, value, said):
    given = {"gpus": 256, "ep": 64, "pp": 4, field: value}
    with pytest.raises(ValueError) as refused:
        step_time.Job(models.get("deepseek_v3"), clusters.get("h100_8x400g"), **given)
    assert f"{field}={value!r}" in str(refused.value) and said in str(refused.value)
