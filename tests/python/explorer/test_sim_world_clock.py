"""Simulated worlds on a virtual clock: deterministic, bytes of every link in closed form, times that add up."""

from __future__ import annotations

import collections
import random

import pytest

from hybrid_ep.explorer.world import explore, measure, spec_of

NODES, LOCAL, EXPERTS, TOPK, TOKENS, HIDDEN = 3, 2, 4, 3, 40, 512
SHAPE = {"num_nodes": NODES, "num_local_ranks": LOCAL, "experts_per_rank": EXPERTS, "topk": TOPK, "tokens": TOKENS,
         "hidden": HIDDEN, "chunk_tokens": 8, "num_blocks": 2, "smem_bytes": 64 * 1024}  # fmt: skip
COSTS = {
    "launch_ps": 2_000_000, "s2g_destination_ps": 20_000, "sum_row_ps": 20_000, "barrier_ps": 20_000, "wake_ps": 30_000,
    "poll_ps": 400_000, "flag_ps": 200_000, "tma_read_mbps": 200_000, "tma_write_mbps": 200_000, "tma_op_ps": 10_000,
    "tma_latency_ps": 700_000, "reduce_mbps": 200_000, "round_mbps": 400_000, "hbm_mbps": 3_000_000,
    "nvlink_egress_mbps": 400_000, "nvlink_ingress_mbps": 400_000, "nvlink_latency_ps": 500_000, "nic_mbps": 50_000,
    "nic_message_ps": 10_000, "nic_post_ps": 300_000, "nic_latency_ps": 3_000_000,
}  # fmt: skip


def routing(seed=1):
    """By rank: a flat list of distinct experts per token."""
    rng = random.Random(seed)
    experts = range(NODES * LOCAL * EXPERTS)
    return [[e for _ in range(TOKENS) for e in rng.sample(experts, TOPK)] for _ in range(NODES * LOCAL)]


def up(n, to):
    return (n + to - 1) // to * to


def test_the_clock_is_deterministic_and_ignores_seeds():
    a, b = (measure(spec_of(**SHAPE, seed=seed), COSTS, topk_idx=routing()) for seed in (1, 2))
    assert a.failure is None and a.kernels == b.kernels and a.links == b.links
    assert a.operation_us("dispatch") > 10


