"""How the blocks of an operation's grid part into those that feed links and those that work locally beside them."""

from __future__ import annotations


def local_blocks(num_blocks: int, most: int) -> int:
    """Blocks for an operation's local work, beside num_blocks that feed links, of `most` SMs: as many again, if there
    are. A link block loads a token once and stores it D_r + A times; of each received row a local one stores what is
    left of k, at most the k of a row that landed aside. In the event engine more than as many again gain 2 to 7 %
    on H100, 14 % on GB200 (docs/results/2026-11-23-one-grid.md). 0: link blocks do both. Where nobody says how many
    feed links, half of what `sm_plan.plan` says do: its number is for both."""
    return max(0, min(num_blocks, most - num_blocks))
