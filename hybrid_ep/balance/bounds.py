"""Lower bounds on the fullest rank: how far from optimal a plan is, as a number.

All are in the unit of the loads given (tokens), for the load of the fullest of R ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def mean(load: Sequence[int] | np.ndarray, num_ranks: int) -> int:
    """No plan beats a perfectly even split, in whole tokens: ceil(sum / R)."""
    return -(-int(np.sum(load)) // num_ranks)


def confined(rank_load: Sequence[int], num_nodes: int = 1) -> int:
    """Clones stay inside a domain: no plan beats the mean of the fullest domain. rank_load: [R] at home."""
    domains = np.asarray(rank_load, dtype=np.int64).reshape(num_nodes, -1)
    return int(max(-(-int(d.sum()) // len(d)) for d in domains))


def clones_fit(load: Sequence[int], home: Sequence[int], num_ranks: int, spare_slots: int) -> int:
    """No exact plan with this many spare slots a rank beats it, wherever clones go.

    load, home: tokens and home rank of each expert [E]. The k emptiest ranks can only be filled by k * spare_slots
    clones of other ranks' experts, each no more than the expert's tokens and no more than the emptiest rank has room
    for; what is left over has R - k ranks to go to. The least T that allows that for every k.
    """
    rank_load = np.bincount(np.asarray(home), weights=np.asarray(load, np.int64), minlength=num_ranks)
    low, high = mean(rank_load, num_ranks), int(np.max(rank_load, initial=0))
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if allows(load, home, num_ranks, spare_slots, middle) else (middle + 1, high)
    return low


def allows(load: Sequence[int], home: Sequence[int], num_ranks: int, spare_slots: int, limit: int) -> bool:
    """Whether `clones_fit` allows a plan that leaves every rank at `limit` tokens or below."""
    w, where = np.asarray(load, dtype=np.int64), np.asarray(home)
    rank_load = np.bincount(where, weights=w, minlength=num_ranks).astype(np.int64)
    order = np.argsort(rank_load, kind="stable")
    below = np.cumsum(rank_load[order])
    place = np.empty(num_ranks, np.int64)
    place[order] = np.arange(num_ranks)
    room = limit - int(rank_load[order[0]])
    for k in range(1, num_ranks):
        if rank_load[order[k - 1]] >= limit:
            break
        others = w[place[where] >= k]
        whole, clones = int((others // room).sum()), k * spare_slots
        rest = np.sort(others % room)[::-1][:max(clones - whole, 0)]
        filled = min(whole, clones) * room + int(rest.sum())
        if int(below[-1]) - (num_ranks - k) * limit > int(below[k - 1]) + filled:
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
