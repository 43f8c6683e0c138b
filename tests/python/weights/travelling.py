"""What tests of weights that travel share, on hosts and on GPUs: experts in numbers that nothing else has."""

from __future__ import annotations

import torch
from hypothesis import strategies as st

from hybrid_ep.weights import WeightLayout

SHAPES = ((3, 5), (5, 2))


def expert(version, layer, n, number, dtype=torch.float32):
    """Matrix n of an expert, in numbers that nothing else has."""
    first = 7 * version + 3 * layer + 2 * n + number
    return (torch.arange(SHAPES[n][0] * SHAPES[n][1], dtype=torch.float32) % 11 + first).view(SHAPES[n]).to(dtype)


def own_weights(layout, rank, version, device="cpu"):
    first = layout.first(rank)
    return [
        [
            torch.stack([expert(version, layer, n, first + i, layout.dtype) for i in range(layout.own(rank))]).to(
                device
            )
            for n in range(len(SHAPES))
        ]
        for layer in range(layout.num_layers)
    ]


def others(layout, rank, layer, version):
    """Of each matrix the experts that a rank has not by itself, as lists."""
    order = layout.order(rank)[layout.own(rank) :]
    return [[expert(version, layer, n, number, layout.dtype) for number in order] for n in range(len(SHAPES))]


def read(there):
    """Copies of what was fetched, by matrix, where it lies."""
    return [torch.cat([kept, fetched]) for kept, fetched in zip(there.kept, there.fetched, strict=True)]


def check_layer(prefetcher, layer, version):
    rank = prefetcher.store.rank
    found = [stack.cpu() for stack in read(prefetcher.acquire(layer))]
    for n, (stack, wanted) in enumerate(zip(found, others(prefetcher.layout, rank, layer, version), strict=True)):
        assert len(stack) == len(wanted) and all(map(torch.equal, stack, wanted)), (rank, layer, version, n)


@st.composite
def layouts(draw, most_ranks=4, most_layers=5):
    """Of any size of groups, with any number of kept copies."""
    num_ranks = draw(st.integers(1, most_ranks))
    group_size = draw(st.sampled_from([n for n in range(1, num_ranks + 1) if num_ranks % n == 0]))
    num_experts = draw(st.integers(num_ranks, 11))
    held = draw(st.integers(-(-num_experts // group_size), num_experts))
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16]))
    return WeightLayout(num_experts, num_ranks, draw(st.integers(1, most_layers)), SHAPES, dtype, held, group_size)


@st.composite
def cases(draw):
    layout = draw(layouts())
    uses = st.tuples(st.integers(0, layout.num_layers - 1), st.booleans(), st.booleans())
    steps = draw(st.lists(st.lists(uses, max_size=8), min_size=1, max_size=3))
    return layout, draw(st.integers(2, 5)), draw(st.sampled_from([4, 20, 1 << 20])), steps


def used_in_training(prefetcher, version, num_layers):
    for layer in range(num_layers):
        check_layer(prefetcher, layer, version)
        prefetcher.release(layer)
    for layer in reversed(range(num_layers)):
        check_layer(prefetcher, layer, version)
        prefetcher.release(layer, backward=True)
