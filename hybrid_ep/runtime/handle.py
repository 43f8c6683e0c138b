"""The handle tuples that carry a dispatch's plan.

A handle is a tuple with deep_ep's positions; the plan sits in its config element, so a tuple that was taken apart and
put together again works. What tensors it has are made when somebody reads them: few callers do, and on a GPU the maps
are some forty small kernels between a dispatch and its experts. All of it is immutable and outlives later calls, later
growth and the buffer.

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

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from hybrid_ep.config import HybridEpConfigInstance
from hybrid_ep.runtime import plan_maps
from hybrid_ep.runtime.handle_kinds import OVERFLOW_FLAG
from hybrid_ep.runtime.plan import BlockingPlan, Plan


class HandleTuple(tuple[Any, ...]):
    """A tuple some of whose elements are made when they are first read. To whoever takes it apart it is any tuple."""

    _later: dict[int, Callable[[], Any]]
    _made: dict[int, Any]

    def __new__(cls, elements: Iterable[Any] = (), later: dict[int, Callable[[], Any]] | None = None) -> HandleTuple:
        """later: makers by position, where `elements` has None."""
        handle = super().__new__(cls, elements)
        handle._later, handle._made = later or {}, {}
        return handle

    def __getitem__(self, at: Any) -> Any:
        if isinstance(at, slice):
            return tuple(self)[at]
        position = range(len(self))[at]
        if position not in self._later:
            return super().__getitem__(position)
        if position not in self._made:
            self._made[position] = self._later[position]()
        return self._made[position]

    def __iter__(self) -> Iterator[Any]:
        return (self[position] for position in range(len(self)))

    def __add__(self, other: Any) -> Any:
        return tuple(self) + other

    def __radd__(self, other: Any) -> Any:
        return other + tuple(self)

    def __contains__(self, element: Any) -> bool:
        return element in tuple(self)

    def __repr__(self) -> str:
        return repr(tuple(self))

    def there(self) -> tuple[Any, ...]:
        """The elements that nobody need make."""
        return *super().__iter__(), *self._made.values()


def dispatch_handle(plan: Plan, template: HybridEpConfigInstance) -> HandleTuple:
    """After the plan's first dispatch, which brings the facts of the received rows."""
    assert isinstance(plan, BlockingPlan)  # dispatch waits for its counts
    maps = _maps_later(plan, permuted=False)
    later = {**{at: maps[at] for at in range(3)}, 3: lambda: plan.recv_rows, 4: maps[3]}
    return HandleTuple((*(None,) * 5, plan.num_tokens, template.with_plan(plan)), later)


def permute_handle(plan: Plan, template: HybridEpConfigInstance) -> HandleTuple:
    """As dispatch_handle, of either kind of plan."""
    config = template.with_plan(plan)
    if not isinstance(plan, BlockingPlan):  # a CUDA graph that is replayed writes what was made while it was captured
        counts = plan.tokens_per_expert
        return HandleTuple((*(None,) * 3, plan.recv_rows, *(None,) * 3, counts, plan.num_tokens, config,
                            plan.overflow_flag))
    later = {3: lambda: plan.recv_rows, 7: lambda: plan.tokens_per_expert, OVERFLOW_FLAG: lambda: plan.overflow_flag}
    later |= {at + (at > 2): make for at, make in enumerate(_maps_later(plan, permuted=True))}
    return HandleTuple((*(None,) * 8, plan.num_tokens, config, None), later)


def _maps_later(plan: BlockingPlan, permuted: bool) -> list[Callable[[], Any]]:
    """Makers of plan_maps.of's six; the first to be called makes all."""
    of = functools.cache(lambda: plan_maps.of(plan, permuted))
    return [functools.partial(lambda at: of()[at], at) for at in range(6)]
