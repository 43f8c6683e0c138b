"""Weights of clones: pushed from owner to spare slots, run there, their gradients summed back into the owner.

By torch.distributed; where the ranks' own kernels do it, `balance_kernels` has what differs. Everything is point to
point between ranks of the expert-parallel group, in stripes along the rails or straight, as the plan says, which all
ranks share (`balance_relay`). Gradients travel and are summed in fp32. With Megatron's DDP they are added to
main_grad in the backward of the push; that runs before the parameter's own gradient is complete, hence before DDP
counts the parameter as ready and reduces its bucket. Nothing is averaged, and it happens once a backward, also under
no-sync accumulation.
"""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from hybrid_ep.balance.relays import relays
from hybrid_ep.errors import DeadlineError
from megatron_patches import settings
from megatron_patches.balance_arriving import Bank, Homeward, Push, Pushed, Refill, SlotUse, fp32_main_grad
from megatron_patches.balance_relay import Rails, Straight
from megatron_patches.saved_places import SavedPlaces
from megatron_patches.trained import SomeTrain

if TYPE_CHECKING:
    from hybrid_ep.balance.microbatch import MicrobatchPlan
    from megatron_patches.balance import ExactManager

# Bytes of an expert's weights from which they go along the rails. By arithmetic, not measured on a GPU: two more steps
# of messages at an assumed 30 us each are three clones of a mebibyte through a NIC of 50 GB/s. Owners of smaller
# experts receive the gradients of all clones at once, at most two mebibytes each.
RAILS_FROM_BYTES = 1 << 20

_Place = tuple[int, torch.Size, tuple[int, ...]]  # (storage offset, size, stride)

_SlotsKey = tuple[dist.ProcessGroup, int, int, torch.dtype, torch.device, bool]
# (group, spare slots, elements, dtype, device, for backwards alone) -> (Tensor [spare slots * elements] for all layers,
# who has it)
_slots: dict[_SlotsKey, tuple[torch.Tensor, SlotUse]] = {}


def _shared_slots(
    group: dist.ProcessGroup, num_slots: int, num_elements: int, like: torch.Tensor, backwards: bool
) -> tuple[torch.Tensor, SlotUse]:
    key = (group, num_slots, num_elements, like.dtype, like.device, backwards)
    if key not in _slots:
        slots = torch.zeros(num_slots * num_elements, dtype=like.dtype, device=like.device)
        _slots[key] = slots, SlotUse()
    return _slots[key]


def release() -> None:
    """Forget the shared slots; layers that live on keep theirs."""
    _slots.clear()


def wait_for(work: Iterable[dist.Work], what: str, rank: int) -> None:
    """Wait for torch.distributed's handles together; DeadlineError when one does not end in time or a peer is gone."""
    limit = settings.current().exchange.longest_wait_s
    start = time.monotonic()
    for one in work:
        left = max(limit - (time.monotonic() - start), 0.001)
        try:
            one.wait(timedelta(seconds=left))
        except RuntimeError as error:
            waited = time.monotonic() - start
            raise DeadlineError(
                f"{what}: rank {rank} waited {waited:.1f} s of {limit:g} s for a peer: {error}",
                site=what,
                rank=rank,
                waited_s=waited,
            ) from error


class Transfer:
    """Messages under way between ranks of a group, waited for with a deadline."""

    def __init__(self, group: dist.ProcessGroup, what: str) -> None:
        self.group, self.what = group, what
        self.operations: list[dist.P2POp] = []
        self.work: list[dist.Work] = []
        self.kept: list[torch.Tensor] = []

    def send(self, tensor: torch.Tensor, rank: int) -> None:
        if not tensor.numel():
            return
        self.kept.append(tensor)  # alive until it has arrived
        self.operations.append(dist.P2POp(dist.isend, tensor, dist.get_global_rank(self.group, rank), self.group))

    def receive(self, tensor: torch.Tensor, rank: int) -> None:
        if tensor.numel():
            self.operations.append(dist.P2POp(dist.irecv, tensor, dist.get_global_rank(self.group, rank), self.group))

    def start(self) -> Transfer:
        if self.operations:
            self.work = dist.batch_isend_irecv(self.operations)
        return self

    def follow(self) -> None:
        """The current stream of a GPU waits, and the host goes on: nccl's handles hold it up for a deadline alone."""
        for one in self.work:
            one.wait()

    def wait(self) -> None:
        """DeadlineError when a peer does not answer in time or is gone."""
        wait_for(self.work, self.what, self.group.rank())
        self.work, self.operations, self.kept = [], [], []


