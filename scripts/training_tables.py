"""Writes docs/results/training-residuals.md: published training steps beside the step model. Deterministic, seconds.

python scripts/training_tables.py [--out FILE]
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from hybrid_ep.perf import training
from hybrid_ep.perf.efficiency import FITTED, Compute, gpu_word, precision_class
from hybrid_ep.perf.end_to_end import calibrate
from hybrid_ep.perf.step_time import step

OUT = Path(__file__).resolve().parents[1] / "docs" / "results" / "training-residuals.md"
_UNITS = {"gemm": "{:.1%} of peak", "passes": "{:.1f}", "layer_us_x86": "{:,.0f} us", "layer_us_grace": "{:,.0f} us"}


def text() -> str:
    """The whole page."""
    fits = training.of_kind("fits")
    median, worst = training.spread(row.held_out for row in fits)
    share, share_worst = training.spread(_by_one_share(fits))
    apart, apart_worst = training.spread(_by_other_models(fits))
    half = sorted(abs(_at(row, 0.5)) for row in fits)
    bf16 = [row for row in fits if row.job.dtype == "bf16"]
    lines = [
        "# Training steps: published and predicted",
        "",
        "Made by `make tables`. Rows are Megatron Bridge's performance summaries (25.09 to 26.08), Megatron-LM's MoE",
        "recipes and the Qwen3 page of Megatron-MoE-ModelZoo: dropless ones of models that are known here, NVFP4 left",
        "out; tokens a second of a GPU. Dispatcher, overlap of the exchange, CUDA graphs and recompute are those of",
        "the recipe for just this layout in the project's repository at the date of the summary. Where there is none,",
        "they are the nearest recipe's or assumed, and the row is among the [assumed](#assumed) ones. Full recompute",
        "is counted, that of modules is free: none of them is the experts'.",
        "DeepSeek-V3 has its layer of multi-token prediction but in four rows of 25.11: summaries give tokens and",
        "TFLOPS, and their ratio is a token's FLOPs by Megatron's formula with the layer or without (260.0 or 249.8",
        "billion). Exchanges of the dispatcher `deepep` are predicted as those of the published Hybrid-EP, between",
        "nodes and inside one: this model has none of DeepEP's kernels, and no rate of them is published for H100.",
        "Offloaded activations and optimizer states count as free.",
        "",
        "Four numbers hold for all models, GPUs and precisions",
        "([what they are](../performance_model.md#steps-advice-weights-instead-of-tokens)).",
        f"The {len(fits)} configurations, of each the newest release, are parted in two halves; a row is held out",
        "where the numbers of the other half predict it. What is used is fitted to both halves.",
        f"{len(bf16)} of these are in bf16: held out {_said(row.held_out for row in bf16)}.",
        "",
        "| | " + " | ".join(f"half {n}" for n in training.HALVES) + " | both |",
        "|---|---:|---:|---:|",
    ]
    found = [*map(training.of_half, training.HALVES), FITTED]
    for name, said in _UNITS.items():
        lines.append(f"| `{name}` | " + " | ".join(said.format(_number(one, name)) for one in found) + " |")
    lines += [
        "",
        "| the same rows, conditions and halves | median | worst |",
        "|---|---:|---:|",
        f"| **held out: the numbers of the other half** | **{median:.0%}** | **{worst:.0%}** |",
        f"| held out with its whole model: the rows of the other two models | {apart:.0%} | {apart_worst:.0%} |",
        *_tried(fits),
        f"| one share of peak for each GPU and precision, from the other half | {share:.0%} | {share_worst:.0%} |",
        f"| half of peak for all, nothing for launches | {statistics.median(half):.0%} | {half[-1]:.0%} |",
        "",
        "The halves share `passes` and `gemm` out differently, for more of one stands in for less of the other, and",
        "differ in launches. A factor is the mean (geometric) by which the rows of its group in one half are faster",
        "than that half's own numbers have them, and the other half's rows are multiplied by it; by 1 where the group",
        "has no row there.",
        "",
        "| published step | how | recompute | source | tokens/s | predicted | residual | held out |",
        "|---|---|---|---|---:|---:|---:|---:|",
    ]
    lines += [f"{_line(row)} {training.percent(row.held_out)} |" for row in fits]
    lines += ["", "## Held out, by GPU, precision, model and graphs", "", "| | rows | median | worst | signed median |"]
    lines += ["|---|---:|---:|---:|---:|"]
    lines += _spreads(fits, lambda row: gpu_word(row.job.cluster))
    lines += _spreads(fits, lambda row: precision_class(row.job.dtype))
    lines += _spreads(fits, lambda row: row.job.model.name)
    lines += _spreads(fits, lambda row: f"{row.graphs} graphs" if row.graphs != "none" else "no graphs")
    return "\n".join([*lines, *_older(), *_assumed(), *_notes()]) + "\n"


def _said(residuals: Iterable[float]) -> str:
    """Median and worst of their sizes, and the median with its sign, in words."""
    found = list(residuals)
    median, worst = training.spread(found)
    return f"median {median:.0%}, worst {worst:.0%}, signed median {statistics.median(found):+.0%}"


# Groups of rows that a number of their own might serve better than the four of all.
_FACTORS: dict[str, Callable[[training.Row], tuple[str, ...]]] = {
    "generation of GPUs": lambda row: (row.job.cluster.gpu.generation,),
    "generation and precision": lambda row: (row.job.cluster.gpu.generation, precision_class(row.job.dtype)),
    "generation, precision and whether it recomputes": lambda row: (
        row.job.cluster.gpu.generation,
        precision_class(row.job.dtype),
        str(row.recompute != "none"),
    ),
    "GPU": lambda row: (gpu_word(row.job.cluster),),
    "GPU and precision": lambda row: (gpu_word(row.job.cluster), precision_class(row.job.dtype)),
}


def _tried(rows: Sequence[training.Row]) -> Iterator[str]:
    """Lines of more numbers than four."""
    for name, key in _FACTORS.items():
        median, worst = training.spread(_by_factor(rows, key))
        yield f"| held out, and a factor for each {name} | {median:.0%} | {worst:.0%} |"
    for name in ("passes", "layer_us_x86"):
        median, worst = training.spread(_apart(rows, name))
        yield f"| held out, and `{name}` of bf16 by itself | {median:.0%} | {worst:.0%} |"


def _apart(rows: Sequence[training.Row], name: str) -> list[float]:
    """Residuals held out where bf16 has a number of its own."""
    found = []
    for half in training.HALVES:
        fitted = training.fit_apart((row for row in rows if row.half != half), name)
        theirs = [row for row in rows if row.half == half]
        found += [row.predicted(fitted[precision_class(row.job.dtype)]) / row.tokens_per_s - 1 for row in theirs]
    return found


def _by_factor(rows: Sequence[training.Row], key: Callable[[training.Row], tuple[str, ...]]) -> list[float]:
    """Residuals held out, times the geometric mean by which rows of the same key are off in the half that fits."""
    found = []
    for row in rows:
        fitted = training.of_half(3 - row.half)
        near = [other for other in rows if other.half != row.half and key(other) == key(row)]
        logs = [math.log(other.tokens_per_s / other.predicted(fitted)) for other in near]
        found.append((1 + row.held_out) * math.exp(statistics.fmean(logs) if logs else 0.0) - 1)
    return found


def _by_one_share(rows: Sequence[training.Row]) -> list[float]:
    """Residuals with the geometric mean of the shares of peak that a row's GPU and precision need in the other half; of
    all that half's rows where it has none of them."""
    needed = {row: share for row in rows if (share := _share(row)) is not None}
    found = []
    for row in rows:
        others = [other for other in needed if other.half != row.half]
        near = [other for other in others if _group(other) == _group(row)] or others
        found.append(_at(row, math.exp(statistics.fmean(math.log(needed[other]) for other in near))))
    return found


