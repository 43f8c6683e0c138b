"""The table and the JSON of a run. Lines that start with # are for people, the others for awk.

Everything printed is derived here from raw samples and from the ledger, so the JSON can be re-read with
other statistics later.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from hybrid_ep.cli.bench.config import Config
from hybrid_ep.cli.bench.ledger import STAGES, expected_groups
from hybrid_ep.cli.bench.memcpy import DEFAULT_BYTES
from hybrid_ep.cli.bench.session import MEMCPY, CaseResult
from hybrid_ep.cli.outputs import WIDTH, count, wrapped
from hybrid_ep.perf import crossover

# Left out without --wide: what the others and the JSON imply.
_ONLY_WIDE = {"size", "t_min", "t_p99", "algbw", "rail", "node"}
THROUGHPUT, LINES = "hybrid_ep", "hybrid_ep-latency"  # implementations: the two paths
SCHEMA = "hybrid_ep.bench/2"
_MUCH_QUEUED = 0.1  # share of a call from which ranks that wait for a core are told of
REDUCTIONS = ("rank 0", "AVG", "MIN", "MAX")
_COLUMNS = (
    ("tokens", 8, "(/rank)"), ("sms", 5, ""), ("op", 10, ""), ("impl", 19, ""), ("size", 12, "(B)"),
    ("time", 10, "(us)"), ("t_min", 10, "(us)"), ("t_p10", 10, "(us)"), ("t_p90", 10, "(us)"),
    ("t_p99", 10, "(us)"), ("kernel", 10, "(us)"), ("algbw", 7, "(GB/s)"), ("busbw", 7, "(GB/s)"),
    ("rail", 7, "(GB/s)"),
    ("node", 7, "(GB/s)"), ("logical", 8, "(GB/s)"), ("vs_first", 9, "(x)"), ("#wrong", 7, ""),
)  # fmt: skip


@dataclass(frozen=True)
class Row:
    """One line of the table. Times in microseconds, bandwidths in 1e9 bytes a second, None: not accounted."""

    tokens: int
    num_sms: int
    op: str
    implementation: str
    size_bytes: int
    time_us: float  # median over iterations of the reduction over ranks
    min_us: float
    p10_us: float
    p90_us: float
    p99_us: float
    kernel_us: float | None  # the same median of the time inside kernels
    algbw: float | None
    busbw: float | None
    rail_gbps: float | None
    node_gbps: float | None
    logical_gbps: float | None
    slowdown: float | None  # time / time of the first implementation
    slowdown_p10: float | None  # the same ratio inside each iteration, 10th percentile
    slowdown_p90: float | None
    wrong: int


def quantile(values: list[float], fraction: float) -> float:
    """The `fraction` quantile of unsorted values, linear between neighbours."""
    ordered = sorted(values)
    position = fraction * (len(ordered) - 1)
    low = int(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def reduce_ranks(samples: list[list[float]], reduction: int) -> list[float]:
    """[rank][iteration] -> [iteration]; reduction 0 rank 0, 1 average, 2 minimum, 3 maximum."""
    reduce = (lambda times: times[0], statistics.fmean, min, max)[reduction]
    return [reduce(times) for times in zip(*samples, strict=True)]


def build_rows(config: Config, result: CaseResult, wires: dict[str, str | None]) -> list[Row]:
    """The table's rows of one case, ops in order, implementations in the order they were given."""
    names = [name for name in wires if name in result.wrong]
    rows = []
    for op in config.timed_ops:
        timed = [name for name in names if (op, name) in result.samples]
        base = timed and timed[0] == names[0]
        first = reduce_ranks(result.samples[op, names[0]], config.reduction) if base else []
        for name in timed:
            times = reduce_ranks(result.samples[op, name], config.reduction)
            rows.append(_row(config, result, op, name, wires[name], times, first))
    return rows


