"""How many SMs an operation needs to fill its links: computed from rates, not searched.

An SM loads and stores rows one after another, t_load and t_store each; a token keeps the SMs of its rank busy for t_sm
and the links for t_link, the slower of NVLink and rail. So the SMs of a balanced operation are

    num_sms = ceil(t_sm / t_link)
    t_sm    = t_load * (D_n / N + 2 A + D_r) + t_store * (D_r + A + k)
    t_link  = row_bytes * max(D_r (1 - 1/L) / nvlink, A / rail),    A = D_n (1 - 1/N)

with D_r and D_n the ranks and nodes that a token needs (uniform routing; hybrid_ep.hardware.distinct), k its
experts, L ranks a node, N nodes; ranks receive as much as they send. Loads: the token itself where its own node needs
it, the A rows for the rail into the send ring and the A that come over it, D_r received rows on their way to the
experts. Stores: D_r rows to ranks, A into the ring, k to the experts. Combine goes the same ways back, with fewer
stores, and gets the same number, though its sums are not in it: by the performance model it takes up to 41 % longer
with that number than with half of the GPU where a rail binds. t_load and t_store are row_bytes / rate + copy_ns; the
rates are those of hybrid_ep.hardware.clusters, each with its source; none of them has been measured with these kernels
yet."""

from __future__ import annotations

import math
from dataclasses import dataclass

from hybrid_ep.hardware import clusters
from hybrid_ep.hardware.distinct import distinct

ASSUMED_TOPK = 8  # the constructor is not told


@dataclass(frozen=True)
class SmPlan:
    """num_sms, and what it follows from. Times are of one token, in microseconds."""

    num_sms: int
    cluster: str
    ranks_per_token: float
    nodes_per_token: float
    sm_us: float
    nvlink_us: float
    rail_us: float

    def __str__(self) -> str:
        binds = "NVLink" if self.nvlink_us >= self.rail_us else "the rail"
        return (
            f"{self.num_sms} SMs ({self.cluster}): a token goes to {self.ranks_per_token:.2f} ranks "
            f"and is {self.sm_us:.3f} us of an SM, {self.nvlink_us:.3f} us of NVLink and {self.rail_us:.3f} us of "
            f"the rail; {binds} binds"
        )


def cluster_of(gpu_name: str, capability: tuple[int, int]) -> clusters.Cluster:
    """The rates of a GPU, by its name or, of an unknown one, by its generation."""
    known = {
        "H800": "h800_8x400g",
        "H200": "h200_8x400g",
        "H100": "h100_8x400g",
        "GB200": "gb200_nvl72",
        "GB300": "gb300_nvl72",
        "B300": "b300_8x800g",
        "B200": "b200_8x400g",
    }
    for part, name in known.items():
        if part in gpu_name:
            return clusters.get(name)
    return clusters.get("h100_8x400g" if capability[0] < 10 else "b200_8x400g")


def plan(
    cluster: clusters.Cluster,
    num_nodes: int,
    num_local_ranks: int,
    num_experts: int,
    row_bytes: int,
    topk: int = ASSUMED_TOPK,
) -> SmPlan:
    """For `topk` (at most num_experts) of num_experts experts, rows of row_bytes bytes."""
    ranks, topk = num_nodes * num_local_ranks, min(topk, num_experts)
    per_token = distinct(ranks, num_experts, topk)
    nodes_per_token = distinct(num_nodes, num_experts, topk)
    kilobytes = row_bytes / 1e3  # GB/s are kB/us
    load, store = (
        kilobytes / rate + cluster.gpu.copy_ns.value / 1e3
        for rate in (cluster.gpu.load_gb_per_s, cluster.gpu.store_gb_per_s)
    )
    over_rail = nodes_per_token * (1 - 1 / num_nodes)
    nvlink = kilobytes * per_token * (1 - 1 / num_local_ranks) / cluster.gpu.nvlink_rate
    rail = kilobytes * over_rail / cluster.nic.rate
    sm = load * (nodes_per_token / num_nodes + 2 * over_rail + per_token) + store * (per_token + over_rail + topk)
    most = int(cluster.gpu.num_sms.value) // 4  # a rank alone has no link to fill; the experts need the others
    link = max(nvlink, rail)
    sms = most if link == 0 else min(most, max(1, math.ceil(sm / link - 1e-9)))
    return SmPlan(sms, cluster.name, per_token, nodes_per_token, sm, nvlink, rail)
