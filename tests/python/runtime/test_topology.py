"""Which ranks of a group share a node: properties over arbitrary jobs and groups, and the cases that people meet."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybrid_ep.runtime import topology


def slow_local_ranks(world_ranks, ranks_per_node):
    """The rule, word for word: None, or ranks per node such that group rank r is on the (r // L)-th node."""
    nodes = [rank // ranks_per_node for rank in world_ranks]
    for size in range(1, len(nodes) + 1):
        if len(nodes) % size:
            continue
        blocks = [set(nodes[i : i + size]) for i in range(0, len(nodes), size)]
        alone = all(len(block) == 1 for block in blocks)
        if alone and len(set().union(*blocks)) == len(blocks):
            return size
    return None


@settings(deadline=None, max_examples=300)
@given(st.lists(st.integers(0, 40), min_size=1, max_size=12, unique=True), st.integers(1, 16), st.booleans())
def test_any_group_of_a_job(world_ranks, ranks_per_node, in_order):
    world_ranks = sorted(world_ranks) if in_order else world_ranks
    want = slow_local_ranks(world_ranks, ranks_per_node)
    hosts = [f"host{rank // ranks_per_node}" for rank in world_ranks]
    for declared in (ranks_per_node, None):  # hosts of that many ranks say the same as the number
        if want is None:
            with pytest.raises(ValueError, match="same number of neighbouring ranks"):
                topology.resolve(0, hosts, declared, "x", world_ranks)
            continue
        for rank in range(len(world_ranks)):
            found = topology.resolve(rank, hosts, declared, "x", world_ranks)
            assert found.num_local_ranks == want and found.num_nodes * want == len(world_ranks)
            mates = [r for r in range(len(world_ranks)) if hosts[r] == hosts[rank]]
            assert mates == list(found.ranks_of_node)
            assert mates == [found.node * want + i for i in range(want)] and rank == mates[found.local_rank]


@settings(deadline=None, max_examples=100)
@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 3), st.integers(1, 8))
def test_groups_of_megatron_strides(tensor, expert, pipeline, ranks_per_node):
    """Every tp x pp x ep group of a job agrees with where its ranks are, or is refused because they straddle."""
    ranks = range(tensor * expert * pipeline)
    for offset in range(tensor):
        group = [rank for rank in ranks if rank % tensor == offset]
        nodes = [rank // ranks_per_node for rank in group]
        counts = {nodes.count(node) for node in nodes}
        if len(counts) == 1:
            assert topology.local_ranks(group, ranks_per_node, "x") == counts.pop()
        else:
            with pytest.raises(ValueError, match="x="):
                topology.local_ranks(group, ranks_per_node, "x")


@pytest.mark.parametrize(
    "world_ranks, ranks_per_node, want",
    [
        ([0, 1, 2, 3], 8, 4),  # a group smaller than a node
        ([5], 2, 1),
        ([0, 2, 4, 6], 8, 4),  # every second rank of a node: tensor parallelism of 2 inside it
        ([0, 2, 4, 6, 8, 10, 12, 14], 8, 4),  # the same over two nodes; 8 divides the group and is not the answer
        ([4, 5, 6, 7, 8, 9, 10, 11], 8, 4),
        (range(16), 8, 8),
    ],
)
def test_cases(world_ranks, ranks_per_node, want):
    assert topology.local_ranks(list(world_ranks), ranks_per_node, "x") == want


def test_uneven_groups_are_refused_by_name():
    with pytest.raises(ValueError, match=r"flag=4 puts the group's ranks \[3, 4, 5, 6\] on nodes \[0, 1, 1, 1\]"):
        topology.local_ranks([3, 4, 5, 6], 4, "flag")
    with pytest.raises(ValueError, match="neighbouring"):  # as many on every node, but not next to each other
        topology.local_ranks([0, 4, 1, 5], 4, "flag")


def test_a_domain_may_span_hosts_and_a_host_may_hold_domains():
    spans = topology.resolve(5, ["a"] * 4 + ["b"] * 4, 8, "x")
    assert (spans.num_nodes, spans.num_local_ranks, spans.local_rank) == (1, 8, 5)
    holds = topology.resolve(5, ["a"] * 8, 4, "x")
    assert (holds.num_nodes, holds.node, holds.local_rank) == (2, 1, 1)


def test_ranks_that_are_numbered_across_hosts_are_refused():
    with pytest.raises(ValueError, match="host by host"):
        topology.resolve(0, ["a", "b"] * 4, 4, "x")
