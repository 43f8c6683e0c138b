"""The latency path over several nodes in the event engine: bytes on the NIC in closed form, what times must do, and a
lower bound by hand. The engine moves no payload on its clock; that the sums of the same kernels over nodes are right is
asked of explored worlds, which move every byte."""

import dataclasses
import math
import random

import pytest

from hybrid_ep import cli
from hybrid_ep.explorer import world
from hybrid_ep.hardware.clusters import CLUSTERS
from hybrid_ep.perf import latency_events, latency_shares
from hybrid_ep.perf.shape import Shape

H100 = CLUSTERS["h100_8x400g"]
SHAPE = Shape(ranks=8, ranks_per_node=4, tokens=16, hidden=2048, topk=4, experts=32)
SMS = 16


def times(cluster=H100, sms=SMS, **changes):
    return latency_events.measure(SHAPE.with_(**changes), cluster, num_sms=sms)


def with_nic(**factors):
    """H100s whose NIC has some of its numbers multiplied."""
    values = {name: getattr(H100.nic, name) for name in factors}
    changed = {name: was._replace(value=was.value * factors[name]) for name, was in values.items()}
    return dataclasses.replace(H100, nic=dataclasses.replace(H100.nic, **changed))


def drawn(shape, seed=1):
    """By rank a flat list of distinct experts a token."""
    rng = random.Random(seed)
    tokens = range(shape.tokens)
    return [[e for _ in tokens for e in rng.sample(range(shape.experts), shape.topk)] for _ in range(shape.ranks)]


def spec_of(shape, **settings):
    return world.spec_of(
        num_nodes=shape.nodes,
        num_local_ranks=shape.ranks_per_node,
        experts_per_rank=shape.local_experts,
        tokens=shape.tokens,
        topk=shape.topk,
        hidden=shape.hidden,
        num_blocks=SMS,
        latency=2,
        latency_warps=4,
        smem_bytes=128 * 1024,
        **settings,
    )


