"""The roofline of weights that move in groups: what is pulled once a step, what before every layer, and its memory."""

from __future__ import annotations

import pytest
import torch

from hybrid_ep.hardware import clusters
from hybrid_ep.perf import dwdp, models
from hybrid_ep.weights import WeightLayout

DEEPSEEK, NVL72 = models.get("deepseek_v3"), clusters.get("gb200_nvl72")


def weights_us(micro_batches, training=True, **how):
    given = {"training": training, "micro_batches": micro_batches, **how}
    return dwdp.choose(DEEPSEEK, NVL72, 2048, 8, "bf16", **given).weights_us


def test_groups_pull_once_a_step_what_they_hold_and_less_before_every_layer():
    times = [weights_us(8, group=group) for group in (8, 4, 2, 1)]
    assert times == sorted(times, reverse=True) and times[0] > 1.5 * times[-1], "such a layer waits for weights"
    assert times[0] == weights_us(8) and times[2] == weights_us(8, held=128) == weights_us(8, group=4, held=128)
    assert weights_us(8, group=2, resident=True) == weights_us(8, resident=True) == times[-1]
    alone = [weights_us(1, training=False, group=group) for group in (8, 4, 2, 1)]
    assert alone == pytest.approx([alone[0]] * 4), "one forward pulls as much in all, whatever is kept"


def test_groups_that_cannot_be():
    for group in (3, 16, 0):
        with pytest.raises(ValueError, match=f"group={group} must divide the 8"):
            weights_us(1, group=group)
    with pytest.raises(ValueError, match="held=127 must be from 128 .* group of 2"):
        weights_us(1, group=2, held=127)


@pytest.mark.parametrize("group, held, buffers", [(8, None, 2), (4, None, 2), (2, 160, 3), (1, None, 9)])
def test_memory_of_moved_weights_is_that_of_the_layout(group, held, buffers):
    layers, experts = 3, DEEPSEEK.experts
    shapes = ((DEEPSEEK.hidden, 2 * DEEPSEEK.expert_hidden), (DEEPSEEK.expert_hidden, DEEPSEEK.hidden))
    layout = WeightLayout(experts, 8, layers, shapes, torch.bfloat16, held or experts // group, group)
    wanted = layout.registered_bytes + (0 if layout.copies_are_read else layout.kept_bytes)
    wanted += max(2, min(buffers, layers)) * layout.stack_bytes(layout.fetched)
    given = {"buffers": buffers, "held": held, "group": group}
    evaluated = dwdp.memory_bytes(DEEPSEEK, 8, layers, "bf16", training=False, **given)
    trained = dwdp.memory_bytes(DEEPSEEK, 8, layers, "bf16", training=True, **given)
    assert evaluated == pytest.approx(wanted, rel=1e-6)
    assert trained - evaluated == pytest.approx(layout.gradient_bytes, rel=1e-6)
