"""The grid of this machine: every rank sweeps all blocks and chunks in one process and one buffer.

Points take turns, so that noise hits all alike, and their results are compared with the first one's bit by bit: a
setting may change nothing but time."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Iterable
from typing import Any

import torch

from hybrid_ep.buffer import HybridEPBuffer
from hybrid_ep.cli.bench import checks
from hybrid_ep.cli.bench.report import quantile, reduce_ranks
from hybrid_ep.cli.bench.routing import RoutingSpec, generate
from hybrid_ep.cli.bench.world import Samples, World
from hybrid_ep.cli.progress import track
from hybrid_ep.cli.tune.grid import OPS, Grid, Point, Setting
from hybrid_ep.cli.tune.predicted import cluster_of, suggestion
from hybrid_ep.config import DEFAULT_CHUNK_TOKENS
from hybrid_ep.perf.shape import DTYPES, Shape
from hybrid_ep.tuning import Key, device_name

_SLOWEST_RANK = 3  # of reduce_ranks


def uniform_call(
    world: World, key: Key, topk: int, dtype: str, tokens: int, seed: int
) -> tuple[dict[str, Any], list[int]]:
    """(arguments of this rank's dispatch_with_permute, rows [ranks] that each rank receives), routed uniformly."""
    routings = generate(RoutingSpec("uniform"), [tokens] * key.num_ranks, key.num_experts, topk, seed)
    rows = checks.make_rows(world.rank, tokens, key.hidden, dtype, topk, seed)
    x, scales = (None if t is None else t.to(world.device) for t in checks.payload(rows, dtype))
    call = {
        "hidden": x,
        "scaling_factor": scales,
        "num_of_experts": key.num_experts,
        "topk_idx": routings[world.rank].topk_idx.to(world.device),
        "topk_weights": routings[world.rank].topk_weights.to(world.device),
    }
    chosen = torch.cat([routing.topk_idx.flatten() for routing in routings])
    of_experts = torch.bincount(chosen, minlength=key.num_experts)
    return call, of_experts.view(key.num_ranks, -1).sum(1).tolist()


class Tuner:
    """One buffer of this rank, and the sizes to tune it for. Collective throughout."""

    def __init__(self, world: World, key: Key, topk: int, dtype: str, largest: int, executor: str) -> None:
        self.world, self.key, self.topk, self.dtype = world, key, topk, dtype
        self.device = device_name(world.device)
        self.buffer = HybridEPBuffer(
            world.group,
            key.hidden,
            largest,
            key.num_experts // key.num_ranks,
            executor=executor,
            num_of_hybrid_ep_ranks_per_nvlink_domain=key.num_local_ranks,
            tuning="",
        )  # an older file decides nothing
        c = self.buffer.config
        self.default = Setting(c.num_of_blocks_dispatch_api, DEFAULT_CHUNK_TOKENS)

    def analytic(self, tokens: int) -> Setting | None:
        """What the model suggests for this device; None where it has no such GPU, a host included."""
        cluster = cluster_of(self.device)
        if cluster is None or self.key.num_local_ranks > cluster.ranks_per_node or self.dtype not in DTYPES:
            return None
        k = self.key
        shape = Shape(k.num_ranks, k.num_local_ranks, tokens, k.hidden, self.topk, k.num_experts)
        return suggestion(shape, cluster, self.dtype)

    def grid(
        self, tokens: int, num_sms: Iterable[int], chunks: Iterable[int], warmup: int, iterations: int, seed: int
    ) -> tuple[Grid, int]:
        """(times of all ranks' slowest, elements in which any setting changed a result)."""
        analytic = self.analytic(tokens)
        extra = {self.default} | ({analytic} if analytic else set())
        # the largest chunk first: the rings grow once
        settings = sorted({Setting(s, c) for s in num_sms for c in chunks} | extra, key=lambda s: (-s.chunk, s.num_sms))
        samples: Samples = {}
        wrong = self._sweep(tokens, settings, samples, warmup, iterations, seed)
        points = []
        for (op, text), by_rank in self.world.gather(samples).items():
            times = [1e6 * s for s in reduce_ranks(by_rank, _SLOWEST_RANK)]
            sms, chunk = map(int, text.split())
            points.append(Point(op, sms, chunk, statistics.median(times), quantile(times, 0.1), quantile(times, 0.9)))
        points.sort(key=lambda p: (OPS.index(p.op), p.num_sms, p.chunk))
        found = Grid(self.device, self.key, tokens, self.topk, self.dtype, tuple(points), self.default, analytic)
        return found, self.world.reduce(wrong)

    def _sweep(
        self, tokens: int, settings: list[Setting], samples: Samples, warmup: int, iterations: int, seed: int
    ) -> int:
        world = self.world
        call, _ = uniform_call(world, self.key, self.topk, self.dtype, tokens, seed)
        scales = call["scaling_factor"]
        wrong, first, expert_rows = 0, None, None
        turns = range(-max(1, warmup), iterations)
        for iteration in track(turns, "iterations") if world.rank == 0 else turns:
            for s in settings:
                self.buffer.update_template_config(
                    num_of_blocks_dispatch_api=s.num_sms,
                    num_of_blocks_combine_api=s.num_sms,
                    num_of_tokens_per_chunk_dispatch_api=s.chunk,
                    num_of_tokens_per_chunk_combine_api=s.chunk,
                )
                kept = samples if iteration >= 0 else {}
                name = f"{s.num_sms} {s.chunk}"
                done = world.timed(kept, ("dispatch", name), lambda: self.buffer.dispatch_with_permute(**call))
                if scales is None:
                    expert_rows = done[0]
                elif expert_rows is None:
                    expert_rows = torch.ones(done[0].shape, dtype=checks.SUM_DTYPES[self.dtype], device=done[0].device)
                combine = functools.partial(self.buffer.combine_with_unpermute, hidden=expert_rows, handle=done[-1])
                out = world.timed(kept, ("combine", name), combine)[0]
                if iteration < 0:
                    results = [t.view(torch.uint8).clone() for t in (done[0], out)]
                    first = first or results
                    wrong += sum(int((a != b).sum()) for a, b in zip(results, first, strict=True))
        return wrong

    def close(self) -> None:
        self.buffer.destroy()
