"""The timeline for Perfetto, which drops events that overlap: whole nanoseconds, no overlap, what it covers."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybrid_ep.cli import main
from hybrid_ep.perf import trace
from hybrid_ep.perf.trace import TrackSpan


def nanoseconds(document):
    """[(begin, end)] by track, each exactly what the file says."""
    found: dict[int, list[tuple[float, float]]] = {}
    for e in document["traceEvents"]:
        if e["ph"] == "X":
            found.setdefault(e["tid"], []).append((e["ts"] * 1000, e["dur"] * 1000))
    return found


@given(st.lists(st.floats(0, 3, allow_subnormal=False), min_size=1, max_size=40), st.floats(0, 1e5))
def test_spans_that_touch_stay_in_whole_nanoseconds_and_never_overlap(lengths, start):
    spans, at = [], start
    for length in lengths:
        spans.append(TrackSpan("rank 0", "t", "s", at, length, {}))
        at += length
    document = trace.to_json(spans)
    trace.check(document)
    (track,) = nanoseconds(document).values()
    assert all(abs(x - round(x)) < 1e-3 for pair in track for x in pair)
    ends = [0, *(round(begin) + round(length) for begin, length in track)]
    assert all(round(begin) >= end for (begin, _), end in zip(track, ends, strict=False))
    assert len(track) == len(lengths) and all(length >= 0.999 for _, length in track)


def test_a_true_overlap_is_refused():
    spans = [TrackSpan("rank 0", "t", "a", 0.0, 2.0, {}), TrackSpan("rank 0", "t", "b", 1.9, 1.0, {})]
    with pytest.raises(ValueError, match="overlap"):
        trace.check(trace.to_json(spans))


def test_the_trace_says_what_it_covers(tmp_path, capsys):
    path = tmp_path / "t.json"
    assert main(["simulate", "--engine", "model", "--tokens", "256", "--trace", str(path)]) == 0
    document = json.loads(path.read_text())
    assert document["otherData"]["covers"] == "the model: one rank for all, 256 tokens"
    first = next(e for e in document["traceEvents"] if e["name"] == "process_name")
    assert "256 tokens" in first["args"]["name"] and f"# written: {path}: " in capsys.readouterr().out
