"""The published effect of a static placement with replicas, on synthetic loads, and what exact balancing adds.

TensorRT-LLM reports for DeepSeek-R1 (58 layers, 256 experts, 1024 pairs a rank): imbalance by rank 1.564 without
balancing, 0.109 with 288 slots at EP32, 0.115 at EP36. Popularity here is log-normal with the sigma that gives the
first number; iterations drift from it by `--delta`. The placement is made from the first half of the iterations and
judged on the second.

    python scripts/experiment_balance.py -o docs/results/balance      (writes .json, .png and .svg)
    python scripts/experiment_balance.py --redraw docs/results/balance      (the pictures again, from the .json)
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import numpy as np

from hybrid_ep.balance import loads, plan_placement, report
from hybrid_ep.balance.statistics import LoadStatistics
from hybrid_ep.cli import plotting


def synthetic(layers, iterations, sigma, delta, pairs, seed):
    """`pairs` (token, expert) pairs over the group in every iteration and layer, 256 experts."""
    rng = np.random.default_rng(seed)
    share = loads.popularity(rng, layers, 256, "lognormal", sigma)
    counts = np.stack(
        [np.stack([rng.multinomial(pairs, row) for row in loads.drift(rng, share, delta)]) for _ in range(iterations)]
    )
    return LoadStatistics(counts, tuple(range(iterations)), tuple(range(3, 3 + layers)))


def run(args):
    """Rows of the experiment: name, ranks, imbalance by rank and slot, std, noise floor."""
    rows = []
    for ranks in (32, 36):
        stats = synthetic(args.layers, args.iterations, args.sigma, args.delta, 1024 * ranks, args.seed)
        past, now = stats.between(None, args.iterations // 2 - 1), stats.between(args.iterations // 2, None)
        placed = plan_placement(past.total(), 288, ranks).phy2log
        floor = report.noise_floor(now, ranks)
        cases = [("288 slots, planned from the past", placed, 0)]
        if ranks == 32:
            cases = [
                ("no balancing", None, 0),
                *cases,
                ("exact, 1 spare slot (288)", None, 1),
                ("exact, 2 spare slots (320)", None, 2),
            ]
        for name, phy2log, spare in cases:
            mean = report.average(report.report(now, ranks, phy2log, spare))
            by_rank = mean.exact if spare else mean.by_rank
            rows.append(
                {
                    "case": name,
                    "ranks": ranks,
                    "by_rank": by_rank,
                    "noise_floor": floor,
                    "by_slot": None if spare else mean.by_slot,
                    "slot_std": None if spare else mean.slot_std,
                }
            )
    return rows


def draw(stem, rows):
    """A point a case on a log axis, and beside it the noise floor of its number of ranks."""
    figure, axes = plotting.pyplot().subplots(figsize=(6.4, 2.5), layout="constrained")
    names = [f"{r['case']}, EP{r['ranks']}" for r in rows]
    axes.plot([r["by_rank"] for r in rows], names, "o", color=plotting.BLUE, label="tokens over ranks")
    axes.plot(
        [r["noise_floor"] for r in rows],
        names,
        "|",
        color=plotting.RED,
        markersize=14,
        markeredgewidth=1.5,
        label="sampling noise of a perfectly fair static placement",
    )
    for name, r in zip(names, rows, strict=True):
        axes.annotate(
            f"{r['by_rank']:.3f}", (r["by_rank"], name), (0, 5), textcoords="offset points", ha="center", fontsize=8
        )
    axes.set(xscale="log", xlim=(0.005, 3), ylim=(len(rows) - 0.5, -0.7), xlabel="(max - mean) / mean")
    axes.xaxis.set_major_formatter("{x:g}")
    figure.legend(loc="outside upper left", ncols=2)
    return plotting.save(figure, stem)


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=58)
    parser.add_argument("--iterations", type=int, default=40)
    parser.add_argument("--sigma", type=float, default=1.11)
    parser.add_argument("--delta", type=float, default=0.1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("-o", "--output", metavar="STEM", help="write STEM.json, STEM.png and STEM.svg")
    parser.add_argument("--redraw", metavar="STEM", help="draw the rows of STEM.json again, and run nothing")
    args = parser.parse_args(argv)
    if args.redraw:
        draw(Path(args.redraw), json.loads(Path(args.redraw + ".json").read_text())["rows"])
        return 0
    rows = run(args)
    for r in rows:
        slot = "" if r["by_slot"] is None else f"   by slot {r['by_slot']:.3f}, std {r['slot_std']:.1f}"
        print(f"{r['case']:36s} EP{r['ranks']}  by rank {r['by_rank']:.3f}   noise floor {r['noise_floor']:.3f}{slot}")
    if args.output:
        config = {k: v for k, v in vars(args).items() if k not in ("output", "redraw")}
        Path(args.output + ".json").write_text(json.dumps({"config": config, "rows": rows}, indent=1) + "\n")
        draw(Path(args.output), rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
