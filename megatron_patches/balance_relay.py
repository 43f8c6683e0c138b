"""Weights and gradients of clones, by torch.distributed: `hybrid_ep.balance.relays` says which way.

By the rails a round is three steps of messages between ranks, each made when the messages of the one before have come;
small experts go straight from owner to clone, in one step. Two ranks match messages by their order, which all take from
the plan: relays, then matrices of an expert, then nodes, clones, mates.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Generic, Protocol, TypeVar

import torch

from hybrid_ep.balance.relays import Relay

_GRAIN = 64  # elements that stripes begin at multiples of


class Messages(Protocol):
    """What one step sends and receives."""

    def send(self, tensor: torch.Tensor, rank: int) -> None: ...

    def receive(self, tensor: torch.Tensor, rank: int) -> None: ...


M = TypeVar("M", bound=Messages)


class Straight(Generic[M]):
    """What `rank` does of relays where owners send to every clone themselves, and clones to their owners. One step, and
    the bits of `Rails`. messages: makes those of a step.
    """

    def __init__(self, rank: int, messages: Callable[[], M]) -> None:
        self.rank, self._messages = rank, messages

    def push(
        self,
        rounds: Sequence[Sequence[Relay]],
        sizes: Sequence[int],
        weight: Callable[[int, int], torch.Tensor],
        slot: Callable[[int, int], torch.Tensor],
    ) -> Iterator[M]:
        """As Rails.push."""
        step = self._messages()
        for relay, n, _, (rank, number) in _clones(rounds, len(sizes)):
            if relay.owner == self.rank:
                step.send(weight(relay.expert, n), rank)
            elif rank == self.rank:
                step.receive(slot(number, n), relay.owner)
        yield step

    def collect(
        self,
        rounds: Sequence[Sequence[Relay]],
        sizes: Sequence[int],
        gradient: Callable[[int, int], torch.Tensor],
        add: Callable[[int, int, torch.Tensor], None],
    ) -> Iterator[M]:
        """As Rails.collect."""
        step = self._messages()
        came: dict[tuple[int, int, int], dict[int, list[torch.Tensor]]] = {}  # (relay, expert, matrix) -> node -> parts
        for relay, n, node, (rank, number) in _clones(rounds, len(sizes)):
            if rank == self.rank:
                step.send(gradient(number, n), relay.owner)
            elif relay.owner == self.rank:
                part = gradient(0, n).new_empty(sizes[n])
                step.receive(part, rank)
                came.setdefault((id(relay), relay.expert, n), {}).setdefault(node, []).append(part)
        yield step

        for (_, expert, n), of_nodes in came.items():
            add(expert, n, _in_order([_in_order(parts) for parts in of_nodes.values()]))


def _clones(rounds: Sequence[Sequence[Relay]], num_matrices: int) -> Iterator[tuple[Relay, int, int, tuple[int, int]]]:
    """(relay, matrix, node, clone) of all messages between owners and clones, in their order."""
    for relay in itertools.chain(*rounds):
        for n in range(num_matrices):
            for node, clones in relay.nodes.items():
                for clone in clones:
                    yield relay, n, node, clone


class Rails(Generic[M]):
    """What `rank` does of relays, in a group of nodes with `width` ranks each. messages: makes those of a step.

    `push` and `collect` yield step by step; whoever iterates starts one and goes on when it has come, with no more than
    that between.
    """

    def __init__(self, rank: int, width: int, messages: Callable[[], M]) -> None:
        self.rank, self.width, self._messages = rank, width, messages
        self.node, self.local = divmod(rank, width)
        self._mates = [mate for mate in range(self.node * width, (self.node + 1) * width) if mate != rank]

    def push(
        self,
        rounds: Sequence[Sequence[Relay]],
        sizes: Sequence[int],
        weight: Callable[[int, int], torch.Tensor],
        slot: Callable[[int, int], torch.Tensor],
    ) -> Iterator[M]:
        """Weights of relayed experts into the slots of their clones.

        sizes: elements of an expert's matrices. weight(expert, n): those of matrix n of an expert of this rank;
        slot(slot, n): of matrix n in a slot of this rank. Both contiguous [sizes[n]], of one dtype and device.
        """
        like = slot(0, 0)
        for relays in rounds:
            ours = [relay for relay in relays if relay.owner // self.width == self.node]
            cloned = [relay for relay in relays if self.node in relay.nodes]

            step, stripes = self._messages(), {}
            for relay in ours:
                for n, size in enumerate(sizes):
                    if relay.owner == self.rank:
                        whole = weight(relay.expert, n)
                        for mate in self._mates:
                            step.send(self._stripe(whole, mate), mate)
                        stripes[relay.expert, n] = self._stripe(whole, self.rank)
                    else:
                        stripes[relay.expert, n] = self._received(step, size, relay.owner, like)
            yield step

            step, came = self._messages(), {}
            for relay in relays:
                for n, size in enumerate(sizes):
                    for node in relay.nodes:
                        home = relay.owner // self.width
                        if node == home == self.node:
                            came[relay.expert, n] = stripes[relay.expert, n]
                        elif home == self.node:
                            step.send(stripes[relay.expert, n], self._peer(node))
                        elif node == self.node:
                            came[relay.expert, n] = self._received(step, size, self._peer(home), like)
            yield step

            step = self._messages()
            for relay in cloned:
                for n in range(len(sizes)):
                    for rank, number in relay.nodes[self.node]:
                        if rank != self.rank:
                            step.send(came[relay.expert, n], rank)
                            continue
                        whole = slot(number, n)
                        for mate in self._mates:
                            step.receive(self._stripe(whole, mate), mate)
                        self._stripe(whole, self.rank).copy_(came[relay.expert, n])
            yield step

    def collect(
        self,
        rounds: Sequence[Sequence[Relay]],
        sizes: Sequence[int],
        gradient: Callable[[int, int], torch.Tensor],
        add: Callable[[int, int, torch.Tensor], None],
    ) -> Iterator[M]:
        """Gradients of relayed experts' clones to their owners: add(expert, n, sum [sizes[n]]), once for each relay.

        gradient(slot, n): of matrix n in a slot of this rank, contiguous. The clones of a node are summed, rank and
        slot ascending, then the sums of the nodes, in the order of the relay.
        """
        like = gradient(0, 0)
        for relays in rounds:
            ours = [relay for relay in relays if relay.owner // self.width == self.node]
            cloned = [relay for relay in relays if self.node in relay.nodes]

            parts: dict[tuple[int, int], list[torch.Tensor]] = {}
            step = self._messages()
            for relay in cloned:
                for n, size in enumerate(sizes):
                    mine = parts[relay.expert, n] = []
                    for rank, number in relay.nodes[self.node]:
                        if rank != self.rank:
                            mine.append(self._received(step, size, rank, like))
                            continue
                        whole = gradient(number, n)
                        for mate in self._mates:
                            step.send(self._stripe(whole, mate), mate)
                        mine.append(self._stripe(whole, self.rank))
            yield step

            came: dict[tuple[int, int], list[torch.Tensor]] = {}
            step = self._messages()
            for relay in relays:
                for n, size in enumerate(sizes):
                    for node in relay.nodes:
                        home = relay.owner // self.width
                        if node == self.node:
                            total = _in_order(parts.pop((relay.expert, n)))
                        if home == self.node:
                            one = total if node == home else self._received(step, size, self._peer(node), like)
                            came.setdefault((relay.expert, n), []).append(one)
                        elif node == self.node:
                            step.send(total, self._peer(home))
            yield step

            step, sums = self._messages(), []
            for relay in ours:
                for n, size in enumerate(sizes):
                    total = _in_order(came.pop((relay.expert, n)))
                    if relay.owner != self.rank:
                        step.send(total, relay.owner)
                        continue
                    whole = like.new_empty(size)
                    for mate in self._mates:
                        step.receive(self._stripe(whole, mate), mate)
                    self._stripe(whole, self.rank).copy_(total)
                    sums.append((relay.expert, n, whole))
            yield step

            for expert, n, whole in sums:
                add(expert, n, whole)

    def _peer(self, node: int) -> int:
        """The rank of a node on this rank's rail."""
        return node * self.width + self.local

    def _stripe(self, whole: torch.Tensor, rank: int) -> torch.Tensor:
        """Of [size] what goes by that rank's rail, or the one that it goes by on the other node; may be empty."""
        first, last = self._bounds(len(whole), rank)
        return whole[first:last]

    def _bounds(self, size: int, rank: int) -> tuple[int, int]:
        each = -(-size // (self.width * _GRAIN)) * _GRAIN
        first = min(rank % self.width * each, size)
        return first, min(first + each, size)

    def _received(self, step: M, size: int, rank: int, like: torch.Tensor) -> torch.Tensor:
        """This rank's stripe of [size], on its way from a rank."""
        first, last = self._bounds(size, self.rank)
        stripe = like.new_empty(last - first)
        step.receive(stripe, rank)
        return stripe


def _in_order(parts: list[torch.Tensor]) -> torch.Tensor:
    """The sum of tensors, from the first on; none of them is written."""
    if len(parts) == 1:
        return parts[0]
    total = parts[0] + parts[1]
    for part in parts[2:]:
        total += part
    return total
