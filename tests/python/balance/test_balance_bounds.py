"""What no plan of a micro-batch can beat: the bounds, the search that finds plans or proves that there is none, and
experts that are hot together."""

from __future__ import annotations

import itertools
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybrid_ep import balance
from hybrid_ep.balance import bounds, loads, twin_microbatch
from hybrid_ep.balance.microbatch import MicrobatchOptions
from hybrid_ep.balance.one_clone import OneCloneSearch, Undecided


def test_bounds():
    assert bounds.mean([3, 4], 2) == 4
    assert bounds.confined([1, 9, 2, 2], 2) == 5
    assert bounds.slots([10, 1], 3) == 5 and bounds.slots([0, 0], 2) == 0
    assert bounds.copies([10, 2, 0], 4) == 2 and bounds.copies([4, 4], 4) == 0
    # Two experts of 6 and 2 on ranks {0,1} and {1}: T = 4. Without the second replica: 6.
    assert bounds.fixed_placement([6, 2], [0, 1, 0, 1], 2) == 4
    assert bounds.fixed_placement([6, 2], [0, 1], 2) == 6
    with pytest.raises(ValueError, match="num_slots"):
        bounds.slots([1, 1], 1)


@given(st.integers(0, 2**32))
def test_fixed_placement_is_halls_bound(seed):
    """Against the maximum over all sets of experts, tried one by one."""
    rng = np.random.default_rng(seed)
    num_ranks, num_experts = 4, 6
    phy2log = np.concatenate([rng.permutation(num_experts), rng.integers(0, num_experts, 2)])
    load = rng.integers(0, 40, num_experts)
    worst = 0
    for chosen in range(1, 1 << num_experts):
        members = [e for e in range(num_experts) if chosen >> e & 1]
        hosts = {i // 2 for i, e in enumerate(phy2log) if e in members}
        worst = max(worst, -(-int(load[members].sum()) // len(hosts)))
    assert bounds.fixed_placement(load, phy2log, num_ranks) == worst


@pytest.mark.parametrize("seed, epsilon", [(59, 0.0), (340, 0.0), (993, 0.0), (1843, 0.01), (4403, 0.01)])
def test_the_search_finds_plans_that_the_constructions_miss(seed, epsilon):
    """Loads of eight ranks and 64 experts; of 24,000 like these constructions miss 1,397, and 56 of them are found."""
    random = Random(seed)
    counts = np.zeros((8, 64), np.int64)
    counts[0] = [round(100 * random.lognormvariate(0, 1)) for _ in range(64)]
    p = balance.plan_microbatch(counts, epsilon=epsilon)
    without = balance.plan_microbatch(counts, epsilon=epsilon, search_nodes=0)
    assert p.tokens_of_ranks().max() <= p.target < without.tokens_of_ranks().max()
    assert epsilon or p.num_copies < 8
    for nodes in (3, 1000):
        options = MicrobatchOptions(epsilon=epsilon, search_nodes=nodes)
        expert, tokens = twin_microbatch.plan(counts.tolist(), p.owner.tolist(), options)
        q = balance.plan_microbatch(counts, **vars(options))
        assert q.slot_expert.tolist() == expert and q.slot_tokens.tolist() == tokens


# EP32/E256, sigma 0.6 and drift 0.3: of half a million such layers the planner leaves two dozen above 1 %. This one
# ends at 1.01 %, and by size alone the emptiest ranks' slots have room (clones_fit says 0.88 %).
HARD = """
4036 2017 4157 489 2500 4359 3875 4069 5322 850 1402 2516 4168 1980 1987 4480 2185 737 3318 1165 787 2280 3159 5896
3498 2607 11011 2107 828 5037 4224 804 1920 4453 9948 7857 4595 2007 2087 1577 5054 1837 8395 7802 12462 2295 2365
2822 2703 1181 1364 3190 7956 6322 5020 3938 3675 5481 3576 1386 797 2982 8027 4129 1510 5137 2356 415 4191 4434
2358 10701 5158 2868 6660 12198 8652 9351 9746 2263 6453 2246 4386 3205 2698 6959 3779 999 6861 2297 1153 3359 8228
2317 3015 5911 7288 3580 2336 13459 1560 1731 2333 2979 2223 3339 7814 2107 1618 3070 3508 2756 8383 3703 2892 2160
3564 3961 1956 4827 2876 5749 4554 2442 5461 3074 4177 1366 3641 10908 1230 3871 4199 6420 1960 6006 14824 2535 3479
3093 2311 922 1586 740 7215 3994 4973 4461 2622 1027 980 6826 585 2230 2869 1324 1608 900 839 4127 1283 3893 1681
4729 1466 3369 1567 2573 6723 4992 6773 4616 1520 3185 4916 4637 6290 2849 10430 4938 1034 2092 5527 7261 3795 5791
3759 3359 4236 7122 10117 3022 7047 4987 5400 3639 1102 1261 8675 3217 13234 8074 1575 8402 7099 4093 9214 4037 816
1855 926 2031 2042 640 3914 1153 1485 2255 2795 4318 993 2764 3382 2522 1816 951 4902 8650 2554 1612 4467 3357 5019
1616 10414 1591 4893 1190 4257 6224 3552 1550 11704 13724 14233 3700 1789 2380 3907 11180 2544 5707 11756 1863 1892
3022
"""


def test_where_one_slot_cannot_level_it_is_proved():
    counts = np.zeros((32, 256), np.int64)
    counts[0] = HARD.split()
    p = balance.plan_microbatch(counts)
    assert bounds.clones_fit(counts[0], p.owner, 32, 1) < p.target < p.tokens_of_ranks().max()
    assert OneCloneSearch(counts[0], p.owner, 32).clones(p.target) is None
    assert p.bound(search=True) == p.imbalance() > 0.01 > p.bound()
    with pytest.raises(Undecided):
        OneCloneSearch(counts[0], p.owner, 32, max_nodes=3).clones(p.target)


def levels(load, owner, clones, limit):
    """Whether these clones level to `limit`: token by token along the clones, which is not how the search does it."""
    left, deficit = list(load), [limit] * len(clones)
    for tokens, rank in zip(load, owner, strict=True):
        deficit[rank] -= tokens
    moved = True
    while moved and min(deficit) < 0:
        moved = False
        for start in [r for r, d in enumerate(deficit) if d > 0]:
            path, at = [], start
            while deficit[at] >= 0 and clones[at] >= 0 and left[clones[at]] and at not in [q for q, _ in path]:
                path.append((at, clones[at]))
                at = owner[clones[at]]
            if deficit[at] < 0 and all(left[e] >= [x for _, x in path].count(e) for _, e in path):
                deficit[start] -= 1
                deficit[at] += 1
                for _, e in path:
                    left[e] -= 1
                moved = True
    return min(deficit) >= 0


@settings(max_examples=60)
@given(st.integers(0, 2**32))
def test_the_search_is_exact(seed):
    """Against every choice of clones, tried one by one on up to four ranks."""
    rng = np.random.default_rng(seed)
    num_ranks, num_experts = int(rng.integers(2, 5)), int(rng.integers(3, 7))
    load = np.rint(rng.exponential(1, num_experts) * rng.choice([2, 5]) + rng.choice([0, 4])).astype(int).tolist()
    owner = rng.integers(0, int(rng.integers(1, num_ranks + 1)), num_experts).tolist()  # the last ranks may be empty
    others = [[-1, *(e for e in range(num_experts) if owner[e] != r)] for r in range(num_ranks)]
    low, high = bounds.mean(load, num_ranks), sum(load)
    best = next(
        limit
        for limit in range(low, high + 1)
        if any(levels(load, owner, clones, limit) for clones in itertools.product(*others))
    )
    search = OneCloneSearch(load, owner, num_ranks)
    assert search.least(low, high) == best >= bounds.clones_fit(load, owner, num_ranks, 1)
    if best > low:
        assert search.clones(best - 1) is None
    assert levels(load, owner, search.clones(best), best)


@pytest.mark.parametrize("experts, seeds", [(32, [15, 23, 27, 30, 37]), (48, [0, 2, 15, 19])])
def test_the_bound_knows_that_drained_ranks_need_filling(experts, seeds):
    """Layers where the size of clones alone allows less: the search of all choices proves that it must not."""
    owner = np.repeat(np.arange(8), experts // 8)
    for seed in seeds:
        rng = np.random.default_rng(seed)
        load = rng.multinomial(40_000, loads.correlated(rng, 1, experts, 8, 1.2, 0.3)[0])
        best = bounds.clones_fit(load, owner, 8, 1)
        assert bounds._Cut(load, owner, 8, 1).slots_hold(best - 1)
        assert OneCloneSearch(load, owner, 8).clones(best - 1) is None


# (ranks, blocks of experts hot together, sigma across blocks, spare slots, most imbalance left, most above the bound)
TOGETHER = [
    (32, 32, 0.6, 1, 0.20, 0.018),
    (32, 32, 0.6, 2, 0.03, 0.02),
    (32, 8, 1.0, 4, 0.0101, 0.0001),
    (64, 64, 0.6, 1, 0.0101, 0.0001),
    (16, 16, 0.3, 4, 0.0101, 0.0001),
    (16, 16, 1.0, 1, 1.0, 0.014),
]


@pytest.mark.parametrize("ranks, blocks, across, spare, most, gap", TOGETHER)
def test_experts_that_are_hot_together(ranks, blocks, across, spare, most, gap):
    """What one slot leaves there, how close that is to what no plan beats, and how many slots cure it."""
    rng = np.random.default_rng(blocks)
    planner, counts = balance.MicrobatchPlanner(ranks, 256, spare_slots=spare), np.zeros((ranks, 256), np.int64)
    layers = rng.multinomial(32768 * ranks, loads.correlated(rng, 20, 256, blocks, across, 0.3))
    for layer, counts[0] in enumerate(layers):
        p = planner.plan(counts)
        assert p.bound() - 1e-12 <= p.imbalance() <= most and p.imbalance() - max(p.bound(), 0.01) <= gap
        if layer < 2:  # the one to read is slow
            best = bounds.clones_fit(counts[0], p.owner, ranks, spare)
            assert p.bound() == pytest.approx(best * ranks / counts.sum() - 1, abs=1e-12)


def test_core_and_twin_agree_where_experts_are_hot_together():
    rng = np.random.default_rng(11)
    counts = np.zeros((8, 32), np.int64)
    for counts[0] in rng.multinomial(30_000, loads.correlated(rng, 8, 32, 8, 0.8, 0.3)):
        p = balance.plan_microbatch(counts)
        expert, tokens = twin_microbatch.plan(counts.tolist(), p.owner.tolist(), MicrobatchOptions())
        assert p.slot_expert.tolist() == expert and p.slot_tokens.tolist() == tokens
