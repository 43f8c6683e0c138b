"""Who has which experts, and where everything lies in a rank's registered memory. No kernel reads it, so that unlike a
buffer's it is laid out here and not in csrc/layout.

An expert has one home: the rank that owns its parameter. A rank's order of experts is its own, then those that it keeps
copies of, then those that it fetches layer by layer; either of the latter in cyclic order from its own on.

Consecutive ranks form groups, by default one of all. The members of a group hold every expert among them: an expert
whose owner is a member lies there, every other one is a kept copy of one member, its holder. Copies are read once a
version, from owners anywhere; layers are read from owners and holders in the group alone.

    registered memory:  counters | own experts by layer and matrix | kept copies, where other members read them
    once there are gradients, more of it:  gradients for other homes by layer and matrix
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from hybrid_ep.runtime import validation

LINE = 128  # bytes at which a matrix of a stack begins
DEFAULT_SLICE_BYTES = 2 << 20
COUNTER_BYTES = 64  # a counter has a line of a CPU's cache for itself
# Counters of a rank: weights that are there, weights that it has read for the last time; gradients that are there for
# their homes, gradients that it has taken home; layers whose kept copies are there, of all versions.
PUBLISHED, READ, GIVEN, TAKEN, KEPT = (COUNTER_BYTES * i for i in range(5))

Piece = tuple[int, int, int, int]  # source rank, byte there, byte here, bytes


@dataclass(frozen=True)
class Run:
    """Experts that a rank reads in one piece. at: where the first comes in the stack that it reads into. source: whose
    memory they are read from. kept: among that rank's copies, else its own. index: of the first there."""

    at: int
    source: int
    kept: bool
    index: int
    count: int


def whole_lines(num_bytes: int) -> int:
    return num_bytes + -num_bytes % LINE


def in_turns(stretches: Iterable[Piece], slice_bytes: int) -> list[Piece]:
    """Stretches of several sources cut into slices, one from each source in turn, as sources come first."""
    by_source: dict[int, list[Piece]] = {}
    for source, there, here, num_bytes in stretches:
        slices = by_source.setdefault(source, [])
        for done in range(0, num_bytes, slice_bytes):
            slices.append((source, there + done, here + done, min(slice_bytes, num_bytes - done)))
    turns = itertools.zip_longest(*by_source.values())
    return [piece for turn in turns for piece in turn if piece is not None]


_HEADER = whole_lines(5 * COUNTER_BYTES)


