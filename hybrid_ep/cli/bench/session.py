"""The measurement on one rank: build a case, check, time all implementations interleaved, check again.

Inside every iteration the implementations take turns, and the one that starts rotates, so noise of the
machine and the state of caches and allocator hit all alike. Times are API times: from the call to its
return on each rank after a barrier (on a GPU to the end of its work), routing metadata and host work included. Where
an implementation can tell, the time inside its kernels stands beside them.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from hybrid_ep.cli.bench import checks, graphs
from hybrid_ep.cli.bench.config import Config
from hybrid_ep.cli.bench.implementations import Case, Implementation, Setting, Timed
from hybrid_ep.cli.bench.ledger import STAGES, Ledger, build_ledger
from hybrid_ep.cli.bench.memcpy import Memcpy
from hybrid_ep.cli.bench.routing import Routing, generate, token_counts
from hybrid_ep.cli.bench.world import Samples, World
from hybrid_ep.cli.progress import track

MEMCPY = "memcpy"


@dataclass
class CaseResult:
    """What one (tokens, num_sms) gave, all ranks together (complete on every rank)."""

    tokens: int
    num_sms: int
    counts: list[int]
    ledger: Ledger
    samples: dict[tuple[str, str], list[list[float]]]  # (op, implementation) -> [rank][iteration] seconds
    wrong: dict[str, int]  # implementation -> wrong elements before and after timing, all ranks
    buffer_bytes: dict[str, int]  # implementation -> largest over ranks
    skipped: dict[str, str]  # implementation -> reason
    # implementation that counts -> link -> (rows counted, closed form) of one dispatch and one combine
    counted_rows: dict[str, dict[str, tuple[int, int]]]
    kernel: dict[tuple[str, str], list[list[float]]] = field(default_factory=dict)  # like samples, inside kernels
    setup_s: dict[str, float] = field(default_factory=dict)  # implementation -> construction, slowest rank
    # like samples: seconds in which the calling thread ran, and in which it was ready and had no core
    running: dict[tuple[str, str], list[list[float]]] = field(default_factory=dict)
    queued: dict[tuple[str, str], list[list[float]]] = field(default_factory=dict)

    @property
    def num_miscounted(self) -> int:
        """Counters that differ from the closed form."""
        return sum(got != want for links in self.counted_rows.values() for got, want in links.values())

    @property
    def failed(self) -> bool:
        return any(self.wrong.values()) or self.num_miscounted > 0


def run_case(
    config: Config, world: World, kinds: list[type[Implementation]], tokens: int, num_sms: int, place: str
) -> CaseResult:
    """Measure one point of the sweep; collective. place: which of them, for whoever watches."""
    control, rank = world.control, world.rank
    counts = token_counts(config.ragged, tokens, config.num_ranks, config.seed)
    routings = generate(config.routing, counts, config.num_experts, config.topk, config.seed)
    ledger = build_ledger(routings, config.num_experts, config.num_local_ranks, config.row_bytes, config.sum_row_bytes)
    case = _build_case(config, world, routings[rank], max(counts), num_sms)
    setting = Setting(config.num_ranks, max(counts), config.topk, config.row_bytes, config.permute, config.dtype,
                      config.backend, config.num_ranks // config.num_local_ranks)  # fmt: skip
    chosen, skipped = _available(kinds, setting, control)
    expected = checks.expect(case, routings, config.dtype, config.seed) if config.check else None
    built: list[Implementation] = []
    setup: Samples = {}
    try:
        for kind in chosen:
            built.append(world.timed(setup, ("setup", kind.name), functools.partial(kind, case)))
        wrong = dict.fromkeys((kind.name for kind in chosen), 0)
        _check(built, config, expected, wrong, world)
        counted = {each.name: rows for each in built if (rows := _count_rows(each, ledger, world))}
        times = _time(built, config, world, place)
        _check(built, config, expected, wrong, world)
        buffer_bytes = {each.name: world.reduce(each.buffer_bytes(), dist.ReduceOp.MAX) for each in built}
    finally:
        for each in built:
            each.close()
    setup_s = {name: max(of_rank[0] for of_rank in by_rank) for (_, name), by_rank in world.gather(setup).items()}
    return CaseResult(
        tokens,
        num_sms,
        counts,
        ledger,
        world.gather(times.calls),
        wrong,
        buffer_bytes,
        skipped,
        counted,
        world.gather(times.kernel),
        setup_s,
        world.gather(times.running),
        world.gather(times.queued),
    )


def _build_case(config: Config, world: World, routing: Routing, max_tokens: int, num_sms: int) -> Case:
    routing_map, probs = routing.to_map(config.num_experts)
    rank = world.rank
    rows = checks.make_rows(rank, routing.num_tokens, config.hidden, config.dtype, config.topk, config.seed)
    x, scales = checks.payload(rows, config.dtype)
    return Case(
        group=world.group,
        rank=rank,
        num_ranks=config.num_ranks,
        num_local_ranks=config.num_local_ranks,
        num_experts=config.num_experts,
        topk=config.topk,
        max_tokens=max_tokens,
        num_sms=num_sms,
        permute=config.permute,
        route_as=config.route_as,
        executor=config.backend,
        dtype=config.dtype,
        timeout_s=config.timeout_s,
        x=x.to(world.device),
        scales=None if scales is None else scales.to(world.device),
        sum_dtype=checks.SUM_DTYPES[config.dtype],
        topk_idx=routing.topk_idx.to(world.device),
        topk_weights=routing.topk_weights.to(world.device),
        routing_map=routing_map.to(world.device),
        probs=probs.to(world.device),
    )


def _available(
    kinds: list[type[Implementation]], setting: Setting, group: dist.ProcessGroup
) -> tuple[list[type[Implementation]], dict[str, str]]:
    """Split by what can run on every rank: one rank's reason skips the implementation on all."""
    mine = {kind.name: kind.unavailable(setting) for kind in kinds}
    everyone: list[dict[str, str | None]] = [{} for _ in range(group.size())]
    dist.all_gather_object(everyone, mine, group=group)
    skipped = {
        name: f"rank {rank}: {reason}"
        for rank, reasons in reversed(list(enumerate(everyone)))
        for name, reason in reasons.items()
        if reason is not None
    }
    return [kind for kind in kinds if kind.name not in skipped], skipped


