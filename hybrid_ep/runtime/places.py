"""Where the ranks of a group lie, found without a buffer, as one would find it (`options.Options.agree`)."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass, field

from hybrid_ep.runtime import devices, options, topology
from hybrid_ep.runtime.bootstrap import GroupView, Rendezvous, agree

_TOPIC = "places"


@dataclass(frozen=True)
class Asked:
    """What this rank was told. ranks_per_node: of the whole job, None where nobody declared any; origin: who declared
    it; timeout_s: deadline of every wait in seconds, on which nothing else depends."""

    executor: str
    ranks_per_node: int | None
    origin: str
    timeout_s: float = field(compare=False)


@dataclass(frozen=True)
class Places:
    """The same on every rank. hosts and world_ranks: of every rank its host's name and its number in the job. domains:
    of every rank the first one of its NVLink domain; None where they were not looked for: on hosts, with NVSHMEM asked
    for by name, among virtual ranks, and where a number is declared."""

    asked: Asked
    hosts: list[str]
    world_ranks: list[int]
    domains: list[int] | None

    def topology(self, rank: int) -> topology.Topology:
        """As rank sees it. ValueError, on every rank, where nodes have different numbers of ranks or ranks of a node
        are no neighbours."""
        asked = self.asked
        return topology.resolve(rank, self.hosts, asked.ranks_per_node, asked.origin, self.world_ranks, self.domains)


def find(
    view: GroupView, ask: Callable[[GroupView], Asked], known: MutableMapping[Asked, Places], who: str, declared_by: str
) -> Places:
    """The group's places. known: what was found for this group before, by what was asked; it is added to. Collective
    where it holds no answer, through the group's store.

    ask: what this rank was told; its ValueError is raised on all ranks. who, declared_by: name the caller and the
    option of ranks per node, where ranks were told different things (ValueError on all of them). BootstrapError when
    ranks are missing."""
    try:
        asked = ask(view)
        if asked in known:
            return known[asked]
        probed = asked.ranks_per_node is None and devices.is_probed(asked.executor) and not view.virtual
        device = options.machine(asked.executor)[1] if probed else None
    except Exception as error:
        with contextlib.suppress(Exception):  # the first error is what the caller must hear of
            Rendezvous(view, 0.0).refuse(_TOPIC, error)
        raise
    meet = Rendezvous(view, asked.timeout_s)
    must_agree = {declared_by: asked.ranks_per_node, "executor": asked.executor}
    said = {"host": socket.gethostname(), "world_rank": view.world_rank, "must_agree": must_agree}
    answers = meet.exchange(_TOPIC, said)
    agree([f["must_agree"] for f in answers], who)
    domains = None if device is None else devices.probe(meet, device).domains()
    hosts, world_ranks = [f["host"] for f in answers], [f["world_rank"] for f in answers]
    known[asked] = Places(asked, hosts, world_ranks, domains)
    return known[asked]
