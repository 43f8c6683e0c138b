"""Planners side by side: imbalance left, lower bound, clones or changed slots, time. Writes nothing unless asked.

    python scripts/bench_balance.py [--layers 10] [--seed 0] [--json FILE] [--published eplb.py] [--exact]

Four tables. Exact: one micro-batch at a time against no balancing and EPLB planned from earlier batches. One slot: with
--census N, how many of N layers a case end above 1 %, and of how many that is proved. Placement: loads known
beforehand, against EPLB (scripts/balance_peers/eplb.py). Drift: how many slots change. Times are processor time of this
thread: medians of calls of the planner through Python, of its core alone and of ten layers in one call, taken in turn;
for placements the best of several, taken in turn with EPLB's. Our EPLB packs lists of numbers and is several times
faster than the published program, which --published times as well, from a copy of yours, on --published-layers.
"""

from __future__ import annotations

import argparse
import json
import runpy
import sys
import time
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from balance_peers import conditions, eplb, traces

from hybrid_ep import balance
from hybrid_ep.balance import bounds, loads
from hybrid_ep.balance.owners import Owners
from hybrid_ep.balance.placement import rank_loads

CONDITIONS = {
    "scale": lambda rng, args: ("Scale of the loads", conditions.scale_rows(rng)),
    "fresh": lambda rng, args: ("Fresh placements", conditions.fresh_rows(rng, args.layers)),
    "incremental": lambda rng, args: ("Placements that change", conditions.incremental_rows(rng, args.layers)),
    "together": lambda rng, args: (
        "Experts hot together",
        conditions.together_rows(rng, 10 * args.layers, args.tokens),
    ),
    "times": lambda rng, args: ("Their plans' time", conditions.time_rows(rng, 10 * args.layers, args.tokens)),
}
# ranks, experts, spare slots
EXACT_CASES = [(32, 256, 1), (64, 256, 1), (64, 256, 2), (16, 256, 2), (8, 256, 4)]
# log-popularity sigma, drift from batch to batch
NOISE = [(0.3, 0.2), (0.6, 0.3), (1.0, 0.3), (1.5, 0.5)]
PLACEMENT_LOADS = [
    ("zipf", 0.5),
    ("zipf", 0.8),
    ("zipf", 1.0),
    ("zipf", 1.2),
    ("lognormal", 0.5),
    ("lognormal", 1.0),
    ("lognormal", 1.5),
]
# name, slots, groups, nodes, ranks
PLACEMENT_CASES = [("global 32", 288, 1, 1, 32), ("global 36", 288, 1, 1, 36), ("hierarchical 32/4", 288, 8, 4, 32)]


def timed(calls, repeats, of=np.median):
    """Seconds of processor time of each call, called in turn: what slows the machine slows them alike."""
    times = [[] for _ in calls]
    for _ in range(repeats):
        for call, mine in zip(calls, times, strict=True):
            start = time.thread_time_ns()
            call()
            mine.append((time.thread_time_ns() - start) / 1e9)
    return [float(of(mine)) for mine in times]


