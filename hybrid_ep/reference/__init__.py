"""The reference: what dispatch and combine mean, in plain PyTorch, obvious and slow.

`world` has pure functions over a whole world (one list entry per rank) that define every result bit for bit;
`buffer` wraps them in torch.distributed collectives that gather everything everywhere. Neither imports anything
of hybrid_ep that computes, so an error in the library cannot hide in its own oracle."""

from hybrid_ep.reference.buffer import ReferenceBuffer
from hybrid_ep.reference.world import RankPlan, World, WorldPlan, combine_world, densify, dispatch_world, plan_world

__all__ = [
    "RankPlan",
    "ReferenceBuffer",
    "World",
    "WorldPlan",
    "combine_world",
    "densify",
    "dispatch_world",
    "plan_world",
]
