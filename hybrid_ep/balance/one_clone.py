"""What one clone a rank can reach, exactly: a search over who clones which expert that proves what it rules out.

Room below the limit is a deficit, tokens above it an overload. A clone of expert e on rank r lets r's deficit flow to
e's owner, as much of it as e has tokens: what arrives there cancels overload, or becomes the owner's own deficit and
flows on along the owner's clone. All deficits less all overloads are the slack, ranks * limit - tokens. So a choice of
clones is a plan exactly when no more than the slack is stuck: at ranks without a clone, or whose clone's expert is
used up. With one clone a rank there is one way out of each, so that a choice settles where everything goes.

The search takes the largest deficit, tries every expert for it, and turns back where more is stuck, or bound to be,
than the slack. It ends with a plan, with the proof that there is none, or undecided when its nodes are spent.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

_DEEP = 8  # clones looked at together by the bound


class Undecided(Exception):
    """The nodes are spent."""


@dataclass
class _State:
    deficit: list[int]  # by rank; negative is overload
    left: list[int]  # tokens that the expert's clones have not taken
    clone: list[int]  # expert cloned to each rank: -1 for not chosen yet, -2 for none

    def copy(self) -> _State:
        return _State(self.deficit.copy(), self.left.copy(), self.clone.copy())


class OneCloneSearch:
    """load, owner: tokens and owner rank of each expert [E]."""

    def __init__(self, load: Sequence[int], owner: Sequence[int], num_ranks: int, max_nodes: int = 4000) -> None:
        self.load, self.owner, self.num_ranks = [int(x) for x in load], [int(r) for r in owner], num_ranks
        self.max_nodes, self.slack, self.nodes = max_nodes, 0, 0
        self.at_owner = [0] * num_ranks
        for tokens, rank in zip(self.load, self.owner, strict=True):
            self.at_owner[rank] += tokens

    def clones(self, limit: int) -> list[int] | None:
        """Expert cloned to each rank (negative for none) so that no rank is above `limit`; None: proved impossible.

        Raises Undecided after `max_nodes` nodes.
        """
        self.slack, self.nodes = self.num_ranks * limit - sum(self.load), 0
        if self.slack < 0:
            return None
        return self._descend(_State([limit - x for x in self.at_owner], self.load.copy(), [-1] * self.num_ranks))

    def least(self, low: int, high: int) -> int:
        """The least limit from `low` to `high` that is not proved impossible; all below it are, if those below `low`
        are. `high` is taken to be possible."""
        while low < high:
            middle = (low + high) // 2
            try:
                proved = self.clones(middle) is None
            except Undecided:
                proved = False
            low, high = (middle + 1, high) if proved else (low, middle)
        return low

    def _descend(self, s: _State) -> list[int] | None:
        self.nodes += 1
        if self.nodes > self.max_nodes:
            raise Undecided
        if min(s.deficit) >= 0:
            return s.clone
        stuck = sum(d for d, e in zip(s.deficit, s.clone, strict=True) if d > 0 and e != -1)
        waiting = sorted((-d, r) for r, (d, e) in enumerate(zip(s.deficit, s.clone, strict=True)) if d > 0 and e == -1)
        if not waiting or stuck + self._bound_to_stick([-d for d, _ in waiting[:_DEEP]], s.left) > self.slack:
            return None
        deficit, rank = -waiting[0][0], waiting[0][1]
        for expert in self._candidates(s, rank, deficit, self.slack - stuck):
            then = s.copy()
            then.clone[rank] = expert
            self._flow(then, rank)
            if found := self._descend(then):
                return found
        return None

    def _candidates(self, s: _State, rank: int, deficit: int, slack: int) -> list[int]:
        """Experts that leave no more than the slack stuck, none (-2) among them: least stuck and least new deficit
        first, of these the largest expert. The order is for speed; all are tried."""
        ways = [(deficit, 0, -2)] if deficit <= slack else []
        for e, left in enumerate(s.left):
            if left and self.owner[e] != rank and deficit - left <= slack:
                flows, there = min(left, deficit), s.deficit[self.owner[e]]
                ways.append((deficit - flows + max(0, there + flows) - max(0, there), -left, e))
        return [e for *_, e in sorted(ways)]

    def _flow(self, s: _State, rank: int) -> None:
        """Deficit moves along the clones until it cancels overload, waits at a rank without a choice, or sticks.
        Around a cycle of clones nothing leaves, so one turn is enough."""
        for _ in range(self.num_ranks):
            e = s.clone[rank]
            if e < 0 or s.deficit[rank] <= 0:
                return
            moved = min(s.deficit[rank], s.left[e])
            s.left[e] -= moved
            s.deficit[rank] -= moved
            rank = self.owner[e]
            s.deficit[rank] += moved

    @staticmethod
    def _bound_to_stick(deficits: list[int], left: list[int]) -> int:
        """Of the k largest deficits, what no k clones of what is left can take: each clone takes the largest deficit at
        most, all clones of an expert no more than it has."""
        largest, most = heapq.nlargest(len(deficits), left), 0
        room = deficits[0]
        for k in range(1, len(deficits) + 1):
            whole = min(k, sum(x // room for x in largest[:k]))
            parts = sorted((x % room for x in largest[:k]), reverse=True)[: k - whole]
            most = max(most, sum(deficits[:k]) - whole * room - sum(parts))
        return most
