"""What GPU recipes count as registered memory is what buffers and slots register, to the byte."""

import dataclasses

import pytest
import torch

from hybrid_ep import functional
from hybrid_ep.spares import SpareSlots
from hybrid_ep.testing import VirtualWorld
from recipes import CLUSTER_RECIPES, memory

BALANCED = {"precision": "bf16", "overlap": False, "balance": "exact", "moments": "fp32", "recompute": "selective"}


@pytest.mark.parametrize("ranks_per_node", [2, 4])
def test_registered_bytes_are_those_of_a_real_buffer(ranks_per_node, monkeypatch):
    monkeypatch.setenv("HYBRID_EP_ARENA_MIB", "10")  # a GPU's is not less than torch's allocator takes at once
    run = CLUSTER_RECIPES["qwen3_30b_a3b"]("h100_8x400g").derive(expert=4, seq_length=64, ranks_per_node=ranks_per_node)
    run = dataclasses.replace(run, architecture=dataclasses.replace(run.architecture, hidden_size=64, num_experts=16))

    buffer = VirtualWorld(4 // ranks_per_node, ranks_per_node).buffers(64, 64, 4, timeout_s=30)[0]
    assert buffer.memory_report().total_bytes == memory.registered_bytes(run)


@pytest.mark.parametrize("dtype", ["fp8", "mxfp8"])
def test_registered_bytes_of_a_quantised_dispatch(dtype, monkeypatch):
    monkeypatch.setenv("HYBRID_EP_ARENA_MIB", "10")
    run = CLUSTER_RECIPES["qwen3_30b_a3b"]("h100_8x400g").derive(expert=4, seq_length=64, ranks_per_node=2)
    small = dataclasses.replace(run.architecture, hidden_size=256, num_experts=16)
    run = dataclasses.replace(run, architecture=small, dispatch_dtype=dtype)
    world = VirtualWorld(2, 2)
    buffers = world.buffers(256, 64, 4, timeout_s=30)
    plain = buffers[0].memory_report().total_bytes

    def dispatch(rank, group):
        x, idx = torch.ones(64, 256, dtype=torch.bfloat16), torch.arange(64)[:, None] % 16
        functional.dispatch_with_permute(
            buffers[rank], x, topk_idx=idx, topk_weights=torch.ones(64, 1), num_of_experts=16, dispatch_dtype=dtype
        )
        return buffers[rank].memory_report().total_bytes

    assert plain == memory.registered_bytes(dataclasses.replace(run, dispatch_dtype="bf16"))
    assert set(world.run(dispatch)) == {memory.registered_bytes(run)} != {plain}


def test_spare_bytes_are_those_of_real_slots():
    run = CLUSTER_RECIPES["qwen3_30b_a3b"]("b200_8x400g").derive(expert=4, **BALANCED, spare_slots=3)
    small = dataclasses.replace(run.architecture, hidden_size=64, moe_ffn_hidden_size=24, num_experts=8)
    run = dataclasses.replace(run, architecture=small)

    def registered(per_node, group, within_node=False):
        shapes = [(48, 64), (64, 24)]
        slots = SpareSlots(
            group,
            spare_slots=3,
            num_owners=2,
            shapes=shapes,
            dtype=torch.bfloat16,
            clones_within_node=within_node,
            executor="host",
            num_of_hybrid_ep_ranks_per_nvlink_domain=per_node,
        )
        return slots.memory_report().total_bytes

    of_one = VirtualWorld(1, 4).run(lambda _, group: registered(4, group))
    assert of_one == [memory.spare_bytes(run)] * 4
    over_nodes = dataclasses.replace(run, ranks_per_node=2)
    of_two = VirtualWorld(2, 2).run(lambda _, group: registered(2, group, within_node=True))
    assert of_two == [memory.spare_bytes(over_nodes)] * 4 != of_one
    anywhere = dataclasses.replace(over_nodes, balance_clones="anywhere")
    of_any = VirtualWorld(2, 2).run(lambda _, group: registered(2, group))
    assert of_any == [memory.spare_bytes(anywhere)] * 4 and of_any[0] > of_two[0], "rings for what goes along rails"
