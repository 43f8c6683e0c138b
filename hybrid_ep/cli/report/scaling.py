"""Strong and weak scaling as rows: nodes, GPUs, tokens/s, memory, and how much of the smallest job's rate is left.

Weak: every GPU keeps its tokens a step. Strong: the whole job keeps them. The smallest job begins both tables."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hybrid_ep.cli import plotting

MODES = ("weak", "strong")
_STYLE = {"weak": (plotting.BLUE, "o"), "strong": (plotting.RED, "s")}  # the same, alone or beside the other


@dataclass(frozen=True)
class Row:
    """One job. tokens: of a step, all GPUs. memory_bytes: of the GPU with most, None where nobody said. token_flops: of
    the model, forward and backward of one token, what is recomputed not counted; None where nobody knows."""

    name: str
    nodes: int
    gpus: int
    tokens: float
    step_s: float
    memory_bytes: float | None
    token_flops: float | None = None

    @property
    def tflops_per_gpu(self) -> float | None:
        return None if self.token_flops is None else self.per_gpu * self.token_flops / 1e12

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.step_s

    @property
    def per_gpu(self) -> float:
        return self.tokens_per_s / self.gpus


def split(rows: Sequence[Row]) -> tuple[dict[str, list[Row]], list[Row]]:
    """({mode: its rows by GPUs ascending, the smallest first}, rows that are neither). Repeated sizes are kept."""
    base = min(rows, key=lambda r: r.gpus)
    ordered = sorted(rows, key=lambda r: r.gpus)
    found = {
        "weak": [r for r in ordered if abs(r.tokens / r.gpus - base.tokens / base.gpus) < 0.5],
        "strong": [r for r in ordered if abs(r.tokens - base.tokens) < 0.5],
    }
    return found, [r for r in ordered if not any(r in chosen for chosen in found.values())]


def lines(mode: str, rows: Sequence[Row]) -> Iterator[str]:
    """The table of one mode, its first row the base."""
    base = rows[0]
    yield (
        f"#{mode:>6}{'nodes':>7}{'GPUs':>7}{'tokens/step':>14}{'step s':>9}{'tokens/s':>13}{'per GPU':>11}"
        f"{'TFLOP/s':>9}{'speedup':>9}{'efficiency':>12}{'memory GB':>11}  job"
    )
    for r in rows:
        memory = "-" if r.memory_bytes is None else f"{r.memory_bytes / 1e9:.2f}"
        tflops = "-" if r.tflops_per_gpu is None else f"{r.tflops_per_gpu:.0f}"
        yield (
            f"{mode:>7}{r.nodes:>7}{r.gpus:>7}{r.tokens:>14,.0f}{r.step_s:>9.3f}{r.tokens_per_s:>13,.0f}"
            f"{r.per_gpu:>11,.1f}{tflops:>9}{r.tokens_per_s / base.tokens_per_s:>9.2f}{r.per_gpu / base.per_gpu:>12.1%}"
            f"{memory:>11}  {r.name}"
        )


def as_json(mode: str, rows: Sequence[Row]) -> list[dict[str, Any]]:
    return [
        {
            "mode": mode,
            "job": r.name,
            "nodes": r.nodes,
            "gpus": r.gpus,
            "tokens_per_step": r.tokens,
            "step_s": r.step_s,
            "tokens_per_s": r.tokens_per_s,
            "tokens_per_s_per_gpu": r.per_gpu,
            "tflops_per_gpu": r.tflops_per_gpu,
            "speedup": r.tokens_per_s / rows[0].tokens_per_s,
            "efficiency": r.per_gpu / rows[0].per_gpu,
            "memory_bytes": r.memory_bytes,
        }
        for r in rows
    ]


def draw(tables: dict[str, list[Row]], stem: Path, title: str, workers: str = "GPUs") -> list[Path]:
    """tokens/s over GPUs, or what `workers` calls them, of several sizes with the ideal line; stem.png and stem.svg.
    ValueError when matplotlib is missing."""
    plt = plotting.pyplot()
    from matplotlib import ticker

    figure, panel = plt.subplots(figsize=(3.8, 3.0), layout="constrained")
    for place, (mode, rows) in enumerate(tables.items()):
        colour, mark = _STYLE[mode]
        beneath = len(tables) - 1 - place  # a line may be the next one's: it is seen at both sides of it
        panel.plot(
            [r.gpus for r in rows],
            [r.tokens_per_s for r in rows],
            color=colour,
            marker=mark,
            markersize=3.5 + 3 * beneath,
            linewidth=1.3 + 1.5 * beneath,
            label=f"{mode} scaling",
        )
    sizes = sorted({r.gpus for rows in tables.values() for r in rows})
    base = next(iter(tables.values()))[0]
    if len(sizes) > 1:
        panel.plot(
            sizes,
            [base.per_gpu * n for n in sizes],
            color=plotting.MUTED,
            linewidth=0.9,
            linestyle=(0, (6, 3)),
            label="ideal",
        )
    panel.set_xscale("log", base=2)
    panel.set_yscale("log")
    plotting.label_ticks(panel.xaxis, sizes, sizes, most=7)
    panel.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
    panel.yaxis.set_major_formatter(ticker.EngFormatter(sep=""))
    panel.yaxis.set_minor_locator(ticker.NullLocator())
    panel.set(xlabel=workers, ylabel="tokens/s")
    panel.legend()
    plotting.note(figure, textwrap.fill(title, 72))
    return plotting.save(figure, stem)


def strong_micro_batches(gpus: Iterable[int], micro_batches: int) -> dict[int, int]:
    """Micro-batches of every job that keeps the smallest one's tokens. ValueError where they are no whole number."""
    sizes = sorted(gpus)
    found = {}
    for n in sizes:
        if micro_batches * sizes[0] % n:
            raise ValueError(
                f"micro_batches={micro_batches} of {sizes[0]} GPUs cannot be dealt to {n} GPUs for strong "
                f"scaling; give a multiple of {n // sizes[0]}, or --mode weak"
            )
        found[n] = micro_batches * sizes[0] // n
    return found


def predict(job: Any, gpus: Sequence[int], mode: str) -> list[Row]:
    """A row of every number of GPUs by the step model. job: a perf.step_time.Job of any of them. Memory: weights,
    gradients and optimizer, without activations and buffers. ValueError names argument, value and remedy."""
    from hybrid_ep.perf.recommend import state_gb
    from hybrid_ep.perf.step_time import step

    batches = (
        strong_micro_batches(gpus, job.micro_batches) if mode == "strong" else dict.fromkeys(gpus, job.micro_batches)
    )
    rows = []
    for n in sorted(gpus):
        at = replace(job, gpus=n, micro_batches=batches[n])
        seconds = step(at).seconds
        tokens = at.tokens * at.micro_batches * n / at.pp
        nodes = -(-n // job.cluster.ranks_per_node)
        rows.append(
            Row(
                f"{job.model.name} EP{job.ep} PP{job.pp}",
                nodes,
                n,
                tokens,
                seconds,
                1e9 * state_gb(at),
                job.model.train_flops_per_token(job.sequence, job.mtp),
            )
        )
    return rows
