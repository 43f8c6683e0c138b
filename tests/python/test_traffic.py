"""The byte counters equal the closed form, exactly, on every rank."""

from __future__ import annotations

import pytest
import torch
from examples import Example, expected

from hybrid_ep import traffic
from hybrid_ep.testing import VirtualWorld


def measured(ex: Example, work, **options) -> list[dict[str, int]]:
    world = VirtualWorld(ex.num_nodes, ex.num_local_ranks)
    buffers = world.buffers(ex.hidden, max(ex.tokens), ex.num_local_experts, timeout_s=30, **options)
    expected(ex)

    def body(rank, _):
        work(buffers[rank], rank)
        return buffers[rank].traffic()

    return world.run(body)


@pytest.mark.parametrize("shape", [(1, 1), (1, 4), (4, 1), (2, 2), (3, 2)])
@pytest.mark.parametrize("weights", [True, False])
@pytest.mark.parametrize("arena_mib", [None, 0])
def test_counters_equal_the_closed_form(shape, weights, arena_mib):
    same_counters(shape, weights, arena_mib, once=False)


@pytest.mark.parametrize("shape", [(1, 4), (2, 2)])
@pytest.mark.parametrize("landing", ["first", "all"])
def test_counters_of_the_landing_asked_for(shape, landing):
    same_counters(shape, True, None, once=landing == "first", landing=landing)


def same_counters(shape, weights, arena_mib, once, **options):
    num_ranks = shape[0] * shape[1]
    ex = Example(
        *shape,
        3,
        tuple(11 * r % 40 for r in range(num_ranks)),
        4,
        48,
        weights=weights,
        skew="half_dropped",
        scale_columns=3,
        seed=8,
    )
    want, landed = expected(ex), []

    def work(buffer, rank):
        landed.append(buffer.memory_report().regions["arena"] > 0)
        mine = want.inputs[rank]
        *_, handle = buffer.dispatch_with_permute(hidden=mine.hidden, scaling_factor=mine.scale, **mine.routing())
        buffer.combine_with_unpermute(hidden=want.returned[rank], handle=handle)
        buffer.combine_with_unpermute(
            hidden=want.returned[rank], handle=handle, fp32_partials=True, probs=want.returned_probs[rank]
        )

    found = measured(ex, work, arena_mib=arena_mib, **options)
    routes = want.plan.routes
    topk, local = traffic.largest_topk(routes), ex.num_local_ranks
    sent = traffic.dispatch(
        routes,
        local,
        traffic.message_bytes(topk, local, 96, 12, weights),
        traffic.metadata_bytes(topk, local, weights),
        landed=landed[0],
        once=once,
    )
    back = traffic.combine(routes, local, traffic.partial_bytes(topk, 48, 2))
    back_fp32 = traffic.combine(routes, local, traffic.partial_bytes(topk, 48, 4, weights=True))
    counts = traffic.exchange(*shape, ex.world.num_experts)
    assert found == [traffic.add(counts, *parts) for parts in zip(sent, back, back_fp32, strict=True)]
    assert num_ranks == 1 or any(c["rail_rows"] + c["node_rows"] for c in sent)


@pytest.mark.parametrize("shape", [(1, 4), (2, 2)])
@pytest.mark.parametrize("with_probs", [True, False])
def test_rows_that_are_read_where_they_lie_cross_once_for_every_pair(shape, with_probs):
    num_ranks = shape[0] * shape[1]
    ex = Example(*shape, 3, tuple(11 * r % 40 for r in range(num_ranks)), 4, 48, skew="half_dropped", seed=8)
    want = expected(ex)

    def work(buffer, rank):
        mine = want.inputs[rank]
        rows, *_, handle = buffer.dispatch_with_permute(hidden=mine.hidden, **mine.routing())
        probs = want.returned_probs[rank] if with_probs else None
        buffer.combine_with_unpermute(hidden=rows, handle=handle, probs=probs)  # it has grown then
        outputs = buffer.empty(len(want.returned[rank]), 48, torch.bfloat16).copy_(want.returned[rank])
        buffer.reset_traffic()
        buffer.combine_with_unpermute(hidden=outputs, handle=handle, probs=probs)

    topk = traffic.largest_topk(want.plan.routes)
    row_bytes = traffic.partial_bytes(topk, 48, 2, weights=with_probs)
    back = traffic.combine(
        want.plan.routes, ex.num_local_ranks, row_bytes, every_pair=True, weight_bytes=row_bytes - 2 * 48
    )
    assert measured(ex, work) == back
    assert sum(c["node_bytes"] for c in back) > sum(
        c["node_bytes"] for c in traffic.combine(want.plan.routes, ex.num_local_ranks, row_bytes)
    )


def test_a_token_crosses_a_link_once_however_many_experts_it_chose_there():
    """8 experts on every rank, all of them chosen: one row over the rail, one for every rank."""
    routes = [torch.ones(5, 32, dtype=torch.bool)] + [torch.zeros(0, 32, dtype=torch.bool)] * 3
    assert traffic.link_rows(routes, 2) == [
        {"rail": 5, "node": 5, "self": 5, "node_pairs": 40, "self_pairs": 40},
        {"rail": 0, "node": 0, "self": 0, "node_pairs": 0, "self_pairs": 0},
        {"rail": 0, "node": 5, "self": 5, "node_pairs": 40, "self_pairs": 40},
        {"rail": 0, "node": 0, "self": 0, "node_pairs": 0, "self_pairs": 0},
    ]
    assert [c["rail_rows"] for c in traffic.combine(routes, 2, 32)] == [0, 0, 5, 0]


def test_a_wrong_closed_form_is_noticed():
    ex = Example(2, 2, 2, (6, 9, 12, 3), 3, seed=5)
    want = expected(ex)

    def work(buffer, rank):
        mine = want.inputs[rank]
        buffer.dispatch_with_permute(hidden=mine.hidden, **mine.routing())

    per_pair = traffic.dispatch(want.plan.routes, 1, traffic.message_bytes(3, 2, 32), traffic.metadata_bytes(3, 2))
    assert [c["node_rows"] for c in measured(ex, work)] != [c["node_rows"] for c in per_pair]


def test_counters_survive_growth_and_can_be_reset():
    world = VirtualWorld(1, 2)
    buffers = world.buffers(16, 1, 2, timeout_s=30)
    hidden, idx = torch.ones(50, 16, dtype=torch.bfloat16), torch.tensor([[0, 2]]).expand(50, 2)

    def work(rank, _):
        totals = []
        for rows in (1, 50):
            buffers[rank].dispatch(hidden[:rows], topk_idx=idx[:rows])
            totals.append((buffers[rank].traffic()["node_rows"], buffers[rank].traffic()["self_rows"]))
        buffers[rank].reset_traffic()
        return totals, buffers[rank].traffic()["node_bytes"]

    assert world.run(work) == [([(1, 1), (51, 51)], 0)] * 2
