"""Which rank lives on which node: num_nodes x num_local_ranks, numbered node by node.

A node is one NVLink domain. Where nobody says how many ranks it has, GPUs that really mapped one another's memory are
one, however many hosts they lie on; elsewhere a host is a node. A declared number speaks of the machine, not of a
group: ranks n * N to n * N + N - 1 of the whole job are node n, as launchers number them. A group may then be any
choice of ranks (every second one under tensor parallelism, say): its ranks of one node are neighbours in it, and every
node that it touches holds the same number of them. A group inside one node is one node, whatever the number."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from hybrid_ep import env

_REMEDY = (
    "give num_of_hybrid_ep_ranks_per_nvlink_domain or set HYBRID_EP_RANKS_PER_NODE to the same number of ranks "
    "on every rank, such that the group has equally many in every node that it touches"
)


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

    @property
    def ranks_of_node(self) -> range:
        """Of this rank's node, in the order of their local ranks."""
        first = self.node * self.num_local_ranks
        return range(first, first + self.num_local_ranks)


def requested_ranks_per_node(argument: int | None) -> tuple[int | None, str]:
    """(ranks per node or None, where the number comes from): the argument, else the environment."""
    if argument is not None:
        if isinstance(argument, bool) or not isinstance(argument, int) or argument < 1:
            raise ValueError(
                f"num_of_hybrid_ep_ranks_per_nvlink_domain={argument!r} must be a positive integer; " + _REMEDY
            )
        return argument, "num_of_hybrid_ep_ranks_per_nvlink_domain"
    for name in ("HYBRID_EP_RANKS_PER_NODE", "NUM_OF_HYBRID_EP_RANKS_PER_NVLINK_DOMAIN"):
        if (value := env.get(name)) is not None:
            return value, name
    return None, "the ranks of one host"


def local_ranks(
    world_ranks: Sequence[int], ranks_per_node: int, origin: str, hosts: Sequence[str] | None = None
) -> int:
    """How many ranks of a group share a node, where a node has `ranks_per_node` ranks of the whole job.

    world_ranks: the job's rank of every rank of the group, in the group's order. hosts: their host names, where they
    are known. ValueError when the group's ranks of one node are not neighbours or the nodes have different numbers of
    them, and when nodes and hosts cut across each other, which means that ranks are not numbered host by host."""
    nodes = [rank // ranks_per_node for rank in world_ranks]
    sizes = _blocks(nodes)
    if sizes is None:
        raise ValueError(
            f"{origin}={ranks_per_node} puts the group's ranks {list(world_ranks)} on nodes {nodes}, "
            f"which is not the same number of neighbouring ranks on every node; {_REMEDY}"
        )
    if hosts is not None:
        _check_numbering(nodes, hosts, f"{origin}={ranks_per_node}")
    return sizes


def resolve(
    rank: int,
    hosts: Sequence[str],
    ranks_per_node: int | None,
    origin: str,
    world_ranks: Sequence[int] | None = None,
    domains: Sequence[int] | None = None,
) -> Topology:
    """The topology that all ranks see. hosts: host name of every rank; ranks_per_node: None means that an NVLink domain
    is a node, or a host, where domains are not known. domains: of every rank the first rank of its NVLink domain.
    world_ranks: the job's rank of every rank (None: the group is the job). ValueError when the ranks of a node are not
    neighbours or the nodes have different numbers of ranks."""
    world_ranks = range(len(hosts)) if world_ranks is None else world_ranks
    if ranks_per_node is not None:
        return Topology(rank, len(hosts), local_ranks(world_ranks, ranks_per_node, origin, hosts))
    size = _blocks(hosts if domains is None else domains)
    if size is None and domains is not None:
        raise ValueError(
            f"the group's ranks lie in NVLink domains that begin with ranks {list(domains)}, which is not "
            f"the same number of neighbouring ranks in every domain; {_REMEDY}"
        )
    if size is None:
        raise ValueError(
            f"the group's ranks lie on hosts {list(hosts)}, which is not the same number of neighbouring "
            f"ranks on every host; {_REMEDY}"
        )
    return Topology(rank, len(hosts), size)


def warn_of_cut_domains(found: Topology, domains: Sequence[int], declared: str) -> None:
    """A declared number may be smaller than the domain: right, but ranks of one NVLink domain then meet over the rail,
    which one warp a block serves, and not over NVLink's pipelines."""
    largest = max(domains.count(first) for first in set(domains))
    if largest > found.num_local_ranks:
        warnings.warn(
            f"{declared} cuts an NVLink domain into nodes: {largest} ranks of this group share it, "
            f"{found.num_local_ranks} of them a node; leave the number out to reach them all over NVLink",
            stacklevel=2,
        )


def _blocks(places: Sequence) -> int | None:
    """Length of the runs of equal places when all are equally long and no place comes twice, else None."""
    runs = [(place, len(list(run))) for place, run in groupby(places)]
    lengths = {length for _, length in runs}
    return lengths.pop() if len(lengths) == 1 and len({place for place, _ in runs}) == len(runs) else None


def _check_numbering(nodes: Sequence[int], hosts: Sequence[str], declared: str) -> None:
    """A node is a part of a host or a union of whole hosts; anything else is a job numbered across its hosts."""
    pairs = set(zip(nodes, hosts, strict=True))
    hosts_of = {node: {h for n, h in pairs if n == node} for node, _ in pairs}
    nodes_of = {host: {n for n, h in pairs if h == host} for _, host in pairs}
    for node, host in sorted(pairs):
        if len(hosts_of[node]) > 1 and len(nodes_of[host]) > 1:
            raise ValueError(
                f"{declared}: node {node} has ranks of hosts {sorted(hosts_of[node])}, and host {host!r} "
                f"has ranks of nodes {sorted(nodes_of[host])}; let the launcher number ranks host by host "
                "(Slurm: --distribution=block), or leave the number out: a host is a node then"
            )
