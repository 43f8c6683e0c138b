"""The timeline for Perfetto, which drops events that overlap: whole nanoseconds, no overlap, what it covers."""

from __future__ import annotations

import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybrid_ep.cli import main
from hybrid_ep.hardware import clusters
from hybrid_ep.perf import events, model, trace, trace_rules
from hybrid_ep.perf.shape import Shape
from hybrid_ep.perf.trace import TrackSpan

H100 = clusters.get("h100_8x400g")


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


BASE = {"pid": 1, "tid": 1}


def traced(*events):
    names = [
        {"ph": "M", "name": "process_name", "pid": 1, "tid": 0, "args": {"name": "p"}},
        *({"ph": "M", "name": "thread_name", "pid": 1, "tid": t, "args": {"name": f"t{t}"}} for t in (1, 2)),
    ]
    return {"displayTimeUnit": "ns", "traceEvents": [*names, *events]}


def span(ts, dur, tid=1, **more):
    return {"ph": "X", "name": "s", "pid": 1, "tid": tid, "ts": ts, "dur": dur, **more}


def flow(phase, ts, tid=1, flow_id=7):
    return {"ph": phase, "name": "row", "pid": 1, "tid": tid, "ts": ts, "id": flow_id}


def test_what_the_format_allows_passes():
    trace.check(traced(span(0, 10), span(1, 4), span(2, 1), span(5, 5), span(10, 1)))  # nested and side by side
    begin, end = ({**BASE, "ph": phase, "name": "b", "ts": ts} for phase, ts in (("B", 0), ("E", 5)))
    trace.check(traced(begin, span(1, 2), end))
    trace.check(traced(span(0, 4), span(3, 4, 2), flow("s", 1), flow("t", 3, 2), flow("f", 5, 2)))
    trace.check(traced(span(0, 1), {"ph": "C", "name": "depth", "pid": 1, "ts": 0, "args": {"rows": 3}}))


@pytest.mark.parametrize(
    "events, words",
    [
        ([span(0, 2), span(1, 2)], "overlap at 1.0 us"),
        ([span(3, 1), span(0, 1)], "goes back from 3.0 to 0.0 us"),
        ([span(-1, 2)], "ts of 's' is -1"),
        ([span(0, float("nan"))], "dur of 's' is nan"),
        ([span("0", 1)], "ts of 's' is '0'"),
        ([span(0, 1, tid="1")], "tid of 's' is '1'"),
        ([span(0, 1, name="")], "name of an event is ''"),
        ([span(0, 1, tid=3)], "track (1, 3) has no name"),
        ([span(0, 1), {**BASE, "ph": "Q", "name": "q", "ts": 0}], "ph='Q'"),
        ([span(0, 1), {"ph": "M", "name": "thread_name", "pid": 1, "tid": 1, "args": {"name": "x"}}], "twice"),
        ([{**BASE, "ph": "B", "name": "b", "ts": 0}], "'b' of track (1, 1) does not end"),
        ([span(0, 1), {**BASE, "ph": "E", "name": "b", "ts": 0}], "did not begin before"),
        ([span(0, 4), flow("s", 1)], "flow 7 is s in time"),
        ([span(0, 4), flow("f", 1)], "flow 7 is f in time"),
        ([span(0, 4), flow("f", 1), flow("s", 2)], "flow 7 is f s in time"),
        ([span(0, 4), flow("s", 1), flow("s", 2), flow("f", 3)], "flow 7 is s s f in time"),
        ([span(0, 4), flow("s", 1), flow("f", 5)], "ends at 5 us in no span of (1, 1)"),
        ([span(0, 4), {**BASE, "ph": "s", "name": "row", "ts": 1}], "a flow lacks id"),
    ],
)
def test_what_perfetto_would_drop_is_refused(events, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        trace.check(traced(*events))


@pytest.mark.skipif(events.missing() is not None, reason=str(events.missing()))
@pytest.mark.parametrize("nodes, permute_sms", [(1, 2), (2, 0), (2, 3)])
def test_traces_of_the_event_engine_and_of_the_model_keep_the_rules(tmp_path, nodes, permute_sms):
    shape = Shape(2 * nodes, 2, 64, 1024, 4, 16)
    got = events.timeline(shape, H100, num_sms=2, permute_sms=permute_sms)
    line = model.predict("combine", shape, H100, num_sms=2, permute_sms=permute_sms).timeline
    for spans in (got.spans, trace.of_timeline(line, "combine")):
        assert trace.write(tmp_path / "t.json", spans) == len(spans)
        document = json.loads((tmp_path / "t.json").read_text())
        trace_rules.check(document)
        drawn = sum(e["dur"] for e in document["traceEvents"] if e["ph"] == "X")
        assert drawn == pytest.approx(sum(s.duration for s in spans), rel=0.02)


def test_the_trace_says_what_it_covers(tmp_path, capsys):
    path = tmp_path / "t.json"
    assert main(["simulate", "--engine", "model", "--tokens", "256", "--trace", str(path)]) == 0
    document = json.loads(path.read_text())
    assert document["otherData"]["covers"] == "the model: one rank for all, 256 tokens"
    first = next(e for e in document["traceEvents"] if e["name"] == "process_name")
    assert "256 tokens" in first["args"]["name"] and f"# written: {path}: " in capsys.readouterr().out
