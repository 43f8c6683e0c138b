"""Plans that the exchange kernel places, as on a GPU: the host reads none of them.

A blocking call waits for the counts, which the kernel posts to host memory while the stream runs on, and makes
tensors of that size (route_and_count). non_blocking=True does not even do that (route): no host synchronisation from
the routing to the rows, so that dispatch, experts and combine can be captured in one CUDA graph; a replay with other
routing in the same tensors gives other, right results. The price: results have their static size, nothing can grow,
and what a blocking call refuses with an exception comes as overflow (too many rows, an expert that does not exist) or
as a DeadlineError of the site headers_differ (ranks that mean different calls)."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from hybrid_ep.tensors import padded_row_bytes, row_bytes, view

if TYPE_CHECKING:
    from hybrid_ep.session import Call, Routing, Session

_ALIGNMENT = 128
_MOST_EXCHANGES = 8  # experts, a wide map, unlike widths and growth take one each, and the last one places


@dataclass(frozen=True)
class Learned:
    """Where the first dispatch of a plan writes what arriving tokens told, and how many there are from each node."""

    memory: torch.Tensor
    layout: dict[str, int]
    from_nodes: list[int]


@dataclass(frozen=True)
class Facts:
    """What a kernel found out, as tensors of its device; memory: the whole plan, which they are views of. learned: of a
    plan whose counts the host knows."""

    memory: torch.Tensor
    recv_rows: torch.Tensor  # int32 [1]
    overflow: torch.Tensor  # int32 [1], not 0: something meant for this rank was dropped
    pair_expert: torch.Tensor  # int32 [num_tokens, topk], ascending, -1 behind the last
    tokens_per_expert: torch.Tensor  # int64 [num_local_experts]
    padded_tokens_per_expert: torch.Tensor  # int64 [num_local_experts]

    layout: dict[str, int]  # where the kernels' other arrays lie in it; see plan_memory of the compiled core
    learned: Learned | None = None

    @staticmethod
    def of(engine, num_tokens: int, topk: int, num_local_experts: int, device: torch.device, worst_case: bool) -> Facts:
        at = engine.plan_memory(num_tokens, topk, worst_case)
        memory = _block(at["total"], device)

        def array(name: str, dtype: torch.dtype, *shape: int, skip: int = 0) -> torch.Tensor:
            begin = at[name] + skip * dtype.itemsize
            return memory[begin:begin + torch.Size(shape).numel() * dtype.itemsize].view(dtype).view(shape)

        return Facts(memory, array("numbers", torch.int32, 1), array("numbers", torch.int32, 1, skip=3),
                     array("pair_expert", torch.int32, num_tokens, topk),
                     array("tokens_per_expert", torch.int64, num_local_experts),
                     array("padded_tokens_per_expert", torch.int64, num_local_experts), at)

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
    if routing.num_tokens > session.shape.max_tokens:
        raise ValueError(
            f"hidden has {routing.num_tokens} rows, but the buffer is laid out for {session.shape.max_tokens} tokens a "
            "rank, and non_blocking=True cannot make it grow; raise max_num_of_tokens_per_rank, or run a blocking "
            "dispatch of that size first")
    # Ranks agree on each of these, hence grow together. A map's rows are as wide as the widest token so far.
    topk = session.shape.max_topk if routing.topk_idx is None else routing.topk_idx.shape[1]
    topk = min(topk, routing.num_experts)
    session.fit(num_experts=routing.num_experts, max_topk=topk, row_bytes=row_bytes(call.hidden),
                scale_bytes=0 if call.scale is None else padded_row_bytes(call.scale))
    placed, facts = _launch(session, routing, call, header, must_agree, topk, count=False)
    return placed.complete, facts


def route_and_count(session: Session, routing: Routing, call: Call, header: dict[str, int],
                    must_agree: list[str]) -> tuple:
    """(core plan, Facts, what the ranks said), for a host that waits for the counts and nothing else. Collective.

    The kernel places rows when all calls fit together and the buffer. Where they do not, every rank learns from the
    headers what each of the others does: raise, grow, or take wider rows, and exchange again. ValueError and
    CapacityError are raised on all ranks alike."""
    topk, known = _first_width(session, routing), routing.topk_idx is not None
    for _ in range(_MOST_EXCHANGES):
        capacity = session.shape.recv_rows
        placed, facts = _launch(session, routing, call, header, must_agree, topk, count=True)
        headers = placed.headers
        session.check_headers(headers)
        widths = [h["topk"] for h in headers]
        if routing.num_experts != session.shape.num_experts:  # all ranks' were another than the buffer's
            session.fit(num_experts=routing.num_experts)
        elif any(h["excess"] for h in headers):
            if known:
                raise ValueError(_unknown_experts(headers, routing.num_experts))
            topk, known = max(*widths, _widest(routing)), True
        elif min(widths) != max(widths):
            topk = max(widths)
        else:
            session.fit_call(headers, topk, call)
            if placed.placed and session.shape.recv_rows == capacity:
                break
    else:
        raise RuntimeError(f"{_MOST_EXCHANGES} exchanges did not place the rows; please report this, with {headers}")
    if routing.topk_idx is None:
        session.map_width = max(session.map_width, topk)
    session.check_capacity(placed, call, headers)
    learned = placed.learned
    memory = _block(learned["total"], session.options.device)
    return placed.plan(view("memory", memory)), dataclasses.replace(
        facts, learned=Learned(memory, learned, placed.from_nodes)), headers


def _first_width(session: Session, routing: Routing) -> int:
    """Pairs of a token to make room for: a map's are as many as any before had, once one has been looked at."""
    if routing.topk_idx is not None:
        return max(1, min(routing.topk_idx.shape[1], routing.num_experts))
    return min(session.map_width or _widest(routing), routing.num_experts)


def _widest(routing: Routing) -> int:
    """Most pairs of a token of this rank. Waits for the device."""
    if routing.topk_idx is not None:
        return max(1, min(routing.topk_idx.shape[1], routing.num_experts))
    return max(1, int(routing.routing_map.sum(1).max())) if routing.num_tokens else 1


def _unknown_experts(headers: list[dict[str, int]], num_experts: int) -> str:
    said = ", ".join(f"{h['excess']} on rank {rank}" for rank, h in enumerate(headers) if h["excess"])
    return (f"topk_idx holds choices outside the experts 0..{num_experts - 1} ({said}); -1 drops a choice")


def _launch(session: Session, routing: Routing, call: Call, header: dict[str, int], must_agree: list[str], topk: int,
            count: bool) -> tuple:
    """(what the exchange kernel was asked to place, Facts). With another number of experts than the engine's, a rank
    sends its header alone."""
    fits = routing.num_experts == session.shape.num_experts
    tokens = routing.num_tokens if fits else 0
    facts = Facts.of(session.engine, tokens, topk, session.shape.num_experts // session.topology.num_ranks,
                     session.options.device, worst_case=not count)
    placed = session.engine.place(
        **routing.views(), num_tokens=tokens, topk_in=routing.topk_in, topk=topk, header=header, must_agree=must_agree,
        memory=view("memory", facts.memory), pad_multiple=call.pad_multiple, pad_empty=call.pad_empty_experts,
        budget=call.budget or 0, count=count)
    return placed, facts


def _block(num_bytes: int, device: torch.device) -> torch.Tensor:
    memory = torch.empty(num_bytes + 2 * _ALIGNMENT, dtype=torch.uint8, device=device)
    return memory[-memory.data_ptr() % _ALIGNMENT:][:num_bytes]
