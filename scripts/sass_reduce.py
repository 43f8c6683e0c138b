"""The loops in which reduce warps add rows (csrc/roles/reduce.h), as the machine code has them: what a warp issues
for a row and for a tile, how many clocks it needs with what it waits for, and how many bytes a second each allows.

A row is a stage of TILE elements, to which each of four warps, one a scheduler, issues the same instructions. Both
numbers are of the shortest way round: a stage that is there, lanes that are together, nobody to be told. Issue alone
bounds the speed from above; clocks (sass_clocks.py) add the latencies that one warp of a scheduler waits out, and are
what the performance model charges: the file TABLE holds them, and a library that differs from it is a complaint."""

import json
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import sass_clocks
import sass_loops

KERNELS = ("combine",)
# Loops over whole rows of a type, by whether rows are scaled: one role sums all.
LEAST_LOOPS = {"combine": {False: 1, True: 1}}
TABLE = Path(__file__).resolve().parent.parent / "hybrid_ep" / "perf" / "data" / "sum_loops.json"
MOST_SLOWER, MOST_FASTER = 0.05, 0.2  # than the table: a model that flatters is wrong sooner than one that is stale
TILE = 4096  # elements; kSumTileElems of csrc/layout/smem.h
CLOCK_GHZ = 1.755  # of an H100's SMs under load
ROWS = 8 * (1 - (7 / 8) ** 8)  # of a token's sum, with top-8 over 8 ranks at random: 5.25
# Instructions that a warp issues for a row: a tenth above what they were when the number was set. By the row's type and
# whether it is scaled; every lane has whole vec8s.
MOST_ISSUED = {
    ("bf16", False): 118,
    ("bf16", True): 145,
    ("fp16", False): 118,
    ("fp16", True): 145,
    ("fp32", False): 88,
    ("fp32", True): 115,
}
MOST_IN_PARTS = 32  # more where a lane has parts of vec8s or none
MOST_OF_A_TILE = 325  # for the last row of a tile, its rounding to bf16 and its store, and the first row of the next
MOST_CONSTANT_LOADS, MOST_FENCES = 2, 2
MOST_SHARED_LOADS = {"bf16": 6, "fp16": 6, "fp32": 10}  # four or eight of the row, two of its head
# Relocatable code, which NVSHMEM's library is linked to, loads two to four words more of shared memory for a row, and
# issues up to twenty more for a tile. Why is not known yet; no spill is among them.
MORE_SHARED_LOADS, MORE_OF_A_TILE = 4, 20
# On sm_90a it keeps four words of a loop in memory whose rows are no whole vec8s, since records come through shared
# memory; of loops over whole rows none.
KEPT_IN_PARTS = 4


@dataclass(frozen=True)
class RowLoop:
    """`tile`: instructions from a tile's last row to the next one's first, 0 where that way was not found. `clocks`,
    `tile_clocks`: of the same two ways, latencies included."""

    row: str
    scaled: bool
    whole: bool
    issued: int
    shared_loads: int
    constant_loads: int
    fences: int
    spills: int  # accesses of local memory
    tile: int
    clocks: float
    tile_clocks: float

    @property
    def title(self):
        return f"{self.row}{' scaled' * self.scaled}{'' if self.whole else ' in parts'}"

    @property
    def gigabytes_per_second(self):
        """That one SM could add if issuing were all: bytes of rows of ROWS to a sum."""
        return self._rate(self.issued, self.tile)

    @property
    def gigabytes_per_second_with_waits(self):
        return self._rate(self.clocks, self.tile_clocks)

    def _rate(self, row, tile):
        return ROWS * TILE * (4 if self.row == "fp32" else 2) / ((ROWS - 1) * row + tile) * CLOCK_GHZ

    def problems(self, relocatable):
        most = MOST_ISSUED[self.row, self.scaled] + (0 if self.whole else MOST_IN_PARTS)
        for what, number, ceiling in (
            ("instructions a row", self.issued, most),
            ("instructions a tile", self.tile, MOST_OF_A_TILE + MORE_OF_A_TILE * relocatable),
            ("shared loads a row", self.shared_loads, MOST_SHARED_LOADS[self.row] + MORE_SHARED_LOADS * relocatable),
            ("accesses of local memory a row", self.spills, KEPT_IN_PARTS * (relocatable and not self.whole)),
            ("constant loads a row", self.constant_loads, MOST_CONSTANT_LOADS),
            ("fences a row", self.fences, MOST_FENCES),
        ):
            if number > ceiling:
                yield f"loop over {self.title} rows: {number} {what}, at most {ceiling:.0f}"
        if not self.tile:
            yield f"loop over {self.title} rows: no way found from a tile's last row to the next tile"