def _row(
    config: Config, result: CaseResult, op: str, name: str, wire: str | None, times: list[float], first: list[float]
) -> Row:
    ledger = result.ledger
    directions = ledger.directions(op)
    median = statistics.median(times)
    # a stage that exists only as a difference may come out at nothing or less: it has no ratio then
    ratios = [time / base for time, base in zip(times, first, strict=True)] if first and min(first) > 0 else []

    def rate(per_rank: list[int]) -> float | None:
        return max(per_rank) * directions / median / 1e9 if directions and median > 0 else None

    # stages move nothing over links
    traffic = ledger.traffic[wire] if wire and op not in STAGES else None
    kernel = result.kernel.get((op, name))
    return Row(
        tokens=result.tokens,
        num_sms=result.num_sms,
        op=op,
        implementation=name,
        size_bytes=round(max(ledger.size_bytes) * directions),
        time_us=median * 1e6,
        min_us=min(times) * 1e6,
        p10_us=quantile(times, 0.10) * 1e6,
        p90_us=quantile(times, 0.90) * 1e6,
        p99_us=quantile(times, 0.99) * 1e6,
        kernel_us=statistics.median(reduce_ranks(kernel, config.reduction)) * 1e6 if kernel else None,
        algbw=rate(ledger.size_bytes),
        busbw=rate(ledger.bottleneck_bytes(wire)) if traffic and wire else None,
        rail_gbps=rate(list(traffic.rail)) if traffic else None,
        node_gbps=rate(list(traffic.node)) if traffic else None,
        logical_gbps=rate(ledger.logical_bytes),
        slowdown=median / statistics.median(first) if ratios else None,
        slowdown_p10=quantile(ratios, 0.10) if ratios else None,
        slowdown_p90=quantile(ratios, 0.90) if ratios else None,
        wrong=result.wrong[name],
    )


def fitted(line: str, wide: bool) -> str:
    """A # line broken at 120 columns unless wide; lines of the table as they are."""
    if wide or not line.startswith("# ") or len(line) <= WIDTH or line == _titles(False):
        return line
    return wrapped(line)


def _columns(wide: bool) -> list[tuple[int, str, int, str]]:
    """(place in _COLUMNS, title, width, unit) of those that are shown."""
    return [(i, *column) for i, column in enumerate(_COLUMNS) if wide or column[0] not in _ONLY_WIDE]


def _titles(wide: bool) -> str:
    return "#" + "".join(f"{title:>{width}}" for _, title, width, _ in _columns(wide))[1:]


def header_lines(config: Config, environment: dict[str, Any], names: list[str], wide: bool = True) -> Iterator[str]:
    """The # lines before the table: what was measured, how, on what, and what the columns mean."""
    nodes = config.num_ranks // config.num_local_ranks
    local = config.num_local_ranks
    spread = ", ".join(
        f"{label} {expected_groups(count, config.num_experts, config.topk):.3f}"
        for label, count in (("ranks", config.num_ranks), ("nodes", nodes))
    )
    bottleneck = "rail (between nodes)" if nodes > 1 else "node (between ranks of the node)"
    base = names[0] if names else "-"
    yield (
        f"# hybrid-ep bench {environment['version']}  EP {config.num_ranks} ({count(nodes, 'node')} x "
        f"{count(local, 'rank')})  "
        f"hidden {config.hidden}  topk {config.topk}/{config.num_experts}  {config.dtype}/{_sum_name(config)}  "
        f"routing {config.routing}  ragged {config.ragged}  "
        f"{'permute' if config.permute else 'no permute'}  seed {config.seed}"
    )
    yield (
        f"# backend {config.backend}  machine: {environment['cpu_model']}, {environment['cores']} cores  "
        f"torch {environment['torch']}  "
        f"gloo, {count(environment['threads'], 'torch thread')} a rank  commit {environment['commit']}  "
        f"{environment['date']}  load {environment['load_average'][0]:.1f}  heap {environment['heap']}"
    )
    yield (
        f"# time: API time (call to return, routing metadata and host work included), routing given as "
        f"{config.route_as}; {REDUCTIONS[config.reduction]} over ranks, then median of "
        f"{count(config.iterations, 'iteration')} ({config.warmup} warm-up), implementations interleaved"
        f"{_modes(config)}"
    )
    yield from _all_columns(bottleneck, base) if wide else _shown_columns(bottleneck, base)
    yield f"# expected distinct destinations of a token under uniform routing: {spread}"
    yield _titles(wide)
    yield "#" + "".join(f"{unit:>{width}}" for _, _, width, unit in _columns(wide))[1:]


