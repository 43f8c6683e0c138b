"""plan_clones: the ranks plan together what the host's planner plans from their counts, and route by it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybrid_ep.balance import MicrobatchOptions, MicrobatchPlanner
from hybrid_ep.balance.owners import Owners
from hybrid_ep.errors import DeadlineError
from hybrid_ep.testing import VirtualWorld

pytestmark = pytest.mark.balance

H, L = 16, 3  # elements of a row, experts that a rank owns


def routings(seed: int, num_ranks: int, topk: int = 3, hot: float = 0.6) -> list[torch.Tensor]:
    """topk_idx int64 [T, topk] of each rank, T from 0 on; some choices dropped, some named twice."""
    random = np.random.default_rng(seed)
    experts = num_ranks * L
    tables = []
    for _ in range(num_ranks):
        tokens = 0 if random.random() < 0.2 else int(random.integers(1, 90))
        chosen = random.integers(0, experts, (tokens, topk))
        is_hot = random.random((tokens, topk)) < hot
        chosen[is_hot] = (seed + random.integers(0, 2, is_hot.sum())) % experts
        chosen[random.random((tokens, topk)) < 0.1] = -1
        tables.append(torch.from_numpy(chosen.astype(np.int64)))
    return tables


def as_map(idx: torch.Tensor, experts: int) -> torch.Tensor:
    chosen = torch.zeros(idx.shape[0], experts + 1, dtype=torch.bool)
    return chosen.scatter_(1, torch.where(idx < 0, experts, idx), True)[:, :experts]


def shuffled(seed: int, num_ranks: int) -> Owners:
    owners = Owners(num_ranks * L, num_ranks)
    owners.assign(np.random.default_rng(seed).permutation(num_ranks * L))
    return owners


def wanted(idx: list[torch.Tensor], options: MicrobatchOptions, num_nodes: int, owners: Owners, rank: int):
    """(plan of the host's planner, topk_idx and map over physical slots) as exact mode made them with tensors."""
    num_ranks, experts, spare = len(idx), len(idx) * L, options.spare_slots
    maps = [as_map(one, experts) for one in idx]
    counts = np.stack([m.sum(0).numpy() for m in maps])
    how = {"spare_slots": spare, "epsilon": options.epsilon, "num_nodes": num_nodes, "search_nodes": 50}
    planner = MicrobatchPlanner(num_ranks, experts, owners.rank_of, **how)
    plan = planner.plan_of_rank(counts, rank, owners.host_columns(spare))
    column = owners.columns(spare, torch.device("cpu")).repeat(len(idx[rank]), 1)
    for expert, first, step in plan.part.redirects.tolist():
        column[:, expert] += (maps[rank][:, expert].cumsum(0) > first) * step
    physical = torch.zeros(len(idx[rank]), experts + num_ranks * spare, dtype=torch.bool)
    physical.scatter_(1, column, maps[rank])
    chosen = torch.where(idx[rank] < 0, -1, column.gather(1, idx[rank].clamp(min=0)))
    return plan, chosen, physical


def options_of(spare: int) -> MicrobatchOptions:
    return MicrobatchOptions(spare_slots=spare, search_nodes=50)


def check(buffer, rank: int, idx: list[torch.Tensor], options: MicrobatchOptions, owners: Owners | None, dense: bool):
    experts = len(idx) * L
    asked = {"routing_map": as_map(idx[rank], experts)} if dense else {"topk_idx": idx[rank]}
    found = buffer.plan_clones(**asked, owners=owners)
    by_order = owners or Owners(experts, len(idx))
    plan, chosen, physical = wanted(idx, options, buffer.num_of_nodes, by_order, rank)
    for _ in range(2):
        got = found.plan
        np.testing.assert_array_equal(got.slot_expert.numpy(), plan.slot_expert)
        np.testing.assert_array_equal(got.slot_tokens.numpy(), plan.slot_tokens)
        np.testing.assert_array_equal(got.take.numpy(), plan.share_of_source(rank))
        np.testing.assert_array_equal(got.counts.numpy(), plan.counts)
        assert got.numbers[2] == plan.target
        if dense:
            assert found.topk_idx is None and torch.equal(found.routing_map, physical)
            route = asked["routing_map"]
            again = torch.zeros_like(physical).scatter_(1, found.columns, route)
            assert torch.equal(again, physical)
        else:
            assert found.routing_map is None and found.columns is None and torch.equal(found.topk_idx, chosen)
        found = buffer.plan_clones(**asked, owners=owners, plan=got)  # again by the same plan, without the others
    return plan.num_copies


WORLDS = [
    (1, 2, 1, "host"),
    (1, 4, 2, "host_checked_lanes4"),
    (2, 2, 1, "host_checked"),
    (2, 3, 1, "host_checked_mapped"),
]


@pytest.fixture(scope="module", params=WORLDS, ids=str)
def group(request):
    nodes, locals_, spare, executor = request.param
    world = VirtualWorld(nodes, locals_)
    made = world.buffers(H, 8, L + spare, timeout_s=30, executor=executor, clones=options_of(spare))
    return world, made, options_of(spare)


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10**6), dense=st.booleans(), moved=st.booleans())
def test_the_plan_and_the_routing_are_the_hosts(group, seed, dense, moved):
    world, buffers, options = group
    idx = routings(seed, world.size)
    owners = shuffled(seed, world.size) if moved else None
    copies = world.run(lambda rank, _: check(buffers[rank], rank, idx, options, owners, dense))
    assert len(set(copies)) == 1


