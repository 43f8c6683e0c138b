"""Exact correctness: inputs whose floating-point sums are exact, results compared with ==.

Rows are small integers regenerated from (seed, rank), so every rank knows every other rank's rows. For
combine each expert multiplies its rows by its own factor: an output that passed a wrong expert, a
wrong row or a doubled row cannot have the right sum.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from hybrid_ep.cli.bench.implementations import Case, Dispatched, Implementation
from hybrid_ep.cli.bench.ledger import hit_ranks
from hybrid_ep.cli.bench.routing import Routing
from hybrid_ep.cli.bench.rows import amplitude
from hybrid_ep.payload import quantize

# Of dispatched rows. fp8 and mxfp8 (hybrid_ep.payload.quantize) travel as bytes with scales; combine then sums bf16.
DTYPES = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    **dict.fromkeys(quantize.FORMATS, torch.float8_e4m3fn),
}
SUM_DTYPES = {name: torch.bfloat16 if name in quantize.FORMATS else dtype for name, dtype in DTYPES.items()}
_FACTORS = (1.0, 2.0, -1.0, -2.0, 2.0, -2.0, 1.0)  # by expert; 7 is coprime with usual experts per rank


def make_rows(rank: int, num_tokens: int, hidden: int, dtype: str, topk: int, seed: int) -> torch.Tensor:
    """The input [num_tokens, hidden] of a rank, in the sum's dtype: integers in [-amplitude, amplitude]."""
    limit = amplitude(dtype, topk)
    generator = torch.Generator().manual_seed(seed * 7_919 + rank)
    values = torch.randint(-limit, limit + 1, (num_tokens, hidden), generator=generator, dtype=torch.int8, device="cpu")
    return values.to(SUM_DTYPES[dtype])


def payload(x: torch.Tensor, dtype: str) -> tuple[torch.Tensor, torch.Tensor | None]:
    """What dispatch sends for rows x [T, H]: (x, None), or quantised (e4m3 [T, H], scales [T, H / block])."""
    fmt = quantize.FORMATS.get(dtype)
    return (x, None) if fmt is None else quantize.quantize(x, fmt)


@dataclass(frozen=True)
class Expected:
    """What one rank must see.

    rows, scales, weights: dispatch's output (implementations.Dispatched). expert_rows: the rows before they were
    quantised. factors [rows]: what the rank multiplies them by before combine. combined [num_tokens, hidden]: the sum
    that comes back.
    """

    rows: torch.Tensor
    scales: torch.Tensor | None
    expert_rows: torch.Tensor
    weights: torch.Tensor | None
    factors: torch.Tensor
    combined: torch.Tensor


def expect(case: Case, routings: list[Routing], dtype: str, seed: int) -> Expected:
    """Build a rank's expected results from the routing and the regenerated rows of all ranks."""
    rows, weights, counts = [], [], []
    first = case.rank * case.num_local_experts
    for source, routing in enumerate(routings):
        x = make_rows(source, routing.num_tokens, case.hidden, dtype, case.topk, seed)
        if case.permute:
            routing_map, probs = routing.to_map(case.num_experts)
            local = slice(first, first + case.num_local_experts)
            wanted = routing_map[:, local].t()
            weights.append([probs[:, local].t()[i][wanted[i]] for i in range(case.num_local_experts)])
        else:
            wanted = hit_ranks(routing, case.num_experts, case.num_ranks)[:, case.rank].unsqueeze(0)
        rows.append([x[group] for group in wanted])
        counts.append(wanted.sum(1))
    num_groups = case.num_local_experts if case.permute else 1
    ordered = [rows[source][group] for group in range(num_groups) for source in range(len(routings))]
    ordered_weights = [w[group] for group in range(num_groups) for w in weights]
    all_factors = _factors(case.num_experts if case.permute else case.num_ranks)
    mine = all_factors[first : first + num_groups] if case.permute else all_factors[case.rank : case.rank + 1]
    expert_rows = torch.cat(ordered)
    sent, scales = payload(expert_rows, dtype)  # row by row, so that it does not matter who quantises
    x = make_rows(case.rank, routings[case.rank].num_tokens, case.hidden, dtype, case.topk, seed)
    return Expected(
        rows=sent,
        scales=scales,
        expert_rows=expert_rows,
        weights=torch.cat(ordered_weights) if case.permute else None,
        factors=mine.repeat_interleave(torch.stack(counts).sum(0)),
        combined=_combined(case, x, routings[case.rank], all_factors),
    )


