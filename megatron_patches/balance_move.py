"""Experts change slots: weights, fp32 copies and moments travel together, and all ranks change or none does.

    prepare   every rank receives what its slots will hold into staging memory, nothing in force is touched
    vote      all ranks of the grid (expert parallel x expert data parallel) say whether they have everything
    commit    copies inside each rank, and the new owners; no communication, nothing left that can fail

Buffers, shapes and the cut of the distributed optimizer stay: an expert that moves to another slot meets another cut,
so each element goes from the rank that keeps it for the old slot to the rank that keeps it for the new one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from hybrid_ep.errors import DeadlineError
from megatron_patches import balance_push

if TYPE_CHECKING:
    from megatron_patches.balance import SlowManager
    from megatron_patches.optimizer_state import OptimizerStates, Shard

_T = TypeVar("_T")
Placement = Sequence[int] | np.ndarray  # the expert of every owner slot, int [E]
WEIGHT = "weight"  # the model's own parameter, whole on every rank of the expert data parallel group


@dataclasses.dataclass(frozen=True)
class Piece:
    """Elements [first, last) of one tensor of an expert, on the way from a slot of `source` to one of `target`.

    source, target: global ranks. slot_from, slot_to: local owner slots there. layer, matrix: indices.
    """

    source: int
    target: int
    layer: int
    matrix: int
    name: str
    slot_from: int
    slot_to: int
    first: int
    last: int


class Mover:
    """Moves experts of the given layers. Built on all ranks of the grid together.

    layers: managers with experts attached, the same on every rank of the grid. states: OptimizerStates.
    """

    def __init__(self, layers: Sequence[SlowManager], states: OptimizerStates) -> None:
        self.layers, self.states = layers, states
        experts = layers[0].experts
        self.ep, self.edp = experts.ep_group, experts.dp_group
        ranks = [dist.get_global_rank(self.ep, r) for r in range(self.ep.size())]
        self.ranks, self.cuts = zip(*self._gather((ranks, self._cuts())), strict=True)
        # ranks: [edp rank][ep rank] -> global rank. cuts: [edp rank][layer][slot][matrix] -> (start, end)
        self.names: list[str] = []  # of state tensors, known when something moves: the first step creates moments

    def _gather(self, mine: _T) -> list[_T]:
        everyone = [mine] * self.edp.size()
        dist.all_gather_object(everyone, mine, group=self.edp)
        return everyone

    def _shard(self, layer: int, slot: int, n: int) -> Shard:
        """What this rank's optimizer keeps of matrix n of the expert in an owner slot."""
        weights = self.layers[layer].weights
        owner, offset = weights.place(slot, n)
        return self.states.shard(owner).part(offset, weights.sizes[n])

    def _shards(self) -> Iterator[list[list[Shard]]]:
        for i, layer in enumerate(self.layers):
            matrices = range(len(layer.weights.sizes))
            yield [[self._shard(i, slot, n) for n in matrices] for slot in range(layer.weights.num_owners)]

    def _cuts(self) -> list[list[list[tuple[int, int]]]]:
        """Element ranges this rank keeps: the same on every expert parallel rank, whose buffers are laid out alike."""
        return [[[(s.start, s.end) for s in slot] for slot in layer] for layer in self._shards()]

    def _names(self) -> set[str]:
        return {name for layer in self._shards() for slot in layer for shard in slot for name in shard.tensors}

    def pieces(self, layer: int, new: Placement) -> Iterator[Piece]:
        """All pieces of a change of one layer's owners to `new`, in the order that every rank uses."""
        owners = self.layers[layer].owners
        for to, expert in enumerate(new):
            old = owners.slot_of[expert]
            if old == to:
                continue
            (r_from, i), (r_to, j) = divmod(old, owners.per_rank), divmod(to, owners.per_rank)
            for n, size in enumerate(self.layers[layer].weights.sizes):
                for d in range(self.edp.size()):
                    ends = (self.ranks[d][r_from], self.ranks[d][r_to])
                    yield Piece(*ends, layer, n, WEIGHT, i, j, 0, size)
                    yield from self._state_pieces(layer, n, d, (r_from, i), (r_to, j))

    def _state_pieces(
        self, layer: int, n: int, d_to: int, origin: tuple[int, int], goal: tuple[int, int]
    ) -> Iterator[Piece]:
        """What edp rank `d_to` of the goal keeps, from whoever keeps it for the origin: its own peer where it can."""
        (r_from, i), (r_to, j) = origin, goal
        start, end = self.cuts[d_to][layer][j][n]
        own = self.cuts[d_to][layer][i][n]
        sources = [d_to] if own[0] <= start and end <= own[1] else range(self.edp.size())
        for d in sources:
            first, last = (max(start, self.cuts[d][layer][i][n][0]), min(end, self.cuts[d][layer][i][n][1]))
            if first < last:
                for name in self.names:
                    yield Piece(self.ranks[d][r_from], self.ranks[d_to][r_to], layer, n, name, i, j, first, last)

    def _view(self, piece: Piece, slot: int) -> torch.Tensor:
        """This rank's memory of a piece, in the slot it leaves or enters."""
        if piece.name == WEIGHT:
            return self.layers[piece.layer].weights.weight(slot, piece.matrix).view(-1)[piece.first : piece.last]
        shard = self._shard(piece.layer, slot, piece.matrix)
        return shard.tensors[piece.name][piece.first - shard.start : piece.last - shard.start]

    def move(self, changes: Mapping[int, Placement]) -> None:
        """changes: dict layer -> expert_of_slot, equal on all ranks. Collective over the grid.

        Moves all layers of `changes` or none. DeadlineError when a rank does not answer in time, RuntimeError when one
        could not prepare; the model, the optimizer and the owners of a rank that raises are as they were.
        """
        try:
            staged, failure = self.prepare(changes), None
        except DeadlineError:
            raise  # a rank is gone: asking everyone would only wait for it again
        except Exception as error:
            staged, failure = [], error
        if not self._all_agree(failure is None):
            raise RuntimeError(f"no expert was moved: {failure or 'another rank could not prepare'}") from failure
        for view, received in staged:
            view.copy_(received)
        for layer, new in changes.items():
            self.layers[layer].owners.assign(new)

    def prepare(self, changes: Mapping[int, Placement]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """[(memory in force, what goes there)] of this rank. One message a pair of ranks and dtype."""
        self.names = sorted(set().union(*self._gather(self._names())))  # a rank may keep nothing of any expert
        outgoing: dict[tuple[int, torch.dtype], list[torch.Tensor]] = {}
        incoming: dict[tuple[int, torch.dtype], list[torch.Tensor]] = {}
        me, staged = dist.get_rank(), []
        for piece in (p for layer, new in sorted(changes.items()) for p in self.pieces(layer, new)):
            if me not in (piece.source, piece.target):
                continue
            if piece.source == piece.target:
                staged.append((self._view(piece, piece.slot_to), self._view(piece, piece.slot_from).clone()))
            elif piece.source == me:
                source = self._view(piece, piece.slot_from)
                outgoing.setdefault((piece.target, source.dtype), []).append(source)
            else:
                target = self._view(piece, piece.slot_to)
                incoming.setdefault((piece.source, target.dtype), []).append(target)
        transfer = balance_push.Transfer(distributed_c10d._get_default_group(), "move of experts")
        for rank, dtype in sorted({*outgoing, *incoming}, key=str):  # any order will do if both ends agree on dtypes
            if (rank, dtype) in outgoing:
                transfer.send(torch.cat(outgoing[rank, dtype]), rank)
            if (rank, dtype) in incoming:
                views = incoming[rank, dtype]
                flat = torch.empty(sum(v.numel() for v in views), dtype=dtype, device=views[0].device)
                transfer.receive(flat, rank)
                staged += zip(views, flat.split([v.numel() for v in views]), strict=True)
        transfer.start().wait()
        return staged

    def _all_agree(self, ready: bool) -> bool:
        vote = torch.tensor([int(ready)], device=next(self.layers[0].experts.parameters()).device, dtype=torch.int64)
        for group in (self.ep, self.edp):  # the minimum over rows, then over columns: over the grid
            work = dist.all_reduce(vote, op=dist.ReduceOp.MIN, group=group, async_op=True)
            balance_push.wait_for([work], "vote on moved experts", dist.get_rank())
        return bool(vote.item())