def test_clones_are_planned_at_all(group):
    world, buffers, options = group
    idx = [torch.zeros(40, 1, dtype=torch.int64) for _ in range(world.size)]  # everything to one expert
    copies = world.run(lambda rank, _: check(buffers[rank], rank, idx, options, None, False))
    assert min(copies) > 0


def test_a_dispatch_takes_the_routing(group):
    """Tokens come to owners and clones as planned, and a combine brings them back."""
    world, buffers, options = group
    idx = routings(7, world.size, topk=2)

    def work(rank, _):
        buffer, mine = buffers[rank], idx[rank]
        routed = buffer.plan_clones(topk_idx=mine)
        hidden = torch.arange(mine.shape[0], dtype=torch.float32)[:, None].expand(-1, H).contiguous()
        rows, _, _, counts, handle = buffer.dispatch_with_permute(
            hidden=hidden, topk_idx=routed.topk_idx, num_of_experts_per_rank=L + options.spare_slots
        )
        tokens = routed.plan.slot_tokens[rank].where(routed.plan.slot_expert[rank] >= 0, 0)
        assert torch.equal(counts[L:].cpu().long(), tokens)
        back, _ = buffer.combine_with_unpermute(hidden=rows, handle=handle)
        distinct = torch.tensor([len({e for e in row if e >= 0}) for row in mine.tolist()], dtype=torch.float32)
        assert torch.equal(back, hidden * distinct[:, None])

    world.run(work)


