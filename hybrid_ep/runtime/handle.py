"""The handle tuples that carry a dispatch's plan.

A handle is a tuple with deep_ep's positions and names; the plan sits in its config element, so a tuple that was taken
apart and put together again works. Its tensors are made when somebody reads them: few callers do, and on a GPU the maps
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

from collections.abc import Iterable, Iterator
from functools import cached_property
from typing import Any

from torch import Tensor

from hybrid_ep.config import HybridEpConfigInstance
from hybrid_ep.runtime import plan_maps
from hybrid_ep.runtime.handle_kinds import DISPATCHED, PERMUTED, HandleKind
from hybrid_ep.runtime.plan import BlockingPlan, Plan


class HandleTuple(tuple[Any, ...]):
    """A tuple whose elements are its attributes of these names. Its storage has None for those that are made later;
    whatever looks into a tuple's storage, as torch.compile does, asks for attributes instead where it finds _fields and
    _make, as named tuples have them. Two handles are equal when they are one."""

    _fields: tuple[str, ...] = ()
    _kind: HandleKind

    @staticmethod
    def _make(elements: Iterable[Any]) -> tuple[Any, ...]:
        return tuple(elements)

    def there(self) -> Iterator[Any]:
        """What nobody need make any more."""
        yield from super().__iter__()
        yield from self.__dict__.values()

    def __getitem__(self, at: Any) -> Any:
        names = self._fields[at]
        return getattr(self, names) if isinstance(names, str) else tuple(getattr(self, name) for name in names)

    def __iter__(self) -> Iterator[Any]:
        return (getattr(self, name) for name in self._fields)

    def __contains__(self, element: object) -> bool:
        return element in tuple(self)

    def __add__(self, other: Any) -> Any:
        return tuple(self) + other

    def __radd__(self, other: Any) -> Any:
        return other + tuple(self)

    def __eq__(self, other: object) -> bool:
        return self is other

    def __ne__(self, other: object) -> bool:
        return self is not other

    def __hash__(self) -> int:
        return id(self)

    def __repr__(self) -> str:
        return repr(tuple(self))

    @property
    def config(self) -> HybridEpConfigInstance:
        return super().__getitem__(self._kind.config)

    @property
    def _plan(self) -> Plan:
        return self.config.plan

    @cached_property
    def _maps(self) -> tuple[Tensor | None, ...]:
        plan = self._plan
        return plan_maps.of(plan, self._kind is PERMUTED) if isinstance(plan, BlockingPlan) else (None,) * 6

    @property
    def sparse_to_dense_map(self) -> Tensor | None:
        return self._maps[0]

    @property
    def rdma_to_attn_map(self) -> Tensor | None:
        return self._maps[1]

    @property
    def attn_to_rdma_map(self) -> Tensor | None:
        return self._maps[2]

    @cached_property
    def num_dispatched_tokens_tensor(self) -> Tensor:
        return self._plan.recv_rows

    @property
    def local_expert_routing_map(self) -> Tensor | None:
        return self._maps[3]

    @property
    def num_of_tokens_per_rank(self) -> int:
        return self._plan.num_tokens


class DispatchHandle(HandleTuple):
    _fields = (
        "sparse_to_dense_map",
        "rdma_to_attn_map",
        "attn_to_rdma_map",
        "num_dispatched_tokens_tensor",
        "local_expert_routing_map",
        "num_of_tokens_per_rank",
        "config",
    )
    _kind = DISPATCHED


class PermuteHandle(HandleTuple):
    _fields = (
        *DispatchHandle._fields[:5],
        "dense_chunk_layout",
        "dense_to_expert_map",
        "tokens_per_expert",
        *DispatchHandle._fields[5:],
        "overflow_flag",
    )
    _kind = PERMUTED

    @property
    def dense_chunk_layout(self) -> Tensor | None:
        return self._maps[4]

    @property
    def dense_to_expert_map(self) -> Tensor | None:
        return self._maps[5]

    @property
    def tokens_per_expert(self) -> Tensor:
        """A new tensor at every reading: of a sync-free dispatch in a CUDA graph, replays change the counts."""
        return self._plan.tokens_per_expert

    @cached_property
    def overflow_flag(self) -> Tensor:
        return self._plan.overflow_flag


_UNREAD = (None,) * 8


def dispatch_handle(plan: Plan, template: HybridEpConfigInstance) -> DispatchHandle:
    """After the plan's first dispatch, which brings the metadata of the received rows."""
    return DispatchHandle((*(None,) * 5, plan.num_tokens, template.with_plan(plan)))


def permute_handle(plan: Plan, template: HybridEpConfigInstance) -> PermuteHandle:
    """As dispatch_handle, of either kind of plan."""
    return PermuteHandle((*_UNREAD, plan.num_tokens, template.with_plan(plan), None))
