"""Three pictures of a run, drawn from metrics.jsonl: loss.png, expert_load.png and rank_load.png."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from . import metrics

_INK, _GRID = "#222222", "#dddddd"
_TRAIN, _HELD_OUT, _ENTROPY = "#9bb8d3", "#1b4f8a", "#c0392b"
_TIME_BINS = 120


def draw_all(folder: Path, records: list[dict[str, Any]], entropy: float, num_ranks: int) -> str:
    """Draws what the records allow; returns a sentence that says what was drawn, or why nothing was."""
    try:
        import matplotlib
    except ImportError:
        return "No plots: matplotlib is missing (pip install matplotlib). The numbers are in metrics.jsonl."
    matplotlib.use("Agg")
    steps = [record for record in records if "train_loss" in record]
    if not steps:
        return "No plots: no step was finished."
    draw_loss(folder / "loss.png", records, entropy)
    draw_expert_load(folder / "expert_load.png", steps, num_ranks)
    draw_rank_load(folder / "rank_load.png", steps, num_ranks)
    return f"Plots: {folder / 'loss.png'}, {folder / 'expert_load.png'} and {folder / 'rank_load.png'}"


def _style() -> ModuleType:
    import matplotlib.pyplot as plt

    plt.rcParams.update({
        "font.size": 10, "axes.edgecolor": _INK, "axes.labelcolor": _INK, "text.color": _INK,
        "xtick.color": _INK, "ytick.color": _INK, "axes.spines.top": False, "axes.spines.right": False,
        "figure.facecolor": "white", "savefig.dpi": 160,
    })
    return plt


def draw_loss(path: Path, records: list[dict[str, Any]], entropy: float) -> None:
    """Train and held-out loss over steps, with the unigram entropy of the held-out text as a line."""
    plt = _style()
    train = [(r["step"], r["train_loss"]) for r in records if "train_loss" in r]
    held_out = [(r["step"], r["held_out_loss"]) for r in records if "held_out_loss" in r]
    figure, axes = plt.subplots(figsize=(7.2, 4.3), layout="constrained")
    axes.plot(*zip(*train, strict=True), color=_TRAIN, linewidth=0.8, label="train, each step")
    axes.axhline(entropy, color=_ENTROPY, linestyle=(0, (5, 3)), linewidth=1.3,
                 label=f"unigram entropy of held-out text, {entropy:.2f}")
    if held_out:
        axes.plot(*zip(*held_out, strict=True), color=_HELD_OUT, linewidth=1.8, marker="o", markersize=4,
                  label="held-out")
        step, loss = held_out[-1]
        axes.annotate(f"{loss:.2f} = {loss / entropy:.0%} of the entropy", (step, loss), xytext=(0, -26),
                      textcoords="offset points", ha="right", va="top", color=_HELD_OUT, fontsize=9)
    axes.set(xlabel="step", ylabel="loss (nats per byte)", ylim=(0, None))
    axes.set_xlim(0, max(step for step, _ in train) * 1.02 + 0.5)
    axes.grid(axis="y", color=_GRID, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.legend(frameon=False, fontsize=9)
    figure.savefig(path)
    plt.close(figure)


def draw_expert_load(path: Path, steps: list[dict[str, Any]], num_ranks: int) -> None:
    """One heat map a layer: experts upwards, time to the right, colour = rows over the fair share."""
    plt = _style()
    time, load = bin_load(steps)
    num_layers, num_experts = load.shape[1:]
    share = load / np.maximum(load.mean(-1, keepdims=True), 1e-9)
    columns = 1 if num_layers == 1 else 2
    rows = -(-num_layers // columns)
    figure, grid = plt.subplots(
        rows, columns, figsize=(4.4 * columns + 0.8, 2.35 * rows + 0.7), sharex=True, sharey=True,
        squeeze=False, layout="constrained",
    )
    per_rank = num_experts // num_ranks
    for layer, axes in enumerate(grid.flat):
        if layer >= num_layers:
            axes.set_visible(False)
            continue
        image = axes.imshow(
            share[:, layer].T, aspect="auto", origin="lower", cmap="RdBu_r", vmin=0, vmax=2,
            interpolation="nearest", extent=(time[0], time[-1], -0.5, num_experts - 0.5),
        )
        for rank in range(1, num_ranks):
            axes.axhline(rank * per_rank - 0.5, color="black", linewidth=0.8)
        axes.set_title(f"layer {layer + 1}", fontsize=10, loc="left")
        axes.set_yticks([rank * per_rank + (per_rank - 1) / 2 for rank in range(num_ranks)],
                        [f"rank {rank}" for rank in range(num_ranks)])
        axes.tick_params(length=0)
    for axes in grid[-1]:
        axes.set_xlabel("step")
    bar = figure.colorbar(image, ax=grid, shrink=0.85, ticks=[0, 0.5, 1, 1.5, 2], pad=0.02)
    bar.ax.set_yticklabels(["0", "0.5", "1", "1.5", "≥ 2"])
    bar.set_label("rows of an expert / fair share")
    figure.suptitle(f"Expert load: {num_experts} experts a layer, {per_rank} on each rank", fontsize=11)
    figure.savefig(path)
    plt.close(figure)


def draw_rank_load(path: Path, steps: list[dict[str, Any]], num_ranks: int) -> None:
    """A row a layer. Left: fullest rank over fair share, step by step, before and after balancing. Right: the same of
    every rank, mean over the run with the range from the 5th to the 95th percentile."""
    plt = _style()
    loads = [("as routed", _TRAIN, np.array([metrics.rank_load(r, num_ranks) for r in steps]))]
    if all("balanced_rank_load" in record for record in steps):
        after = np.array([record["balanced_rank_load"] for record in steps], dtype=np.float64)
        loads.append(("balanced", _HELD_OUT, after))
    number, num_layers = [record["step"] for record in steps], loads[0][2].shape[1]
    figure, grid = plt.subplots(num_layers, 2, figsize=(10, 1.7 * num_layers + 1.1), sharex="col", squeeze=False,
                                width_ratios=[2, 1], layout="constrained")
    for layer, (left, right) in enumerate(grid):
        for n, (name, colour, load) in enumerate(loads):
            share = load[:, layer] / np.maximum(load[:, layer].mean(axis=1, keepdims=True), 1e-9)
            left.plot(number, share.max(axis=1), color=colour, linewidth=1.2, label=name, marker=".", markersize=3)
            place = np.arange(num_ranks) + (n - (len(loads) - 1) / 2) * 0.4
            mean, (low, high) = share.mean(axis=0), np.quantile(share, [0.05, 0.95], axis=0)
            error = np.maximum([mean - low, high - mean], 0)
            right.bar(place, mean, 0.8 / len(loads), yerr=error, color=colour, error_kw={"linewidth": 0.7})
        for axes in (left, right):
            axes.axhline(1, color=_ENTROPY, linestyle=(0, (5, 3)), linewidth=0.9)
            axes.set_ylim(0, None)
        left.set_title(f"layer {layer + 1}", fontsize=10, loc="left")
        right.set_xticks(range(num_ranks))
    grid[-1][0].set_xlabel("step")
    grid[-1][1].set_xlabel("rank")
    grid[0][0].legend(frameon=False, fontsize=9, ncols=2, loc="lower right")
    figure.supylabel("tokens / fair share", fontsize=10)
    figure.suptitle("Load of ranks: the fullest over time (left), each over the run (right)", fontsize=11)
    figure.savefig(path)
    plt.close(figure)


def bin_load(steps: list[dict[str, Any]]) -> tuple[np.ndarray, np.ndarray]:
    """(step at each edge [bins + 1], rows summed in each bin [bins, layers, experts])."""
    load = np.array([record["expert_load"] for record in steps], dtype=np.float64)
    cuts = np.unique(np.linspace(0, len(steps), min(_TIME_BINS, len(steps)) + 1).astype(int))
    number = [record["step"] for record in steps]
    edges = np.array([number[0] - 1] + [number[cut - 1] for cut in cuts[1:]], dtype=np.float64)
    return edges, np.add.reduceat(load, cuts[:-1], axis=0)
