"""Examples: all inputs of a whole world from one small description, what the reference says, and the
comparison.

Every rank can make every rank's inputs, so it checks its own results against the whole world's reference
without talking to anybody. Comparisons are bitwise."""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st

from hybrid_ep import reference
from hybrid_ep.reference import World

DTYPES = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "uint8": torch.uint8,
    "fp8": torch.float8_e4m3fn,
}


@dataclass(frozen=True)
class Example:
    num_nodes: int = 1
    num_local_ranks: int = 1
    num_local_experts: int = 2
    tokens: tuple = (4,)  # of each rank
    topk: int = 2
    hidden: int = 16
    dtype: str = "bf16"
    routing: str = "topk"  # or "map"
    skew: str = "uniform"  # "one_expert", "one_rank", "half_dropped", "duplicates", "nothing"
    weights: bool = True
    scale_columns: int = 0
    pad_multiple: int = 0
    exact: bool = False  # small integers, whose sums are exact in every dtype
    fp32_partials: bool = False
    budget: int | None = None  # permuted rows, non-blocking
    seed: int = 0
    pad_empty_experts: bool = False

    @property
    def world(self) -> World:
        return World(self.num_nodes, self.num_local_ranks, self.num_local_experts)

    @property
    def sum_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype] if self.dtype in ("bf16", "fp16", "fp32") else torch.bfloat16


@dataclass(frozen=True)
class Inputs:
    """Of one rank."""

    hidden: torch.Tensor
    scale: torch.Tensor | None
    topk_idx: torch.Tensor | None
    topk_weights: torch.Tensor | None
    routing_map: torch.Tensor | None
    probs: torch.Tensor | None

    def routing(self) -> dict[str, Any]:
        if self.topk_idx is not None:
            return {"topk_idx": self.topk_idx, "topk_weights": self.topk_weights}
        return {"routing_map": self.routing_map, "probs": self.probs}


