"""The latency path on a device: the reference's bits by every kind of call, on both paths in turn, and captured in CUDA
graphs whose replays take other routing; in one node and over several."""

from __future__ import annotations

import dataclasses
import threading

import pytest
import torch
from examples import Example, check, expected, make_inputs, same
from gpu_world import GpuWorld
from test_latency import ByLines, check_either_way

from hybrid_ep import reference

TOKENS = 16  # latency_tokens
EXAMPLES = {
    "bf16 with scales": Example(1, 2, 2, (9, 5), 2, 64, scale_columns=1, pad_multiple=4, budget=64, seed=3),
    "fp32": Example(1, 2, 2, (6, 11), 3, 96, "fp32", budget=64, seed=4),
    "fp16 in fp32 partials": Example(1, 2, 2, (7, 7), 2, 48, "fp16", fp32_partials=True, budget=48, seed=5),
    "a rank without tokens": Example(1, 3, 2, (7, 0, 16), 3, 48, budget=160, seed=11),
    "a map, some tokens without experts": Example(
        1, 3, 1, (0, 8, 3), 2, 16, routing="map", skew="half_dropped", budget=40, seed=6
    ),
    "no rows at all": Example(1, 2, 2, (3, 4), 2, 16, skew="nothing", budget=8, seed=7),
    "one rank for all rows": Example(1, 3, 2, (12, 9, 16), 2, 32, skew="one_rank", budget=80, seed=8),
    "a budget that drops": Example(1, 2, 2, (16, 14), 2, 64, budget=9, seed=9),
    "no weights, padding of empty experts": Example(
        1, 2, 4, (2, 1), 1, 32, weights=False, pad_multiple=4, pad_empty_experts=True, budget=64, seed=10
    ),
    "rows of many lines": Example(1, 2, 2, (5, 3), 2, 2048, budget=32, seed=12),
    "parts of rows behind metadata of more than a line": Example(1, 2, 8, (2, 1), 8, 2064, budget=64, seed=15),
    "a rank alone": Example(1, 1, 4, (13,), 3, 64, budget=64, seed=13),
}
# Over nodes rows travel along the rail, each with a signal of its own, and the rank that they come to hands them on.
RAILS = {"cuda": "by stores to the peer", "cuda_loopback": "by puts that land late and in pieces"}
OVER_NODES = {
    "a rank without tokens": Example(
        2, 2, 2, (9, 0, 16, 5), 3, 64, scale_columns=1, pad_multiple=4, budget=160, seed=21
    ),
    "three nodes, fp32": Example(3, 1, 2, (6, 0, 11), 3, 96, "fp32", budget=96, seed=22),
    "fp16 in fp32 partials, a map": Example(
        2, 2, 1, (3, 8, 0, 7), 2, 48, "fp16", routing="map", skew="half_dropped", fp32_partials=True, budget=48, seed=23
    ),
    "a node without tokens": Example(2, 2, 2, (0, 0, 7, 3), 2, 16, budget=48, seed=24),
    "no rows at all": Example(2, 1, 2, (3, 4), 2, 16, skew="nothing", budget=8, seed=25),
    "one rank for all rows": Example(2, 2, 2, (12, 9, 16, 1), 2, 32, skew="one_rank", budget=96, seed=26),
    "a budget that drops": Example(2, 2, 2, (16, 14, 3, 16), 2, 64, budget=9, seed=27),
    "no weights, padding of empty experts": Example(
        3, 1, 4, (2, 1, 3), 1, 32, weights=False, pad_multiple=4, pad_empty_experts=True, budget=64, seed=28
    ),
    "parts of rows behind metadata of more than a line": Example(2, 1, 8, (2, 1), 8, 2064, budget=64, seed=29),
}


def world_of(ex: Example, **options) -> GpuWorld:
    options = {"num_sms_dispatch_api": 2, "num_sms_combine_api": 2, "timeout_s": 30, "skew": 0, **options}
    return GpuWorld(ex.num_nodes, ex.num_local_ranks, ex.num_local_experts, latency_tokens=TOKENS, **options)


def check_by_lines(ex: Example, timeout_s: float = 30, executor: str = "cuda") -> None:
    """Twice, for the second time finds lines of the first in both parities of the slabs."""
    world, want = world_of(ex, timeout_s=timeout_s, executor=executor), expected(ex)
    world.world.poison(world.raw)
    for _ in range(2):
        world.run(lambda rank, buffer: check(ByLines(buffer), rank, ex, want))
    world.close()


@pytest.mark.parametrize("what", EXAMPLES)
def test_bits_of_the_reference(what):
    ex = EXAMPLES[what]
    assert any(plan.overflow for plan in expected(ex).plan.ranks) == (what == "a budget that drops")
    check_by_lines(ex)


@pytest.mark.parametrize("rail", RAILS)
@pytest.mark.parametrize("what", OVER_NODES)
def test_bits_of_the_reference_over_nodes(what, rail):
    ex = OVER_NODES[what]
    assert any(plan.overflow for plan in expected(ex).plan.ranks) == (what == "a budget that drops")
    check_by_lines(ex, executor=rail)


