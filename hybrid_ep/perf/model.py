"""Time of one dispatch or combine: rows from routing statistics, costs per row, chunks through the queueing network.

Two answers that check each other: `bounds` (each resource's busy time in closed form; none may be beaten) and the
makespan of the chunk flow, which adds fill, drain and what happens when two resources are nearly as busy."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from hybrid_ep.hardware.clusters import Cluster
from hybrid_ep.perf import flow
from hybrid_ep.perf.costs import RowCosts, hbm_us
from hybrid_ep.perf.flow import Chain, Hop, Timeline
from hybrid_ep.perf.implementations import HYBRID_EP, Implementation
from hybrid_ep.perf.routing import Traffic, uniform
from hybrid_ep.perf.shape import Shape

OPS = ("dispatch", "combine")
ROLES = ("n2n", "unpermute", "node_sum", "put", "final_sum", "add unpermute", "add node_sum", "add final_sum")
_MAX_CHUNKS = 4096  # of one rank; beyond it chunks are merged, which changes fill alone


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
) -> Prediction:
    """One `op` ("dispatch" or "combine") by every rank at once.

    num_sms: blocks granted to it. chunk: rows a rail message, default the implementation's. traffic: of the busiest
    rank, default uniform.
    permute_sms: blocks of the local pass, launched apart; None: those of the operation, in dispatch inside its launch.
    ValueError names argument, value and remedy."""
    if op not in OPS:
        raise ValueError(f"op={op!r}: use dispatch or combine")
    if op == "combine" and dtype != "bf16":
        raise ValueError(f"dtype={dtype!r}: combine sums bf16 rows")
    most = int(cluster.gpu.num_sms.value)
    if not 1 <= num_sms <= most:
        raise ValueError(f"num_sms={num_sms} must be in 1 .. {most}, the SMs of a {cluster.gpu.name}")
    if permute_sms is not None and not 1 <= permute_sms <= most:
        raise ValueError(f"permute_sms={permute_sms} must be in 1 .. {most}, the SMs of a {cluster.gpu.name}, or None")
    chunk = impl.chunk if chunk is None else chunk
    if chunk < 1:
        raise ValueError(f"chunk={chunk} must be at least 1 row")
    if shape.ranks_per_node > cluster.ranks_per_node:
        raise ValueError(
            f"ranks_per_node={shape.ranks_per_node}: {cluster.name} has NVLink domains of {cluster.ranks_per_node}"
        )
    traffic = uniform(shape) if traffic is None else traffic
    cost = RowCosts.of(cluster, shape, impl, op, dtype)
    work = _Work(shape, traffic, cost, impl, num_sms, chunk, cluster, permute_sms or num_sms)
    line = work.dispatch() if op == "dispatch" else work.combine()
    barriers = impl.barriers * cluster.gpu.barrier_us.value
    skew = cluster.gpu.skew_us.value if shape.nodes > 1 else 0.0
    own_barriers = barriers if impl.local_pass != "none" else 0.0  # ours are inside the kernel
    kernel = line.end + skew + own_barriers
    copies = _copies_bytes(shape, traffic, impl, op, dtype)
    launches = impl.launches + (op == "dispatch" and permute_sms is not None)
    api = line.end + skew + barriers + launches * cluster.gpu.launch_us.value + hbm_us(cluster, copies)
    hbm = _kernel_hbm_bytes(shape, traffic, impl, op, cost)
    roles = max(line.busy_of(f"role {name}") for name in ROLES)
    bounds = {
        "SM": line.busy_of("engine"),
        "SM roles": roles,
        "NVLink": line.busy_of("nvlink"),
        "NIC": line.busy_of("nic"),
        "HBM": hbm_us(cluster, hbm),
    }
    kernel, api = max(kernel, bounds["HBM"]), max(api, bounds["HBM"])
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
        permute_sms: int,
    ) -> None:
        self.cluster, self.permute_sms = cluster, permute_sms
        self.shape, self.t, self.cost, self.impl, self.num_sms = shape, traffic, cost, impl, num_sms
        self.nvlink_latency = cluster.gpu.nvlink_latency_us.value
        self.nic_latency, self.post = cluster.nic.latency_us.value, cluster.nic.post_us.value
        self.peers = shape.nodes - 1
        rail = max(traffic.rail_out, traffic.rail_in)
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

    def dispatch(self) -> Timeline:
        own_rows = self.local_tokens / self.own_chunks
        chains = []
        for chunk in range(self.own_chunks):
            chains.append(Chain(f"own {chunk}", self._scatter(chunk % self.num_sms, own_rows)))
            for peer in range(self.peers if chunk < self.rail_chunks else 0):
                chains.append(self._rail_dispatch(chunk, peer))
        for chunk in range(self.own_chunks, self.rail_chunks):
            chains += [self._rail_dispatch(chunk, peer) for peer in range(self.peers)]
        line = flow.run(chains)
        if delivered := _rows_outside(self.t, self.impl):
            line.extend(self._local_pass("deliver", self.t.received, delivered), self.nvlink_latency)
        return line

    def combine(self) -> Timeline:
        line = Timeline()
        if outside := _rows_outside(self.t, self.impl):
            line.extend(self._local_pass("unpermute", outside, self.t.received, self.cost.pull_own), 0.0)
        chains, rows, slots = [], self.local_tokens / self.own_chunks, self.impl.rail_slots
        for chunk in range(self.rail_chunks):
            # its slot is free when the own chunk with the last row of the chunk before it in the slot is summed
            consumed = chunk - slots if slots else -1
            after = ("own", -(-(consumed + 1) * self.own_chunks // self.rail_chunks) - 1) if consumed >= 0 else None
            credit = Hop(("credit", 0), "node_sum", 0.0, latency=self.nic_latency)
            for peer in range(self.peers):
                block = (chunk + peer) % self.num_sms
                hops = self._pull("node_sum", block, self.rail_rows, self.fan_out, 0.0)
                nic = Hop(("nic", 0), "put", self.rail_rows * self.cost.nic, latency=self.nic_latency)
                post = Hop(("role put", block), "node_sum", self.post)
                hops = [*([credit] if after else []), *hops, post, nic]
                chains.append(Chain(f"sum {peer}.{chunk}", hops, gate=("sums", chunk), after=after))
        for chunk in range(self.own_chunks):
            sums = self.t.rail_out / self.own_chunks
            # by symmetry the last sum of a chunk of tokens comes when as large a share of the rail's chunks is done
            gate = ("sums", -(-(chunk + 1) * self.rail_chunks // self.own_chunks) - 1)
            hops = self._pull("final_sum", chunk % self.num_sms, rows, self.fan_out, sums)
            after = gate if self.rail_chunks else None
            chains.append(Chain(f"own {chunk}", hops, gate=("own", chunk), after=after))
        line.extend(flow.run(chains), 0.0)
        return line

    def _scatter(self, block: int, rows: float) -> list[Hop]:
        copies = rows * self.fan_out
        engine = Hop(
            ("engine", block), "scatter", rows * self.cost.load + copies * self.cost.store, True, self.nvlink_latency
        )
        return [engine, Hop(("nvlink", 0), "rows", copies * self.crossing * self.cost.nvlink)]

    def _rail_dispatch(self, chunk: int, peer: int) -> Chain:
        hops = []
        if self.impl.stage_rail:
            block = (chunk + peer) % self.num_sms
            hops.append(Hop(("engine", block), "n2n", self.rail_rows * (self.cost.load + self.cost.store)))
            hops.append(Hop(("role n2n", block), "n2n", self.post))
        hops.append(Hop(("nic", 0), "put", self.rail_rows * self.cost.nic, latency=self.nic_latency))
        hops += self._scatter((chunk + peer) % self.num_sms, self.rail_rows)
        if self.impl.rail_slots:  # the slot's credit travels back
            hops[-1] = hops[-1]._replace(latency=hops[-1].latency + self.nic_latency)
        slots = self.impl.rail_slots
        after = ("slot", peer, chunk - slots) if slots and chunk >= slots else None
        return Chain(f"rail {peer}.{chunk}", hops, gate=("slot", peer, chunk), after=after)

    def _pull(self, role: str, block: int, rows: float, fan_in: float, sums: float) -> list[Hop]:
        """A chunk of sums: `rows * fan_in` partials of this node, `sums` sums of other nodes, one row out each."""
        pulled = rows * fan_in
        roles = self.impl.pulling_roles[self.shape.nodes > 1] if self.shape.nodes == 1 else 1
        waits = (pulled * self.cost.pull_peer + sums * self.cost.pull_own) / roles
        engine = (pulled + sums) * self.cost.load + rows * self.cost.store
        adds = (pulled + sums) * self.cost.add + rows * self.cost.finish
        return [
            Hop((f"role {role}", block), role, waits, True),
            Hop(("engine", block), role, engine, True, self.nvlink_latency),
            Hop(("nvlink", 0), "rows", pulled * self.crossing * self.cost.nvlink, True),
            Hop((f"role add {role}", block), role, adds),
        ]

    def _local_pass(self, role: str, loads: float, stores: float, pull: float = 0.0) -> Timeline:
        """Rows dealt evenly over blocks, no faster than memory. pull: what a summing role waits for a load."""
        work = (loads * self.cost.load + stores * self.cost.store) / self.permute_sms
        waits = loads * pull / self.permute_sms
        adds = (loads * self.cost.add + stores * self.cost.finish) / self.permute_sms if pull else 0.0
        line = flow.run(
            [
                Chain(
                    role,
                    [
                        Hop((f"role {role}", block), role, waits, True),
                        Hop(("engine", block), role, work, True),
                        Hop((f"role add {role}", block), role, adds),
                    ],
                )
                for block in range(self.permute_sms)
            ]
        )
        line.end = max(line.end, hbm_us(self.cluster, (loads + stores) * self.cost.link_bytes))
        return line


def _rows_outside(t: Traffic, impl: Implementation) -> float:
    """Rows of the caller's tensor on the experts' side that the kernels write in dispatch and read in combine."""
    return {"permute": t.pairs, "copy": t.received, "none": 0.0}[impl.local_pass]


def _copies_bytes(shape: Shape, t: Traffic, impl: Implementation, op: str, dtype: str) -> float:
    """Bytes that copies outside the kernel read and write."""
    row = shape.row_bytes(dtype)
    outer = shape.tokens * impl.prologue_passes * (shape.nodes > 1) if op == "dispatch" else 0.0
    return 2 * row * (outer + t.received * impl.epilogue_passes)


def _kernel_hbm_bytes(shape: Shape, t: Traffic, impl: Implementation, op: str, cost: RowCosts) -> float:
    """Bytes of HBM that the kernel's rows read and write: docs/performance_model.md lists the terms."""
    ring = 2.0 if impl.stage_rail and op == "dispatch" else 0.0
    rail = max(t.rail_out, t.rail_in)
    inside = shape.tokens + rail * (3 + ring) + t.received
    outside = _rows_outside(t, impl)
    return (inside + (t.received + outside if outside else 0.0)) * cost.link_bytes


def _bandwidths(shape: Shape, t: Traffic, dtype: str, time_us: float) -> tuple[dict[str, float], dict[str, float]]:
    scale = shape.row_bytes(dtype) / (time_us * 1e3)
    nodes = t.rail_out + (shape.tokens * t.nodes_per_token / shape.nodes if shape.nodes > 1 else 0.0)
    physical = {"nvlink": t.nvlink_rows * scale, "rail": max(t.rail_out, t.rail_in) * scale}
    return physical, {"nvlink": t.received * scale, "rail": nodes * scale}


def _role_shares(line: Timeline, work: _Work, time_us: float) -> dict[str, float]:
    """Mean share of the copy engines of the SMs granted to it that each role keeps busy."""
    shares: dict[str, float] = {}
    for span in line.spans:
        if span.server[0] == "engine":
            sms = work.permute_sms if span.role in ("deliver", "unpermute") else work.num_sms
            shares[span.role] = shares.get(span.role, 0.0) + span.work / (sms * time_us)
    return shares
