"""The measurement on one rank: build a case, check, time all implementations interleaved, check again.

Inside every iteration the implementations take turns, and the one that starts rotates, so noise of the
machine and the state of caches and allocator hit all alike. Times are API times: from the call to its
return on each rank after a barrier, routing metadata and host work included.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from hybrid_ep.cli.bench import checks
from hybrid_ep.cli.bench.implementations import Case, Implementation, Setting
from hybrid_ep.cli.bench.ledger import Ledger, build_ledger
from hybrid_ep.cli.bench.memcpy import Memcpy
from hybrid_ep.cli.bench.routing import Routing, RoutingSpec, generate, token_counts

OPS = ("dispatch", "combine", "pair", "train")
MEMCPY = "memcpy"
Samples = dict[tuple[str, str], list[float]]  # (op, implementation) -> seconds, one an iteration


@dataclass(frozen=True)
class Config:
    """What one run measures; the flags after validation. Plain data, so it goes into the JSON as it is."""

    tokens: tuple[int, ...]
    num_sms: tuple[int, ...]
    ops: tuple[str, ...]
    hidden: int
    topk: int
    num_experts: int
    dtype: str
    routing: RoutingSpec
    ragged: str
    permute: bool
    route_as: str
    num_ranks: int
    num_local_ranks: int
    warmup: int
    iterations: int
    check: bool
    seed: int
    reduction: int
    timeout_s: float

    @property
    def row_bytes(self) -> int:
        return self.hidden * checks.DTYPES[self.dtype].itemsize


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

    @property
    def num_miscounted(self) -> int:
        """Counters that differ from the closed form."""
        return sum(got != want for links in self.counted_rows.values() for got, want in links.values())

    @property
    def failed(self) -> bool:
        return any(self.wrong.values()) or self.num_miscounted > 0


def run_case(
    config: Config, group: dist.ProcessGroup, kinds: list[type[Implementation]], tokens: int, num_sms: int
) -> CaseResult:
    """Measure one point of the sweep; collective."""
    rank = group.rank()
    counts = token_counts(config.ragged, tokens, config.num_ranks, config.seed)
    routings = generate(config.routing, counts, config.num_experts, config.topk, config.seed)
    ledger = build_ledger(routings, config.num_experts, config.num_local_ranks, config.row_bytes)
    case = _build_case(config, group, routings[rank], max(counts), num_sms)
    setting = Setting(config.num_ranks, max(counts), config.topk, config.row_bytes, config.permute)
    chosen, skipped = _available(kinds, setting, group)
    expected = checks.expect(case, routings, config.dtype, config.seed) if config.check else None
    built: list[Implementation] = []
    try:
        for kind in chosen:
            built.append(kind(case))
        wrong = dict.fromkeys((kind.name for kind in chosen), 0)
        _check(built, expected, wrong, group)
        counted = {each.name: rows for each in built if (rows := _count_rows(each, ledger, group))}
        samples = _time(built, config, group)
        _check(built, expected, wrong, group)
        buffer_bytes = {each.name: reduce_max(each.buffer_bytes(), group) for each in built}
    finally:
        for each in built:
            each.close()
    gathered = _gather(samples, group)
    return CaseResult(tokens, num_sms, counts, ledger, gathered, wrong, buffer_bytes, skipped, counted)


def _build_case(
    config: Config, group: dist.ProcessGroup, routing: Routing, max_tokens: int, num_sms: int
) -> Case:
    routing_map, probs = routing.to_map(config.num_experts)
    return Case(
        group=group,
        rank=group.rank(),
        num_ranks=config.num_ranks,
        num_local_ranks=config.num_local_ranks,
        num_experts=config.num_experts,
        topk=config.topk,
        max_tokens=max_tokens,
        num_sms=num_sms,
        permute=config.permute,
        route_as=config.route_as,
        timeout_s=config.timeout_s,
        x=checks.make_rows(
            group.rank(), routing.num_tokens, config.hidden, config.dtype, config.topk, config.seed
        ),
        topk_idx=routing.topk_idx,
        topk_weights=routing.topk_weights,
        routing_map=routing_map,
        probs=probs,
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
    built: list[Implementation],
    expected: checks.Expected | None,
    wrong: dict[str, int],
    group: dist.ProcessGroup,
) -> None:
    if expected is None:
        return
    for each in built:
        wrong[each.name] += _reduce(checks.count_wrong(each, expected), dist.ReduceOp.SUM, group)


def _count_rows(
    each: Implementation, ledger: Ledger, group: dist.ProcessGroup
) -> dict[str, tuple[int, int]] | None:
    """One dispatch and one combine under the implementation's own counters; None if it has none."""
    before = each.link_rows()
    if before is None:
        return None
    _pair(each)
    after = each.link_rows()
    grown = {link: _reduce(after[link] - before[link], dist.ReduceOp.SUM, group) for link in before}
    expected = ledger.link_rows(each.wire)
    return {link: (grown[link], 2 * expected[link]) for link in before}


def _time(built: list[Implementation], config: Config, group: dist.ProcessGroup) -> Samples:
    memcpy = Memcpy()
    samples: Samples = {}
    collecting = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        for iteration in range(-config.warmup, config.iterations):
            kept = samples if iteration >= 0 else {}
            first = iteration % len(built) if built else 0
            for each in built[first:] + built[:first]:
                _time_turn(each, config.ops, kept, group)
            _timed(kept, ("copy", MEMCPY), memcpy.run, group)
    finally:
        if collecting:
            gc.enable()
    return samples


def _time_turn(each: Implementation, ops: tuple[str, ...], kept: Samples, group: dist.ProcessGroup) -> None:
    """One turn of one implementation: every requested op once. Results die before the next op starts."""
    if "dispatch" in ops or "combine" in ops:
        dispatch_samples = kept if "dispatch" in ops else {}
        done = _timed(dispatch_samples, ("dispatch", each.name), each.dispatch, group)
        if "combine" in ops:
            _timed(kept, ("combine", each.name), lambda: each.combine(done, done.rows), group)
        del done
    if "pair" in ops:
        _timed(kept, ("pair", each.name), lambda: _pair(each), group)
    if "train" in ops:
        _timed(kept, ("train", each.name), each.train, group)


def _pair(each: Implementation) -> torch.Tensor:
    done = each.dispatch()
    return each.combine(done, done.rows)


def _timed(kept: Samples, key: tuple[str, str], call: Callable, group: dist.ProcessGroup):
    dist.barrier(group=group)
    start = time.perf_counter()
    result = call()
    kept.setdefault(key, []).append(time.perf_counter() - start)
    return result


def _gather(samples: Samples, group: dist.ProcessGroup) -> dict[tuple[str, str], list[list[float]]]:
    everyone: list[Samples] = [{} for _ in range(group.size())]
    dist.all_gather_object(everyone, samples, group=group)
    return {key: [of_rank[key] for of_rank in everyone] for key in samples}


def reduce_max(value: int, group: dist.ProcessGroup) -> int:
    """The largest `value` over the ranks; collective."""
    return _reduce(value, dist.ReduceOp.MAX, group)


def _reduce(value: int, how: dist.ReduceOp, group: dist.ProcessGroup) -> int:
    total = torch.tensor([value], dtype=torch.int64)
    dist.all_reduce(total, how, group=group)
    return int(total)
