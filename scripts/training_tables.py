"""Writes docs/results/training-residuals.md: published training steps beside the step model. Deterministic, seconds.

python scripts/training_tables.py [--out FILE]
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from hybrid_ep.perf import training
from hybrid_ep.perf.efficiency import FITTED, Compute, gpu_word
from hybrid_ep.perf.step_time import step

OUT = Path(__file__).resolve().parents[1] / "docs" / "results" / "training-residuals.md"
_UNITS = {"gemm": "{:.1%} of peak", "passes": "{:.1f}", "layer_us_x86": "{:,.0f} us", "layer_us_grace": "{:,.0f} us"}


def text() -> str:
    """The whole page."""
    fits = training.of_kind(*training.HALVES)
    median, worst = training.spread(row.held_out for row in fits)
    half = sorted(abs(_at_half(row)) for row in fits)
    lines = [
        "# Training steps: published and predicted",
        "",
        "Made by `make tables`. Rows are Megatron Bridge's performance summaries (25.09 to 26.08) and",
        "Megatron-LM's MoE recipes: dropless ones of models that are known here, NVFP4 left out; tokens a second of a",
        "GPU. Dispatcher, overlap of the exchange and CUDA graphs are those of the recipe for just this layout in the",
        "project's repository at the date of the summary. Where there is none, they are the nearest recipe's or",
        "assumed, and the row is among the [assumed](#assumed) ones. What a row recomputed is counted as free.",
        "",
        "Four numbers hold for all models, GPUs and precisions",
        "([what they are](../performance_model.md#steps-advice-weights-instead-of-tokens)).",
        f"The {len(fits)} configurations, of each the newest release, are parted in two halves; a row is held out",
        "where the numbers of the other half predict it. What is used is fitted to both halves.",
        "",
        "| | " + " | ".join(training.HALVES) + " | both |",
        "|---|---:|---:|---:|",
    ]
    found = [*map(training.by_half, training.HALVES), FITTED]
    for name, said in _UNITS.items():
        lines.append(f"| `{name}` | " + " | ".join(said.format(_number(one, name)) for one in found) + " |")
    lines += [
        "",
        f"**Held out: {len(fits)} rows, median {median:.0%} off, worst {worst:.0%}.** Half of peak for all compute",
        f"and nothing for launches is {statistics.median(half):.0%} off in the median and {half[-1]:.0%} at worst.",
        "The halves disagree about Grace's launches, which are small, and share `passes` and `gemm` out differently:",
        "more of one stands in for less of the other.",
        "",
        "| published step | how | source | tokens/s | predicted | residual | held out |",
        "|---|---|---|---:|---:|---:|---:|",
    ]
    lines += [f"{_line(row)} {training.percent(row.held_out)} |" for row in fits]
    lines += [
        "",
        "## By GPU, model and graphs",
        "",
        "| | rows | median | worst | signed median |",
        "|---|---:|---:|---:|---:|",
    ]
    lines += _spreads(fits, lambda row: gpu_word(row.job.cluster))
    lines += _spreads(fits, lambda row: row.job.model.name)
    lines += _spreads(fits, lambda row: f"{row.graphs} graphs" if row.graphs != "none" else "no graphs")
    return "\n".join([*lines, *_older(), *_assumed()]) + "\n"


def _older() -> list[str]:
    rows = training.of_kind("older")
    median, worst = training.spread(row.residual for row in rows)
    return [
        "",
        "## Older software",
        "",
        f"{len(rows)} rows of configurations that a later release ran again: median {median:.0%}, worst",
        f"{worst:.0%} off. None sets a number.",
        "",
        "| release | rows | median | worst | signed median |",
        "|---|---:|---:|---:|---:|",
        *_spreads(rows, lambda row: row.source.rpartition(" ")[2], held_out=False),
        "",
        *_table(rows),
    ]


def _assumed() -> list[str]:
    rows = training.of_kind("assumed")
    median, worst = training.spread(row.residual for row in rows)
    return [
        "",
        "## Assumed",
        "",
        f"{len(rows)} rows of which no recipe says just how they exchanged: median {median:.0%}, worst",
        f"{worst:.0%} off. None sets a number.",
        "",
        *_table(rows),
    ]


def _table(rows: Sequence[training.Row]) -> list[str]:
    head = ["| published step | how | source | tokens/s | predicted | residual |", "|---|---|---|---:|---:|---:|"]
    return [*head, *map(_line, rows)]


def _line(row: training.Row) -> str:
    return (
        f"| {str(row).rpartition(' (')[0]} | {row.how} | {row.source} | {row.tokens_per_s:,.0f} | "
        f"{row.predicted():,.0f} | {training.percent(row.residual)} |"
    )


def _spreads(rows: Sequence[training.Row], key: Callable[[training.Row], str], held_out: bool = True) -> Iterator[str]:
    """A line for each value of key, in the rows' order."""
    for name in dict.fromkeys(map(key, rows)):
        chosen = [row.held_out if held_out else row.residual for row in rows if key(row) == name]
        median, worst = training.spread(chosen)
        yield f"| {name} | {len(chosen)} | {median:.0%} | {worst:.0%} | {statistics.median(chosen):+.0%} |"


def _number(fitted: Compute, name: str) -> float:
    return float(getattr(fitted, name))


def _at_half(row: training.Row) -> float:
    return step(replace(row.job, efficiency=0.5)).tokens_per_s_per_gpu / row.tokens_per_s - 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=OUT)
    parser.parse_args().out.write_text(text())


if __name__ == "__main__":
    main()
