"""What a static number of permuted rows takes, and what does not fit: DeepSeek-V3's activations, recorded routers.

    python scripts/static_rows_tables.py [--traces docs/results/2026-11-24-router-traces.npz]

First table: rows and bytes that the experts of one layer keep for the backward, of a micro-batch of 4,096 tokens a rank
at EP64, and of all that are in flight on the first stage of the GB200 recipe's pipeline (4 stages of 4 chunks).
Second, with --traces: of recorded layers and steps (scripts/record_router_traces.py), those whose fullest rank has more
rows than fit, and pairs that would be dropped; third, of all of them together, how far exact plans exceed static rows.
All of it is computed; no GPU has run it.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent))
from balance_peers import traces

from hybrid_ep.balance import MicrobatchPlanner
from hybrid_ep.perf import models

EP, TOKENS, IN_FLIGHT = 64, 4096, 19 * 4  # chunks alive on the first of 4 stages, 4 layers each
EPSILON, ROUNDING = 0.01, 16
CAPACITY = (1.25, 1.5, 2.0, 4.0)
OVERFLOW_HEAD = ["experts a rank", "spare slots", "layers x steps", "overflow", "pairs over", "most, of the mean"]


def memory_rows() -> list[tuple[str, int, float, float]]:
    """(what, rows, GB of a layer, GB of all in flight)."""
    model = models.get("deepseek_v3")
    mean = TOKENS * model.topk
    worst = EP * TOKENS * min(model.topk, model.experts // EP)
    static = round(mean * (1 + EPSILON))
    cases = [("mean, if every rank had it", mean), ("exact plan, static rows", static + -static % ROUNDING)]
    cases += [(f"capacity factor {factor:g}", int(mean * factor)) for factor in CAPACITY]
    cases += [("worst case: every token to one rank", worst)]
    row = 2 * (model.hidden + 3 * model.expert_hidden)  # an expert's input, gate and up, activated; bf16
    return [(name, rows, rows * row / 1e9, rows * row * IN_FLIGHT / 1e9) for name, rows in cases]


def lost(load: np.ndarray, room: float) -> tuple[float, float]:
    """(share of layers and steps with a rank above room, share of pairs above it) of load [n, ranks]."""
    over = np.maximum(load - room, 0)
    return float((over.sum(axis=1) > 0).mean()), float(over.sum() / load.sum())


def trace_rows(counts: dict[str, np.ndarray]) -> list[list[str]]:
    """A row a run at 4 experts a rank: its share of layers and steps, and of pairs, that do not fit."""
    made = []
    for name, run in counts.items():
        ranks = run.shape[2] // 4
        layers = run[-traces.JUDGED :].reshape(-1, run.shape[2])
        plain = layers.reshape(len(layers), ranks, -1).sum(axis=2)
        mean = plain.sum(axis=1)[0] / ranks
        cells = [name, str(ranks), f"{len(layers):,}"]
        cells += ["{:.1%}, {:.2%}".format(*lost(plain, factor * mean)) for factor in CAPACITY[:3]]
        for spare in traces.SPARE:
            planner = MicrobatchPlanner(ranks, run.shape[2], spare_slots=spare, epsilon=EPSILON, skip_below=EPSILON)
            by_rank = np.zeros((ranks, run.shape[2]), np.int64)
            load = []
            for by_rank[0] in layers:
                load.append(planner.plan(by_rank).tokens_of_ranks())
            room = int(mean) + int(mean) * round(EPSILON * 1e6) // 1_000_000
            cells.append("{:.1%}, {:.2%}".format(*lost(np.array(load), room + -room % ROUNDING)))
        made.append(cells)
    return made


def overflow_rows(counts: dict[str, np.ndarray]) -> list[list[str]]:
    """A row for experts a rank and spare slots, of all runs: how often static rows do not hold, and by how much."""
    made = []
    for share in traces.EXPERTS_A_RANK:
        for spare in traces.SPARE:
            seen, lost_pairs, pairs, most = [], 0, 0, 0.0
            for name, ranks in traces.shapes(counts):
                run = counts[name]
                if run.shape[2] // ranks != share:
                    continue
                planner = MicrobatchPlanner(ranks, run.shape[2], spare_slots=spare, epsilon=EPSILON, skip_below=EPSILON)
                by_rank = np.zeros((ranks, run.shape[2]), np.int64)
                for by_rank[0] in run[-traces.JUDGED :].reshape(-1, run.shape[2]):
                    mean = int(by_rank[0].sum()) // ranks
                    room = mean + mean * round(EPSILON * 1e6) // 1_000_000
                    over = np.maximum(planner.plan(by_rank).tokens_of_ranks() - (room + -room % ROUNDING), 0)
                    seen.append(over.any())
                    lost_pairs, pairs = lost_pairs + int(over.sum()), pairs + mean * ranks
                    most = max(most, float(over.max()) / mean)
            cells = [str(share), str(spare), f"{len(seen):,}", str(sum(map(int, seen)))]
            made.append([*cells, f"{lost_pairs / pairs:.4%}", f"{most:.1%}"])
    return made


def table(head: list[str], rows: list[list[str]]) -> str:
    """Markdown."""
    lines = ["| " + " | ".join(head) + " |", "|---" + "|---:" * (len(head) - 1) + "|"]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--traces", type=Path, help="recorded routers, .npz")
    args = parser.parse_args(argv)
    rows = [[n, f"{r:,}", f"{one:.2f}", f"{many:,.0f}"] for n, r, one, many in memory_rows()]
    print(table(["rows of a rank", "rows", "GB a layer and micro-batch", f"GB of {IN_FLIGHT} in flight"], rows))
    if args.traces:
        counts = traces.load(args.traces)[0]
        head = ["run", "EP", "layers x steps", *(f"capacity {c:g}" for c in CAPACITY[:3])]
        print("\n" + table([*head, "static, 1 slot", "static, 2 slots"], trace_rows(counts)))
        print("\n" + table(OVERFLOW_HEAD, overflow_rows(counts)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
