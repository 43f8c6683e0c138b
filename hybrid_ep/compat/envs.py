"""deep_ep.get_physical_domain_size and get_logical_domain_size: what ElasticBuffer's methods of these names say, of a
group that needs no buffer for it. Of deep_ep.utils.envs no more is served: the rest sets up deep_ep's own tests, or
reads the speed of links from nvidia-smi and ibstat."""

from __future__ import annotations

import weakref
from typing import Any

from hybrid_ep.compat import hybrid
from hybrid_ep.runtime import options, places, topology
from hybrid_ep.runtime.bootstrap import GroupView

# What was found of a group that is still in use.
_known: weakref.WeakKeyDictionary[Any, dict[places.Asked, places.Places]] = weakref.WeakKeyDictionary()


def get_physical_domain_size(group: Any) -> tuple[int, int]:
    """(nodes, ranks of a node) that the ranks of a process group lie on: by HYBRID_EP_RANKS_PER_NODE, else NVLink
    domains on GPUs and hosts elsewhere.

    Collective when it, or get_logical_domain_size, is first called for a group; later calls answer at once. ValueError
    for what is no group of this rank, and on every rank where the group has different numbers of ranks in its nodes or
    its ranks were told different things; BootstrapError names ranks that have not come by HYBRID_EP_TIMEOUT_S."""
    view = GroupView.of(group)
    known = _known.setdefault(group, {})
    found = places.find(view, _asked, known, "get_physical_domain_size", "HYBRID_EP_RANKS_PER_NODE")
    seen = found.topology(view.rank)
    return seen.num_nodes, seen.num_local_ranks


def get_logical_domain_size(group: Any, allow_hybrid_mode: bool = True) -> tuple[int, int]:
    """get_physical_domain_size's answer, collective and with its errors; without allow_hybrid_mode (1, all ranks)."""
    return logical(get_physical_domain_size(group), allow_hybrid_mode)


def logical(physical: tuple[int, int], allow_hybrid_mode: bool) -> tuple[int, int]:
    """(scale-out ranks, scale-up ranks) of (nodes, ranks of a node)."""
    nodes, local = physical
    return (nodes, local) if allow_hybrid_mode else (1, nodes * local)


def _asked(view: GroupView) -> places.Asked:
    declared, origin = topology.requested_ranks_per_node(None)
    return places.Asked(hybrid.HybridEPBuffer._asked_executor(None, view), declared, origin, options.seconds(None))
