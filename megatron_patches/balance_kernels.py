"""Weights of clones pushed, and their gradients brought home, by the ranks' own kernels (`hybrid_ep.spares`).

No host reads whose weights go where. Slots and gradient buffers are registered once, for all layers whose experts are
alike. Gradients are summed in fp32, in the order of the plan, and added to main_grad, as `balance_push` does, so that
on one node both give the same bits. Over several nodes an owner adds each node's sum by itself, where torch's way adds
the sum of them all. Where the kernels cannot push, torch does, which is said.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from hybrid_ep.runtime import devices
from hybrid_ep.runtime.spares import why_not
from megatron_patches import graphs
from megatron_patches.balance_arriving import Bank, Homeward, Pushed, SlotUse, fp32_main_grad
from megatron_patches.balance_push import CloneExperts

if TYPE_CHECKING:
    from hybrid_ep.balance.microbatch import MicrobatchPlan
    from hybrid_ep.spares import SpareSlots
    from megatron_patches.balance import ExactManager

# (group, spare slots, experts of a rank, shapes, dtype, what its layers ask of exchanges, whether clones stay on their
# owners' nodes, of which direction, None of both) -> slots for all layers, and who has them
_slots: dict[tuple[Any, ...], tuple[SpareSlots, SlotUse]] = {}
_said: set[tuple[dist.ProcessGroup, str]] = set()  # choices that were printed


@dataclasses.dataclass(frozen=True)
class RegisteredBank(Bank):
    """spares: whose weights the stacks are. Those of forwards that take turns with backwards have no gradients."""

    spares: SpareSlots


@dataclasses.dataclass(frozen=True)
class Work:
    """A plan for the kernels. slot_expert: int32 [R, S] on their device."""

    plan: MicrobatchPlan
    slot_expert: torch.Tensor


def clone_experts(manager: ExactManager) -> CloneExperts:
    """The clones of a manager's experts, pushed as the settings say. ValueError for kernels where they cannot."""
    wanted, why = manager.settings.balance.push, _why_torch(manager, manager.settings.balance.push)
    if wanted == "kernels" and why is not None:
        raise ValueError(f"--hybrid-ep-balance-push kernels: {why}; give torch or auto")
    chosen, reason = ("torch", why) if wanted == "auto" and why is not None else (wanted, None)
    if chosen == "torch" and graphs.of_iterations(manager.config):
        raise ValueError(
            f"a CUDA graph of whole iterations holds clones that kernels push, and here they cannot: {why}; give "
            "another --cuda-graph-impl, or balance off"
        )
    if reason is not None:
        say(manager.group, f"weights of clones are pushed by torch.distributed, not by kernels: {reason}")
    return CloneExperts(manager) if chosen == "torch" else KernelCloneExperts(manager)


def _why_torch(manager: ExactManager, wanted: str) -> str | None:
    """Why the kernels cannot push these experts, or with auto do not; None: they do. All ranks, whose GPUs are alike,
    find the same."""
    asked, device = manager.planner.options, manager.weights.owners[0].device
    far = asked.num_nodes > 1 and not asked.within_node
    asks = wanted == "auto" and far and device.type == "cuda" and not graphs.of_iterations(manager.config)
    if asks and not devices.orders_rdma_for_peers(device):
        return (
            f"clones may lie on any of the group's {asked.num_nodes} nodes (--hybrid-ep-balance-clones anywhere, or "
            "auto with static rows), and this GPU orders what NICs write for itself alone, where its node's others "
            "would read it"
        )
    dtypes = {owner.dtype for owner in manager.weights.owners}
    if len(dtypes) > 1:
        return f"an expert's matrices have several types, {sorted(map(str, dtypes))}"
    return why_not(manager.weights.shapes, dtypes.pop())


def say(group: dist.ProcessGroup, what: str) -> None:
    """Once a group, on stderr of its rank 0."""
    if (group, what) not in _said and group.rank() == 0:
        print(f"hybrid_ep: {what}", file=sys.stderr, flush=True)
    _said.add((group, what))


def release() -> None:
    """Give the slots' memory back; layers that live on cannot push any more."""
    _said.clear()
    while _slots:
        _slots.popitem()[1][0].destroy()


def describe() -> tuple[str, ...]:
    """One line for each set of slots."""
    return tuple(
        f"SpareSlots: {key[0].size()} ranks, {key[1]} slots a rank for clones{_DIRECTIONS[key[7]]}, {key[4]}, "
        f"{slots.memory_report().total_bytes:,} bytes registered"
        for key, (slots, _) in _slots.items()
    )


