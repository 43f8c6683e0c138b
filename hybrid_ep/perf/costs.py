"""What a row costs where: time of an SM's copy engine, of a summing role, of the NVLink port, of the NIC, of HBM.

    copy engine, a row in:   copy + bytes / load port       a row out:   copy + bytes / store port
    summing role, a row in:  (pull latency + a tile of it in) / rows in flight
    reduce warps, a row:     tiles x clocks of the compiled loop (sum_loops.py); a sum's end likewise
    a copy role's lane:      clocks of its compiled loop (lanes.py), for this library's kernels
    NVLink, a row:           bytes / (rate x efficiency)
    NIC, a row:              (bytes + packet headers) / (rate x efficiency), at least messages / message rate

All in microseconds. Rates in GB/s are thousands of bytes per microsecond."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass

from hybrid_ep.hardware.clusters import Cluster
from hybrid_ep.perf import route_time
from hybrid_ep.perf.implementations import SUM_TILE_ELEMENTS, Implementation
from hybrid_ep.perf.lanes import Lanes
from hybrid_ep.perf.shape import Shape
from hybrid_ep.perf.sum_loops import SumLoop, sum_loop


@dataclass(frozen=True)
class RowCosts:
    """Microseconds per row of `op` in `dtype`; bytes per row on a link and in a tensor. add, finish: of the reduce
    warps, a row that is added and a sum that is rounded and stored."""

    load: float
    store: float
    nvlink: float
    nic: float
    pull_peer: float
    pull_own: float
    pull_local: float  # of local work
    add: float
    finish: float
    link_bytes: float
    row_bytes: float
    lanes: Lanes  # nothing of an implementation whose loops are not known
    sum_tiles: int  # stages that a row of a sum takes

    @classmethod
    def of(cls, cluster: Cluster, shape: Shape, impl: Implementation, op: str, dtype: str) -> RowCosts:
        gpu, nic = cluster.gpu, cluster.nic
        link = impl.link_row_bytes(shape, dtype, op)
        copy = gpu.copy_ns.value / 1e3
        packets = math.ceil(link / nic.mtu.value)
        wire = (link + packets * nic.header_bytes.value) / (nic.rate * 1e3)
        load = copy + link / (gpu.load_gb_per_s * 1e3)
        sums = sum_loop(gpu.generation, "combine") if impl.compiled else SumLoop(0.0, 0.0)
        tile_us = impl.sum_tiles(shape) / (gpu.clock_ghz.value * 1e3)
        tile_load = copy + link / impl.sum_tiles(shape) / (gpu.load_gb_per_s * 1e3)  # what a stage waits for
        return cls(
            load=load,
            store=copy + link / (gpu.store_gb_per_s * 1e3),
            nvlink=link / (gpu.nvlink_rate * 1e3),
            nic=max(wire, impl.per_row_messages / nic.messages_per_us.value),
            pull_peer=(gpu.pull_us.value + tile_load) / impl.rows_in_flight(shape),
            pull_own=(gpu.hbm_load_us.value + tile_load) / impl.rows_in_flight(shape),
            pull_local=(gpu.hbm_load_us.value + tile_load) / impl.rows_in_flight(shape),
            add=sums.row * tile_us,
            finish=sums.finish * tile_us,
            link_bytes=link,
            row_bytes=shape.row_bytes(dtype),
            lanes=Lanes.of(cluster) if impl.compiled else Lanes(),
            sum_tiles=math.ceil(impl.sum_tiles(shape)),
        )


def hbm_us(cluster: Cluster, num_bytes: float) -> float:
    """Reading or writing so many bytes of this GPU's memory."""
    return num_bytes / (cluster.gpu.hbm_rate * 1e3)


def event_costs(cluster: Cluster, row_bytes: float, routed: Shape | None = None) -> dict[str, int]:
    """The same cluster as the event simulator's cost table: picoseconds (`_ps`) and MB/s (`_mbps`), integers. routed:
    the shape whose routing is charged; None: routing is free.

    Its copies have no cost beside their bytes, so the copy path's rates here are those that a row of `row_bytes`
    reaches with it."""
    gpu, nic = cluster.gpu, cluster.nic
    copy_us = gpu.copy_ns.value / 1e3

    def ps(us: float) -> int:
        return round(us * 1e6)

    def mbps(gb: float) -> int:
        return round(gb * 1e3)

    def with_copy(gb: float) -> int:
        return round(row_bytes / (copy_us + row_bytes / (gb * 1e3)))

    sums, clocks_us = sum_loop(gpu.generation, "combine"), gpu.clock_ghz.value * 1e3
    return {
        **{f"{step}_ps": ps(us) for step, us in asdict(Lanes.of(cluster)).items()},
        "poll_ps": ps(gpu.flag_us.value),
        "fence_ps": ps(gpu.fence_us.value),
        "route_token_ps": ps(route_time.own_us(routed, cluster) / routed.tokens) if routed else 0,
        "flag_ps": ps(gpu.flag_us.value),
        "tma_read_mbps": with_copy(gpu.load_gb_per_s),
        "tma_write_mbps": with_copy(gpu.store_gb_per_s),
        "tma_latency_ps": ps(gpu.hbm_load_us.value),
        "reduce_mbps": round(2 * SUM_TILE_ELEMENTS * clocks_us / sums.row),  # of rows in bf16
        "round_mbps": round(4 * SUM_TILE_ELEMENTS * clocks_us / sums.finish),  # of sums in fp32
        "hbm_mbps": mbps(gpu.hbm_rate),
        "nvlink_egress_mbps": mbps(gpu.nvlink_rate),
        "nvlink_ingress_mbps": mbps(gpu.nvlink_rate),
        # a peer's row takes the pull in all: there, back, and its memory
        "nvlink_latency_ps": ps(max(0.0, gpu.pull_us.value - gpu.hbm_load_us.value) / 2),
        "nic_mbps": mbps(nic.rate),
        "nic_message_ps": ps(1 / nic.messages_per_us.value),
        "nic_post_ps": ps(nic.post_us.value / 2),
        "nic_latency_ps": ps(nic.latency_us.value),
    }