def _shown_columns(bottleneck: str, base: str) -> Iterator[str]:
    """The # lines on the columns of a narrow table."""
    yield "# kernel: the part of time inside launches.  busbw: bytes over the bottleneck link / time, the link is the"
    yield f"#   {bottleneck}.  logical: DeepEP's bytes / time.  vs_first: time / time of {base}"
    yield f"# --wide adds {', '.join(sorted(_ONLY_WIDE))} and the definitions, which docs/benchmark.md has too"


def _all_columns(bottleneck: str, base: str) -> Iterator[str]:
    """The # lines on all columns."""
    yield (
        "# kernel: the part of time inside the implementation's launches, where it can be told.  "
        "permute, unpermute: of fused kernels the call with less the call without"
    )
    yield "# columns: all"
    yield (
        "# size: deduplicated payload that a rank receives, its own tokens included (largest rank; pair = "
        "both ways); quantisation scales in; no weights, counts, padding"
    )
    yield (
        "# algbw = size / time.  busbw = bytes across the bottleneck link / time; the link is the "
        f"{bottleneck}, local traffic excluded"
    )
    yield (
        "# rail, node: bytes of the rows that this implementation hands over links between nodes, between ranks of "
        "a node (busiest rank, own rank excluded) / time"
    )
    yield (
        "# logical: DeepEP's definition: (token, node) pairs, own node included, if nodes > 1; else rows "
        "received, own tokens included.  vs_first: time / time of " + base
    )


def _sum_name(config: Config) -> str:
    return "bf16" if config.row_bytes != config.sum_row_bytes else config.dtype


def _modes(config: Config) -> str:
    chain = f"; chain: {config.chain} pairs with no barrier between, time of one" if config.chain else ""
    return chain + ("; dispatch, combine and pair replayed from CUDA graphs" if config.cuda_graph else "")


def row_line(row: Row, wide: bool = True) -> str:
    """One line of the table."""

    def number(value: float | None, digits: int = 2) -> str:
        if value is None:
            return "-"
        # Of a rate below what two decimals show, its first digit.
        return f"{value:.1g}" if digits == 2 and 0 < value < 0.095 else f"{value:.{digits}f}"

    cells = (
        row.tokens, row.num_sms or "auto", row.op, row.implementation, row.size_bytes,
        *(number(value, 1) for value in (row.time_us, row.min_us, row.p10_us, row.p90_us, row.p99_us, row.kernel_us)),
        *map(number, (row.algbw, row.busbw, row.rail_gbps, row.node_gbps, row.logical_gbps)),
        number(row.slowdown), row.wrong,
    )  # fmt: skip
    return "".join(f"{cells[i]:>{width}}" for i, _, width, _ in _columns(wide))


def iteration_lines(config: Config, result: CaseResult) -> Iterator[str]:
    """-I: the samples of every row, in microseconds, in the order they were taken."""
    for (op, name), samples in result.samples.items():
        times = [seconds * 1e6 for seconds in reduce_ranks(samples, config.reduction)]
        spread = statistics.pstdev(times) / abs(statistics.fmean(times) or 1.0) * 100
        listed = " ".join(f"{value:.0f}" for value in times)
        yield f"# iterations {result.tokens} {op} {name}: cv {spread:.1f} %  us: {listed}"


