"""What a warp of the latency path issues for the lines that it handles at once (csrc/roles/latency_*.h), from the
machine code of the kernels' loops over lines.

A loop of lines is the innermost loop around stores or loads of lines; the loop that looks again, which the compiler
puts into it, is taken off. The file TABLE holds what hybrid_ep/perf/latency_events.py charges; a library that differs
from it is a complaint of cubin_check.py, which also writes it."""

import json
import re
from pathlib import Path

import sass_loops
from sass_reduce import MOST_FASTER, MOST_SLOWER

STORE, LOAD = r"\bSTG\S*\.128\.STRONG\.SYS", r"\bLDG\S*\.128\.STRONG\.SYS"
TABLE = Path(__file__).resolve().parent.parent / "hybrid_ep" / "perf" / "data" / "line_loops.json"
RAIL = "P2PDevice"  # the other mapped one serves virtual ranks
KERNELS = ("latency_dispatch", "latency_combine")
MOST_STORES = 4  # of a loop over destinations, unrolled
SHORTEST_LOOP, LONGEST_LOOP, LONGEST_LOOK = 12, 700, 260  # what has more is made of others


def innermost(instructions, wanted):
    """{(first, last): how many instructions of the pattern} of the innermost loops that have any."""
    loops = [loop for loop in sass_loops.loops(instructions) if SHORTEST_LOOP <= loop[1] - loop[0] < LONGEST_LOOP]
    found = {}
    for i, (_, text) in enumerate(instructions):
        if re.search(wanted, text) and (loop := next((x for x in loops if x[0] <= i <= x[1]), None)):
            found[loop] = found.get(loop, 0) + 1
    return found


def looked_at(instructions):
    """[instructions of a loop that looks at lines, without the loop in it that looks again], in the code's order."""
    again = {loop for loop in innermost(instructions, LOAD)}
    sizes = []
    for first, last in sorted(again):
        around = [x for x in sass_loops.loops(instructions) if x[0] < first and last <= x[1] < x[0] + LONGEST_LOOK]
        if around:
            sizes.append(min(y - x for x, y in around) - (last - first))
    return sizes


def issued(kernel, instructions):
    """What a warp of the kernel issues, by what it does with a line; a loop that is not found is left out."""
    if kernel == "latency_dispatch":
        stores = innermost(instructions, STORE).items()
        sends = [(last - first + 1) / n for (first, last), n in stores if n == MOST_STORES]
        received = looked_at(instructions)
        return ({"send": round(max(sends))} if sends else {}) | ({"receive": max(received)} if received else {})
    stores = innermost(instructions, STORE).items()
    sums = [last - first + 1 for (first, last), n in stores if n == 1 and last - first > 150]
    added = looked_at(instructions)
    # Of bf16, the first that the code has.
    return ({"partial": sums[0]} if sums else {}) | ({"sum": added[0]} if added else {})


def table(kernels):
    """{arch: {what: instructions}} of kernels over a mapped rail."""
    found = {}
    for kernel in kernels:
        if kernel.name in KERNELS and kernel.rail == RAIL:
            found.setdefault(kernel.arch, {}).update(kernel.lines)
    return found


def write_table(kernels):
    TABLE.write_text(json.dumps(table(kernels), indent=1, sort_keys=True) + "\n", encoding="utf-8")


def table_problems(kernels):
    """Where the library issues another number than the committed table says."""
    committed = json.loads(TABLE.read_text(encoding="utf-8"))
    for arch, now in table(kernels).items():
        for what, was in committed[arch].items():
            number = now.get(what, 0)
            if not (1 - MOST_FASTER) * was <= number <= (1 + MOST_SLOWER) * was:
                yield (
                    f"latency path {arch}: {number} instructions to {what} lines, {was} in {TABLE.name}, which the "
                    "performance model charges: --write-table, then correct the docs"
                )
