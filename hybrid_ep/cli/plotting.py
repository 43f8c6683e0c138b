"""matplotlib as every picture of the commands, recipes and scripts uses it: one style, one palette, SVG and PNG.

The SVG carries a second palette and shows the one of the page around it (CSS color-scheme); the PNG has the light one,
for paper and terminals. Pictures of the same numbers are the same bytes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure
    from matplotlib.image import AxesImage

PAPER, INK, MUTED, GRID = "#ffffff", "#1f2328", "#57606a", "#d8dee4"
BLUE, RED, GREEN, VIOLET = "#1b4f8a", "#c0392b", "#2e7d32", "#7b3f9e"
OCHRE, TEAL, ORANGE, PALE = "#9a6700", "#0f7b7d", "#bc4c00", "#9bb8d3"  # PALE: the state before, beside BLUE's after
LINES = (BLUE, RED, GREEN, VIOLET, OCHRE, TEAL, ORANGE, MUTED)
MARKS = ("o", "s", "^", "D", "v", "P", "X", "<")
SUFFIXES = (".png", ".svg")

# What each colour is on a dark page. PAPER there is the page's own background in the documentation's theme.
DARK = {
    PAPER: "#131416",
    INK: "#e6e8eb",
    MUTED: "#9aa4af",
    GRID: "#33383e",
    BLUE: "#6cb0ff",
    RED: "#ff7b6e",
    GREEN: "#5fc96a",
    VIOLET: "#c79bea",
    OCHRE: "#d6a93a",
    TEAL: "#45c5c8",
    ORANGE: "#f59255",
    PALE: "#567a9f",
}


def pyplot() -> ModuleType:
    """matplotlib.pyplot for files. ValueError names the extra that brings it."""
    try:
        import matplotlib
    except ImportError:
        raise ValueError("plots need matplotlib: pip install 'hybrid_ep[bench]'") from None
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    ink = (
        "axes.edgecolor",
        "axes.labelcolor",
        "text.color",
        "xtick.color",
        "ytick.color",
        "patch.edgecolor",
        "boxplot.boxprops.color",
        "boxplot.whiskerprops.color",
        "boxplot.capprops.color",
    )
    style: dict[Any, Any] = {
        **dict.fromkeys(ink, INK),
        "font.size": 9,
        "axes.titlesize": 9,
        "axes.titlelocation": "left",
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "grid.color": GRID,
        "grid.linewidth": 0.6,
        "axes.axisbelow": True,
        "savefig.dpi": 200,
        "figure.facecolor": PAPER,
        "axes.facecolor": PAPER,
        "legend.frameon": False,
        "legend.fontsize": 7.5,
        "svg.fonttype": "none",
        "svg.hashsalt": "hybrid_ep",
    }
    plt.rcParams.update(style)
    return plt


def save(figure: Figure, stem: Path) -> list[Path]:
    """Writes stem.png and stem.svg, closes the figure and returns the paths. A dot in the stem's name is part of it."""
    made = [stem.with_name(stem.name + suffix) for suffix in SUFFIXES]
    figure.savefig(made[0])
    figure.savefig(made[1], metadata={"Date": None, "Creator": None})
    pyplot().close(figure)
    made[1].write_text(_with_dark(made[1].read_text()))
    return made


def _with_dark(svg: str) -> str:
    """Colours stay written in the elements, for programs that know no CSS; a page that is dark overrides them."""
    rules = "".join(
        f'[style*="{what}: {light}"]{{{what}:{dark} !important}}'
        for light, dark in DARK.items()
        for what in ("fill", "stroke")
    )
    return svg.replace("</style>", f"@media (prefers-color-scheme: dark){{{rules}}}</style>", 1)


def note(figure: Figure, text: str) -> None:
    """A caption under the panels: what bars, bands and whiskers are."""
    figure.supxlabel(text, x=0.01, ha="left", fontsize=7, color=MUTED)


def share_map(axes: Axes, share: np.ndarray, **options: Any) -> AxesImage:
    """A map of loads over their mean, [rows, columns], as every picture has them: white at 1, blue below, red above,
    and from 2 on one red. options: of imshow."""
    return axes.imshow(share, cmap="RdBu_r", vmin=0, vmax=2, interpolation="nearest", **options)


def share_bar(figure: Figure, image: AxesImage, label: str, **options: Any) -> None:
    """The colour bar of `share_map`. options: of colorbar."""
    bar = figure.colorbar(image, ticks=[0, 0.5, 1, 1.5, 2], **options)
    bar.ax.set_yticklabels(["0", "0.5", "1", "1.5", "≥ 2"])
    bar.set_label(label)


def label_ticks(axis: Axis, places: Sequence[float], labels: Sequence[object], most: int = 12) -> None:
    """Labels every place, or every second, third, .. where they would be more than `most`."""
    from matplotlib.ticker import NullLocator

    step = max(1, -(-len(places) // most))
    axis.set_ticks(list(places)[::step], [f"{v:,}" if isinstance(v, int) else str(v) for v in labels][::step])
    axis.set_minor_locator(NullLocator())
