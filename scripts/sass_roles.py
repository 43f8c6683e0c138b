"""Ways round the loops of the copy roles (csrc/roles: G2S, S2G and N2N of dispatch, deliver's two, the feeds of
combine's sums), as the machine code of a mapped rail has them: what the one lane of such a role issues for a token, a
destination or a row, and how many clocks it takes.

A way is the fewest instructions that lead from an anchor round to it again, past other anchors in their order: a stage
that is free or there, a flag that has been seen, a token of one destination and one row. Anchors are instructions that
the compiler says belong to a function or a line of the sources (nvdisasm -gi prints, for each instruction, its line and
those it was inlined at). Lines are found by their text when this runs, so that they may move; a text or a function that
is no longer there, and a way that is not found, are complaints.

Clocks are those of sass_clocks.py: a load from global memory is assumed to take 270, an L2 hit, and is waited for where
its result is used, or where an instruction waits for the scoreboard that it shares with another load. The file TABLE
holds them for the performance model (hybrid_ep/perf/copy_loops.py); a library that differs from it is a complaint."""

import json
import re
import shutil
import subprocess
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

import sass_clocks
import sass_loops
from sass_reduce import MOST_FASTER, MOST_SLOWER

ROOT = Path(__file__).resolve().parent.parent
CSRC = ROOT / "csrc"
TABLE = ROOT / "hybrid_ep" / "perf" / "data" / "copy_loops.json"
RAIL = "P2PDevice"  # the other mapped one serves virtual ranks
LOAD, STORE, COMMIT = r"UBLKCP\.S\.G", r"UBLKCP\.G\.S", r"UTMACMDFLUSH"  # bulk copies into and out of shared memory
GLOBAL_LOAD, SHARED_LOAD, CONSTANT_LOAD = r"(LDG|LD|ATOMG?)\b", r"LDS\b", r"U?LDCU?\b"
SHARED_STORE, ARRIVAL = r"STS\b", r"SYNCS\.ARRIVE"
READ = f"({GLOBAL_LOAD}|{SHARED_LOAD})"  # of a record, wherever it lies
FENCE = r"(MEMBAR|FENCE)\b"

# Instructions that a way issues: a tenth above the longer of both architectures' when the number was set.
MOST_ISSUED = {
    "s2g": {"token": 138, "received": 56, "destination": 79, "pair": 36},
    "g2s": {"token": 128, "rail_token": 105},
    "n2n": {"token": 173},
    "deliver_g2s": {"row": 115, "looked_up_row": 122, "bare_row": 60},
    "deliver_s2g": {"row": 64, "permuted_row": 108},
    "final_sum_g2s": {"row": 66, "destination": 48, "pair": 15, "token": 236},
    "node_sum_g2s": {"row": 69, "destination": 79, "pair": 15, "token": 240},
    "unpermute_g2s": {"row": 93, "pair": 36, "partial": 230},
}


class Place(NamedTuple):
    """Lines of a file under csrc: all of them, a function's, or the one in that function with this text. function: a
    pattern of its name."""

    path: str
    function: str = ""
    text: str = ""

    def __str__(self):
        return f"{self.path}{', ' * bool(self.function)}{self.function}{f', `{self.text}`' * bool(self.text)}"


class Anchor(NamedTuple):
    """Instructions of which the opcode matches and that each of the places has a part in."""

    opcode: str
    places: tuple[Place, ...]


class Way(NamedTuple):
    """Round from one of `start` to it again, past one of each of `past`."""

    start: Anchor
    past: tuple[Anchor, ...] = ()


def at(opcode, *places):
    return Anchor(opcode, tuple(Place(*p) if isinstance(p, tuple) else Place(p) for p in places))


