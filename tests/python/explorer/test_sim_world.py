"""Simulated worlds: a seed is an interleaving, random worlds are right, faults end in the right timeout reports."""

from __future__ import annotations

import pytest

from hybrid_ep import _core
from hybrid_ep.explorer.world import STRATEGIES, explore, random_spec, spec_of

SMALL = {"num_nodes": 3, "num_local_ranks": 2, "tokens": 12, "topk": 3, "chunk_tokens": 2, "hidden": 32}


def test_a_seed_is_an_interleaving():
    spec = spec_of(**SMALL, seed=5)
    first, again, other = (explore({**spec, "seed": seed}, log=True) for seed in (5, 5, 6))
    assert first.failure is None and len(first.log) > 1000
    assert first.log == again.log and first.steps == again.steps
    assert first.log != other.log


def test_random_worlds_are_right():
    ran, steps, failed = _core.sim_soak(0, 2000)
    assert failed is None, f"python -m hybrid_ep.explorer.soak --first {failed} --seeds 1"
    assert ran == 2000 and steps > 2_000_000


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_strategy_reorders_and_all_is_right(strategy):
    ran, _, failed = _core.sim_soak(50_000, 60, STRATEGIES.index(strategy))
    assert (ran, failed) == (60, None)
    if strategy != "random":
        spec = {**random_spec(7), "strategy": 0, "tokens": 8, "num_nodes": 2}
        assert explore(spec, log=True).log != explore({**spec, "strategy": STRATEGIES.index(strategy)}, log=True).log


@pytest.mark.parametrize("base", [2**31 - 3, 2**32 - 3, 2**32 - 1, 2**62 - 1])
def test_counters_may_start_anywhere(base):
    world = explore(spec_of(**SMALL, rounds=4, plans=2, rail_slots=3, counter_base=base))
    assert world.failure is None and not any(end["error"] for end in world.ranks)


def test_ten_thousand_operations_on_one_buffer():
    spec = spec_of(num_nodes=2, num_local_ranks=1, experts_per_rank=1, tokens=2, chunk_tokens=1, rail_slots=1,
                   hidden=8, rounds=5000, counter_base=2**32 - 5000)  # fmt: skip
    world = explore(spec)
    assert world.failure is None and not any(end["error"] for end in world.ranks)
    assert world.steps > 1_000_000


def blamed(world, rank):
    """Ranks that one reaches from `rank` by asking who waited for whom."""
    seen = []
    while rank not in seen and world.ranks[rank]["error"]:
        seen.append(rank)
        rank = world.ranks[rank]["peer"]
    return {*seen[1:], rank}


@pytest.mark.parametrize("at", [0, 30, 100, 300])
@pytest.mark.parametrize("seed", range(4))
def test_survivors_of_a_dead_rank_name_it(seed, at):
    dead = 3
    world = explore(spec_of(**SMALL, seed=seed, fault="rank_dies", fault_rank=dead, fault_at=at), timeout_s=7)
    assert world.failure is None and world.ranks[dead]["error"] is None
    ended = [rank for rank, end in enumerate(world.ranks) if end["error"]]
    assert len(ended) == 5  # nobody can finish without a rank that all exchange counts with
    for rank in ended:
        end = world.ranks[rank]
        assert dead in blamed(world, rank), end
        assert end["waited_s"] == pytest.approx(7, abs=1e-3) and end["site"] and end["role"]
    assert any(world.ranks[rank]["peer"] == dead for rank in ended)


@pytest.mark.parametrize("fault", ["rail_stops", "put_lost"])
@pytest.mark.parametrize("at", [1, 3])
def test_a_broken_rail_is_found_by_its_ends(fault, at):
    source, destination = 1, 5  # of the rail to node 2
    spec = spec_of(**SMALL, fault=fault, fault_rank=source, fault_node=2, fault_at=at)
    world = explore(spec, timeout_s=7)
    assert world.failure is None
    assert world.ranks[destination]["error"]  # it waits for tokens that never come
    ends = {source, destination}
    for rank, end in enumerate(world.ranks):
        if end["error"]:
            assert ends & blamed(world, rank), end
    assert any(world.ranks[a]["peer"] == b for a, b in ((source, destination), (destination, source)))


def test_a_fault_that_never_strikes_changes_nothing():
    spec = spec_of(**SMALL, fault="put_lost", fault_rank=1, fault_node=2, fault_at=10_000)
    world = explore(spec)
    assert world.failure is None and not any(end["error"] for end in world.ranks)


def test_without_deadlines_a_lost_put_deadlocks_and_the_graph_says_who_waits():
    spec = spec_of(**SMALL, fault="put_lost", fault_rank=1, fault_node=2, fault_at=3)
    failure = explore(spec, timeout_s=0).failure
    assert (failure.kind, failure.rule) == ("deadlock", "deadlock")
    lines = failure.what.splitlines()
    assert lines[0] == "no lane can run and nothing is in flight"
    assert any("rank 5" in line and "for rank 1" in line and ".h:" in line for line in lines)


@pytest.mark.parametrize("settings, message", [
    ({"num_nodes": 0}, "num_nodes: is 0; give 1 to 256"),
    ({"hidden": 3}, "hidden: is 3; a row must be a positive multiple of 16 bytes"),
    ({"multiply": 1, "weights": 0}, "multiply: is 1; needs permute and weights"),
    ({"spare_slots": 2}, "spare_slots: is 2; give less than experts_per_rank"),
    ({"fault_rank": 99}, "fault_rank: is 99; give a rank of the group"),
    ({"strategy": "lucky"}, "strategy: 'lucky' is none of random, pct"),
    ({"colour": 1}, "colour: no such field"),
])  # fmt: skip
def test_bad_specs_name_the_field(settings, message):
    with pytest.raises(ValueError, match=message):
        explore(spec_of(**settings))


def test_choices_are_of_experts_and_not_of_spare_slots():
    spec = spec_of(num_nodes=1, num_local_ranks=2, experts_per_rank=3, spare_slots=1, topk=1)
    world = explore(spec, topk_idx=[[3, 3, 3, 3], [3, 0, 0]])
    assert world.failure is None and not any(end["error"] for end in world.ranks)
    with pytest.raises(ValueError, match="names expert 4; experts are 0..3"):
        explore(spec, topk_idx=[[4], [0]])


def test_bad_routing_and_deadline():
    with pytest.raises(ValueError, match="topk_idx: has 1 entries; give one per rank, 4"):
        explore(spec_of(), topk_idx=[[0, 1]])
    with pytest.raises(ValueError, match="topk_idx: token 0 names expert 99"):
        explore(spec_of(topk=1), topk_idx=[[99], [0], [0], [0]])
    with pytest.raises(ValueError, match="timeout_s: is -1"):
        explore(spec_of(), timeout_s=-1)
