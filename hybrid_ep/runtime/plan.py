"""Plans: what one routing decision became. The exchange kernel places every row in memory of its own device; the host
reads none of it, but knows the counts where it waited for them (BlockingPlan), else their limits (StaticPlan).

Immutable once its first dispatch has run; outlives later calls, later growth and the buffer."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from hybrid_ep import _core
from hybrid_ep.runtime.handle_kinds import HandleKind

_ALIGNMENT = 128


@functools.cache
def _no_words(device: torch.device) -> torch.Tensor:
    """Whose new_empty reads two arguments, where torch.empty reads five, which costs it as much again."""
    return torch.empty(0, dtype=torch.int64, device=device)


class PlanMemory(NamedTuple):
    """One block that kernels write and read, and where its arrays lie in it, in bytes (the compiled core's PlanMemory).
    Of int64, as the padded counts are, which every permuted dispatch copies for its caller: a type less to change."""

    block: torch.Tensor
    at: Any

    @classmethod
    def of(cls, at: Any, device: torch.device) -> PlanMemory:
        num_words = at.total // 8  # the total is a multiple of 128
        if device.type == "cpu":
            if _core.exchanges_tensors():
                return cls(_core.host_words(num_words), at)
            memory = _no_words(device).new_empty(num_words + _ALIGNMENT // 8)
            begin = -memory.data_ptr() % _ALIGNMENT // 8
            return cls(memory[begin : begin + num_words], at)
        return cls(_no_words(device).new_empty(num_words), at)  # CUDA's allocators align to more

    def array(self, begin: int, dtype: torch.dtype, *shape: int) -> torch.Tensor:
        """A view: `shape` elements from byte `begin` on."""
        flat = self.block.view(torch.uint8)[begin : begin + math.prod(shape) * dtype.itemsize].view(dtype)
        return flat if len(shape) == 1 else flat.view(shape)


@dataclass(frozen=True, eq=False)
class Plan:
    """Rows of one routing. core: the compiled plan; num_*: this rank's; max_*: the largest over the ranks."""

    core: Any = field(repr=False)
    rank: int
    num_ranks: int
    num_local_ranks: int
    num_experts: int
    pad_multiple: int
    max_tokens: int
    has_weights: bool
    memory: PlanMemory = field(repr=False)
    by_lines: bool = field(default=False, kw_only=True)  # made by the latency path, which operations on it then take

    def __deepcopy__(self, memo: Any) -> Plan:
        return self  # immutable, so that a copied handle works as well as the original

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            "a handle cannot be pickled: its plan describes memory of a buffer of this process. Save the "
            "routing (topk_idx or routing_map) instead, and dispatch again where it is loaded"
        )

    @property
    def num_nodes(self) -> int:
        return self.num_ranks // self.num_local_ranks

    @property
    def num_local_experts(self) -> int:
        return self.num_experts // self.num_ranks

    @property
    def num_node_experts(self) -> int:
        return self.num_local_ranks * self.num_local_experts

    @property
    def num_tokens(self) -> int:
        return self.core.num_tokens

    @property
    def topk(self) -> int:
        """Pairs of a token that records have room for, the same on all ranks."""
        return self.core.topk

    @property
    def weight_stride(self) -> int:
        """Columns of weights in plan order."""
        return self.core.weight_stride

    @property
    def num_recv_rows(self) -> int:
        return self.core.num_recv_rows

    @property
    def max_recv_rows(self) -> int:
        return self.core.max_recv_rows

    @property
    def num_permuted_rows(self) -> int:
        return self.core.num_permuted_rows

    @property
    def host_reads(self) -> bool:
        """Whether its memory is the host's too."""
        return self.memory.block.is_cpu

    # ---- what kernels found out, as tensors of their device
    @property
    def recv_rows(self) -> torch.Tensor:
        """int32 [1]: num_recv_rows."""
        return self.memory.array(self.memory.at.numbers, torch.int32, 1)

    @property
    def overflow_flag(self) -> torch.Tensor:
        """int32 [1], 1: something meant for this rank was dropped."""
        return self.memory.array(self.memory.at.numbers + 12, torch.int32, 1)

    @property
    def pair_expert(self) -> torch.Tensor:
        """int32 [num_tokens, topk]: a token's experts ascending, -1 behind the last."""
        return self.memory.array(self.memory.at.pair_expert, torch.int32, self.num_tokens, self.topk)

    @property
    def tokens_per_expert(self) -> torch.Tensor:
        """int32 [num_local_experts]: kept rows, without padding."""
        return self.memory.array(self.memory.at.tokens_per_expert, torch.int64, self.num_local_experts).int()

    # ---- what the two kinds know differently
    @property
    def padded_tokens_per_expert(self) -> torch.Tensor:
        """int64 [num_local_experts], the reader's own: kept rows with padding."""
        raise NotImplementedError

    @property
    def has_holes(self) -> bool:
        """Whether some permuted rows may be written by nobody, since capacity_factor dropped their tokens."""
        raise NotImplementedError

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """All memory that kernels use with this plan."""
        return (self.memory.block,)


@dataclass(frozen=True, eq=False)
class BlockingPlan(Plan):
    """Of a call that waited for the counts: sizes are exact. learned: what the first dispatch writes of arriving
    tokens; from_nodes: how many come to this node from this rail's rank of each."""

    learned: PlanMemory = field(repr=False)
    from_nodes: list[int] = field(repr=False)

    @property
    def padded_tokens_per_expert(self) -> torch.Tensor:
        # On the host, as the caller of a blocking call expects.
        if _core.exchanges_tensors():
            return self.core.padded_tensor()
        return torch.frombuffer(self.core.padded_tokens_per_expert, dtype=torch.int64)

    @property
    def num_dropped(self) -> int:
        return self.core.num_dropped

    @property
    def has_holes(self) -> bool:
        return self.core.has_holes

    def tensors(self) -> tuple[torch.Tensor, ...]:
        return self.memory.block, self.learned.block


@dataclass(frozen=True, eq=False)
class StaticPlan(Plan):
    """Of a call that waited for nothing: sizes are limits, num_permuted_rows the budget, and what came is known to
    kernels only. capped: the buffer has a capacity_factor."""

    capped: bool

    @property
    def padded_tokens_per_expert(self) -> torch.Tensor:
        block, at = self.memory
        return block.narrow_copy(0, at.padded_tokens_per_expert // 8, self.num_experts // self.num_ranks)

    @property
    def has_holes(self) -> bool:
        return self.capped


@dataclass(frozen=True)
class Routed:
    """What HybridEPBuffer.route returns: a plan whose dispatch is still to come, of this kind."""

    plan: Plan
    kind: HandleKind
