"""Loops of a kernel in the text of `cuobjdump -sass`, and which instructions lie in the innermost of them.

A backward branch from B to T is a loop of the instructions T..B. Compilers place blocks out of line, so an instruction
may be missed as part of a loop; none is put into a loop that it is not between the ends of."""

import re
from bisect import bisect_right

INSTRUCTION = re.compile(r"\s*/\*([0-9a-f]{4,})\*/\s+(.*?)\s*;")
GUARDED = re.compile(r"(@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)")
PARTS_WAYS = re.compile(r"\b(BRA|EXIT|RET|BRX)\b(?!\.DIV)")
BRANCH = re.compile(r"\bBRA\b.*\b0x([0-9a-f]+)")


def instruction_of(line):
    """(address, text) that a line shows, or None."""
    match = INSTRUCTION.match(line)
    return (int(match[1], 16), match[2]) if match else None


def loops(instructions):
    """[(first, last)], indices of the instructions of each loop, shortest first; a branch to itself, the padding behind
    a kernel, is none."""
    index = {address: i for i, (address, _) in enumerate(instructions)}
    found = []
    for i, (_, text) in enumerate(instructions):
        match = BRANCH.search(text) if "BRA" in text else None
        first = index.get(int(match[1], 16)) if match else None
        if first is not None and first < i:
            found.append((first, i))
    return sorted(found, key=lambda loop: loop[1] - loop[0])


def in_short_loops(instructions, wanted, shorter_than):
    """[(text, instructions of its innermost loop)] for instructions that match the pattern `wanted` and lie in a loop
    of fewer than `shorter_than` instructions."""
    by_length = loops(instructions)
    short = by_length[: bisect_right(by_length, shorter_than - 2, key=lambda loop: loop[1] - loop[0])]
    found, is_wanted = [], re.compile(wanted).search
    for i, (_, text) in enumerate(instructions):
        if is_wanted(text):
            innermost = next((loop for loop in short if loop[0] <= i <= loop[1]), None)
            if innermost:
                found.append((text, innermost[1] - innermost[0] + 1))
    return found


def successors(instructions):
    """For each instruction the indices of those that a warp may issue behind it. A warp whose lanes are together is
    meant: BRA.DIV, which parts, falls through, and so does a call, whose body is not counted."""
    index = {address: i for i, (address, _) in enumerate(instructions)}
    after = []
    for i, (_, text) in enumerate(instructions):
        guarded, opcode = GUARDED.match(text).groups()
        target = BRANCH.search(text) if opcode.startswith("BRA") and opcode != "BRA.DIV" else None
        ends = opcode.split(".")[0] in ("EXIT", "RET", "BRX") or (target and not re.search(r"\bU?P\d", text))
        here = [] if ends and not (guarded and opcode != "BRA") else [i + 1]
        if target and (at := index.get(int(target[1], 16))) is not None:
            here.append(at)
        after.append([n for n in here if n < len(instructions)])
    return after


def shortest_walk(after, first, last, past=(), never=frozenset()):
    """Indices of the fewest instructions that lead from behind `first` to `last`, past one of each of these sets in
    their order, and past none of `never` before the last, or None. first == last: round a loop."""
    came, queue = {}, [(first, 0)]
    for at, passed in queue:
        for n in after[at]:
            step = (n, passed + (passed < len(past) and n in past[passed]))
            if step not in came and (n not in never or step == (last, len(past))):
                came[step] = (at, passed)
                queue.append(step)
                if step == (last, len(past)):
                    walk = [step]
                    while came[walk[-1]] != (first, 0):
                        walk.append(came[walk[-1]])
                    return [i for i, _ in reversed(walk)]
    return None


def runs(instructions, wanted, least):
    """Indices of the first instruction of each run without a branch or a branch's target in it that has at least
    `least` instructions that match the pattern."""
    targets = {int(m[1], 16) for _, text in instructions if (m := BRANCH.search(text))}
    found, hits, is_wanted = [], [], re.compile(wanted).search
    for i, (address, text) in enumerate([*instructions, (None, "BRA")]):
        if address in targets or address is None:
            if len(hits) >= least:
                found.append(hits[0])
            hits = []
        if is_wanted(text):
            hits.append(i)
        if PARTS_WAYS.search(text):
            if len(hits) >= least:
                found.append(hits[0])
            hits = []
    return found
