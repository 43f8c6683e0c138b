"""Weights of a micro-batch's clones on their way into the spare slots, gradients on their way home, and whose slots
they are.

All layers share the slots, so that a layer's backward sends for its clones' weights again. Two of these pushes are
saved or begun early, on all ranks alike, for all run the same layers in the same order: where a backward follows its
own forward, as the last layer's and a recomputed one's do, the slots hold them still; and as soon as a backward is done
with the slots, weights for the layer before it are sent for, whose backward comes next, beside all that lies between.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch

if TYPE_CHECKING:
    from megatron_patches.balance_push import CloneExperts


class Pushed(Protocol):
    """A push under way, or gradients."""

    def wait(self) -> None: ...


class SlotUse:
    """Of the slots that some layers share. holder: whose weights they hold, or are to hold; latest: of the last forward
    that a backward will follow; layers: how many share them."""

    def __init__(self) -> None:
        self.holder: Arriving | None = None
        self.latest: Arriving | None = None
        self.layers = 0

    def next_number(self) -> int:
        """Of a layer more, in the order in which they are made."""
        self.layers += 1
        return self.layers - 1


class Homeward:
    """Gradients of clones on their way to their owners. kept: what has to outlive the way."""

    def __init__(
        self,
        under_way: Pushed,
        owners: Sequence[torch.nn.Parameter],
        sums: dict[torch.nn.Parameter, torch.Tensor],
        kept: Sequence[torch.Tensor] = (),
    ) -> None:
        self._under_way, self._owners, self._sums, self._kept = under_way, owners, sums, kept

    def wait(self) -> list[torch.Tensor | None]:
        """Until they are there: on a GPU the stream. What is left for autograd, for each of the owners' parameters."""
        self._under_way.wait()
        self._kept = ()
        return [left_for_autograd(owner, self._sums.get(owner)) for owner in self._owners]


class Arriving:
    """The clones of one micro-batch on this rank; weights are sent for when it is made, and again in the backward. What
    needs neither these nor the gradients is computed meanwhile (`hybrid_ep.moe.grouped.Arrivals`)."""

    def __init__(self, clones: CloneExperts, work: Any) -> None:
        self.clones, self.work = clones, work
        self._push: Pushed | None = None
        self._made: dict[int, torch.Tensor] = {}  # gradients of the slots, a stack a matrix
        self._homeward: Homeward | None = None
        self._early = self._done = False  # sent for before its backward; nobody will ask for its weights again
        self._before: Arriving | None = None  # whose backward follows this one's
        if torch.is_grad_enabled():
            latest, clones.use.latest = clones.use.latest, self
            if latest is not None and latest.clones.number == clones.number - 1:
                self._before = latest
        self._send_for()

    def of(self, n: int) -> ArrivingMatrix:
        """What a product with matrix n is to know."""
        return ArrivingMatrix(self, n)

    def under_way(self) -> bool:
        return self._push is not None

    def wait(self) -> None:
        """Until the slots have the weights. DeadlineError when one who brings them does not answer or is gone."""
        push, self._push = self._push, None
        if push is not None:
            push.wait()

    def without_clones(self) -> None:
        """Nothing is computed with the slots, and no backward will come here."""
        self.wait()
        self._done = True

    def refill(self) -> None:
        """The backward begins."""
        self._made, self._homeward = {}, None
        self._early = False
        self._send_for()
        if not self.clones.weights.waits_in_backward:
            self.wait()

    def gradient(self, n: int, made: torch.Tensor) -> None:
        """Of the weights in the slots, matrix n, [slots, *shape]; with the last they start home."""
        self._made[n] = made
        if len(self._made) == len(self.clones.stacks):
            self._homeward = self.clones.start_home(self.work, [self._made.pop(n) for n in sorted(self._made)])

    def home(self, gradients: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Wait for them; what is left for autograd. gradients: those that autograd brought, in place of gradient()."""
        self.wait()
        if self._homeward is None:
            for n, (stack, made) in enumerate(zip(self.clones.stacks, gradients, strict=True)):
                if n not in self._made:
                    self.gradient(n, torch.zeros_like(stack) if made is None else made)
        homeward, self._homeward = self._homeward, None
        assert homeward is not None  # or the last gradient had not started it
        left = homeward.wait()
        self._done = True
        before, self._before = self._before, None
        if before is not None:
            before._send_early()
        return left

    def _send_early(self) -> None:
        if self.clones.sends_early and not self._done and self.clones.use.holder is not self:
            self._send_for()
            self._early = True

    def _send_for(self) -> None:
        """Start a push, unless the slots hold these weights. One under way is waited for: nothing may overtake it."""
        use = self.clones.use
        if use.holder is self:
            return
        if use.holder is not None:
            use.holder.wait()
            if use.holder._early:  # and another took its place: schedules of stages that are virtual do so, every time
                use.holder.clones.sends_early = use.holder._early = False
        use.holder = self
        self._push = self.clones.start_push(self.work)


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
    """Owner parameters -> weights in the slots, a stack a matrix. Backward: clone gradients to their owners."""

    @staticmethod
    def forward(ctx: Any, arriving: Arriving, *owners: torch.nn.Parameter) -> tuple[torch.Tensor, ...]:
        ctx.arriving = arriving
        ctx.set_materialize_grads(False)  # most have been handed over before
        # .data: the slots are refilled under the graph on purpose, CloneExperts._unpack knows.
        return tuple(stack.data for stack in arriving.clones.stacks)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        return None, *ctx.arriving.home(gradients)


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
    """Megatron's gradient of a parameter, where that is fp32."""
    total = getattr(owner, "main_grad", None)
    return total if total is not None and total.dtype == torch.float32 else None


def left_for_autograd(owner: torch.nn.Parameter, total: torch.Tensor | None) -> torch.Tensor | None:
    """An fp32 sum beside main_grad: added to one of another type, or given to autograd in the parameter's."""
    main_grad: torch.Tensor | None = getattr(owner, "main_grad", None)
    if total is not None and main_grad is not None:
        main_grad.add_(total)
        return None
    return total if total is None else total.to(owner.dtype)
