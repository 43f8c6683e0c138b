"""`--latency-tokens`: up to how many tokens a rank the latency path is faster, which `path="auto"` goes by."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from hybrid_ep import tuning
from hybrid_ep.buffer import HybridEPBuffer
from hybrid_ep.cli.bench import by_lines, checks
from hybrid_ep.cli.bench.report import reduce_ranks
from hybrid_ep.cli.bench.world import Samples, World
from hybrid_ep.cli.progress import track
from hybrid_ep.cli.tune.measured import uniform_call
from hybrid_ep.cli.tune.predicted import gpu_word
from hybrid_ep.hardware.clusters import Cluster
from hybrid_ep.perf import crossover
from hybrid_ep.perf.crossover import PATHS, Row
from hybrid_ep.perf.shape import Shape

OP = "pair"  # a dispatch and its combine: they take the same path
_SLOWEST_RANK = 3  # of reduce_ranks


@dataclass(frozen=True)
class Crossing:
    """Pairs by both paths, with the blocks that the grid chose, and what auto is to make of them."""

    device: str
    key: tuning.Key
    topk: int
    dtype: str
    blocks: tuning.Settings
    rows: tuple[Row, ...]

    @property
    def found(self) -> crossover.Crossover:
        return crossover.find(self.rows, OP)

    @property
    def _sms(self) -> str:
        return f"{self.blocks.num_sms_dispatch}+{self.blocks.num_sms_combine}"

    def entry(self) -> dict[str, Any]:
        """For the file: what a buffer reads, and beside it what a reader wants to know."""
        found = tuning.Crossover(self.device, self.key, self.topk, self.dtype, self.found.latency_tokens)
        return found.to_json() | {
            "num_sms_dispatch": self.blocks.num_sms_dispatch,
            "num_sms_combine": self.blocks.num_sms_combine,
            "points": [row.to_json() for row in self.rows],
        }

    def lines(self) -> Iterator[str]:
        yield by_lines.HEADER
        yield from (by_lines.line(row, self._sms) for row in self.rows)
        yield f"# {self._sms} SMs of dispatch and combine: {self.found.said}"
        yield f"# path='auto' of a buffer with this file takes lines up to {self.found.latency_tokens} tokens a rank"


def predicted(shape: Shape, cluster: Cluster, tokens: list[int], blocks: tuning.Settings, seed: int) -> Crossing:
    """Of a cluster that is not here, by the event engine. Raises what crossover.predict raises."""
    sms = {"dispatch_sms": blocks.num_sms_dispatch, "combine_sms": blocks.num_sms_combine}
    rows = tuple(crossover.predict(shape.with_(tokens=t), cluster, **sms, seed=seed)[OP] for t in tokens)
    key = tuning.Key(shape.ranks, shape.ranks_per_node, shape.hidden, shape.experts)
    return Crossing(gpu_word(cluster), key, shape.topk, "bf16", blocks, rows)


class PathTimer:
    """One buffer of this rank with latency_tokens, its blocks as they were tuned. Collective throughout."""

    def __init__(
        self, world: World, key: tuning.Key, topk: int, dtype: str, most: int, executor: str, blocks: tuning.Settings
    ) -> None:
        self.world, self.key, self.topk, self.dtype, self.blocks = world, key, topk, dtype, blocks
        self.device = tuning.device_name(world.device)
        self.buffer = HybridEPBuffer(
            world.group,
            key.hidden,
            most,
            key.num_experts // key.num_ranks,
            num_sms_dispatch_api=blocks.num_sms_dispatch,
            num_sms_combine_api=blocks.num_sms_combine,
            executor=executor,
            num_of_hybrid_ep_ranks_per_nvlink_domain=key.num_local_ranks,
            tuning="",
            latency_tokens=most,
        )

    def crossing(self, tokens: list[int], warmup: int, iterations: int, seed: int) -> tuple[Crossing, int]:
        """(medians of the slowest rank's pairs, elements in which the paths differ). Paths take turns."""
        samples: Samples = {}
        wrong = sum(self._pairs(t, samples, warmup, iterations, seed) for t in tokens)
        median = {
            key: statistics.median(1e6 * s for s in reduce_ranks(by_rank, _SLOWEST_RANK))
            for key, by_rank in self.world.gather(samples).items()
        }
        rows = tuple(Row(t, OP, *(median[(path, str(t))] for path in reversed(PATHS))) for t in tokens)
        return Crossing(self.device, self.key, self.topk, self.dtype, self.blocks, rows), self.world.reduce(wrong)

    def _pairs(self, tokens: int, samples: Samples, warmup: int, iterations: int, seed: int) -> int:
        world = self.world
        call, received = uniform_call(world, self.key, self.topk, self.dtype, tokens, seed)
        call |= {"num_permuted_tokens": max(received), "non_blocking": True}

        def pair(path: str) -> tuple[torch.Tensor, torch.Tensor]:
            rows, *_, handle = self.buffer.dispatch_with_permute(**call, path=path)
            given = (
                rows if call["scaling_factor"] is None else torch.ones_like(rows, dtype=checks.SUM_DTYPES[self.dtype])
            )
            return rows, self.buffer.combine_with_unpermute(hidden=given, handle=handle)[0]

        wrong, turns = 0, range(-max(1, warmup), iterations)
        for iteration in track(turns, f"paths, {tokens} tokens") if world.rank == 0 else turns:
            kept = samples if iteration >= 0 else {}
            done = [world.timed(kept, (path, str(tokens)), functools.partial(pair, path)) for path in PATHS]
            if iteration < 0:
                for by_one, by_other in zip(*done, strict=True):
                    wrong += int((by_one.view(torch.uint8) != by_other.view(torch.uint8)).sum())
        return wrong

    def close(self) -> None:
        self.buffer.destroy()
