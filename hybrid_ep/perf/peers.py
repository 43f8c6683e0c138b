"""What others do with the same bytes: a flat all-to-all without dedup, and node dedup without pipelining.

All end with expert-major rows, so that they can be compared. The flat exchange permutes before it sends (one row a
(token, expert) pair) and sorts what arrives; the unpipelined one finishes the rail before it begins NVLink, and
permutes after that. Both get whatever SMs they need: only links and memory bind them, which favours them."""

from __future__ import annotations

from dataclasses import dataclass

from hybrid_ep.hardware.clusters import Cluster
from hybrid_ep.perf import model, routing
from hybrid_ep.perf.costs import RowCosts, hbm_us
from hybrid_ep.perf.implementations import HYBRID_EP
from hybrid_ep.perf.routing import Traffic
from hybrid_ep.perf.shape import Shape

NAMES = ("flat", "node_dedup", "hybrid_ep")


@dataclass(frozen=True)
class PeerTime:
    """One dispatch or combine. us: of the call. rail_rows, nvlink_rows: of a rank, one direction."""

    name: str
    us: float
    rail_rows: float
    nvlink_rows: float


def _fixed(cluster: Cluster, shape: Shape, launches: int) -> float:
    gpu = cluster.gpu
    return launches * gpu.launch_us.value + 2 * gpu.barrier_us.value + (gpu.skew_us.value if shape.nodes > 1 else 0.0)


def _messages(cluster: Cluster, shape: Shape, rows: float, row_us: float) -> float:
    return rows * row_us + cluster.nic.latency_us.value * (shape.nodes > 1)


def flat(op: str, shape: Shape, cluster: Cluster, dtype: str = "bf16") -> PeerTime:
    """Every pair's row from its rank straight to the expert's rank; links run at the same time."""
    cost = RowCosts.of(cluster, shape, HYBRID_EP, op, dtype)
    pairs = float(shape.tokens * shape.topk)
    rail = pairs * (1 - 1 / shape.nodes)
    nvlink = pairs / shape.nodes * (1 - 1 / shape.ranks_per_node)
    links = max(_messages(cluster, shape, rail, cost.nic), nvlink * cost.nvlink)
    permutes = hbm_us(cluster, (shape.tokens + pairs + 2 * pairs) * cost.row_bytes)  # before: T in, pairs out; after
    return PeerTime("flat", links + permutes + _fixed(cluster, shape, 4), rail, nvlink)


def node_dedup(
    op: str, shape: Shape, cluster: Cluster, dtype: str = "bf16", traffic: Traffic | None = None
) -> PeerTime:
    """The hierarchy's bytes, one phase after the other."""
    t = traffic or routing.uniform(shape)
    cost = RowCosts.of(cluster, shape, HYBRID_EP, op, dtype)
    rail = _messages(cluster, shape, max(t.rail_out, t.rail_in), cost.nic)
    permute = hbm_us(cluster, (t.received + t.pairs) * cost.row_bytes)
    return PeerTime(
        "node_dedup",
        rail + t.nvlink_rows * cost.nvlink + permute + _fixed(cluster, shape, 6),
        t.rail_out,
        t.nvlink_rows,
    )


def hybrid(
    op: str,
    shape: Shape,
    cluster: Cluster,
    dtype: str = "bf16",
    num_sms: int = 24,
    traffic: Traffic | None = None,
    cached: bool = False,
) -> PeerTime:
    """This library: num_sms blocks feed links, half as many again work locally. cached: on a handle that there was."""
    t = traffic or routing.uniform(shape)
    got = model.predict(op, shape, cluster, num_sms=num_sms, dtype=dtype, traffic=t, cached=cached)
    return PeerTime("hybrid_ep", got.api_us, t.rail_out, t.nvlink_rows)


def links_us(op: str, shape: Shape, cluster: Cluster, dtype: str = "bf16") -> float:
    """What the links need for the hierarchy's rows, rail and NVLink at the same time: microseconds that no exchange of
    NAMES beats."""
    t, cost = routing.uniform(shape), RowCosts.of(cluster, shape, HYBRID_EP, op, dtype)
    return max(max(t.rail_out, t.rail_in) * cost.nic, t.nvlink_rows * cost.nvlink)


def compare(op: str, shape: Shape, cluster: Cluster, dtype: str = "bf16", num_sms: int = 24) -> dict[str, PeerTime]:
    """All of NAMES."""
    return {
        "flat": flat(op, shape, cluster, dtype),
        "node_dedup": node_dedup(op, shape, cluster, dtype),
        "hybrid_ep": hybrid(op, shape, cluster, dtype, num_sms),
    }
