"""Pictures of ranks against the ranks of their group: who sends to whom, and who waits for whom."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from hybrid_ep.cli import plotting

_NUMBERS_UP_TO = 8  # ranks whose cells have room for a number


def draw(stem: Path, sent: np.ndarray, ranks_per_node: int | None = None) -> list[Path]:
    """stem.png and stem.svg. sent [sources, ranks]: tokens. ranks_per_node: draw lines between nodes. ValueError when
    matplotlib is missing."""
    share = sent / max(float(sent.mean()), 1e-9)
    figure, axes = _figure(sent.shape)
    image = plotting.share_map(axes, share, aspect="equal")
    _numbers(axes, share, "{:.2f}", abs(share - 1) > 0.6)
    _ranks(axes, sent.shape, ranks_per_node)
    axes.set(xlabel="to rank of the same group", ylabel="from rank")
    plotting.share_bar(figure, image, "tokens / fair share", cax=_beside(axes))
    plotting.note(
        figure,
        "Tokens of all layers, each counted once for every expert that it goes to.\n"
        "Experts lie on ranks in order, as without balancing.",
    )
    return plotting.save(figure, stem)


def draw_waits(stem: Path, waited: np.ndarray, ranks_per_node: int | None = None) -> list[Path]:
    """The same of seconds a step that ranks waited: a row for each rank, a column for each rank that it waited for."""
    ms = np.asarray(waited, dtype=np.float64) * 1e3
    most = float(np.max(ms))
    figure, axes = _figure(ms.shape)
    image = axes.imshow(ms, cmap="Blues", vmin=0, vmax=max(most, 1e-9), interpolation="nearest")
    _numbers(axes, ms, "{:.1f}" if most < 100 else "{:.0f}", ms > 0.6 * most)
    _ranks(axes, waited.shape, ranks_per_node)
    axes.set(xlabel="for rank of the same group", ylabel="rank waited")
    figure.colorbar(image, cax=_beside(axes)).set_label("ms a step")
    plotting.note(
        figure,
        "From when a rank was ready to exchange counts until the other's were there, all layers.\n"
        "A dark column is a rank that comes late: for its tokens, its experts or its machine.",
    )
    return plotting.save(figure, stem)


def _figure(shape: tuple[int, ...]) -> tuple[Any, Any]:
    rows, ranks = shape
    size = (4.6, max(2.6, 3.2 * rows / ranks + 1.0))
    figure, axes = plotting.pyplot().subplots(figsize=size, layout="constrained")
    return figure, axes


def _beside(axes: Any) -> Any:
    """An inset is as tall as the map; a bar of the figure's own is as tall as the room that the map leaves."""
    return axes.inset_axes((1.04, 0, 0.05, 1))


def _numbers(axes: Any, values: Any, form: str, dark: Any) -> None:
    """In the cells, where they have room. dark: on the map, not on the page."""
    if max(values.shape) > _NUMBERS_UP_TO:
        return
    for (row, rank), value in np.ndenumerate(values):
        colour = "white" if dark[row, rank] else "black"
        axes.text(rank, row, form.format(value), ha="center", va="center", fontsize=7, color=colour)


def _ranks(axes: Any, shape: tuple[int, ...], ranks_per_node: int | None) -> None:
    rows, ranks = shape
    if ranks_per_node is not None:
        for edge in range(ranks_per_node, ranks, ranks_per_node):
            axes.axvline(edge - 0.5, color="black", linewidth=0.8)
        for edge in range(ranks_per_node, rows, ranks_per_node):
            axes.axhline(edge - 0.5, color="black", linewidth=0.8)
    plotting.label_ticks(axes.xaxis, range(ranks), range(ranks))
    plotting.label_ticks(axes.yaxis, range(rows), range(rows))
    axes.tick_params(length=0)
    axes.grid(visible=False)
