"""Handles: the maps over rails, which the reference does not know, against the routing of all ranks; and what a handle
holds on the host, whether or not its call may drop rows."""

from __future__ import annotations

import copy

import pytest
import torch
from examples import Example, expected, make_inputs, same
from torch.utils._python_dispatch import TorchDispatchMode

from hybrid_ep.testing import VirtualWorld

SHAPES = [(1, 1), (1, 3), (2, 1), (2, 2), (3, 2)]


def example(shape, **more) -> Example:
    ranks = shape[0] * shape[1]
    return Example(*shape, 2, tuple((7 * r + 5) % 11 for r in range(ranks)), 3, 16, seed=6, **more)


def wanted_by(routes: list[torch.Tensor], rank: int, source: int, experts: int) -> torch.Tensor:
    """bool [tokens of source]: the rank gets them."""
    return routes[source][:, rank * experts:(rank + 1) * experts].any(1)


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
    leaves = [torch.stack([wanted_by(routes, n * locals_ + k, rank, experts) for k in range(locals_)]).any(0)
              for n in others]
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
        permuted = buffers[rank].dispatch_with_permute(hidden=mine.hidden, num_of_experts=num_experts,
                                                       **mine.routing())[4]
        for handle in (dense, permuted):
            for name, got, want in zip(("sparse_to_dense_map", "rdma_to_attn_map", "attn_to_rdma_map"), handle,
                                       rail_maps(ex, routes, rank), strict=False):
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
            hidden=mine.hidden, num_of_experts=8, num_permuted_tokens=8, non_blocking=True, **mine.routing())
        assert len(handle) == 11 and not any(element is None for element in handle)
        same("padded_tokens_per_expert", padded, plan.padded_tokens_per_expert)
        same("dense_to_expert_map", handle[6], plan.dense_to_expert)
        same("tokens_per_expert", handle[7], plan.tokens_per_expert)
        assert handle[10].tolist() == [int(plan.overflow)] and plan.overflow

    world.run(work)


class Operations(TorchDispatchMode):
    """Names of torch's operations, and of the engine's calls, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))

    def around(self, engine):
        log = self.names

        class Logged:
            def __getattr__(self, name):
                log.append(name)
                return getattr(engine, name)

        return Logged()


@pytest.mark.parametrize("verb", ["dispatch", "dispatch_with_permute"])
def test_between_the_counts_and_the_return_no_map_is_made(verb, unread_plans):
    """As on a GPU, where each operation is a kernel in front of the experts. What is there makes memory, or views."""
    buffer = VirtualWorld(1, 1).buffers(16, 16, 2, timeout_s=30)[0]
    ex = example((1, 1))
    mine = make_inputs(ex, 0)
    with Operations() as seen:
        buffer._session.engine = seen.around(buffer._session.engine)
        *_, handle = getattr(buffer, verb)(hidden=mine.hidden, num_of_experts=2, **mine.routing())
        after = seen.names[seen.names.index("place") + 1:]
        made = len(seen.names)
        assert int(handle[3]) == len(mine.hidden) == handle[5 if verb == "dispatch" else 8]
        assert handle[0].shape == (len(mine.hidden), 1) and handle[0] is handle[0] and handle[-7:][0] is handle[-7]
        assert len(seen.names) > made + 5  # the maps, now
    assert "dispatch" in after
    launches = {name for name in after if name.startswith("aten.")} - {
        "aten.empty.memory_format", "aten.slice.Tensor", "aten.view.dtype", "aten.view.default", "aten.detach.default",
        "aten.lift_fresh.default"}
    assert not launches


def test_a_handle_is_any_tuple_to_whoever_takes_it_apart():
    buffer = VirtualWorld(1, 1).buffers(16, 16, 2, timeout_s=30)[0]
    mine = make_inputs(example((1, 1)), 0)

    def fresh():
        return buffer.dispatch(mine.hidden, num_of_experts=2, **mine.routing())[3]

    ways = [tuple, lambda h: (*h,), lambda h: () + h, lambda h: h + (), lambda h: h[:], copy.copy, copy.deepcopy,
            lambda h: type(h)(x for x in h)]
    wanted = tuple(fresh())
    for way in ways:
        found = way(fresh())
        assert len(found) == 7 and isinstance(found, tuple)
        for got, want in zip(found[:5], wanted[:5], strict=True):
            assert torch.equal(got, want)
        same("sum", buffer.combine(mine.hidden, handle=found)[0], buffer.combine(mine.hidden, handle=wanted)[0])
