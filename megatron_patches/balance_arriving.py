"""Weights of a micro-batch's clones on their way into the spare slots, gradients on their way home, and whose slots
they are.

All layers share the slots, so that a layer's backward sends for its clones' weights again. Two of these pushes are
saved or begun early, on all ranks alike, for all run the same layers in the same order: where a backward follows its
own forward, as the last layer's and a recomputed one's do, the slots hold them still; and as soon as a backward is done
with the slots, weights for the layer before it are sent for, whose backward comes next, beside all that lies between.

Where forwards and backwards take turns, layer by layer (Megatron's 1F1B overlap of expert communication), each
direction has slots of its own, a bank: a forward's weights travel beside the backward that has its turn, and take
nothing from it.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch

if TYPE_CHECKING:
    from megatron_patches.balance_push import CloneExperts


_DOUBTS = 8  # how often it must be right to send early before that is done again, when it was in vain
_Weak = Callable[[], "Arriving | None"]


class Pushed(Protocol):
    """A push under way."""

    def wait(self) -> None: ...


class SlotUse:
    """Of the slots that some layers share. Of those who come by it keeps no one alive: they lead to whole models.

    push: under way to whoever holds the slots; collection: gradients under way out of them. Of a pass that an error
    ended nobody waits for these but whoever comes next. layers: how many share the slots.
    """

    def __init__(self) -> None:
        self.push: Pushed | None = None
        self.collection: Homeward | None = None
        self.layers = 0
        self._holder: _Weak = _nobody
        self._latest: _Weak = _nobody
        self._guess: _Weak = _nobody
        self._early: Callable[[], CloneExperts | None] = _nobody

    def next_number(self) -> int:
        """Of a layer more, in the order in which they are made."""
        self.layers += 1
        return self.layers - 1

    @property
    def holder(self) -> Arriving | None:
        """Whose weights the slots have, or are to have when `push` is done."""
        return self._holder()

    @holder.setter
    def holder(self, one: Arriving | None) -> None:
        self._holder = _weak(one)

    def forward_of(self, one: Arriving) -> Arriving | None:
        """A forward that a backward will follow: whose was the one before it."""
        latest, self._latest = self._latest(), _weak(one)
        return latest

    def guess(self, one: Arriving | None) -> Arriving | None:
        """Who could have been sent for early and was not, till the next is sent for: who it was."""
        before, self._guess = self._guess(), _weak(one)
        return before

    def early(self, clones: CloneExperts | None) -> CloneExperts | None:
        """A layer that was sent for before its backward asked, till it asks or another takes the slots: whose it was.
        By layer, for ranks may differ in when a pass that was given up is freed, and must not in what they send."""
        before, self._early = self._early(), _nobody if clones is None else weakref.ref(clones)
        return before

    def end_push(self) -> None:
        """Wait for one that is under way. Nobody holds the slots when it fails."""
        push, self.push = self.push, None
        if push is not None:
            holder, self.holder = self.holder, None
            push.wait()
            self.holder = holder

    def end_collection(self) -> None:
        """Wait for one that a pass before has left."""
        collection, self.collection = self.collection, None
        if collection is not None:
            collection.wait()


def _nobody() -> None:
    return None


def _weak(one: Arriving | None) -> _Weak:
    return _nobody if one is None else weakref.ref(one)


@dataclasses.dataclass(frozen=True)
class Bank:
    """The slots of one direction, as a layer sees them. stacks: [slots, *shape] for every matrix of an expert, in one
    storage; those of a layer's two banks lie in their storages alike. use: who has them."""

    stacks: list[torch.Tensor]
    use: SlotUse


class Homeward:
    """Gradients of clones on their way to their owners. arrived: waits for them, on a GPU by the stream. kept: what has
    to outlive the way."""

    def __init__(
        self,
        arrived: Callable[[], None],
        owners: Sequence[torch.nn.Parameter],
        sums: dict[torch.nn.Parameter, torch.Tensor],
        kept: Sequence[torch.Tensor] = (),
    ) -> None:
        self._arrived, self._owners, self._sums, self._kept = arrived, owners, sums, kept

    def wait(self) -> list[torch.Tensor | None]:
        """Until they are there. What is left for autograd, for each of the owners' parameters."""
        self._arrived()
        self._kept = ()
        return [left_for_autograd(owner, self._sums.get(owner)) for owner in self._owners]


