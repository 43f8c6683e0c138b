"""For comparison only: DeepSeek's published expert placement (EPLB), written anew from its description.

Two steps, each greedy. Replicate: every extra slot goes to the expert whose replica carries most. Pack: the heaviest
item first into the lightest of the packs that have room, all packs with equally many items. Hierarchical when the
groups divide among the nodes: groups are packed to nodes, replicas made inside a node, then packed to its ranks.
Nothing keeps two replicas of an expert off one rank, and nothing remembers the placement in force.
Vectorised over layers where the description is; the packing is a Python loop, as in the published code.
"""

from __future__ import annotations

import numpy as np
import torch


def pack(weight: torch.Tensor, num_packs: int) -> tuple[torch.Tensor, torch.Tensor]:
    """weight [X, n] -> (pack, position in the pack), int64 [X, n] each; n / num_packs items a pack."""
    num_rows, num_items = weight.shape
    room = num_items // num_packs
    if room == 1:
        pack_of = torch.arange(num_items).expand(num_rows, -1).clone()
        return pack_of, torch.zeros_like(pack_of)
    order = weight.sort(stable=True, dim=-1, descending=True).indices.tolist()
    values = weight.numpy()
    pack_of = torch.empty((num_rows, num_items), dtype=torch.int64)
    position = torch.empty_like(pack_of)
    for row in range(num_rows):
        load, used = [np.float32(0)] * num_packs, [0] * num_packs
        for item in order[row]:
            best = min((p for p in range(num_packs) if used[p] < room), key=load.__getitem__)
            pack_of[row, item], position[row, item] = best, used[best]
            load[best] += values[row][item]
            used[best] += 1
    return pack_of, position


def replicate(weight: torch.Tensor, num_slots: int) -> tuple[torch.Tensor, torch.Tensor]:
    """weight [X, n] -> (expert of each slot [X, num_slots], replicas [X, n])."""
    num_rows, num_experts = weight.shape
    rows = torch.arange(num_rows)
    expert = torch.arange(num_slots).expand(num_rows, -1).clone()
    count = torch.ones((num_rows, num_experts), dtype=torch.int64)
    for slot in range(num_experts, num_slots):
        hottest = (weight / count).max(-1).indices
        expert[:, slot] = hottest
        count[rows, hottest] += 1
    return expert, count


def place(weight: torch.Tensor, num_slots: int, num_groups: int, num_nodes: int, num_ranks: int) -> torch.Tensor:
    """weight [L, E] -> phy2log int64 [L, num_slots], consecutive slots a rank. In float32, as published."""
    weight = weight.float()
    if num_groups % num_nodes:
        num_groups = num_nodes = 1
    num_layers, num_experts = weight.shape
    size = num_experts // num_groups
    node, position = pack(weight.reshape(num_layers, num_groups, size).sum(-1), num_nodes)
    group_rank = node * (num_groups // num_nodes) + position  # place of each group in node order
    where = (group_rank[..., None] * size + torch.arange(size)).reshape(num_layers, num_experts)
    experts = torch.empty_like(where).scatter_(1, where, torch.arange(num_experts).expand(num_layers, -1))
    local = weight.gather(1, experts).reshape(num_layers * num_nodes, -1)

    slots, ranks = num_slots // num_nodes, num_ranks // num_nodes
    expert, count = replicate(local, slots)
    rank, position = pack((local / count).gather(1, expert), ranks)
    target = rank * (slots // ranks) + position
    placed = torch.empty_like(expert).scatter_(1, target, expert)
    offset = torch.arange(num_nodes)[None, :, None] * (num_experts // num_nodes)
    in_node = placed.reshape(num_layers, num_nodes, slots) + offset
    return experts.gather(1, in_node.reshape(num_layers, num_slots))
