"""What the ranks do in the tests of weights that travel: the layers of the balancer's tests, in whole numbers."""

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist
from balance_programs import Layers, batch, equal, integers, train
from rank_programs import EXPERTS, initialize, make_dispatcher

import megatron_patches
from hybrid_ep.errors import DeadlineError
from hybrid_ep.weights import ExpertStore, WeightPrefetcher
from megatron_patches import weights


def bit_equality(ep):
    """Weights against tokens: whatever is kept, buffered or recomputed, with autograd's gradients and with main_grad."""
    groups = initialize(ep)
    megatron_patches.apply(ranks_per_node=1, grouped_gemm=True)
    tokens, _ = train(groups, ep)
    assert all(torch.equal(4 * x, (4 * x).round()) for x in tokens) and len({float(x.sum()) for x in tokens}) > 9
    own = EXPERTS // ep
    for kept, num_buffers, options in (
        (own, 2, {}),
        (min(own + 1, EXPERTS), 3, {"main_grad": True}),
        (EXPERTS, 2, {}),
        (min(own + 1, EXPERTS), 2, {"recompute": True}),
    ):
        megatron_patches.apply(
            ranks_per_node=1, grouped_gemm=True, move="weights", local_experts=kept, weight_buffers=num_buffers
        )
        found, _ = train(groups, ep, at_end=weights.bring_home, **options)
        assert equal(found, tokens), (kept, num_buffers, options)
        megatron_patches.revert()
    return True
