"""Rules of the Trace Event Format, as its specification and Perfetto's importer have them, that a timeline must keep.

Perfetto drops or misreads what breaks them. Its statistics count spans that overlap, times before 0 and flows that
begin twice; a flow that goes nowhere or an unknown event is lost without a count. So a trace is checked before it is
written."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

Event = dict[str, Any]
Track = tuple[int, int]  # pid, tid
_FIELDS = {"X": ("name", "pid", "tid", "ts", "dur"), "M": ("name", "pid", "args"), "C": ("name", "pid", "ts", "args")}
_ON_A_TRACK = ("name", "pid", "tid", "ts")  # B, E, and flows
_FLOWS = {"s": "begins", "t": "goes on", "f": "ends"}
_NAMES = ("process_name", "thread_name")


def check(document: dict[str, Any]) -> None:
    """ValueError when Perfetto would refuse or misread it: fields missing or of another type, processes and tracks
    unnamed or named twice, spans of a track that overlap without nesting or come in another order than their times, a
    begin without its end, a flow that does not begin once, end once, in time, in a span."""
    events = document.get("traceEvents")
    if not isinstance(events, list) or not any(e.get("ph") in ("X", "B") for e in events):
        raise ValueError("trace: there is no span in it")
    if (unit := document.get("displayTimeUnit", "ms")) not in ("ms", "ns"):
        raise ValueError(f"trace: displayTimeUnit is {unit!r}; the format has ms and ns")
    for event in events:
        _check_fields(event)
    _check_names(events)
    spans = _spans(events)
    for track, found in spans.items():
        _check_nesting(track, found)
    _check_flows(events, spans)


def nanoseconds(us: float) -> int:
    """Of ts and dur, which count microseconds; as fine as Perfetto keeps them."""
    return round(us * 1000)


def _check_fields(event: Event) -> None:
    phase = event.get("ph")
    if phase not in _FIELDS and phase not in _FLOWS and phase not in ("B", "E"):
        raise ValueError(f"trace: an event has ph={phase!r}; use X, B, E, M, C, s, t or f")
    what = "span" if phase in ("X", "B", "E") else "flow" if phase in _FLOWS else "event"
    needed = _FIELDS.get(phase, _ON_A_TRACK) + (("id",) if phase in _FLOWS else ())
    if missing := set(needed) - event.keys():
        raise ValueError(f"trace: a {what} lacks {', '.join(sorted(missing))}")
    for key in needed:
        value = event[key]
        if key in ("ts", "dur"):
            number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if not number or not math.isfinite(value) or value < 0:
                raise ValueError(f"trace: {key} of {event['name']!r} is {value!r}; times are numbers from 0")
        elif key in ("pid", "tid") and not isinstance(value, int):
            raise ValueError(f"trace: {key} of {event['name']!r} is {value!r}; give an integer")
        elif key == "name" and not (isinstance(value, str) and value):
            raise ValueError(f"trace: the name of an event is {value!r}; give a text")


def _check_names(events: Iterable[Event]) -> None:
    """Every process and every track has one name."""
    named: dict[tuple[str, int, int], str] = {}
    tracks: set[Track] = set()
    for e in events:
        if e["ph"] == "M" and e["name"] in _NAMES:
            key = e["name"], e["pid"], e.get("tid", 0) if e["name"] == "thread_name" else 0
            if key in named:
                raise ValueError(f"trace: {e['name']} {key[1:]} is given twice")
            named[key] = e["args"]["name"]
        elif e["ph"] not in ("M", "C"):
            tracks.add((e["pid"], e["tid"]))
    for pid, tid in sorted(tracks):
        if ("thread_name", pid, tid) not in named:
            raise ValueError(f"trace: track {(pid, tid)} has no name")
        if ("process_name", pid, 0) not in named:
            raise ValueError(f"trace: process {pid} has no name")


def _spans(events: Iterable[Event]) -> dict[Track, list[tuple[int, int]]]:
    """(begin, end) in nanoseconds by track, in the order of the document; an E ends the last B that is open."""
    spans: dict[Track, list[tuple[int, int]]] = defaultdict(list)
    opened: dict[Track, list[tuple[int, str, int]]] = defaultdict(list)  # begin, name, place among the spans
    for e in events:
        if e["ph"] not in ("X", "B", "E"):
            continue
        track, at = (e["pid"], e["tid"]), nanoseconds(e["ts"])
        if e["ph"] == "X":
            spans[track].append((at, at + nanoseconds(e["dur"])))
        elif e["ph"] == "B":
            opened[track].append((at, e["name"], len(spans[track])))
            spans[track].append((at, at))
        else:
            begin, name, place = opened[track].pop() if opened[track] else (0, "", -1)
            if place < 0 or name != e["name"] or at < begin:
                raise ValueError(f"trace: {e['name']!r} ends on track {track} at {e['ts']} us and did not begin before")
            spans[track][place] = begin, at
    for track, left in opened.items():
        if left:
            raise ValueError(f"trace: {left[-1][1]!r} of track {track} does not end")
    return spans


def _check_nesting(track: Track, spans: list[tuple[int, int]]) -> None:
    """Two spans of a track are apart, or one lies in the other; and the document has them in the order of time."""
    around: list[int] = []  # ends of the spans that are open
    for begin, end in sorted(spans, key=lambda s: (s[0], -s[1])):
        while around and around[-1] <= begin:
            around.pop()
        if around and end > around[-1]:
            raise ValueError(f"trace: spans of track {track} overlap at {begin / 1000} us")
        around.append(end)
    for (before, _), (begin, _) in zip(spans, spans[1:], strict=False):
        if begin < before:
            raise ValueError(f"trace: track {track} goes back from {before / 1000} to {begin / 1000} us")


def _check_flows(events: Iterable[Event], spans: dict[Track, list[tuple[int, int]]]) -> None:
    flows: dict[tuple[Any, ...], list[Event]] = defaultdict(list)
    for e in events:
        if e["ph"] in _FLOWS:
            flows[e.get("cat", ""), e["name"], e["id"]].append(e)
            track, at = (e["pid"], e["tid"]), nanoseconds(e["ts"])
            if not any(begin <= at <= end for begin, end in spans.get(track, ())):
                raise ValueError(f"trace: flow {e['id']!r} {_FLOWS[e['ph']]} at {e['ts']} us in no span of {track}")
    for key, steps in flows.items():
        order = [e["ph"] for e in sorted(steps, key=lambda e: (e["ts"], "stf".index(e["ph"])))]
        if order[0] != "s" or order[-1] != "f" or order.count("s") != 1 or order.count("f") != 1:
            raise ValueError(f"trace: flow {key[2]!r} is {' '.join(order)} in time; one s, any t, one f")
