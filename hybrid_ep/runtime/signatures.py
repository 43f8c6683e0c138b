"""Types that the signatures of several modules share: what the four verbs take and return, and what a group must have.

T tokens of H columns, M receive rows, P permuted rows, E experts; a None stands for what was not asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor

if TYPE_CHECKING:
    import torch.distributed as dist

    from hybrid_ep import _core

Handle = tuple[Any, ...]  # what a dispatch returns for its combine, seven or eleven elements; opaque
Received = tuple[Tensor, Tensor | None, Tensor | None]  # rows, weights, scales
Dispatched = tuple[Tensor, Tensor | None, Tensor | None, Handle]  # rows [M, H], weights, scales, handle
# rows [P, H], weights [P], scales, int64 [local experts] padded tokens per expert, handle
Permuted = tuple[Tensor, Tensor | None, Tensor | None, Tensor, Handle]
Combined = tuple[Tensor, Tensor | None]  # tokens [T, H], probs [T, E]


class Segments(Protocol):
    """How the ranks of a group share memory."""

    def create(self, name: str, num_bytes: int) -> _core.Segment: ...

    def attach(self, name: str, num_bytes: int) -> _core.Segment: ...

    def unlink(self, name: str) -> None: ...


class GroupLike(Protocol):
    """What takes the place of a torch process group, `hybrid_ep.testing.VirtualGroup` for instance."""

    @property
    def group_name(self) -> str: ...

    @property
    def store(self) -> dist.Store: ...

    @property
    def segments(self) -> Segments: ...

    def rank(self) -> int: ...

    def size(self) -> int: ...


class Buffer(Protocol):
    """What has the four verbs: HybridEPBuffer, the reference, a buffer of a test."""

    compile_name: str
    group_size: int
    num_of_hybrid_ep_ranks_per_nvlink_domain: int

    def dispatch(self, *args: Any, **keywords: Any) -> Any: ...

    def combine(self, *args: Any, **keywords: Any) -> Any: ...

    def dispatch_with_permute(self, *args: Any, **keywords: Any) -> Any: ...

    def combine_with_unpermute(self, *args: Any, **keywords: Any) -> Any: ...
