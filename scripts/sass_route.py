"""The loops over tokens of the exchange kernel (csrc/roles/route.h, pair_lists.h, place.h), as the machine code has
them: loads that are under way together, divisions, and how many instructions a warp issues.

Instructions are those between the ends of a loop, a branch not taken included; what an inner loop repeats is counted
as often as it goes round. `exchange_us` puts them together to the time of an exchange, without its links' latency; it
assumes round trips to memory, so read it as +-30 %."""

import math
import re
from dataclasses import dataclass, field

import sass_clocks
import sass_loops

LEAST_AHEAD = 6  # loads that a walk, a sum over blocks or sources, or the list of a token has under way at once, of 8
LEAST_RUNS = 5  # of so many loads: choices of a token and their weights, a walk, blocks, sources of pairs and of rows
LONGEST_LOOP = 600  # longer ones are made by code that lies out of line
# A division by a number that the compiler does not know, in line, or the routine for 64 bits.
DIVISION = r"\bMUFU\.RCP|\bI2F|\bCALL\.REL(?!\.NOINC 0x\w+$)"
STORE = r"\bSTG|\bST\.E"
FLAG_LOADS = r"\bLDG\.\S*STRONG"  # of a wait that has nothing better to do
MOST_ISSUED = {"walk": 900, "list": 480, "record": 480}
SCHEDULERS, WARPS, LANES = 4, 16, 32
CLOCK_GHZ = 1.755
MEMORY, SHARED, SYSTEM_FENCE = 700, 34, 1750  # clocks: a trip to the L2 or memory under load, to shared memory, a fence
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


STEPS = 4  # RouteRole::kAhead


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


def exchange_us(route, num_ranks, num_nodes, tokens=4096, topk=8, num_experts=256, blocks=32):
    """{part: microseconds} of an exchange: what warps issue on the scheduler that they share, and wait for."""
    columns = num_ranks + num_nodes + num_experts
    of_block = math.ceil(tokens / blocks)
    busy = min(WARPS, math.ceil(of_block / LANES))  # warps whose lanes have a token each
    rounds = math.ceil(of_block / (WARPS * LANES))
    step_tokens = max(1, LANES // topk)
    walks = math.ceil(math.ceil(of_block / WARPS) / (STEPS * step_tokens))
    passes = math.ceil(columns / (WARPS * LANES))

    def shared(issued, warps):
        return issued * math.ceil(warps / SCHEDULERS)

    lane_stores = tokens / blocks * (2 * topk + num_nodes)  # of lists: 32 lines an instruction
    per_token = min(topk, num_nodes)
    record_words = 2 + min(topk, num_ranks // num_nodes) + topk
    clocks = {
        "lists": rounds * (2 * MEMORY + shared(1.3 * route.list, busy)) + lane_stores,
        "walk": walks * (MEMORY + max(shared(route.walk, WARPS), STEPS * step_tokens * 2 * SHARED)),
        "columns of the block": passes * (WARPS * SHARED + MEMORY),
        "meeting": SYSTEM_FENCE + 3 * MEMORY,
        "blocks before": passes * (math.ceil(blocks / 8) * MEMORY + WARPS * SHARED),
        "exchange": (2 * SYSTEM_FENCE + 4 * MEMORY) * (2 if num_nodes > 1 else 1)
        + columns / 4 / LANES * (num_ranks // num_nodes) * 12 * math.ceil(num_nodes / WARPS)
        + (columns / 4 / 8 * MEMORY if num_nodes > 1 else 0),  # a lone lane's put
        "all counts": SYSTEM_FENCE + 2 * MEMORY + num_ranks * 16 / (WARPS * LANES) * MEMORY,
        "rows": passes * math.ceil(num_ranks / 8) * MEMORY + num_experts // num_ranks * 3 * SHARED + 2 * MEMORY,
        "records": rounds * (3 * MEMORY + max(shared(topk * route.record, busy), 0))
        + tokens / blocks * per_token * record_words,
        "leaving": 2 * MEMORY + SYSTEM_FENCE,
    }
    return {part: number / CLOCK_GHZ / 1e3 for part, number in clocks.items()}


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
            total = sum(exchange_us(route, ranks, nodes).values())
            if total > most:
                yield f"route: an exchange of {ranks} ranks would take {total:.0f} us, at most {most}"


def report(title, route):
    """Lines of a table."""
    yield (
        f"{title}: {route.runs} places with {LEAST_AHEAD} loads under way; a warp issues {route.walk} for a walk's "
        f"{STEPS} steps, {route.list} for lists, {route.record} for a pair of the records"
    )
    for ranks, nodes in MOST_US:
        parts = exchange_us(route, ranks, nodes)
        yield f"  {ranks} ranks: {sum(parts.values()):.1f} us; " + ", ".join(f"{p} {us:.1f}" for p, us in parts.items())
