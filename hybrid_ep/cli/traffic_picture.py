"""The picture of who sends to whom: a row for each source rank, a column for each rank of its group."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from hybrid_ep.cli import plotting

_NUMBERS_UP_TO = 8  # ranks whose cells have room for a number


def draw(stem: Path, sent: np.ndarray, ranks_per_node: int | None = None) -> list[Path]:
    """stem.png and stem.svg. sent [sources, ranks]: tokens. ranks_per_node: draw lines between nodes. ValueError when
    matplotlib is missing."""
    plt = plotting.pyplot()
    sources, ranks = sent.shape
    share = sent / max(float(sent.mean()), 1e-9)
    figure, axes = plt.subplots(figsize=(4.6, max(2.6, 3.2 * sources / ranks + 1.0)), layout="constrained")
    image = axes.imshow(share, cmap="RdBu_r", vmin=0, vmax=2, interpolation="nearest", aspect="equal")
    if max(sent.shape) <= _NUMBERS_UP_TO:
        for (source, rank), value in np.ndenumerate(share):
            dark = abs(value - 1) > 0.6  # on the map, not on the page
            axes.text(
                rank, source, f"{value:.2f}", ha="center", va="center", fontsize=7, color="white" if dark else "black"
            )
    if ranks_per_node is not None:
        for edge in range(ranks_per_node, ranks, ranks_per_node):
            axes.axvline(edge - 0.5, color="black", linewidth=0.8)
        for edge in range(ranks_per_node, sources, ranks_per_node):
            axes.axhline(edge - 0.5, color="black", linewidth=0.8)
    plotting.label_ticks(axes.xaxis, range(ranks), range(ranks))
    plotting.label_ticks(axes.yaxis, range(sources), range(sources))
    axes.tick_params(length=0)
    axes.grid(visible=False)
    axes.set(xlabel="to rank of the same group", ylabel="from rank")
    # An inset is as tall as the map; a bar of the figure's own is as tall as the room that the map leaves.
    bar = figure.colorbar(image, cax=axes.inset_axes((1.04, 0, 0.05, 1)), ticks=[0, 0.5, 1, 1.5, 2])
    bar.ax.set_yticklabels(["0", "0.5", "1", "1.5", "≥ 2"])
    bar.set_label("tokens / fair share")
    plotting.note(
        figure,
        "Tokens of all layers, each counted once for every expert that it goes to.\n"
        "Experts lie on ranks in order, as without balancing.",
    )
    return plotting.save(figure, stem)