def planner_times(planner, now):
    """Microseconds a layer: through plan(), the core without it, with a rank's part, all layers in one call. The part
    is all that exact mode asks of the planner for a layer; of it the slowest layer, too."""
    together, (ranks, experts) = np.stack(now), now[0].shape
    columns = Owners(experts, ranks).host_columns(planner.options.spare_slots)
    calls = [
        [
            lambda c=c: planner.plan(c),
            lambda c=c: planner._core.plan(c, planner.owner),
            lambda c=c: planner.plan_of_rank(c, ranks // 2, columns),
        ]
        for c in now
    ]
    plan, core, part = (np.array([timed(of_layer, 100) for of_layer in calls]) * 1e6).T
    return {
        "plan_us": np.median(plan),
        "core_us": np.median(core),
        "part_us": np.median(part),
        "part_us_max": part.max(),
        "layers_us": timed([lambda: planner.plan_layers(together)], 50)[0] / len(now) * 1e6,
    }


def exact_rows(rng, num_layers, tokens):
    """One row a case and noise level: means over layers of what each planner leaves."""
    for ranks, experts, spare in EXACT_CASES:
        planner = balance.MicrobatchPlanner(ranks, experts, spare_slots=spare)
        level = balance.MicrobatchPlanner(ranks, experts, spare_slots=spare, epsilon=0.0)
        for sigma, delta in NOISE:
            share = loads.popularity(rng, num_layers, experts, "lognormal", sigma)
            past = sum(loads.drift(rng, share, delta) for _ in range(8))
            slots = ranks * (experts // ranks + spare)
            stale = eplb.place(torch.from_numpy(past).float(), slots, 1, 1, ranks).numpy()
            now = [loads.counts(rng, layer, ranks, tokens) for layer in loads.drift(rng, share, delta)]
            plans, exact = [planner.plan(c) for c in now], [level.plan(c) for c in now]
            total = np.stack([c.sum(axis=0) for c in now])
            eplb_left = [balance.imbalance_ratio(row) for row in rank_loads(total, stale, ranks)]
            yield {
                "case": f"EP{ranks} E{experts} +{spare}",
                "sigma": sigma,
                "delta": delta,
                "none": np.mean([p.imbalance(balanced=False) for p in plans]),
                "eplb_stale": np.mean(eplb_left),
                "exact": np.mean([p.imbalance() for p in plans]),
                "exact_max": max(p.imbalance() for p in plans),
                "bound": np.mean([p.bound() for p in plans]),
                "copies": np.mean([p.num_copies for p in plans]),
                "copies_bound": np.mean([bounds.copies(p.tokens_of_ranks(False), p.target) for p in plans]),
                "eps0": np.mean([p.imbalance() for p in exact]),
                "eps0_copies": np.mean([p.num_copies for p in exact]),
            } | planner_times(planner, now)


def census_rows(rng, num_layers, tokens):
    """One spare slot, 256 experts: layers that end above 1 %, those of them where a search proves that no plan does,
    and the layers that a search of the planner saved. Counts come from one rank, which no plan depends on."""
    for ranks in (32, 64):
        planner = balance.MicrobatchPlanner(ranks, 256)
        without = balance.MicrobatchPlanner(ranks, 256, search_nodes=0)
        counts, row = np.zeros((ranks, 256), np.int64), dict.fromkeys(("above", "proved", "found by search"), 0)
        worst, gap, slowest = 0.0, 0.0, 0.0
        cases = [(sigma, delta) for sigma in (0.3, 0.4, 0.5, 0.6, 0.8, 1.0, 1.2, 1.5) for delta in (0.2, 0.3, 0.5)]
        for sigma, delta in cases:
            share = loads.drift(rng, loads.popularity(rng, num_layers // len(cases), 256, "lognormal", sigma), delta)
            for counts[0] in rng.multinomial(tokens * ranks, share):
                p = without.plan(counts)
                if p.tokens_of_ranks().max() <= p.target:
                    continue
                start = time.thread_time_ns()
                p = planner.plan(counts)
                slowest = max(slowest, (time.thread_time_ns() - start) / 1e3)
                if p.tokens_of_ranks().max() <= p.target:
                    row["found by search"] += 1
                    continue
                row["above"] += 1
                left, bound = p.imbalance(), p.bound(search=True)
                row["proved"] += round((1 + bound) * counts.sum() / ranks) > p.target
                worst, gap = max(worst, left), max(gap, left - bound)
        yield {
            "case": f"EP{ranks} E256 +1",
            "layers": num_layers // len(cases) * len(cases),
            **row,
            "worst": worst,
            "most above bound": gap,
            "slowest_us": slowest,
        }


def placement_rows(rng, num_layers, published=None, published_layers=10):
    """Loads known beforehand; `split` is what the best split of our placement could reach."""
    for name, slots, groups, nodes, ranks in PLACEMENT_CASES:
        for kind, value in PLACEMENT_LOADS:
            load = np.rint(loads.popularity(rng, num_layers, 256, kind, value) * 1e6).astype(np.int64)
            weight = torch.from_numpy(load).float()
            theirs = eplb.place(weight, slots, groups, nodes, ranks).numpy()
            hier = groups if groups > 1 else 0
            plan = balance.plan_placement(load, slots, ranks, nodes, num_groups=hier)
            other = [balance.imbalance_ratio(row) for row in rank_loads(load, theirs, ranks)]
            shape = (slots, groups, nodes, ranks)
            ours_s, their_s = timed(
                [
                    lambda a=(load, slots, ranks, nodes), g=hier: balance.plan_placement(*a, num_groups=g),
                    lambda w=weight, shape=shape: eplb.place(w, *shape),
                ],
                5,
                min,
            )
            fullest = [rank_loads(load, placed, ranks).max(axis=1) for placed in (plan.phy2log, theirs)]
            behind = int((fullest[0] > fullest[1] * (1 + 1e-12)).sum())
            twins = sum(len(m) - len(set(m)) for layer in theirs for m in layer.reshape(ranks, -1))
            row = {
                "case": name,
                "load": f"{kind} {value}",
                "eplb": np.mean(other),
                "ours": plan.imbalance().mean(),
                "ours_max": plan.imbalance().max(),
                "split": plan.split_bound().mean(),
                "behind": behind,
                "eplb_same_rank": twins,
                "eplb_ms": their_s * 1e3,
                "ours_ms": ours_s * 1e3,
                "speedup": their_s / ours_s,
            }
            if published:
                many = np.concatenate([load] * -(-published_layers // num_layers))[:published_layers]
                row |= published_times(published["rebalance_experts"], many, shape)
            yield row


def published_times(call, load, shape):
    """EPLB's call on the published program and on ours, in turn, on the same loads."""
    weight = torch.from_numpy(load).float()
    ours = lambda: balance.rebalance_experts(weight, *shape)  # noqa: E731
    theirs, *ours = timed([lambda: call(weight, *shape), ours, ours, ours], 3, min)
    ours = min(ours)
    return {
        "layers": len(load),
        "published_ms": theirs * 1e3,
        "call_ms": ours * 1e3,
        "published_speedup": theirs / ours,
    }


def drift_rows(rng, num_layers):
    """Slots changed by a fresh plan and by the incremental one, 256 experts on 288 slots of 32 ranks."""
    for kind, value in PLACEMENT_LOADS:
        for delta in (0.05, 0.15):
            share = loads.popularity(rng, num_layers, 256, kind, value)
            first = balance.plan_placement(share, 288, 32)
            later = loads.drift(rng, share, delta)
            fresh = balance.plan_placement(later, 288, 32)
            step = balance.plan_placement(later, 288, 32, current=first.phy2log)
            row = {
                "load": f"{kind} {value}",
                "drift": delta,
                "stale": first.imbalance(later).mean(),
                "fresh_moved": (fresh.phy2log != first.phy2log).sum(axis=1).mean(),
                "moved": step.moved.mean(),
                "moved_max": int(step.moved.max()),
                "above_24": int((step.moved > 24).sum()),
                "left": step.imbalance().mean(),
                "left_max": step.imbalance().max(),
            }
            for percent in (3, 4):  # the trade: fewer slots for less balance
                p = balance.plan_placement(later, 288, 32, current=first.phy2log, target=percent / 100)
                row |= {f"moved_at_{percent}": p.moved.mean(), f"moved_max_at_{percent}": int(p.moved.max())}
            yield row


def show(title, rows):
    """Prints rows as a table and returns them."""
    rows = [{k: float(v) if isinstance(v, np.floating) else v for k, v in row.items()} for row in rows]
    print(f"\n## {title}")
    cells = [[f"{v:.4g}" if isinstance(v, float) else str(v) for v in row.values()] for row in rows]
    width = [max(map(len, column)) for column in zip(list(rows[0]), *cells, strict=True)]
    for line in [list(rows[0]), ["-" * w for w in width], *cells]:
        print("| " + " | ".join(text.rjust(w) for text, w in zip(line, width, strict=True)) + " |")
    return rows


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=10, help="layers a row is the mean of")
    parser.add_argument("--exact", action="store_true", help="only the first table")
    parser.add_argument("--tokens", type=int, default=32768, help="(token, expert) pairs of a rank and micro-batch")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write the rows here too")
    parser.add_argument("--census", type=int, default=24_000, help="layers of each case of the table of one slot")
    parser.add_argument("--published-layers", type=int, default=58, help="layers that --published times")
    parser.add_argument("--published", type=Path, help="DeepSeek's eplb.py, to be timed beside ours")
    parser.add_argument(
        "--conditions",
        nargs="*",
        choices=CONDITIONS,
        help="only the tables of other conditions, or these of them: scale of "
        "loads, steep loads, placements that change, experts hot together, their plans' time",
    )
    parser.add_argument(
        "--apart", action="store_true", help="only the table of experts that are hot together, kept apart"
    )
    parser.add_argument(
        "--traces",
        type=Path,
        metavar="NPZ",
        help="only the table of recorded traces, as markdown; with --apart, of their experts kept apart",
    )
    args = parser.parse_args(argv)
    if args.traces:
        counts = traces.load(args.traces)[0]
        made = list(traces.apart_rows(counts) if args.apart else traces.rows(counts))
        print((traces.apart_markdown if args.apart else traces.markdown)(made))
        return write(args.json, {"apart" if args.apart else "traces": made})
    published = runpy.run_path(str(args.published)) if args.published else None
    torch.set_num_threads(1)
    rng = np.random.default_rng(args.seed)
    if args.apart:
        rows = show("Experts hot together, kept apart", conditions.apart_rows(rng, 3 * args.layers, args.tokens))
        return write(args.json, {"apart": rows})
    if args.conditions is not None:
        chosen = args.conditions or CONDITIONS
        return write(args.json, {name: show(*table(rng, args)) for name, table in CONDITIONS.items() if name in chosen})
    title = "Exact, one micro-batch: (max - mean) / mean over ranks"
    if args.exact:
        return write(args.json, {"exact": show(title, exact_rows(rng, args.layers, args.tokens))})
    tables = {
        "exact": show(title, exact_rows(rng, args.layers, args.tokens)),
        "census": show("One spare slot: layers above 1 %", census_rows(rng, args.census, args.tokens)),
        "placement": show("Placement, loads known", placement_rows(rng, args.layers, published, args.published_layers)),
        "drift": show("Drift of log-popularity: changed slots of 288", drift_rows(rng, 2 * args.layers)),
    }
    return write(args.json, tables)


def write(path, tables):
    """The raw rows, where asked for."""
    if path:
        path.write_text(json.dumps(tables, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