def _generator(ex: Example, rank: int, salt: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(ex.seed * 1_000_003 + rank * 1009 + salt)


def values(ex: Example, shape, g: torch.Generator, dtype: torch.dtype) -> torch.Tensor:
    """Payload: any bytes for opaque dtypes, else small integers or normal numbers of very different sizes."""
    if dtype == torch.uint8:
        return torch.randint(0, 256, shape, generator=g, dtype=torch.uint8)
    if dtype.itemsize == 1:
        return torch.randint(0, 120, shape, generator=g, dtype=torch.uint8).view(dtype)
    if ex.exact:
        return torch.randint(-4, 5, shape, generator=g).to(dtype)
    return (torch.randn(shape, generator=g) * 2.0 ** torch.randint(-6, 7, shape, generator=g)).to(dtype)


def route(ex: Example, num_tokens: int, g: torch.Generator) -> torch.Tensor:
    """topk_idx int64 [num_tokens, topk]."""
    num_experts, shape = ex.world.num_experts, (num_tokens, ex.topk)
    if ex.skew == "one_expert":
        return torch.full(shape, ex.seed % num_experts)
    if ex.skew == "nothing":
        return torch.full(shape, -1)
    idx = torch.rand(num_tokens, num_experts, generator=g).argsort(1)[:, : ex.topk]
    if idx.shape[1] < ex.topk or ex.skew == "duplicates":
        idx = torch.randint(0, num_experts, shape, generator=g)
    if ex.skew == "one_rank":
        idx = idx % ex.num_local_experts + (ex.seed % ex.world.num_ranks) * ex.num_local_experts
    if ex.skew == "half_dropped":
        idx = idx.masked_fill(torch.rand(shape, generator=g) < 0.5, -1)
    return idx


def make_inputs(ex: Example, rank: int) -> Inputs:
    g, num_tokens = _generator(ex, rank), ex.tokens[rank]
    hidden = values(ex, (num_tokens, ex.hidden), g, DTYPES[ex.dtype])
    scale = torch.rand(num_tokens, ex.scale_columns, generator=g) if ex.scale_columns else None
    idx = route(ex, num_tokens, g)
    weights = torch.rand(idx.shape, generator=g) if ex.weights else None
    if ex.routing == "topk":
        return Inputs(hidden, scale, idx, weights, None, None)
    route_map, probs = reference.densify(ex.world, idx, weights)
    return Inputs(hidden, scale, None, None, route_map, probs)


@dataclass
class Expected:
    """Lists by rank."""

    inputs: list
    plan: reference.WorldPlan
    weights: list | None
    permuted: list  # (rows, weights, scales)
    dispatched: list
    returned: list  # what the experts return: permuted rows
    returned_probs: list
    combined: list  # (tokens, probs)
    weighted: list | None
    returned_dense: list
    returned_dense_probs: list
    combined_dense: list


@functools.lru_cache(maxsize=8)
def expected(ex: Example) -> Expected:
    world = ex.world
    inputs = [make_inputs(ex, r) for r in range(world.num_ranks)]
    dense = [reference.densify(world, i.topk_idx, i.topk_weights, i.routing_map, i.probs) for i in inputs]
    routes, weights = [r for r, _ in dense], [w for _, w in dense] if ex.weights else None
    hidden, scales = [i.hidden for i in inputs], [i.scale for i in inputs] if ex.scale_columns else None
    budgets = None if ex.budget is None else [ex.budget] * world.num_ranks
    plan = reference.plan_world(world, routes, ex.pad_multiple, budgets, pad_empty_experts=ex.pad_empty_experts)
    full = reference.plan_world(world, routes)
    permuted = reference.dispatch_world(plan, hidden, weights, scales, True, budgets)
    dispatched = reference.dispatch_world(full, hidden, weights, scales, False)
    back = [values(ex, p[0].shape, _generator(ex, r, 1), ex.sum_dtype) for r, p in enumerate(permuted)]
    back_probs = [torch.rand(p[0].shape[0], generator=_generator(ex, r, 2)) for r, p in enumerate(permuted)]
    dense_back = [values(ex, d[0].shape, _generator(ex, r, 3), ex.sum_dtype) for r, d in enumerate(dispatched)]
    dense_probs = [
        torch.rand(d[0].shape[0], world.num_local_ranks * world.num_local_experts, generator=_generator(ex, r, 4))
        for r, d in enumerate(dispatched)
    ]
    return Expected(
        inputs,
        plan,
        weights,
        permuted,
        dispatched,
        back,
        back_probs,
        reference.combine_world(plan, back, back_probs, True, False, ex.fp32_partials),
        reference.combine_world(plan, back, [p[1] for p in permuted], True, True, ex.fp32_partials)
        if weights
        else None,
        dense_back,
        dense_probs,
        reference.combine_world(full, dense_back, dense_probs, False, False, ex.fp32_partials),
    )


def same(what: str, got, want) -> None:
    """Bit for bit, with the first difference in words."""
    if want is None or got is None:
        assert got is want, f"{what}: got {got}, want {want}"
        return
    assert got.shape == want.shape and got.dtype == want.dtype, (
        f"{what}: got {tuple(got.shape)} {got.dtype}, want {tuple(want.shape)} {want.dtype}"
    )
    if got.numel() == 0:
        return
    if got.dim() == 1:
        got, want = got[:, None], want[:, None]
    a, b = (t.contiguous().view(torch.uint8) for t in (got, want)) if got.dtype != torch.bool else (got, want)
    if not torch.equal(a, b):
        row = int((a != b).nonzero()[0, 0])
        raise AssertionError(
            f"{what}: {int((a != b).sum())} bytes differ, first in row {row}: "
            f"got {got[row].flatten()[:6]}, want {want[row].flatten()[:6]}"
        )


class Comparison:
    """Collects differences, so that a rank that finds one still takes part in every collective call."""

    def __init__(self) -> None:
        self.differences: list[str] = []

    def same(self, what: str, got, want) -> None:
        try:
            same(what, got, want)
        except AssertionError as error:
            self.differences.append(str(error))

    def finish(self) -> None:
        assert not self.differences, "\n".join(self.differences)


def check(buffer, rank: int, ex: Example, want: Expected | None = None) -> None:
    """Runs every verb of one rank of an example and compares with the reference."""
    compare, want = Comparison(), want or expected(ex)
    verbs = [check_permuted, check_dense]
    if ex.budget is not None:  # a blocking call first: where a static one cannot make room, it finds room
        verbs.reverse()
    for verb in verbs:
        verb(compare.same, buffer, rank, ex, want)
    compare.finish()


def check_permuted(same, buffer, rank: int, ex: Example, want: Expected) -> None:
    mine, plan = want.inputs[rank], want.plan.ranks[rank]
    rows, weights, scales, padded, handle = buffer.dispatch_with_permute(
        hidden=mine.hidden,
        scaling_factor=mine.scale,
        num_of_experts_per_rank=ex.num_local_experts,
        pad_multiple=ex.pad_multiple or None,
        num_permuted_tokens=ex.budget,
        non_blocking=ex.budget is not None,
        pad_empty_experts=ex.pad_empty_experts,
        **mine.routing(),
    )
    same("permuted rows", rows, want.permuted[rank][0])
    same("permuted weights", weights, want.permuted[rank][1])
    same("permuted scales", scales, want.permuted[rank][2])
    same("padded_tokens_per_expert", padded, plan.padded_tokens_per_expert)
    same("number of receive rows", handle[3].cpu(), torch.tensor([plan.num_recv_rows], dtype=torch.int32))
    if handle[4] is not None:  # a sync-free handle has no maps
        same("local_expert_routing_map", handle[4].cpu(), plan.local_route)
        same(
            "dense_chunk_layout",
            handle[5].cpu(),
            torch.tensor([int((plan.source <= r).sum()) for r in range(ex.world.num_ranks)], dtype=torch.int32),
        )
        same("dense_to_expert_map", handle[6].cpu(), plan.dense_to_expert)
    same("tokens_per_expert", handle[7].cpu(), plan.tokens_per_expert)
    same("overflow_flag", handle[10].cpu(), torch.tensor([int(plan.overflow)], dtype=torch.int32))
    partials = {"fp32_partials": ex.fp32_partials}
    out, probs = buffer.combine_with_unpermute(
        hidden=want.returned[rank], probs=want.returned_probs[rank], handle=handle, **partials
    )
    same("combined rows", out, want.combined[rank][0])
    same("combined probs", probs, want.combined[rank][1])
    if ex.weights:
        out, probs = buffer.combine_with_unpermute(hidden=want.returned[rank], handle=handle, weighted=True, **partials)
        same("weighted combine", out, want.weighted[rank][0])
    again = buffer.dispatch_with_permute(
        hidden=mine.hidden,
        scaling_factor=mine.scale,
        handle=tuple(list(handle)),
        probs=None if want.weights is None else want.weights[rank],
        num_permuted_tokens=torch.tensor(rows.shape[0]),
    )
    same("cached permuted rows", again[0], rows)
    same("cached permuted weights", again[1], weights)


def check_dense(same, buffer, rank: int, ex: Example, want: Expected) -> None:
    mine = want.inputs[rank]
    num_experts = None if mine.topk_idx is None else ex.world.num_experts
    rows, weights, scales, handle = buffer.dispatch(
        mine.hidden, mine.scale, num_of_experts=num_experts, **mine.routing()
    )
    same("rows", rows, want.dispatched[rank][0])
    same("weights", weights, want.dispatched[rank][1])
    same("scales", scales, want.dispatched[rank][2])
    same("number of rows", handle[3].cpu(), torch.tensor([want.dispatched[rank][0].shape[0]], dtype=torch.int32))
    out, probs = buffer.combine(
        want.returned_dense[rank], want.returned_dense_probs[rank], handle, fp32_partials=ex.fp32_partials
    )
    same("combined dense rows", out, want.combined_dense[rank][0])
    same("combined dense probs", probs, want.combined_dense[rank][1])


# -- deliberately wrong references: each must be noticed by check()
# ---------------------------------------------
def _reversed(pairs):
    return [(rows.flip(0), *rest) for rows, *rest in pairs]


WRONG = {
    "rows in another order": lambda ex, w: dataclasses.replace(w, permuted=_reversed(w.permuted)),
    "dense rows in another order": lambda ex, w: dataclasses.replace(w, dispatched=_reversed(w.dispatched)),
    "weights off by one row": lambda ex, w: dataclasses.replace(
        w, permuted=[(r, p.roll(1, 0), s) for r, p, s in w.permuted]
    ),
    "probs of another expert": lambda ex, w: dataclasses.replace(
        w, combined=[(x, p.roll(1, 1)) for x, p in w.combined]
    ),
    "one rounding too few": lambda ex, w: dataclasses.replace(
        w, combined=reference.combine_world(w.plan, w.returned, w.returned_probs, True, False, True)
    ),
    "nodes as one": lambda ex, w: dataclasses.replace(
        w,
        combined=reference.combine_world(
            reference.plan_world(World(1, ex.world.num_ranks, ex.num_local_experts), w.plan.routes, ex.pad_multiple),
            w.returned,
            w.returned_probs,
        ),
    ),
    "one bit of one row": lambda ex, w: dataclasses.replace(
        w, permuted=[(_flip_bit(r), p, s) for r, p, s in w.permuted]
    ),
    "scales of a neighbour": lambda ex, w: dataclasses.replace(
        w, permuted=[(r, p, s.roll(1, 0)) for r, p, s in w.permuted]
    ),
    "padding not counted": lambda ex, w: dataclasses.replace(
        w,
        plan=dataclasses.replace(
            w.plan,
            ranks=[dataclasses.replace(r, padded_tokens_per_expert=r.tokens_per_expert.long()) for r in w.plan.ranks],
        ),
    ),
}


def _flip_bit(rows: torch.Tensor) -> torch.Tensor:
    rows = rows.clone()
    rows.view(torch.uint8)[rows.shape[0] // 2, 0] ^= 1
    return rows


# -- hypothesis
# -------------------------------------------------------------------------------------------------
def examples(num_nodes: int, num_local_ranks: int, max_tokens: int = 40, budget: bool = False):
    """Strategy for examples of one topology."""
    num_ranks = num_nodes * num_local_ranks

    def build(draw):
        dtype = draw(st.sampled_from(sorted(DTYPES)))
        pad = draw(st.sampled_from([0, 1, 4, 16, 7]))
        return Example(
            num_nodes,
            num_local_ranks,
            draw(st.integers(1, 5)),
            tuple(draw(st.lists(st.integers(0, max_tokens), min_size=num_ranks, max_size=num_ranks))),
            draw(st.sampled_from([1, 2, 3, 4, 8, 35])),
            draw(st.sampled_from([16, 48, 144, 2048 + 16])),
            dtype,
            draw(st.sampled_from(["topk", "map"])),
            draw(st.sampled_from(["uniform", "one_expert", "one_rank", "half_dropped", "duplicates", "nothing"])),
            draw(st.booleans()),
            draw(st.sampled_from([0, 1, 3])),
            pad,
            draw(st.booleans()),
            draw(st.booleans()),
            draw(st.integers(0, 8)) * max(pad, 1) if budget else None,
            draw(st.integers(0, 1 << 20)),
            draw(st.booleans()),
        )

    return st.composite(build)()
