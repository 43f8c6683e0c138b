"""Handles: the maps over rails, which the reference does not know, against the routing of all ranks; and what a handle
holds on the host, whether or not its call may drop rows."""

from __future__ import annotations

import pytest
import torch
from examples import Example, expected, make_inputs, same

from hybrid_ep.testing import VirtualWorld

SHAPES = [(1, 1), (1, 3), (2, 1), (2, 2), (3, 2)]


def example(shape, **more) -> Example:
    ranks = shape[0] * shape[1]
    return Example(*shape, 2, tuple((7 * r + 5) % 11 for r in range(ranks)), 3, 16, seed=6, **more)


def wanted_by(routes: list[torch.Tensor], rank: int, source: int, experts: int) -> torch.Tensor:
    """bool [tokens of source]: the rank gets them."""
    return routes[source][:, rank * experts : (rank + 1) * experts].any(1)


def rail_maps(ex: Example, routes: list[torch.Tensor], rank: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """sparse_to_dense_map, rdma_to_attn_map and attn_to_rdma_map, token by token."""
    nodes, locals_, experts = ex.num_nodes, ex.num_local_ranks, ex.num_local_experts
    node, rail = divmod(rank, locals_)
    rows: list[list[int]] = []
    for source in range(rail, nodes * locals_, locals_):  # this rail's ranks, by node
        for token in range(len(routes[source])):
            row_in = []
            for target in range(node * locals_, (node + 1) * locals_):
                before = sum(int(wanted_by(routes, target, s, experts).sum()) for s in range(source))
                wanted = wanted_by(routes, target, source, experts)
                row_in.append(before + int(wanted[:token].sum()) if wanted[token] else -1)
            rows.append(row_in)
    sparse_to_dense = torch.tensor(rows, dtype=torch.int32).view(-1, locals_)
    others = [n for n in range(nodes) if n != node]
    leaves = [
        torch.stack([wanted_by(routes, n * locals_ + k, rank, experts) for k in range(locals_)]).any(0) for n in others
    ]
    away = torch.stack(leaves, 1) if others else torch.zeros(len(routes[rank]), 0, dtype=torch.bool)
    return sparse_to_dense, (sparse_to_dense >= 0).any(1), away


@pytest.mark.parametrize("maker", ["core", "torch"])
@pytest.mark.parametrize("routing", ["topk", "map"])
@pytest.mark.parametrize("shape", SHAPES)
def test_maps_over_rails_are_those_of_the_routing(shape, routing, maker, request):
    if maker == "torch":  # as on a GPU
        request.getfixturevalue("unread_plans")
    ex = example(shape, routing=routing)
    routes, world = expected(ex).plan.routes, VirtualWorld(*shape)
    buffers = world.buffers(16, 16, 2, timeout_s=30)
    num_experts = None if routing == "map" else ex.world.num_experts

    def work(rank, _):
        mine = make_inputs(ex, rank)
        dense = buffers[rank].dispatch(mine.hidden, num_of_experts=num_experts, **mine.routing())[3]
        permuted = buffers[rank].dispatch_with_permute(
            hidden=mine.hidden, num_of_experts=num_experts, **mine.routing()
        )[4]
        for handle in (dense, permuted):
            for name, got, want in zip(
                ("sparse_to_dense_map", "rdma_to_attn_map", "attn_to_rdma_map"),
                handle,
                rail_maps(ex, routes, rank),
                strict=False,
            ):
                same(f"{name} of rank {rank}", got, want)
        same("local_expert_routing_map", dense[4], expected(ex).plan.ranks[rank].local_route)
        assert dense[5] == permuted[8] == ex.tokens[rank]

    world.run(work)


def test_a_host_knows_every_element_also_of_a_call_that_may_drop_rows():
    ex = example((2, 2), budget=8)
    world = VirtualWorld(2, 2)
    buffers = world.buffers(16, 16, 2, timeout_s=30)

    def work(rank, _):
        mine, plan = make_inputs(ex, rank), expected(ex).plan.ranks[rank]
        *_, padded, handle = buffers[rank].dispatch_with_permute(
            hidden=mine.hidden, num_of_experts=8, num_permuted_tokens=8, non_blocking=True, **mine.routing()
        )
        assert len(handle) == 11 and not any(element is None for element in handle)
        same("padded_tokens_per_expert", padded, plan.padded_tokens_per_expert)
        same("dense_to_expert_map", handle[6], plan.dense_to_expert)
        same("tokens_per_expert", handle[7], plan.tokens_per_expert)
        assert handle[10].tolist() == [int(plan.overflow)] and plan.overflow

    world.run(work)
