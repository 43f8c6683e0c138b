"""matplotlib as every picture of the commands uses it: one style, files only."""

from __future__ import annotations

from types import ModuleType


def pyplot() -> ModuleType:
    """matplotlib.pyplot for files. ValueError names the extra that brings it."""
    try:
        import matplotlib
    except ImportError:
        raise ValueError("plots need matplotlib: pip install 'hybrid_ep[bench]'") from None
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams.update({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True,
                         "grid.color": "#dddddd", "grid.linewidth": 0.6, "axes.axisbelow": True, "savefig.dpi": 200,
                         "figure.facecolor": "white", "legend.frameon": False, "svg.fonttype": "none"})
    return plt
