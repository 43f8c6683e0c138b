"""What load statistics say: imbalance by rank and by slot, layer by layer, as a table.

Ratios are taken per iteration and then averaged, as a step waits for the fullest rank of that step. Beside them stand
the noise floor (what sampling alone leaves on a perfectly fair static split) and what exact balancing reaches.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hybrid_ep.balance.microbatch import MicrobatchPlanner
from hybrid_ep.balance.placement import rank_loads, slot_loads
from hybrid_ep.balance.statistics import LoadStatistics


@dataclass(frozen=True)
class LayerReport:
    """One layer. mean, std: tokens by rank (population std over ranks, averaged over iterations). by_rank, by_slot:
    imbalance ratio, averaged over iterations. exact: by rank with clones in spare slots, or None; bound: what no plan
    with those slots beats."""

    layer: int
    mean: float
    std: float
    by_rank: float
    slot_std: float
    by_slot: float
    exact: float | None = None
    bound: float | None = None


def _ratio(load: np.ndarray) -> float:
    """Mean over iterations of (max - mean) / mean; load [I, n]. Iterations without tokens do not count."""
    mean = load.mean(axis=1)
    some = mean > 0
    return float((load.max(axis=1)[some] / mean[some] - 1).mean()) if some.any() else 0.0


def report(
    statistics: LoadStatistics, num_ranks: int, phy2log: np.ndarray | None = None, spare_slots: int = 0
) -> list[LayerReport]:
    """One row a layer. phy2log [L, slots]: the placement to project onto; None: contiguous owners, no replicas.
    spare_slots: add what exact balancing reaches from contiguous owners with so many slots a rank."""
    num_experts = statistics.counts.shape[2]
    if num_ranks < 1 or (phy2log is None and num_experts % num_ranks):
        raise ValueError(
            f"ep_size is {num_ranks}: it does not divide {num_experts} experts; give --plan with slots "
            "that divide, or another size"
        )
    if phy2log is not None and (phy2log.shape[0] != len(statistics.layers) or phy2log.shape[1] % num_ranks):
        raise ValueError(
            f"the placement has {phy2log.shape[0]} layers of {phy2log.shape[1]} slots, the statistics "
            f"{len(statistics.layers)} layers for {num_ranks} ranks"
        )
    if phy2log is not None and not set(range(num_experts)) <= set(phy2log[0]):
        raise ValueError(f"the placement lacks experts: the statistics have {num_experts}")
    rows = []
    for n, layer in enumerate(statistics.layers):
        counts = statistics.counts[:, n]
        placed = np.arange(num_experts) if phy2log is None else phy2log[n]
        repeated = np.broadcast_to(placed, (len(counts), len(placed)))
        slots, ranks = slot_loads(counts, repeated), rank_loads(counts, repeated, num_ranks)
        rows.append(
            LayerReport(
                layer,
                float(ranks.mean()),
                float(ranks.std(axis=1).mean()),
                _ratio(ranks),
                float(slots.std(axis=1).mean()),
                _ratio(slots),
                *(_exact(counts, num_ranks, spare_slots) if spare_slots else (None, None)),
            )
        )
    return rows


def _exact(counts: np.ndarray, num_ranks: int, spare_slots: int) -> tuple[float, float]:
    planner = MicrobatchPlanner(num_ranks, counts.shape[1], spare_slots=spare_slots)
    sources = np.zeros((num_ranks, counts.shape[1]), np.int64)
    left, bound = [], []
    for total in counts:
        sources[0] = total  # who routed the tokens changes neither clones nor quotas
        plan = planner.plan(sources)
        left.append(plan.imbalance())
        bound.append(max(plan.bound(), 0.0))
    return float(np.mean(left)), float(np.mean(bound))


def noise_floor(statistics: LoadStatistics, num_ranks: int, draws: int = 200) -> float:
    """Imbalance that multinomial sampling leaves when every rank expects exactly its fair share: no static placement
    gets below it. Seeded, so that a report repeats."""
    pairs = int(statistics.counts.sum(axis=2).mean())
    sampled = np.random.default_rng(0).multinomial(pairs, np.full(num_ranks, 1 / num_ranks), size=draws)
    return _ratio(sampled.astype(np.float64))


def average(rows: list[LayerReport]) -> LayerReport:
    """The mean over layers, as layer -1."""

    def of(name: str) -> float:
        return float(np.mean([getattr(r, name) for r in rows]))

    exact, bound = (None, None) if rows[0].exact is None else (of("exact"), of("bound"))
    return LayerReport(-1, of("mean"), of("std"), of("by_rank"), of("slot_std"), of("by_slot"), exact, bound)


def table(rows: list[LayerReport]) -> str:
    """Markdown, with the average as the last row."""
    exact = rows[0].exact is not None
    head = "| layer | tokens a rank | std | mean imbalance by rank | std by slot | by slot |"
    lines = [head + (" exact | no plan below |" if exact else "")]
    lines.append("|---:" * (8 if exact else 6) + "|")
    for row in [*rows, average(rows)]:
        name = "average" if row.layer < 0 else str(row.layer)
        lines.append(
            f"| {name} | {row.mean:.1f} | {row.std:.1f} | {row.by_rank:.3f} | {row.slot_std:.1f} | "
            f"{row.by_slot:.3f} |" + (f" {row.exact:.3f} | {row.bound:.3f} |" if exact else "")
        )
    return "\n".join(lines)


def tensorrt_table(rows: list[LayerReport], num_ranks: int) -> str:
    """By rank, as TensorRT-LLM's report_load_statistics.py prints its data frame; its std is the sample's (n - 1)."""
    sample = (num_ranks / (num_ranks - 1)) ** 0.5 if num_ranks > 1 else float("nan")
    names = ("mean", "std", "imbalance-ratio")
    values = [(str(r.layer), r.mean, r.std * sample, r.by_rank) for r in [*rows, average(rows)]]
    cells = [("", *names)] + [(name, *(f"{x:.6f}" for x in numbers)) for name, *numbers in values]
    cells[-1] = ("average", *cells[-1][1:])
    first, *others = (max(map(len, column)) for column in zip(*cells, strict=True))
    lines = [
        f"{line[0]:<{first}}  " + "  ".join(f"{x:>{n}}" for x, n in zip(line[1:], others, strict=True))
        for line in cells
    ]
    return "Load statistics:\n" + "\n".join(lines)