def _ways_of_dispatch():
    g2s, s2g, n2n, loader = "roles/g2s.h", "roles/s2g.h", "roles/n2n.h", "roles/token_loader.h"
    deliver, delivered = "roles/deliver_g2s.h", "roles/deliver_s2g.h"
    payload, own, released = (
        (loader, "load_tile", "src.payload"),
        (loader, "next"),
        ("pipeline/stage_fifo.h", "release"),
    )
    metadata = at(STORE, (s2g, "scatter", "metadata_bytes()"))
    row, row_of_pair = at(STORE, (s2g, "store")), at(STORE, (s2g, "store"), (s2g, "store_pairs"))
    copied, next_row = at(LOAD, (deliver, "deliver"), payload), at("", (deliver, "deliver", "head.index = "))
    stored = at(STORE, (delivered, "store"))
    return {
        "s2g": {
            "token": Way(at(COMMIT, (s2g, "scatter")), (at(ARRIVAL, (s2g, "copy"), released), metadata, row)),
            "received": Way(metadata, (row,)),
            "destination": Way(metadata, (row_of_pair,)),
            "pair": Way(row_of_pair),
        },
        "g2s": {
            "token": Way(at(LOAD, g2s, payload), (at(GLOBAL_LOAD, g2s, own),)),
            "rail_token": Way(at(LOAD, g2s, payload), (at("", (g2s, "serve", "TokenSource::contiguous")),)),
        },
        "n2n": {
            "token": Way(
                at(COMMIT, (n2n, "store_tile")),
                (
                    at(ARRIVAL, (n2n, "store_tile"), released),
                    at(GLOBAL_LOAD, n2n, own),
                    at(LOAD, n2n, payload),
                    at(STORE, (n2n, "store_tile", "payload_at() + t.bytes")),
                ),
            )
        },
        "deliver_g2s": {
            "row": Way(copied, (next_row,)),
            "looked_up_row": Way(copied, (next_row, at(SHARED_LOAD, (deliver, "row_to_copy")))),
            "bare_row": Way(at(LOAD, (deliver, "deliver"), (loader, "load_metadata"))),
        },
        "deliver_s2g": {
            "row": Way(at(COMMIT, (delivered, "run")), (stored,)),
            "permuted_row": Way(at(COMMIT, (delivered, "run")), (at(SHARED_LOAD, (delivered, "permute")), stored)),
        },
    }


def _ways_of_combine():
    feed, node_rows, unpermute = "roles/sum_feed.h", "roles/node_rows.h", "roles/unpermute.h"

    def steps(role):
        return (
            at(SHARED_STORE, (feed, "add"), role),
            at(SHARED_LOAD, (feed, "row"), role),
            at(LOAD, (feed, "stage"), role),
        )

    def of_sums(role):
        added, listed, staged = steps(role)
        destination = at(READ, (node_rows, "add_to", "dst = "), role)
        return {
            "row": Way(staged, (listed,)),
            "destination": Way(destination, (added,)),
            "pair": Way(at(READ, (node_rows, "each_pair"), role)),
            "token": Way(destination, (added, listed, staged)),
        }

    added, listed, staged = steps((unpermute,))
    pair = at(READ, (unpermute, "add_pairs", "pairs + k"))
    return {
        "final_sum_g2s": of_sums(("roles/final_sum.h", "token")),
        "node_sum_g2s": of_sums(("roles/node_sum.h", "sum_chunk")),
        "unpermute_g2s": {
            "row": Way(staged, (listed,)),
            "pair": Way(pair, (added,)),
            "partial": Way(pair, (added, listed, staged)),
        },
    }


WAYS = {"dispatch": _ways_of_dispatch(), "combine": _ways_of_combine()}


@dataclass(frozen=True)
class Cost:
    """Of one way: instructions that it issues, how many of them load from where, and clocks, latencies included."""

    issued: int
    clocks: float
    global_loads: int
    shared_loads: int
    constant_loads: int
    fences: int


@dataclass(frozen=True)
class Code:
    """instructions: [(address, text)], branches by address. lines: of each, the {(path under csrc, line)} that it comes
    from and was inlined at. boards: of each, the scoreboard that its result is entered on, or None, and those that it
    waits for."""

    instructions: list
    lines: list
    boards: list


def parse(text_lines):
    """{mangled name: Code} of what nvdisasm -gi -c -hex prints, by line."""
    found, code, labels, names, chain, chain_over = {}, None, {}, [], set(), False
    for line in text_lines:
        if match := re.match(r"//-+ \.text\.(\S+)", line):
            code, labels, names, chain = Code([], [], []), {}, [], set()
            found[match[1]] = code, labels
        elif code is None:
            continue
        elif match := re.match(r'\s*//## File "([^"]+)", line (\d+)', line):
            chain = set() if chain_over else chain
            chain_over = False
            chain.add((match[1].rsplit("/csrc/", 1)[-1], int(match[2])))
        elif match := re.match(r"(\.L_\w+):", line):
            names.append(match[1])
        elif instruction := sass_loops.instruction_of(line):
            labels.update(dict.fromkeys(names, instruction[0]))
            names, chain_over = [], True
            code.instructions.append(instruction)
            code.lines.append(chain)
            code.boards.append((None, ()))
        elif code.boards and (match := re.match(r"\s+/\* 0x([0-9a-f]{16}) \*/$", line.rstrip())):
            code.boards[-1] = _boards(int(match[1], 16))
    for code, labels in found.values():
        for i, (address, text) in enumerate(code.instructions):
            if (match := re.search(r"`\((\.L_\w+)\)", text)) and match[1] in labels:
                code.instructions[i] = (address, text.replace(match[0], hex(labels[match[1]])))
    return {name: code for name, (code, _) in found.items()}


