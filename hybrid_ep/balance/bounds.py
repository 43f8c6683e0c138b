"""Lower bounds on the fullest rank: how far from optimal a plan is, as a number.

All are in the unit of the loads given (tokens), for the load of the fullest of R ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

_MOST_HOT = 8  # hottest ranks that are priced together
_FULL = 8  # price of a token on the other ranks


def mean(load: Sequence[int] | np.ndarray, num_ranks: int) -> int:
    """No plan beats a perfectly even split, in whole tokens: ceil(sum / R)."""
    return -(-int(np.sum(load)) // num_ranks)


def confined(rank_load: Sequence[int], num_nodes: int = 1) -> int:
    """Clones stay inside a domain: no plan beats the mean of the fullest domain. rank_load: [R] at its owner."""
    domains = np.asarray(rank_load, dtype=np.int64).reshape(num_nodes, -1)
    return int(max(-(-int(d.sum()) // len(d)) for d in domains))


def clones_fit(load: Sequence[int], owner: Sequence[int], num_ranks: int, spare_slots: int) -> int:
    """No exact plan with this many spare slots a rank beats it, wherever clones go.

    load, owner: tokens and owner rank of each expert [E]. The least T that `allows` does not rule out, by bisection.
    """
    at = _Cut(load, owner, num_ranks, spare_slots)
    high = int(at.rank_load[-1])

    def bisect(low: int, holds: Callable[[int], bool]) -> int:
        above = high
        while low < above:
            middle = (low + above) // 2
            low, above = (low, middle) if holds(middle) else (middle + 1, above)
        return low

    low = bisect(mean(at.rank_load, num_ranks), at.slots_hold)
    return low if low == high or at.drained_ranks_fill(low) else bisect(low + 1, at.drained_ranks_fill)


def allows(load: Sequence[int], owner: Sequence[int], num_ranks: int, spare_slots: int, limit: int) -> bool:
    """False: no plan leaves every rank at `limit` tokens or below, by one of two countings.

    The k emptiest ranks can only be filled by k * spare_slots clones of other ranks' experts, each no more than the
    expert's tokens and no more than the emptiest rank has room for; what is left over has R - k ranks to go to.

    The largest experts mostly live on the hottest ranks, which need filling themselves once they have given them away.
    So tokens get a price: 0 on the k emptiest ranks, p / 8 on the h fullest, 1 on the others. A plan that leaves every
    rank at the limit pays no more than limit * sum of prices. A clone takes off the difference of the prices of owner
    and slot for each token, no more than the limit of them: a choice of the largest pieces of experts for all slots
    takes off most.
    """
    at = _Cut(load, owner, num_ranks, spare_slots)
    return at.slots_hold(limit) and at.drained_ranks_fill(limit)


class _Cut:
    """The two countings of `allows`. rank_load: ascending; place: of each expert's owner in that order."""

    def __init__(self, load: Sequence[int], owner: Sequence[int], num_ranks: int, spare_slots: int) -> None:
        self.load, self.num_ranks, self.spare_slots = np.asarray(load, dtype=np.int64), num_ranks, spare_slots
        by_rank = np.bincount(np.asarray(owner), weights=self.load, minlength=num_ranks).astype(np.int64)
        order = np.argsort(by_rank, kind="stable")
        places = np.empty(num_ranks, np.int64)
        places[order] = np.arange(num_ranks)
        self.rank_load, self.place = by_rank[order], places[np.asarray(owner)]
        self.below = np.concatenate([[0], np.cumsum(self.rank_load)])  # of the k emptiest ranks, from k = 0

    def slots_hold(self, limit: int) -> bool:
        room = limit - int(self.rank_load[0])
        for k in range(1, self.num_ranks):
            if self.rank_load[k - 1] >= limit:
                break
            others = self.load[self.place >= k]
            whole, clones = int((others // room).sum()), k * self.spare_slots
            rest = np.sort(others % room)[::-1][: max(clones - whole, 0)]
            filled = min(whole, clones) * room + int(rest.sum())
            if int(self.below[-1]) - (self.num_ranks - k) * limit > int(self.below[k]) + filled:
                return False
        return True

    def drained_ranks_fill(self, limit: int) -> bool:
        if not limit:
            return True
        whole = np.maximum(-(-self.load // limit) - 1, 0)  # of `limit` tokens each; an expert's last piece is the rest
        pieces = np.concatenate([np.repeat(limit, int(whole.sum())), self.load - whole * limit])
        owners = np.concatenate([np.repeat(self.place, whole), self.place])
        order = np.argsort(-pieces, kind="stable")
        pieces, owners = pieces[order], owners[order]

        def sums(chosen: np.ndarray, num_slots: int) -> np.ndarray:
            """Of the n largest of the chosen pieces, n up to num_slots."""
            largest = pieces[chosen][:num_slots]
            return np.concatenate([[0], np.cumsum(largest), np.full(num_slots - len(largest), largest.sum())])

        num_ranks, below = self.num_ranks, self.below
        for cold in range(1, num_ranks):
            if self.rank_load[cold - 1] >= limit:
                break
            for hot in range(1, min(_MOST_HOT, num_ranks - cold) + 1):
                if self.rank_load[-hot] <= limit:
                    break
                cold_slots, hot_slots = cold * self.spare_slots, hot * self.spare_slots
                hot_above = int(below[-1] - below[-1 - hot]) - hot * limit
                others_above = int(below[-1 - hot] - below[cold]) - (num_ranks - cold - hot) * limit
                if hot_above * (_FULL - 1) + others_above * _FULL <= 0:
                    continue
                of_hot = sums(owners >= num_ranks - hot, cold_slots)[::-1]
                of_others = sums((owners >= cold) & (owners < num_ranks - hot), cold_slots + hot_slots)
                for price in range(1, _FULL):
                    taken = price * (of_others[: cold_slots + 1] + of_hot) + (_FULL - price) * of_others[hot_slots:]
                    if price * hot_above + _FULL * others_above > taken.max():
                        return False
        return True


def slots(load: Sequence[int], num_slots: int) -> int:
    """Any split of experts over `num_slots` slots has a slot this full: min T with sum max(1, ceil(w / T)) <= slots.

    Raises ValueError when there are fewer slots than experts.
    """
    w = np.asarray(load, dtype=np.int64)
    if num_slots < len(w):
        raise ValueError(f"num_slots is {num_slots}: {len(w)} experts need at least as many slots")
    low, high = 1, int(np.max(w, initial=1))
    while low < high:
        middle = (low + high) // 2
        if int(np.maximum(1, -(-w // middle)).sum()) <= num_slots:
            high = middle
        else:
            low = middle + 1
    return low if w.any() else 0


def copies(rank_load: Sequence[int], target: int) -> int:
    """Least clones that bring every rank to `target`, one clone a receiver: every overloaded rank pushes at
    least one, and the k emptiest ranks must hold the whole excess."""
    load = np.asarray(rank_load, dtype=np.int64)
    excess = np.maximum(load - target, 0)
    room = np.cumsum(np.sort(np.maximum(target - load, 0))[::-1])
    if not excess.any():
        return 0
    return int(max((excess > 0).sum(), np.searchsorted(room, excess.sum()) + 1))


def fixed_placement(load: Sequence[int], phy2log: Sequence[int], num_ranks: int) -> int:
    """The best any split can do on this placement: min T such that all tokens flow to ranks of capacity T.

    load: integers [E]. phy2log: expert of each slot, len / num_ranks consecutive slots a rank. By Hall's theorem
    the largest w(X) / |ranks that host X| over sets X of experts, in whole tokens; found as a flow: tokens walk
    along augmenting paths until no rank above T reaches one below, with T searched by bisection.
    """
    w = [int(x) for x in load]
    per_rank = len(phy2log) // num_ranks
    hosts = [sorted({i // per_rank for i, e in enumerate(phy2log) if e == x}) for x in range(len(w))]
    if any(not h for h in hosts):
        raise ValueError("phy2log lacks an expert: give every expert a slot")
    low = max(-(-sum(w) // num_ranks), max((-(-x // len(h)) for x, h in zip(w, hosts, strict=True)), default=0))
    high = max(low, sum(w))
    # The even split is feasible, so the search starts from what it needs.
    even = [0] * num_ranks
    for x, h in zip(w, hosts, strict=True):
        for r in h:
            even[r] += -(-x // len(h))
    high = min(high, max(even))
    while low < high:
        middle = (low + high) // 2
        if _flows(w, hosts, num_ranks, middle):
            high = middle
        else:
            low = middle + 1
    return low


def _flows(w: list[int], hosts: list[list[int]], num_ranks: int, capacity: int) -> bool:
    """Whether all tokens find room on ranks of this capacity (shortest augmenting paths over ranks)."""
    on = [dict.fromkeys(h, 0) for h in hosts]
    load = [0] * num_ranks
    residents: list[list[int]] = [[] for _ in range(num_ranks)]
    for e, h in enumerate(hosts):
        for r in h:
            residents[r].append(e)
    for e in sorted(range(len(w)), key=lambda e: (len(hosts[e]), -w[e])):
        left = w[e]
        while left:
            parent: dict[int, tuple[int, int] | None] = dict.fromkeys(hosts[e])  # rank -> (rank before, expert)
            queue = list(parent)
            end = next((r for r in queue if load[r] < capacity), None)
            while queue and end is None:
                r = queue.pop(0)
                for x in residents[r]:
                    if not on[x][r]:
                        continue
                    for to in hosts[x]:
                        if to not in parent:
                            parent[to] = (r, x)
                            queue.append(to)
                            if load[to] < capacity:
                                end = to
                                break
                    if end is not None:
                        break
            if end is None:
                return False
            amount, at = min(left, capacity - load[end]), end
            while (step := parent[at]) is not None:
                amount, at = min(amount, on[step[1]][step[0]]), step[0]
            load[end] += amount
            at = end
            while (step := parent[at]) is not None:
                on[step[1]][at] += amount
                on[step[1]][step[0]] -= amount
                at = step[0]
            on[e][at] += amount
            left -= amount
    return True
