"""Sync-free operations in CUDA graphs: dispatch, experts and combine captured together; replays with other routing in
the same tensors are bit for bit what the reference says of that routing."""

from __future__ import annotations

import dataclasses
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from examples import Example, expected, make_inputs, same
from gpu_world import GpuWorld

from hybrid_ep import reference

BUDGET, TOKENS = 320, 24


def example(shape, seed: int) -> Example:
    num_ranks = shape[0] * shape[1]
    return Example(*shape, 2, (TOKENS,) * num_ranks, 2, 64, pad_multiple=8, budget=BUDGET, seed=seed)


def step(buffer, mine, num_experts: int):
    """One MoE layer whose experts double: (tokens, the permuted rows, the overflow flag)."""
    rows, _, _, _, handle = buffer.dispatch_with_permute(
        hidden=mine.hidden,
        topk_idx=mine.topk_idx,
        topk_weights=mine.topk_weights,
        num_of_experts=num_experts,
        pad_multiple=8,
        num_permuted_tokens=BUDGET,
        non_blocking=True,
    )
    out, _ = buffer.combine_with_unpermute(hidden=rows * 2, handle=handle)
    return out, rows, handle[10]


@pytest.mark.parametrize("shape", [(1, 1), (1, 2), (2, 1), (2, 2)])
def test_a_replay_with_other_routing_gives_its_results(shape):
    world = GpuWorld(*shape, 2, skew=0)
    meet, one_at_a_time = threading.Barrier(world.world.size), threading.Lock()
    examples = [example(shape, seed) for seed in range(4)]
    num_experts = examples[0].world.num_experts

    def work(rank, _):
        buffer, stream = world.raw[rank], world.streams[rank]
        mine = make_inputs(examples[0], rank)
        mine = dataclasses.replace(
            mine, **{name: getattr(mine, name).cuda() for name in ("hidden", "topk_idx", "topk_weights")}
        )
        buffer.dispatch_with_permute(  # blocking: makes room on all ranks together
            hidden=mine.hidden, topk_idx=mine.topk_idx, topk_weights=mine.topk_weights, num_of_experts=num_experts
        )
        step(buffer, mine, num_experts)
        stream.synchronize()
        meet.wait(60)
        graph = torch.cuda.CUDAGraph()
        with one_at_a_time, torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            out, rows, overflow = step(buffer, mine, num_experts)
        for ex in (*examples, examples[0]):
            now, want = make_inputs(ex, rank), expected(ex)
            for name in ("hidden", "topk_idx", "topk_weights"):
                getattr(mine, name).copy_(getattr(now, name))
            out.fill_(float("nan")), rows.fill_(float("nan"))
            stream.synchronize()
            meet.wait(60)
            graph.replay()
            stream.synchronize()
            same("rows", rows.cpu(), want.permuted[rank][0])
            back = [p[0] * 2 for p in want.permuted]
            same("tokens", out.cpu(), reference.combine_world(want.plan, back, None, True, False)[rank][0])
            assert int(overflow) == int(want.plan.ranks[rank].overflow)
            meet.wait(60)
        with pytest.raises(ValueError, match="CUDA graph"):
            buffer.dispatch(
                torch.zeros(1, 4096, device="cuda").bfloat16(),
                num_of_experts=num_experts,
                topk_idx=torch.zeros(1, 1, dtype=torch.int64, device="cuda"),
            )

    world.run(work)
    world.close()


def test_a_blocking_dispatch_beside_another_threads_capture():
    """The default mode of a capture forbids every thread what no stream orders; waiting for counts is such a call."""
    world = GpuWorld(1, 1, 2, skew=0)
    ex = dataclasses.replace(example((1, 1), 0), budget=None)
    mine, want = make_inputs(ex, 0), expected(ex)
    given = {name: getattr(mine, name).cuda() for name in ("hidden", "topk_idx", "topk_weights")}
    num_experts = ex.world.num_experts

    def dispatch():
        with torch.cuda.stream(world.streams[0]):
            return world.raw[0].dispatch_with_permute(num_of_experts=num_experts, pad_multiple=8, **given)[0]

    dispatch()  # makes room
    x, stream, graph = torch.ones(4, device="cuda"), torch.cuda.Stream(), torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with ThreadPoolExecutor(1) as other, torch.cuda.graph(graph, stream=stream):
        x.add_(1)
        rows = other.submit(dispatch).result(60)
        other.submit(world.raw[0].traffic).result(60)  # waits until the stream has come to its end
    same("rows", rows.cpu(), want.permuted[0][0])
    graph.replay()
    torch.cuda.synchronize()
    assert x.tolist() == [2] * 4
    world.close()


