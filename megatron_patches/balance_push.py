"""Weights of clones: pushed from home to spare slots, run there, their gradients summed back into the home.

Everything is point to point between ranks of the expert-parallel group, in the order of the plan, which all ranks
share: (rank, slot) ascending. Gradients travel and are summed in fp32. With Megatron's DDP they are added to the
parameter's main_grad in the backward of the push; that runs before the parameter's own gradient is complete, hence
before DDP counts the parameter as ready and reduces its bucket. Nothing is averaged, and it happens once a backward,
also under no-sync accumulation.
"""

import time
from datetime import timedelta

import torch
import torch.distributed as dist

from hybrid_ep.errors import DeadlineError
from megatron_patches import settings

DEFAULT_TIMEOUT_S = 100.0

_slots = {}  # (group, spare slots, elements, dtype, device) -> Tensor [spare slots, elements], for all layers


def _shared_slots(group, num_slots, num_elements, like):
    key = (group, num_slots, num_elements, like.dtype, like.device)
    if key not in _slots:
        _slots[key] = torch.zeros(num_slots, num_elements, dtype=like.dtype, device=like.device)
    return _slots[key]


def release():
    """Forget the shared slots; layers that live on keep theirs."""
    _slots.clear()


def wait_for(work, what, rank):
    """Wait for torch.distributed's handles together; DeadlineError when one does not end in time or a peer is gone."""
    limit = settings.current().timeout_s or DEFAULT_TIMEOUT_S
    start = time.monotonic()
    for one in work:
        left = max(limit - (time.monotonic() - start), 0.001)
        try:
            one.wait(timedelta(seconds=left))
        except RuntimeError as error:
            waited = time.monotonic() - start
            raise DeadlineError(
                f"{what}: rank {rank} waited {waited:.1f} s of {limit:g} s for a peer: {error}",
                site=what, rank=rank, waited_s=waited,
            ) from error


class Transfer:
    """Messages under way between ranks of a group, waited for with a deadline."""

    def __init__(self, group, what):
        self.group, self.what, self.operations, self.work, self.kept = group, what, [], [], []

    def send(self, tensor, rank):
        self.kept.append(tensor)  # alive until it has arrived
        self.operations.append(dist.P2POp(dist.isend, tensor, dist.get_global_rank(self.group, rank), self.group))

    def receive(self, tensor, rank):
        self.operations.append(dist.P2POp(dist.irecv, tensor, dist.get_global_rank(self.group, rank), self.group))

    def start(self):
        if self.operations:
            self.work = dist.batch_isend_irecv(self.operations)
        return self

    def wait(self):
        """DeadlineError when a peer does not answer in time or is gone."""
        wait_for(self.work, self.what, self.group.rank())
        self.work, self.operations, self.kept = [], [], []


