"""The picture of `hybrid-ep balance report --plot`: imbalance of each layer with the noise floor, and expert shares."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from hybrid_ep.cli import plotting

if TYPE_CHECKING:
    from hybrid_ep.balance.report import LayerReport
    from hybrid_ep.balance.statistics import LoadStatistics


def draw(stem: Path, rows: list[LayerReport], statistics: LoadStatistics, floor: float) -> list[Path]:
    """stem.png and stem.svg. Layers have the numbers that were recorded, the same on both panels. floor: imbalance that
    sampling alone leaves. ValueError when matplotlib is missing."""
    plt = plotting.pyplot()
    figure, (left, right) = plt.subplots(1, 2, figsize=(9.2, 3.6), layout="constrained")
    layers = [r.layer for r in rows]
    places = range(len(layers))  # recorded layers may be 3, 4, 7
    left.bar(places, [r.by_rank for r in rows], color=plotting.PALE, label="by rank")
    if rows[0].exact is not None:
        left.plot(
            places,
            [r.exact for r in rows],
            "o",
            color=plotting.BLUE,
            markersize=4,
            label="exact",
            clip_on=False,
            zorder=3,
        )
    left.axhline(floor, color=plotting.RED, linestyle="--", linewidth=1.2, label=f"sampling noise, {floor:.3f}")
    left.set(xlabel="layer", ylabel="(max - mean) / mean over ranks")
    left.grid(axis="x", visible=False)
    left.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=3, borderaxespad=0.2)
    total = statistics.total().astype(np.float64)
    share = total / np.maximum(total.mean(axis=1, keepdims=True), 1e-9)
    image = plotting.share_map(right, share, aspect="auto")
    right.grid(visible=False)
    plotting.label_ticks(left.xaxis, places, layers)
    plotting.label_ticks(right.yaxis, places, layers)
    right.xaxis.set_major_locator(plt.MaxNLocator(9, integer=True))
    right.set(xlabel="expert", ylabel="layer")
    plotting.share_bar(figure, image, "tokens of an expert / fair share", ax=right)
    marks = "Bars" if rows[0].exact is None else "Bars and points"
    plotting.note(figure, f"{marks}: mean over iterations.  Colours: all iterations together.")
    return plotting.save(figure, stem)
