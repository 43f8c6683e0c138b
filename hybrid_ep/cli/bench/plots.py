"""Two pictures of a sweep: bandwidth over SMs, and time over tokens. One implementation has one panel, a column of a
paper wide; several have a panel an operation, with the implementations as lines."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hybrid_ep.cli import plotting

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["Point", "draw"]

_WIDTH, _HEIGHT = 3.4, 2.7
_COLUMNS = 3
_DASHES = ("-", (0, (3, 3)), (0, (1, 2)), (0, (5, 2, 1, 2)))  # what lies beneath shows through the gaps


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


def draw(points: list[Point], folder: Path, title: str, workers: str = "SMs") -> list[str]:
    """Writes bandwidth.{png,svg} when several SM counts were swept, time.{png,svg} when several sizes were; returns
    lines that say what was written, or why it was not. The folder is made for the first. workers: what num_sms counts
    on that machine. ValueError when matplotlib is missing."""
    plotting.pyplot()
    said = []
    names = list(dict.fromkeys(p.implementation for p in points))
    series = names if len(names) > 1 else list(dict.fromkeys(p.op for p in points))
    largest = max((p.tokens for p in points), default=0)
    over_sms = [p for p in points if p.tokens == largest and p.num_sms and p.busbw is not None]
    if len({p.num_sms for p in over_sms}) > 1:
        seen = {p.implementation if len(names) > 1 else p.op for p in over_sms}
        unknown = [name for name in series if name not in seen]
        note = f"No bus bandwidth is known of {', '.join(unknown)}." if unknown else ""
        said += _bandwidth(over_sms, folder, f"{title}; {largest:,} tokens a rank", workers, series, note)
    else:
        said.append(f"# not drawn: bandwidth over {workers}, which needs two values of --num-sms")
    best = _one_per_size(points)
    if len({p.tokens for p in best}) > 1:
        said += _time(best, folder, title, workers, series)
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


def _panels(points: list[Point], series: list[str]) -> Iterator[tuple[str, list[tuple[str, list[Point]]]]]:
    """(title, [(name of series, points)]) of every panel: the operations of one implementation, or of many
    implementations one operation each."""
    ops = list(dict.fromkeys(p.op for p in points))
    if set(ops) <= set(series):
        yield "", [(op, [p for p in points if p.op == op]) for op in series]
        return
    for op in ops:
        yield op, [(name, [p for p in points if (p.op, p.implementation) == (op, name)]) for name in series]


def _draw(
    points: list[Point],
    stem: Path,
    title: str,
    line: Callable[[Axes, list[Point], dict], None],
    finish: Callable[[Axes], None],
    axes: tuple[str, str],
    series: list[str],
    note: str = "",
) -> list[str]:
    """Every panel with its lines. line draws the points of one in its style, finish sets a panel's axes. series: all
    of the run, also those that this picture lacks, so that each has one style in all its pictures."""
    plt, panels = plotting.pyplot(), list(_panels(points, series))
    columns = 2 if len(panels) == 4 else min(_COLUMNS, len(panels))
    rows = -(-len(panels) // columns)
    width, height = (_WIDTH, _HEIGHT) if len(panels) == 1 else (2.7 * columns, 2.1 * rows + 0.7)
    figure, grid = plt.subplots(
        rows, columns, figsize=(width, height), sharex=True, sharey=True, squeeze=False, layout="constrained"
    )
    for panel, (name, lines) in zip(grid.flat, panels, strict=False):
        for i, (label, chosen) in enumerate(lines):
            if chosen:
                line(
                    panel,
                    chosen,
                    {
                        "color": plotting.LINES[i % len(plotting.LINES)],
                        "markersize": 3.5,
                        "linewidth": 1.3,
                        "marker": plotting.MARKS[i % len(plotting.MARKS)],
                        "label": label,
                        "linestyle": _DASHES[i % len(_DASHES)],
                    },
                )
        panel.set_title(name)
        finish(panel)
    for panel in grid.flat[len(panels) :]:
        panel.set_visible(False)
    for place, panel in enumerate(grid.flat[: len(panels)]):
        if place + columns >= len(panels):  # nothing below it
            panel.tick_params(labelbottom=True)
            panel.set_xlabel(axes[0])
    for panel in grid[:, 0]:
        panel.set_ylabel(axes[1])
    found = {
        text: handle for panel in grid.flat for handle, text in zip(*panel.get_legend_handles_labels(), strict=True)
    }
    if len(panels) == 1 and len(found) <= 4:
        grid[0][0].legend(handlelength=2.2)
    else:
        figure.legend(found.values(), found.keys(), loc="outside upper left", ncols=min(4, len(found)))
    stem.parent.mkdir(parents=True, exist_ok=True)
    where, _, when = title.partition("; ")
    plotting.note(figure, "\n".join(text for text in (where, when.strip(), note) if text))
    made = plotting.save(figure, stem)
    return [f"# written: {path}" for path in made]


def _bandwidth(points: list[Point], folder: Path, title: str, workers: str, series: list[str], note: str) -> list[str]:
    limit = next((p.limit for p in points if p.limit), None)
    top = 1.12 * max([*(p.busbw or 0.0 for p in points), limit or 0.0])
    counts = sorted({p.num_sms for p in points})

    def line(panel: Axes, chosen: list[Point], style: dict) -> None:
        chosen = sorted(chosen, key=lambda p: p.num_sms)
        panel.plot([p.num_sms for p in chosen], [p.busbw for p in chosen], **style)

    def finish(panel: Axes) -> None:
        if limit:
            panel.axhline(limit, color=plotting.MUTED, linewidth=0.9, linestyle=(0, (6, 3)))
            panel.annotate(
                "link",
                (1, limit),
                xycoords=("axes fraction", "data"),
                xytext=(-2, 2),
                ha="right",
                fontsize=7,
                textcoords="offset points",
                color=plotting.MUTED,
            )
        _log(panel, counts)
        panel.set_ylim(0, top)

    return _draw(
        points,
        folder / "bandwidth",
        title,
        line,
        finish,
        (f"{workers} of an operation", "bus bandwidth (GB/s)"),
        series,
        note,
    )


def _time(points: list[Point], folder: Path, title: str, workers: str, series: list[str]) -> list[str]:
    from matplotlib import ticker

    sizes = sorted({p.tokens for p in points})
    banded = any(p.p10_us is not None and p.p90_us is not None for p in points)

    def line(panel: Axes, chosen: list[Point], style: dict) -> None:
        chosen = sorted(chosen, key=lambda p: p.tokens)
        x = [p.tokens for p in chosen]
        panel.plot(x, [p.time_us / 1e3 for p in chosen], **style)
        band = [(p.p10_us / 1e3, p.p90_us / 1e3) for p in chosen if p.p10_us is not None and p.p90_us is not None]
        if len(band) == len(chosen):
            low, high = zip(*band, strict=True)
            panel.fill_between(x, low, high, linewidth=0, color=style["color"], alpha=0.15)

    def finish(panel: Axes) -> None:
        panel.set_yscale("log")
        _log(panel, sizes)
        panel.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
        panel.yaxis.set_major_formatter("{x:g}")
        panel.yaxis.set_minor_locator(ticker.NullLocator())

    several = len({p.num_sms for p in points}) > 1
    notes = ["Bands: 10th to 90th percentile of the iterations."] if banded else []
    notes += [f"Each size at its fastest number of {workers}."] if several else []
    return _draw(points, folder / "time", title, line, finish, ("tokens a rank", "time (ms)"), series, "  ".join(notes))


def _log(panel: Axes, values: list[int]) -> None:
    """A log axis labelled at the values that were swept."""
    panel.set_xscale("log", base=2)
    plotting.label_ticks(panel.xaxis, values, values, most=7)
    panel.tick_params(axis="x", labelsize=7.5)