def memcpy_rate(config: Config, result: CaseResult) -> dict[str, float]:
    """Bytes copied a second by all ranks at once, in GB/s: median, p10, p90 (slowest rank decides)."""
    times = reduce_ranks(result.samples["copy", MEMCPY], reduction=3)
    rates = [config.num_ranks * DEFAULT_BYTES / seconds / 1e9 for seconds in times]
    return {"median": statistics.median(rates), "p10": quantile(rates, 0.1), "p90": quantile(rates, 0.9)}


def limits(config: Config, result: CaseResult, rows: list[Row]) -> list[dict[str, Any]]:
    """For every row of the first implementation: the time that the memcpy limit allows, the share reached.

    A memcpy of n bytes reads n and writes n, so the machine's memory traffic is twice its copy rate.
    """
    traffic_rate = 2 * memcpy_rate(config, result)["median"] * 1e9
    found = []
    for row in rows:
        if row.implementation != rows[0].implementation or row.op in STAGES:
            continue
        floor_us = result.ledger.floor_bytes(row.op, config.permute) / traffic_rate * 1e6
        one_pass_us = result.ledger.one_pass_bytes(row.op, config.permute) / traffic_rate * 1e6
        staged_us = result.ledger.staged_bytes(row.op, config.permute) / traffic_rate * 1e6
        found.append(
            {
                "op": row.op,
                "implementation": row.implementation,
                "floor_us": floor_us,
                "floor_share": floor_us / row.time_us,
                "one_pass_us": one_pass_us,
                "one_pass_share": one_pass_us / row.time_us,
                "staged_us": staged_us,
                "staged_share": staged_us / row.time_us,
            }
        )
    return found


def core_shares(config: Config, result: CaseResult, row: Row) -> tuple[float, float] | None:
    """Of the row's calls, all ranks and iterations together: shares of the time that a rank ran on a core, and that it
    was ready and had none. None where the system does not say, and on GPUs, whose host waits for them."""
    key = (row.op, row.implementation)
    if config.backend == "cuda" or key not in result.queued:
        return None
    calls, running, queued = (sum(map(sum, of[key])) for of in (result.samples, result.running, result.queued))
    return running / calls, queued / calls


def limit_lines(config: Config, result: CaseResult, rows: list[Row]) -> Iterator[str]:
    """After a case: the machine's memcpy rate, the share of it that was reached."""
    yield f"# imbalance ratio over ranks at {result.tokens} tokens: {result.ledger.imbalance:.3f}"
    rate = memcpy_rate(config, result)
    yield (
        f"# memcpy limit: {rate['median']:.2f} GB/s copied by {config.num_ranks} processes at once "
        f"(p10 {rate['p10']:.2f}, p90 {rate['p90']:.2f}; {DEFAULT_BYTES >> 20} MiB each)"
    )
    for limit in limits(config, result, rows):
        yield (
            f"# {limit['implementation']} {limit['op']}: {limit['one_pass_share']:.1%} of the one-pass limit "
            f"(by memmove, rows land where experts read them: {limit['one_pass_us']:.0f} us)"
        )
    for row in rows:
        if row.op not in STAGES and (shares := core_shares(config, result, row)) and shares[1] >= _MUCH_QUEUED:
            yield (
                f"# {row.implementation} {row.op}: its ranks ran for {shares[0]:.0%} of their time and waited "
                f"for a core for {shares[1]:.0%}"
            )


