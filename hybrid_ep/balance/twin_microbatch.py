"""The micro-batch planner in plain Python, to be read: what plan_clones.h and share_clones.h of csrc/roles do.

Not fast and not used in training. Tests require both to agree on every slot and every token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hybrid_ep.balance.microbatch import MicrobatchOptions

PPM = 1_000_000


def plan(
    counts: Sequence[Sequence[int]], owner: Sequence[int], options: MicrobatchOptions
) -> tuple[list[list[int]], list[list[int]]]:
    """(slot_expert, slot_tokens): lists [R][S] for counts [R][E], owner [E] and `MicrobatchOptions`."""
    num_ranks, spare = len(counts), options.spare_slots
    total = [sum(column) for column in zip(*counts, strict=True)]
    slots = [[-1] * spare for _ in range(num_ranks)], [[0] * spare for _ in range(num_ranks)]
    start = _Draft(total, owner, num_ranks, options)
    if not spare or max(start.load) <= start.mean + start.mean * options.skip_below_ppm // PPM:
        return slots
    drafts = _near(total, owner, num_ranks, options)
    for name in ("alias", "best_fit"):
        if not (drafts and drafts[0].near) and options.strategy in ("best", name):
            drafts.append(_Draft(total, owner, num_ranks, options))
            drafts[-1].construct(name)
    if options.strategy == "best" and all(max(d.load) > d.target for d in drafts):
        drafts.append(_retry(total, owner, num_ranks, options))
        o, lowest, target = options, min(max(d.load) for d in drafts), drafts[-1].target
        if (
            o.nodes(len(total))
            and 0 < (lowest - target) * 2 * num_ranks <= target  # csrc/roles/plan_clones.h: nearly level already
            and (o.spare_slots == o.tile == o.min_chunk == 1 and not (o.instance_cost or o.fan_out or o.within_node))
        ):
            drafts.append(_Draft(total, owner, num_ranks, options))
            drafts[-1].search()
    # Below the target all is equal, and fewer clones are better; min keeps the first of equals.
    best = min(drafts, key=lambda d: (max(max(d.load), d.target), len(d.clones)))
    if max(best.load) >= max(start.load):
        return slots
    for expert, rank, slot, tokens in best.clones:
        slots[0][rank][slot], slots[1][rank][slot] = expert, tokens
    return slots


def _near(total: Sequence[int], owner: Sequence[int], num_ranks: int, options: MicrobatchOptions) -> list[_Draft]:
    """Of near constructions the first that reaches the target; none where near is not asked for."""
    if options.near and options.num_nodes > 1 and not options.within_node and options.strategy == "best":
        for rule in ("alias", "largest"):
            draft = _Draft(total, owner, num_ranks, options)
            draft.near = True
            draft.construct(rule)
            if max(draft.load) <= draft.target:
                return [draft]
    return []


def _retry(total: Sequence[int], owner: Sequence[int], num_ranks: int, options: MicrobatchOptions) -> _Draft:
    """The third rule at five aims, from the target down to epsilon 0: the first that reaches the target. Where none
    does, the best of these and of eight aims above the target, by bisection."""
    best: _Draft | None = None
    for part in (4, 3, 2, 1, 0):
        draft = _Draft(total, owner, num_ranks, options)
        if part < 4 and draft.target == draft.exact:
            break
        draft.aim = draft.exact + (draft.target - draft.exact) * part // 4
        draft.construct("largest")
        if best is None or max(draft.load) < max(best.load):
            best = draft
        if max(best.load) <= best.target:
            break
    assert best is not None  # the first part always makes one
    low = best.target
    for _ in range(8):
        if max(best.load) <= low + 1:
            break
        draft = _Draft(total, owner, num_ranks, options)
        draft.aim = low + (max(best.load) - low) // 2
        draft.construct("largest")
        if max(draft.load) > draft.aim:
            low = draft.aim
        if max(draft.load) < max(best.load):
            best = draft
    return best


class _Draft:
    """One construction: what each owner still has, what each rank costs, the clones so far."""

    def __init__(self, total: Sequence[int], owner: Sequence[int], num_ranks: int, options: MicrobatchOptions) -> None:
        self.o, self.left, self.owner, self.num_ranks = options, list(total), owner, num_ranks
        self.per_node = num_ranks // options.num_nodes
        self.experts = [[e for e, h in enumerate(owner) if h == r] for r in range(num_ranks)]
        self.load = [sum(self.cost(total[e]) for e in mine) for mine in self.experts]
        self.used, self.pushed = [0] * num_ranks, [0] * num_ranks
        self.clones: list[tuple[int, int, int, int]] = []  # (expert, rank, slot, tokens)
        self.max_clones = num_ranks - 1 if options.epsilon_ppm == 0 else num_ranks * options.spare_slots
        # The fullest domain sets the pace: its mean, with the fixed cost of the clones that level it.
        size = self.per_node if options.within_node else num_ranks
        sums = [sum(self.load[base : base + size]) for base in range(0, num_ranks, size)]
        self.mean = max(-(-s // size) for s in sums)
        self.target = max(-(-(s + options.instance_cost * (size - 1)) // size) for s in sums)
        self.exact = self.target
        self.target += self.target * options.epsilon_ppm // PPM
        self.aim = self.target  # where ranks are levelled to
        self.near = False

    def cost(self, tokens: int) -> int:
        """What an expert with that many tokens costs its rank, in tokens."""
        tile = self.o.tile
        return self.o.instance_cost + -(-tokens // tile) * tile if tokens > 0 else 0

    def room(self, rank: int) -> int:
        """Whole tiles of tokens that still fit below the aim, 0 without a free slot."""
        slack = self.aim - self.load[rank] - self.o.instance_cost
        if self.used[rank] == self.o.spare_slots or slack < max(self.o.min_chunk, self.o.tile):
            return 0
        return slack // self.o.tile * self.o.tile

    def receivers(self, donor: int) -> list[int]:
        """Ranks that can take tokens of `donor`, the emptiest first."""
        node = donor // self.per_node
        ranks = [r for r in range(self.num_ranks) if not self.o.within_node or r // self.per_node == node]
        return sorted((r for r in ranks if self.room(r) > 0), key=lambda r: (self.load[r], r))

    def nearest(self, receivers: Sequence[int], donor: int, expert: int) -> list[int]:
        """Of them those of the donor's node, or of nodes that hold the expert, or of the node with the most room."""

        def of(nodes: set[int]) -> list[int]:
            return [r for r in receivers if r // self.per_node in nodes]

        held = {rank // self.per_node for e, rank, _, _ in self.clones if e == expert}
        rooms = [sum(self.room(r) for r in of({node})) for node in range(self.num_ranks // self.per_node)]
        return of({donor // self.per_node}) or of(held) or of({rooms.index(max(rooms))})

    def construct(self, rule: str) -> None:
        """rule: "alias", "best_fit" or "largest"; csrc/roles/clone_draft.h says what each is good for."""
        donors = set(range(self.num_ranks))
        while len(self.clones) < self.max_clones:
            above = [r for r in sorted(donors) if self.load[r] > self.aim and self.experts[r]]
            if not above:
                return
            if rule == "largest":
                donor = min(above, key=lambda r: (-max(self.left[e] for e in self.experts[r]), r))
            else:
                donor = min(above, key=lambda r: (-self.load[r], r))
            if not self.step(donor, rule):
                donors.discard(donor)

    def step(self, donor: int, rule: str) -> bool:
        """One clone away from `donor`; False when there is none to make."""
        if self.o.fan_out and self.pushed[donor] >= self.o.fan_out:
            return False
        expert = min(self.experts[donor], key=lambda e: (-self.left[e], e))
        want = self.left[expert]
        if want < self.o.min_chunk:
            return False
        if rule == "best_fit":  # no more than the excess
            excess = max(self.load[donor] - self.aim, self.o.min_chunk)
            want = min(want, -(-excess // self.o.tile) * self.o.tile)
        receivers = self.receivers(donor)
        if not receivers:
            return False
        if self.near:
            receivers = self.nearest(receivers, donor, expert)
        to = receivers[0]
        if rule == "best_fit":  # the fullest rank that takes it all, the emptiest if none does
            fitting = [r for r in receivers if self.load[r] + self.cost(want) <= self.aim]
            to = min(fitting, key=lambda r: (-self.load[r], r), default=to)
        piece = min(want, self.room(to))
        self.clones.append((expert, to, self.used[to], piece))
        self.used[to] += 1
        self.pushed[donor] += 1
        self.load[to] += self.cost(piece)
        self.load[donor] -= self.cost(self.left[expert]) - self.cost(self.left[expert] - piece)
        self.left[expert] -= piece
        return True

    # ---- where all constructions miss; csrc/roles/clone_search.h has the words

    def search(self) -> None:
        """Clones that bring every rank to the target, if the nodes suffice to find them; else no clones."""
        self.deficit, self.slack = [self.aim - x for x in self.load], self.aim * self.num_ranks - sum(self.load)
        self.clone, self.moved, self.nodes = [-1] * self.num_ranks, [0] * self.num_ranks, 0
        if self.descend():
            clones = [(e, rank, 0, self.moved[rank]) for rank, e in enumerate(self.clone) if self.moved[rank]]
            if len(clones) <= self.max_clones:
                self.clones, self.load = clones, [self.aim - d for d in self.deficit]

    def descend(self) -> bool:
        self.nodes += 1
        if self.nodes > self.o.nodes(len(self.owner)):
            return False
        if min(self.deficit) >= 0:
            return True
        state = list(zip(self.deficit, self.clone, strict=True))
        stuck = sum(d for d, e in state if d > 0 and e >= 0)
        waiting = [(-d, r) for r, (d, e) in enumerate(state) if d > 0 and e < 0]
        if not waiting or stuck > self.slack:
            return False
        rank, ways = min(waiting)[1], []
        for e, left in enumerate(self.left):
            flows, there = min(left, self.deficit[rank]), self.deficit[self.owner[e]]
            sticks = self.deficit[rank] - flows
            if flows and self.owner[e] != rank and stuck + sticks <= self.slack:
                ways.append((2 * sticks + max(0, there + flows) - max(0, there), -left, e))
        before = list(self.deficit), list(self.left), list(self.moved)
        for *_, e in sorted(ways)[:2]:
            self.clone[rank] = e
            self.flow(rank)
            if self.descend():
                return True
            self.deficit, self.left, self.moved = map(list, before)
        self.clone[rank] = -1
        return False

    def flow(self, rank: int) -> None:
        """Deficit moves along clones until it cancels overload, waits at a rank without a clone, or sticks."""
        for _ in range(self.num_ranks):
            if self.clone[rank] < 0 or self.deficit[rank] <= 0:
                return
            e = self.clone[rank]
            tokens = min(self.deficit[rank], self.left[e])
            self.left[e] -= tokens
            self.moved[rank] += tokens
            self.deficit[rank] -= tokens
            rank = self.owner[e]
            self.deficit[rank] += tokens


def share_of_source(
    counts: Sequence[Sequence[int]],
    owner: Sequence[int],
    slot_expert: Sequence[Sequence[int]],
    slot_tokens: Sequence[Sequence[int]],
    num_nodes: int,
    source: int,
) -> list[list[int]]:
    """[R][S]: how many of `source`'s tokens go to each clone: local first, then in the node, then by rank."""
    num_ranks, per_node = len(counts), len(counts) // num_nodes
    take = [[0] * len(row) for row in slot_expert]
    clones: dict[int, list[tuple[int, int]]] = {}
    for rank, row in enumerate(slot_expert):
        for slot, expert in enumerate(row):
            if expert >= 0:
                clones.setdefault(expert, []).append((rank, slot))
    for expert, places in clones.items():
        left = [row[expert] for row in counts]
        room = {place: slot_tokens[place[0]][place[1]] for place in places}
        room[owner[expert], -1] = sum(left) - sum(room.values())

        def give(ranks: range, left: list[int] = left, room: dict[tuple[int, int], int] = room) -> None:
            """North-west corner: sources and places in rank order, each takes what it can."""
            for place in sorted(p for p in room if p[0] in ranks):
                for s in ranks:
                    n = min(room[place], left[s])
                    room[place] -= n
                    left[s] -= n
                    if s == source and place[1] >= 0:
                        take[place[0]][place[1]] += n

        for rank in range(num_ranks):
            give(range(rank, rank + 1))
        for base in range(0, num_ranks, per_node):
            give(range(base, base + per_node))
        give(range(num_ranks))
    return take
