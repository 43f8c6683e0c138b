"""Pictures of a run, drawn from metrics.jsonl: loss, expert_load, rank_load and traffic, each as png and svg."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from hybrid_ep.cli import plotting, traffic_picture

from . import metrics

_TIME_BINS = 120


def draw_all(
    folder: Path, records: list[dict[str, Any]], entropy: float, num_ranks: int, ranks_per_node: int | None = None
) -> str:
    """Draws what the records allow; returns a sentence that says what was drawn, or why nothing was. num_ranks: of an
    expert-parallel group."""
    try:
        plotting.pyplot()
    except ValueError:
        return "No plots: matplotlib is missing (pip install matplotlib). The numbers are in metrics.jsonl."
    steps = [record for record in records if "train_loss" in record]
    if not steps:
        return "No plots: no step was finished."
    draw_loss(folder / "loss", records, entropy)
    draw_expert_load(folder / "expert_load", steps, num_ranks)
    draw_rank_load(folder / "rank_load", steps, num_ranks)
    drawn = ["loss", "expert_load", "rank_load"]
    if sent := _of_its_last_ranks(steps, "rank_sent"):
        traffic_picture.draw(folder / "traffic", np.sum(sent, axis=0), ranks_per_node)
        drawn.append("traffic")
    waited = _of_its_last_ranks(steps, "rank_waited")
    if np.sum(waited) > 0:
        traffic_picture.draw_waits(folder / "waits", np.mean(waited, axis=0), ranks_per_node)
        drawn.append("waits")
    *most, last = (str(folder / f"{name}.png") for name in drawn)
    return f"Plots: {', '.join(most)} and {last}, each as svg too"


def _of_its_last_ranks(steps: list[dict[str, Any]], name: str) -> list[np.ndarray]:
    """The matrices of ranks by ranks that steps have of this name, which those of older versions lack. A run may have
    gone on on other ranks: those it ended on."""
    found = [np.array(record[name]) for record in steps if name in record]
    return [matrix for matrix in found if matrix.shape == found[-1].shape]


def draw_loss(stem: Path, records: list[dict[str, Any]], entropy: float) -> None:
    """Train and held-out loss over steps, with the unigram entropy of the held-out text as a line."""
    train = [(r["step"], r["train_loss"]) for r in records if "train_loss" in r]
    held_out = [(r["step"], r["held_out_loss"]) for r in records if "held_out_loss" in r]
    figure, axes = plotting.pyplot().subplots(figsize=(6.4, 3.6), layout="constrained")
    axes.plot(*zip(*train, strict=True), color=plotting.PALE, linewidth=0.8, label="train, each step")
    axes.axhline(
        entropy,
        color=plotting.RED,
        linestyle=(0, (5, 3)),
        linewidth=1.3,
        label=f"unigram entropy of held-out text, {entropy:.2f}",
    )
    if held_out:
        axes.plot(
            *zip(*held_out, strict=True), color=plotting.BLUE, linewidth=1.8, marker="o", markersize=4, label="held-out"
        )
        step, loss = held_out[-1]
        axes.annotate(
            f"{loss:.2f} = {loss / entropy:.0%} of the entropy",
            (step, loss),
            xytext=(0, -20),
            textcoords="offset points",
            ha="right",
            va="top",
            color=plotting.BLUE,
        )
    axes.set(xlabel="step", ylabel="loss (nats per byte)", ylim=(0, None))
    axes.set_xlim(0, max(step for step, _ in train) * 1.02 + 0.5)
    axes.xaxis.set_major_locator(plotting.pyplot().MaxNLocator(9, integer=True))
    axes.grid(axis="x", visible=False)
    axes.legend()
    plotting.save(figure, stem)


def draw_expert_load(stem: Path, steps: list[dict[str, Any]], num_ranks: int) -> None:
    """One heat map a layer: experts upwards, time to the right, colour = rows over the fair share."""
    time, load = bin_load(steps)
    num_layers, num_experts = load.shape[1:]
    share = load / np.maximum(load.mean(-1, keepdims=True), 1e-9)
    columns = 1 if num_layers == 1 else 2
    rows = -(-num_layers // columns)
    figure, grid = plotting.pyplot().subplots(
        rows,
        columns,
        figsize=(3.9 * columns + 0.8, 2.1 * rows + 0.7),
        sharex=True,
        sharey=True,
        squeeze=False,
        layout="constrained",
    )
    per_rank = num_experts // num_ranks
    for layer, axes in enumerate(grid.flat):
        if layer >= num_layers:
            axes.set_visible(False)
            continue
        image = plotting.share_map(
            axes, share[:, layer].T, aspect="auto", origin="lower", extent=(time[0], time[-1], -0.5, num_experts - 0.5)
        )
        for rank in range(1, num_ranks):
            axes.axhline(rank * per_rank - 0.5, color="black", linewidth=0.8)  # on the map, not on the page
        axes.set_title(f"layer {layer + 1}")
        axes.set_yticks(
            [rank * per_rank + (per_rank - 1) / 2 for rank in range(num_ranks)],
            [f"rank {rank}" for rank in range(num_ranks)],
        )
        axes.tick_params(length=0)
        axes.grid(visible=False)
    for axes in grid[-1]:
        axes.set_xlabel("step")
    plotting.share_bar(figure, image, "rows of an expert / fair share", ax=grid, shrink=0.85, pad=0.02)
    figure.suptitle(f"Expert load: {num_experts} experts a layer, {per_rank} on each rank", fontsize=10)
    plotting.save(figure, stem)


def draw_rank_load(stem: Path, steps: list[dict[str, Any]], num_ranks: int) -> None:
    """A row a layer, all on one scale. Left: fullest rank over fair share, step by step, before and after balancing.
    Right: the same of every rank, mean over the run with the range from the 5th to the 95th percentile."""
    loads = [("as routed", plotting.PALE, np.array([metrics.rank_load(r, num_ranks) for r in steps]))]
    if all("balanced_rank_load" in record for record in steps):
        after = np.array([record["balanced_rank_load"] for record in steps], dtype=np.float64)
        loads.append(("balanced", plotting.BLUE, after))
    number, num_layers = [record["step"] for record in steps], loads[0][2].shape[1]
    figure, grid = plotting.pyplot().subplots(
        num_layers,
        2,
        figsize=(9, 1.5 * num_layers + 1.2),
        sharex="col",
        sharey=True,
        squeeze=False,
        width_ratios=[2, 1],
        layout="constrained",
    )
    for layer, (left, right) in enumerate(grid):
        for n, (name, colour, load) in enumerate(loads):
            share = load[:, layer] / np.maximum(load[:, layer].mean(axis=1, keepdims=True), 1e-9)
            left.plot(number, share.max(axis=1), color=colour, linewidth=1.2, label=name, marker=".", markersize=3)
            place = np.arange(num_ranks) + (n - (len(loads) - 1) / 2) * 0.4
            mean, (low, high) = share.mean(axis=0), np.quantile(share, [0.05, 0.95], axis=0)
            error = np.maximum([mean - low, high - mean], 0)
            right.bar(
                place,
                mean,
                0.8 / len(loads),
                yerr=error,
                color=colour,
                error_kw={"linewidth": 0.9, "ecolor": plotting.INK},
            )
        for axes in (left, right):
            axes.axhline(1, color=plotting.RED, linestyle=(0, (5, 3)), linewidth=0.9)
            axes.grid(axis="x", visible=False)
        left.set_title(f"layer {layer + 1}")
        plotting.label_ticks(right.xaxis, range(num_ranks), range(num_ranks))
    grid[0][0].set_ylim(0, None)  # of all, when all is drawn
    grid[-1][0].xaxis.set_major_locator(plotting.pyplot().MaxNLocator(9, integer=True))
    grid[-1][0].set_xlabel("step")
    grid[-1][1].set_xlabel("rank")
    figure.legend(*grid[0][0].get_legend_handles_labels(), ncols=2, loc="outside upper right")
    figure.supylabel("tokens of a rank / fair share", fontsize=9)
    plotting.note(
        figure,
        "Left: the fullest rank of each step.  Right: bars are the mean over the run, whiskers the "
        "5th to the 95th percentile of its steps.  Dashed: the fair share.",
    )
    plotting.save(figure, stem)


def bin_load(steps: list[dict[str, Any]]) -> tuple[np.ndarray, np.ndarray]:
    """(step at each edge [bins + 1], rows summed in each bin [bins, layers, experts])."""
    load = np.array([record["expert_load"] for record in steps], dtype=np.float64)
    cuts = np.unique(np.linspace(0, len(steps), min(_TIME_BINS, len(steps)) + 1).astype(int))
    number = [record["step"] for record in steps]
    edges = np.array([number[0] - 1] + [number[cut - 1] for cut in cuts[1:]], dtype=np.float64)
    return edges, np.add.reduceat(load, cuts[:-1], axis=0)
