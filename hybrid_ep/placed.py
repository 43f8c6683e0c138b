"""Plans that the host never reads: the exchange kernel places every row, and nothing waits for it.

This is what non_blocking=True means on a GPU: no host synchronisation from the routing to the rows, so that dispatch,
experts and combine can be captured in one CUDA graph; a replay with other routing in the same tensors gives other,
right results. The price: results have their static size, nothing can grow, and what a blocking call refuses with an
exception comes as overflow (too many rows, an expert that does not exist) or as a DeadlineError of the site
headers_differ (ranks that mean different calls)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from hybrid_ep.tensors import address, aligned, padded_row_bytes, row_bytes

if TYPE_CHECKING:
    from hybrid_ep.session import Call, Routing, Session

_ALIGNMENT = 128


@dataclass(frozen=True)
class Facts:
    """What a kernel found out, as tensors of its device; memory: the whole plan, which they are views of."""

    memory: torch.Tensor
    recv_rows: torch.Tensor  # int32 [1]
    overflow: torch.Tensor  # int32 [1], not 0: something meant for this rank was dropped
    pair_expert: torch.Tensor  # int32 [num_tokens, topk], ascending, -1 behind the last
    tokens_per_expert: torch.Tensor  # int64 [num_local_experts]
    padded_tokens_per_expert: torch.Tensor  # int64 [num_local_experts]

    @staticmethod
    def of(engine, num_tokens: int, topk: int, num_local_experts: int, device: torch.device) -> Facts:
        at = engine.plan_memory(num_tokens, topk)
        memory = torch.empty(at["total"] + _ALIGNMENT, dtype=torch.uint8, device=device)
        memory = memory[-memory.data_ptr() % _ALIGNMENT:][:at["total"]]

        def view(name: str, dtype: torch.dtype, *shape: int, skip: int = 0) -> torch.Tensor:
            begin = at[name] + skip * dtype.itemsize
            return memory[begin:begin + torch.Size(shape).numel() * dtype.itemsize].view(dtype).view(shape)

        return Facts(memory, view("numbers", torch.int32, 1), view("numbers", torch.int32, 1, skip=3),
                     view("pair_expert", torch.int32, num_tokens, topk),
                     view("tokens_per_expert", torch.int64, num_local_experts),
                     view("padded_tokens_per_expert", torch.int64, num_local_experts))

    def from_dense(self, probs: torch.Tensor, stride: int) -> torch.Tensor:
        """fp32 [num_tokens, num_experts] -> plan order [num_tokens, stride]."""
        ordered = probs.new_zeros(probs.shape[0], stride)
        picked = probs.gather(1, self.pair_expert.long().clamp(min=0))
        ordered[:, :picked.shape[1]] = picked.masked_fill(self.pair_expert < 0, 0.0)
        return ordered

    def from_topk(self, idx: torch.Tensor, weights: torch.Tensor, num_experts: int, stride: int) -> torch.Tensor:
        """fp32 [num_tokens, K] of the experts idx -> plan order."""
        dense = weights.new_zeros(idx.shape[0], num_experts + 1)  # the last column takes what was dropped
        dense.scatter_add_(1, idx.masked_fill((idx < 0) | (idx >= num_experts), num_experts), weights)
        return self.from_dense(dense[:, :-1], stride)

    def to_dense(self, ordered: torch.Tensor, num_experts: int) -> torch.Tensor:
        """Plan order -> fp32 [num_tokens, num_experts], 0 where not chosen."""
        dense = ordered.new_zeros(ordered.shape[0], num_experts + 1)
        where = self.pair_expert.long().masked_fill(self.pair_expert < 0, num_experts)
        return dense.scatter_(1, where, ordered[:, :where.shape[1]])[:, :-1].contiguous()


def route(session: Session, routing: Routing, call: Call, header: dict[str, int], must_agree: list[str]) -> tuple:
    """(core plan, Facts). Collective, and asynchronous where the executor is. ValueError, on the rank concerned alone
    and before anything is sent, when the call does not fit what the buffer was laid out for."""
    tokens, num_experts = routing.num_tokens, routing.num_experts
    if tokens > session.shape.max_tokens:
        raise ValueError(
            f"hidden has {tokens} rows, but the buffer is laid out for {session.shape.max_tokens} tokens a rank, and "
            "non_blocking=True cannot make it grow; raise max_num_of_tokens_per_rank, or run a blocking dispatch of "
            "that size first")
    is_topk = routing.topk_idx is not None
    # Ranks agree on each of these, hence grow together. A map's rows are as wide as the widest token so far.
    topk = min(routing.topk_idx.shape[1] if is_topk else session.shape.max_topk, num_experts)
    session.fit(num_experts=num_experts, max_topk=topk, row_bytes=row_bytes(call.hidden),
                scale_bytes=0 if call.scale is None else padded_row_bytes(call.scale))
    facts = Facts.of(session.engine, tokens, topk, num_experts // session.topology.num_ranks, session.options.device)
    table = aligned(routing.topk_idx if is_topk else routing.routing_map)
    weights = None if routing.weights is None else aligned(routing.weights)
    core = session.engine.place(
        routing=address(table), kind="topk" if is_topk else "map", weights=address(weights), num_tokens=tokens,
        topk_in=table.shape[1] if is_topk else 0, topk=topk, header=header, must_agree=must_agree,
        memory=address(facts.memory), pad_multiple=call.pad_multiple, pad_empty=call.pad_empty_experts,
        budget=call.budget)
    return core, facts