def row_loops(instructions):
    """The RowLoops of a kernel of which sass_loops.instruction_of gave the instructions."""
    after = sass_loops.successors(instructions)
    rounding = set(sass_loops.runs(instructions, r"\bF2FP\.BF16", 4))
    stores = {i for i, (_, text) in enumerate(instructions) if "UBLKCP.G.S" in text}
    found = []
    for row in sass_loops.runs(instructions, r"\bFADD\b", 12):
        way = sass_loops.shortest_walk(after, row, row)
        if not way:
            continue
        texts = [instructions[i][1] for i in way]

        def count(pattern, texts=texts):
            return sum(bool(re.search(pattern, text)) for text in texts)

        tile = [instructions[i][1] for i in sass_loops.shortest_walk(after, row, row, (rounding, stores)) or ()]
        found.append(
            RowLoop(
                "fp16" if count("HADD2") else "bf16" if count("0xffff0000") else "fp32",
                count("FMUL") > 0,
                not count(r"^@!?P\d\s+LDS"),
                len(way),
                count(r"\bLDS"),
                count(r"\bU?LDC"),
                count(r"\bFENCE|\bMEMBAR"),
                count(r"\b(LDL|STL)\b"),
                len(tile),
                sass_clocks.loop_clocks(texts),
                sass_clocks.way_clocks(texts, tile) if tile else 0,
            )
        )
    return found


def problems(kernel_name, loops, relocatable=False):
    """What is wrong with a kernel's loops. A type whose loop is missing was not recognised, and is not bounded.
    relocatable: whether it was compiled to be linked to other device code."""
    if kernel_name in KERNELS:
        found = Counter((loop.row, loop.scaled) for loop in loops if loop.whole)
        for row in ("bf16", "fp16", "fp32"):
            for scaled, least in LEAST_LOOPS[kernel_name].items():
                if found[row, scaled] < least:
                    yield f"{found[row, scaled]} loops over {row + ' scaled' * scaled} rows found, at least {least}"
        for loop in loops:
            yield from loop.problems(relocatable)


def report(title, loops):
    """Lines of a table."""
    for loop in loops:
        yield (
            f"{title:<36} {loop.title:<20} {loop.issued:>7} {loop.shared_loads:>6} {loop.constant_loads:>9} "
            f"{loop.fences:>6} {loop.tile:>6} {loop.gigabytes_per_second:>6.0f} {loop.clocks:>6.0f} "
            f"{loop.tile_clocks:>6.0f} {loop.gigabytes_per_second_with_waits:>6.0f}"
        )


HEADER = (
    f"{'kernel':<36} {'rows':<20} {'issued':>7} {'shared':>6} {'constants':>9} {'fences':>6} {'a tile':>6} "
    f"{'GB/s':>6} {'clocks':>6} {'a tile':>6} {'GB/s':>6}"
)


def table(kernels):
    """What the performance model charges, of kernels over a mapped rail: clocks of whole rows by architecture, kernel
    and type; of loops of one type the slowest."""
    found = {}
    for kernel in kernels:
        for loop in kernel.row_loops if kernel.rail == "P2PDevice" else ():
            if not loop.whole:
                continue
            by_type = found.setdefault(kernel.arch, {}).setdefault(kernel.name, {})
            name = loop.row + " scaled" * loop.scaled
            new = {"row": loop.clocks, "tile": loop.tile_clocks, "row_issued": loop.issued, "tile_issued": loop.tile}
            by_type[name] = max(by_type.get(name, new), new, key=lambda costs: costs["row"])
    return found


def write_table(kernels):
    TABLE.write_text(json.dumps(table(kernels), indent=1, sort_keys=True) + "\n")


def table_problems(kernels):
    """Where the library's clocks are not those of the committed table."""
    committed = json.loads(TABLE.read_text())
    for arch, by_kernel in table(kernels).items():
        for name, by_type in by_kernel.items():
            known = committed.get(arch, {}).get(name, {})
            for row, costs in by_type.items():
                for part in ("row", "tile"):
                    was = known.get(row, {}).get(part, 0)
                    if not (1 - MOST_FASTER) * was <= costs[part] <= (1 + MOST_SLOWER) * was:
                        yield (
                            f"{name} {arch}: {costs[part]:.0f} clocks a {part} of {row}, {was:.0f} in {TABLE.name}, "
                            "which the performance model charges: --write-table, then correct the docs"
                        )
            for row in known.keys() - by_type.keys():
                yield f"{name} {arch}: no loop over {row} rows, of which {TABLE.name} has one"
