"""The handle tuples that carry a dispatch's plan.

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

Read elements by position from the front: deep_ep's handles have had one element more since September 2026 (8 and 12,
num_of_valid_tokens; num_of_tokens_per_rank is that here), in 12 first behind the overflow flag and then before it.
Ours keep 7 and 11, in which the flag is both element 10 and the last, so that readers of either kind are right.

On a GPU all of these lie on the device, and are right once the dispatch has run. Of a sync-free dispatch
(non_blocking=True there) the maps are None, since their sizes are not known."""

from __future__ import annotations

from hybrid_ep.config import HybridEpConfigInstance
from hybrid_ep.runtime import plan_maps
from hybrid_ep.runtime.plan import BlockingPlan, Plan


def dispatch_handle(plan: Plan, template: HybridEpConfigInstance) -> tuple:
    """After the plan's first dispatch, which brings the facts of the received rows."""
    assert isinstance(plan, BlockingPlan)  # dispatch waits for its counts
    *rails, routed, _, _ = plan_maps.of(plan, permuted=False)
    return (*rails, plan.recv_rows, routed, plan.num_tokens, template.with_plan(plan))


def permute_handle(plan: Plan, template: HybridEpConfigInstance) -> tuple:
    """As dispatch_handle, of either kind of plan."""
    maps = plan_maps.of(plan, permuted=True) if isinstance(plan, BlockingPlan) else (None,) * 6
    return (
        *maps[:3],
        plan.recv_rows,
        *maps[3:],
        plan.tokens_per_expert,
        plan.num_tokens,
        template.with_plan(plan),
        plan.overflow_flag,
    )
