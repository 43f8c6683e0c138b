"""DeepEP V1's published rates, and of which exchange each may be asked: its kernels have no model here.

Inside one NVLink domain a rate is that of the links, so it holds on the GPU that it was measured on alone. Between
nodes it holds for every GPU of the generation with such a NIC, at that size of the group, unless NVLink bound it: that
of H800, whose rates the documentation of DeepEP V1 has, is a third of H100's."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from hybrid_ep.hardware import clusters
from hybrid_ep.hardware.clusters import Cluster
from hybrid_ep.perf import published
from hybrid_ep.perf.routing import Traffic
from hybrid_ep.perf.shape import Shape

NUM_SMS = 24  # of every rate here
# bf16, logical GB/s published in Hybrid-EP's README; GB200 at EP24, B200 at EP8.
_README = {
    ("gb200_nvl72", "dispatch"): 450.0,
    ("gb200_nvl72", "combine"): 163.0,
    ("b200_8x400g", "dispatch"): 494.0,
    ("b200_8x400g", "combine"): 420.0,
}
_README_EP = {"gb200_nvl72": 24, "b200_8x400g": 8}
_SOURCE = "DeepEP V1 docs"


class Rate(NamedTuple):
    """gb_per_s: logical, of a token once per rank that needs it or, `of_nodes`, once per node, its own included. said:
    where it is from."""

    gb_per_s: float
    of_nodes: bool
    said: str

    def us(self, traffic: Traffic, tokens: int, row_bytes: float) -> float:
        """Of an operation whose rows have so many bytes, microseconds."""
        rows = traffic.nodes_per_token * tokens if self.of_nodes else traffic.received
        return rows * row_bytes / (self.gb_per_s * 1e3)


@lru_cache(maxsize=256)
def rate(op: str, shape: Shape, cluster_name: str) -> Rate:
    """ValueError where none is published that this exchange could have."""
    cluster = clusters.get(cluster_name)
    if shape.nodes == 1 and (cluster_name, op) in _README:
        where = f"Hybrid-EP README: {cluster.gpu.name} at EP {_README_EP[cluster_name]}"
        return Rate(_README[cluster_name, op], False, where)
    for row in published.rows():
        if row.source == _SOURCE and (row.op, row.ranks, row.ranks_per_node) == (op, shape.ranks, shape.ranks_per_node):
            theirs = published.cluster_of(row)
            if theirs == cluster or (_between_nodes_alike(cluster, theirs) and published.answer(row).binds == "NIC"):
                said = f"{_SOURCE}: {row.gpu} at EP {row.ranks}, {row.dtype}, {row.note.rpartition('; ')[2]}"
                return Rate(row.gb_per_s, row.basis.startswith("rdma"), said)
    raise ValueError(
        f"dispatcher='deepep_v1': no published rate on {cluster_name} at EP {shape.ranks} in domains of "
        f"{shape.ranks_per_node}; use another dispatcher"
    )


def _between_nodes_alike(one: Cluster, other: Cluster) -> bool:
    return one.gpu.generation == other.gpu.generation and one.nic.rate == other.nic.rate
