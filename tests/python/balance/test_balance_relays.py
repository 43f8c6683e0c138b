"""Who relays which expert to which node, in which round."""

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from hybrid_ep.balance.relays import Relay, relays


@st.composite
def plans(draw):
    """(slot_expert [R, S], owner [E], ranks a node): any clones, owners spread as they like."""
    nodes, width, slots = draw(st.integers(1, 5)), draw(st.integers(1, 4)), draw(st.integers(1, 3))
    ranks, experts = nodes * width, draw(st.integers(1, 12))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    owner = rng.integers(0, ranks, experts)
    hot = rng.permutation(experts)[: draw(st.integers(1, experts))]  # few experts have many clones
    slot_expert = rng.choice(np.append(hot, -1), (ranks, slots))
    for rank in range(ranks):  # a rank has no clone of its own experts
        slot_expert[rank, owner[slot_expert[rank]] == rank] = -1
    return slot_expert.astype(np.int32), owner, width


@given(plans())
def test_every_clone_is_relayed_once(plan):
    slot_expert, owner, width = plan
    found = [
        (relay.expert, relay.owner, rank, slot)
        for relay in itertools.chain(*relays(*plan))
        for node, clones in relay.nodes.items()
        for rank, slot in clones
        if rank // width == node
    ]
    wanted = [
        (expert, owner[expert], rank, slot) for (rank, slot), expert in np.ndenumerate(slot_expert) if expert >= 0
    ]
    assert sorted(found) == sorted(wanted)
    assert all(len({relay.expert for relay in one}) == len(one) for one in relays(*plan)), "an expert twice in a round"


@given(plans())
def test_a_round_holds_what_slots_hold(plan):
    slot_expert, owner, width = plan
    slots, most = slot_expert.shape[1], 0
    for relayed in relays(*plan):
        assert relayed, "a round of nothing"
        for home in {relay.owner // width for relay in relayed}:
            mine = [relay for relay in relayed if relay.owner // width == home]
            assert sum(len(relay.nodes) for relay in mine) <= width * slots
            assert max(sum(relay.owner == one for relay in mine) for one in {relay.owner for relay in mine}) <= slots
            most = max(most, len(mine))
    assert most or not relays(*plan)


def test_nodes_come_in_turn_from_the_owners_on():
    slot_expert = np.array([[5], [-1], [0], [5], [5], [0], [0], [5]])  # four nodes of two ranks, or one of eight
    owner = np.arange(8)  # expert 5 lives on node 2, expert 0 on node 0
    assert relays(slot_expert, owner, 2) == [
        [Relay(5, 5, {2: [(4, 0)], 3: [(7, 0)]}), Relay(0, 0, {1: [(2, 0)], 2: [(5, 0)]})],
        [Relay(5, 5, {0: [(0, 0)], 1: [(3, 0)]}), Relay(0, 0, {3: [(6, 0)]})],
    ]
    in_one = [Relay(5, 5, {0: [(0, 0), (3, 0), (4, 0), (7, 0)]}), Relay(0, 0, {0: [(2, 0), (5, 0), (6, 0)]})]
    assert relays(slot_expert, owner, 8) == [in_one]
    assert relays(np.full((8, 2), -1), owner, 2) == []
