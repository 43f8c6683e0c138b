"""Two pictures of a sweep: bandwidth over SMs, and time over tokens. Made for a column of a paper: 3.4 inches wide."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from hybrid_ep.cli.plotting import pyplot

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["Point", "draw", "pyplot"]

_COLOURS = {"dispatch": "#1b4f8a", "combine": "#c0392b", "pair": "#333333", "step": "#7b3f9e", "chain": "#2e7d32",
            "route": "#b8860b", "permute": "#0f8b8d", "unpermute": "#d2691e"}
_MARKS = ("o", "s", "^", "D", "v", "P", "X")
_DASHES = ("-", (0, (4, 1.5)), (0, (1, 1.2)), (0, (4, 1.2, 1, 1.2)), (0, (7, 1.5)))
_SIZE = (3.4, 2.7)
_INSIDE = 4  # lines whose legend fits inside the panel


@dataclass(frozen=True)
class Point:
    """One row of a table. us: microseconds; busbw: GB/s over the bottleneck link, None for what crosses none. num_sms
    0: the implementation's default."""

    tokens: int
    num_sms: int
    op: str
    implementation: str
    time_us: float
    p10_us: float | None
    p90_us: float | None
    busbw: float | None
    limit: float | None = None  # GB/s that the link can do


def draw(points: list[Point], folder: Path, title: str) -> list[str]:
    """Writes bandwidth.{png,svg} when several SM counts were swept, time.{png,svg} when several sizes were; returns
    lines that say what was written, or why it was not. ValueError when matplotlib is missing."""
    plt = pyplot()
    folder.mkdir(parents=True, exist_ok=True)
    said = []
    largest = max((p.tokens for p in points), default=0)
    over_sms = [p for p in points if p.tokens == largest and p.num_sms and p.busbw is not None]
    if len({p.num_sms for p in over_sms}) > 1:
        said += _bandwidth(plt, over_sms, folder, f"{title}; {largest:,} tokens a rank")
    else:
        said.append("# not drawn: bandwidth over SMs, which needs two values of --num-sms")
    best = _one_per_size(points)
    if len({p.tokens for p in best}) > 1:
        said += _time(plt, best, folder, title)
    else:
        said.append("# not drawn: time over tokens, which needs two sizes")
    return said


def _one_per_size(points: list[Point]) -> list[Point]:
    """The fastest number of SMs of every size, operation and implementation."""
    best: dict[tuple[int, str, str], Point] = {}
    for p in points:
        key = p.tokens, p.op, p.implementation
        if key not in best or p.time_us < best[key].time_us:
            best[key] = p
    return list(best.values())


def _lines(points: list[Point]) -> Iterable[tuple[str, dict[str, Any], list[Point]]]:
    """(label, style, points) of every operation and implementation: colour by operation, dashes by implementation."""
    ops, names = (list(dict.fromkeys(getattr(p, a) for p in points)) for a in ("op", "implementation"))
    for i, op in enumerate(ops):
        for j, name in enumerate(names):
            chosen = [p for p in points if (p.op, p.implementation) == (op, name)]
            style = {"color": _COLOURS.get(op, "black"), "marker": _MARKS[i % len(_MARKS)], "markersize": 3.5,
                     "linestyle": _DASHES[j % len(_DASHES)], "linewidth": 1.3,
                     "markerfacecolor": _COLOURS.get(op, "black") if j == 0 else "white"}
            if chosen:
                yield (op if len(names) == 1 else f"{op}, {name}"), style, chosen


def _bandwidth(plt: ModuleType, points: list[Point], folder: Path, title: str) -> list[str]:
    figure, panel = plt.subplots(figsize=_SIZE, layout="constrained")
    for label, style, chosen in _lines(points):
        chosen = sorted(chosen, key=lambda p: p.num_sms)
        panel.plot([p.num_sms for p in chosen], [p.busbw for p in chosen], label=label, **style)
    limit = next((p.limit for p in points if p.limit), None)
    if limit:
        panel.axhline(limit, color="#888888", linewidth=0.9, linestyle=(0, (6, 3)))
        panel.annotate("link", (1, limit), xycoords=("axes fraction", "data"), xytext=(-2, 2), ha="right", fontsize=7,
                       textcoords="offset points", color="#666666")
    _ticks(panel, sorted({p.num_sms for p in points}))
    panel.set(xlabel="SMs of an operation", ylabel="bus bandwidth (GB/s)")
    panel.set_ylim(0, 1.12 * max([*(p.busbw or 0.0 for p in points), limit or 0.0]))
    return _save(plt, figure, panel, folder / "bandwidth", title)


def _time(plt: ModuleType, points: list[Point], folder: Path, title: str) -> list[str]:
    from matplotlib import ticker

    figure, panel = plt.subplots(figsize=_SIZE, layout="constrained")
    few = len(list(_lines(points))) <= _INSIDE  # of many lines the bands would hide one another
    for label, style, chosen in _lines(points):
        chosen = sorted(chosen, key=lambda p: p.tokens)
        x = [p.tokens for p in chosen]
        panel.plot(x, [p.time_us / 1e3 for p in chosen], label=label, **style)
        band = [(p.p10_us / 1e3, p.p90_us / 1e3) for p in chosen if p.p10_us is not None and p.p90_us is not None]
        if few and len(band) == len(chosen):
            panel.fill_between(x, *zip(*band, strict=True), linewidth=0, color=style["color"], alpha=0.13)
    panel.set_yscale("log")
    _ticks(panel, sorted({p.tokens for p in points}))
    panel.set(xlabel="tokens a rank", ylabel="time (ms)")
    panel.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
    panel.yaxis.set_major_formatter("{x:g}")
    panel.yaxis.set_minor_locator(ticker.NullLocator())
    return _save(plt, figure, panel, folder / "time", title)


def _ticks(panel: Axes, values: list[int]) -> None:
    """A log axis labelled at the values that were swept, thinned where they would touch."""
    panel.set_xscale("log", base=2)
    step = -(-len(values) // 7)
    panel.set_xticks(values[::step], [f"{v:,}" for v in values[::step]], fontsize=7.5)
    panel.minorticks_off()


def _save(plt: ModuleType, figure: Figure, panel: Axes, stem: Path, title: str) -> list[str]:
    lines = len(panel.get_legend_handles_labels()[1])
    if lines <= _INSIDE:
        panel.legend(fontsize=7.5, handlelength=2.6)
    else:  # beside the panel, which keeps its size
        figure.set_size_inches(_SIZE[0] + 1.9, max(_SIZE[1], 0.3 + 0.155 * lines))
        figure.legend(loc="outside right center", fontsize=6.8, handlelength=2.8)
    where, _, when = title.partition("; ")
    panel.set_title(f"{where}\n{when}", fontsize=6.2, loc="left", color="#444444")
    paths = [stem.with_suffix(f".{suffix}") for suffix in ("png", "svg")]
    for path in paths:
        figure.savefig(path, **({"metadata": {"Date": None}} if path.suffix == ".svg" else {"dpi": 300}))
    plt.close(figure)
    return [f"# written: {path}" for path in paths]
