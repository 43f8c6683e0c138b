"""What the lanes of the copy roles take: microseconds a token, a destination and a row, of the compiled loops.

A copy role is one lane, which issues every copy of its warp. What it needs beside the copies' own time is read from the
machine code (`copy_loops.py`); a model that leaves it out flatters whoever has few SMs."""

from __future__ import annotations

from dataclasses import dataclass

from hybrid_ep.hardware.clusters import Cluster
from hybrid_ep.perf.copy_loops import copy_loop

S2G_WARPS = 2  # of a block that feeds links (csrc/kernels/dispatch.h)


@dataclass(frozen=True)
class Lanes:
    """Microseconds of one lane.

    g2s_token: a tile of a token into a stage. s2g_token: a tile of a token out of it, beside s2g_destination for each
    rank that it goes to, and s2g_pair for each further row there. n2n_token: in and out again, towards a rail peer.
    deliver_load, deliver_store: a received row that local work copies. sum_token: a sum, beside sum_destination for
    each rank that has rows of it, and sum_row for each tile of each row. sum_partial: a receive row of which a partial
    may have to be formed, beside sum_pair for each row of this rank's that it is formed of."""

    g2s_token: float = 0.0
    s2g_token: float = 0.0
    s2g_destination: float = 0.0
    s2g_pair: float = 0.0
    n2n_token: float = 0.0
    deliver_load: float = 0.0
    deliver_store: float = 0.0
    sum_token: float = 0.0
    sum_destination: float = 0.0
    sum_partial: float = 0.0
    sum_pair: float = 0.0
    sum_row: float = 0.0

    @classmethod
    def of(cls, cluster: Cluster) -> Lanes:
        """Of this library's kernels on the GPUs of a cluster; the slower of roles that share a loop. ValueError for a
        generation that nothing is compiled for."""
        generation, clocks_us = cluster.gpu.generation, cluster.gpu.clock_ghz.value * 1e3

        def us(role: str, way: str) -> float:
            return copy_loop(generation, role, way) / clocks_us

        sums = ("final_sum_g2s", "node_sum_g2s")
        destination = max(us(role, "destination") for role in sums)
        row = max(us(role, "row") for role in (*sums, "unpermute_g2s"))
        token = max(us(role, "token") - us(role, "destination") - us(role, "row") for role in sums)
        return cls(
            g2s_token=max(us("g2s", "token"), us("g2s", "rail_token")),
            s2g_token=us("s2g", "token") - us("s2g", "received"),  # its token goes to one rank, to its receive row
            s2g_destination=us("s2g", "destination"),
            s2g_pair=us("s2g", "pair"),
            n2n_token=us("n2n", "token"),
            deliver_load=us("deliver_g2s", "looked_up_row"),
            deliver_store=us("deliver_s2g", "permuted_row"),
            sum_token=max(0.0, token),
            sum_destination=destination,
            sum_partial=us("unpermute_g2s", "partial") - us("unpermute_g2s", "pair") - us("unpermute_g2s", "row"),
            sum_pair=us("unpermute_g2s", "pair"),
            sum_row=row,
        )
