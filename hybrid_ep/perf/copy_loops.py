"""What this library's compiled code takes to hand a token, a destination or a row on, in clocks of an SM.

One lane of a warp does that in each copy role (csrc/roles). From the machine code of the roles' loops, latencies
included, by `scripts/cubin_check.py --write-table`, which complains when a library that is built needs more; a load
from global memory is assumed to hit the L2, in 270 clocks. Nobody has measured it on a GPU.

| role | ways |
|---|---|
| s2g | token (with one destination, to its receive row), received (one more such), destination (one that lands), pair |
| g2s | token (this rank's own), rail_token |
| n2n | token (its load and its store) |
| deliver_g2s | row (that is copied), looked_up_row (likewise, found in its metadata), bare_row (metadata alone) |
| deliver_s2g | row (copied in order), permuted_row |
| final_sum_g2s, node_sum_g2s | row (its stage), destination (one more, listed), pair (one more, looked at), token |
| unpermute_g2s | row (its stage), pair (one more, listed), partial (of one pair) |

A sum's token has one destination and one stage, as a partial has.
"""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from importlib import resources

from hybrid_ep.perf.sum_loops import ARCHITECTURES


@dataclass(frozen=True)
class CopyLoop:
    """One way round a role's loop, the shortest: `issued` instructions, of which `global_loads`, `shared_loads`,
    `constant_loads` and `fences` are what their names say, and the `clocks` of an SM that they take."""

    issued: int
    clocks: float
    global_loads: int
    shared_loads: int
    constant_loads: int
    fences: int


@functools.cache
def copy_loops(generation: str) -> dict[str, dict[str, CopyLoop]]:
    """{role: {way: CopyLoop}} of the code that a GPU generation (`Gpu.generation`: hopper, blackwell) runs. ValueError
    for a generation for which nothing is compiled."""
    if generation not in ARCHITECTURES:
        raise ValueError(
            f"generation is {generation!r}, which no kernel is compiled for; take one of {[*ARCHITECTURES]}"
        )
    text = resources.files("hybrid_ep.perf").joinpath("data").joinpath("copy_loops.json").read_text()
    roles = json.loads(text)[ARCHITECTURES[generation]]
    return {role: {way: CopyLoop(**costs) for way, costs in ways.items()} for role, ways in roles.items()}


def copy_loop(generation: str, role: str, way: str) -> float:
    """Clocks of a role's way (see the table above). ValueError for what the table does not have."""
    roles = copy_loops(generation)
    if role not in roles:
        raise ValueError(f"role is {role!r}, of which no loop is known; take one of {[*roles]}")
    if way not in roles[role]:
        raise ValueError(f"way is {way!r}, which {role} does not have; take one of {[*roles[role]]}")
    return roles[role][way].clocks