def test_a_buffer_begins_and_ends_beside_another_threads_capture():
    """Making memory and giving it back is what no stream orders, either."""
    x, stream, graph = torch.ones(4, device="cuda"), torch.cuda.Stream(), torch.cuda.CUDAGraph()
    worlds = [GpuWorld(1, 1, 2, skew=0)]

    def begin():
        worlds.append(GpuWorld(1, 1, 2, skew=0))

    def end():
        for world in worlds:
            world.close()

    torch.cuda.synchronize()
    with ThreadPoolExecutor(1) as other, torch.cuda.graph(graph, stream=stream):
        x.add_(1)
        other.submit(begin).result(60)
        other.submit(end).result(60)
    graph.replay()
    torch.cuda.synchronize()
    assert x.tolist() == [2] * 4


def test_counters_are_no_part_of_a_capture():
    world = GpuWorld(1, 1, 2, skew=0)
    buffer, mine = world.raw[0], make_inputs(example((1, 1), 0), 0)
    mine = dataclasses.replace(
        mine, **{name: getattr(mine, name).cuda() for name in ("hidden", "topk_idx", "topk_weights")}
    )

    def work(rank, _):
        buffer.dispatch_with_permute(
            hidden=mine.hidden, topk_idx=mine.topk_idx, topk_weights=mine.topk_weights, num_of_experts=2
        )
        step(buffer, mine, 2)
        stream, graph = world.streams[0], torch.cuda.CUDAGraph()
        stream.synchronize()
        before = buffer.traffic()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            out, _, _ = step(buffer, mine, 2)
            for ask in (buffer.traffic, buffer.reset_traffic, buffer.wait_seconds):
                with pytest.raises(ValueError, match="captures a CUDA graph; ask before the capture or after it"):
                    ask()
        graph.replay()
        stream.synchronize()
        again = buffer.traffic()["self_rows"] - before["self_rows"]
        assert 0 < again < before["self_rows"]

    world.run(work)
    world.close()


def test_a_blocking_dispatch_cannot_be_captured():
    world = GpuWorld(1, 1, 2, skew=0)
    mine = make_inputs(example((1, 1), 0), 0)
    hidden, idx = mine.hidden.cuda(), mine.topk_idx.cuda()
    world.raw[0].dispatch_with_permute(hidden=hidden, topk_idx=idx, num_of_experts=2)
    torch.cuda.synchronize()
    with pytest.raises(ValueError, match="non_blocking"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        world.raw[0].dispatch_with_permute(hidden=hidden, topk_idx=idx, num_of_experts=2)
    world.close()


def test_sync_free_calls_do_not_wait_for_the_device():
    world = GpuWorld(1, 1, 2, skew=0)
    mine = make_inputs(example((1, 1), 0), 0)
    mine = dataclasses.replace(
        mine, hidden=mine.hidden.cuda(), topk_idx=mine.topk_idx.cuda(), topk_weights=mine.topk_weights.cuda()
    )

    def work(rank, _):
        world.raw[0].dispatch_with_permute(
            hidden=mine.hidden, topk_idx=mine.topk_idx, num_of_experts=2, topk_weights=mine.topk_weights
        )
        step(world.raw[0], mine, 2)
        torch.cuda.set_sync_debug_mode("error")  # torch's own synchronising calls
        try:
            torch.cuda._sleep(1 << 28)  # a good tenth of a second
            before = torch.cuda.Event()
            before.record()
            step(world.raw[0], mine, 2)
            assert not before.query(), "the host waited for what was on the stream before"
        finally:
            torch.cuda.set_sync_debug_mode("default")
        world.streams[0].synchronize()

    world.run(work)
    world.close()