_DIRECTIONS = {None: "", False: " of forwards", True: " of backwards"}


class KernelCloneExperts(CloneExperts):
    """As the base class; weights and gradients go by kernels."""

    forward_bank: RegisteredBank
    backward_bank: RegisteredBank

    @property
    def spares(self) -> SpareSlots:
        """Those that collect gradients."""
        return self.backward_bank.spares

    def make_bank(self, backwards: bool = False) -> RegisteredBank:
        """As the base class. Collective. Either direction has an engine of its own, so that what one sends never waits
        behind what the other has not begun."""
        from hybrid_ep.spares import SpareSlots

        wanted, weights = self.manager.settings.exchange, self.weights
        shapes, dtype = tuple(tuple(shape) for shape in weights.shapes), weights.owners[0].dtype
        stay = self.manager.planner.options.within_node
        direction = backwards if self.takes_turns else None
        key = self.group, self.num_slots, weights.num_owners, shapes, dtype, wanted, stay, direction
        if key not in _slots:
            made = SpareSlots(
                self.group,
                spare_slots=self.num_slots,
                num_owners=weights.num_owners,
                shapes=shapes,
                dtype=dtype,
                clones_within_node=stay,
                gradients=direction is not False,
                num_of_hybrid_ep_ranks_per_nvlink_domain=wanted.ranks_per_node,
                timeout_s=wanted.timeout_s,
            )
            _slots[key] = made, SlotUse()
        spares, use = _slots[key]
        return RegisteredBank(list(spares.weights), use, spares)

    def work_of(self, plan: MicrobatchPlan) -> Work:
        """The plan where kernels read it: as they made it, or a host's."""
        made = getattr(plan, "clones", None)
        if made is not None:
            return Work(plan, made.slot_expert)
        return Work(plan, torch.from_numpy(plan.slot_expert).to(self.stacks[0].device))

    def start_push(self, work: Any, bank: Bank) -> Pushed:
        """Send my experts' weights to their clones. What it returns waits for those of my slots."""
        assert isinstance(bank, RegisteredBank)
        bank.spares.push(work.slot_expert, self.weights.matrices(_aligned), self.manager.owners)
        return bank.spares

    def may_clone(self, plan: MicrobatchPlan) -> bool:
        """Where kernels run beside the host, it does not ask them: then slots without a clone have no token."""
        return self.stacks[0].device.type != "cpu" or not plan.is_empty

    def start_home(self, work: Any, gradients: Sequence[torch.Tensor]) -> Homeward:
        """As the base class. Without main_grad in fp32 the host reads the plan: autograd is to get gradients of those
        parameters alone whose experts have clones. What comes for frozen ones goes nowhere."""
        weights = self.weights
        for stack, gradient in zip(self.spares.gradients, gradients, strict=True):
            stack.copy_(gradient)
        sums = {owner: fp32_main_grad(owner) for owner in weights.owners}
        made = {owner: torch.zeros_like(owner, dtype=torch.float32) for owner, total in sums.items() if total is None}
        left = [owner for owner in made if owner.requires_grad]
        totals = {owner: made[owner] if total is None else total for owner, total in sums.items()}
        if left and self.stacks[0].device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "clones' gradients of parameters without main_grad in fp32 are given to autograd by a plan that the "
                "host reads, which a CUDA graph cannot: give --accumulate-allreduce-grads-in-fp32"
            )
        targets = weights.matrices(lambda owner: totals[owner].view_as(owner))
        self.spares.start_collect(work.slot_expert, targets, self.manager.owners)
        cloned = self._cloned(work.plan) if left else set()
        given = {owner: total for owner, total in made.items() if owner in cloned}
        return Homeward(self.spares.wait_collect, weights.owners, given, list(made.values()))

    def _cloned(self, plan: MicrobatchPlan) -> set[torch.nn.Parameter]:
        """Parameters without main_grad in fp32 whose experts have clones."""
        me, found = self.group.rank(), set()
        for expert in {int(e) for e in plan.slot_expert.ravel() if e >= 0}:
            if self.manager.owners.rank_of[expert] == me:
                owners = {self.weights.place(self.owner_slot(expert), n)[0] for n in range(len(self.weights.sizes))}
                found |= {owner for owner in owners if fp32_main_grad(owner) is None}
        return found


def _aligned(weight: torch.nn.Parameter) -> torch.Tensor:
    """As bulk copies read it; optimizers' buffers put parameters at multiples of 16 bytes already."""
    fits = weight.is_contiguous() and weight.data_ptr() % 16 == 0
    return weight if fits else weight.detach().clone(memory_format=torch.contiguous_format)
