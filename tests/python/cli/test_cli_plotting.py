"""The one style of all pictures: dark pages, repeatable bytes, whole layers, readable with many lines."""

from __future__ import annotations

import re

import numpy as np
import pytest

from hybrid_ep.balance import report, statistics
from hybrid_ep.cli import balance_picture, plotting, traffic_picture
from hybrid_ep.cli.bench.plots import Point, draw
from hybrid_ep.cli.plotting import LINES
from recipes import plots

pytest.importorskip("matplotlib")
COLOUR = re.compile(r"(?:fill|stroke): (#[0-9a-f]{6})")


def texts(svg):
    return re.findall(r"<text[^>]*>([^<]+)</text>", svg)


def loads(layers):
    counts = np.random.default_rng(0).integers(1, 9, (3, len(layers), 8))
    return statistics.LoadStatistics(counts, (0, 1, 2), layers)


def balance(stem, layers):
    stats = loads(layers)
    balance_picture.draw(stem, report.report(stats, 4, spare_slots=1), stats, 0.1)
    return stem.with_suffix(".svg").read_text()


def contrast(one, other):
    """WCAG's ratio of two colours."""

    def luminance(colour):
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def test_lines_and_text_are_seen_on_light_and_dark_pages():
    for colour in {plotting.INK, plotting.MUTED, *plotting.LINES}:
        assert contrast(colour, plotting.PAPER) > 4.5
        assert contrast(plotting.DARK[colour], plotting.DARK[plotting.PAPER]) > 4.5


def test_a_dark_page_changes_every_colour_of_a_picture(tmp_path):
    svg = balance(tmp_path / "b", (3, 4, 7))
    used = set(COLOUR.findall(svg.partition("</style>")[2]))
    assert {plotting.PAPER, plotting.INK, plotting.PALE} <= used <= set(plotting.DARK)
    for colour in used:
        assert f'[style*="fill: {colour}"]{{fill:{plotting.DARK[colour]} !important}}' in svg


def test_the_same_numbers_are_the_same_bytes(tmp_path):
    one, two = (balance(tmp_path / name, (1, 2)) for name in "ab")
    assert one == two and "<dc:date>" not in one


def test_a_caption_speaks_of_what_is_drawn(tmp_path):
    stats = loads((1, 2))
    for spare, said in ((0, "Bars: mean over iterations"), (1, "Bars and points: mean over iterations")):
        balance_picture.draw(tmp_path / "b", report.report(stats, 4, spare_slots=spare), stats, 0.1)
        assert any(text.startswith(said) for text in texts((tmp_path / "b.svg").read_text()))


def test_load_over_its_mean_has_one_colour_map_in_every_picture(tmp_path, monkeypatch):
    kept = []
    monkeypatch.setattr(plotting, "save", lambda figure, stem: kept.append(figure) or [])
    stats = loads((1, 2))
    balance_picture.draw(tmp_path / "b", report.report(stats, 4), stats, 0.1)
    plots.draw_expert_load(tmp_path / "e", [{"step": n, "expert_load": [[1, 2, 3, 9]]} for n in (1, 2, 3)], 2)
    traffic_picture.draw(tmp_path / "t", np.ones((4, 4)))
    maps = [next(axes.images[0] for axes in figure.axes if axes.images) for figure in kept]
    assert [(m.get_cmap().name, m.get_clim()) for m in maps] == [("RdBu_r", (0, 2))] * 3
    bars = [[label.get_text() for label in figure.axes[-1].get_yticklabels()] for figure in kept[:2]]
    assert bars == [["0", "0.5", "1", "1.5", "≥ 2"]] * 2


@pytest.mark.parametrize("sources", [4, 16])
def test_the_colours_of_traffic_are_as_tall_as_its_map_and_all_is_in_the_picture(tmp_path, monkeypatch, sources):
    kept = []
    monkeypatch.setattr(plotting, "save", lambda figure, stem: kept.append(figure) or [])
    traffic_picture.draw(tmp_path / "t", np.ones((sources, 4)))
    figure = kept[0]
    figure.canvas.draw()
    axes = figure.axes[0]
    everything = figure.get_tightbbox(figure.canvas.get_renderer())
    assert 0 <= everything.x0 and everything.x1 <= figure.get_figwidth() and 0 <= everything.y0
    found, bar = axes.get_window_extent(), axes.child_axes[0].get_window_extent()
    assert (bar.y0, bar.y1) == pytest.approx((found.y0, found.y1), abs=1)


@pytest.mark.parametrize("layers", [(3,), (3, 4, 7), tuple(range(1, 59))])
def test_ticks_of_layers_are_recorded_layers_once(tmp_path, layers):
    shown = texts(balance(tmp_path / "b", layers))
    left = shown[: shown.index("layer")]
    assert left == [str(n) for n in layers[:: -(-len(layers) // 12)]]
    right = shown[len(shown) - shown[::-1].index("expert") :]
    assert right[: len(left)] == left


def test_many_implementations_have_a_panel_an_operation(tmp_path):
    points = [
        Point(t, n, op, name, 1.0 * t, 0.9 * t, 1.1 * t, 2.0)
        for t in (64, 256)
        for n in (1, 2)
        for op in ("dispatch", "combine", "pair", "step")
        for name in ("ours", "b", "c", "d")
    ]
    draw(points, tmp_path, "EP 4; a machine", "blocks")
    bandwidth, time = (texts((tmp_path / f"{name}.svg").read_text()) for name in ("bandwidth", "time"))
    for shown in (bandwidth, time):
        assert [shown.count(name) for name in ("dispatch", "step", "ours", "d")] == [1, 1, 1, 1]
    assert "blocks of an operation" in bandwidth and not any("SMs" in text for text in [*bandwidth, *time])
    assert any("10th to 90th percentile" in text for text in time)


def test_a_series_has_one_colour_in_all_pictures_of_a_run(tmp_path):
    """A picture that lacks one, as bandwidth lacks what crosses no link, gives its colour to no other."""
    for several, names in ((True, ("ours", "unlinked", "theirs")), (False, ("dispatch", "unlinked", "pair"))):
        points = [
            Point(t, n, "pair" if several else name, name if several else "ours", 1.0 * t, None, None,
                  None if name == "unlinked" else 2.0)
            for t in (64, 256) for n in (1, 2) for name in names
        ]  # fmt: skip
        draw(points, tmp_path, "EP 4")
        bandwidth, time = (
            [colour for colour in LINES if f"stroke: {colour};" in (tmp_path / f"{name}.svg").read_text()]
            for name in ("bandwidth", "time")
        )
        assert (bandwidth, time) == ([LINES[0], LINES[2]], [*LINES[:3]])


def test_bands_without_percentiles_are_not_explained(tmp_path):
    draw([Point(t, 0, "pair", "ours", 1.0, None, None, None) for t in (1, 2)], tmp_path, "simulated")
    assert not any("percentile" in text for text in texts((tmp_path / "time.svg").read_text()))


def test_who_has_no_bandwidth_is_named_under_the_picture_of_it(tmp_path):
    points = [
        Point(64, sms, op, name, 1.0, None, None, None if name == "reference" else 2.0)
        for sms in (2, 4)
        for op in ("dispatch", "combine")
        for name in ("hybrid_ep", "reference")
    ]
    draw(points, tmp_path / "some", "a title")
    assert "No bus bandwidth is known of reference." in texts((tmp_path / "some" / "bandwidth.svg").read_text())
    draw([p for p in points if p.busbw], tmp_path / "all", "a title")
    assert "No bus bandwidth" not in (tmp_path / "all" / "bandwidth.svg").read_text()
