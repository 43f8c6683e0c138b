"""How the blocks of an operation's grid part into those that feed links and those that work locally beside them.

A link block of a dispatch loads a token once and stores it D_r + A times; of each received row a local one stores what
is left of k, at most the k of a row that landed aside. A link block of a combine loads the D_r partials of a token,
where local ones load its k rows and store D_r: k / D_r times as much, 1.5 for top-8 on 8 ranks. One lane of a local
block hands on every received row of a dispatch, its metadata at least: with 1.5 times as many local blocks as link
blocks in place of as many a dispatch takes 1 to 9 % less time in the event engine, and a combine that forms partials up
to a fourth less. 16 blocks in all: a dispatch of 8 H100 takes 799 us with 9 that feed links and 872 with 8, one of 32
H100 1118 and 1053; a combine that forms partials 991 with 7 and 1061 with 6 (docs/results/2026-11-24-lanes.md)."""

from __future__ import annotations


def local_blocks(operation: str, num_blocks: int, most: int) -> int:
    """Blocks for local work of an operation ("dispatch" or "combine") beside num_blocks that feed links, of `most` SMs:
    half as many again, if there are. 0: link blocks do both."""
    return max(0, min(-(-3 * num_blocks // 2), most - num_blocks))


def parts(operation: str, blocks: int) -> tuple[int, int]:
    """(link blocks, local blocks) of so many in all, where nobody says how many feed links."""
    local = blocks // 2 if operation == "dispatch" else min(-(-9 * blocks // 16), blocks - 1)
    return blocks - local, local
