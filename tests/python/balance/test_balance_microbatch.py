"""The micro-batch planner: the C++ core against its Python twin, invariants on any input, and the floors."""

from __future__ import annotations

from dataclasses import fields

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybrid_ep import balance
from hybrid_ep.balance import bounds, loads, twin_microbatch
from hybrid_ep.balance.microbatch import MicrobatchOptions, default_owner


@st.composite
def problems(draw):
    """(counts, owner, options): any skew, empty ranks, owners anywhere, every option."""
    num_nodes, per_node = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    num_ranks = num_nodes * per_node
    num_experts = draw(st.integers(1, 24))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    owner = rng.integers(0, num_ranks, num_experts)
    share = loads.popularity(rng, 1, num_experts, "lognormal", draw(st.sampled_from([0.0, 0.5, 1.5, 4.0])))[0]
    counts = loads.counts(rng, share, num_ranks, draw(st.sampled_from([0, 1, 7, 100, 5000])))
    if draw(st.booleans()):  # equal loads: ties decide
        counts = rng.integers(0, 3, counts.shape) * draw(st.sampled_from([1, 100]))
    counts[rng.random(num_ranks) < 0.2] = 0
    return (
        counts,
        owner,
        MicrobatchOptions(
            spare_slots=draw(st.integers(0, 3)),
            num_nodes=num_nodes,
            within_node=draw(st.booleans()),
            near=draw(st.booleans()),
            epsilon=draw(st.sampled_from([0.0, 0.01, 0.2])),
            min_chunk=draw(st.sampled_from([1, 5, 200])),
            skip_below=draw(st.sampled_from([0.0, 0.03, 0.5])),
            instance_cost=draw(st.sampled_from([0, 3, 64])),
            tile=draw(st.sampled_from([1, 8, 128])),
            fan_out=draw(st.sampled_from([None, 1, 2])),
            search_nodes=draw(st.sampled_from([None, 0, 7, 1000])),
            strategy=draw(st.sampled_from(["best", "best", "alias", "best_fit"])),
        ),
    )


def plan(counts, owner, options):
    return balance.plan_microbatch(counts, owner, **vars(options))


