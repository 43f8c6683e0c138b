"""Kernels of spare slots on a GPU: pushes, waits and collections give the bits of the host's tests, one by one, queued
without a wait of the host, and in a CUDA graph that is replayed with another plan."""

from __future__ import annotations

import functools
import threading
import time

import numpy as np
import pytest
import torch
from test_spares import SHAPES, drawn, make, owners_of, random_plan, train

from hybrid_ep.balance import MicrobatchOptions
from hybrid_ep.errors import DeadlineError
from hybrid_ep.testing import VirtualWorld

pytestmark = pytest.mark.balance

MATRICES = range(len(SHAPES))


def idle() -> None:
    """Until this rank's stream is: nothing may wait inside CUDA while another rank's kernel waits for a launch."""
    stream = torch.cuda.current_stream()
    while not stream.query():
        time.sleep(20e-6)


def on_gpu(
    num_ranks: int, spare: int, owned: int, work, dtype=torch.float32, num_nodes: int = 1, beside=False, **options
):
    """[work(rank, slots)] of all ranks at once, each on its stream, with slots on the current device. beside: pushes
    and collections run on a stream of their own, as where a rank has a GPU of its own."""
    world = VirtualWorld(num_nodes, num_ranks // num_nodes)
    if num_nodes > 1:
        options["num_of_hybrid_ep_ranks_per_nvlink_domain"] = num_ranks // num_nodes
    world.on_device()
    how = {"executor": "cuda"} | options
    slots = world.run(lambda _, group: make(group, spare, owned, dtype, **how))
    for one, stream in zip(slots, world.more_streams() if beside else (), strict=beside):
        one._stream = stream
    try:
        return world.run(lambda rank, _: work(rank, slots[rank]))
    finally:
        for one in slots:
            one.destroy()


@pytest.mark.parametrize(
    "num_ranks, spare, owned, dtype, blocks, nodes, within, executor",
    [
        (1, 1, 1, torch.bfloat16, 1, 1, False, "cuda"),
        (2, 3, 1, torch.float32, 2, 1, False, "cuda"),
        (3, 1, 3, torch.float16, 1, 1, False, "cuda"),
        (4, 2, 2, torch.bfloat16, 3, 1, False, "cuda"),
        (4, 2, 2, torch.bfloat16, 1, 2, True, "cuda"),
        (4, 2, 2, torch.bfloat16, 1, 2, False, "cuda"),
        (6, 1, 1, torch.float32, 2, 3, False, "cuda_loopback"),
    ],
)
def test_weights_arrive_and_gradients_come_home_in_the_plans_order(
    num_ranks, spare, owned, dtype, blocks, nodes, within, executor
):
    near = num_ranks // nodes

    def work(rank, slots):
        layers = (train(slots, rank, s, num_ranks, spare, owned, dtype, "cuda", idle, near, within) for s in range(3))
        return sum(layers)

    options = {"num_blocks": blocks, "clones_within_node": within, "executor": executor}
    assert sum(on_gpu(num_ranks, spare, owned, work, dtype, nodes, **options)) > 0


def test_large_matrices_take_several_chunks():
    """Stages of 8 KiB: an expert of 96 KiB, and one of which the last chunk is short."""
    shapes = [(64, 384), (5, 1000)]
    meet = threading.Barrier(3)

    def work(rank, slots):
        plan = torch.tensor([[1], [2], [1]], dtype=torch.int32)
        weights = [[drawn(shape, rank, n).cuda() for n, shape in enumerate(shapes)]]
        sums = [[torch.zeros(shape, device="cuda") for shape in shapes]]
        plan = plan.cuda()
        idle()
        meet.wait(60)
        slots.push(plan, weights)
        slots.wait()
        idle()
        held = [1, 2, 1][rank]
        assert all(torch.equal(slots.weights[n][0].cpu(), drawn(shape, held, n)) for n, shape in enumerate(shapes))
        for n, stack in enumerate(slots.gradients):
            stack.copy_(drawn((1, *shapes[n]), rank, n, 7))
        idle()
        meet.wait(60)
        slots.collect(plan, sums)
        idle()
        holders = {0: (), 1: (0, 2), 2: (1,)}[rank]
        for n, shape in enumerate(shapes):
            wanted = torch.zeros(shape)
            for holder in holders:
                wanted += drawn((1, *shape), holder, n, 7)[0]
            assert torch.equal(sums[0][n].cpu(), wanted)

    on_gpu(3, 1, 1, work, shapes=shapes, num_blocks=2)


class Layers:
    """Two layers over the same slots, forward and backward, with all that they need on the device beforehand, so that
    nothing waits between their launches."""

    def __init__(self, slots, rank: int, num_ranks: int, spare: int, owned: int, seeds=(1, 2), per_node=None):
        self.slots, self.rank, self.num_ranks, self.spare = slots, rank, num_ranks, spare
        self.per_node = per_node or num_ranks
        self.seeds, self.plans, self.owners, self.weights, self.sums, self.seen = seeds, [], [], [], [], []
        for seed in seeds:
            random = np.random.default_rng(seed)
            self.owners.append(owners_of(random, num_ranks, owned))
            self.plans.append(random_plan(random, num_ranks, spare, self.owners[-1]))
            mine = self.owners[-1].experts_of(rank)
            self.weights.append([[drawn(SHAPES[n], seed, e, n).cuda() for n in MATRICES] for e in mine])
            self.sums.append([[torch.zeros(SHAPES[n], device="cuda") for n in MATRICES] for _ in mine])
            self.seen.append([torch.zeros_like(stack) for stack in slots.weights])
        self.on_device = [plan.cuda() for plan in self.plans]
        self.read = [[[torch.zeros_like(x) for x in one] for one in layer] for layer in self.sums]  # behind collections
        self.busy = torch.ones(1 << 12, device="cuda")
        self.gradients = [[drawn((spare, *SHAPES[n]), s, rank, n, 9).cuda() for n in MATRICES] for s in seeds]

    def launch(self, backward: bool = True) -> None:
        busy = self.busy
        for layer in (0, 1, 1, 0):
            self.slots.push(self.on_device[layer], self.weights[layer], self.owners[layer])
            self.slots.wait()
            for seen, stack in zip(self.seen[layer], self.slots.weights, strict=True):
                seen.copy_(stack)
        for layer in (1, 0) if backward else ():
            for stack, gradient in zip(self.slots.gradients, self.gradients[layer], strict=True):
                stack.copy_(gradient)
            self.slots.start_collect(self.on_device[layer], self.sums[layer], self.owners[layer])
            busy.mul_(3).remainder_(7)  # what an owner computes meanwhile
            self.slots.wait_collect()
            for one, read in zip(self.sums[layer], self.read[layer], strict=True):
                for x, y in zip(one, read, strict=True):
                    y.copy_(x)

    def change(self, seed: int) -> None:
        """Other plans in the tensors that the launches read."""
        for layer, plan in enumerate(self.plans):
            random = np.random.default_rng((seed, layer))
            other = random_plan(random, self.num_ranks, self.spare, self.owners[layer])
            plan.copy_(other)
            self.on_device[layer].copy_(other)

    def check(self, times: int) -> int:
        """What came of the last launches; sums of so many, of plans that were the same. Returns clones of this rank."""
        for layer, (plan, owners) in enumerate(zip(self.plans, self.owners, strict=True)):
            seed = self.seeds[layer]
            for own, e in enumerate(owners.experts_of(self.rank)):
                for n in MATRICES:
                    wanted, holders = torch.zeros(SHAPES[n]), (plan == e).nonzero().tolist()
                    nodes = self.num_ranks // self.per_node
                    for behind in [*range(1, nodes + 1)] * times:
                        node = (self.rank // self.per_node + behind) % nodes
                        near = [(holder, slot) for holder, slot in holders if holder // self.per_node == node]
                        given = [drawn((self.spare, *SHAPES[n]), seed, holder, n, 9)[slot] for holder, slot in near]
                        wanted += functools.reduce(torch.add, given) if given else 0
                    assert torch.equal(self.read[layer][own][n].cpu(), wanted), (layer, e, n)
        return self.check_weights()

    def check_weights(self) -> int:
        """What slots held. Returns clones of this rank."""
        clones = 0
        for layer, plan in enumerate(self.plans):
            for s, e in enumerate(plan[self.rank].tolist()):
                clones += e >= 0
                for n in MATRICES:
                    assert e < 0 or torch.equal(self.seen[layer][n][s].cpu(), drawn(SHAPES[n], self.seeds[layer], e, n))
        return clones

    def clear(self) -> None:
        for one in self.sums:
            for matrices in one:
                for x in matrices:
                    x.zero_()


@pytest.mark.parametrize("num_ranks, beside, nodes", [(2, False, 1), (3, False, 1), (2, True, 1), (4, False, 2)])
def test_layers_that_are_queued_do_not_wait_for_the_host(num_ranks, beside, nodes):
    meet = threading.Barrier(num_ranks)

    def work(rank, slots):
        layers = Layers(slots, rank, num_ranks, 2, 2, per_node=num_ranks // nodes)
        idle()
        meet.wait(60)
        layers.launch()  # tables of addresses go to the device, which may wait
        idle()
        meet.wait(60)
        layers.launch()
        idle()
        return layers.check(2)

    assert sum(on_gpu(num_ranks, 2, 2, work, num_nodes=nodes, beside=beside)) > 0


@pytest.mark.parametrize(
    "beside, backward, nodes", [(False, True, 1), (True, True, 1), (True, False, 1), (True, True, 2)]
)
def test_a_replay_of_a_graph_goes_by_the_plan_that_is_there(beside, backward, nodes):
    num_ranks = 2
    meet, one_at_a_time = threading.Barrier(num_ranks), threading.Lock()

    def work(rank, slots):
        layers = Layers(slots, rank, num_ranks, 2, 2, per_node=num_ranks // nodes)
        stream, clones = torch.cuda.current_stream(), 0
        idle()
        meet.wait(60)
        layers.launch()
        idle()
        meet.wait(60)
        graph = torch.cuda.CUDAGraph()
        with one_at_a_time, torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            layers.launch(backward)
        for seed in (5, 6, 7):
            layers.change(seed)
            layers.clear()
            idle()
            meet.wait(60)
            graph.replay()
            idle()
            clones += layers.check(1) if backward else layers.check_weights()
            meet.wait(60)
        return clones

    assert sum(on_gpu(num_ranks, 2, 2, work, num_nodes=nodes, beside=beside)) > 0


def test_a_plan_of_the_kernels_is_pushed_where_it_lies():
    """plan_clones, then a push by its tensor, which no host has read."""
    world = VirtualWorld(1, 3)
    buffers = world.buffers(16, 64, 3, clones=MicrobatchOptions(spare_slots=1), executor="cuda", timeout_s=20)
    meet = threading.Barrier(3)

    def work(rank, group):
        slots = make(group, 1, 2, executor="cuda")
        idx = torch.zeros(40, 1, dtype=torch.int64).cuda()  # all to one expert
        weights = [[torch.full(shape, 50.0 + 10 * rank + e).cuda() for shape in SHAPES] for e in range(2)]
        idle()
        meet.wait(60)
        routed = buffers[rank].plan_clones(topk_idx=idx)
        idle()
        meet.wait(60)
        slots.push(routed.plan, weights)
        slots.wait()
        idle()
        held = int(routed.plan.slot_expert[rank, 0].cpu())
        assert held < 0 or all((s[0].cpu() == 50.0 + 10 * (held // 2) + held % 2).all() for s in slots.weights)
        slots.destroy()
        return held

    assert sum(held == 0 for held in world.run(work)) == 2
    for buffer in buffers:
        buffer.destroy()


def test_an_owner_that_does_not_push_is_named():
    def work(rank, slots):
        if rank == 1:
            return None
        plan = torch.tensor([[1], [-1]], dtype=torch.int32).cuda()  # rank 0 holds a clone of rank 1's
        weights = [[torch.zeros(shape).cuda() for shape in SHAPES]]
        slots.push(plan, weights)
        slots.wait()
        torch.cuda.synchronize()
        with pytest.raises(DeadlineError, match="rank 1") as late:
            slots.push(plan, weights)
        assert late.value.site == "clone_weights" and late.value.peer == 1
        return True

    assert on_gpu(2, 1, 1, work, timeout_s=1.5) == [True, None]