def test_launches_and_memory(group):
    world, buffers, _ = group
    idx = routings(3, world.size)

    def work(rank, _):
        buffer = buffers[rank]
        before = buffer._session.num_launches()
        buffer.plan_clones(topk_idx=idx[rank])
        return buffer._session.num_launches() - before, buffer.memory_report().regions

    for launches, regions in world.run(work):
        assert launches == 1
        assert regions["clone_counts"] == 2 * world.size * (-(-4 * (16 + world.size * L) // 64) * 64)
        assert regions["clone_counts_node_flags"] == 64 * world.size


def test_growth_keeps_the_plan(group):
    world, buffers, options = group
    idx = routings(11, world.size)
    rows = [torch.zeros(300 + 10 * r, H) for r in range(world.size)]

    def work(rank, _):
        buffer = buffers[rank]
        check(buffer, rank, idx, options, None, True)
        far = torch.zeros(len(rows[rank]), 1, dtype=torch.int64)
        buffer.dispatch(rows[rank], topk_idx=far)  # more tokens than there was room for: new registered memory
        check(buffer, rank, idx, options, None, True)

    world.run(work)


def test_what_is_refused(group):
    world, buffers, options = group
    spare, experts = options.spare_slots, world.size * L
    good = torch.zeros(2, 1, dtype=torch.int64)

    def work(rank, _):
        buffer = buffers[rank]
        for arguments, said in [
            ({}, "give one of them"),
            ({"topk_idx": good, "routing_map": as_map(good, experts)}, "give one of them"),
            ({"topk_idx": good + experts}, f"experts are 0..{experts - 1}"),
            ({"topk_idx": good.float()}, "topk_idx has dtype"),
            ({"routing_map": torch.zeros(2, experts + world.size, dtype=torch.bool)}, "number of experts is"),
            ({"topk_idx": good, "owners": Owners(2 * experts, world.size)}, "owners are of"),
            ({"topk_idx": good, "owners": 3}, "owners=3 must be hybrid_ep.balance.owners.Owners"),
            ({"topk_idx": good, "plan": 3}, "plan is"),
        ]:
            with pytest.raises(ValueError, match=said):
                buffer.plan_clones(**arguments)
        return buffer.plan_clones(topk_idx=good).topk_idx.shape  # as usable as before

    assert world.run(work) == [(2, 1)] * world.size
    assert spare >= 1


def test_a_buffer_without_clones_and_bad_options():
    world = VirtualWorld(1, 1)
    (buffer,) = world.buffers(H, 8, L)
    assert buffer.memory_report().regions["clone_counts"] == 0
    with pytest.raises(ValueError, match="make it with clones="):
        world.run(lambda rank, _: buffer.plan_clones(topk_idx=torch.zeros(1, 1, dtype=torch.int64)))
    for clones, said in [(3, "must be hybrid_ep.balance"), (MicrobatchOptions(spare_slots=L), "spare_slots=3")]:
        with pytest.raises(ValueError, match=said):
            world.buffers(H, 8, L, clones=clones)


def test_ranks_that_ask_for_other_clones_are_refused():
    world = VirtualWorld(1, 2)

    def work(rank, group):
        from hybrid_ep import HybridEPBuffer

        HybridEPBuffer(group, H, 8, L + 1, clones=MicrobatchOptions(epsilon=0.01 * (1 + rank)))

    for error in world.run(work, return_errors=True):
        assert isinstance(error, ValueError) and "clones" in str(error)


def test_owners_that_differ_end_with_a_deadline():
    world = VirtualWorld(1, 2)
    buffers = world.buffers(H, 8, L + 1, timeout_s=0.5, clones=options_of(1))
    idx = torch.zeros(4, 1, dtype=torch.int64)
    errors = world.run(
        lambda rank, _: buffers[rank].plan_clones(topk_idx=idx, owners=shuffled(rank, 2)), return_errors=True
    )
    assert all(isinstance(e, DeadlineError) and e.site == "headers_differ" for e in errors)


def test_a_rank_that_does_not_come_ends_the_others_wait():
    world = VirtualWorld(1, 2)
    buffers = world.buffers(H, 8, L + 1, timeout_s=0.5, clones=options_of(1))
    idx = torch.zeros(4, 1, dtype=torch.int64)
    errors = world.run(lambda rank, _: buffers[rank].plan_clones(topk_idx=idx) if rank else None, return_errors=True)
    assert isinstance(errors[1], DeadlineError) and errors[1].peer == 0


def plan_in_a_process(ctx, size: int, seeds: list[int]) -> list[int]:
    """On a rank of its own."""
    from hybrid_ep import HybridEPBuffer

    copies = []
    with HybridEPBuffer(ctx.group(size), H, 8, L + 1, timeout_s=30, clones=options_of(1)) as buffer:
        for seed in seeds:
            idx = routings(seed, size)
            owners = shuffled(seed, size) if seed % 2 else None
            copies.append(check(buffer, ctx.rank, idx, options_of(1), owners, bool(seed % 3)))
    return copies


def test_processes_plan_alike(world):
    found = world.run(plan_in_a_process, world.size, list(range(12)))
    assert all(one == found[0] for one in found) and sum(found[0]) > 4
