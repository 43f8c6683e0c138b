"""Exact correctness: inputs whose floating-point sums are exact, results compared with ==.

Rows are small integers regenerated from (seed, rank), so every rank knows every other rank's rows. For
combine each expert multiplies its rows by its own factor: an output that passed a wrong expert, a
wrong row or a doubled row cannot have the right sum.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hybrid_ep.cli import UsageError
from hybrid_ep.cli.bench.implementations import Case, Implementation
from hybrid_ep.cli.bench.ledger import hit_ranks
from hybrid_ep.cli.bench.routing import Routing

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_EXACT_INTEGERS = {"bf16": 1 << 8, "fp16": 1 << 11, "fp32": 1 << 24}  # all integers up to here are exact
_FACTORS = (1.0, 2.0, -1.0, -2.0, 2.0, -2.0, 1.0)  # by expert; 7 is coprime with usual experts per rank
_MAX_AMPLITUDE = 100  # values fit int8, the generator's dtype


def amplitude(dtype: str, topk: int) -> int:
    """Largest |value| of an input for which every partial sum of `topk` doubled rows stays exact."""
    limit = _EXACT_INTEGERS[dtype] // (2 * topk)
    if limit < 1:
        raise UsageError(f"--topk {topk}: sums of so many rows are not exact in {dtype}; use --dtype fp32")
    return min(limit, _MAX_AMPLITUDE)


def make_rows(rank: int, num_tokens: int, hidden: int, dtype: str, topk: int, seed: int) -> torch.Tensor:
    """The input [num_tokens, hidden] of a rank: integers in [-amplitude, amplitude]."""
    limit = amplitude(dtype, topk)
    generator = torch.Generator().manual_seed(seed * 7_919 + rank)
    values = torch.randint(-limit, limit + 1, (num_tokens, hidden), generator=generator, dtype=torch.int8)
    return values.to(DTYPES[dtype])


@dataclass(frozen=True)
class Expected:
    """What one rank must see.

    rows/weights: dispatch's output (implementations.Dispatched). factors [rows]: what the rank
    multiplies its rows by before combine. combined [num_tokens, hidden]: the sum that comes back.
    """

    rows: torch.Tensor
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
    return Expected(
        rows=torch.cat(ordered),
        weights=torch.cat(ordered_weights) if case.permute else None,
        factors=mine.repeat_interleave(torch.stack(counts).sum(0)),
        combined=_combined(case, routings[case.rank], all_factors),
    )


def _factors(count: int) -> torch.Tensor:
    return torch.tensor(_FACTORS).repeat(count // len(_FACTORS) + 1)[:count]


def _combined(case: Case, routing: Routing, factors: torch.Tensor) -> torch.Tensor:
    if case.permute:
        total = factors[routing.topk_idx].sum(1, keepdim=True)
    else:
        total = (hit_ranks(routing, case.num_experts, case.num_ranks) * factors).sum(1, keepdim=True)
    return (case.x.float() * total).to(case.x.dtype)


def count_wrong(implementation: Implementation, expected: Expected) -> int:
    """Run dispatch and combine once (collective) and count this rank's wrong elements, all outputs together.

    A tensor of the wrong shape or dtype counts as wrong in every element.
    """
    done = implementation.dispatch()
    wrong = _mismatches(done.rows, expected.rows)
    if expected.weights is not None:
        wrong += _mismatches(done.weights, expected.weights)
    # Combine starts from the right rows even if dispatch was wrong, so that each is judged alone.
    scaled = expected.rows * expected.factors.to(expected.rows.dtype).unsqueeze(1)
    combined = implementation.combine(done, scaled)
    return wrong + _mismatches(combined, expected.combined)


def _mismatches(got: torch.Tensor | None, want: torch.Tensor) -> int:
    if got is None or got.shape != want.shape or got.dtype != want.dtype:
        return max(1, want.numel())
    return int((got != want).sum())