def rows_out(shape, choices):
    """By rank: its tokens' rows for other nodes, one a token and node."""
    of_node = shape.experts // shape.nodes
    found = []
    for rank, flat in enumerate(choices):
        own = rank // shape.ranks_per_node
        tokens = [flat[t : t + shape.topk] for t in range(0, len(flat), shape.topk)]
        found.append(sum(len({e // of_node for e in chosen} - {own}) for chosen in tokens))
    return found


def up(n, to):
    return -(-n // to) * to


def message_bytes(shape):
    """Of a token on the rail of a dispatch: its record, weights and row."""
    record = up(16 + 8 * min(shape.topk, shape.ranks_per_node) + 8 * shape.topk, 16)
    return record + up(4 * shape.topk, 16) + 2 * shape.hidden


def run(shape, choices, cluster=H100, **settings):
    got = world.measure(spec_of(shape, **settings), latency_events.line_costs(cluster, shape, SMS, 4), topk_idx=choices)
    world.require_whole(got)
    return got


@pytest.mark.parametrize("nodes", [2, 3])
def test_the_nic_carries_a_row_once_a_node_each_way(nodes):
    shape = SHAPE.with_(ranks=4 * nodes, experts=16 * nodes)
    choices = drawn(shape)
    vector = up(4 * (16 + shape.ranks + shape.nodes + shape.experts), 64)
    there = [rows * message_bytes(shape) + (nodes - 1) * vector for rows in rows_out(shape, choices)]
    assert run(shape, choices, combine=0).link_bytes()["nic_egress"] == dict(enumerate(there))
    # What came from a rail peer goes back to it as a sum of the node; timed combines return no weights.
    back = {rank: 0 for rank in range(shape.ranks)}
    of_node = shape.experts // nodes
    for rank, flat in enumerate(choices):
        node, local = divmod(rank, shape.ranks_per_node)
        for t in range(0, len(flat), shape.topk):
            for other in {e // of_node for e in flat[t : t + shape.topk]} - {node}:
                back[other * shape.ranks_per_node + local] += 2 * shape.hidden
    both = run(shape, choices).link_bytes()["nic_egress"]
    assert both == {rank: there[rank] + back[rank] for rank in back}


def test_times_are_the_same_every_time():
    few = times()
    assert few == times() and few.nic_us > 0


def test_times_grow_with_tokens_and_with_nodes():
    few, more = times(), times(tokens=64)
    wide = times(ranks=16)
    for grown in (more, wide):
        assert few.dispatch_us < grown.dispatch_us and few.combine_us < grown.combine_us
        assert few.nic_bytes < grown.nic_bytes


def test_a_node_more_takes_longer_than_one_domain():
    one = times(ranks_per_node=8)
    two = times()
    assert (one.nic_bytes, one.nic_us) == (0, 0.0)
    latency_us = H100.nic.latency_us.value
    assert two.dispatch_us > one.dispatch_us + latency_us and two.combine_us > one.combine_us + latency_us


def test_a_better_nic_lowers_times():
    changes = {"tokens": 64, "hidden": 7168, "sms": 64}  # fewer are bound by what their warps issue
    slow = times(**changes)
    for better in (with_nic(gb_per_s=2), with_nic(latency_us=0.5), with_nic(post_us=0.5)):
        fast = times(better, **changes)
        assert fast.dispatch_us < slow.dispatch_us and fast.combine_us < slow.combine_us
    assert times(with_nic(gb_per_s=2), **changes).nic_us == pytest.approx(slow.nic_us / 2, rel=0.01)


def test_no_dispatch_is_faster_than_its_busiest_nic_and_its_hops():
    """By hand: a post, then the bytes of the busiest rank's rows at the NIC's rate, the last of which crosses the rail
    and then, as lines, the node."""
    shape = SHAPE.with_(tokens=64, hidden=7168)
    choices = drawn(shape)
    bytes_us = max(rows_out(shape, choices)) * message_bytes(shape) / (H100.nic.rate * 1e3)
    least_us = H100.nic.post_us.value / 2 + bytes_us + H100.nic.latency_us.value
    took_us = run(shape, choices).operation_us("latency_dispatch")
    assert least_us < took_us < 3 * least_us


def test_no_combine_is_faster_than_a_hop_in_the_node_and_one_on_the_rail():
    """By hand: a line of a partial row crosses the node, then the busiest NIC sends the node's sums, as many as rows
    came to it, and the last of them crosses the rail."""
    shape = SHAPE.with_(tokens=64, hidden=7168)
    choices = drawn(shape)
    costs = latency_events.line_costs(H100, shape, SMS, 4)
    bytes_us = max(rows_out(shape, choices)) * 2 * shape.hidden / (H100.nic.rate * 1e3)  # of two nodes: out as in
    least_us = costs["nvlink_latency_ps"] / 1e6 + H100.nic.post_us.value / 2 + bytes_us + H100.nic.latency_us.value
    took_us = run(shape, choices).operation_us("latency_combine")
    assert least_us < took_us < 3 * least_us


@pytest.mark.parametrize("nodes, local", [(2, 2), (3, 2), (4, 1)])
def test_every_bit_is_right_over_nodes(nodes, local):
    """The same kernels where bytes are moved: dispatched rows and sums are compared with the oracle, bit by bit."""
    for seed, strategy in enumerate(world.STRATEGIES):
        got = world.explore(
            world.spec_of(
                num_nodes=nodes, num_local_ranks=local, experts_per_rank=2, tokens=5, topk=3, hidden=128, num_blocks=2,
                latency=2, latency_warps=2, rounds=2, seed=seed, data_seed=seed, strategy=strategy,
            )
        )  # fmt: skip
        assert got.failure is None, (strategy, got.failure)


def test_both_paths_and_handles_of_either_take_turns_on_the_clock():
    shape = SHAPE.with_(hidden=512)
    choices = drawn(shape)
    spec = spec_of(shape, rounds=3, plans=2) | {"latency": 1, "data_seed": 1}
    got = world.measure(spec, latency_events.line_costs(H100, shape, SMS, 4), topk_idx=choices)
    world.require_whole(got)
    assert {"latency_dispatch", "latency_combine", "dispatch", "combine"} <= {k.name for k in got.kernels}


def test_a_finer_cut_costs_a_simulated_warp_no_more():
    # 16 rows on 2048 warps: at most 30 shares a row, less than one a warp; a simulated warp for four has four of 120.
    assert latency_shares.shares(16, 120, 4, 1, 2048) == 1
    assert latency_shares.shares(16, 120, 1, 1, 512) == pytest.approx(3.75, abs=0.3)
    # Where there are many rows both have the same.
    assert latency_shares.shares(512, 120, 4, 1, 512) == latency_shares.shares(128, 120, 1, 1, 128) == 4
    costs = latency_events.line_costs(H100, SHAPE, 128, 4)
    look_ps = round(H100.gpu.flag_us.value * 1e6)
    assert look_ps / 4 <= costs["combine_signal_ps"] < look_ps and math.isclose(
        costs["dispatch_count_ps"], look_ps + H100.gpu.fence_us.value * 1e6
    )
    assert "combine_signal_ps" not in latency_events.line_costs(H100, SHAPE.with_(ranks_per_node=8), 128, 4)


def test_the_command_says_what_the_nic_does(capsys):
    flags = "simulate --path latency --nodes 2 --ranks-per-node 2 --tokens 8 --experts 16 --num-sms 8"
    assert cli.main(flags.split()) == cli.EXIT_OK
    said = capsys.readouterr().out
    assert "4 ranks of 2 x 2" in said and "of the busiest NIC" in said
