"""Time of one dispatch or combine: rows from routing statistics, costs per row, chunks through the queueing network.

Two answers that check each other: `bounds` (each resource's busy time in closed form; none may be beaten) and the
makespan of the chunk flow, which adds fill, drain and what happens when two resources are nearly as busy."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import NamedTuple

from hybrid_ep.hardware.block_split import local_blocks
from hybrid_ep.hardware.clusters import Cluster, with_article
from hybrid_ep.perf import flow, route_time
from hybrid_ep.perf.costs import RowCosts, hbm_us
from hybrid_ep.perf.flow import Chain, Hop, Timeline
from hybrid_ep.perf.implementations import GROUP_ROWS, HYBRID_EP, LOCAL_GROUPS, Implementation
from hybrid_ep.perf.lanes import S2G_WARPS
from hybrid_ep.perf.routing import Traffic, uniform
from hybrid_ep.perf.shape import Shape

OPS = ("dispatch", "combine")
ROLES = (
    *("n2n", "unpermute", "node_sum", "put", "final_sum", "add unpermute", "add node_sum", "add final_sum"),
    *("lane n2n", "lane scatter", "lane deliver", "lane unpermute", "lane node_sum", "lane final_sum"),
)
_MAX_CHUNKS = 4096  # of one rank; beyond it chunks are merged, which changes fill alone
_MOST_STEPS = 64  # in which partials come: finer ones change the fill of the sums alone


@dataclass
class Prediction:
    """Times in microseconds. kernel_us: inside the launches; api_us: the call. bounds: busy time of the busiest
    server by resource, in closed form. physical, logical: GB/s by link; logical counts local rows too (see
    docs/performance_model.md)."""

    op: str
    dtype: str
    num_sms: int
    chunk: int
    kernel_us: float
    api_us: float
    bounds: dict[str, float]
    physical: dict[str, float]
    logical: dict[str, float]
    roles: dict[str, float]
    hbm_bytes: float
    timeline: Timeline = field(repr=False)

    @property
    def binds(self) -> str:
        """The resource with the longest busy time."""
        return max(self.bounds, key=self.bounds.__getitem__)


@lru_cache(maxsize=4)
def _run(
    op: str,
    shape: Shape,
    traffic: Traffic,
    cost: RowCosts,
    impl: Implementation,
    num_sms: int,
    chunk: int,
    cluster: Cluster,
    local: int,
    moved: LocalRows,
) -> tuple[_Work, Timeline]:
    """Kept for the backward, which asks about the same rows without the exchange of routing."""
    work = _Work(shape, traffic, cost, impl, num_sms, chunk, cluster, local, moved)
    return work, work.dispatch() if op == "dispatch" else work.combine()


def predict(
    op: str,
    shape: Shape,
    cluster: Cluster,
    *,
    num_sms: int,
    dtype: str = "bf16",
    chunk: int | None = None,
    traffic: Traffic | None = None,
    impl: Implementation = HYBRID_EP,
    permute_sms: int | None = None,
    landed: bool = True,
    cached: bool = False,
) -> Prediction:
    """One `op` ("dispatch" or "combine") by every rank at once.

    num_sms: its blocks that feed links. chunk: rows a rail message, default the implementation's. traffic: of the
    busiest rank, default uniform.
    permute_sms: blocks beside those for local work, of the same grid; 0: those that feed links do it; None: as many
    as the library takes (`local_blocks`).
    landed: rows of a dispatch land in the result, and local work has the copies for further experts left; False: aside,
    as in a call that finds no room in the arena, of which local work copies all.
    cached: a dispatch on a handle that there was, without an exchange. ValueError names argument, value and remedy."""
    if op not in OPS:
        raise ValueError(f"op={op!r}: use dispatch or combine")
    if op == "combine" and dtype != "bf16":
        raise ValueError(f"dtype={dtype!r}: combine sums bf16 rows")
    most = int(cluster.gpu.num_sms.value)
    if not 1 <= num_sms <= most:
        raise ValueError(f"num_sms={num_sms} must be in 1 .. {most}, the SMs of {with_article(cluster.gpu.name)}")
    local = permute_blocks(cluster, num_sms, permute_sms, op) if impl.local_pass != "none" else 0
    chunk = impl.chunk if chunk is None else chunk
    if chunk < 1:
        raise ValueError(f"chunk={chunk} must be at least 1 row")
    if shape.ranks_per_node > cluster.ranks_per_node:
        raise ValueError(
            f"ranks_per_node={shape.ranks_per_node}: {cluster.name} has NVLink domains of {cluster.ranks_per_node}"
        )
    traffic = uniform(shape) if traffic is None else traffic
    cost = RowCosts.of(cluster, shape, impl, op, dtype)
    moved = local_rows(shape, traffic, impl, op, landed)
    work, line = _run(op, shape, traffic, cost, impl, num_sms, chunk, cluster, local, moved)
    barriers = impl.barriers * cluster.gpu.barrier_us.value
    skew = cluster.gpu.skew_us.value if shape.nodes > 1 else 0.0
    own_barriers = barriers if impl.local_pass != "none" else 0.0  # ours are inside the kernel
    kernel = line.end + skew + own_barriers
    copies = _copies_bytes(shape, traffic, impl, op, dtype)
    exchange = route_time.exchange_us(shape, cluster) if impl.compiled and op == "dispatch" and not cached else 0.0
    launches = impl.launches[OPS.index(op)] + (exchange > 0)
    beside = barriers + launches * cluster.gpu.launch_us.value + hbm_us(cluster, copies) + exchange
    hbm = _kernel_hbm_bytes(shape, traffic, impl, op, cost, moved)
    roles = max(line.busy_of(f"role {name}") for name in ROLES)
    bounds = {
        "SM": line.busy_of("engine"),
        "SM roles": roles,
        "NVLink": line.busy_of("nvlink"),
        "NIC": line.busy_of("nic"),
        "HBM": hbm_us(cluster, hbm),
    }
    api = max(line.end + skew, bounds["HBM"]) + beside
    kernel = max(kernel, bounds["HBM"])
    return Prediction(
        op,
        dtype,
        num_sms,
        chunk,
        kernel,
        api,
        bounds,
        *_bandwidths(shape, traffic, dtype, kernel),
        _role_shares(line, work, kernel),
        hbm,
        line,
    )


class _Work:
    """The chains of one rank's operation."""

    def __init__(
        self,
        shape: Shape,
        traffic: Traffic,
        cost: RowCosts,
        impl: Implementation,
        num_sms: int,
        chunk: int,
        cluster: Cluster,
        local_sms: int,
        moved: LocalRows,
    ) -> None:
        self.local_sms, self.moved = local_sms, moved
        self.memory_latency = cluster.gpu.hbm_load_us.value
        self.shape, self.t, self.cost, self.impl, self.num_sms = shape, traffic, cost, impl, num_sms
        self.nvlink_latency = cluster.gpu.nvlink_latency_us.value
        self.nic_latency, self.post = cluster.nic.latency_us.value, cluster.nic.post_us.value
        self.peers = shape.nodes - 1
        self.rail = rail = max(traffic.rail_out, traffic.rail_in)
        least = math.ceil(max(shape.tokens, rail) / _MAX_CHUNKS)
        self.chunk = max(chunk, least)
        self.own_chunks = max(1, math.ceil(shape.tokens / self.chunk))
        self.rail_chunks = math.ceil(rail / max(1, self.peers) / self.chunk) if self.peers else 0
        self.rail_rows = rail / self.peers / self.rail_chunks if self.rail_chunks else 0.0
        # Source rows of the copies inside the node: own tokens that it needs, and arrived ones.
        own_share = 1.0 if shape.nodes == 1 else min(1.0, traffic.nodes_per_token / shape.nodes)
        self.local_tokens = shape.tokens * own_share
        self.fan_out = traffic.copies / (self.local_tokens + rail)  # copies of a source row
        self.crossing = traffic.nvlink_rows / traffic.copies  # share of copies on NVLink's busier direction

    @cached_property
    def workers(self) -> list[int]:
        """Blocks that work locally: those behind the ones that feed links, or, without such, these."""
        return list(range(self.num_sms, self.num_sms + self.local_sms) if self.local_sms else range(self.num_sms))

    def dispatch(self) -> Timeline:
        own_rows = self.local_tokens / self.own_chunks
        # One chunk's hops are another's of the same block.
        own = [self._scatter(block, own_rows) for block in range(self.num_sms)]
        rail = [self._rail_hops(block) for block in range(self.num_sms if self.peers else 0)]
        delivered, rail_delivered = self._deliver_hops(own_rows), self._deliver_hops(self.rail_rows)
        chains: list[Chain] = []
        for chunk in range(max(self.own_chunks, self.rail_chunks)):
            if chunk < self.own_chunks:
                chains.append(Chain(f"own {chunk}", own[chunk % self.num_sms], gate=("landed", -1, chunk)))
                chains += self._deliver(chunk, -1, *delivered, len(chains))
            for peer in range(self.peers if chunk < self.rail_chunks else 0):
                chains += self._rail_dispatch(chunk, peer, rail[(chunk + peer) % self.num_sms])
                chains += self._deliver(chunk, peer, *rail_delivered, len(chains))
        return flow.run(chains)

    def _deliver(self, chunk: int, peer: int, pieces: int, hops: list[list[Hop]], first: int) -> list[Chain]:
        """What local work does with the rows of a chunk once they have landed. By symmetry the rows that this rank
        sends stand for as many that come to it. Groups of rows are dealt to workers in turn."""
        label = f"deliver {peer}.{chunk}" if peer >= 0 else f"deliver {chunk}"
        after = [("landed", peer, chunk)]
        return [Chain(label, hops[(first + i) % len(hops)], after=after) for i in range(pieces)]

    def _deliver_hops(self, rows: float) -> tuple[int, list[list[Hop]]]:
        """(pieces that so many landed rows make, a piece's hops by worker)."""
        share = rows / (self.local_tokens + self.rail)
        loads, stores = self.moved.loads * share, self.moved.stores * share
        if loads + stores <= 0:
            return 0, []
        workers = self.workers
        pieces = min(len(workers), max(1, round(self.t.received * share / GROUP_ROWS)))
        work = self._local_copies(loads, stores) / pieces
        lanes = self.cost.lanes  # one loads, the other stores
        lane = max(loads * lanes.deliver_load, loads * lanes.deliver_store) / pieces
        return pieces, [
            [
                Hop(("role lane deliver", worker), "deliver", lane, True),
                Hop(("engine", worker), "deliver", work, latency=self.memory_latency),
            ]
            for worker in workers
        ]

    def _local_copies(self, loads: float, stores: float) -> float:
        """Of a block's copy engine. One that does nothing else reads and writes at the same time; beside the traffic of
        links both are charged, one after the other, as they are there."""
        reads, writes = loads * self.cost.load, stores * self.cost.store
        return max(reads, writes) if self.local_sms else reads + writes

    def _unpermute(self) -> tuple[list[Chain], int]:
        """(chains that form partials, steps that they come in). Every worker has an equal part of a step, and all
        sources advance together, so that a share of the steps is that share of every source's rows."""
        workers = self.workers
        loads, sums = self.moved.loads / len(workers), self.moved.stores / len(workers)
        if loads <= 0:
            return [], 0
        groups = LOCAL_GROUPS if self.local_sms or not self.peers else 1
        steps = max(1, min(_MOST_STEPS, self.own_chunks, round(sums / groups / GROUP_ROWS)))
        waits = loads * self.cost.pull_local / groups / steps
        engine = self._local_copies(loads, sums) / steps
        adds = (loads * self.cost.add + sums * self.cost.finish) / groups / steps
        lanes = self.cost.lanes
        lane = loads * (lanes.sum_pair + self.cost.sum_tiles * lanes.sum_row) + sums * lanes.sum_partial
        lane /= groups * steps
        ways = [
            [
                Hop(("role lane unpermute", block), "unpermute", lane, True),
                Hop(("role unpermute", block), "unpermute", waits, True),
                Hop(("engine", block), "unpermute", engine, True),
                Hop(("role add unpermute", block), "unpermute", adds, latency=self.nvlink_latency),
            ]
            for block in workers
        ]
        steps_of = ((f"partials {step}", ("partials", step)) for step in range(steps))
        return [Chain(label, hops, gate=gate) for label, gate in steps_of for hops in ways], steps

    def combine(self) -> Timeline:
        chains, steps = self._unpermute()
        rows, slots = self.local_tokens / self.own_chunks, self.impl.rail_slots(self.shape)

        def partials(chunk: int, chunks: int) -> list[tuple]:
            """What is formed when the rows of a chunk are."""
            return [("partials", -(-(chunk + 1) * steps // chunks) - 1)] if steps else []

        blocks = range(self.num_sms)
        nic = Hop(("nic", 0), "put", self.rail_rows * self.cost.nic, latency=self.nic_latency)
        credit = Hop(("credit", 0), "node_sum", 0.0, latency=self.nic_latency)
        to_nodes = [
            [
                *self._pull("node_sum", block, self.rail_rows, self.fan_out, 0.0),
                Hop(("role put", block), "node_sum", self.post),
                nic,
            ]
            for block in blocks[: self.num_sms if self.peers else 0]
        ]
        sums = self.t.rail_out / self.own_chunks
        own = [self._pull("final_sum", block, rows, self.fan_out, sums) for block in blocks]
        for chunk in range(self.rail_chunks):
            after = partials(chunk, self.rail_chunks)
            # its slot is free when the own chunk with the last row of the chunk before it in the slot is summed
            if slots and chunk >= slots:
                after.append(("own", -(-(chunk - slots + 1) * self.own_chunks // self.rail_chunks) - 1))
            for peer in range(self.peers):
                hops = to_nodes[(chunk + peer) % self.num_sms]
                if slots and chunk >= slots:
                    hops = [credit, *hops]
                chains.append(Chain(f"sum {peer}.{chunk}", hops, gate=("sums", chunk), after=after))
        for chunk in range(self.own_chunks):
            # a block that forms partials does so before its final sums
            after = partials(chunk, self.own_chunks) if self.local_sms else partials(0, 1)
            if self.rail_chunks:
                # by symmetry the last sum of a chunk of tokens comes when as large a share of the rail's chunks is done
                after.append(("sums", -(-(chunk + 1) * self.rail_chunks // self.own_chunks) - 1))
            chains.append(Chain(f"own {chunk}", own[chunk % self.num_sms], gate=("own", chunk), after=after))
        return flow.run(chains)

    def _scatter(self, block: int, rows: float) -> list[Hop]:
        copies = rows * self.fan_out
        lanes = self.cost.lanes
        stores = (rows * lanes.s2g_token + copies * lanes.s2g_destination) / S2G_WARPS
        lane = Hop(("role lane scatter", block), "scatter", max(rows * lanes.g2s_token, stores), True)
        engine = Hop(
            ("engine", block), "scatter", rows * self.cost.load + copies * self.cost.store, True, self.nvlink_latency
        )
        return [lane, engine, Hop(("nvlink", 0), "rows", copies * self.crossing * self.cost.nvlink)]

    def _rail_hops(self, block: int) -> list[Hop]:
        """The way of a chunk over the rail until it has landed."""
        hops = []
        if self.impl.stage_rail:
            hops.append(Hop(("role lane n2n", block), "n2n", self.rail_rows * self.cost.lanes.n2n_token, True))
            hops.append(Hop(("engine", block), "n2n", self.rail_rows * (self.cost.load + self.cost.store)))
            hops.append(Hop(("role n2n", block), "n2n", self.post))
        hops.append(Hop(("nic", 0), "put", self.rail_rows * self.cost.nic, latency=self.nic_latency))
        return hops + self._scatter(block, self.rail_rows)

    def _rail_dispatch(self, chunk: int, peer: int, hops: list[Hop]) -> list[Chain]:
        """The chunk's way until it has landed, and that of its slot's credit back."""
        slots = self.impl.rail_slots(self.shape)
        after = [("slot", peer, chunk - slots)] if slots and chunk >= slots else []
        chains = [Chain(f"rail {peer}.{chunk}", hops, gate=("landed", peer, chunk), after=after)]
        if slots:
            credit = [Hop(("credit", 0), "n2n", 0.0, latency=self.nic_latency)]
            chains.append(Chain(f"credit {peer}.{chunk}", credit, ("slot", peer, chunk), [("landed", peer, chunk)]))
        return chains

    def _pull(self, role: str, block: int, rows: float, fan_in: float, sums: float) -> list[Hop]:
        """A chunk of sums: `rows * fan_in` partials of this node, `sums` sums of other nodes, one row out each."""
        pulled = rows * fan_in
        roles = self.impl.pulling_roles[0] if self.shape.nodes == 1 else 1  # of several nodes each has its own sums
        waits = (pulled * self.cost.pull_peer + sums * self.cost.pull_own) / roles
        engine = (pulled + sums) * self.cost.load + rows * self.cost.store
        adds = ((pulled + sums) * self.cost.add + rows * self.cost.finish) / roles
        lanes, tiles = self.cost.lanes, self.cost.sum_tiles
        lane = (
            rows * lanes.sum_token + pulled * lanes.sum_destination + (pulled + sums) * tiles * lanes.sum_row
        ) / roles
        return [
            Hop((f"role lane {role}", block), role, lane, True),
            Hop((f"role {role}", block), role, waits, True),
            Hop(("engine", block), role, engine, True, self.nvlink_latency),
            Hop(("nvlink", 0), "rows", pulled * self.crossing * self.cost.nvlink, True),
            Hop((f"role add {role}", block), role, adds),
        ]


class LocalRows(NamedTuple):
    """Rows that local work of an operation reads and writes."""

    loads: float
    stores: float


def permute_blocks(cluster: Cluster, num_sms: int, permute_sms: int | None = None, op: str = "dispatch") -> int:
    """Blocks for local work of `op` beside num_sms that feed links. ValueError for more than the GPU has SMs."""
    most = int(cluster.gpu.num_sms.value)
    if permute_sms is None:
        return local_blocks(op, num_sms, most)
    if not 0 <= permute_sms <= most - num_sms:
        raise ValueError(
            f"permute_sms={permute_sms} must be in 0 .. {most - num_sms}, the SMs of "
            f"{with_article(cluster.gpu.name)} beside num_sms={num_sms}, or None"
        )
    return permute_sms


def local_rows(shape: Shape, t: Traffic, impl: Implementation, op: str, landed: bool) -> LocalRows:
    """Between received rows and the caller's tensor on the experts' side. landed: each row is in its first place."""
    outside = {"permute": t.pairs, "copy": t.received, "none": 0.0}[impl.local_pass]
    if op == "combine":
        return LocalRows(outside, t.received if outside else 0.0)
    if not landed or not outside:
        return LocalRows(t.received if outside else 0.0, outside)
    copies = max(0.0, outside - t.received)
    return LocalRows(min(copies, t.received * _several_pairs(shape)), copies)


def _several_pairs(shape: Shape) -> float:
    """Share of the received rows that go to two or more experts of the rank, at uniform routing."""
    of_rank, others, ways = (
        shape.local_experts,
        shape.experts - shape.local_experts,
        math.comb(shape.experts, shape.topk),
    )
    none = math.comb(others, shape.topk) / ways
    one = of_rank * math.comb(others, shape.topk - 1) / ways
    return 1.0 - one / (1.0 - none)


def _copies_bytes(shape: Shape, t: Traffic, impl: Implementation, op: str, dtype: str) -> float:
    """Bytes that copies outside the kernel read and write."""
    row = shape.row_bytes(dtype)
    outer = shape.tokens * impl.prologue_passes * (shape.nodes > 1) if op == "dispatch" else 0.0
    return 2 * row * (outer + t.received * impl.epilogue_passes)


def _kernel_hbm_bytes(
    shape: Shape, t: Traffic, impl: Implementation, op: str, cost: RowCosts, moved: LocalRows
) -> float:
    """Bytes of HBM that the kernel's rows read and write: docs/performance_model.md lists the terms."""
    ring = 2.0 if impl.stage_rail and op == "dispatch" else 0.0
    rail = max(t.rail_out, t.rail_in)
    inside = shape.tokens + rail * (3 + ring) + t.received
    return (inside + moved.loads + moved.stores) * cost.link_bytes


def _bandwidths(shape: Shape, t: Traffic, dtype: str, time_us: float) -> tuple[dict[str, float], dict[str, float]]:
    scale = shape.row_bytes(dtype) / (time_us * 1e3)
    nodes = t.rail_out + (shape.tokens * t.nodes_per_token / shape.nodes if shape.nodes > 1 else 0.0)
    physical = {"nvlink": t.nvlink_rows * scale, "rail": max(t.rail_out, t.rail_in) * scale}
    return physical, {"nvlink": t.received * scale, "rail": nodes * scale}


def _role_shares(line: Timeline, work: _Work, time_us: float) -> dict[str, float]:
    """Mean share of the copy engines of the SMs granted to it that each role keeps busy."""
    shares: dict[str, float] = {}
    local, others = len(work.workers) * time_us, work.num_sms * time_us
    for server, role, _, _, busy in line.spans:
        if server[0] == "engine":
            shares[role] = shares.get(role, 0.0) + busy / (local if role in ("deliver", "unpermute") else others)
    return shares