def _check(
    built: list[Implementation], config: Config, expected: checks.Expected | None, wrong: dict[str, int], world: World
) -> None:
    if expected is None:
        return
    for each in built:
        found = checks.count_wrong(each, expected)
        if config.chain:
            found += checks.count_unchained(each, world.meet)
        wrong[each.name] += world.reduce(found)


def _count_rows(each: Implementation, ledger: Ledger, world: World) -> dict[str, tuple[int, int]] | None:
    """One dispatch and one combine under the implementation's own counters; None if it has none."""
    before = each.link_rows()
    if before is None:
        return None
    _pair(each)
    after = each.link_rows()
    if after is None or each.wire is None:
        raise RuntimeError(f"{each.name} counts rows for one operation and not for the next, or names no wire")
    grown = {link: world.reduce(after[link] - before[link]) for link in before}
    expected = ledger.link_rows(each.wire)
    return {link: (grown[link], 2 * expected[link]) for link in before}


class _Times(NamedTuple):
    """Of this rank: API times, kernel times, and what it had of a core in the former."""

    calls: Samples
    kernel: Samples
    running: Samples
    queued: Samples

    @classmethod
    def empty(cls) -> _Times:
        return cls({}, {}, {}, {})


def _time(built: list[Implementation], config: Config, world: World, place: str) -> _Times:
    memcpy = Memcpy()
    turns = [_Turn(each, config, world) for each in built]
    times = _Times.empty()
    collecting = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        iterations = range(-config.warmup, config.iterations)
        for iteration in track(iterations, place) if world.rank == 0 else iterations:
            kept = times if iteration >= 0 else _Times.empty()
            first = iteration % len(turns) if turns else 0
            for turn in turns[first:] + turns[:first]:
                turn.run(kept)
            world.timed(kept.calls, ("copy", MEMCPY), memcpy.run, on_cores=(kept.running, kept.queued))
    finally:
        if collecting:
            gc.enable()
    return times


class _Turn:
    """One implementation's turn of an iteration: every requested op once. Results die before the next op starts."""

    def __init__(self, each: Implementation, config: Config, world: World) -> None:
        self.each, self.ops, self.chain, self.world = each, config.ops, config.chain, world
        self.stages: dict[str, Timed] = {
            op: stage for op in config.ops if op in STAGES and (stage := each.stage(op)) is not None
        }
        self.captured: dict[str, Callable] = graphs.capture(each, config.ops) if config.cuda_graph else {}
        each.start_kernel_clock()

    def run(self, kept: _Times) -> None:
        each, self._kept = self.each, kept
        for op, stage in self.stages.items():
            self._stage(op, stage)
        if ("dispatch" in self.ops or "combine" in self.ops) and not self.captured:
            done = self._time("dispatch", each.dispatch, keep="dispatch" in self.ops)
            rows = each.expert_output(done)
            if "combine" in self.ops:
                self._time("combine", lambda: each.combine(done, rows))
            del done, rows
        for op, replay in self.captured.items():
            self._time(op, replay)
        if "pair" in self.ops and not self.captured:
            self._time("pair", lambda: _pair(each))
        if "step" in self.ops:
            self._time("step", each.step)
        if self.chain:
            self._time("chain", lambda: _chain(each, self.chain), parts=self.chain)

    def _time(self, op: str, call: Callable[[], Any], parts: int = 1, keep: bool = True) -> Any:
        times = self._kept if keep else _Times.empty()
        key, before = (op, self.each.name), self.each.kernel_seconds()
        result = self.world.timed(times.calls, key, call, parts, (times.running, times.queued))
        after = self.each.kernel_seconds()
        if before is not None and after is not None and not self.captured:
            times.kernel.setdefault(key, []).append((after - before) / parts)
        return result

    def _stage(self, op: str, stage: Timed) -> None:
        if stage.less is None:
            self._time(op, stage.run)
            return
        kept, parts = self._kept, []
        for call in (stage.run, stage.less):
            self._kept = _Times.empty()
            self._time(op, call)
            parts.append([one.get((op, self.each.name), [None])[0] for one in self._kept])
        self._kept = kept
        for one, full, without in zip(kept, *parts, strict=True):
            if full is not None:
                one.setdefault((op, self.each.name), []).append(full - without)


def _pair(each: Implementation) -> torch.Tensor:
    done = each.dispatch()
    return each.combine(done, each.expert_output(done))


def _chain(each: Implementation, pairs: int) -> None:
    """Pairs with no barrier between them; what one combine returns is what the next dispatch sends."""
    first = each.case
    try:
        for _ in range(pairs):
            each.feed(_pair(each))
    finally:
        each.case = first
