"""The latency path in the event engine: its kernels, all ranks, on the virtual clock with a cluster's costs.

A warp handles four lines at once. What it issues for them is of this library's machine code (scripts/sass_lines.py,
data/line_loops.json); a scheduler has four of a block's sixteen warps, so that a step takes the longer of a
trip to memory with one warp's instructions and the instructions of all four. Trips are assumed (route_time.py), so
read times as +-30 %: no GPU has timed them. A simulated warp stands for the four of a scheduler and takes a quarter of
the time, in large worlds for all sixteen of a block."""

from __future__ import annotations

import functools
import json
import math
from dataclasses import dataclass
from importlib import resources
from typing import TYPE_CHECKING

from hybrid_ep.hardware.clusters import Cluster
from hybrid_ep.perf import latency_shares, route_time
from hybrid_ep.perf.costs import event_costs
from hybrid_ep.perf.route_time import MEMORY, SCHEDULERS, WARPS
from hybrid_ep.perf.shape import Shape
from hybrid_ep.perf.sum_loops import ARCHITECTURES

if TYPE_CHECKING:
    from hybrid_ep.explorer.world import World

LINES, LINE_BYTES, LINE_WORDS = 4, 128, 15  # that a warp handles at once; of one, and its words of payload
_BEHIND_COUNTS = ("rows", "records")  # of routing, what waits for the counts of all ranks: tokens are on their way then
KERNELS = ("latency_dispatch", "latency_combine")
WARPS_A_SCHEDULER = WARPS // SCHEDULERS
_MOST_LANES = 30_000  # of a world: each has a stack of its own, and a process so many mappings


@dataclass(frozen=True)
class Issued:
    """Instructions of a warp for the lines it handles at once: send, receive of a dispatch; partial: of a row that is
    added to a partial row, up to its store; sum: of a partial row that is added to a sum."""

    send: float
    receive: float
    partial: float
    sum: float


@functools.cache
def issued(generation: str) -> Issued:
    """Of the code that a GPU generation (`Gpu.generation`) runs."""
    text = resources.files("hybrid_ep.perf").joinpath("data").joinpath("line_loops.json").read_text()
    return Issued(**json.loads(text)[ARCHITECTURES[generation]])


def warps_in_one(shape: Shape, num_sms: int) -> int:
    """Warps that a simulated one stands for."""
    return WARPS_A_SCHEDULER if shape.ranks * num_sms * SCHEDULERS <= _MOST_LANES else WARPS


def line_costs(cluster: Cluster, shape: Shape, num_sms: int, warps: int) -> dict[str, int]:
    """The cost table of the event engine with the costs of lines: picoseconds and MB/s, integers. warps: that a
    simulated one stands for."""
    gpu, loops = cluster.gpu, issued(cluster.gpu.generation)

    def line_ps(instructions: float, trip: float = 0.0) -> int:
        step = max(trip + instructions if trip else 0.0, WARPS_A_SCHEDULER * instructions)
        return round(step / LINES / warps / gpu.clock_ghz.value * 1e3)

    trip_ps = round(MEMORY / gpu.clock_ghz.value * 1e3)
    parts = route_time.parts_us(shape, route_time.issued(gpu.generation), gpu.clock_ghz.value)

    def of_token(names: tuple[str, ...]) -> int:
        return round(sum(parts[name] for name in names) / shape.tokens * 1e6)

    lines = math.ceil(2 * shape.hidden / (8 * LINE_WORDS))
    on_rail = latency_shares.rail_costs(cluster, shape, num_sms, warps, lines, LINES) if shape.nodes > 1 else {}
    return (
        event_costs(cluster, 2.0 * shape.hidden)
        | on_rail
        | {
            "route_token_ps": of_token(tuple(name for name in route_time.OWN_PARTS if name not in _BEHIND_COUNTS)),
            "place_token_ps": of_token(_BEHIND_COUNTS),
            "line_store_ps": line_ps(loops.send),
            "line_load_ps": line_ps(loops.receive, MEMORY),
            "partial_line_ps": line_ps(loops.partial, MEMORY),
            "sum_line_ps": line_ps(loops.sum, MEMORY),
            "line_wait_ps": trip_ps,
            "word_load_ps": round(trip_ps / LINES / LINE_WORDS / warps),
            "line_mbps": round(gpu.store_gb_per_s * 1e3),
        }
    )


@dataclass(frozen=True)
class LatencyTimes:
    """Microseconds of each operation from the first launch's start to the last one's end over all ranks, without what a
    launch takes. nvlink_bytes, nvlink_us: what leaves the busiest rank's NVLink port, and for how long the port is busy
    with it, both operations together; nic_bytes, nic_us: the same of its NIC, 0 with one node."""

    dispatch_us: float
    combine_us: float
    nvlink_bytes: int
    nvlink_us: float
    nic_bytes: int
    nic_us: float


def measure(shape: Shape, cluster: Cluster, *, num_sms: int, seed: int = 1) -> LatencyTimes:
    """A routed dispatch and a combine of bf16 rows by lines, uniform routing drawn from `seed`. Between nodes a
    token's row goes as plain bytes by the cluster's NICs, charged as a put of the throughput path is. ValueError for
    what the simulator refuses; MemoryError for a world too large for this machine; RuntimeError when its kernels
    failed, which no routing may cause."""
    from hybrid_ep.explorer import world

    if num_sms < 1:
        raise ValueError(f"num_sms={num_sms}: give the SMs of an operation, at least 1")
    warps = warps_in_one(shape, num_sms)
    spec = world.spec_of(
        num_nodes=shape.nodes,
        num_local_ranks=shape.ranks_per_node,
        experts_per_rank=shape.local_experts,
        tokens=shape.tokens,
        topk=shape.topk,
        hidden=shape.hidden,
        num_blocks=num_sms,
        latency=2,
        latency_warps=WARPS // warps,
        smem_bytes=int(cluster.gpu.smem_kib.value) * 1024,
        data_seed=seed,
    )
    got = world.measure(spec, line_costs(cluster, shape, num_sms, warps))
    world.require_whole(got)
    dispatch_us, combine_us = (got.operation_us(name) for name in KERNELS)
    return LatencyTimes(dispatch_us, combine_us, *_busiest(got, "nvlink_egress"), *_busiest(got, "nic_egress"))


def _busiest(got: World, name: str) -> tuple[int, float]:
    """Bytes of the busiest of the ranks' links of that name, and microseconds that it is busy with them."""
    return max(((link.num_bytes, link.busy_us) for link in got.links if link.name == name), default=(0, 0.0))
