"""What autograd sees of experts that travel: weights are fetched again before a layer's backward and given back behind
it, and gradients of other homes' experts are put with those that go home.

    rows, probs, anchor ──Through──► rows, probs ─────────────────┐
    owners, anchor ───────Travelled──► the other experts' stacks ─┴► experts ──FetchAgain──► output
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from hybrid_ep.weights import Fetched
    from megatron_patches.weights import LayerWeights


class Use:
    """One forward of a layer, whose weights its backward fetches again. trained: gradients of its experts go home."""

    def __init__(self, layer: LayerWeights, trained: bool) -> None:
        self.layer, self.trained = layer, trained


class Through(torch.autograd.Function):
    """rows and probs as they are. Backward: behind all that reads the layer's weights."""

    @staticmethod
    def forward(
        ctx: Any, use: Use, anchor: torch.Tensor | None, rows: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.use = use
        return rows.view_as(rows), probs.view_as(probs)

    @staticmethod
    def backward(ctx: Any, rows: torch.Tensor, probs: torch.Tensor) -> tuple[None, None, torch.Tensor, torch.Tensor]:
        ctx.use.layer.group.release_again(ctx.use)
        return None, None, rows, probs


class Travelled(torch.autograd.Function):
    """The owners' parameters -> the stacks of other homes' experts, [matrix 0, matrix 1] of every place where some are.
    Backward: their gradients go with those that go home. It, too, runs behind all that reads the layer's weights, and
    alone where gradients of parameters are all that is asked for."""

    @staticmethod
    def forward(
        ctx: Any, use: Use, there: Fetched, anchor: torch.Tensor | None, *owners: torch.nn.Parameter
    ) -> tuple[torch.Tensor, ...]:
        ctx.use, ctx.layer, ctx.num_owners = use, use.layer, len(owners)
        return tuple(stack for place in (there.kept, there.fetched) if len(place[0]) for stack in place)

    @staticmethod
    def backward(ctx: Any, *stacks: torch.Tensor) -> tuple[None, ...]:
        group = ctx.layer.group
        group.prefetcher.store.add_gradients(ctx.layer.number, [stacks[0::2], stacks[1::2]])
        group.release_again(ctx.use)
        return (None,) * (3 + ctx.num_owners)


class FetchAgain(torch.autograd.Function):
    """The identity. Backward: the layer's weights are there again before the experts' backward reads them."""

    @staticmethod
    def forward(ctx: Any, use: Use, output: torch.Tensor) -> torch.Tensor:
        ctx.use = use
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, torch.Tensor]:
        group = ctx.use.layer.group
        group.fetch_again(ctx.use)
        if ctx.use.trained:  # there may be none of other homes, and the weights change behind it all the same
            group.has_gradients = True
        return None, gradient
