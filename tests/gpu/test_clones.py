"""plan_clones on a GPU: the host's plan and routing, also in a CUDA graph that is replayed with other routing."""

from __future__ import annotations

import threading

import pytest
import torch
from gpu_world import GpuWorld
from test_clone_planning import L, as_map, options_of, routings, shuffled, wanted

from hybrid_ep.balance.owners import Owners

pytestmark = pytest.mark.balance

SHAPES = [(1, 1), (1, 2), (2, 2)]


def same_on_the_host(found, idx, rank, num_nodes, owners, dense: bool) -> int:
    plan, chosen, physical = wanted(idx, options_of(1), num_nodes, owners, rank)
    assert found.plan.slot_expert.cpu().tolist() == plan.slot_expert.tolist()
    assert found.plan.slot_tokens.cpu().tolist() == plan.slot_tokens.tolist()
    assert found.plan.counts.cpu().tolist() == plan.counts.tolist()
    if dense:
        assert torch.equal(found.routing_map.cpu(), physical)
        again = torch.zeros_like(physical).scatter_(1, found.columns.cpu(), as_map(idx[rank], len(idx) * L))
        assert torch.equal(again, physical)
    else:
        assert torch.equal(found.topk_idx.cpu(), chosen)
    return plan.num_copies


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dense", [False, True])
def test_the_plan_and_the_routing_are_the_hosts(shape, dense):
    world = GpuWorld(*shape, L + 1, skew=0, clones=options_of(1))
    size = world.world.size
    meet = threading.Barrier(size)

    def work(rank, _):
        copies = 0
        for seed in range(3):
            idx, owners = routings(seed, size), shuffled(seed, size) if seed else Owners(size * L, size)
            chosen = as_map(idx[rank], size * L) if dense else idx[rank]
            chosen = chosen.cuda()
            meet.wait(60)
            given = {"routing_map" if dense else "topk_idx": chosen}
            found = world.raw[rank].plan_clones(**given, owners=owners)
            world.streams[rank].synchronize()
            copies += same_on_the_host(found, idx, rank, shape[0], owners, dense)
            again = world.raw[rank].plan_clones(**given, owners=owners, plan=found.plan)
            world.streams[rank].synchronize()
            same_on_the_host(again, idx, rank, shape[0], owners, dense)
        return copies

    copies = world.run(work)
    assert size == 1 or min(copies) > 0
    world.close()


@pytest.mark.parametrize("shape", SHAPES[1:])
def test_a_replay_of_a_graph_plans_for_other_routing(shape):
    world = GpuWorld(*shape, L + 1, skew=0, clones=options_of(1))
    size, tokens = world.world.size, 40
    meet, one_at_a_time = threading.Barrier(size), threading.Lock()
    batches = [
        [torch.nn.functional.pad(one, (0, 0, 0, tokens - len(one)), value=-1) for one in cut]
        for cut in ([one[:tokens] for one in routings(seed, size)] for seed in range(3))
    ]
    owners = Owners(size * L, size)

    def work(rank, _):
        buffer, stream = world.raw[rank], world.streams[rank]
        mine = batches[0][rank].cuda()
        buffer.plan_clones(topk_idx=mine)
        stream.synchronize()
        meet.wait(60)
        graph = torch.cuda.CUDAGraph()
        with one_at_a_time, torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            found = buffer.plan_clones(topk_idx=mine)
        for idx in (*batches, batches[0]):
            mine.copy_(idx[rank])
            stream.synchronize()
            meet.wait(60)
            graph.replay()
            stream.synchronize()
            same_on_the_host(found, idx, rank, shape[0], owners, False)
            meet.wait(60)

    world.run(work)
    world.close()
