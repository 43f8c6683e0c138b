"""Experts change slots: weights, fp32 copies and moments, in the background of the step that follows.

    prepare   every rank makes staging memory for what its slots will hold; nothing in force is touched
    vote      all ranks of the grid (expert parallel x expert data parallel) say whether they have it, or none moves
    start     what leaves is copied and sent, what comes is received into the staging memory
    land      weights before the layer's next dispatch, with the new owners; the optimizer's state before its next step

Between two optimizer steps nothing of this changes, so that what was sent at the first is what is in force until the
second. Landing is copies inside a rank; it waits for what has not come, and for nothing else. On a GPU the stream waits
and the host goes on, which asks before the next optimizer step whether all has come in time.

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


class Move:
    """A change of owners that is under way. Made by `Mover.begin`.

    changes: {layer: expert of every owner slot}. Landing is local: other ranks need not do it at the same time."""

    def __init__(self, mover: Mover, changes: Mapping[int, Placement]) -> None:
        self.changes = changes
        self._mover, self._moved_in = mover, False
        self._queues = mover.device.type == "cuda"
        group = distributed_c10d._get_default_group()
        self._weights = Arrival(balance_push.Transfer(group, "move of experts: weights"))
        self._states = Arrival(balance_push.Transfer(group, "move of experts: optimizer state"))

    def arrival_of(self, piece: Piece) -> Arrival:
        return self._weights if piece.name == WEIGHT else self._states

    def stage(self) -> Move:
        """Make memory for what comes."""
        for arrival in (self._weights, self._states):
            arrival.stage()
        return self

    def start(self) -> Move:
        """Send what leaves this rank and receive what comes."""
        for arrival in (self._weights, self._states):  # weights are needed first
            arrival.start()
        return self

    def land_weights(self) -> None:
        """Put the weights and the new owners in force, if they are not. DeadlineError when a rank did not send."""
        if self._moved_in:
            return
        self._land(self._weights)
        for layer, new in self.changes.items():
            manager = self._mover.layers[layer]
            manager.owners.assign(new)
            manager.arriving = None
        self._moved_in = True

    def finish(self) -> None:
        """Put everything in force, if it is not: weights, owners, the optimizer's state. DeadlineError as above."""
        self.land_weights()
        self._land(self._states)
        for arrival in (self._weights, self._states):
            arrival.wait()

    def _land(self, arrival: Arrival) -> None:
        if self._queues:
            arrival.follow()
        else:
            arrival.wait()
        for piece, received in arrival.take():
            self._mover.view(piece, piece.slot_to).copy_(received)


class Arrival:
    """Pieces under way to and from this rank, one message a pair of ranks and dtype."""

    def __init__(self, transfer: balance_push.Transfer) -> None:
        self.transfer = transfer
        self.outgoing: dict[tuple[int, torch.dtype], list[torch.Tensor]] = {}
        self.incoming: dict[tuple[int, torch.dtype], list[tuple[Piece, torch.Tensor]]] = {}
        self.staged: list[tuple[Piece, torch.Tensor]] = []  # what comes, and where it arrives

    def stage(self) -> None:
        """Memory for what comes from other ranks."""
        for rank, dtype in sorted(self.incoming, key=str):
            pieces = self.incoming[rank, dtype]
            sizes = [target.numel() for _, target in pieces]
            flat = torch.empty(sum(sizes), dtype=dtype, device=pieces[0][1].device)
            self.transfer.receive(flat, rank)
            self.staged += zip((piece for piece, _ in pieces), flat.split(sizes), strict=True)
        self.incoming.clear()

    def start(self) -> None:
        for rank, dtype in sorted(self.outgoing, key=str):  # any order will do if both ends agree on dtypes
            self.transfer.send(torch.cat(self.outgoing[rank, dtype]), rank)
        self.outgoing.clear()
        self.transfer.start()

    def follow(self) -> None:
        """The current stream of a GPU waits for what comes; the host asks for it by `wait`, later."""
        self.transfer.follow()

    def wait(self) -> None:
        """DeadlineError when a rank did not send or receive. A second call has nothing to wait for."""
        self.transfer.wait()

    def take(self) -> list[tuple[Piece, torch.Tensor]]:
        """What has come, once: a second call has nothing left."""
        staged, self.staged = self.staged, []
        return staged