@dataclass(frozen=True)
class WeightLayout:
    """Experts of all layers of a group of ranks.

    num_experts, num_ranks, num_layers: E, R, L. shapes: of an expert's matrices, a tuple each. dtype: theirs. held: how
    many experts a rank has without fetching, its own included; at least its share of those of its group, at most E; it
    need not divide E. group_size: N, of how many consecutive ranks hold all experts among them; it divides R, which it
    is by default.

    Raises ValueError for numbers that do not fit together.
    """

    num_experts: int
    num_ranks: int
    num_layers: int
    shapes: tuple[tuple[int, ...], ...]
    dtype: torch.dtype
    held: int
    group_size: int = None  # type: ignore[assignment]  # num_ranks then

    def __post_init__(self) -> None:
        if self.group_size is None:
            object.__setattr__(self, "group_size", self.num_ranks)
        for name in ("num_experts", "num_ranks", "num_layers", "held", "group_size"):
            object.__setattr__(self, name, validation.integer(name, getattr(self, name), 1))
        if self.num_ranks > self.num_experts:
            raise ValueError(
                f"num_ranks={self.num_ranks} exceeds the {self.num_experts} experts: give a group in which every rank "
                "owns an expert"
            )
        if self.num_ranks % self.group_size:
            raise ValueError(
                f"group_size={self.group_size} must divide the {self.num_ranks} ranks, which form groups that hold all "
                "experts among them: give a divisor"
            )
        remedy = "name every matrix of an expert, without empty dimensions, as ((4096, 2048), (2048, 4096))"
        try:
            shapes = tuple(tuple(shape) for shape in self.shapes)
        except TypeError:
            raise ValueError(f"shapes={self.shapes!r} must be tuples of integers; {remedy}") from None
        if not shapes or () in shapes:
            raise ValueError(f"shapes={self.shapes!r} lacks numbers; {remedy}")
        known = tuple(
            tuple(validation.integer(f"shapes[{n}][{i}]", size, 1, remedy) for i, size in enumerate(shape))
            for n, shape in enumerate(shapes)
        )
        object.__setattr__(self, "shapes", known)  # as ranks compare them
        if not isinstance(self.dtype, torch.dtype):
            raise ValueError(f"dtype={self.dtype!r} must be a torch.dtype, as torch.bfloat16")
        least = -(-self.num_experts // self.group_size)
        if not least <= self.held <= self.num_experts:
            raise ValueError(
                f"held={self.held} must be from {least} (a rank's share of the experts in a group of "
                f"{self.group_size}) to {self.num_experts} (all)"
            )

    # ---- who has what

    def first(self, rank: int) -> int:
        """The first expert at home on a rank; that of rank R is E."""
        return rank * self.num_experts // self.num_ranks

    def own(self, rank: int) -> int:
        """How many experts are at home on a rank: E / R, rounded up or down."""
        return self.first(rank + 1) - self.first(rank)

    @cached_property
    def most_own(self) -> int:
        return -(-self.num_experts // self.num_ranks)

    def kept(self, rank: int) -> int:
        """Of how many experts of others a rank keeps copies."""
        return self.held - self.own(rank)

    @property
    def fetched(self) -> int:
        """How many experts of a layer a rank fetches."""
        return self.num_experts - self.held

    @property
    def most_kept(self) -> int:
        return self.held - self.num_experts // self.num_ranks

    @property
    def copies_are_read(self) -> bool:
        """Whether other ranks read a rank's kept copies: those of its group, which is not all, and fetches layers."""
        return self.group_size < self.num_ranks and self.fetched > 0

    def members(self, rank: int) -> range:
        """The ranks of a rank's group."""
        begin = rank - rank % self.group_size
        return range(begin, begin + self.group_size)

    @cached_property
    def _owners(self) -> list[int]:
        """By expert."""
        return [rank for rank in range(self.num_ranks) for _ in range(self.own(rank))]

    @cached_property
    def _holders(self) -> list[list[int]]:
        """By group and expert: the member that the others read it from. Of experts at home elsewhere that is the one
        in the place that the owner has in its own group, so that members read from different owners; where it has its
        share, the next one that has not. Shares of members differ by one expert at most."""
        size, found = self.group_size, []
        for begin in range(0, self.num_ranks, size):
            ends = [i * self.num_experts // size for i in range(size + 1)]
            room = [ends[i + 1] - ends[i] - self.own(begin + i) for i in range(size)]
            holders = [0] * self.num_experts
            for expert in self._cyclic(begin):
                owner = self._owners[expert]
                if owner in self.members(begin):
                    holders[expert] = owner
                else:
                    place = next(i for i in (*range(owner % size, size), *range(owner % size)) if room[i])
                    room[place] -= 1
                    holders[expert] = begin + place
            found.append(holders)
        return found

    def holder(self, rank: int, expert: int) -> int:
        """From whom the members of a rank's group read an expert."""
        return self._holders[rank // self.group_size][expert]

    def _cyclic(self, rank: int) -> list[int]:
        """All experts from the first at home on a rank on."""
        return [(self.first(rank) + i) % self.num_experts for i in range(self.num_experts)]

    @cached_property
    def _orders(self) -> list[list[int]]:
        return [self._order(rank) for rank in range(self.num_ranks)]

    def _order(self, rank: int) -> list[int]:
        cyclic, own = self._cyclic(rank), self.own(rank)
        others = cyclic[own:]
        share = [expert for expert in others if self.holder(rank, expert) == rank]
        beyond = [expert for expert in others if self.holder(rank, expert) != rank]
        kept = {*share, *beyond[: self.kept(rank) - len(share)]}
        return cyclic[:own] + sorted(others, key=lambda expert: expert not in kept)  # stable

    @cached_property
    def _positions(self) -> list[list[int]]:
        """By rank and expert: where it comes in the rank's order."""
        return [sorted(range(self.num_experts), key=order.__getitem__) for order in self._orders]

    def order(self, rank: int) -> Sequence[int]:
        """All experts in a rank's order: own, kept, fetched."""
        return self._orders[rank]

    # ---- who reads what, and from whom

    def read_once(self, rank: int) -> list[Run]:
        """Once a version: the experts whose copies a rank keeps, from their owners."""

        def source(expert: int) -> tuple[int, bool, int]:
            owner = self._owners[expert]
            return owner, False, expert - self.first(owner)

        return _runs(self._orders[rank][self.own(rank) : self.held], source)

    def read_by_layer(self, rank: int) -> list[Run]:
        """Before every layer: the experts that a rank fetches, from who has them in its group."""

        def source(expert: int) -> tuple[int, bool, int]:
            holder = self.holder(rank, expert)
            index, own = self._positions[holder][expert], self.own(holder)
            return (holder, False, index) if index < own else (holder, True, index - own)

        return _runs(self._orders[rank][self.held :], source)

    def readers(self, rank: int) -> list[int]:
        """Who reads a rank's memory."""
        return [
            reader
            for reader in range(self.num_ranks)
            if any(run.source == rank for run in (*self.read_once(reader), *self.read_by_layer(reader)))
        ]

    def owners_fetched(self, rank: int) -> list[int]:
        """The owners of the experts that a rank fetches."""
        return sorted({self._owners[expert] for expert in self._orders[rank][self.held :]})

    def homeward(self, rank: int, begin: int, end: int) -> list[tuple[int, int, int]]:
        """Of the experts from `begin` to `end` of a rank's order behind its own: (first, end, where the first lies
        among the gradients for other homes, which are in cyclic order), in one piece each."""
        found: list[tuple[int, int, int]] = []
        own, first = self.own(rank), self.first(rank)
        for at in range(begin, end):
            there = (self._orders[rank][own + at] - first) % self.num_experts - own
            if found and found[-1][2] + at - found[-1][0] == there:
                found[-1] = found[-1][0], at + 1, found[-1][2]
            else:
                found.append((at, at + 1, there))
        return found

    def pieces_once(self, rank: int, layer: int, slice_bytes: int) -> list[Piece]:
        """What brings a layer's kept copies to their place."""
        return self._pieces(rank, layer, self.read_once(rank), lambda n: self.kept_at(layer, n), slice_bytes)

    def pieces_by_layer(self, rank: int, layer: int, slice_bytes: int) -> list[Piece]:
        """What brings a layer's other experts into a buffer."""
        runs = self.read_by_layer(rank)
        return self._pieces(rank, layer, runs, lambda n: self.stack_at(self.fetched, n), slice_bytes)

    def _pieces(
        self, rank: int, layer: int, runs: Sequence[Run], into: Callable[[int], int], slice_bytes: int
    ) -> list[Piece]:
        """Slices of the sources in turn, from the next rank on."""
        stretches = []
        for run in sorted(runs, key=lambda run: (run.source - rank) % self.num_ranks):
            for n in range(len(self.shapes)):
                size = self.expert_bytes(n)
                there = (self.kept_at if run.kept else self.own_at)(layer, n) + run.index * size
                stretches.append((run.source, there, into(n) + run.at * size, run.count * size))
        return in_turns(stretches, slice_bytes)

    # ---- where it lies

    def expert_bytes(self, n: int, itemsize: int | None = None) -> int:
        """Of matrix n of one expert."""
        return math.prod(self.shapes[n]) * (itemsize or self.dtype.itemsize)

    def stack_bytes(self, num_experts: int, itemsize: int | None = None) -> int:
        """Of all matrices of so many experts, stacked matrix by matrix."""
        return sum(whole_lines(num_experts * self.expert_bytes(n, itemsize)) for n in range(len(self.shapes)))

    def stack_at(self, num_experts: int, n: int, itemsize: int | None = None) -> int:
        """Where matrix n begins in such a stack."""
        return sum(whole_lines(num_experts * self.expert_bytes(i, itemsize)) for i in range(n))

    def own_at(self, layer: int, n: int) -> int:
        """Where matrix n of a layer's own experts begins in registered memory."""
        return _HEADER + layer * self.stack_bytes(self.most_own) + self.stack_at(self.most_own, n)

    def kept_at(self, layer: int, n: int) -> int:
        """Where matrix n of a layer's kept copies begins: in registered memory where others read them, else in memory
        of their own."""
        begin = self._own_end if self.copies_are_read else 0
        return begin + layer * self.stack_bytes(self.most_kept) + self.stack_at(self.most_kept, n)

    def kept_mark(self, version: int, num_layers: int) -> int:
        """What KEPT comes to with copies of that many layers of a version, which are pulled in ascending order."""
        return (version - 1) * self.num_layers + num_layers

    @cached_property
    def most_given(self) -> int:
        return self.num_experts - self.num_experts // self.num_ranks

    def gradient_at(self, layer: int, n: int) -> int:
        """Where the gradients of matrix n of a layer's other experts begin in the memory for gradients, fp32."""
        return layer * self.stack_bytes(self.most_given, 4) + self.stack_at(self.most_given, n, 4)

    def staging_bytes(self, rank: int) -> int:
        """What all other ranks have for a rank, of one matrix of a layer, at most; fp32, a line at least."""
        parts = [whole_lines(self.own(rank) * self.expert_bytes(n, 4)) for n in range(len(self.shapes))]
        return max(LINE, (self.num_ranks - 1) * max(parts))

    @property
    def _own_end(self) -> int:
        return _HEADER + self.num_layers * self.stack_bytes(self.most_own)

    @property
    def kept_bytes(self) -> int:
        """Of a rank's kept copies."""
        return self.num_layers * self.stack_bytes(self.most_kept)

    @property
    def registered_bytes(self) -> int:
        """Of a rank, for counters and weights."""
        return self._own_end + (self.kept_bytes if self.copies_are_read else 0)

    @property
    def gradient_bytes(self) -> int:
        """Of a rank, for gradients; at least a line, since no memory is no segment."""
        return max(LINE, self.num_layers * self.stack_bytes(self.most_given, 4))


def _runs(experts: Sequence[int], source: Callable[[int], tuple[int, bool, int]]) -> list[Run]:
    """Experts in the order in which they are wanted, cut where one does not lie behind the one before."""
    found: list[Run] = []
    for at, expert in enumerate(experts):
        rank, kept, index = source(expert)
        last = found[-1] if found else None
        if last is not None and (last.source, last.kept, last.index + last.count) == (rank, kept, index):
            found[-1] = replace(last, count=last.count + 1)
        else:
            found.append(Run(at, rank, kept, index, 1))
    return found
