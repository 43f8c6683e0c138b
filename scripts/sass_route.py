"""The loops over tokens of the exchange kernel (csrc/roles/route.h, pair_lists.h, place.h), as the machine code has
them: loads that are under way together, divisions, and how many instructions a warp issues.

Instructions are those between the ends of a loop, a branch not taken included; what an inner loop repeats is counted
as often as it goes round. `exchange_parts` puts them together to the time of an exchange, without its links' latency;
it assumes round trips to memory, so read it as +-30 %. What the performance model charges is in TABLE."""

import json
import re
from dataclasses import dataclass, field
from pathlib import Path

import sass_clocks
import sass_loops

from hybrid_ep.perf import route_time
from hybrid_ep.perf.route_time import LANES, STEPS
from hybrid_ep.perf.shape import Shape

LEAST_AHEAD = 6  # loads that a walk, a sum over blocks or sources, or the list of a token has under way at once, of 8
LEAST_RUNS = 5  # of so many loads: choices of a token and their weights, a walk, blocks, sources of pairs and of rows
LONGEST_LOOP = 600  # longer ones are made by code that lies out of line
# A division by a number that the compiler does not know, in line, or the routine for 64 bits.
DIVISION = r"\bMUFU\.RCP|\bI2F|\bCALL\.REL(?!\.NOINC 0x\w+$)"
STORE = r"\bSTG|\bST\.E"
FLAG_LOADS = r"\bLDG\.\S*STRONG"  # of a wait that has nothing better to do
MOST_ISSUED = {"walk": 900, "list": 480, "record": 480}
CLOCK_GHZ = 1.755
TABLE = Path(route_time.__file__).parent / "data" / "route_loops.json"
MOST_SLOWER, MOST_FASTER = 0.05, 0.2  # than the table
MOST_US = {(8, 1): 40, (64, 8): 60}  # (ranks, nodes): of 4096 tokens, top-8 of 256 experts, with 32 blocks


@dataclass(frozen=True)
class RouteLoops:
    """Of one exchange kernel. walk: instructions a warp issues for STEPS steps of it; list: for the lists of its
    lanes' tokens; record: for a pair of a token's records. 0: not found."""

    runs: int = 0
    divisions: tuple = field(default_factory=tuple)
    walk: int = 0
    list: int = 0
    record: int = 0


