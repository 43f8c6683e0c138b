"""How weights come from the owner of an expert to its clones: in stripes, over all ranks of a node and all of its NICs.

An owner that sent every clone its weights would send all of them through its own port and its own NIC. With L ranks a
node, stripe j of an expert goes

    owner ─ NVLink ─► rank j of the owner's node ─ its NIC ─► rank j of the clones' node ─ NVLink ─► every clone there

so that a node gets an expert once, however many clones of it lie there, and a NIC carries 1 / L of it. Gradients go the
same way back, summed where ways meet. Rank j of one node talks to rank j of another, along the rail.

Who sends what follows from the plan alone, which all ranks have.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Relay:
    """An expert with clones, for some of the nodes that have some.

    nodes: in their order from the owner's on, going round: owners on different nodes begin with different ones. Of each
    the clones there, (rank, slot) ascending.
    """

    expert: int
    owner: int
    nodes: dict[int, list[tuple[int, int]]]


def relays(slot_expert: Any, owner: Any, ranks_per_node: int) -> list[list[Relay]]:
    """The relays of a plan, in rounds that end one after the other; [] for a plan without clones.

    slot_expert: int [R, S], -1 for an empty slot; owner: int [E], the rank of each expert. A round has of every owner
    at most S relays, and of the experts of a node at most as many (expert, node) pairs as it has slots; an expert with
    clones on more nodes has several relays. So what a rank holds for others in a round is what its own slots hold.
    """
    slot_expert, owner = np.asarray(slot_expert), np.asarray(owner)
    ranks, slots = np.nonzero(slot_expert >= 0)
    experts = slot_expert[ranks, slots]
    num_nodes, num_slots = len(slot_expert) // ranks_per_node, slot_expert.shape[1]
    clones: dict[int, dict[int, list[tuple[int, int]]]] = {}
    for expert, rank, slot in zip(experts.tolist(), ranks.tolist(), slots.tolist(), strict=True):
        clones.setdefault(expert, {}).setdefault(rank // ranks_per_node, []).append((rank, slot))
    rounds: list[list[Relay]] = []
    filled: dict[int, tuple[int, int, dict[int, int]]] = {}  # node -> (its last round, pairs, experts of each owner)
    for expert, found in clones.items():
        home = int(owner[expert]) // ranks_per_node
        nodes = {node: found[node] for node in sorted(found, key=lambda node: (node - home) % num_nodes)}
        for part in _parts(list(nodes.items()), ranks_per_node * num_slots):
            relay = Relay(expert, int(owner[expert]), dict(part))
            number, pairs, of_owner = filled.get(home, (0, 0, {}))
            count = of_owner.get(relay.owner, 0)
            if pairs + len(part) > ranks_per_node * num_slots or count == num_slots:
                number, pairs, of_owner, count = number + 1, 0, {}, 0
            of_owner[relay.owner] = count + 1
            filled[home] = number, pairs + len(part), of_owner
            if number == len(rounds):
                rounds.append([])
            rounds[number].append(relay)
    return rounds


def _parts(nodes: list[Any], most: int) -> list[list[Any]]:
    return [nodes[i : i + most] for i in range(0, len(nodes), most)]
