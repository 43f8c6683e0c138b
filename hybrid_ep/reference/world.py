"""What dispatch and combine give every rank of a world, bit for bit.

Words: rank r lives on node r // num_local_ranks; expert e on rank e // num_local_experts. A receive row is
one (source rank, token) pair that some expert of a rank was chosen for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hybrid_ep.runtime.signatures import Combined, Received

Tensors = Sequence[Tensor]  # one of every rank
_NOTHING = -0.0  # the neutral element of IEEE addition: x + -0.0 is x for every x, -0.0 too
SUMMED_DTYPES = {torch.bfloat16, torch.float16, torch.float32}


@dataclass(frozen=True)
class World:
    """The shape of an expert-parallel group: num_nodes x num_local_ranks ranks, num_local_experts on each."""

    num_nodes: int
    num_local_ranks: int
    num_local_experts: int

    @property
    def num_ranks(self) -> int:
        return self.num_nodes * self.num_local_ranks

    @property
    def num_experts(self) -> int:
        return self.num_ranks * self.num_local_experts

    def ranks_of_node(self, node: int) -> range:
        """Ranks are numbered node by node."""
        return range(node * self.num_local_ranks, (node + 1) * self.num_local_ranks)

    def experts_of_rank(self, rank: int) -> slice:
        """Of the experts' axis of a route [T, num_experts]."""
        return slice(rank * self.num_local_experts, (rank + 1) * self.num_local_experts)

    def experts_of_node(self, node: int) -> slice:
        """Of the same axis: those of the node's ranks together."""
        per_node = self.num_local_ranks * self.num_local_experts
        return slice(node * per_node, (node + 1) * per_node)


@dataclass(frozen=True)
class RankPlan:
    """Where the rows of one receiving rank come from and go to (M receive rows, P permuted rows)."""

    source: Tensor  # int64 [M] source rank, ascending
    token: Tensor  # int64 [M] token index on the source, ascending within a source
    local_route: Tensor  # bool [M, num_local_experts]: chosen experts, before the budget
    dense_to_expert: Tensor  # int32 [M, num_local_experts]: permuted row or -1
    tokens_per_expert: Tensor  # int32 [num_local_experts] kept rows
    padded_tokens_per_expert: Tensor  # int64 [num_local_experts]
    overflow: bool
    num_dropped: int  # (token, expert) pairs cut off by the budget

    @property
    def num_recv_rows(self) -> int:
        return self.source.numel()

    @property
    def num_permuted_rows(self) -> int:
        return int(self.padded_tokens_per_expert.sum())


@dataclass(frozen=True)
class WorldPlan:
    """Everybody's RankPlan, and the routes it was made from."""

    world: World
    routes: list[torch.Tensor]  # bool [T_r, num_experts] of every rank
    ranks: list[RankPlan]
    pad_multiple: int


def densify(
    world: World,
    topk_idx: Tensor | None = None,
    topk_weights: Tensor | None = None,
    routing_map: Tensor | None = None,
    probs: Tensor | None = None,
) -> Combined:
    """(route bool [T, E], weights fp32 [T, E] or None). -1 drops a choice; the weights of duplicated experts
    are added in fp32 in the order of the columns. Weights count only where the token is routed."""
    if topk_idx is None:
        if routing_map is None:
            raise ValueError("topk_idx and routing_map are both None; give one of them")
        chosen_by = routing_map.bool()
        return chosen_by, None if probs is None else torch.where(chosen_by, probs.float(), 0.0)
    rows = torch.arange(topk_idx.shape[0], dtype=torch.int64, device="cpu")
    route = torch.zeros(topk_idx.shape[0], world.num_experts, dtype=torch.bool, device="cpu")
    weights = torch.zeros(topk_idx.shape[0], world.num_experts, dtype=torch.float32, device="cpu")
    for k in range(topk_idx.shape[1]):
        chosen = topk_idx[:, k] >= 0
        route[rows[chosen], topk_idx[chosen, k]] = True
        if topk_weights is not None:
            weights[rows[chosen], topk_idx[chosen, k]] += topk_weights[chosen, k].float()
    return route, weights if topk_weights is not None else None


def plan_world(
    world: World,
    routes: Sequence[torch.Tensor],
    pad_multiple: int = 1,
    budgets: Sequence[int | None] | None = None,
    recv_capacity: int | None = None,
    pad_empty_experts: bool = False,
) -> WorldPlan:
    """Places every row of every rank.

    budgets[r]: permuted rows of rank r (None: any number); what lies behind them is cut off, so that the last
    experts starve first. recv_capacity: receive rows of every rank (None: any number); later rows are
    dropped, their permuted rows remain, as zeros. pad_empty_experts: an expert without rows gets pad_multiple
    zero rows."""
    budgets = [None] * world.num_ranks if budgets is None else budgets
    plans = [
        _plan_rank(world, rank, routes, pad_multiple or 1, budgets[rank], recv_capacity, pad_empty_experts)
        for rank in range(world.num_ranks)
    ]
    return WorldPlan(world, list(routes), plans, pad_multiple or 1)


