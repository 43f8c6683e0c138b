"""What an exchange of routing takes (csrc/roles/route.h, exchange.h, place.h), from what its compiled loops issue.

The instructions that a warp issues are of this library's machine code (`scripts/cubin_check.py`, which refuses a
library that issues a twentieth more than data/route_loops.json says). They are put together with assumed round trips
to memory, so read a time as +-30 %: no GPU has timed it."""

from __future__ import annotations

import functools
import json
import math
from dataclasses import dataclass
from importlib import resources

from hybrid_ep.hardware.clusters import Cluster
from hybrid_ep.perf.shape import Shape
from hybrid_ep.perf.sum_loops import ARCHITECTURES

STEPS = 4  # of a walk that are under way together: RouteRole::kAhead
WARPS, LANES, SCHEDULERS = 16, 32, 4
MEMORY, SHARED, SYSTEM_FENCE = 700, 34, 1750  # clocks: a trip to the L2 or memory under load, to shared memory, a fence
MOST_BLOCKS, TOKENS_OF_A_BLOCK = 32, 128  # of the kernel: csrc/roles/exchange_params.h, hybrid_ep/runtime/session.py
# Parts of an exchange in which a rank works for itself; in the others it waits for the ranks of its group.
OWN_PARTS = ("lists", "walk", "columns of the block", "blocks before", "rows", "records")


@dataclass(frozen=True)
class Issued:
    """Instructions that a warp issues. walk: for STEPS steps of it; list: for the lists of its lanes' tokens; record:
    for a pair of a token's records."""

    walk: float
    list: float
    record: float


@functools.cache
def issued(generation: str) -> Issued:
    """Of the code that a GPU generation (`Gpu.generation`) runs."""
    text = resources.files("hybrid_ep.perf").joinpath("data").joinpath("route_loops.json").read_text()
    return Issued(**json.loads(text)[ARCHITECTURES[generation]])


def blocks_of(tokens: int) -> int:
    """Blocks of an exchange for which nobody asked for a number."""
    return min(MOST_BLOCKS, max(1, -(-tokens // TOKENS_OF_A_BLOCK)))


def parts_us(shape: Shape, loops: Issued, clock_ghz: float) -> dict[str, float]:
    """{part: microseconds}: what warps issue on the scheduler that they share, and wait for; without links' latency."""
    blocks, local = blocks_of(shape.tokens), shape.ranks_per_node
    columns = shape.ranks + shape.nodes + shape.experts
    of_block = math.ceil(shape.tokens / blocks)
    busy = min(WARPS, math.ceil(of_block / LANES))  # warps whose lanes have a token each
    rounds = math.ceil(of_block / (WARPS * LANES))
    step_tokens = max(1, LANES // shape.topk)
    walks = math.ceil(math.ceil(of_block / WARPS) / (STEPS * step_tokens))
    passes = math.ceil(columns / (WARPS * LANES))

    def shared(issued_by_a_warp: float, warps: int) -> float:
        return issued_by_a_warp * math.ceil(warps / SCHEDULERS)

    lane_stores = of_block * (2 * shape.topk + shape.nodes)  # of lists: 32 lines an instruction
    per_token = min(shape.topk, shape.nodes)
    record_words = 2 + min(shape.topk, local) + shape.topk
    clocks = {
        "lists": rounds * (2 * MEMORY + shared(1.3 * loops.list, busy)) + lane_stores,
        "walk": walks * (MEMORY + max(shared(loops.walk, WARPS), STEPS * step_tokens * 2 * SHARED)),
        "columns of the block": passes * (WARPS * SHARED + MEMORY),
        "meeting": SYSTEM_FENCE + 3 * MEMORY,
        "blocks before": passes * (math.ceil(blocks / 8) * MEMORY + WARPS * SHARED),
        "exchange": (2 * SYSTEM_FENCE + 4 * MEMORY) * (2 if shape.nodes > 1 else 1)
        + columns / 4 / LANES * local * 12 * math.ceil(shape.nodes / WARPS)
        + (columns / 4 / 8 * MEMORY if shape.nodes > 1 else 0),  # a lone lane's put
        "all counts": SYSTEM_FENCE + 2 * MEMORY + shape.ranks * 16 / (WARPS * LANES) * MEMORY,
        "rows": passes * math.ceil(shape.ranks / 8) * MEMORY + shape.local_experts * 3 * SHARED + 2 * MEMORY,
        "records": rounds * (3 * MEMORY + shared(shape.topk * loops.record, busy))
        + of_block * per_token * record_words,
        "leaving": 2 * MEMORY + SYSTEM_FENCE,
    }
    return {part: number / clock_ghz / 1e3 for part, number in clocks.items()}


def exchange_us(shape: Shape, cluster: Cluster) -> float:
    """The exchange kernel, its links' latencies included: counts cross the rail once and are handed on in the node."""
    gpu = cluster.gpu
    links = gpu.nvlink_latency_us.value + (cluster.nic.latency_us.value if shape.nodes > 1 else 0.0)
    return sum(parts_us(shape, issued(gpu.generation), gpu.clock_ghz.value).values()) + links


def own_us(shape: Shape, cluster: Cluster) -> float:
    """Of that what a rank does by itself: the event engine runs the rest, and charges no load of a single word."""
    parts = parts_us(shape, issued(cluster.gpu.generation), cluster.gpu.clock_ghz.value)
    return sum(parts[name] for name in OWN_PARTS)