def _factors(count: int) -> torch.Tensor:
    return torch.tensor(_FACTORS, dtype=torch.float32, device="cpu").repeat(count // len(_FACTORS) + 1)[:count]


def _combined(case: Case, x: torch.Tensor, routing: Routing, factors: torch.Tensor) -> torch.Tensor:
    if case.permute:
        total = factors[routing.topk_idx].sum(1, keepdim=True)
    else:
        total = (hit_ranks(routing, case.num_experts, case.num_ranks) * factors).sum(1, keepdim=True)
    return (x.float() * total).to(x.dtype)


def count_wrong(implementation: Implementation, expected: Expected) -> int:
    """Run dispatch and combine once (collective) and count this rank's wrong elements, all outputs together.

    A tensor of the wrong shape or dtype counts as wrong in every element.
    """
    done = implementation.dispatch()
    if not implementation.ordered:
        return _count_wrong_unordered(implementation, done, expected)
    wrong = _mismatches(done.rows, expected.rows)
    for got, want in ((done.weights, expected.weights), (done.scales, expected.scales)):
        wrong += 0 if want is None else _mismatches(got, want)
    # Combine starts from the right rows even if dispatch was wrong, so that each is judged alone.
    scaled = expected.expert_rows * expected.factors.to(expected.expert_rows.dtype).unsqueeze(1)
    combined = implementation.combine(done, scaled.to(done.rows.device))
    return wrong + _mismatches(combined, expected.combined)


def _count_wrong_unordered(implementation: Implementation, done: Dispatched, expected: Expected) -> int:
    """Rows compared as a multiset; all rows of a rank have one factor, so their order does not matter to combine."""
    got, want = (
        torch.cat([t.cpu().view(torch.uint8) for t in parts if t is not None], 1)
        for parts in ((done.rows, done.scales), (expected.rows, expected.scales))
    )
    same = got.shape == want.shape and torch.equal(_sorted(got), _sorted(want))
    wrong = 0 if same else max(1, expected.rows.numel())
    if expected.scales is not None:  # what the rows were before they were quantised cannot be told in another order
        return wrong
    factor = expected.factors[:1].to(done.rows) if expected.factors.numel() else 1
    combined = implementation.combine(done, done.rows * factor)
    return wrong + _mismatches(combined, expected.combined)


def _sorted(rows: torch.Tensor) -> torch.Tensor:
    """Rows of bytes in lexicographic order."""
    order = sorted(range(len(rows)), key=lambda i: bytes(rows[i].numpy()))
    return rows[torch.tensor(order, dtype=torch.int64, device="cpu")]


def count_unchained(implementation: Implementation, meet: Callable[[], None]) -> int:
    """Elements in which two pairs back to back, one's sums the next one's tokens, differ from the same two with
    `meet()`, a barrier, between all operations: what a missing wait between operations would change. Collective."""
    results = []
    for between in (lambda: None, meet):
        first = implementation.case
        try:
            for _ in range(2):
                between()
                done = implementation.dispatch()
                between()
                x = implementation.combine(done, implementation.expert_output(done))
                implementation.feed(x)
        finally:
            implementation.case = first
        results.append(x)
        meet()
    return _mismatches(*results)


def _mismatches(got: torch.Tensor | None, want: torch.Tensor) -> int:
    if got is None or got.shape != want.shape or got.dtype != want.dtype:
        return max(1, want.numel())
    got, want = (t.cpu() if t.element_size() > 1 else t.cpu().view(torch.uint8) for t in (got, want))
    return int((got != want).sum())