class CloneExperts:
    """The experts of one layer and the clones that this rank runs for others.

    experts: Megatron's SequentialMLP; all its experts have the same parameters in the same order.
    """

    def __init__(self, manager, experts):
        self.manager, self.group = manager, manager.group
        self.run_homes, self.local_experts = experts.forward, experts.local_experts
        self.num_homes, self.num_slots = len(experts.local_experts), manager.settings.spare_slots
        self.names = [name for name, _ in self.local_experts[0].named_parameters()]
        shapes = [p.shape for p in self.local_experts[0].parameters()]
        self.shapes, self.sizes = shapes, [shape.numel() for shape in shapes]
        like = next(self.local_experts[0].parameters())
        self.slots = _shared_slots(self.group, self.num_slots, sum(self.sizes), like)

    def parameters_of(self, expert):
        """Parameters of a logical expert whose home is here."""
        first = self.group.rank() * self.num_homes
        return list(self.local_experts[self.manager.homes.slot_of[expert] - first].parameters())

    def clones(self, plan):
        """(expert, home, rank, slot) of every clone, in the order that all ranks use."""
        for rank, row in enumerate(plan.slot_expert.tolist()):
            for slot, expert in enumerate(row):
                if expert >= 0:
                    yield expert, int(plan.home[expert]), rank, slot

    def start_push(self, plan):
        """Send my experts' weights to their clones and receive those of my slots. Returns what to wait for."""
        transfer, me = Transfer(self.group, "weight push"), self.group.rank()
        for expert, home, rank, slot in self.clones(plan):
            if home == me:  # read now: an optimizer may have re-pointed the data since the last time
                transfer.send(torch.cat([p.detach().reshape(-1) for p in self.parameters_of(expert)]), rank)
            if rank == me:
                transfer.receive(self.slots[slot], home)
        return transfer.start()

    def collect_gradients(self, plan, gradients):
        """Sum clone gradients (fp32 [slots, elements] on this rank) at their homes: dict expert -> fp32 [elements]."""
        transfer, me = Transfer(self.group, "clone gradients"), self.group.rank()
        arrived = []
        for expert, home, rank, slot in self.clones(plan):
            if rank == me:
                transfer.send(gradients[slot], home)
            if home == me:
                arrived.append((expert, torch.empty_like(self.slots[0], dtype=torch.float32)))
                transfer.receive(arrived[-1][1], rank)
        transfer.start().wait()
        sums = {}
        for expert, gradient in arrived:
            sums[expert] = sums[expert] + gradient if expert in sums else gradient
        return sums

    def views(self, flat):
        """One slot's elements as the expert's parameters."""
        return [part.view(shape) for part, shape in zip(flat.split(self.sizes), self.shapes, strict=True)]

    def forward(self, rows, tokens_per_expert, probs):
        """The experts' forward: homes through Megatron's, then each slot with its clone's weights."""
        plan, push = self.manager.last_plan, self.manager.push
        counts = tokens_per_expert.tolist()
        homes = sum(counts[: self.num_homes])
        output, bias = self.run_homes(rows[:homes], tokens_per_expert[: self.num_homes], probs[:homes])
        if not self.num_slots or plan.is_empty:
            return output, bias
        push.wait()
        parameters = [p for expert in self.local_experts for p in expert.parameters()]
        weights = _Push.apply(self, plan, *parameters)
        outputs, first = [output], homes
        with torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack):
            for slot in range(self.num_slots):
                last = first + counts[self.num_homes + slot]
                mine = weights[slot * len(self.names) : (slot + 1) * len(self.names)]
                replaced = dict(zip(self.names, mine, strict=True))
                call = (rows[first:last], probs[first:last])
                outputs.append(torch.func.functional_call(self.local_experts[0], replaced, call)[0])
                first = last
        return _Refill.apply(self, plan, torch.cat(outputs)), bias

    def _pack(self, tensor):
        """A tensor that lives in the slots is kept as its place there: other layers will use the memory."""
        if tensor.untyped_storage().data_ptr() != self.slots.untyped_storage().data_ptr():
            return tensor
        return tensor.storage_offset(), tensor.size(), tensor.stride()

    def _unpack(self, packed):
        if torch.is_tensor(packed):
            return packed
        offset, size, stride = packed
        return torch.as_strided(self.slots.data, size, stride, offset)


class _Push(torch.autograd.Function):
    """Home parameters -> weights in the slots. Backward: clone gradients to their homes."""

    @staticmethod
    def forward(ctx, clones, plan, *parameters):
        ctx.clones, ctx.plan = clones, plan
        # .data: the slots are refilled under the graph on purpose, _unpack knows.
        return tuple(view for slot in range(clones.num_slots) for view in clones.views(clones.slots.data[slot]))

    @staticmethod
    def backward(ctx, *gradients):
        clones = ctx.clones
        per_slot = len(clones.names)
        flat = [
            torch.cat([g.float().reshape(-1) for g in gradients[s * per_slot : (s + 1) * per_slot]])
            for s in range(clones.num_slots)
        ]
        sums = clones.collect_gradients(ctx.plan, flat)
        result = []
        homes = clones.manager.homes.experts_of(clones.group.rank())
        for logical, expert in zip(homes, clones.local_experts, strict=True):
            parts = clones.views(sums[logical]) if logical in sums else [None] * per_slot
            for parameter, part in zip(expert.parameters(), parts, strict=True):
                if part is not None and getattr(parameter, "main_grad", None) is not None:
                    parameter.main_grad.add_(part)  # fp32; autograd would round to the parameter's dtype
                    part = None
                result.append(part if part is None else part.to(parameter.dtype))
        return None, None, *result


class _Refill(torch.autograd.Function):
    """The identity. Backward: the slots get this plan's weights again, before the experts' backward reads them."""

    @staticmethod
    def forward(ctx, clones, plan, output):
        ctx.clones, ctx.plan = clones, plan
        return output.view_as(output)

    @staticmethod
    def backward(ctx, gradient):
        ctx.clones.start_push(ctx.plan).wait()
        return None, None, gradient