def of(instructions):
    """The RouteLoops of a kernel of which sass_loops.instruction_of gave the instructions."""
    loops = sass_loops.loops(instructions)
    runs = loads_under_way(instructions)

    def count(loop, pattern):
        return sum(bool(re.search(pattern, text)) for _, text in instructions[loop[0] : loop[1] + 1])

    def length(loop):
        return loop[1] - loop[0] + 1

    short = [loop for loop in loops if length(loop) <= LONGEST_LOOP]
    divisions = tuple(
        f"{length(loop)} instructions, {instructions[loop[0]][0]:#x}"
        for loop in short
        # What jumps back in any case is code out of line, mostly.
        if instructions[loop[1]][1].startswith("@") and count(loop, DIVISION) and not count(loop, FLAG_LOADS)
    )
    turns = [loop for loop in short if (count(loop, r"\bLDS"), count(loop, r"\bSTS")) == (3, 3)]
    walk = next((w for w in short if sum(w[0] <= t[0] and t[1] <= w[1] for t in turns) >= STEPS), None)
    inner = sum(length(t) for t in turns if walk and walk[0] <= t[0] and t[1] <= walk[1])
    record = next(
        (r for r in short if count(r, r"\bLDS") >= 5 and count(r, r"\bLDG") >= 3 and count(r, STORE) > 9), None
    )
    return RouteLoops(
        sum(loads >= LEAST_AHEAD for _, loads in runs),
        divisions,
        length(walk) + (LANES // 8 - 1) * inner if walk else 0,
        _list_length(instructions),
        length(record) if record else 0,
    )


def loads_under_way(instructions):
    """[(index of the first, how many)] of loads that are made one after another, without a branch or a use of any of
    them in between."""
    targets = {int(m[1], 16) for _, text in instructions if (m := sass_loops.BRANCH.search(text))}
    found, first, waiting, loads = [], 0, set(), 0
    for i, (address, text) in enumerate([*instructions, (None, "EXIT")]):
        opcode, written, read = sass_clocks.operands(text)
        branch = re.match(r"BRA|EXIT|RET|BRX|CALL", opcode) and opcode != "BRA.DIV"
        if loads and (branch or address in targets or waiting.intersection(read)):
            found.append((first, loads))
            waiting, loads = set(), 0
        if opcode.startswith("LDG") and "STRONG" not in opcode:
            first = i if not loads else first
            waiting.update(written)
            loads += 1
    return found


def _list_length(instructions):
    """From the loads of a token's choices to where they are sorted: nothing else selects floats."""
    selects = [i for i, (_, text) in enumerate(instructions) if re.search(r"\bFSEL\b", text)]
    loads = [first for first, n in loads_under_way(instructions) if n >= LEAST_AHEAD and selects and first < selects[0]]
    return selects[-1] - loads[-1] if loads else 0


def exchange_parts(route, num_ranks, num_nodes):
    """{part: microseconds} of an exchange of 4096 tokens, top-8 of 256 experts (hybrid_ep/perf/route_time.py)."""
    shape = Shape(num_ranks, num_ranks // num_nodes, 4096, 8, 8, 256)
    return route_time.parts_us(shape, route_time.Issued(route.walk, route.list, route.record), CLOCK_GHZ)


def problems(route):
    """What is wrong with the RouteLoops of an exchange kernel."""
    if route.runs < LEAST_RUNS:
        yield (
            f"{route.runs} places have {LEAST_AHEAD} loads under way before one is used, at least {LEAST_RUNS}: "
            "a branch between loads makes them wait for one another"
        )
    for where in route.divisions:
        yield f"a division in a loop ({where}); take a Reciprocal"
    for what, most in MOST_ISSUED.items():
        number = getattr(route, what)
        if not number:
            yield f"route: no {what} found"
        elif number > most:
            yield f"route: {number} instructions a {what}, at most {most}"
    if route.walk and route.list and route.record:
        for (ranks, nodes), most in MOST_US.items():
            total = sum(exchange_parts(route, ranks, nodes).values())
            if total > most:
                yield f"route: an exchange of {ranks} ranks would take {total:.0f} us, at most {most}"


def table(kernels):
    """{arch: what a warp issues} of the kernels with loops over tokens, over a rail whose memory is mapped."""
    return {k.arch: {what: getattr(k.route, what) for what in MOST_ISSUED} for k in kernels if k.route}


def write_table(kernels):
    TABLE.write_text(json.dumps(table(kernels), indent=1, sort_keys=True) + "\n")


def table_problems(kernels):
    """Where the library's loops are not those of the committed table."""
    committed = json.loads(TABLE.read_text())
    for arch, loops in table(kernels).items():
        for what, issued in loops.items():
            was = committed.get(arch, {}).get(what, 0)
            if not (1 - MOST_FASTER) * was <= issued <= (1 + MOST_SLOWER) * was:
                yield (
                    f"exchange {arch}: {issued} instructions a {what}, {was} in {TABLE.name}, which the performance "
                    "model charges: --write-table, then correct the docs"
                )


def report(title, route):
    """Lines of a table."""
    yield (
        f"{title}: {route.runs} places with {LEAST_AHEAD} loads under way; a warp issues {route.walk} for a walk's "
        f"{STEPS} steps, {route.list} for lists, {route.record} for a pair of the records"
    )
    for ranks, nodes in MOST_US:
        parts = exchange_parts(route, ranks, nodes)
        yield f"  {ranks} ranks: {sum(parts.values()):.1f} us; " + ", ".join(f"{p} {us:.1f}" for p, us in parts.items())
