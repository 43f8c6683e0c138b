"""SM counts from link rates, against figures computed by hand; num_sms of a call."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from examples import Example, check_permuted, expected, make_inputs, same

from hybrid_ep.hardware import clusters
from hybrid_ep.hardware.block_split import local_blocks, parts
from hybrid_ep.perf import model
from hybrid_ep.perf.shape import Shape
from hybrid_ep.runtime import sm_plan
from hybrid_ep.testing import VirtualWorld

H100 = clusters.get("h100_8x400g")


def test_one_node_by_hand():
    plan = sm_plan.plan(H100, 1, 8, 256, 14336)
    # 8 ranks, 8 of 256 experts: 8 (1 - C(224, 8) / C(256, 8)) = 5.295 ranks a token
    assert plan.ranks_per_token == pytest.approx(5.295, abs=1e-3) and plan.nodes_per_token == 1
    load, store = (14.336 / rate + 0.05109 for rate in (H100.gpu.load_gb_per_s, 32 * 1.83))
    # in: the token and what was received; out: to ranks, to 8 experts
    assert plan.sm_us == pytest.approx(load * (1 + 5.295) + store * (5.295 + 8), rel=1e-3) and plan.rail_us == 0
    assert plan.num_sms == math.ceil(plan.sm_us / (14.336 * 5.295 * 7 / 8 / 380)) == 29


def test_a_rail_needs_the_fewer_sms_the_more_nodes_there_are():
    sms = [sm_plan.plan(H100, nodes, 8, 256, 14336).num_sms for nodes in (2, 4, 8)]
    assert sms == [21, 10, 7]
    twice = replace(H100, nic=replace(H100.nic, gb_per_s=H100.nic.gb_per_s._replace(value=100)))
    assert sm_plan.plan(twice, 4, 8, 256, 14336).num_sms == 19  # a rail twice as fast


@pytest.mark.parametrize(
    "name, nodes, local",
    [
        ("h100_8x400g", 1, 4),
        ("h100_8x400g", 1, 8),
        ("h100_8x400g", 2, 8),
        ("h100_8x400g", 8, 8),
        ("b200_8x400g", 4, 8),
        ("b300_8x800g", 4, 8),
        ("gb200_nvl72", 1, 64),
        ("gb200_nvl72", 2, 32),
    ],
)
def test_the_model_finds_little_to_gain_with_more(name, nodes, local):
    """Against half of the GPU: waits, pipelines that fill and drain, and sums, which rates know nothing of. Combine
    pays most for the sums: 39 % on four nodes of B200, whose plan is of nine SMs."""
    cluster, shape = clusters.get(name), Shape(nodes * local, local, 4096, 7168, 8, 256)
    num_sms = sm_plan.plan(cluster, nodes, local, 256, 14336).num_sms
    for op in model.OPS:
        at = {sms: model.predict(op, shape, cluster, num_sms=sms, chunk=64).kernel_us for sms in (num_sms, 24, 48, 64)}
        assert at[num_sms] <= 1.4 * min(at.values()), op


def test_local_work_gets_as_many_blocks_again_as_there_are_sms():
    for operation in ("dispatch", "combine"):
        assert [local_blocks(operation, n, 132) for n in (1, 8, 50, 66, 132)] == [2, 12, 75, 66, 0]
    assert local_blocks("dispatch", 5, 4) == local_blocks("combine", 5, 4) == 0


def test_blocks_of_one_number_are_parted():
    assert [parts("dispatch", n) for n in (1, 2, 16, 29)] == [(1, 0), (1, 1), (8, 8), (15, 14)]
    assert [parts("combine", n) for n in (1, 2, 16, 29)] == [(1, 0), (1, 1), (7, 9), (12, 17)]


def test_limits():
    assert sm_plan.plan(H100, 1, 1, 4, 1024).num_sms == 132 // 4  # no link at all
    assert 1 <= sm_plan.plan(H100, 64, 1, 64, 16).num_sms <= 33
    assert "SMs (h100_8x400g)" in str(sm_plan.plan(H100, 2, 8, 256, 14336))


@pytest.mark.parametrize(
    "name, capability, cluster",
    [
        ("NVIDIA H200", (9, 0), "h200_8x400g"),
        ("NVIDIA GB200", (10, 0), "gb200_nvl72"),
        ("NVIDIA GB300", (10, 3), "gb300_nvl72"),
        ("NVIDIA B300 SXM6", (10, 3), "b300_8x800g"),
        ("NVIDIA B200", (10, 0), "b200_8x400g"),
        ("NVIDIA GH", (9, 0), "h100_8x400g"),
        ("other", (10, 0), "b200_8x400g"),
    ],
)
def test_rates_of_a_gpu(name, capability, cluster):
    assert sm_plan.cluster_of(name, capability).name == cluster


def test_any_number_of_sms_on_one_buffer_and_handle():
    ex = Example(2, 1, 2, (70, 41), 2, 48, pad_multiple=4, seed=8)
    world, want = VirtualWorld(2, 1), expected(ex)
    buffers = world.buffers(48, 70, 2)
    assert buffers[0].sm_plan is None and buffers[0].config.num_of_blocks_dispatch_api == 1

    def work(rank, _):
        mine, handle = make_inputs(ex, rank), None
        for num_sms in (1, 7, 2, 33, 3):
            rows, _, _, _, handle = buffers[rank].dispatch_with_permute(
                hidden=mine.hidden,
                num_of_experts=4,
                pad_multiple=4,
                num_sms=num_sms,
                **({"handle": handle} if handle else mine.routing()),
            )
            same("rows", rows, want.permuted[rank][0])
            out, _ = buffers[rank].combine_with_unpermute(
                hidden=want.returned[rank], handle=handle, num_sms=num_sms + 1
            )
            same("combined", out, want.combined[rank][0])
        check_permuted(same, buffers[rank], rank, ex, want)

    world.run(work)
    with pytest.raises(ValueError, match="num_sms=0"):
        world.run(
            lambda rank, _: buffers[rank].dispatch(
                make_inputs(ex, rank).hidden, num_sms=0, num_of_experts=4, **make_inputs(ex, rank).routing()
            )
        )