def cost_of_ranks(p):
    """Cost in tokens of every rank, from the plan alone."""
    o = p.options

    def cost(tokens):
        return np.where(tokens > 0, o.instance_cost + -(-tokens // o.tile) * o.tile, 0)

    left = p.counts.sum(axis=0)
    used = p.slot_expert >= 0
    np.subtract.at(left, p.slot_expert[used], p.slot_tokens[used])
    at_owner = np.bincount(p.owner, weights=cost(left), minlength=len(p.counts)).astype(np.int64)
    return at_owner + cost(np.where(used, p.slot_tokens, 0)).sum(axis=1)


def test_clones_leave_their_node_for_what_it_has_no_room_for():
    counts = np.diag([1500, 1100, 800, 1400])  # an expert a rank; mean 1200
    near = balance.plan_microbatch(counts, spare_slots=1, num_nodes=2, near=True)
    assert near.slot_expert.tolist() == [[-1], [0], [3], [0]] and near.slot_tokens.tolist() == [
        [0],
        [112],
        [412],
        [224],
    ]
    assert near.num_crossings == 1
    assert balance.plan_microbatch(counts, spare_slots=1, num_nodes=2).num_crossings == 2
    assert balance.plan_microbatch(counts, spare_slots=1, near=True).num_crossings == 0, "one node"
    hot = balance.plan_microbatch(np.diag([2000, 1000, 800, 1000]), spare_slots=1, num_nodes=2, near=True)
    assert hot.slot_expert.tolist() == [[-1], [0], [0], [0]] and hot.num_crossings == 1, "a node, with two clones"


@pytest.mark.parametrize(
    "ranks, experts, nodes, spare", [(16, 64, 2, 1), (32, 128, 4, 1), (64, 256, 8, 1), (32, 256, 4, 2)]
)
def test_near_plans_level_as_much_and_cross_less(ranks, experts, nodes, spare):
    """Hot alone, by rank and by node."""
    rng, crossed, owner = np.random.default_rng(3), np.zeros(2, np.int64), default_owner(experts, ranks)
    for layer in range(60):
        width = (experts, ranks, nodes)[layer % 3]
        sigma = rng.uniform(0.3, 1.5) / np.sqrt(2)
        hot = rng.normal(0, sigma, experts) + np.repeat(rng.normal(0, sigma, width), experts // width)
        counts = np.zeros((ranks, experts), np.int64)
        counts[0] = rng.multinomial(ranks * 4096 * 8, np.exp(hot) / np.exp(hot).sum())
        near = balance.plan_microbatch(counts, owner, spare, nodes, near=True)
        far = balance.plan_microbatch(counts, owner, spare, nodes)
        assert near.tokens_of_ranks().max() <= max(far.tokens_of_ranks().max(), near.target)
        crossed += near.num_crossings, far.num_crossings
    assert crossed[0] < 0.75 * crossed[1], crossed


@settings(max_examples=150)
@given(problems())
def test_core_and_twin_agree(problem):
    counts, owner, options = problem
    p = plan(counts, owner, options)
    expert, tokens = twin_microbatch.plan(counts.tolist(), owner.tolist(), options)
    assert p.slot_expert.tolist() == expert
    assert p.slot_tokens.tolist() == tokens
    for source in range(len(counts)):
        share = twin_microbatch.share_of_source(
            counts.tolist(), owner.tolist(), expert, tokens, options.num_nodes, source
        )
        assert p.share_of_source(source).tolist() == share


@given(problems())
def test_invariants(problem):
    counts, owner, options = problem
    p = plan(counts, owner, options)
    used = p.slot_expert >= 0
    total = counts.sum(axis=0)
    assert (p.slot_tokens[used] >= 1).all() and (p.slot_tokens[~used] == 0).all()
    assert p.tokens_of_ranks().sum() == total.sum() and (p.tokens_of_ranks() >= 0).all()
    for rank, slot in zip(*np.nonzero(used), strict=True):
        expert = p.slot_expert[rank, slot]
        assert owner[expert] != rank
        assert (p.slot_expert[rank] == expert).sum() == 1
        if options.within_node:
            per_node = len(counts) // options.num_nodes
            assert owner[expert] // per_node == rank // per_node
    pushed = np.bincount(owner[p.slot_expert[used]], minlength=len(counts))
    assert options.fan_out is None or pushed.max() <= options.fan_out
    if options.epsilon == 0:
        assert p.num_copies <= len(counts) - 1
    before = cost_of_ranks(
        balance.plan_microbatch(counts, owner, spare_slots=0, tile=options.tile, instance_cost=options.instance_cost)
    ).max()
    after = cost_of_ranks(p).max()
    assert after < before if p.num_copies else after == before
    if p.num_copies and options.instance_cost == 0 and options.tile == 1:
        assert p.imbalance() >= p.bound() - 1e-12


@given(problems())
def test_shares_of_sources_add_up(problem):
    """Nobody sends more than it has, every clone gets exactly its quota, and local tokens stay local."""
    counts, owner, options = problem
    p = plan(counts, owner, options)
    takes = np.stack([p.share_of_source(s) for s in range(len(counts))])
    assert (takes.sum(axis=0) == p.slot_tokens).all() and (takes >= 0).all()
    sent = np.zeros_like(counts)
    for rank, slot in zip(*np.nonzero(p.slot_expert >= 0), strict=True):
        expert = p.slot_expert[rank, slot]
        sent[:, expert] += takes[:, rank, slot]
        assert takes[rank, rank, slot] == min(counts[rank, expert], p.slot_tokens[rank, slot])
    assert (sent <= counts).all()


def owner_columns(owner, num_ranks, spare):
    """Columns of owners on any slots of their ranks: R * (E / R + spare) columns."""
    seen, columns = dict.fromkeys(range(num_ranks), 0), []
    for rank in owner.tolist():
        columns.append(rank * (len(owner) // num_ranks + spare) + seen[rank])
        seen[rank] += 1
    return np.array(columns)


@given(problems(), st.integers(0, 2**32))
def test_the_part_of_a_rank_says_what_its_shares_and_slots_say(problem, seed):
    """Redirects against share_of_source, pushes against the slots; planned in one call and asked of a plan."""
    counts, _, options = problem
    rng, num_ranks = np.random.default_rng(seed), len(counts)
    counts = counts[:, : counts.shape[1] // num_ranks * num_ranks]
    if not counts.size:
        return
    experts_of_rank = counts.shape[1] // num_ranks
    owner = rng.permutation(default_owner(counts.shape[1], num_ranks)).astype(np.int32)
    planner = balance.MicrobatchPlanner(num_ranks, counts.shape[1], owner, **vars(options))
    columns, rank = owner_columns(owner, num_ranks, options.spare_slots), int(rng.integers(num_ranks))
    p = planner.plan_of_rank(counts, rank, columns)
    asked = plan(counts, owner, options).part_of_rank(rank, columns)
    assert p.part.rank == asked.rank == rank
    assert (p.part.redirects == asked.redirects).all() and (p.part.pushes == asked.pushes).all()

    take, first_clone = p.share_of_source(rank), experts_of_rank
    for expert in range(counts.shape[1]):
        column = np.full(counts[rank, expert], columns[expert])
        for _, first, step in p.part.redirects[p.part.redirects[:, 0] == expert]:
            column[first:] += step
        assert (np.diff(column) != 0).sum() <= num_ranks * options.spare_slots
        for at, slot in zip(*np.nonzero(p.slot_expert == expert), strict=True):
            there = at * (experts_of_rank + options.spare_slots) + first_clone + slot
            assert (column == there).sum() == take[at, slot]
        assert (column == columns[expert]).sum() == counts[rank, expert] - take[p.slot_expert == expert].sum()

    clones = [(e, owner[e], r, s) for r, row in enumerate(p.slot_expert.tolist()) for s, e in enumerate(row) if e >= 0]
    mine = [
        (*clone, sum(other[1] == clone[1] for other in clones[:i]))
        for i, clone in enumerate(clones)
        if rank in clone[1:3]
    ]
    assert [tuple(push) for push in p.part.pushes.tolist()] == mine


FLOORS = [(32, 256, 1, 0.01), (64, 256, 1, 0.01), (16, 256, 2, 0.02), (8, 256, 4, 0.015)]


@pytest.mark.parametrize("num_ranks, num_experts, spare, floor", FLOORS)
def test_floors(num_ranks, num_experts, spare, floor):
    """Residual imbalance at log-popularity sigma 0.3 to 1.5 with drift: the promise of the README."""
    rng = np.random.default_rng(num_ranks)
    planner = balance.MicrobatchPlanner(num_ranks, num_experts, spare_slots=spare)
    for sigma in (0.3, 0.6, 1.0, 1.5):
        for delta in (0.2, 0.3, 0.5):
            share = loads.drift(rng, loads.popularity(rng, 6, num_experts, "lognormal", sigma), delta)
            for layer in share:
                p = planner.plan(loads.counts(rng, layer, num_ranks, 32768))
                assert p.imbalance() <= floor, (sigma, delta)
                assert p.num_copies >= bounds.copies(p.tokens_of_ranks(balanced=False), p.target)


# Fullest rank over the mean, the Zipf exponent that gives it on average, clones a layer: docs/balancer.md, "Measured".
@pytest.mark.parametrize("skew, exponent, clones", [(1.5, 0.239, 36.6), (2.0, 0.368, 40.4), (3.0, 0.521, 43.8)])
def test_clones_by_skew(skew, exponent, clones):
    """Of 64 spare slots, EP64 with 256 experts."""
    rng, planner = np.random.default_rng(1), balance.MicrobatchPlanner(64, 256)
    popularity, plans = np.arange(1, 257) ** -exponent, []
    for _ in range(200):
        counts = np.zeros((64, 256), np.int64)
        counts[0] = rng.multinomial(64 * 32768, rng.permutation(popularity / popularity.sum()))
        plans.append(planner.plan(counts))
    assert np.mean([p.imbalance(balanced=False) for p in plans]) == pytest.approx(skew - 1, rel=0.1)
    assert max(p.imbalance() for p in plans) <= 0.0101
    assert np.mean([p.num_copies for p in plans]) == pytest.approx(clones, abs=1)


def test_exact_with_epsilon_zero():
    """EP64 at epsilon 0: at most 63 clones, and level to the token on nearly every load."""
    rng = np.random.default_rng(1)
    level = []
    for share in loads.popularity(rng, 20, 256, "lognormal", 1.0):
        p = balance.plan_microbatch(loads.counts(rng, share, 64, 32768), epsilon=0.0)
        assert p.num_copies <= 63
        level.append(p.tokens_of_ranks().max() == p.target)
    assert sum(level) >= 15


def test_where_no_plan_reaches_the_target_the_best_one_is_found():
    """Rank 0 is empty and no expert is large: one slot holds 10 of the 60 it lacks, the rest stays with three ranks."""
    counts = np.zeros((4, 32), np.int64)
    counts[1, 8:] = 10
    p = balance.plan_microbatch(counts)
    assert p.tokens_of_ranks().max() == 77 == 60 * (1 + p.bound())
    assert balance.plan_microbatch(counts, spare_slots=6).tokens_of_ranks().max() == 60


def test_one_expert_takes_all():
    counts = np.zeros((8, 16), np.int64)
    counts[:, 5] = 1000
    p = balance.plan_microbatch(counts, epsilon=0.0)
    assert p.tokens_of_ranks().tolist() == [1000] * 8
    assert all((p.share_of_source(s)[s] == counts[s, 5]).all() for s in range(8) if s != 2)


def test_nothing_to_do_gives_the_empty_plan():
    assert balance.plan_microbatch(np.zeros((4, 8), np.int64)).is_empty
    assert balance.plan_microbatch(np.full((4, 8), 9)).is_empty
    slight = np.full((4, 8), 100)
    slight[:, 0] = 104
    assert balance.plan_microbatch(slight).is_empty
    assert not balance.plan_microbatch(slight, skip_below=0.0, epsilon=0.0).is_empty


def test_plan_is_pure():
    """Equal input, equal plan, whatever was planned before: what makes all ranks agree."""
    rng = np.random.default_rng(2)
    counts = [loads.counts(rng, s, 16, 4096) for s in loads.popularity(rng, 8, 64, "zipf", 1.0)]
    used = balance.MicrobatchPlanner(16, 64)
    for c in counts + counts[::-1]:
        a, b = used.plan(c), balance.plan_microbatch(c.copy())
        assert (a.slot_expert == b.slot_expert).all() and (a.slot_tokens == b.slot_tokens).all()


def test_layers_in_one_call_are_planned_like_one_by_one():
    rng = np.random.default_rng(4)
    counts = np.stack([loads.counts(rng, s, 8, 2048) for s in loads.popularity(rng, 3, 32, "lognormal", 1.0)])
    planner = balance.MicrobatchPlanner(8, 32, spare_slots=2)
    for given_counts in (counts, counts.astype(np.int32), np.asfortranarray(counts)):
        plans = planner.plan_layers(given_counts)
        assert len(plans) == 3
        for many, c in zip(plans, counts, strict=True):
            one = planner.plan(c)
            assert (many.slot_expert == one.slot_expert).all() and (many.slot_tokens == one.slot_tokens).all()
            assert (many.counts == c).all() and many.target == one.target and many.num_copies > 0
            assert set(vars(many)) == {f.name for f in fields(balance.MicrobatchPlan)}
    with pytest.raises(ValueError, match="layers, ranks, experts"):
        planner.plan_layers(counts[:, :4])


def test_owners_may_change_between_plans():
    rng = np.random.default_rng(3)
    planner = balance.MicrobatchPlanner(8, 32)
    for _ in range(3):
        counts, owner = loads.counts(rng, loads.popularity(rng, 1, 32, "zipf", 1.0)[0], 8, 500), rng.integers(0, 8, 32)
        planner.owner = owner
        a, b = planner.plan(counts), balance.plan_microbatch(counts, owner)
        assert (a.slot_expert == b.slot_expert).all() and (a.owner == owner).all() and not a.is_empty
    with pytest.raises(ValueError, match="owner"):
        planner.owner = owner[1:]


@pytest.mark.parametrize(
    "change, message",
    [
        ({"epsilon": -0.1}, "epsilon"),
        ({"num_nodes": 3}, "num_nodes"),
        ({"spare_slots": -1}, "spare_slots"),
        ({"min_chunk": 0}, "min_chunk"),
        ({"tile": 0}, "tile"),
        ({"fan_out": 0}, "fan_out"),
        ({"strategy": "magic"}, "strategy"),
        ({"owner": [9] * 8}, "owner"),
        ({"owner": [0]}, "owner"),
        ({"search_nodes": -1}, "search_nodes"),
        ({"instance_cost": -1}, "instance_cost"),
        ({"skip_below": -1}, "skip_below"),
    ],
)
def test_bad_options_are_named(change, message):
    with pytest.raises(ValueError, match=message):
        balance.plan_microbatch(np.ones((4, 8), np.int64), **change)


@pytest.mark.parametrize(
    "counts", [np.ones((4, 8)), np.ones(4, np.int64), -np.ones((4, 8), np.int64), np.full((4, 8), 1 << 41)]
)
def test_bad_counts_are_named(counts):
    with pytest.raises(ValueError, match="counts"):
        balance.plan_microbatch(counts)
    with pytest.raises(ValueError, match="owner"):
        default_owner(10, 4)


@pytest.mark.parametrize("make", [np.asarray, torch.from_numpy, lambda a: torch.from_numpy(a).int(), np.ndarray.tolist])
def test_a_plan_is_of_the_counts_that_it_was_given(make):
    """Whoever counts the next micro-batch into the same memory does not change it; nor does who moves owners there."""
    counts, owner = np.random.default_rng(3).integers(0, 200, (4, 16)), np.arange(16, dtype=np.int32) // 4
    planner, kept = balance.MicrobatchPlanner(4, 16, owner, spare_slots=1), (counts.copy(), owner.copy())
    reused = make(counts)
    plans = [
        planner.plan(reused),
        *planner.plan_layers(make(counts[None])),
        planner.plan_of_rank(reused, 1, [e + e // 4 for e in range(16)]),
    ]
    shares = [plan.tokens_of_ranks() for plan in plans]
    counts[:], owner[:] = 7, 0
    if isinstance(reused, torch.Tensor):
        reused.fill_(9)
    for plan, before in zip(plans, shares, strict=True):
        assert np.array_equal(plan.counts, kept[0]) and np.array_equal(plan.owner, kept[1])
        assert np.array_equal(plan.tokens_of_ranks(), before)
