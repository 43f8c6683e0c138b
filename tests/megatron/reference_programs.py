"""An independent plain implementation of what balanced experts compute: fp64, dense loops, all ranks' tokens at once.

Nothing here knows of dispatch, slots, clones or owners: y = sum over experts of prob * W2 relu(W1 x), autograd, sums.
"""

import itertools

import numpy as np
import torch
import torch.distributed as dist
from balance_programs import LAYERS, Layers, batch, random_plan
from rank_programs import EXPERTS, HIDDEN, initialize

import megatron_patches


def real(shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) / shape[-1] ** 0.5


class RealLayers(Layers):
    """`Layers` with weights, and between layers values, that are no whole numbers."""

    draw = staticmethod(real)

    def forward(self, hidden, maps, probs):
        for (dispatcher, experts), routing_map, p in zip(self.pairs, maps, probs, strict=True):
            rows, p = dispatcher.token_dispatch(*dispatcher.dispatch_preprocess(hidden, routing_map, p))
            rows, counts, row_probs = dispatcher.dispatch_postprocess(rows, p)
            out = dispatcher.combine_preprocess(experts(rows, counts, row_probs)[0])
            hidden = hidden + dispatcher.combine_postprocess(dispatcher.token_combine(out))
        return hidden


def inputs(rank):
    """(hidden [T, 1, H], maps [L, T, E], probs [L, T, E]) of a rank: skewed, four experts a token, real numbers."""
    _, maps, _ = batch(3, rank)
    maps = maps | maps.roll(3, dims=2)
    generator = torch.Generator().manual_seed(rank)
    hidden = torch.randn((maps.shape[1], 1, HIDDEN), generator=generator)
    return hidden, maps, torch.rand(maps.shape, generator=generator) * maps


def by_the_definition(num_ranks):
    """fp64 (outputs by rank, gradients of every expert's W1 and W2 by layer) of the loss sum(out^2)."""
    weights = [
        [
            torch.stack([real(shape, 1000 * layer + 10 * e + n) for e in range(EXPERTS)]).double().requires_grad_()
            for n, shape in enumerate(((16, HIDDEN), (HIDDEN, 16)))
        ]
        for layer in range(LAYERS)
    ]
    outputs = []
    for rank in range(num_ranks):
        hidden, _, probs = (x.double() for x in inputs(rank))
        hidden = hidden[:, 0]
        for (first, second), p in zip(weights, probs, strict=True):
            hidden = hidden + sum(p[:, e, None] * (hidden @ first[e].T).relu() @ second[e].T for e in range(EXPERTS))
        outputs.append(hidden.detach())
        hidden.square().sum().backward()
    return outputs, [w.grad for layer in weights for w in layer]


def balanced_against_reference(ep):
    """Largest error against fp64, of the largest value: all modes, both modules of experts; random plans, owners."""
    groups, worst = initialize(ep), 0.0
    outputs, gradients = by_the_definition(ep)
    rng = np.random.default_rng(1)
    for mode, grouped in itertools.product(("off", "exact", "slow", "both"), (False, True)):
        clones = {"spare_slots": 2} if mode in ("exact", "both") else {}
        megatron_patches.apply(balance=mode, grouped_gemm=grouped, **clones)
        owners = [rng.permutation(EXPERTS) for _ in range(LAYERS)] if mode in ("slow", "both") else None
        layers = RealLayers(groups, ep, owners)
        for dispatcher, _ in layers.pairs if mode in ("exact", "both") else ():
            dispatcher._comm_manager.plan_with = random_plan(2, dispatcher._comm_manager)
        out = layers.forward(*inputs(groups.ep.rank()))
        out.square().sum().backward()
        found = [out.detach()[:, 0], *layers.everywhere(lambda parameter: parameter.grad)]
        for mine, reference in zip(found, [outputs[dist.get_rank()], *gradients], strict=True):
            worst = max(worst, float((mine.double() - reference).abs().max() / reference.abs().max()))
        megatron_patches.revert()
    return worst
