"""Published training steps: efficiencies are those that half of the rows give; the committed residuals are right."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from hybrid_ep.hardware import clusters
from hybrid_ep.perf import efficiency, model, models, training
from hybrid_ep.perf.shape import Shape
from hybrid_ep.perf.step_time import Job, step

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("group", efficiency.FITTED)
def test_every_efficiency_is_what_its_half_of_the_rows_gives(group):
    assert training.fit(group) == pytest.approx(efficiency.FITTED[group], abs=6e-5)
    of_group = [row for row in training.rows() if row.group == group]
    assert sum(row.fits for row in of_group) == -(-len(of_group) // 2)


def test_the_committed_table_is_that_of_the_script(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    import training_tables

    assert training_tables.OUT.read_text() == training_tables.text()
    sys.modules.pop("training_tables")


def test_held_out_rows_are_nearer_than_at_half_of_peak():
    held = [row for row in training.rows() if not row.fits]
    assert {row.group for row in training.rows()} == set(efficiency.FITTED) and len(held) == 10
    median, worst = training.spread(held)
    assert median < 0.35 and worst < 2.75
    before = sorted(
        abs(step(replace(row.job, efficiency=0.5)).tokens_per_s_per_gpu / row.tokens_per_s - 1) for row in held
    )
    assert before[5] > 2 * median


def release(row) -> tuple[int, ...]:
    return tuple(map(int, row.source.rpartition(" ")[2].split(".")))


def test_rows_of_later_releases_set_nothing_and_come_out_too_slow():
    """The same model of newer software: what it gained since is what the sign shows."""
    later = training.later()
    bridge = [row for row in training.rows() if "Bridge" in row.source]
    assert len(later) == 62 and not any(row.fits for row in later)
    assert min(map(release, later)) > max(map(release, bridge)) and not set(later) & set(training.rows())
    median, worst = training.spread(later)
    signed = sorted(row.predicted() / row.tokens_per_s - 1 for row in later)
    assert median < 0.35 and worst < 1.1 and signed[len(signed) // 2] < 0
    text = (ROOT / "docs" / "performance_model.md").read_text()
    assert f"the {len(later)} rows of 26.02.01 to 26.08 are {median:.0%} off".replace("%", " %") in text
    assert f"{worst:.0%} at worst".replace("%", " %") in text


def test_of_equally_near_steps_the_newest_is_named():
    job = next(row for row in training.later() if row.source.endswith("26.08")).job
    same = [row for row in training.later() if training.distance(row, job) == (0, False, False, 0)]
    assert len(same) > 3 and training.nearest(job).source == "Megatron Bridge 26.08"


def test_every_cluster_and_precision_has_an_efficiency_and_says_whose():
    for cluster in clusters.CLUSTERS.values():
        for dtype in ("bf16", "fp8", "mxfp8"):
            assert 0 < efficiency.of(cluster, dtype).share < 1
    assert "for want of any of H200" in efficiency.of(clusters.get("h200_8x400g"), "bf16").source
    assert efficiency.of(clusters.get("gb200_nvl72"), "mxfp8") == efficiency.of(clusters.get("gb200_nvl72"), "fp8")


def test_the_nearest_step_is_of_the_same_gpu_then_model():
    job = Job(models.get("deepseek_v3"), clusters.get("gb200_nvl72"), 256, 64, 4, dtype="mxfp8")
    assert "deepseek_v3 on 256 GB200, mxfp8, EP 64, PP 4" in training.said_of(job)
    mixtral = Job(models.get("mixtral_8x7b"), clusters.get("b200_8x400g"), 16, 8)
    assert training.nearest(mixtral).group[0] == "B200"


def test_a_gpu_without_rows_is_compared_with_the_one_whose_efficiency_it_takes():
    for name, theirs in (("h200_8x400g", "H100"), ("h800_8x400g", "H100"), ("gb300_nvl72", "GB300")):
        job = Job(models.get("qwen3_235b_a22b"), clusters.get(name), 256, 32, 4, dtype="mxfp8")
        assert training.nearest(job).group[0] == theirs, name


@pytest.mark.parametrize("name", ["b200_8x400g", "b300_8x800g"])
def test_no_gpu_seems_twice_as_fast_in_bf16(name):
    def seconds(dtype):
        return step(Job(models.get("deepseek_v3"), clusters.get(name), 512, 32, 4, dtype=dtype)).seconds

    assert seconds("bf16") > 0.95 * seconds("mxfp8")
    assert "times what it reaches of their share in fp8" in efficiency.of(clusters.get(name), "bf16").source


def test_a_row_that_set_the_efficiency_says_so():
    fitted, held_out = (next(row for row in training.rows() if row.fits is fits) for fits in (True, False))
    assert "(it is among the rows that set the efficiency)" in training.said_of(fitted.job)
    assert "set the efficiency" not in training.said_of(held_out.job)


def test_a_gb300_is_a_gb200_with_more_memory_and_a_faster_rail():
    gb200, gb300 = clusters.get("gb200_nvl72"), clusters.get("gb300_nvl72")
    differ = {name for (name, a), (_, b) in zip(gb200.quantities(), gb300.quantities(), strict=True) if a != b}
    assert differ == {"gpu.hbm_gb", "nic.gb_per_s"} and gb300.ranks_per_node == 72
    assert "for want of any of GB300" in efficiency.of(gb300, "mxfp8").source
    one, two = Shape(64, 64, 4096, 7168, 8, 256), Shape(128, 64, 4096, 7168, 8, 256)
    times = [[model.predict("dispatch", s, c, num_sms=32).kernel_us for c in (gb200, gb300)] for s in (one, two)]
    assert times[0][0] == times[0][1] and times[1][1] < 0.7 * times[1][0]