class Arriving:
    """The clones of one micro-batch on this rank; weights are sent for when it is made, and again in the backward. What
    needs neither these nor the gradients is computed meanwhile (`hybrid_ep.moe.grouped.Arrivals`).

    replayed: a forward that is recomputed, by the plan object of its first run: the slots may hold its weights."""

    def __init__(self, clones: CloneExperts, work: Any, plan: Any, replayed: bool = False) -> None:
        self.clones, self.work, self.plan = clones, work, plan
        self._bank = clones.forward_bank  # of the direction that it goes in
        self._made: dict[int, torch.Tensor] = {}  # gradients of the slots, a stack a matrix
        self._homeward: Homeward | None = None  # the same, when they have started home
        self.used = False  # the experts' forward has run
        self._done = False  # nobody will ask for its weights again
        self._before: Arriving | None = None  # whose backward follows this one's
        if torch.is_grad_enabled():
            latest = self._bank.use.forward_of(self)
            if latest is not None and latest.clones.number == clones.number - 1:
                self._before = latest
        self._send_for(self._bank, fresh=not replayed)

    def of(self, n: int) -> ArrivingMatrix:
        """What a product with matrix n is to know."""
        return ArrivingMatrix(self, n)

    def under_way(self) -> bool:
        return self._bank.use.push is not None and self._holds(self._bank)

    def wait(self) -> None:
        """Until the slots have the weights. DeadlineError when one who brings them does not answer or is gone."""
        if self.under_way():
            self._bank.use.end_push()

    def without_clones(self) -> None:
        """Nothing is computed with the slots, and no backward will come here."""
        self.wait()
        self._done = True

    def refill(self) -> None:
        """The backward begins."""
        self._made, self._homeward = {}, None
        self._bank = self.clones.backward_bank
        if self._holds(self._bank):
            self._bank.use.early(None)
        self._send_for(self._bank)
        if not self.clones.weights.waits_in_backward:
            self.wait()

    def gradient(self, n: int, made: torch.Tensor) -> None:
        """Of the weights in the slots, matrix n, [slots, *shape]; with the last they start home."""
        self._made[n] = made
        if len(self._made) == len(self._bank.stacks):
            self._bank.use.end_collection()
            gradients = [self._made.pop(n) for n in sorted(self._made)]
            self._homeward = self._bank.use.collection = self.clones.start_home(self.work, gradients)

    def home(self, gradients: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Wait for them; what is left for autograd. gradients: those that autograd brought, in place of gradient()."""
        self.wait()
        for n, (stack, made) in enumerate(zip(self._bank.stacks, gradients, strict=True)):
            if self._homeward is None and n not in self._made:
                self.gradient(n, torch.zeros_like(stack) if made is None else made)
        homeward, self._homeward, self._bank.use.collection = self._homeward, None, None
        assert homeward is not None  # or the last gradient had not started it
        left = homeward.wait()
        self._done = True
        before, self._before = self._before, None
        if before is not None:
            before._send_early()
        return left

    def _holds(self, bank: Bank) -> bool:
        """Whether the slots have its weights, or are about to. Two runs of a forward have one plan object."""
        holder = bank.use.holder
        return holder is not None and holder.clones is self.clones and holder.plan is self.plan

    def _send_early(self) -> None:
        bank = self.clones.backward_bank
        if self._done or self._holds(bank):
            return
        if not self.clones.doubts:
            self._send_for(bank)
            bank.use.early(self.clones)
        else:
            bank.use.guess(self)

    def _send_for(self, bank: Bank, fresh: bool = False) -> None:
        """Start a push, unless the slots hold these weights. fresh: they cannot, for others may have changed since."""
        use = bank.use
        guessed = use.guess(None)  # who was not sent for early, of doubt
        if guessed is self:
            self.clones.doubts -= 1
        elif guessed is not None:
            guessed.clones.doubts = _DOUBTS
        use.end_collection()
        if self._holds(bank) and not fresh:
            use.holder = self  # the run before may be gone before this one
            return
        use.end_push()
        use.holder, in_vain = None, use.early(None)
        if in_vain is not None:  # schedules of virtual stages do so again and again
            in_vain.doubts = _DOUBTS
        use.push = self.clones.start_push(self.work, bank)
        use.holder = self


class ArrivingMatrix:
    """`Arrivals` of a grouped GEMM over the owners' stack of a matrix [owners, out, in] and the slots' one."""

    def __init__(self, arriving: Arriving, n: int) -> None:
        self._arriving, self._n = arriving, n
        self.under_way, self.wait = arriving.under_way, arriving.wait

    def gradients(self, made: list[torch.Tensor]) -> None:
        """[slots, in, out], one stack."""
        (gradient,) = made
        self._arriving.gradient(self._n, gradient.transpose(1, 2))


class Push(torch.autograd.Function):
    """Owner parameters -> weights in the slots, a stack a matrix. Backward: clone gradients to their owners, which all
    ranks do or none. anchor: requires gradients where no parameter here does and other ranks' do."""

    @staticmethod
    def forward(
        ctx: Any, arriving: Arriving, anchor: torch.Tensor | None, *owners: torch.nn.Parameter
    ) -> tuple[torch.Tensor, ...]:
        ctx.arriving = arriving
        ctx.set_materialize_grads(False)  # most have been handed over before
        # .data: the slots are refilled under the graph on purpose, CloneExperts._at knows.
        return tuple(stack.data for stack in arriving.clones.forward_bank.stacks)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        return None, None, *ctx.arriving.home(gradients)


class Refill(torch.autograd.Function):
    """The identity. Backward: the slots get this plan's weights again, before the experts' backward reads them."""

    @staticmethod
    def forward(ctx: Any, arriving: Arriving, output: torch.Tensor) -> torch.Tensor:
        ctx.arriving = arriving
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, torch.Tensor]:
        ctx.arriving.refill()
        return None, gradient


def fp32_main_grad(owner: torch.nn.Parameter) -> torch.Tensor | None:
    """Megatron's gradient of a parameter that is trained, where that is fp32."""
    total = getattr(owner, "main_grad", None) if owner.requires_grad else None
    return total if total is not None and total.dtype == torch.float32 else None


def left_for_autograd(owner: torch.nn.Parameter, total: torch.Tensor | None) -> torch.Tensor | None:
    """An fp32 sum beside main_grad: added to one of another type, or given to autograd in the parameter's. None of a
    parameter that is frozen, whose main_grad would move it."""
    if not owner.requires_grad:
        return None
    main_grad: torch.Tensor | None = getattr(owner, "main_grad", None)
    if total is not None and main_grad is not None:
        main_grad.add_(total)
        return None
    return total if total is None else total.to(owner.dtype)
