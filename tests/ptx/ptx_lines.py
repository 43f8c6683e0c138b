"""Where a line of PTX comes from: the calls that were inlined around it, from the kernel down, by nvcc -lineinfo."""

from __future__ import annotations

import re
from dataclasses import dataclass

LOC = re.compile(
    r"\s*\.loc\s+(\d+) (\d+) (\d+)"
    r"(?:, function_name (\$L__info_string\d+), inlined_at (\d+) (\d+) (\d+))?"
)
FILE = re.compile(r'\s*\.file\s+(\d+) "(.*)"')
ENTRY = re.compile(r"\s*\.visible \.entry (\w+)\(")

LABEL, BRANCH = re.compile(r"(\$L\w+):"), re.compile(r"\bbra(?:\.uni)?\s+(\$L\w+);")


@dataclass(frozen=True)
class Place:
    """file: below csrc; function: mangled, "" for the kernel's own."""

    file: str
    line: int
    function: str


def _files(text: str) -> dict[int, str]:
    """Of those below csrc by their path there, of others by name."""
    return {
        int(m[1]): m[2].rpartition("/csrc/")[2] if "/csrc/" in m[2] else m[2].rpartition("/")[2]
        for m in map(FILE.match, text.split("\n"))
        if m
    }


def _strings(text: str) -> dict[str, str]:
    """What the labels of .debug_str stand for."""
    found = {}
    for label, body in re.findall(r"(\$L__info_string\d+):\n((?:\s*\.b8.*\n)+)", text):
        values = [int(n) for n in re.findall(r"\d+", body.replace(".b8", ""))]
        found[label] = bytes(values[: values.index(0)] if 0 in values else values).decode(errors="replace")
    return found


def loops(text: str) -> dict[str, list[tuple[int, int]]]:
    """{kernel: (first line, line of the branch back) of each loop, shortest first}."""
    found: dict[str, list[tuple[int, int]]] = {}
    of_kernel, labels = [], {}
    for number, line in enumerate(text.split("\n"), 1):
        if entry := ENTRY.match(line):
            of_kernel, labels = found.setdefault(entry[1], []), {}
        elif label := LABEL.match(line):
            labels[label[1]] = number
        elif (branch := BRANCH.search(line)) and branch[1] in labels:
            of_kernel.append((labels[branch[1]], number))
    for of_kernel in found.values():
        of_kernel.sort(key=lambda loop: loop[1] - loop[0])
    return found


def places(text: str) -> dict[str, dict[int, tuple[Place, ...]]]:
    """{kernel: {line of the text, from 1: places from the kernel's own down to the innermost}}."""
    files, strings = _files(text), _strings(text)
    found: dict[str, dict[int, tuple[Place, ...]]] = {}
    of_kernel: dict[int, tuple[Place, ...]] = {}
    known: dict[tuple[str, ...], tuple[Place, ...]] = {}
    here: tuple[Place, ...] = ()
    for number, line in enumerate(text.split("\n"), 1):
        if entry := ENTRY.match(line):
            of_kernel, known, here = found.setdefault(entry[1], {}), {}, ()
        elif loc := LOC.match(line):
            file, at, column, label, *call = loc.groups()
            around = known.get(tuple(call), ()) if label else ()
            if int(at):  # line 0 is compiler's own
                here = (*around, Place(files.get(int(file), ""), int(at), strings.get(label or "", "")))
                known[(file, at, column)] = here
        elif here:
            of_kernel[number] = here
    return found