def footer_lines(config: Config, results: list[CaseResult], rows: list[Row], peak_rss: int | None) -> Iterator[str]:
    """The # lines after the table."""
    left_out: dict[tuple[str, str], list[int]] = {}
    for result in results:
        for name, reason in result.skipped.items():
            left_out.setdefault((name, reason), []).append(result.tokens)
    for (name, reason), tokens in left_out.items():
        yield f"# {name} skipped at {', '.join(map(str, dict.fromkeys(tokens)))} tokens: {reason}"
    wrong = sum(sum(result.wrong.values()) for result in results)
    verdict = ("OK" if wrong == 0 else "FAILED") if config.check else "not checked (-c 0)"
    yield f"# Out of bounds values : {wrong} {verdict}"
    counters = [pair for result in results for links in result.counted_rows.values() for pair in links.items()]
    if counters:
        miscounted = sum(result.num_miscounted for result in results)
        yield f"# Row counters that differ from the closed form : {miscounted} of {len(counters)}"
    largest: dict[str, int] = {}
    for result in results:
        for name, num_bytes in result.buffer_bytes.items():
            largest[name] = max(largest.get(name, 0), num_bytes)
    listed = ", ".join(f"{name} {num_bytes:,}" for name, num_bytes in largest.items())
    yield f"# Buffer bytes per rank : {listed or '-'}"
    slowest: dict[str, float] = {}
    for result in results:
        for name, seconds in result.setup_s.items():
            slowest[name] = max(slowest.get(name, 0.0), seconds)
    listed = ", ".join(f"{name} {seconds * 1e3:.1f}" for name, seconds in slowest.items())
    yield f"# Set-up time (ms, slowest rank) : {listed or '-'}"
    base = rows[0].implementation if rows else ""
    busbw = [row.busbw for row in rows if row.busbw is not None and row.implementation == base]
    if busbw:
        yield f"# Avg bus bandwidth : {statistics.fmean(busbw):.3f} GB/s ({base})"
    for num_sms, found in crossings(rows):
        yield f"# Lines against the other path{f', {num_sms} SMs' if num_sms else ''} : {found.said}"
    if peak_rss is not None:
        yield f"# Peak resident memory per rank : {peak_rss:,} bytes (largest rank, all together)"


def crossings(rows: list[Row]) -> Iterator[tuple[int, crossover.Crossover]]:
    """(SMs, up to how many tokens lines are faster) of every operation that both of this library's paths have."""
    times = {(row.num_sms, row.op, row.tokens, row.implementation): row.time_us for row in rows}
    pairs: dict[tuple[int, str], list[crossover.Row]] = {}
    for (num_sms, op, tokens, name), time_us in times.items():
        if name == LINES and (other := times.get((num_sms, op, tokens, THROUGHPUT))):
            pairs.setdefault((num_sms, op), []).append(crossover.Row(tokens, op, time_us, other))
    for (num_sms, op), found in pairs.items():
        yield num_sms, crossover.find(found, op)


def to_json(
    config: Config, environment: dict[str, Any], results: list[CaseResult], wires: dict[str, str | None], **extra: Any
) -> dict[str, Any]:
    """Everything a run knows, as plain data: configuration, environment, ledgers, rows, raw samples."""
    cases, all_rows = [], []
    for result in results:
        rows = build_rows(config, result, wires)
        all_rows += rows
        cases.append(
            {
                "tokens": result.tokens,
                "num_sms": result.num_sms,
                "tokens_per_rank": result.counts,
                "ledger": dataclasses.asdict(result.ledger),
                "rows": [dataclasses.asdict(row) for row in rows],
                "memcpy_gbps": memcpy_rate(config, result),
                "limits": limits(config, result, rows),
                "buffer_bytes": result.buffer_bytes,
                "setup_s": result.setup_s,
                "imbalance": result.ledger.imbalance,
                "wrong": result.wrong,
                "counted_rows": result.counted_rows,
                "skipped": result.skipped,
                **{
                    key: [{"op": op, "implementation": name, "by_rank": by_rank} for (op, name), by_rank in of.items()]
                    for key, of in (
                        ("samples_s", result.samples),
                        ("kernel_samples_s", result.kernel),
                        ("running_samples_s", result.running),
                        ("queued_samples_s", result.queued),
                    )
                },
            }
        )
    return {
        "schema": SCHEMA,
        "config": dataclasses.asdict(config),
        "environment": environment,
        "wires": wires,
        "cases": cases,
        "crossovers": [{"num_sms": num_sms, **found.to_json()} for num_sms, found in crossings(all_rows)],
        "wrong_total": sum(sum(result.wrong.values()) for result in results),
        "miscounted_total": sum(result.num_miscounted for result in results),
        **extra,
    }