class Mover:
    """Moves experts of the given layers. Built on all ranks of the grid together.

    layers: managers with experts attached, the same on every rank of the grid. states: OptimizerStates.
    """

    def __init__(self, layers: Sequence[SlowManager], states: OptimizerStates) -> None:
        self.layers, self.states = layers, states
        experts = layers[0].experts
        self.ep, self.edp = experts.ep_group, experts.dp_group
        self.device: torch.device = next(experts.parameters()).device
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

    def view(self, piece: Piece, slot: int) -> torch.Tensor:
        """This rank's memory of a piece, in the slot it leaves or enters."""
        if piece.name == WEIGHT:
            return self.layers[piece.layer].weights.weight(slot, piece.matrix).view(-1)[piece.first : piece.last]
        shard = self._shard(piece.layer, slot, piece.matrix)
        return shard.tensors[piece.name][piece.first - shard.start : piece.last - shard.start]

    def check_trained(self) -> None:
        """ValueError, on all ranks of the grid, where some experts of a layer are frozen and others are not: parameters
        say that, and an expert would be trained or not as the slot is that it comes to. Collective."""
        trained = []
        for layer in self.layers:
            weights = layer.weights
            for n in range(len(weights.sizes)):
                trained.append([weights.place(slot, n)[0].requires_grad for slot in range(weights.num_owners)])
        said = self._least([all(some) for some in trained] + [not any(some) for some in trained])
        alike = [said[i] or said[len(trained) + i] for i in range(len(trained))]
        if not all(alike):
            matrices = len(trained) // len(self.layers)
            mixed = sorted({i // matrices for i, same in enumerate(alike) if not same})
            raise ValueError(
                f"--hybrid-ep-balance slow moves experts between parameters, and in MoE layers {mixed} of this "
                "pipeline stage, counted from 0, some are frozen (requires_grad) and others are not: freeze all of a "
                "layer's experts, or none, on all ranks, or give --hybrid-ep-balance exact"
            )

    def begin(self, changes: Mapping[int, Placement]) -> Move:
        """changes: dict layer -> expert_of_slot, equal on all ranks. Collective over the grid, at a step boundary.

        All layers of `changes` begin to move, or none. DeadlineError when a rank does not answer in time, RuntimeError
        when one has no memory for what comes; nothing has changed then."""
        move, failure = None, None
        try:
            move = self.prepare(changes)
        except Exception as error:
            failure = error
        if not self._all_agree(move is not None) or move is None:
            raise RuntimeError(f"no expert was moved: {failure or 'another rank could not prepare'}") from failure
        for layer in changes:
            self.layers[layer].arriving = move
        return move.start()

    def prepare(self, changes: Mapping[int, Placement]) -> Move:
        """A move with memory for all that comes to this rank, and a list of what leaves it."""
        self.names = sorted(set().union(*self._gather(self._names())))  # a rank may keep nothing of any expert
        me, move = dist.get_rank(), Move(self, changes)
        for piece in (p for layer, new in sorted(changes.items()) for p in self.pieces(layer, new)):
            arrival = move.arrival_of(piece)
            if piece.source == piece.target == me:
                arrival.staged.append((piece, self.view(piece, piece.slot_from).clone()))
            elif piece.source == me:
                source = self.view(piece, piece.slot_from)
                arrival.outgoing.setdefault((piece.target, source.dtype), []).append(source)
            elif piece.target == me:
                target = self.view(piece, piece.slot_to)
                arrival.incoming.setdefault((piece.source, target.dtype), []).append((piece, target))
        return move.stage()

    def _all_agree(self, ready: bool) -> bool:
        return self._least([ready]) == [True]

    def _least(self, said: Sequence[bool]) -> list[bool]:
        """What all ranks of the grid say, one by one."""
        vote = torch.tensor(said, device=self.device, dtype=torch.int64)
        for group in (self.ep, self.edp):  # the minimum over rows, then over columns: over the grid
            work = dist.all_reduce(vote, op=dist.ReduceOp.MIN, group=group, async_op=True)
            balance_push.wait_for([work], "vote on moved experts", dist.get_rank())
        return [bool(one) for one in vote.tolist()]