@pytest.mark.parametrize("nodes, rail", [(1, "cuda"), (3, "cuda"), (3, "cuda_loopback")])
def test_plans_serve_both_paths(nodes, rail):
    ex = Example(nodes, 3 // nodes, 2, (7, 0, 16), 3, 48, budget=160, seed=11)
    world, want = world_of(ex, executor=rail), expected(ex)
    world.run(lambda rank, buffer: check_either_way(buffer, rank, ex, want))
    world.close()


@pytest.mark.parametrize("nodes", [1, 2])
@pytest.mark.parametrize("blocks", [1, 5])
def test_any_number_of_blocks(blocks, nodes):
    """More than count tokens, or a warp for all."""
    ex = Example(nodes, 2 // nodes, 2, (13, 6), 2, 256, budget=64, seed=14)
    world, want = world_of(ex, num_sms_dispatch_api=blocks, num_sms_combine_api=blocks), expected(ex)
    world.run(lambda rank, buffer: check(ByLines(buffer), rank, ex, want))
    world.close()


# ---- captured

BUDGET = 96


def example(num_ranks: int, dtype: str, seed: int, num_nodes: int = 1) -> Example:
    skew = ("uniform", "one_rank", "half_dropped", "nothing")[seed % 4]
    shape = num_nodes, num_ranks // num_nodes
    return Example(*shape, 2, (TOKENS,) * num_ranks, 2, 64, dtype, skew=skew, pad_multiple=8, budget=BUDGET, seed=seed)


def step(buffer, given: dict, num_experts: int):
    """A layer whose experts double, weighted on the way back: (tokens, permuted rows, their weights, overflow)."""
    rows, probs, _, _, handle = buffer.dispatch_with_permute(
        num_of_experts=num_experts,
        pad_multiple=8,
        num_permuted_tokens=BUDGET,
        non_blocking=True,
        path="latency",
        **given,
    )
    out, _ = buffer.combine_with_unpermute(hidden=rows * 2, handle=handle, weighted=True)
    return out, rows, probs, handle[10]


def replay_with_other_routing(
    num_ranks: int, dtype: str, replays: int = 6, num_nodes: int = 1, executor: str = "cuda"
) -> None:
    """Captures a step on every rank and replays it with inputs that the capture has not seen: the reference's bits."""
    examples = [example(num_ranks, dtype, seed, num_nodes) for seed in range(replays)]
    world = world_of(examples[0], executor=executor)
    meet, one_at_a_time = threading.Barrier(num_ranks), threading.Lock()
    num_experts = examples[0].world.num_experts

    def work(rank, _):
        buffer, stream = world.raw[rank], world.streams[rank]
        mine = make_inputs(examples[0], rank)
        given = {name: getattr(mine, name).cuda() for name in ("hidden", "topk_idx", "topk_weights")}
        step(buffer, given, num_experts)  # makes room
        stream.synchronize()
        meet.wait(60)
        graph = torch.cuda.CUDAGraph()
        with one_at_a_time, torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            out, rows, probs, overflow = step(buffer, given, num_experts)
        for ex in (*examples[1:], examples[0]):
            now, want = make_inputs(ex, rank), expected(ex)
            for name, tensor in given.items():
                tensor.copy_(getattr(now, name))
            out.fill_(float("nan")), rows.fill_(float("nan")), probs.fill_(float("nan"))
            stream.synchronize()
            meet.wait(60)
            graph.replay()
            stream.synchronize()
            same("rows", rows.cpu(), want.permuted[rank][0])
            same("weights", probs.cpu(), want.permuted[rank][1])
            back, weights = [p[0] * 2 for p in want.permuted], [p[1] for p in want.permuted]
            same("tokens", out.cpu(), reference.combine_world(want.plan, back, weights, True, True)[rank][0])
            assert int(overflow) == int(want.plan.ranks[rank].overflow)
            meet.wait(60)

    world.run(work)
    world.close()


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_a_replay_with_other_routing_gives_its_results(num_ranks, dtype):
    replay_with_other_routing(num_ranks, dtype)


@pytest.mark.parametrize("rail", RAILS)
@pytest.mark.parametrize("num_nodes, num_ranks, dtype", [(2, 2, "fp32"), (2, 4, "bf16"), (3, 3, "bf16")])
def test_a_replay_over_nodes_with_other_routing_gives_its_results(num_nodes, num_ranks, dtype, rail):
    replay_with_other_routing(num_ranks, dtype, num_nodes=num_nodes, executor=rail)


def test_a_wrong_reference_is_noticed():
    ex = EXAMPLES["bf16 with scales"]
    world, want = world_of(ex), expected(ex)
    wrong = dataclasses.replace(want, combined=[(x.flip(0), p) for x, p in want.combined])
    errors = world.run(lambda rank, buffer: check(ByLines(buffer), rank, ex, wrong), return_errors=True)
    assert all("combined rows" in str(error) for error in errors)
    world.close()
