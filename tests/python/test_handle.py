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


class Operations(TorchDispatchMode):
    """Names of the operations of torch that run inside it."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


MAKE_NO_KERNEL = {"empty", "new_empty", "view", "slice", "narrow", "as_strided", "detach", "lift_fresh", "alias"}


def one_rank(verb: str, **more):
    """(the buffer, its handle, the operations of torch in the verb's call)."""
    (buffer,) = VirtualWorld(1, 1).buffers(16, 8, 4, timeout_s=30)
    ex = Example(1, 1, 4, (7,), 3, 16, seed=6)
    operations = Operations()
    with operations:
        mine = make_inputs(ex, 0)
        given = {name: x.clone() for name, x in mine.routing().items()}  # whose memory is aligned
        hidden = mine.hidden.clone()
        operations.names.clear()
        *_, handle = getattr(buffer, verb)(hidden=hidden, num_of_experts=4, **more, **given)
    return buffer, handle, operations.names


@pytest.mark.parametrize("verb", ["dispatch", "dispatch_with_permute"])
def test_maps_that_nobody_reads_are_not_made(verb, unread_plans, monkeypatch):
    monkeypatch.setattr("hybrid_ep.runtime.validation.topk", lambda idx, *_, **__: idx)  # it looks at choices, on a CPU
    _, handle, names = one_rank(verb)
    assert set(names) <= MAKE_NO_KERNEL, names
    with Operations() as read:
        assert handle[2].shape == (7, 0)
    assert "scatter_" in read.names
    with Operations() as again:
        assert handle[2] is handle.attn_to_rdma_map and handle[:3][0] is handle[0]
    assert not again.names


@pytest.mark.parametrize("verb", ["dispatch", "dispatch_with_permute"])
def test_a_handle_is_a_tuple_to_whoever_takes_it_apart(verb):
    buffer, handle, _ = one_rank(verb)
    permuted = verb != "dispatch"
    elements = [*handle]
    assert isinstance(handle, tuple) and len(handle) == len(elements) == (11 if permuted else 7)
    assert all(torch.equal(a, b) if torch.is_tensor(a) else a is b for a, b in zip(elements, handle, strict=True))
    assert handle[-1] is handle[len(elements) - 1] and handle[3:5][1] is handle[4] and handle != copy.copy(handle)
    with pytest.raises(IndexError):
        handle[len(elements)]
    rows = torch.ones(21 if permuted else 7, 16)
    for other in (tuple(handle), handle + (), () + handle, list(handle), copy.copy(handle), copy.deepcopy(handle)):
        assert len(other) == len(handle) and torch.equal(other[0], handle[0])
        out, _ = (buffer.combine_with_unpermute if permuted else buffer.combine)(hidden=rows, handle=other)
        assert torch.equal(out, torch.full((7, 16), 3.0 if permuted else 1.0))
    with pytest.raises(TypeError, match="cannot be pickled"):
        copy.copy(handle).__reduce_ex__(4)[1][1][-2 if permuted else -1].plan.__reduce_ex__(4)


@pytest.mark.usefixtures("unread_plans")
def test_counts_of_a_call_that_nobody_waits_for_are_read_anew():
    """A CUDA graph that is replayed changes them behind the handle's back."""
    (buffer,) = VirtualWorld(1, 1).buffers(16, 8, 4, timeout_s=30)
    buffer._session.runs_beside = True
    mine = make_inputs(Example(1, 1, 4, (7,), 3, 16, seed=6), 0)
    call = dict(hidden=mine.hidden, num_of_experts=4, num_permuted_tokens=24, non_blocking=True, **mine.routing())
    *_, handle = buffer.dispatch_with_permute(**call)
    counts, flag = handle.tokens_per_expert, handle.overflow_flag
    plan = handle.config.plan
    plan.memory.array(plan.memory.at.tokens_per_expert, torch.int64, 4).add_(1)
    plan.overflow_flag.fill_(1)
    assert torch.equal(handle[7], counts + 1) and handle[10] is flag and flag.item() == 1
    assert handle[:3] == (None,) * 3
