"""Clocks that one warp needs for a way through its machine code: in order, one instruction a clock, each when what it
reads is there.

Latencies are assumed: the order of what microbenchmarks of Hopper publish for the kind of instruction (arithmetic 4 to
6 clocks, shared memory about 30, a fence about 20, a load from global memory that hits the L2 about 270). A warp that
is alone on its scheduler waits them out; nothing else is charged, so that a measurement can only be slower: bank
conflicts, misses of the L2, other warps of the scheduler and instruction fetches are missing."""

import re
from functools import lru_cache
from typing import NamedTuple

GLOBAL_LOAD = r"LDG|LD\b|ATOM"
# Pattern of the opcode: clocks from its issue to the issue of what reads its result. First match.
LATENCIES = (
    (GLOBAL_LOAD, 270),
    (r"LDS|SYNCS\.(PHASECHK|EXCH|ARRIVE)", 30),
    (r"LDC|ULDC|S2R|S2UR|R2UR", 12),
    (r"SHFL|VOTE|MATCH|REDUX", 22),
    (r"MEMBAR|FENCE", 20),
    (r"F2F|MUFU|I2F|F2I", 16),
    (r"HADD2\.F32|F2FP|PRMT|BMOV", 6),
    (r"", 4),
)
TAKEN_BRANCH = 8  # clocks until the target's first instruction issues
ROUNDS = 6  # of a loop, of which the last two are timed: by then what was loaded before the first is forgotten

_REGISTER = re.compile(r"\b(U?R\d+|U?P\d)\b")
_NO_RESULT = re.compile(
    r"(ST|STS|STG|STL|RED|BRA|BSSY|BSYNC|EXIT|NOP|YIELD|MEMBAR|FENCE|WARPSYNC|UBLKCP|SYNCS\.ARRIVE|"
    r"BAR|CCTL|UTMACMDFLUSH|UTMACCTL|DEPBAR|ERRBAR)"
)


@lru_cache(maxsize=4096)
def latency(opcode):
    return next(clocks for pattern, clocks in LATENCIES if re.match(pattern, opcode))


def operands(text):
    """(opcode, registers written, registers read) of an instruction as cuobjdump prints it."""
    guard, opcode, rest = re.match(r"(@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)\s*(.*)", text).groups()
    parts = [part.strip() for part in rest.split(",")] if rest else []
    number = 0
    if not _NO_RESULT.match(opcode):
        # Predicates come first where an instruction sets two, as in "ISETP.NE P1, PT, R2, ...".
        sets_predicates = re.match(r"(U?ISETP|U?LOP3|FSETP|U?PLOP3|HSETP2)", opcode) and re.match(r"U?P", parts[0])
        number = 2 if sets_predicates else 1
    written = [name for part in parts[:number] for name in _REGISTER.findall(part)]
    wide = re.search(r"\.(64|128)\b", opcode)
    if wide and written and re.match(r"LD|ULDC", opcode):
        kind, first = re.match(r"(U?R)(\d+)", written[0]).groups()
        written = [f"{kind}{int(first) + i}" for i in range(int(wide[1]) // 32)]
    read = _REGISTER.findall(guard or "") + [name for part in parts[number:] for name in _registers_of(part, opcode)]
    return opcode, written, read


def _registers_of(part, opcode):
    """The registers that an operand names; a pair of 64 bits names its first."""
    names = _REGISTER.findall(part)
    if ".64" in opcode or ".64" in part:
        names += [f"{m[1]}{int(m[2]) + 1}" for name in names if (m := re.match(r"(U?R)(\d+)", name))]
    return names


def loop_clocks(texts, boards=()):
    """Clocks a round of a loop whose instructions these are, when it goes round and round. boards: of each instruction,
    if it is known, the scoreboard that its result is entered on, or None, and those that it waits for. Six of them
    serve all loads, so that who waits for an early load may wait for a later one as well."""
    issued = _issue_each(texts * ROUNDS, boards * ROUNDS)
    ends = issued[len(texts) - 1 :: len(texts)]
    return (ends[-1] - ends[-3]) / 2


def way_clocks(before, texts):
    """Clocks from the end of `before`, a loop that has gone round, to the end of `texts`, which follow it."""
    lead = before * (ROUNDS - 1)
    issued = _issue_each(lead + texts)
    return issued[-1] - issued[len(lead) - 1]


class _Issue(NamedTuple):
    """What an instruction does to the clocks of those behind it, by its text alone."""

    written: list[str]
    read: list[str]
    latency: int
    fence: bool
    synchronises: bool
    accesses: bool
    remembered: bool  # fences wait for it
    slow: bool  # a load from global memory
    jumps: bool

    @classmethod
    def of(cls, text):
        opcode, written, read = operands(text)
        return cls(
            written,
            read,
            latency(opcode),
            bool(re.match(r"MEMBAR|FENCE", opcode)),
            opcode.startswith("SYNCS"),
            bool(re.match(r"LD|ST|SYNCS|UBLKCP", opcode)),
            bool(re.match(r"LD|SYNCS", opcode)),
            bool(re.match(GLOBAL_LOAD, opcode)),
            opcode == "BRA" and not text.startswith("@"),
        )


_issue = lru_cache(maxsize=1 << 16)(_Issue.of)


def _issue_each(texts, boards=()):
    """The clock at which each instruction issues."""
    ready, shared, memory, fenced, clock, issued, board_done = {}, 0, 0, 0, -1, [], {}
    for text, (board, waits) in zip(texts, boards or [(None, ())] * len(texts), strict=True):
        one = _issue(text)
        clock += 1
        for name in one.read:
            if ready.get(name, 0) > clock:
                clock = ready[name]
        for name in waits:
            if board_done.get(name, 0) > clock:
                clock = board_done[name]
        if one.fence or one.synchronises:  # behind what was loaded before it; a barrier is not behind the L2
            clock = max(clock, memory if one.fence else shared)
        if one.accesses:
            clock = max(clock, fenced)
        done = clock + one.latency
        for name in one.written:
            ready[name] = done
        if board is not None:
            board_done[board] = max(board_done.get(board, 0), done)
        if one.fence:
            fenced = shared = memory = max(memory, done)
        elif one.remembered:
            memory = max(memory, done)
            shared = shared if one.slow else max(shared, done)
        issued.append(clock)
        if one.jumps:
            clock += TAKEN_BRANCH - 1
    return issued