def _boards(word):
    """(scoreboard of the result, scoreboards waited for) of the upper half of an instruction's encoding."""
    board, waits = word >> 46 & 7, word >> 52 & 63
    return None if board == 7 else board, tuple(b for b in range(6) if waits >> b & 1)


class Sources:
    """Where functions and texts are in the files of a folder such as csrc."""

    def __init__(self, folder=CSRC):
        self.folder, self._files = Path(folder), {}

    def lines(self, place):
        """The {(path, line)} of a Place. ValueError if there is no such file, or not one such function or line."""
        text = self._text(place.path)
        first, end = self._function(place) if place.function else (1, len(text) + 1)
        if not place.text:
            return {(place.path, n) for n in range(first, end)}
        hits = [n for n in range(first, end) if place.text in text[n - 1]]
        if len(hits) != 1:
            raise ValueError(f"{len(hits)} lines with the text of {place}; name one that is there in sass_roles.WAYS")
        return {(place.path, hits[0])}

    def _text(self, path):
        if path not in self._files:
            if not (self.folder / path).is_file():
                raise ValueError(f"no file {path} under {self.folder}; name one that is there in sass_roles.WAYS")
            self._files[path] = (self.folder / path).read_text().splitlines()
        return self._files[path]

    def _function(self, place):
        """Its first line, and the one behind its last."""
        text = self._text(place.path)
        heads = [n for n, line in enumerate(text) if re.search(rf"HEP_\w*DEVICE\b.*\b({place.function})\(", line)]
        if len(heads) != 1:
            raise ValueError(f"{len(heads)} functions {place}; name one that is there in sass_roles.WAYS")
        depth = 0
        for n in range(heads[0], len(text)):
            depth += text[n].count("{") - text[n].count("}")
            if depth == 0 and "}" in text[n]:
                return heads[0] + 1, n + 2
        raise ValueError(f"the function {place} has no end; each of its braces must be closed")


def _find(code, anchor, sources):
    """Indices of the instructions of an Anchor."""
    places = [sources.lines(place) for place in anchor.places]
    opcode = re.compile(r"(@!?U?P\w+\s+)?" + anchor.opcode)
    return {
        i
        for i, (_, text) in enumerate(code.instructions)
        if opcode.match(text) and all(not lines.isdisjoint(code.lines[i]) for lines in places)
    }


def walk(code, way, sources):
    """Indices of the instructions of a Way, the fewest that there are. ValueError if there is none."""
    start, *past = (_find(code, anchor, sources) for anchor in (way.start, *way.past))
    for anchor, found in zip((way.start, *way.past), (start, *past), strict=True):
        if not found:
            where = " and ".join(map(str, anchor.places))
            raise ValueError(
                f"no instruction {anchor.opcode or 'at all'} of {where}; "
                "is the library of these sources, with -lineinfo?"
            )
    after = sass_loops.successors(code.instructions)
    # Past another start it would be a second round, of another way.
    walks = [w for i in sorted(start) if (w := sass_loops.shortest_walk(after, i, i, tuple(past), start))]
    if not walks:
        raise ValueError("no way round; name anchors that one loop passes in sass_roles.WAYS")
    return min(walks, key=len)


def cost(code, way):
    """The Cost of a way whose instructions have these indices."""
    texts = [code.instructions[i][1] for i in way]

    def count(pattern):
        return sum(bool(re.match(r"(@!?U?P\w+\s+)?" + pattern, text)) for text in texts)

    return Cost(
        len(texts),
        sass_clocks.loop_clocks(texts, [code.boards[i] for i in way]),
        count(GLOBAL_LOAD),
        count(SHARED_LOAD),
        count(CONSTANT_LOAD),
        count(FENCE),
    )


def costs(code, kernel, sources):
    """({role: {way: Cost}} of a kernel, what is wrong with it)."""
    found, complaints = {}, []
    for role, ways in WAYS[kernel].items():
        for name, way in ways.items():
            try:
                found.setdefault(role, {})[name] = cost(code, walk(code, way, sources))
            except ValueError as e:
                complaints.append(f"{role}, a {name}: {e}")
    return found, complaints


