"""Exact balancing in training, on this machine: tiny_cpu with Megatron's skewed router, with and without.

Runs `recipes.pretrain` as users do, off and exact in turns, and compares losses, tokens by rank and step times. Where
ranks share cores their work adds up whatever its distribution: only ranks with a core each can gain.

    python scripts/experiment_balance_training.py -o docs/results/balance-training      (writes .json, .png and .svg)
    python scripts/experiment_balance_training.py --redraw docs/results/balance-training      (the pictures again)
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from hybrid_ep.cli import plotting

ROOT = Path(__file__).resolve().parent.parent
MODES = ("off", "exact")


def train(ranks, mode, args, folder):
    """One run; its steps as recipes write them, with the load average of the machine just before."""
    name, load = f"{ranks}-{mode}-{len(list(folder.iterdir()))}", os.getloadavg()[0]
    command = [
        sys.executable,
        "-m",
        "recipes.pretrain",
        "tiny_cpu",
        "--ranks",
        str(ranks),
        "--steps",
        str(args.steps),
        "--forced-bias",
        str(args.forced_bias),
        "--balance",
        mode,
        *(["--grouped-gemm"] if args.grouped_gemm else []),
        *(["--ranks-per-node", str(args.ranks_per_node)] if args.ranks_per_node else []),
        *(["--balance-push", args.balance_push] if args.balance_push and mode != "off" else []),
        "--name",
        name,
        "--runs-dir",
        str(folder),
    ]
    environment = {**os.environ, "WANDB_MODE": "disabled", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=args.timeout, check=False
    )
    if done.returncode not in (0, 3):  # 3: a run this short has not learned
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    records = [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
    return load, [r for r in records if "train_loss" in r]


def compare(ranks, args, folder):
    """Off and exact in turns, `--repeats` times: one row with everything the page shows."""
    times, loads, kept, ratios = {m: [] for m in MODES}, [], {}, []
    for _ in range(args.repeats):
        median = {}
        for mode in MODES:
            load, steps = train(ranks, mode, args, folder)
            loads.append(load)
            taken = [s["step_s"] for s in steps[args.warmup :]]
            times[mode] += taken
            median[mode] = np.median(taken)
            kept.setdefault(mode, steps)
        ratios.append(float(median["exact"] / median["off"]))
    off, exact = kept["off"], kept["exact"]

    def difference(name):
        return max(abs(a[name] - b[name]) / abs(a[name]) for a, b in zip(off, exact, strict=True))

    routed = np.array([s["expert_load"] for s in exact], dtype=np.float64)
    routed = routed.reshape(*routed.shape[:2], ranks, -1).sum(axis=3)
    balanced = np.array([s["balanced_rank_load"] for s in exact], dtype=np.float64)
    fullest = {"off": routed.max(axis=2).sum(axis=1), "exact": balanced.max(axis=2).sum(axis=1)}
    return {
        "ranks": ranks,
        "step_s": {m: float(np.median(t)) for m, t in times.items()},
        "step_ratio": float(np.median(ratios)),
        "step_ratios": ratios,  # of medians, a pair of neighbouring runs: a machine's speed changes over minutes
        "fullest_rank_ratio": float((fullest["exact"] / fullest["off"]).mean()),
        "loss_difference": difference("train_loss"),
        "grad_norm_difference": difference("grad_norm"),
        "imbalance": {
            "off": float(np.mean([s["rank_imbalance"] for s in exact])),
            "exact": float(np.mean([s["balanced_imbalance"] for s in exact])),
            "exact_worst": float(max(s["balanced_imbalance_max"] for s in exact)),
        },
        "clones": float(np.mean([s["clones"] for s in exact])),
        "tokens_by_rank": {"off": routed.mean(axis=(0, 1)).tolist(), "exact": balanced.mean(axis=(0, 1)).tolist()},
        "loss": {m: [s["train_loss"] for s in kept[m]] for m in MODES},
        "step_times": times,
        "load_average": loads,
    }


def draw(stem, rows):
    """A row of three panels a number of ranks: losses, tokens by rank, step times."""
    colours = {"off": plotting.PALE, "exact": plotting.BLUE}
    figure, grid = plotting.pyplot().subplots(
        len(rows), 3, figsize=(9.6, 2.2 * len(rows) + 0.9), squeeze=False, layout="constrained"
    )
    fullest = max(max(t) / np.mean(t) for row in rows for t in row["tokens_by_rank"].values())
    for row, (loss, tokens, seconds) in zip(rows, grid, strict=True):
        for n, mode in enumerate(MODES):
            style = {"linewidth": 4} if mode == "off" else {"linewidth": 1.2}
            loss.plot(range(1, len(row["loss"][mode]) + 1), row["loss"][mode], color=colours[mode], label=mode, **style)
            share = np.array(row["tokens_by_rank"][mode])
            tokens.bar(np.arange(len(share)) + 0.4 * n - 0.2, share / share.mean(), 0.4, color=colours[mode])
        boxes = seconds.boxplot(
            [row["step_times"][m] for m in MODES],
            tick_labels=MODES,
            widths=0.5,
            patch_artist=True,
            showfliers=False,
            whis=(5, 95),
            medianprops={"color": plotting.RED},
        )
        for box in boxes["boxes"]:
            box.set_facecolor(plotting.PALE)
        loss.set(ylabel=f"{row['ranks']} ranks\ntrain loss")
        loss.set_title(f"losses differ by {row['loss_difference']:.0e} at most")
        loss.xaxis.set_major_locator(plotting.pyplot().MaxNLocator(6, integer=True))
        tokens.axhline(1, color=plotting.RED, linestyle="--", linewidth=0.9)
        tokens.set_xticks(range(row["ranks"]))
        tokens.set(ylabel="tokens / fair share", ylim=(0, 1.05 * fullest))
        tokens.set_title(f"imbalance {row['imbalance']['off']:.2f}, exact {row['imbalance']['exact']:.3f}")
        seconds.set(ylabel="step (s)", ylim=(0, None))
        seconds.set_title(_speed(row["step_ratio"]))
        for axes in (loss, tokens, seconds):
            axes.grid(axis="x", visible=False)
    grid[-1][0].set_xlabel("step")
    grid[-1][1].set_xlabel("rank")
    figure.legend(*grid[0][0].get_legend_handles_labels(), loc="outside upper left", ncols=2)
    counts = sorted({len(row["step_times"][m]) for row in rows for m in MODES})
    plotting.note(
        figure,
        "Bars: mean over steps and layers; imbalance is the mean of (fullest - mean) / mean of each "
        f"layer and step.\nBoxes: quartiles and median of {' or '.join(map(str, counts))} steps; whiskers: "
        "5th to 95th percentile. All ranks share the cores of one loaded machine.",
    )
    return plotting.save(figure, stem)


def _speed(ratio):
    """A title that says who lost."""
    return f"exact takes {ratio:.2f} times as long" if ratio >= 1 else f"exact takes {ratio:.2f} of the time"


def table(rows):
    """Markdown of the rows."""
    lines = [
        "| ranks | imbalance by rank, off | exact | worst layer | tokens of the fullest rank, exact / off | "
        "largest difference of loss, gradient norm | step, off | exact | exact / off, median of pairs (spread) |",
        "|" + "---:|" * 9,
    ]
    for r in rows:
        i = r["imbalance"]
        lines.append(
            f"| {r['ranks']} | {i['off']:.3f} | {i['exact']:.4f} | {i['exact_worst']:.3f} | "
            f"{r['fullest_rank_ratio']:.2f} | {r['loss_difference']:.0e}, {r['grad_norm_difference']:.0e} | "
            f"{r['step_s']['off']:.2f} s | {r['step_s']['exact']:.2f} s | "
            f"{r['step_ratio']:.2f} ({min(r['step_ratios']):.2f} to {max(r['step_ratios']):.2f}) |"
        )
    return "\n".join(lines)


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--warmup", type=int, default=2, help="steps whose times do not count")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--forced-bias", type=float, default=-1.0)
    parser.add_argument("--grouped-gemm", action="store_true", help="experts as grouped GEMMs, in both modes")
    parser.add_argument("--ranks-per-node", type=int, help="as the recipe's: 2")
    parser.add_argument("--balance-push", help="what brings weights to clones: kernels or torch")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds for one run")
    parser.add_argument("-o", "--output", metavar="STEM", help="write STEM.json, STEM.png and STEM.svg")
    parser.add_argument("--redraw", metavar="STEM", help="draw the rows of STEM.json again, and train nothing")
    args = parser.parse_args(argv)
    if args.redraw:
        draw(Path(args.redraw), json.loads(Path(args.redraw + ".json").read_text())["rows"])
        return 0
    with tempfile.TemporaryDirectory() as folder:
        rows = [compare(ranks, args, Path(folder)) for ranks in args.ranks]
    print(table(rows))
    if args.output:
        system = f"{platform.system()} {platform.release().split('-')[0]} {platform.machine()}"
        machine = {"cores": os.cpu_count(), "system": system, "python": platform.python_version()}
        config = {k: v for k, v in vars(args).items() if k not in ("output", "redraw")}
        page = json.dumps({"machine": machine, "config": config, "rows": rows}, indent=1)
        Path(args.output + ".json").write_text(page + "\n")
        draw(Path(args.output), rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
