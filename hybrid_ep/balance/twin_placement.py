"""The placement planner in plain Python: what csrc/balance/placement.cpp computes, to be read; twin_improve.py has the
rest.

One layer a call. Not fast and not used in training; tests require both to agree on every slot.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from hybrid_ep.balance.twin_improve import Move, Steps

LEVEL = 2_500  # a 2,500th above the mean is level: no more swaps
GOOD = 1_250  # a 1,250th is good enough: no other numbers of replicas
FAR = 100  # a hundredth above what no placement beats is worth more work
POLISH, POLISH_STEPS = (10, 50, 400), 300_000
SHAKES, KICKS = 400, 3  # where EPLB's greedy is lower still
HOTTEST_TRIES = 8  # numbers of replicas of a node's hottest expert
NEXT_TRIES, NEXT_HOTTEST, NEXT_REPLICAS, FEW_RANKS = 3, 3, 3, 16  # of the first of these, replicas of the next hottest
GROUP_STEPS = 4_000  # groups put on a node: all ways for up to eight groups, the likeliest of more


def fixed_point(load: Sequence[float]) -> list[int]:
    """Any numbers >= 0 as integers: the largest becomes 720720 * 2^12, or less where the sum would pass 2^40."""
    unit, top = 720_720 << min(12, 40 - (720_720 * len(load) - 1).bit_length()), max(load)
    return [round(x / top * unit) if top else 0 for x in load]


class Placement(Steps):
    """Slots of `num_ranks` ranks, the experts in them, and what they weigh. Shares are rounded down."""

    def __init__(
        self, load: Sequence[float], num_slots: int, num_ranks: int, num_nodes: int = 1, num_groups: int = 0
    ) -> None:
        self.weight, self.num_ranks = fixed_point(load), num_ranks
        self.num_nodes, self.num_groups = num_nodes, num_groups
        self.per_rank = num_slots // num_ranks
        self.count = [0] * len(load)
        self.ranks: list[list[int]] = [[] for _ in range(num_ranks)]  # experts of each rank, in slot order

    def share(self, expert: int, count: int | None = None) -> int:
        """An even share of the expert's load over its replicas (or `count` of them)."""
        return self.weight[expert] // (count or self.count[expert])

    def load(self, rank: int) -> int:
        return sum(self.share(e) for e in self.ranks[rank])

    def phy2log(self) -> list[int]:
        return [e for experts in self.ranks for e in experts]

    # ---- a fresh placement

    def fresh(self) -> list[int]:
        if not self.num_groups:
            self._place([list(range(len(self.weight)))])
            return self.phy2log()
        greedy = self._greedy_groups()
        even, weight = self._even_groups(greedy), self._weights_of_groups()
        self._place(self._experts_of(greedy))
        if self._heaviest(even, weight) < self._heaviest(greedy, weight):
            lowest, first = self._fullest(range(self.num_ranks)), (list(self.count), [list(m) for m in self.ranks])
            self._place(self._experts_of(even))
            if self._fullest(range(self.num_ranks)) >= lowest:
                self.count, self.ranks = first
        return self.phy2log()

    def _place(self, nodes: list[list[int]]) -> None:
        """Experts of each node on its ranks."""
        size = self.num_ranks // len(nodes)
        ranks = [range(n * size, (n + 1) * size) for n in range(len(nodes))]
        twins = [self._greedy(*node) for node in zip(nodes, ranks, strict=True)]
        # The heaviest node first: it sets the pace, the others need be no better.
        order = sorted(range(len(nodes)), key=lambda n: -self._mean(nodes[n], size))
        pace, eplb = self._mean(nodes[order[0]], size), max(map(self._fullest, ranks))
        floor = max(pace, *map(self.share, range(len(self.weight))))  # no even split has a lower fullest slot
        far = floor + floor // FAR
        marks = [min(eplb, pace + pace // LEVEL), min(eplb, pace + pace // GOOD), eplb]
        for n in order:
            good, enough, eplb_mark = marks
            self._spread(nodes[n], ranks[n], twins[n], good, enough, eplb_mark, far)
            marks = [max(mark, self._fullest(ranks[n])) for mark in marks]
        self._polish(floor, far, marks[0], ranks)
        self._spread_hottest(nodes, ranks, far)

    def _spread_hottest(self, nodes: list[list[int]], ranks: Sequence[range], far: int) -> None:
        """While far above the bound: as many replicas of the fullest node's hottest expert as bring its share below the
        fullest rank, and more; of few ranks also with replicas of one of the next hottest; the others of the smallest
        experts."""
        tried: set[int] = set()
        while True:
            n = min(range(self.num_ranks), key=lambda r: (-self.load(r), r)) // len(ranks[0])
            lowest = self._fullest(ranks[n])
            if lowest <= far or n in tried:
                return
            tried.add(n)
            hot = sorted(nodes[n], key=lambda e: -self.weight[e])
            least = self.weight[hot[0]] // lowest + 1
            best = list(self.count), [list(m) for m in self.ranks]
            for i in range(HOTTEST_TRIES):
                if least + i > min(len(ranks[n]), len(ranks[n]) * self.per_rank - len(hot) + 1) or lowest <= far:
                    break
                ways = [(hot[0], 0)]
                if len(ranks[n]) <= FEW_RANKS and i < NEXT_TRIES:
                    ways += [(e, more) for e in hot[1 : NEXT_HOTTEST + 1] for more in range(1, NEXT_REPLICAS + 1)]
                for expert, more in ways:
                    cap = max(self.share(hot[0], least + i), 1)
                    if not self._with_replicas(nodes[n], ranks[n], cap, expert, more):
                        continue
                    self._refine(ranks[n], far)
                    if self._fullest(ranks[n]) < lowest:
                        lowest, best = self._fullest(ranks[n]), (list(self.count), [list(m) for m in self.ranks])
            self.count, self.ranks = list(best[0]), [list(m) for m in best[1]]

    def _with_replicas(self, experts: Sequence[int], ranks: Sequence[int], cap: int, expert: int, more: int) -> bool:
        """Shares down to the cap and `more` replicas of one expert, as far as there are slots and ranks for them."""
        if len(ranks) * self.per_rank - more < len(experts):
            return False
        self._replicate(experts, ranks, cap, len(ranks), smallest=True, but=more)
        if self.count[expert] + more > len(ranks):
            return False
        self.count[expert] += more
        self._pack(experts, ranks)
        return True

    def _polish(self, floor: int, far: int, good: int, nodes: Sequence[range]) -> None:
        """Where that ends far above what no placement beats: the steps of an improvement, where any slot may change,
        towards several limits, and levelled again."""
        self.first = [[] for _ in self.ranks]
        for part in POLISH:
            lowest, before = self._fullest(range(self.num_ranks)), (list(self.count), [list(m) for m in self.ranks])
            if lowest <= far:
                return
            self.limit, self.steps, self.budget = floor + floor // part, 0, POLISH_STEPS
            self._lower(0)
            for ranks in nodes:
                self._refine(ranks, good)
            if self._fullest(range(self.num_ranks)) >= lowest:
                self.count, self.ranks = before

    def _fullest(self, ranks: Iterable[int]) -> int:
        return max(self.load(r) for r in ranks)

    def _greedy(self, experts: Sequence[int], ranks: Sequence[int]) -> bool:
        """EPLB's: returns whether a rank holds an expert twice."""
        self._replicate(experts, ranks, 0, len(ranks) * self.per_rank)
        self._pack(experts, ranks, twice=True)
        return any(len(set(self.ranks[r])) < len(self.ranks[r]) for r in ranks)

    def _weights_of_groups(self) -> list[int]:
        size = len(self.weight) // self.num_groups
        return [sum(self.weight[g * size : (g + 1) * size]) for g in range(self.num_groups)]

    def _experts_of(self, nodes: list[list[int]]) -> list[list[int]]:
        size = len(self.weight) // self.num_groups
        return [sorted(e for g in node for e in range(g * size, (g + 1) * size)) for node in nodes]

    @staticmethod
    def _heaviest(nodes: list[list[int]], weight: list[int]) -> int:
        return max(sum(weight[g] for g in node) for node in nodes)

    def _greedy_groups(self) -> list[list[int]]:
        """As many groups on each node, the heaviest first to the lightest node with room."""
        weight = self._weights_of_groups()
        nodes: list[list[int]] = [[] for _ in range(self.num_nodes)]
        for g in sorted(range(self.num_groups), key=lambda g: (-weight[g], g)):
            open_nodes = [n for n in nodes if len(n) < self.num_groups // self.num_nodes]
            min(open_nodes, key=lambda n: sum(weight[x] for x in n)).append(g)
        return nodes

    def _even_groups(self, greedy: list[list[int]]) -> list[list[int]]:
        """The lightest heaviest node of all ways, as far as GROUP_STEPS go; then swaps of the heaviest node's groups.
        With two groups a node the greedy is not to be beaten."""
        weight, each = self._weights_of_groups(), self.num_groups // self.num_nodes
        if each <= 2 or self.num_nodes == 1:
            return greedy
        order = sorted(range(self.num_groups), key=lambda g: -weight[g])
        best, lowest, steps = [list(n) for n in greedy], self._heaviest(greedy, weight), 0
        mean = -(-sum(weight) // self.num_nodes)
        nodes: list[list[int]] = [[] for _ in greedy]

        def put(i: int) -> None:
            nonlocal best, lowest, steps
            if i == len(order):
                best, lowest = [list(n) for n in nodes], self._heaviest(nodes, weight)
                return
            for node in nodes:
                if lowest <= mean or steps >= GROUP_STEPS:
                    return
                if len(node) == each or sum(weight[g] for g in node) + weight[order[i]] >= lowest:
                    continue
                empty = not node
                steps += 1
                node.append(order[i])
                put(i + 1)
                node.pop()
                if empty:
                    return  # nodes without a group are alike

        put(0)
        if steps < GROUP_STEPS:
            return best
        for _ in range(4 * self.num_groups):
            load = [sum(weight[g] for g in node) for node in best]
            hot = load.index(max(load))
            ways = [
                (max(load[hot] - weight[x] + weight[y], load[n] + weight[x] - weight[y]), i, n, k)
                for i, x in enumerate(best[hot])
                for n, node in enumerate(best)
                for k, y in enumerate(node)
                if n != hot
            ]
            pair, i, n, k = min(ways)
            if pair >= load[hot]:
                break
            best[hot][i], best[n][k] = best[n][k], best[hot][i]
        return best

    def _mean(self, experts: Iterable[int], num_ranks: int) -> int:
        return sum(self.weight[e] for e in experts) // num_ranks

    def _spread(
        self, experts: Sequence[int], ranks: Sequence[int], twins: bool, good: int, enough: int, eplb: int, far: int
    ) -> None:
        """From the greedy placement, which stands: the first that comes down to `enough`, or the lowest of it, of other
        numbers of replicas with a cap on shares and, while above EPLB's mark, of more caps and of shaken ones."""
        mean = self._mean(experts, len(ranks))
        self.lowest: int | None = None
        self.best: tuple[list[int], list[list[int]]] | None = None
        hottest = max(self.weight[e] for e in experts)
        hot = 4 * hottest > sum(self.weight[e] for e in experts) or hottest > 6 * mean
        later = hot and twins  # seldom level: first what mostly is
        if not later and (not twins or self._part_twins(ranks)) and self._settled(ranks, good, enough):
            return
        usual = [75, 90, 0] if hot else [0, 75, 90]
        for i, percent in enumerate([*usual, 100, 60, 82, 50, 105, 110, 120, 135]):
            if i >= 3 and self._lowest() <= (far if percent > 100 else eplb):
                continue
            if later and i == 3:
                self._greedy(experts, ranks)
                if self._part_twins(ranks) and self._settled(ranks, good, enough):
                    return
            if percent or twins:  # else the greedy placement again
                self._replicate(experts, ranks, mean // 100 * percent, len(ranks))
                self._pack(experts, ranks)
                if self._settled(ranks, good, enough):
                    return
        self._restore()
        draw = 1

        def any_slot() -> tuple[int, int]:
            nonlocal draw
            draw = (draw * 1_664_525 + 1_013_904_223) % 2**32
            rank, slot = divmod((draw >> 8) % (len(ranks) * self.per_rank), self.per_rank)
            return ranks[rank], slot

        for _ in range(SHAKES):
            if self._lowest() <= eplb:
                break
            for kick in range(KICKS):
                (a, i), (b, j) = any_slot(), any_slot()
                x, y = self.ranks[a][i], self.ranks[b][j]
                if y in self.ranks[a]:
                    continue
                if kick == 0 and self.count[x] > 1:
                    self._apply((a, i, y))
                elif x not in self.ranks[b]:
                    self._apply((a, i, b, j))
            if self._settled(ranks, good, enough):
                return
            self._restore()

    def _settled(self, ranks: Sequence[int], good: int, enough: int) -> bool:
        """Refines; whether that is enough. Remembers the lowest."""
        self._refine(ranks, good)
        now = self._fullest(ranks)
        if now > enough and (self.lowest is None or now < self.lowest):
            self.lowest, self.best = now, (list(self.count), [list(mine) for mine in self.ranks])
        return now <= enough

    def _lowest(self) -> int:
        assert self.lowest is not None  # something was refined before
        return self.lowest

    def _restore(self) -> None:
        assert self.best is not None
        self.count, self.ranks = list(self.best[0]), [list(mine) for mine in self.best[1]]

    def _part_twins(self, ranks: Sequence[int]) -> bool:
        """Every second replica on a rank changes places with the expert that leaves the lowest pair; False if one finds
        none."""
        for a in ranks:
            for i, x in enumerate(self.ranks[a]):
                if x not in self.ranks[a][:i]:
                    continue
                best: tuple[int, Move] | None = None
                for b in ranks:
                    for j, y in enumerate(self.ranks[b]):
                        d = self.share(x) - self.share(y)
                        pair = max(self.load(a) - d, self.load(b) + d)
                        if x not in self.ranks[b] and y not in self.ranks[a] and (best is None or pair < best[0]):
                            best = pair, (a, i, b, j)
                if best is None:
                    return False
                self._apply(best[1])
        return True

    def _replicate(
        self,
        experts: Sequence[int],
        ranks: Sequence[int],
        cap: int,
        max_replicas: int,
        smallest: bool = False,
        but: int = 0,
    ) -> None:
        """One more replica for the largest share, until all slots but so many have one. With a cap only for those above
        it, then second ones of small experts (the smallest of them first), which fit anywhere."""
        for e in experts:
            self.count[e] = 1
        phases: list[Callable[[int], bool]] = [lambda e: True]
        if cap:
            phases.insert(0, lambda e: self.share(e) > cap)
            phases.insert(1, lambda e: self.count[e] == 1 and self.share(e) <= cap // 2)
        for _ in range(len(ranks) * self.per_rank - but - len(experts)):
            growing: list[int] = []
            while not growing:
                growing = [e for e in experts if self.count[e] < max_replicas and phases[0](e)]
                if not growing:
                    phases.pop(0)
            least = smallest and len(phases) == 2  # the phase of small experts
            self.count[min(growing, key=lambda e: (self.share(e) * (1 if least else -1), self.count[e], e))] += 1

    def _pack(self, experts: Sequence[int], ranks: Sequence[int], twice: bool = False) -> None:
        """The largest share first to the emptiest rank with a free slot; twice: even if it holds the expert already."""
        for r in ranks:
            self.ranks[r] = []
        for e in sorted(experts, key=lambda e: (-self.share(e), e)):
            for _ in range(self.count[e]):
                free = [r for r in ranks if len(self.ranks[r]) < self.per_rank and (twice or e not in self.ranks[r])]
                if free:
                    self.ranks[min(free, key=lambda r: (self.load(r), r))].append(e)
                else:
                    self._make_room(e, ranks)

    def _make_room(self, expert: int, ranks: Sequence[int]) -> None:
        """A full rank that lacks the expert hands one of its own to a rank with a free slot."""
        taker = min((r for r in ranks if len(self.ranks[r]) < self.per_rank), key=lambda r: (self.load(r), r))
        full = [r for r in ranks if len(self.ranks[r]) == self.per_rank and expert not in self.ranks[r]]
        giver = self.ranks[min(full, key=lambda r: (self.load(r), r))]
        moved = min((e for e in giver if e not in self.ranks[taker]), key=lambda e: (self.share(e), giver.index(e)))
        self.ranks[taker].append(moved)
        giver[giver.index(moved)] = expert

    def _refine(self, ranks: Sequence[int], good: int) -> None:
        """The fullest rank gives until it is down at `good` or nothing helps: swaps first, a different set of replicas
        where swaps end."""
        mean = sum(self.load(r) for r in ranks) // len(ranks)
        for _ in range(4 * len(ranks)):
            load = {r: self.load(r) for r in ranks}
            hot = min(ranks, key=lambda r: (-load[r], r))
            if load[hot] <= good:
                return
            move = (
                self._best_swap(hot, load, mean, good)
                or self._best_replica(hot, ranks, load[hot])
                or self._best_swap(hot, load, load[hot], good)
            )
            if move is None:
                return
            self._apply(move)

    def _best_swap(self, hot: int, load: dict[int, int], below: int, good: int) -> Move | None:
        """With a rank of a load below this: the lowest resulting pair, or the first that is good enough."""
        best: Move | None = None
        lowest = load[hot]
        for i, x in enumerate(self.ranks[hot]):
            for r in load:
                if lowest <= good or load[r] >= below or x in self.ranks[r]:
                    continue
                for j, y in enumerate(self.ranks[r]):
                    d = self.share(x) - self.share(y)
                    pair = max(load[hot] - d, load[r] + d)
                    if y not in self.ranks[hot] and pair < lowest:
                        lowest, best = pair, (hot, i, r, j)
        return best

    def _best_replica(self, hot: int, ranks: Sequence[int], lowest: int) -> Move | None:
        """One more replica of an expert of the fullest rank, for one of an expert that keeps another."""
        best: Move | None = None
        for r in ranks:
            for i in range(self.per_rank):
                for expert in list(self.ranks[hot]):
                    old = self.ranks[r][i]
                    if self.count[old] < 2 or expert in self.ranks[r]:
                        continue
                    touched = [q for q in ranks if q == r or old in self.ranks[q] or expert in self.ranks[q]]
                    back = self._apply((r, i, expert))
                    most = max(self.load(q) for q in touched)
                    self._apply(back)
                    if most < lowest:
                        lowest, best = most, (r, i, expert)
        return best
