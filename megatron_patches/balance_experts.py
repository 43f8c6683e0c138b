"""What balancing sees of an experts module: matrices in owner slots, where optimizers keep them, how clones run.

Two modules, one view. Megatron's SequentialMLP has a parameter for every matrix of every expert, our GroupedExperts
(`--hybrid-ep-grouped-gemm`) one for a matrix of all local experts. Either way, matrix n of the expert in owner slot s
is a run of elements of some parameter; pushing, summing gradients and moving experts need to know no more.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from megatron.core.transformer.moe.experts import SequentialMLP

    from hybrid_ep.balance.owners import Owners
    from megatron_patches.balance_arriving import Arriving
    from megatron_patches.experts import GroupedExperts


class ExpertWeights:
    """The matrices of the experts of a layer on this rank.

    num_owners: owner slots. shapes, sizes: of the matrices of one expert.
    """

    waits_in_backward = False  # for what arrives, behind what does without it; else it is there before the backward

    def __init__(self, experts: torch.nn.Module, num_owners: int, shapes: Sequence[torch.Size]) -> None:
        self.experts, self.num_owners = experts, num_owners
        self.forward = experts.forward  # before clones take its place
        self.shapes, self.sizes = shapes, [shape.numel() for shape in shapes]

    @property
    def owners(self) -> list[torch.nn.Parameter]:
        """The parameters as they are now: `load_state_dict(assign=True)` and others put new ones in their places."""
        raise NotImplementedError

    def place(self, slot: int, n: int) -> tuple[torch.nn.Parameter, int]:
        """(parameter, offset): matrix n of the expert in an owner slot is its elements from `offset` on."""
        raise NotImplementedError

    def weight(self, slot: int, n: int) -> torch.Tensor:
        """That matrix, as it is in force now: optimizers re-point parameters."""
        return self.part(self.place(slot, n)[0].detach(), slot, n)

    def matrices(self, of: Callable[[torch.nn.Parameter], torch.Tensor]) -> Sequence[Any]:
        """of(parameter) of its parameters, as `hybrid_ep.spares.SpareSlots` takes matrices."""
        raise NotImplementedError

    def part(self, like_owner: torch.Tensor, slot: int, n: int) -> torch.Tensor:
        """The elements of matrix n in a tensor of its parameter's shape (a gradient, say), as a view [*shapes[n]]."""
        first = self.place(slot, n)[1]
        return like_owner.view(-1)[first : first + self.sizes[n]].view(self.shapes[n])


