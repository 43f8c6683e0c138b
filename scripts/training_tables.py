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
from hybrid_ep.perf.efficiency import FITTED
from hybrid_ep.perf.step_time import step

OUT = Path(__file__).resolve().parents[1] / "docs" / "results" / "training-residuals.md"


def text() -> str:
    """The whole page."""
    rows = training.rows()
    held = [row for row in rows if not row.fits]
    median, worst = training.spread(held)
    at_half = sorted(abs(_at(row, 0.5) / row.tokens_per_s - 1) for row in held)
    lines = [
        "# Training steps: published and predicted",
        "",
        "Made by `make tables`. Rows are Megatron Bridge's performance summaries (25.09, 25.11,",
        "26.02) and Megatron-LM's MoE recipes, dropless ones of models that are known here; tokens a second of a GPU.",
        "Half of the rows of a GPU and precision set its compute efficiency, their geometric mean; the others are",
        "predicted with it. No row says its recompute, its dispatcher's SMs or what it hides, so none of that can be",
        "told apart from efficiency.",
        "",
        "| GPU | precision | share of peak | rows | of these held out |",
        "|---|---|---:|---:|---:|",
    ]
    for group, share in FITTED.items():
        of_group = [row for row in rows if row.group == group]
        lines.append(
            f"| {group[0]} | {group[1]} | {share:.1%} | {len(of_group)} | {sum(not row.fits for row in of_group)} |"
        )
    middle = at_half[(len(at_half) - 1) // 2], at_half[len(at_half) // 2]
    lines += [
        "",
        f"**Held out: {len(held)} rows, median {median:.0%} off, worst {worst:.0%}.** At half of peak for",
        f"all, as this model had it before, the same rows are {middle[0]:.0%} to {middle[1]:.0%} (the two in the",
        f"middle) and {at_half[-1]:.0%} off. The worst are Qwen3-30B, whose narrow GEMMs reach far less than",
        "a group's mean: one number a GPU cannot say that.",
        "",
        "| published step | source | tokens/s | predicted | residual | |",
        "|---|---|---:|---:|---:|---|",
    ]
    for row in rows:
        predicted = row.predicted()
        lines.append(
            f"| {str(row).rpartition(' (')[0]} | {row.source} | {row.tokens_per_s:,.0f} | {predicted:,.0f} | "
            f"{training.percent(predicted / row.tokens_per_s - 1)} | {'fits' if row.fits else 'held out'} |"
        )
    return "\n".join([*lines, *_later()]) + "\n"


def _later() -> list[str]:
    """The section of releases that came after the numbers: by release and GPU, then every row."""
    rows = training.later()
    median, worst = training.spread(rows)
    lines = [
        "",
        "## Later releases",
        "",
        f"The {len(rows)} rows of the same models in the summaries of 26.02.01 to 26.08 (DGX-H100, B200, B300, GB200",
        "and GB300; rows in NVFP4 and of other models are left out). None of them sets a number above: the model",
        "has the efficiency of 25.09 to 26.02, and what it misses here is also what the software gained since.",
        "",
        f"**All: median {median:.0%} off, worst {worst:.0%}.** The signed median says which way: below zero the step",
        "was published faster than the model has it.",
        "",
        "| release | rows | median | worst | signed median |",
        "|---|---:|---:|---:|---:|",
    ]
    lines += _spreads(rows, lambda row: row.source.rpartition(" ")[2])
    lines += ["", "| GPU | rows | median | worst | signed median |", "|---|---:|---:|---:|---:|"]
    lines += _spreads(rows, lambda row: row.group[0])
    lines += ["", "| published step | source | tokens/s | predicted | residual |", "|---|---|---:|---:|---:|"]
    for row in rows:
        predicted = row.predicted()
        lines.append(
            f"| {str(row).rpartition(' (')[0]} | {row.source} | {row.tokens_per_s:,.0f} | {predicted:,.0f} | "
            f"{training.percent(predicted / row.tokens_per_s - 1)} |"
        )
    return lines


def _spreads(rows: Sequence[training.Row], key: Callable[[training.Row], str]) -> Iterator[str]:
    """A line for each value of key, in the rows' order."""
    for name in dict.fromkeys(map(key, rows)):
        chosen = [row for row in rows if key(row) == name]
        median, worst = training.spread(chosen)
        signed = statistics.median(row.predicted() / row.tokens_per_s - 1 for row in chosen)
        yield f"| {name} | {len(chosen)} | {median:.0%} | {worst:.0%} | {signed:+.0%} |"


def _at(row: training.Row, share: float) -> float:
    return step(replace(row.job, efficiency=share)).tokens_per_s_per_gpu


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=OUT)
    parser.parse_args().out.write_text(text())


if __name__ == "__main__":
    main()