@pytest.mark.parametrize("landing", [0, 1, 2])
def test_bytes_of_every_link_are_the_closed_form(landing):
    idx = routing()
    world = measure(spec_of(**SHAPE, combine=0, landing=landing), COSTS, topk_idx=idx)
    assert world.failure is None
    record = up(16 + 8 * min(TOPK, LOCAL) + 8 * TOPK, 16)
    token_bytes = record + up(4 * TOPK, 16) + 2 * HIDDEN
    vector = up(4 * (16 + NODES * LOCAL + NODES + NODES * LOCAL * EXPERTS), 64)
    nic, nvlink = [0] * (NODES * LOCAL), [0] * (NODES * LOCAL)
    for rank, flat in enumerate(idx):
        node, local = divmod(rank, LOCAL)
        nic[rank] += (NODES - 1) * vector
        for t in range(TOKENS):
            ranks = collections.Counter(e // EXPERTS for e in flat[t * TOPK : (t + 1) * TOPK])
            nic[rank] += token_bytes * len({r // LOCAL for r in ranks} - {node})
            for dst, pairs in ranks.items():  # sent by the rank of the source's rail in the destination's node
                forwarder, rows = dst // LOCAL * LOCAL + local, pairs if landing == 1 else 1
                nvlink[forwarder] += (token_bytes + (rows - 1) * 2 * HIDDEN) * (forwarder != dst)
    links = world.link_bytes()
    assert links["nic_egress"] == dict(enumerate(nic))
    assert links["nvlink_egress"] == dict(enumerate(nvlink))
    assert sum(links["nic_ingress"].values()) == sum(nic)


def test_bytes_on_the_clock_are_those_of_the_real_counters():
    """The same world has the same puts in both modes (weights go back in exploration only)."""
    spec = spec_of(**SHAPE, weights=0)
    log = explore(spec, log=True, topk_idx=routing()).log
    put = sum(int(line.split(" puts ")[1].split()[0]) for line in log if " puts " in line)
    assert put == sum(measure(spec, COSTS, topk_idx=routing()).link_bytes()["nic_egress"].values())


def test_free_machine_takes_no_time():
    world = measure(spec_of(**SHAPE), {})
    assert world.failure is None and {k.time_us for k in world.kernels} == {0.0}


def test_a_link_is_busy_for_its_bytes_and_bounds_the_kernel():
    world = measure(spec_of(**SHAPE, combine=0), {"nic_mbps": 1000}, topk_idx=routing())
    for link in (link for link in world.links if link.name.startswith("nic")):
        assert link.busy_us == pytest.approx(link.num_bytes / 1000, rel=1e-3)
    busiest = max(link.busy_us for link in world.links if link.name == "nic_egress")
    whole = world.operation_us("exchange", "dispatch")
    assert busiest <= whole <= 2 * busiest


@pytest.mark.parametrize("cost, slower", [
    ("nic_mbps", 5_000), ("tma_write_mbps", 5_000), ("s2g_destination_ps", 2_000_000), ("sum_row_ps", 2_000_000),
    ("nvlink_egress_mbps", 500), ("poll_ps", 20_000_000),
])  # fmt: skip
def test_every_cost_is_felt(cost, slower):
    spec = spec_of(**SHAPE)
    base = measure(spec, COSTS, topk_idx=routing())
    slow = measure(spec, {**COSTS, cost: slower}, topk_idx=routing())
    assert slow.operation_us("dispatch", "combine") > 1.05 * base.operation_us("dispatch", "combine")


def test_credits_are_told_once_a_chunk():
    """Where polls and atomics are all that costs, a role's time is the number of its own. What they would be row by row
    shows with a ring of one slot, where the final sum must tell each at once."""
    sizes = []  # rows of every stream of one rank to one other node, in chunks
    for rank, flat in enumerate(routing()):
        nodes = [{e // EXPERTS // LOCAL for e in flat[t * TOPK : (t + 1) * TOPK]} for t in range(TOKENS)]
        for node in set(range(NODES)) - {rank // LOCAL}:
            rows = sum(node in of_token for of_token in nodes)
            sizes += [min(8, rows - begin) for begin in range(0, rows, 8)]

    def atomics(role, slots):
        spec = spec_of(**{**SHAPE, "rail_slots": slots, "num_blocks": 1, "weights": 0})
        world = measure(spec, {"poll_ps": 1_000_000}, topk_idx=routing())
        assert world.failure is None
        return sum(r.busy_us for r in world.roles if r.name == role)

    ranks = NODES * LOCAL
    # Each of the two scatter warps looks at all gates at once, and counts itself out twice; so does a reduce group.
    assert atomics("s2g", 2) == sum(min(2, n) for n in sizes) + ranks * 2 * (1 + 2)
    assert atomics("final_sum_reduce", 1) == sum(sizes) + 2 * ranks
    spans_at_most = 2 * -(-TOKENS // 8) * (NODES - 1) * ranks  # two rail chunks of a peer in a chunk of tokens
    assert len(sizes) <= atomics("final_sum_reduce", 2) - 2 * ranks <= spans_at_most < sum(sizes) / 2


@pytest.mark.parametrize("flag_us", [0, 10])
@pytest.mark.parametrize("ranks", [2, 8, 32, 40])
def test_a_warp_looks_at_32_flags_at_once(ranks, flag_us):
    """Where looks are all that a lane spends time on, the wait for all ranks' ready is a look for every 32 of them and
    the time until the flags are there, also when they come one after the other at the same time."""
    spec = spec_of(num_nodes=1, num_local_ranks=ranks, tokens=1, topk=1, num_blocks=1, combine=0)
    world = measure(spec, {"poll_ps": 1_000_000, "flag_ps": flag_us * 1_000_000})
    assert world.failure is None
    scatter = [r for r in world.roles if r.name == "s2g"]
    assert len(scatter) == ranks
    for role in scatter:  # of two warps, each of which counts itself out twice
        assert role.busy_us == 2 * (-(-ranks // 32) + 2)
        assert role.waited_us.get("peer_ready", 0) == 2 * flag_us


def test_a_trace_holds_every_use_of_every_link():
    spec = spec_of(**SHAPE)
    world = measure(spec, COSTS, trace=True, topk_idx=routing())
    assert not measure(spec, COSTS, topk_idx=routing()).spans
    for name in ("nic_egress", "nvlink_egress", "tma_read"):
        traced = sum(span.num_bytes for span in world.spans if span.link == name)
        assert traced == sum(world.link_bytes()[name].values())
    assert {span.role for span in world.spans} >= {"n2n", "g2s", "s2g", "final_sum_reduce", "node_sum_g2s"}
    assert all(span.start_us < span.end_us for span in world.spans)


def test_roles_say_where_their_time_went():
    world = measure(spec_of(**SHAPE), COSTS, topk_idx=routing())
    s2g = next(role for role in world.roles if role.name == "s2g" and role.rank == 0)
    assert s2g.busy_us > 0 and s2g.waited_us["stage_full"] > 0


@pytest.mark.parametrize("costs, message", [({"nic_mbps": -1}, "costs: nic_mbps is -1"),
                                            ({"warp_drive": 1}, "no cost is called 'warp_drive'"),
                                            ({"nic_mbps": 0.5}, "give a whole number")])  # fmt: skip
def test_bad_costs_are_named(costs, message):
    with pytest.raises(ValueError, match=message):
        measure(spec_of(**SHAPE), costs)


def test_no_clock_runs_for_clones():
    with pytest.raises(ValueError, match="spare_slots: is 1; give 0"):
        measure(spec_of(experts_per_rank=2, spare_slots=1), COSTS)
