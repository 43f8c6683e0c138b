"""Loops of a kernel in the text of `cuobjdump -sass`, and which instructions lie in the innermost of them.

A backward branch from B to T is a loop of the instructions T..B. Compilers place blocks out of line, so an instruction
may be missed as part of a loop; none is put into a loop that it is not between the ends of."""

import re
from bisect import bisect_right

INSTRUCTION = re.compile(r"\s*/\*([0-9a-f]{4,})\*/\s+(.*?)\s*;")
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
        match = BRANCH.search(text)
        first = index.get(int(match[1], 16)) if match else None
        if first is not None and first < i:
            found.append((first, i))
    return sorted(found, key=lambda loop: loop[1] - loop[0])


def in_short_loops(instructions, wanted, shorter_than):
    """[(text, instructions of its innermost loop)] for instructions that match the pattern `wanted` and lie in a loop
    of fewer than `shorter_than` instructions."""
    by_length = loops(instructions)
    short = by_length[:bisect_right(by_length, shorter_than - 2, key=lambda loop: loop[1] - loop[0])]
    found = []
    for i, (_, text) in enumerate(instructions):
        if re.search(wanted, text):
            innermost = next((loop for loop in short if loop[0] <= i <= loop[1]), None)
            if innermost:
                found.append((text, innermost[1] - innermost[0] + 1))
    return found
