"""Timelines for Perfetto (ui.perfetto.dev): the Trace Event Format, one process a rank or link, one track a server.

The model's timeline is of one rank that stands for all; a simulated world's has every rank."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from hybrid_ep.perf.flow import Timeline
from hybrid_ep.perf.trace_rules import check

_SAME_US = 1e-6  # two ends nearer than this are one, but for the rounding of sums


class TrackSpan(NamedTuple):
    """Work on one track. process: "rank 3"; track: "block 2 scatter"; times in microseconds."""

    process: str
    track: str
    name: str
    start: float
    duration: float
    args: dict[str, Any]


def of_timeline(line: Timeline, operation: str) -> list[TrackSpan]:
    """The model's spans: SM roles by block, NVLink and NIC each on a track."""
    spans = []
    for span in line.spans:
        kind, index = span.server
        if kind in ("nvlink", "nic"):
            spans.append(
                TrackSpan("rank 0 links", kind, f"{operation} {span.label}", span.start, span.work, {"role": span.role})
            )
        else:
            what = f"{span.role} copies" if kind == "engine" else f"{kind.removeprefix('role ')} waits"
            spans.append(
                TrackSpan(
                    "rank 0 SMs",
                    f"block {index:03d} {what}",
                    f"{operation} {span.label}",
                    span.start,
                    span.work,
                    {"role": span.role},
                )
            )
    return spans


def to_json(spans: Iterable[TrackSpan], covers: str = "") -> dict[str, Any]:
    """The Trace Event Format as a dictionary: metadata names processes and tracks, X events are spans.

    Spans begin and end on whole nanoseconds (of ts and dur, which count microseconds, 0.001): what ends when the next
    one begins gets the same number there, so that none overlaps and Perfetto, which drops what overlaps, shows all.
    A span that would take no nanosecond takes one, and moves what follows it at once. covers: what the trace shows of
    the whole exchange; it stands in the document and as the name of the first process."""
    spans = list(spans)
    processes = {name: i + 1 for i, name in enumerate(sorted({s.process for s in spans}, key=_natural))}
    tracks = {key: i + 1 for i, key in enumerate(sorted({(s.process, s.track) for s in spans}, key=str))}
    events: list[dict[str, Any]] = []
    for name, pid in processes.items():
        shown = f"{name} ({covers})" if covers and pid == 1 else name
        events.append({"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": shown}})
    for (process, track), tid in tracks.items():
        events.append(
            {"ph": "M", "name": "thread_name", "pid": processes[process], "tid": tid, "args": {"name": track}}
        )
    free: dict[int, tuple[int, float]] = {}  # track -> where its last span ends: nanoseconds drawn, microseconds true
    for s in sorted(spans, key=lambda s: s.start):
        tid = tracks[s.process, s.track]
        begin, end = round(s.start * 1000), round((s.start + s.duration) * 1000)
        drawn, true = free.get(tid, (begin, s.start))
        if s.start >= true - _SAME_US:  # not a true overlap, which check() is to find
            begin = max(begin, drawn)
        end = max(end, begin + 1)
        free[tid] = max(drawn, end), max(true, s.start + s.duration)
        events.append(
            {
                "ph": "X",
                "name": s.name,
                "pid": processes[s.process],
                "tid": tid,
                "ts": begin / 1000,
                "dur": (end - begin) / 1000,
                "args": s.args,
            }
        )
    return {"displayTimeUnit": "ns", "otherData": {"covers": covers}, "traceEvents": events}


def write(path: str | Path, spans: Iterable[TrackSpan], covers: str = "") -> int:
    """Writes the file, covers as in to_json; returns its number of spans. ValueError when the folder does not exist or
    nothing happened."""
    path = Path(path)
    if not path.resolve().parent.is_dir():
        raise ValueError(f"trace={str(path)!r}: no such folder; create it first")
    document = to_json(spans, covers)
    check(document)
    path.write_text(json.dumps(document, allow_nan=False))
    return sum(e["ph"] == "X" for e in document["traceEvents"])


def _natural(name: str) -> tuple:
    return tuple(int(part) if part.isdigit() else part for part in name.split())
