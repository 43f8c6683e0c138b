"""How the blocks of an operation's grid part into those that feed links and those that work locally beside them.

A link block of a dispatch loads a token once and stores it D_r + A times; of each received row a local one stores what
is left of k, at most the k of a row that landed aside. A link block of a combine loads the D_r partials of a token,
where local ones load its k rows and store D_r: k / D_r times as much, 1.5 for top-8 on 8 ranks. One lane of a local
block hands on every received row of a dispatch, its metadata at least, so that these need as many more: with 1.5 times
as many local blocks as link blocks in place of as many a dispatch takes 4 to 11 % less time in the event engine, and
with twice as many hardly less than that (docs/results/2026-11-23-lanes.md). A combine of 8 H100 with 16 blocks takes a
sixth less time with six that feed links than with eight (docs/results/2026-11-23-combine-one-grid.md)."""

from __future__ import annotations


def local_blocks(operation: str, num_blocks: int, most: int) -> int:
    """Blocks for local work of an operation ("dispatch" or "combine") beside num_blocks that feed links, of `most` SMs:
    half as many again, if there are. 0: link blocks do both."""
    return max(0, min(-(-3 * num_blocks // 2), most - num_blocks))


def parts(operation: str, blocks: int) -> tuple[int, int]:
    """(link blocks, local blocks) of so many in all, where nobody says how many feed links."""
    local = blocks // 2 if operation == "dispatch" else min(-(-3 * blocks // 5), blocks - 1)
    return blocks - local, local
