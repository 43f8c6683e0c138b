"""The grid of one shape: its points, the Pareto front of time against SMs, the choice, the default it is compared with.

The choice is the rule of the simulator's advice: the fewest SMs within 5 % of the fastest, since what an exchange does
not need overlapped compute gets, and of the chunks within 2 % at that number the largest: fewest messages."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from hybrid_ep.tuning import Entry, Key, Settings

OPS = ("dispatch", "combine")
SMS_WITHIN, CHUNK_WITHIN = 1.05, 1.02  # of the fastest


@dataclass(frozen=True)
class Point:
    """Microseconds of one operation with so many SMs and tokens a rail message. p10, p90: None of a prediction."""

    op: str
    num_sms: int
    chunk: int
    time_us: float
    p10_us: float | None = None
    p90_us: float | None = None


@dataclass(frozen=True)
class Setting:
    """Of one operation."""

    num_sms: int
    chunk: int


@dataclass(frozen=True)
class Grid:
    """Every point of one number of tokens. default: what a buffer takes without a file; analytic: what the model of
    the simulator suggests, where it has one. Both are points of the grid."""

    device: str
    key: Key
    tokens: int
    topk: int
    dtype: str
    points: tuple[Point, ...]
    default: Setting
    analytic: Setting | None = None

    def at(self, op: str, setting: Setting) -> Point:
        """The point of a setting; KeyError when it is not in the grid."""
        for p in self.points:
            if (p.op, p.num_sms, p.chunk) == (op, setting.num_sms, setting.chunk):
                return p
        raise KeyError(setting)

    def front(self, op: str) -> list[Point]:
        """Points that no other one beats in SMs and time: by SMs ascending, each faster than all before it."""
        kept: list[Point] = []
        for p in sorted(self._of(op), key=lambda p: (p.num_sms, p.time_us)):
            if not kept or p.time_us < kept[-1].time_us:
                kept = [q for q in kept if q.num_sms < p.num_sms] + [p]
        return kept

    def chosen(self, op: str) -> Point:
        """The tuned point."""
        front = self.front(op)
        fewest = next(p for p in front if p.time_us <= SMS_WITHIN * front[-1].time_us).num_sms
        same = [p for p in self._of(op) if p.num_sms == fewest]
        best = min(p.time_us for p in same)
        return max((p for p in same if p.time_us <= CHUNK_WITHIN * best), key=lambda p: p.chunk)

    @property
    def settings(self) -> Settings:
        dispatch, combine = (self.chosen(op) for op in OPS)
        return Settings(dispatch.num_sms, combine.num_sms, dispatch.chunk, combine.chunk)

    def entry(self) -> dict[str, Any]:
        """For the file: what a buffer reads, and beside it what a reader wants to know."""
        found = Entry(self.device, self.key, self.tokens, self.topk, self.dtype, self.settings).to_json()
        compared = {
            op: {
                "tuned": asdict(self.chosen(op)),
                "default": asdict(self.at(op, self.default)),
                "analytic": asdict(self.at(op, self.analytic)) if self.analytic else None,
                "front": [asdict(p) for p in self.front(op)],
            }
            for op in OPS
        }
        return {**found, "operations": compared, "points": [asdict(p) for p in self.points]}

    def _of(self, op: str) -> Iterable[Point]:
        return (p for p in self.points if p.op == op)