def _plan_rank(
    world: World,
    rank: int,
    routes: Sequence[torch.Tensor],
    pad: int,
    budget: int | None,
    recv_capacity: int | None,
    pad_empty: bool,
) -> RankPlan:
    parts: list[tuple[Tensor, Tensor, Tensor]] = []
    for s, route in enumerate(routes):
        mine = route[:, world.experts_of_rank(rank)]
        rows = mine.any(dim=1).nonzero().flatten()
        parts.append((torch.full_like(rows, s), rows, mine[rows]))
    source, token, local = (torch.cat(part) for part in zip(*parts, strict=True))
    num_rows = source.numel()
    dense_to_expert = torch.full(local.shape, -1, dtype=torch.int32, device="cpu")
    kept, padded, start = [], [], 0
    for e in range(world.num_local_experts):
        rows = local[:, e].nonzero().flatten()
        size = -(-rows.numel() // pad) * pad or (pad if pad_empty else 0)
        if budget is not None:
            size = min(size, max(0, budget - start))
        rows = rows[:size]
        dense_to_expert[rows, e] = torch.arange(start, start + rows.numel(), dtype=torch.int32, device="cpu")
        kept.append(rows.numel())
        padded.append(size)
        start += size
    dropped = int(local.sum()) - sum(kept)
    source, token, local, dense_to_expert = (x[:recv_capacity] for x in (source, token, local, dense_to_expert))
    overflow = dropped > 0 or source.numel() < num_rows
    return RankPlan(
        source,
        token,
        local,
        dense_to_expert,
        torch.tensor(kept, dtype=torch.int32, device="cpu"),
        torch.tensor(padded, dtype=torch.int64, device="cpu"),
        overflow,
        dropped,
    )


def dispatch_world(
    plan: WorldPlan,
    hidden: Tensors,
    weights: Tensors | None = None,
    scales: Tensors | None = None,
    permute: bool = True,
    out_rows: Sequence[int | None] | None = None,
) -> list[Received]:
    """[(rows, weights or None, scales or None)] of every rank.

    hidden[r] [T_r, H], weights[r] fp32 dense [T_r, E], scales[r] [T_r, S]. Without permute: M rows and the
    weights of this node's experts, [M, num_local_ranks * num_local_experts]. With permute: rows grouped by
    expert, zero rows as padding, out_rows[r] rows in all (default: the padded sum), weights [rows]."""
    world, results = plan.world, []
    routed = None
    if weights is not None:
        routed = [torch.where(m, w, 0.0) for m, w in zip(plan.routes, weights, strict=True)]
    for rank, mine in enumerate(plan.ranks):
        x = _receive(mine, hidden)
        w = None if routed is None else _receive(mine, routed)
        scale = None if scales is None else _receive(mine, scales)
        if not permute:
            if w is not None:
                w = w[:, world.experts_of_node(rank // world.num_local_ranks)].contiguous()
            results.append((x, w, scale))
            continue
        asked = None if out_rows is None else out_rows[rank]
        num_rows = mine.num_permuted_rows if asked is None else asked
        row, expert = (mine.dense_to_expert >= 0).nonzero(as_tuple=True)
        slot = mine.dense_to_expert[row, expert].long()
        results.append(
            (
                _place(_indexable(x)[row].view(x.dtype), slot, num_rows),
                None if w is None else _place(w[:, world.experts_of_rank(rank)][row, expert], slot, num_rows),
                None if scale is None else _place(scale[row], slot, num_rows),
            )
        )
    return results


def _receive(mine: RankPlan, tensors: Tensors) -> Tensor:
    """The rows of a rank's plan taken from every source's tensor."""
    return torch.cat([x.index_select(0, mine.token[mine.source == s]) for s, x in enumerate(tensors)])


def _place(values: Tensor, slot: Tensor, num_rows: int) -> Tensor:
    out = torch.zeros((num_rows,) + tuple(values.shape[1:]), dtype=torch.float32, device="cpu").to(values.dtype)
    _indexable(out)[slot] = _indexable(values)
    return out


def _indexable(tensor: Tensor) -> Tensor:
    """The same memory as bytes where torch 2.9 cannot index it on a CPU."""
    return tensor.view(torch.uint8) if _is_fp8(tensor) else tensor


def combine_world(
    plan: WorldPlan,
    rows: Tensors,
    weights: Sequence[Tensor | None] | None = None,
    permuted: bool = True,
    weighted: bool = False,
    fp32_partials: bool = False,
) -> list[Combined]:
    """[(tokens [T_r, H], probs [T_r, E] or None)] of every rank: the sum of what its tokens' experts
    returned.

    The order of summation, all in fp32; a sum of nothing is +0:

    1. partial of a rank: its experts of the token ascending (times their weight if weighted) -> rounded to dtype
    2. node sum: partials of the node's ranks ascending -> rounded to dtype, except on the token's own node
    3. result: own node first, then the other nodes ascending -> rounded to dtype

    fp32_partials leaves out the roundings of steps 1 and 2. weighted needs permuted weights. probs: the
    adjoint of dispatch's weights, i.e. every routed (token, expert) gets the sum over the node's ranks
    ascending of the weights that came back for it."""
    dtype, partials = rows[0].dtype, []
    round_to = None if fp32_partials else dtype
    for mine, x, w in zip(plan.ranks, rows, weights or [None] * len(rows), strict=True):
        partials.append(_rank_partial(mine, x, w if weighted else None, permuted, round_to))
    given = [w for w in weights or [] if w is not None]
    if given and len(given) < len(rows):
        raise ValueError(f"weights come from {len(given)} of {len(rows)} ranks; give them on all ranks or on none")
    returned = None if weighted or not given else [_returned_weights(plan, *at, permuted) for at in enumerate(given)]
    return [_combine_rank(plan, s, partials, returned, dtype, fp32_partials) for s in range(plan.world.num_ranks)]


def _rank_partial(
    mine: RankPlan, x: Tensor, weight: Tensor | None, permuted: bool, round_to: torch.dtype | None
) -> Tensor:
    if not permuted:
        return x.float()
    partial = torch.full((mine.num_recv_rows, x.shape[1]), _NOTHING, dtype=torch.float32, device="cpu")
    for e in range(mine.dense_to_expert.shape[1]):
        row = (mine.dense_to_expert[:, e] >= 0).nonzero().flatten()
        slot = mine.dense_to_expert[row, e].long()
        partial[row] += x[slot].float() if weight is None else x[slot].float() * weight[slot, None]
    partial[(mine.dense_to_expert < 0).all(dim=1)] = 0.0
    return partial if round_to is None else partial.to(round_to).float()


def _returned_weights(plan: WorldPlan, rank: int, w: Tensor, permuted: bool) -> Tensor:
    """fp32 [M, num_local_ranks * num_local_experts]: what this rank says about each expert of its node."""
    if not permuted:
        return w.float()
    world, mine = plan.world, plan.ranks[rank]
    out = torch.zeros(
        mine.num_recv_rows, world.num_local_ranks * world.num_local_experts, dtype=torch.float32, device="cpu"
    )
    row, expert = (mine.dense_to_expert >= 0).nonzero(as_tuple=True)
    first = rank % world.num_local_ranks * world.num_local_experts
    out[row, first + expert] = w[mine.dense_to_expert[row, expert].long()].float()
    return out


def _combine_rank(
    plan: WorldPlan, s: int, partials: Tensors, returned: Tensors | None, dtype: torch.dtype, fp32_partials: bool
) -> Combined:
    world, num_tokens = plan.world, plan.routes[s].shape[0]
    own = s // world.num_local_ranks
    total = torch.full((num_tokens, partials[0].shape[1]), _NOTHING, dtype=torch.float32, device="cpu")
    reached = torch.zeros(num_tokens, dtype=torch.bool, device="cpu")
    probs = None if returned is None else torch.zeros(num_tokens, world.num_experts, dtype=torch.float32, device="cpu")
    for node in [own] + [n for n in range(world.num_nodes) if n != own]:
        node_sum = torch.full_like(total, _NOTHING)
        for rank in world.ranks_of_node(node):
            from_s = plan.ranks[rank].source == s
            token = plan.ranks[rank].token[from_s]
            node_sum[token] += partials[rank][from_s]
            reached[token] = True
            if probs is not None and returned is not None:
                probs[token, world.experts_of_node(node)] += returned[rank][from_s]
        total += node_sum if node == own or fp32_partials else node_sum.to(dtype).float()
    total[~reached] = 0.0
    return total.to(dtype), None if probs is None else torch.where(plan.routes[s], probs, 0.0)


def _is_fp8(x: Tensor) -> bool:
    return x.is_floating_point() and x.element_size() == 1