class Steps:
    """Transfers one after the other, each made when the one before has come. On a GPU all are queued at once, on a
    stream of their own, which waits for them where the host does not; hosts start the first, and `wait` does the
    rest."""

    def __init__(self, steps: Iterator[Transfer], device: torch.device) -> None:
        self._steps = steps
        self._under_way: list[Transfer] = []
        self._side = _side_stream(device) if device.type == "cuda" else None
        if self._side is None:
            self._under_way = [step.start() for step in itertools.islice(steps, 1)]
            return
        self._side.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(self._side):
            for step in steps:
                self._under_way.append(step.start())
                step.follow()

    def wait(self) -> None:
        """DeadlineError when a peer does not answer in time or is gone."""
        for step in self._under_way:
            step.wait()
        for step in self._steps:  # none on a GPU
            step.start().wait()
        self._under_way = []
        if self._side is not None:
            torch.cuda.current_stream(self._side.device).wait_stream(self._side)


@functools.cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


class CloneExperts:
    """Runs a layer's experts with the clones that this rank holds for others.

    forward_bank, backward_bank: the slots, which all layers share; one and the same unless passes take turns. number:
    of this layer among these; doubts: weights come before its backward asks where there are none. takes_turns: a
    forward of one micro-batch and a backward of another, layer by layer.
    """

    def __init__(self, manager: ExactManager) -> None:
        self.manager, self.group, self.weights = manager, manager.group, manager.weights
        self.num_slots = manager.settings.balance.spare_slots
        self.takes_turns = bool(getattr(manager.config, "overlap_moe_expert_parallel_comm", False))
        self.forward_bank = self.backward_bank = self.make_bank()
        if self.takes_turns:
            self.backward_bank = self.make_bank(backwards=True)
        self.stacks = self.forward_bank.stacks
        self.number, self.doubts = self.forward_bank.use.next_number(), 0
        self.ranks_per_node = self.group.size() // manager.planner.options.num_nodes
        self.straight = sum(self.weights.sizes) * self.stacks[0].element_size() < RAILS_FROM_BYTES
        self._some_train = SomeTrain(self.group, manager.settings.exchange.longest_wait_s)

    def make_bank(self, backwards: bool = False) -> Bank:
        """The slots that all layers share. backwards: those of backwards that take turns with forwards."""
        sizes, like = [self.num_slots * size for size in self.weights.sizes], self.weights.owners[0]
        slots, use = _shared_slots(self.group, self.num_slots, sum(self.weights.sizes), like, backwards)
        shapes = [(self.num_slots, *shape) for shape in self.weights.shapes]
        return Bank([part.view(shape) for part, shape in zip(slots.split(sizes), shapes, strict=True)], use)

    def check_type(self) -> None:
        """ValueError where experts have been converted since the layer was built: slots have the type of that time."""
        now, then = self.weights.place(0, 0)[0].dtype, self.stacks[0].dtype
        if now != then:
            raise ValueError(
                f"the experts' weights are {now}, and --hybrid-ep-balance {self.manager.settings.balance.mode} has "
                f"made spare slots of {then}, which they were when their layer was built: build it in the type that "
                "trains (params_dtype), and do not convert it"
            )

    def owner_slot(self, expert: int) -> int:
        """Local owner slot of a logical expert that lives here."""
        return self.manager.owners.slot_of[expert] - self.group.rank() * self.weights.num_owners

    def work_of(self, plan: MicrobatchPlan) -> Any:
        """What start_push and the backward are given of a plan."""
        return relays(plan.slot_expert, plan.owner, self.ranks_per_node)

    def start_push(self, work: Any, bank: Bank) -> Pushed:
        """Send my experts' weights to their clones and receive those of my slots. Returns what to wait for."""
        steps = self._way("weight push").push(
            work,
            self.weights.sizes,
            weight=lambda expert, n: self.weights.weight(self.owner_slot(expert), n).view(-1),
            slot=lambda slot, n: bank.stacks[n][slot].view(-1),
        )
        return Steps(steps, self.stacks[0].device)

    def collect_gradients(
        self, work: Any, gradients: list[torch.Tensor], add: Callable[[int, int, torch.Tensor], None]
    ) -> Steps:
        """Start to bring clone gradients to the owners: `add(expert, n, sum)`, once for each relay and matrix.

        gradients: fp32 [slots, *shape] on this rank, for every matrix n, to be kept until all is waited for."""
        steps = self._way("clone gradients").collect(
            work,
            self.weights.sizes,
            gradient=lambda slot, n: gradients[n][slot].view(-1),
            add=lambda expert, n, total: add(expert, n, total.view(self.weights.shapes[n])),
        )
        return Steps(steps, self.stacks[0].device)

    def _way(self, what: str) -> Rails[Transfer] | Straight[Transfer]:
        rank, messages = self.group.rank(), lambda: Transfer(self.group, what)
        return Straight(rank, messages) if self.straight else Rails(rank, self.ranks_per_node, messages)

    def forward(
        self, rows: torch.Tensor, tokens_per_expert: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The experts' forward: owners with their own weights, then each slot with its clone's."""
        plan, arriving = self.manager.last_plan, self.manager.push
        if plan is None or arriving is None:
            raise RuntimeError("the experts of a balanced layer ran before its dispatch: call the dispatcher first")
        if arriving.used and torch._C._current_graph_task_id() != -1:
            raise RuntimeError(
                "the experts of a balanced layer ran again in a backward without their dispatch, which says whose "
                "clones these are: checkpoint the whole MoE layer, not its experts alone"
            )
        arriving.used = True
        if not self.may_clone(plan):
            arriving.without_clones()
            owners = int(tokens_per_expert[: self.weights.num_owners].sum())
            return self.weights.forward(rows[:owners], tokens_per_expert[: self.weights.num_owners], probs[:owners])
        stacks = Push.apply(arriving, self._anchor(), *self.weights.owners)
        in_slots = SavedPlaces(self._place_of, self._at)
        output, bias = self.weights.run(rows, tokens_per_expert, probs, stacks, in_slots, arriving)
        arriving.wait()  # where nothing was computed with them
        return Refill.apply(arriving, output), bias

    def _anchor(self) -> torch.Tensor | None:
        """What has this rank's backward bring clones' gradients home although all experts here are frozen: others wait
        for them where any rank's are trained."""
        owners = self.weights.owners
        if not torch.is_grad_enabled() or not self._some_train.ask(owners) or any(o.requires_grad for o in owners):
            return None
        return self.stacks[0].new_empty(0).requires_grad_()

    def may_clone(self, plan: MicrobatchPlan) -> bool:
        """Whether to run the clones, the same on all ranks."""
        return not plan.is_empty

    def start_home(self, work: Any, gradients: Sequence[torch.Tensor]) -> Homeward:
        """Start to add clone gradients [slots, *shape] to their owners: to main_grad in fp32 where there is one.
        Collective."""
        weights = self.weights
        # parameter -> fp32 sum, where there is no main_grad in fp32 to add to
        sums: dict[torch.nn.Parameter, torch.Tensor] = {}
        for relay in itertools.chain(*work):
            if relay.owner == self.group.rank():
                slot = self.owner_slot(relay.expert)
                for owner in {weights.place(slot, n)[0] for n in range(len(weights.sizes))}:
                    if fp32_main_grad(owner) is None and owner not in sums:
                        sums[owner] = torch.zeros_like(owner, dtype=torch.float32)

        def add(expert: int, n: int, gradient: torch.Tensor) -> None:
            slot = self.owner_slot(expert)
            owner, _ = weights.place(slot, n)
            total = fp32_main_grad(owner)
            # autograd would round to the parameter's dtype
            weights.part(sums[owner] if total is None else total, slot, n).add_(gradient)

        given = [g.float().contiguous() for g in gradients]
        return Homeward(self.collect_gradients(work, given, add).wait, weights.owners, sums, given)

    def _place_of(self, tensor: torch.Tensor) -> _Place | None:
        """Of a tensor that lives in the slots: other layers will use the memory."""
        if tensor.untyped_storage().data_ptr() != self.stacks[0].untyped_storage().data_ptr():
            return None
        return int(tensor.storage_offset()), tensor.size(), tensor.stride()

    def _at(self, place: _Place) -> torch.Tensor:
        offset, size, stride = place
        return torch.as_strided(self.backward_bank.stacks[0].data, size, stride, offset)
