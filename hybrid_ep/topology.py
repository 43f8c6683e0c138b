"""Which rank lives on which node: num_nodes x num_local_ranks, numbered node by node."""

from __future__ import annotations

from dataclasses import dataclass

from hybrid_ep import env

_REMEDY = ("give num_of_hybrid_ep_ranks_per_nvlink_domain or set HYBRID_EP_RANKS_PER_NODE to the same divisor of the "
           "group's size on every rank")


@dataclass(frozen=True)
class Topology:
    rank: int
    num_ranks: int
    num_local_ranks: int

    @property
    def num_nodes(self) -> int:
        return self.num_ranks // self.num_local_ranks

    @property
    def node(self) -> int:
        return self.rank // self.num_local_ranks

    @property
    def local_rank(self) -> int:
        return self.rank % self.num_local_ranks


def requested_ranks_per_node(argument: int | None) -> tuple[int | None, str]:
    """(ranks per node or None, where the number comes from): the argument, else the environment."""
    if argument is not None:
        if isinstance(argument, bool) or not isinstance(argument, int) or argument < 1:
            raise ValueError(f"num_of_hybrid_ep_ranks_per_nvlink_domain={argument!r} must be a positive integer; "
                             + _REMEDY)
        return argument, "num_of_hybrid_ep_ranks_per_nvlink_domain"
    for name in ("HYBRID_EP_RANKS_PER_NODE", "NUM_OF_HYBRID_EP_RANKS_PER_NVLINK_DOMAIN"):
        if (value := env.get(name)) is not None:
            return value, name
    return None, "the ranks of one host"


def resolve(rank: int, hosts: list[str], ranks_per_node: int | None, origin: str) -> Topology:
    """The topology that all ranks see. hosts: host name of every rank; ranks_per_node: None means that a host
    is a node. ValueError when the ranks of a host are not neighbours or the hosts have different numbers of
    ranks."""
    num_ranks = len(hosts)
    if ranks_per_node is None:
        ranks_per_node = hosts.count(hosts[0])
        blocks = [hosts[i:i + ranks_per_node] for i in range(0, num_ranks, ranks_per_node)]
        if num_ranks % ranks_per_node or any(len(set(b)) != 1
                                             for b in blocks) or len(set(hosts)) != len(blocks):
            raise ValueError(f"the group's ranks lie on hosts {hosts}, which is not the same number of neighbouring "
                             f"ranks on every host; {_REMEDY}")
    if num_ranks % ranks_per_node:
        raise ValueError(f"{origin}={ranks_per_node} does not divide the group's {num_ranks} ranks; {_REMEDY}")
    return Topology(rank, num_ranks, ranks_per_node)