def _share(row: training.Row) -> float | None:
    """Of peak, with which the model gives the published rate; None where no share does."""
    try:
        return calibrate(row.tokens_per_s, lambda x: (1 + _at(row, x)) * row.tokens_per_s, 0.005, 1.0)
    except ValueError:
        return None


def _group(row: training.Row) -> tuple[str, str]:
    return gpu_word(row.job.cluster), precision_class(row.job.dtype)


def _by_other_models(rows: Sequence[training.Row]) -> list[float]:
    """Residuals of each model's rows with the numbers that the other models' give."""
    found = []
    for name in dict.fromkeys(row.job.model.name for row in rows):
        fitted = training.fit(row for row in rows if row.job.model.name != name)
        found += [row.predicted(fitted) / row.tokens_per_s - 1 for row in rows if row.job.model.name == name]
    return found


def _older() -> list[str]:
    rows = training.of_kind("older")
    median, worst = training.spread(row.held_out for row in rows)
    return [
        "",
        "## Older software",
        "",
        f"{len(rows)} rows of configurations that a later release ran again. By the half that their configuration is",
        f"not in: median {median:.0%}, worst {worst:.0%} off. None sets a number, but the newest of its configuration",
        "does, so that the residuals below are no test.",
        "",
        "| release | rows | median held out | worst | signed median |",
        "|---|---:|---:|---:|---:|",
        *_spreads(rows, lambda row: row.source),
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
        f"{len(rows)} rows of which no recipe says just how they exchanged, that their project has not published, or",
        "whose step does what the model has not (a [note](#notes) says which): "
        f"median {median:.0%}, worst {worst:.0%} off.",
        "None sets a number.",
        "",
        *_table(rows),
    ]


def _notes() -> list[str]:
    """What is confirmed and what inferred, each note once."""
    rows = [row for row in training.rows() if row.note]
    lines = ["", "## Notes", ""]
    for note in dict.fromkeys(row.note for row in rows):
        those = [row for row in rows if row.note == note]
        how_many = "one row" if len(those) == 1 else f"{len(those)} rows"
        lines.append(f"* {those[0].source}, {how_many}: {note}.")
    return lines


def _table(rows: Sequence[training.Row]) -> list[str]:
    head = "| published step | how | recompute | source | tokens/s | predicted | residual |"
    return [head, "|---|---|---|---|---:|---:|---:|", *map(_line, rows)]


def _line(row: training.Row) -> str:
    return (
        f"| {str(row).rpartition(' (')[0]} | {row.how} | {row.recompute} | {row.source} | {row.tokens_per_s:,.0f} | "
        f"{row.predicted():,.0f} | {training.percent(row.residual)} |"
    )


def _spreads(rows: Sequence[training.Row], key: Callable[[training.Row], str]) -> Iterator[str]:
    """A line for each value of key, in the rows' order."""
    for name in dict.fromkeys(map(key, rows)):
        chosen = [row.held_out for row in rows if key(row) == name]
        median, worst = training.spread(chosen)
        yield f"| {name} | {len(chosen)} | {median:.0%} | {worst:.0%} | {statistics.median(chosen):+.0%} |"


def _number(fitted: Compute, name: str) -> float:
    return float(getattr(fitted, name))


def _at(row: training.Row, share: float) -> float:
    """The residual with this share of peak for all compute."""
    return step(replace(row.job, efficiency=share)).tokens_per_s_per_gpu / row.tokens_per_s - 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=OUT)
    parser.parse_args().out.write_text(text())


if __name__ == "__main__":
    main()
