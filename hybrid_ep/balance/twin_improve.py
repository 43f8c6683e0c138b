"""A placement changed as little as possible, in plain Python: what csrc/balance/improve.cpp computes, to be read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

PPM = 1_000_000
FULLEST = 4  # ranks that give first
STEPS = 3_000_000  # moves weighed
NEAR_FRESH_PPM = 10_000


Move = tuple[int, int, int] | tuple[int, int, int, int]  # (rank, slot, expert) or (rank, slot, rank, slot)


class Steps:
    """What twin_placement.Placement does to a placement that stands."""

    weight: list[int]
    count: list[int]
    ranks: list[list[int]]
    first: list[list[int]]
    num_ranks: int
    num_nodes: int
    num_groups: int
    per_rank: int
    limit: int
    steps: int
    budget: int

    def load(self, rank: int) -> int:
        """What the rank's experts weigh."""
        raise NotImplementedError

    def share(self, expert: int, count: int | None = None) -> int:
        """An even share of the expert's load over its replicas (or `count` of them)."""
        raise NotImplementedError

    def _fullest(self, ranks: Iterable[int]) -> int:
        raise NotImplementedError

    def improve(self, current: Sequence[int], fresh: Sequence[int], target_ppm: int, max_moves: int) -> list[int]:
        """Steps from `current`, or where these stick, steps back from `fresh` under the names that fit best."""
        mean = sum(self.weight) // self.num_ranks
        self._adopt(fresh)
        reachable = self._fullest(range(self.num_ranks))
        self._adopt(current)
        before, self.first = self._fullest(range(self.num_ranks)), [list(mine) for mine in self.ranks]
        self.limit = max(mean + mean * target_ppm // PPM, reachable + mean * NEAR_FRESH_PPM // PPM)
        if before <= self.limit:
            return list(current)
        self.steps, self.budget = 0, STEPS
        spent, stuck = self._lower(max_moves)
        if not self._excess():
            self._take_back(spent)
        else:
            self._adopt(self._renamed(fresh))
            self.steps = 0
            fetched = sum(e not in first for mine, first in zip(self.ranks, self.first, strict=True) for e in mine)
            if self._take_back(fetched) > max_moves:
                self.count, self.ranks = stuck
                if self._fullest(range(self.num_ranks)) >= before:
                    return list(current)
        return self._settled_slots()

    def _adopt(self, phy2log: Sequence[int]) -> None:
        self.ranks = [list(phy2log[r * self.per_rank : (r + 1) * self.per_rank]) for r in range(self.num_ranks)]
        self.count = [sum(e in experts for experts in self.ranks) for e in range(len(self.weight))]

    def _take_back(self, spent: int) -> int:
        before = -1
        while spent != before:
            before, spent = spent, self._reconsider(spent)
        return spent

    def _renamed(self, fresh: Sequence[int]) -> list[int]:
        """The ranks of `fresh` under the names that keep most of what ranks have: nodes of groups first, then ranks
        inside. Each time the pair that shares most, of equal ones the first."""
        nodes = self.num_nodes if self.num_groups else 1
        each = self.num_ranks // nodes
        ranks = [fresh[r * self.per_rank : (r + 1) * self.per_rank] for r in range(self.num_ranks)]

        def match(first_from: int, first_to: int, n: int, size: int) -> dict[int, int]:
            def shared(i: int, k: int) -> int:
                there = self.first[first_to + k * size : first_to + (k + 1) * size]
                return sum(
                    e in mine
                    for x in ranks[first_from + i * size : first_from + (i + 1) * size]
                    for e in x
                    for mine in there
                )

            name: dict[int, int] = {}
            for _, i, k in sorted((-shared(i, k), i, k) for i in range(n) for k in range(n)):
                if i not in name and k not in name.values():
                    name[i] = k
            return name

        node, slots = match(0, 0, nodes, each), [fresh[:0]] * self.num_ranks
        for n in range(nodes):
            for r, k in match(n * each, node[n] * each, each, 1).items():
                slots[node[n] * each + k] = ranks[n * each + r]
        return [e for mine in slots for e in mine]

    def _fetched(self, rank: int, out: int, new: int) -> int:
        """Experts fetched more when `new` takes the place of `out` on a rank: -1 to 1."""
        return (out in self.first[rank]) - (new in self.first[rank])

    def _lower(self, left: int) -> tuple[int, tuple[list[int], list[list[int]]]]:
        """Greedy steps until all ranks are at the limit, nothing helps or no more than `left` may be fetched. The most
        gain per expert fetched first; any gain for none beats all. Returns what was fetched, and (count, ranks) where
        the fullest rank has least on the way."""
        spent, lowest = 0, self._standing()
        least = self._fullest(range(self.num_ranks))
        while self.steps <= self.budget:
            above = sorted(range(self.num_ranks), key=lambda r: (-self.load(r), r))
            above = [r for r in above if self.load(r) > self.limit]
            best = self._best_move(above[:FULLEST], left - spent)
            if best[2] is None and above[FULLEST:]:
                best = self._best_move(above, left - spent)
            if best[2] is None:
                break
            self._apply(best[2])
            spent += best[1]
            if (fullest := self._fullest(range(self.num_ranks))) < least:
                least, lowest = fullest, self._standing()
        return spent, lowest

    def _standing(self) -> tuple[list[int], list[list[int]]]:
        return list(self.count), [list(mine) for mine in self.ranks]

    def _best_move(self, givers: Sequence[int], left: int) -> tuple[int, int, Move | None]:
        best: tuple[int, int, Move | None] = (0, 1, None)
        for gain, fetched, move in self._moves(givers, left):
            if gain <= 0 or (fetched > 0 >= best[1]):
                continue
            if fetched <= 0 < best[1] or (gain > best[0] if fetched <= 0 else gain * best[1] > best[0] * fetched):
                best = (gain, fetched, move)
        return best

    def _reconsider(self, spent: int) -> int:
        """Every fetched expert goes back once; where the steps that this needs then fetch less in all, it stays so."""
        for a in range(self.num_ranks):
            for i in range(self.per_rank):
                if self.steps > self.budget or self.ranks[a][i] in self.first[a]:
                    continue
                if (back := self._way_back(a, i)) is None:
                    continue
                before = self._standing()
                self._apply(back[2])
                then = spent + back[1] + self._lower(-1 - back[1])[0]
                if then < spent and not self._excess():
                    spent = then
                else:
                    self.count, self.ranks = before
        return spent

    def _way_back(self, a: int, i: int) -> tuple[int, int, Move] | None:
        """(gain, fetched, move): an expert that the rank had returns, and the gain above the limit is least bad."""
        ways: list[tuple[int, int, Move]] = []
        x = self.ranks[a][i]
        for y in self.first[a]:
            if not self._may_host(a, y):
                continue
            if self.count[x] > 1:
                ways.append((self._gain((a, i, y)), -1, (a, i, y)))
            for b in range(self.num_ranks):
                if y in self.ranks[b] and self._may_host(b, x):
                    move: Move = (a, i, b, self.ranks[b].index(y))
                    ways.append((self._gain(move), self._fetched(a, x, y) + self._fetched(b, y, x), move))
        self.steps += len(ways)
        return max((w for w in ways if w[1] < 0), key=lambda w: w[0], default=None)  # the first of equal ones

    def _settled_slots(self) -> list[int]:
        """What a rank had at first stays in its slots; the rest fills the others in order."""
        phy2log = []
        for old, now in zip(self.first, self.ranks, strict=True):
            fresh = iter([e for e in now if e not in old])
            phy2log += [e if e in now else next(fresh) for e in old]
        return phy2log

    def _may_host(self, rank: int, expert: int) -> bool:
        if expert in self.ranks[rank]:
            return False
        node = self.num_ranks // self.num_nodes
        owner = next(r for r in range(self.num_ranks) if expert in self.ranks[r])
        return not self.num_groups or owner // node == rank // node

    def _excess(self) -> int:
        return sum(max(0, self.load(r) - self.limit) for r in range(self.num_ranks))

    def _gain(self, move: Move) -> int:
        """What the move removes from above the limit; the move is made and taken back."""
        before = self._excess()
        back = self._apply(move)
        gain = before - self._excess()
        self._apply(back)
        return gain

    def _apply(self, move: Move) -> Move:
        """move: (rank, slot, expert) for a replica, (rank, slot, rank, slot) for a swap. Returns its inverse."""
        if len(move) == 4:
            a, i, b, j = move
            self.ranks[a][i], self.ranks[b][j] = self.ranks[b][j], self.ranks[a][i]
            return move
        rank, slot, expert = move
        old = self.ranks[rank][slot]
        self.ranks[rank][slot] = expert
        self.count[old] -= 1
        self.count[expert] += 1
        return rank, slot, old

    def _moves(self, over: Sequence[int], left: int) -> Iterator[tuple[int, int, Move]]:
        """(gain, fetched, move) of every move away from the ranks `over` that fetches no more than `left`, in
        the order that breaks ties."""
        hot = [e for e in range(len(self.weight)) if any(e in self.ranks[r] for r in over)]
        places = [(r, i) for r in range(self.num_ranks) for i in range(self.per_rank)]
        for r, i in places:
            if self.count[self.ranks[r][i]] > 1:
                for e in hot:
                    if not self._may_host(r, e):
                        continue
                    self.steps += 1
                    fetched = self._fetched(r, self.ranks[r][i], e)
                    if fetched <= left:
                        yield self._gain((r, i, e)), fetched, (r, i, e)
        for a, i in places:
            for b, j in places:
                x, y = self.ranks[a][i], self.ranks[b][j]
                down = self.share(x) > self.share(y)  # else nothing is gained
                if down and a in over and a != b and self._may_host(a, y) and self._may_host(b, x):
                    self.steps += 1
                    fetched = self._fetched(a, x, y) + self._fetched(b, y, x)
                    if fetched <= left:
                        yield self._gain((a, i, b, j)), fetched, (a, i, b, j)
