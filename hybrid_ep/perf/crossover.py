"""Up to how many tokens a rank the latency path is faster than the throughput path: rows of both, and what they say."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from hybrid_ep.hardware.clusters import Cluster
from hybrid_ep.perf import events, latency_events
from hybrid_ep.perf.model import permute_blocks
from hybrid_ep.perf.shape import Shape

PATHS = ("throughput", "latency")
OPS = ("dispatch", "combine", "pair")


@dataclass(frozen=True)
class Row:
    """Microseconds of one operation by both paths; `ratio` is the latency path's time over the other's."""

    tokens: int
    op: str
    latency_us: float
    throughput_us: float

    @property
    def ratio(self) -> float:
        return self.latency_us / self.throughput_us

    @property
    def faster(self) -> str:
        return PATHS[self.ratio < 1]

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"ratio": self.ratio, "faster": self.faster}


@dataclass(frozen=True)
class Crossover:
    """Of a sweep's rows of one operation. latency_tokens: up to how many lines are faster, from the fewest of the sweep
    on; 0: not even with those. throughput_from: the first with which they are not; None: lines are faster with all.
    again: more tokens than that with which lines are faster once more, and throughput_at all with which they are not:
    of a sweep whose times cross more than once."""

    op: str
    latency_tokens: int
    throughput_from: int | None
    again: tuple[int, ...] = ()
    throughput_at: tuple[int, ...] = ()

    @property
    def said(self) -> str:
        """Of the operation by name, and in accord with each of the rows."""
        if self.again:
            first = f"up to {self.latency_tokens} and at " if self.latency_tokens else "at "
            return (
                f"a {self.op} by lines is faster {first}{_list(self.again)} tokens a rank and not at "
                f"{_list(self.throughput_at)}: the paths cross more than once in this sweep; "
                f"latency_tokens={self.latency_tokens} is before the first"
            )
        if not self.latency_tokens:
            return (
                f"a {self.op} by the throughput path is faster from {self.throughput_from} tokens a rank, the fewest "
                "of this sweep"
            )
        if self.throughput_from is None:
            return (
                f"a {self.op} by lines is faster up to {self.latency_tokens} tokens a rank, the most of this sweep: "
                f"latency_tokens={self.latency_tokens} or more"
            )
        return (
            f"a {self.op} by lines is faster up to {self.latency_tokens} tokens a rank and not at "
            f"{self.throughput_from}: latency_tokens={self.latency_tokens}"
        )

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"said": self.said}


def find(rows: Iterable[Row], op: str) -> Crossover:
    """Of the rows with that operation, at least one, which are alike but for their tokens."""
    mine = sorted((row for row in rows if row.op == op), key=lambda row: row.tokens)
    lost = next((row.tokens for row in mine if row.faster != "latency"), None)
    won = max((row.tokens for row in mine if lost is None or row.tokens < lost), default=0)
    again = tuple(row.tokens for row in mine if row.faster == "latency" and row.tokens > won)
    return Crossover(op, won, lost, again, tuple(row.tokens for row in mine if row.faster != "latency"))


def _list(numbers: tuple[int, ...]) -> str:
    """In words: 64, 128 and 512."""
    *most, last = map(str, numbers)
    return f"{', '.join(most)} and {last}" if most else last


def predict(shape: Shape, cluster: Cluster, *, dispatch_sms: int, combine_sms: int, seed: int = 1) -> dict[str, Row]:
    """By operation: what the event engine says, of bf16 and uniform routing, without what a launch takes. Both
    paths have the blocks for local work beside those given that the library takes, if there are so many SMs; lines go
    over all alike. Raises what `latency_events.measure` and `events.measure` raise."""
    sms = {"dispatch": dispatch_sms, "combine": combine_sms}
    granted = {op: n + permute_blocks(cluster, n, op=op) for op, n in sms.items()}
    lines = {n: latency_events.measure(shape, cluster, num_sms=n, seed=seed) for n in sorted(set(granted.values()))}
    other = {n: events.measure(shape, cluster, num_sms=n).time_us for n in sorted(set(sms.values()))}
    by_lines = {"dispatch": lines[granted["dispatch"]].dispatch_us, "combine": lines[granted["combine"]].combine_us}
    both = {op: (by_lines[op], other[n][op]) for op, n in sms.items()}
    both["pair"] = (sum(us for us, _ in both.values()), sum(us for _, us in both.values()))
    return {op: Row(shape.tokens, op, *both[op]) for op in OPS}
