"""The maps of a handle, from the records that kernels wrote. Where the host can read those, one call of the compiled
core makes all; on a GPU torch operations do, behind the dispatch on the stream, without a wait and without a copy from
the host, which may be one. handle.py says what each map is."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from hybrid_ep.runtime.tensors import view

if TYPE_CHECKING:
    from hybrid_ep.runtime.plan import BlockingPlan, PlanMemory

# Words of a record: header (destinations | pairs << 16, first pair, source rank, source token), destinations of two
# words (local rank, row), pairs of two words (expert, permuted row). layout/message.h is the authority.
_COUNTS, _SOURCE, _TOKEN, _DSTS = 0, 2, 3, 4


def of(plan: BlockingPlan, permuted: bool) -> tuple[torch.Tensor | None, ...]:
    """sparse_to_dense_map, rdma_to_attn_map, attn_to_rdma_map, local_expert_routing_map, and, of permuted rows,
    dense_chunk_layout and dense_to_expert_map, else None."""
    if plan.host_reads:
        return _on_host(plan, permuted)
    experts = _expert_maps(plan) if permuted else (_expert_maps(plan)[0], None, None)
    return *_rail_maps(plan), *experts


def _on_host(plan: BlockingPlan, permuted: bool) -> tuple[torch.Tensor | None, ...]:
    rail = sum(plan.core.num_rail_tokens(node) for node in range(plan.num_nodes))
    rows, experts = plan.num_recv_rows, plan.num_local_experts

    def made(dtype: torch.dtype, *shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="cpu")

    maps = {
        "sparse_to_dense": made(torch.int32, rail, plan.num_local_ranks),
        "rail_to_node": made(torch.bool, rail),
        "node_to_rail": made(torch.bool, plan.num_tokens, plan.num_nodes - 1),
        "local_routing": made(torch.bool, rows, experts),
        "source_ends": made(torch.int32, plan.num_ranks) if permuted else None,
        "permuted_rows": made(torch.int32, rows, experts) if permuted else None,
    }
    plan.core.maps(memory=view("memory", plan.memory.block), **{n: view(n, x) for n, x in maps.items()})
    return tuple(maps.values())


def _records(memory: PlanMemory, begin: int, count: int, record_bytes: int) -> torch.Tensor:
    """int32 [count, words of a record]."""
    return memory.array(begin, torch.int32, count, record_bytes // 4)


def _rail_records(plan: BlockingPlan) -> tuple[torch.Tensor, torch.Tensor]:
    """(records of the tokens that this rail's ranks have for this node, each one's number among all their tokens)."""
    placed, learned = plan.memory, plan.learned
    record_bytes, own = placed.at.record_bytes, plan.rank // plan.num_local_ranks
    parts, numbers, first = [], [], 0
    for node, count in enumerate(plan.from_nodes):
        if node == own:
            begin = placed.at.records + node * plan.num_tokens * record_bytes
            part = _records(placed, begin, count, record_bytes)
        else:
            begin = learned.at.rail_records + node * learned.at.rail_record_stride
            part = _records(learned, begin, count, record_bytes)
        parts.append(part)
        numbers.append(part[:, _TOKEN].long() + first)
        first += plan.core.num_rail_tokens(node)
    return torch.cat(parts), torch.cat(numbers)


def _rail_maps(plan: BlockingPlan) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """sparse_to_dense_map, rdma_to_attn_map, attn_to_rdma_map."""
    records, number = _rail_records(plan)
    rows = sum(plan.core.num_rail_tokens(node) for node in range(plan.num_nodes))
    locals_, max_dsts = plan.num_local_ranks, plan.memory.at.max_dsts
    dsts = (
        records[:, _DSTS : _DSTS + 2 * max_dsts].view(-1, max_dsts, 2)
        if len(records)
        else records.new_empty(0, max_dsts, 2)
    )
    slots = torch.arange(max_dsts, dtype=torch.int64, device=records.device)
    valid = slots < (records[:, _COUNTS : _COUNTS + 1] & 0xFFFF)
    where = torch.where(valid, number[:, None] * locals_ + dsts[..., 0], rows * locals_)  # the last takes the rest
    sparse_to_dense = records.new_full((rows * locals_ + 1,), -1).scatter_(0, where.flatten(), dsts[..., 1].flatten())
    needed = torch.zeros(rows, dtype=torch.bool, device=records.device).index_fill_(0, number, True)
    positions = plan.memory.array(plan.memory.at.node_pos, torch.int32, plan.num_tokens, plan.num_nodes)
    own = plan.rank // plan.num_local_ranks
    others = torch.cat([positions[:, :own], positions[:, own + 1 :]], 1) >= 0
    return sparse_to_dense[:-1].view(rows, locals_), needed, others


def _expert_maps(plan: BlockingPlan) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """local_expert_routing_map, dense_chunk_layout, dense_to_expert_map."""
    experts = plan.num_local_experts
    records = _records(plan.learned, plan.learned.at.row_records, plan.num_recv_rows, plan.memory.at.record_bytes)
    at = plan.memory.at.pairs_at // 4
    pairs = records[:, at : at + 2 * plan.topk].reshape(len(records), plan.topk, 2)
    valid = torch.arange(plan.topk, device=records.device, dtype=torch.int64) < (
        records[:, _COUNTS : _COUNTS + 1] >> 16
    )
    local = pairs[..., 0] - plan.rank * experts
    where = torch.where(valid & (local >= 0) & (local < experts), local, experts).long()  # column `experts`: not ours
    routed = torch.zeros(len(records), experts + 1, dtype=torch.bool, device=records.device).scatter_(1, where, True)
    rows = records.new_full((len(records), experts + 1), -1).scatter_(1, where, pairs[..., 1])
    sources = torch.arange(plan.num_ranks, dtype=torch.int32, device=records.device)
    ends = torch.searchsorted(records[:, _SOURCE].contiguous(), sources, right=True, out_int32=True)  # rows by source
    return routed[:, :-1].contiguous(), ends, rows[:, :-1].contiguous()
