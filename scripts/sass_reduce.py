"""The loops in which reduce warps add rows (csrc/roles/reduce.h), as the machine code has them: what a warp issues
for a row and for a tile, and how many bytes a second that allows.

A row is a stage of 2048 elements, to which each of four warps, one a scheduler, issues the same instructions. Counts
are of the shortest way round: a stage that is there, lanes that are together, nobody to be told. They bound the speed
from above; what a warp waits for (shared memory, the fence) comes on top."""

import re
from dataclasses import dataclass

import sass_loops

KERNELS = ("unpermute", "combine")
CLOCK_GHZ = 1.755  # of an H100's SMs under load
ROWS = 8 * (1 - (7 / 8) ** 8)  # of a token's sum, with top-8 over 8 ranks at random: 5.25
# Instructions that a warp issues for a row: a tenth above what they were when the number was set. By the row's type and
# whether it is scaled; every lane has whole octets.
MOST_ISSUED = {("bf16", False): 75, ("bf16", True): 89, ("fp16", False): 75, ("fp16", True): 89, ("fp32", False): 61,
               ("fp32", True): 74}
MOST_IN_PARTS = 18  # more where a lane has parts of octets or none
MOST_OF_A_TILE = 215  # for the last row of a tile, its rounding to bf16 and its store, and the first row of the next
MOST_CONSTANT_LOADS, MOST_SHARED_LOADS, MOST_FENCES = 2, 6, 2
# Relocatable code, which NVSHMEM's library is linked to, loads two to four words more of shared memory for a row, and
# issues three more for a tile. Why is not known yet; no spill is among them.
MORE_SHARED_LOADS, MORE_OF_A_TILE = 4, 5


@dataclass(frozen=True)
class RowLoop:
    """`tile`: instructions from a tile's last row to the next one's first, 0 where that way was not found."""

    row: str
    scaled: bool
    whole: bool
    issued: int
    shared_loads: int
    constant_loads: int
    fences: int
    spills: int  # accesses of local memory
    tile: int

    @property
    def title(self):
        return f"{self.row}{' scaled' * self.scaled}{'' if self.whole else ' in parts'}"

    @property
    def gigabytes_per_second(self):
        """That one SM could add if issuing were all: bytes of rows of ROWS to a sum."""
        size = 4 if self.row == "fp32" else 2
        return ROWS * 2048 * size / ((ROWS - 1) * self.issued + self.tile) * CLOCK_GHZ

    def problems(self, relocatable):
        most = MOST_ISSUED[self.row, self.scaled] + (0 if self.whole else MOST_IN_PARTS)
        for what, number, ceiling in (
                ("instructions a row", self.issued, most),
                ("instructions a tile", self.tile, MOST_OF_A_TILE + MORE_OF_A_TILE * relocatable),
                ("shared loads a row", self.shared_loads, MOST_SHARED_LOADS + MORE_SHARED_LOADS * relocatable),
                ("accesses of local memory a row", self.spills, 0),
                ("constant loads a row", self.constant_loads, MOST_CONSTANT_LOADS),
                ("fences a row", self.fences, MOST_FENCES)):
            if number > ceiling:
                yield f"loop over {self.title} rows: {number} {what}, at most {ceiling}"
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

        found.append(RowLoop(
            "fp16" if count("HADD2") else "bf16" if count("0xffff0000") else "fp32", count("FMUL") > 0,
            not count(r"^@!?P\d\s+LDS"), len(way), count(r"\bLDS"), count(r"\bU?LDC"), count(r"\bFENCE|\bMEMBAR"),
            count(r"\b(LDL|STL)\b"),
            len(sass_loops.shortest_walk(after, row, row, (rounding, stores)) or ())))
    return found


def problems(kernel_name, loops, relocatable=False):
    """What is wrong with a kernel's loops. A type whose loop is missing was not recognised, and is not bounded.
    relocatable: whether it was compiled to be linked to other device code."""
    if kernel_name in KERNELS:
        missing = {"bf16", "fp16", "fp32"} - {loop.row for loop in loops if loop.whole}
        if missing:
            yield f"no loop over rows of {', '.join(sorted(missing))} found"
        for loop in loops:
            yield from loop.problems(relocatable)


def report(title, loops):
    """Lines of a table."""
    for loop in loops:
        yield (f"{title:<36} {loop.title:<20} {loop.issued:>7} {loop.shared_loads:>6} {loop.constant_loads:>9} "
               f"{loop.fences:>6} {loop.tile:>6} {loop.gigabytes_per_second:>6.0f}")


HEADER = (f"{'kernel':<36} {'rows':<20} {'issued':>7} {'shared':>6} {'constants':>9} {'fences':>6} {'a tile':>6} "
          f"{'GB/s':>6}")
