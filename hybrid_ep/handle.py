"""The plan of a dispatch and the handle tuples that carry it.

A handle is a plain tuple with deep_ep's positions; the plan sits in its config element, so a tuple that was
taken apart and put together again works. All of it is immutable and outlives later calls, later growth and
the buffer.

dispatch (7):              sparse_to_dense_map, rdma_to_attn_map, attn_to_rdma_map,
num_dispatched_tokens_tensor,
                           local_expert_routing_map, num_of_tokens_per_rank, config
dispatch_with_permute (11): the first five, dense_chunk_layout, dense_to_expert_map, tokens_per_expert,
                           num_of_tokens_per_rank, config, overflow_flag

With n tokens here, n(k) tokens on this rank's rail peer of node k, N nodes of L ranks, M receive rows, Er
local experts:
sparse_to_dense_map int32 [sum of n(k), L]: receive row in each rank of this node, -1: not sent there
rdma_to_attn_map bool [sum of n(k)]: some rank of this node needs the token;  attn_to_rdma_map bool [n, N-1]:
my token goes to that other node (ascending);  num_dispatched_tokens_tensor int32 [1] = M
local_expert_routing_map bool [M, Er];  dense_to_expert_map int32 [M, Er]: permuted row, -1: none or dropped
dense_chunk_layout int32 [num_ranks]: receive row where each source rank's rows end (a source is one chunk)
tokens_per_expert int32 [Er]: kept rows, without padding;  overflow_flag int32 [1]: 1 when pairs were dropped
here

On a GPU all of these lie on the device, and are right once the dispatch has run. Of a sync-free dispatch
(non_blocking=True there) the maps are None, since their sizes are not known."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from hybrid_ep import device_maps
from hybrid_ep.config import HybridEpConfigInstance
from hybrid_ep.placed import Facts
from hybrid_ep.tensors import view


@dataclass(frozen=True)
class Plan:
    """Row facts of one routing. core: the compiled plan; num_*: this rank's; max_*: the largest over the
    ranks."""

    core: Any = field(repr=False)
    rank: int
    num_ranks: int
    num_local_ranks: int
    num_experts: int
    pad_multiple: int
    num_tokens: int
    max_tokens: int
    topk: int
    weight_stride: int
    num_recv_rows: int
    max_recv_rows: int
    num_permuted_rows: int
    num_dropped: int
    overflow: bool
    has_weights: bool
    tokens_per_expert: torch.Tensor  # int32 [num_local_experts]
    padded_tokens_per_expert: torch.Tensor  # int64 [num_local_experts]
    facts: Facts | None = field(default=None, repr=False)  # of a plan that the host never reads; see placed.py

    @property
    def counts_unknown(self) -> bool:
        """The num_* of rows are limits, and tokens_per_expert is not for the host."""
        return self.facts is not None and self.facts.learned is None

    @property
    def num_nodes(self) -> int:
        return self.num_ranks // self.num_local_ranks

    @property
    def num_local_experts(self) -> int:
        return self.num_experts // self.num_ranks

    @property
    def num_node_experts(self) -> int:
        return self.num_local_ranks * self.num_local_experts


def _common(plan: Plan) -> tuple:
    """The first five elements. After the plan's first dispatch, which brings the facts of the received
    rows."""
    if plan.facts is not None:
        return (*device_maps.rail_maps(plan), plan.facts.recv_rows, device_maps.expert_maps(plan)[0])
    core, num_rail_rows = plan.core, sum(plan.core.num_rail_tokens(node) for node in range(plan.num_nodes))
    return (_filled(core.fill_sparse_to_dense, torch.int32, num_rail_rows, plan.num_local_ranks),
            _filled(core.fill_rail_to_node, torch.bool, num_rail_rows),
            _filled(core.fill_node_to_rail, torch.bool, plan.num_tokens, plan.num_nodes - 1),
            _numbers([plan.num_recv_rows]),
            _filled(core.fill_local_expert_routing_map, torch.bool, plan.num_recv_rows, plan.num_local_experts))


def _filled(fill: Callable[[Any], None], dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """A map that the compiled plan fills, on the host."""
    out = torch.empty(shape, dtype=dtype, device="cpu")
    fill(view("out", out))
    return out


def _numbers(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device="cpu")


def _config_with(plan: Plan, template: HybridEpConfigInstance) -> HybridEpConfigInstance:
    config = copy.copy(template)
    config.pad_multiple, config.plan = plan.pad_multiple, plan
    return config


def dispatch_handle(plan: Plan, template: HybridEpConfigInstance) -> tuple:
    return (*_common(plan), plan.num_tokens, _config_with(plan, template))


def permute_handle(plan: Plan, template: HybridEpConfigInstance) -> tuple:
    if plan.counts_unknown:
        return (None, None, None, plan.facts.recv_rows, None, None, None, plan.tokens_per_expert, plan.num_tokens,
                _config_with(plan, template), plan.facts.overflow)
    if plan.facts is not None:
        return (*device_maps.rail_maps(plan), plan.facts.recv_rows, *device_maps.expert_maps(plan),
                plan.tokens_per_expert, plan.num_tokens, _config_with(plan, template), plan.facts.overflow)
    dense_to_expert = _filled(plan.core.fill_dense_to_expert_map, torch.int32, plan.num_recv_rows,
                              plan.num_local_experts)
    ends = _numbers(plan.core.recv_rows_per_source).cumsum(0, dtype=torch.int32)
    return (*_common(plan), ends, dense_to_expert, plan.tokens_per_expert, plan.num_tokens,
            _config_with(plan, template), _numbers([int(plan.overflow)]))