class SequentialWeights(ExpertWeights):
    """Of SequentialMLP: one MLP after the other, clones as functional calls of the first."""

    def __init__(self, experts: SequentialMLP) -> None:
        local = experts.local_experts
        super().__init__(experts, len(local), [p.shape for p in local[0].parameters()])
        self.local_experts = local
        self.names = [name for name, _ in local[0].named_parameters()]
        paths = [name.rpartition(".") for name in self.names]
        self._homes = [[(one.get_submodule(module), name) for module, _, name in paths] for one in local]

    @property
    def owners(self) -> list[torch.nn.Parameter]:
        return [getattr(module, name) for homes in self._homes for module, name in homes]

    def place(self, slot: int, n: int) -> tuple[torch.nn.Parameter, int]:
        module, name = self._homes[slot][n]
        return getattr(module, name), 0

    def matrices(self, of: Callable[[torch.nn.Parameter], torch.Tensor]) -> Sequence[Any]:
        """As the base class: each by itself."""
        return [[of(getattr(module, name)) for module, name in homes] for homes in self._homes]

    def run(
        self,
        rows: torch.Tensor,
        tokens_per_expert: torch.Tensor,
        probs: torch.Tensor,
        stacks: Sequence[torch.Tensor],
        in_slots: AbstractContextManager[object],
        arriving: Arriving,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(outputs of owners and clones [P, H], bias). stacks: weights of the clones, [slots, *shape] a matrix.

        in_slots: context in which operators that read `stacks` run. arriving: who brings what they hold, waited for
        behind the owners' rows."""
        counts = tokens_per_expert.tolist()
        first = sum(counts[: self.num_owners])
        output, bias = self.forward(rows[:first], tokens_per_expert[: self.num_owners], probs[:first])
        outputs = [output]
        arriving.wait()
        with in_slots:
            for *mine, count in zip(*(stack.unbind(0) for stack in stacks), counts[self.num_owners :], strict=True):
                call = (rows[first : first + count], probs[first : first + count])
                replaced = dict(zip(self.names, mine, strict=True))
                outputs.append(torch.func.functional_call(self.local_experts[0], replaced, call)[0])
                first += count
        return torch.cat(outputs), bias

    def name_logically(self, owners: Owners) -> None:
        """Checkpoints call experts by their ids, wherever they live."""
        logical = _logical_sharded_state_dict(self.experts, owners)
        setattr(self.experts, "sharded_state_dict", logical)  # noqa: B010 - an instance attribute over a method


class StackedWeights(ExpertWeights):
    """Of GroupedExperts: grouped GEMMs over two stacks, the parameter and the slots. No weight is copied."""

    waits_in_backward = True

    def __init__(self, experts: GroupedExperts) -> None:
        super().__init__(experts, experts.num_local_experts, [p.shape[1:] for p in experts.parameters()])
        self.grouped = experts
        self._names = [name for name, _ in experts.named_parameters()]

    @property
    def owners(self) -> list[torch.nn.Parameter]:
        return [getattr(self.grouped, name) for name in self._names]

    def place(self, slot: int, n: int) -> tuple[torch.nn.Parameter, int]:
        return getattr(self.grouped, self._names[n]), slot * self.sizes[n]

    def matrices(self, of: Callable[[torch.nn.Parameter], torch.Tensor]) -> Sequence[Any]:
        """As the base class: all owners' in a stack."""
        return [of(owner) for owner in self.owners]

    def run(
        self,
        rows: torch.Tensor,
        tokens_per_expert: torch.Tensor,
        probs: torch.Tensor,
        stacks: Sequence[torch.Tensor],
        in_slots: AbstractContextManager[object],
        arriving: Arriving,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """As SequentialWeights.run."""
        of_matrices = [arriving.of(n) for n in range(len(stacks))]
        with in_slots:
            return self.forward(rows, tokens_per_expert, probs, [(stacks[0], stacks[1])], of_matrices)

    def name_logically(self, owners: Owners) -> None:
        """Checkpoints call experts by their ids, wherever they live."""
        mine = functools.partial(owners.experts_of, self.grouped.ep_group.rank())
        setattr(self.grouped, "expert_ids", mine)  # noqa: B010 - an instance attribute over a method


def weights_of(experts: SequentialMLP | GroupedExperts, mode: str) -> SequentialWeights | StackedWeights:
    """The view of an experts module. ValueError for one that balancing does not know."""
    if hasattr(experts, "expert_weights"):
        return StackedWeights(experts)
    if hasattr(experts, "local_experts"):
        return SequentialWeights(experts)
    raise ValueError(
        f"--hybrid-ep-balance {mode} works with SequentialMLP experts and with those of --hybrid-ep-grouped-gemm, not "
        f"{type(experts).__name__}: give --hybrid-ep-grouped-gemm, drop --moe-grouped-gemm, or balance off"
    )


def _logical_sharded_state_dict(experts: SequentialMLP, owners: Owners) -> Callable[..., dict[str, Any]]:
    """A replacement for SequentialMLP.sharded_state_dict whose global offsets are logical ids, wherever experts live.

    Megatron numbers an expert ep_rank * num_local_experts + i. For every expert alone it is told of a group of
    num_experts ranks, of which this is the one with the expert's id.
    """
    original = type(experts).sharded_state_dict

    class OneRankAnExpert:
        def __init__(self, expert: int) -> None:
            self.rank, self.size = lambda: expert, lambda: len(owners.slot_of)

    def sharded_state_dict(
        prefix: str = "", sharded_offsets: tuple[tuple[int, int, int], ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        found: dict[str, Any] = {}
        mine = owners.experts_of(experts.ep_group.rank())
        for local, expert in enumerate(mine):
            one = type("OneExpert", (), {})()
            one.__dict__.update(experts.__dict__, num_local_experts=1, ep_group=OneRankAnExpert(expert))
            one.local_experts = [experts.local_experts[local]]
            part = original(one, prefix, sharded_offsets, metadata)
            place = f"{prefix}local_experts."
            found |= {f"{place}{local}{key.removeprefix(place + '0')}": value for key, value in part.items()}
        return found

    return sharded_state_dict