def of_library(tools, library, architectures):
    """({arch: {role: {way: Cost}}}, complaints) of a library over a mapped rail; `tools` holds nvdisasm."""
    found, complaints = {}, []
    sources = Sources()
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(
            [str(tools / "cuobjdump"), "-xelf", "all", str(Path(library).resolve())],
            cwd=folder,
            stdout=subprocess.DEVNULL,
            check=True,
        )
        for arch in architectures:
            of_arch = found.setdefault(arch, {})
            codes = {}
            for cubin in sorted(Path(folder).glob(f"*.{arch}.cubin")):
                codes.update(_disassemble(tools, cubin))
            for kernel in WAYS:
                if kernel not in codes:
                    complaints.append(f"{kernel} {arch}: {kernel}_entry<{RAIL}> is not in {library}")
                    continue
                roles, wrong = costs(codes[kernel], kernel, sources)
                of_arch.update(roles)
                complaints += [f"{kernel} {arch}: {complaint}" for complaint in wrong]
    return found, complaints


def _disassemble(tools, cubin):
    """{kernel: Code} of those of WAYS that a cubin has. A function at a time: all would be ten times the text."""
    entry = re.compile(rf"\s*(\d+):.* FUNC .* (_ZN3hep\d+({'|'.join(WAYS)})_entryINS_{len(RAIL)}{RAIL}\S*)$")
    symbols = subprocess.run([_readelf(), "-sW", str(cubin)], capture_output=True, text=True, check=True).stdout
    kernels = {m[2]: (m[3], m[1]) for line in symbols.splitlines() if (m := entry.match(line))}
    if not kernels:
        return {}
    options = ["-gi", "-c", "-hex", "-fun", ",".join(index for _, index in kernels.values())]
    with subprocess.Popen(
        [str(tools / "nvdisasm"), *options, str(cubin)], stdout=subprocess.PIPE, text=True
    ) as process:
        codes = parse(process.stdout)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, process.args)
    return {kernels[name][0]: code for name, code in codes.items() if name in kernels}


def _readelf():
    readelf = shutil.which("readelf")
    if not readelf:
        raise FileNotFoundError("cubin_check: needs readelf; binutils carries it, beside the linker")
    return readelf


def problems(found):
    """Where ways of {arch: {role: {way: Cost}}} issue more than their ceilings."""
    for arch, roles in found.items():
        for role, ways in roles.items():
            for name, way in ways.items():
                if way.issued > MOST_ISSUED[role][name]:
                    yield f"{role} {arch}: {way.issued} instructions a {name}, at most {MOST_ISSUED[role][name]}"


def table(found):
    return {
        arch: {role: {name: asdict(way) for name, way in ways.items()} for role, ways in roles.items()}
        for arch, roles in found.items()
    }


def of_kernel(found, kernel):
    """Of the table, the roles of a cubin_check.Kernel."""
    roles = table(found).get(kernel.arch, {}) if kernel.rail == RAIL else {}
    return {role: roles[role] for role in WAYS.get(kernel.name, {}) if role in roles}


def write_table(found):
    """What the performance model reads. An architecture that the library does not have keeps what it had."""
    before = json.loads(TABLE.read_text()) if TABLE.is_file() else {}
    TABLE.write_text(json.dumps({**before, **table(found)}, indent=1, sort_keys=True) + "\n")


def table_problems(found):
    """Where the library's clocks are not those of the committed table."""
    committed = json.loads(TABLE.read_text())
    for arch, roles in found.items():
        for role, ways in roles.items():
            for name, way in ways.items():
                was = committed.get(arch, {}).get(role, {}).get(name, {}).get("clocks", 0)
                if not (1 - MOST_FASTER) * was <= way.clocks <= (1 + MOST_SLOWER) * was:
                    yield (
                        f"{role} {arch}: {way.clocks:.0f} clocks a {name}, {was:.0f} in {TABLE.name}, which the "
                        "performance model reads: --write-table, then correct the docs"
                    )
        for role, ways in committed.get(arch, {}).items():
            for name in ways.keys() - roles.get(role, {}).keys():
                yield f"{role} {arch}: no way round a {name}, of which {TABLE.name} has one"


HEADER = (
    f"{'copy role':<36} {'way':<20} {'issued':>7} {'global':>6} {'shared':>6} {'constants':>9} {'fences':>6} "
    f"{'clocks':>6}"
)


def report(found):
    """Lines of a table."""
    for arch, roles in found.items():
        for role, ways in roles.items():
            for name, way in ways.items():
                yield (
                    f"{f'{role} {arch}':<36} {name:<20} {way.issued:>7} {way.global_loads:>6} {way.shared_loads:>6} "
                    f"{way.constant_loads:>9} {way.fences:>6} {way.clocks:>6.0f}"
                )
