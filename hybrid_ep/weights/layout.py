"""Who has which experts, and where everything lies in a rank's registered memory. No kernel reads it, so that unlike a
buffer's it is laid out here and not in csrc/layout.

An expert has one home: the rank that owns its parameter. Ranks take experts in cyclic order from the first of their
own: first their own, then those that they keep copies of, then those that they fetch layer by layer.

    registered memory:  counters | own experts by layer and matrix
    once there are gradients, more of it:  gradients for other homes by layer and matrix
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import torch

from hybrid_ep.runtime import validation

LINE = 128  # bytes at which a matrix of a stack begins
DEFAULT_SLICE_BYTES = 2 << 20
COUNTER_BYTES = 64  # a counter has a line of a CPU's cache for itself
# Counters of a rank: weights that are there, weights that it has read for the last time; gradients that are there for
# their homes, gradients that it has taken home.
PUBLISHED, READ, GIVEN, TAKEN = (COUNTER_BYTES * i for i in range(4))
_HEADER = 4 * COUNTER_BYTES

Run = tuple[int, int, int, int]  # position among the experts of a rank, owner, index at the owner, number of experts
Piece = tuple[int, int, int, int]  # source rank, byte there, byte here, bytes


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


@dataclass(frozen=True)
class WeightLayout:
    """Experts of all layers of a group of ranks.

    num_experts, num_ranks, num_layers: E, R, L. shapes: of an expert's matrices, a tuple each. dtype: theirs. held: how
    many experts a rank has without fetching, its own included; at least those, at most E; it need not divide E.

    Raises ValueError for numbers that do not fit together.
    """

    num_experts: int
    num_ranks: int
    num_layers: int
    shapes: tuple[tuple[int, ...], ...]
    dtype: torch.dtype
    held: int

    def __post_init__(self) -> None:
        for name in ("num_experts", "num_ranks", "num_layers", "held"):
            object.__setattr__(self, name, validation.integer(name, getattr(self, name), 1))
        if self.num_ranks > self.num_experts:
            raise ValueError(
                f"num_ranks={self.num_ranks} exceeds the {self.num_experts} experts: give a group in which every rank "
                "owns an expert"
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
        if not self.most_own <= self.held <= self.num_experts:
            raise ValueError(
                f"held={self.held} must be from {self.most_own} (a rank's own experts) to {self.num_experts} (all)"
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

    def runs(self, rank: int, begin: int, end: int) -> list[Run]:
        """Positions begin to end of a rank's order, cut where the owner changes."""
        found, at = [], begin
        while at < end:
            expert = (self.first(rank) + at) % self.num_experts
            owner = next(r for r in range(self.num_ranks) if self.first(r) <= expert < self.first(r + 1))
            count = min(end - at, self.first(owner + 1) - expert)
            found.append((at, owner, expert - self.first(owner), count))
            at += count
        return found

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
    def registered_bytes(self) -> int:
        """Of a rank, for counters and weights."""
        return _HEADER + self.num_layers * self.stack_bytes(self.most_own)

    @property
    def gradient_bytes(self) -> int:
        """Of a rank, for gradients; at least a line, since no memory is no segment."""
        return max(LINE, self.num_layers * self.stack_bytes(self.most_given, 4))
