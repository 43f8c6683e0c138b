"""What a warp of the latency path issues for the lines that it handles at once (csrc/roles/latency_*.h), from the
machine code of the kernels' loops over lines.

    python scripts/sass_lines.py [LIBRARY] [--write]

A loop of lines is the innermost loop around stores or loads of lines; the loop that looks again, which the compiler
puts into it, is taken off. `--write` writes what hybrid_ep/perf/latency_events.py charges. Needs cuobjdump, as
cubin_check.py does."""

import argparse
import json
import re
import sys
from pathlib import Path

import cubin_check
import sass_loops

from hybrid_ep.perf import latency_events

STORE, LOAD = r"\bSTG\S*\.128\.STRONG\.SYS", r"\bLDG\S*\.128\.STRONG\.SYS"
TABLE = Path(latency_events.__file__).parent / "data" / "line_loops.json"
ARCHITECTURES = ("sm_90a", "sm_100")
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


def issued(dispatch, combine):
    """The table's entry of an architecture from its two kernels' instructions. ValueError where a loop is missing."""
    sends = [(last - first + 1) / n for (first, last), n in innermost(dispatch, STORE).items() if n == MOST_STORES]
    sums = [
        (last - first + 1) for (first, last), n in innermost(combine, STORE).items() if n == 1 and last - first > 150
    ]
    received, added = looked_at(dispatch), looked_at(combine)
    if not (sends and sums and received and added):
        raise ValueError(f"no loops over lines: {len(sends)}, {len(sums)}, {len(received)}, {len(added)} found")
    # Of bf16, the first that the code has; else the dearest.
    return {"send": round(max(sends)), "receive": max(received), "partial": sums[0], "sum": added[0]}


def kernels(library, arch):
    """{"latency_dispatch" | "latency_combine": instructions} of the mapped rail."""
    text = cubin_check.run(cubin_check.find_tools(), library, "-sass", "-arch", arch)
    found, name = {}, None
    for line in text.splitlines():
        if match := re.match(r"\s*Function : (\S+)", line):
            name = next(
                (k for k in ("latency_dispatch", "latency_combine") if k in match[1] and "P2P" in match[1]), None
            )
        elif name and (instruction := sass_loops.instruction_of(line)):
            found.setdefault(name, []).append(instruction)
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("library", nargs="?", type=Path, default=cubin_check.ROOT / "hybrid_ep/libhybrid_ep_cuda.so")
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args()
    if not args.library.is_file():
        sys.exit(f"sass_lines: {args.library} is not there; scripts/build_cuda.py makes it")
    table = {}
    for arch in ARCHITECTURES:
        code = kernels(args.library, arch)
        table[arch] = issued(code.get("latency_dispatch", []), code.get("latency_combine", []))
    print(json.dumps(table, indent=1, sort_keys=True))
    if args.write:
        TABLE.write_text(json.dumps(table, indent=1, sort_keys=True) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
