"""Strong and weak scaling as rows: GPUs, tokens/s, memory, and how much of the smallest job's rate is left.

Weak: every GPU keeps its tokens a step. Strong: the whole job keeps them. The smallest job begins both tables."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hybrid_ep.cli import plotting
from hybrid_ep.perf import remedies

MODES = ("weak", "strong")
_STYLE = {"weak": (plotting.BLUE, "o"), "strong": (plotting.RED, "s")}  # the same, alone or beside the other


@dataclass(frozen=True)
class Row:
    """One job. tokens: of a step, all GPUs. memory_bytes: of the GPU with most, None where nobody said. token_flops: of
    the model, forward and backward of one token, what is recomputed not counted; None where nobody knows. nodes: NVLink
    domains. fits: False of a predicted job whose memory_bytes no GPU has; its other numbers are of no run. state_bytes:
    the part of memory_bytes that is weights, gradients and optimizer state, of a predicted job."""

    name: str
    nodes: int
    gpus: int
    tokens: float
    step_s: float
    memory_bytes: float | None
    token_flops: float | None = None
    fits: bool = True
    state_bytes: float | None = None

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


def _base(rows: Sequence[Row]) -> Row:
    return next(r for r in rows if r.fits)


def lines(mode: str, rows: Sequence[Row], named: bool = True) -> Iterator[str]:
    """The table of one mode, the first row that fits the base. named: with every row's job; predicted rows are all of
    one."""
    base = _base(rows)
    yield (
        f"#{mode:>6}{'domains':>8}{'GPUs':>7}{'tokens/step':>13}{'step s':>9}{'tokens/s':>12}{'per GPU':>11}"
        f"{'TFLOP/s':>9}{'speedup':>8}{'efficiency':>11}{'memory GB':>10}" + ("  job" if named else f"{'state GB':>9}")
    )
    for r in rows:
        start = f"{mode:>7}{r.nodes:>8}{r.gpus:>7}{r.tokens:>13,.0f}"
        if not r.fits and r.memory_bytes is not None:
            idle = "".join(f"{'-':>{width}}" for width in (9, 12, 11, 9, 8, 11))
            yield f"{start}{idle}{r.memory_bytes / 1e9:>10.2f}  does not fit"
            continue
        tflops = "-" if r.tflops_per_gpu is None else f"{r.tflops_per_gpu:.0f}"
        yield (
            f"{start}{r.step_s:>9.3f}{r.tokens_per_s:>12,.0f}{r.per_gpu:>11,.1f}{tflops:>9}"
            f"{r.tokens_per_s / base.tokens_per_s:>8.2f}{r.per_gpu / base.per_gpu:>11.1%}{_gb(r.memory_bytes):>10}"
            + (f"  {r.name}" if named else f"{_gb(r.state_bytes):>9}")
        )


def _gb(num_bytes: float | None) -> str:
    return "-" if num_bytes is None else f"{num_bytes / 1e9:.2f}"


def as_json(mode: str, rows: Sequence[Row]) -> list[dict[str, Any]]:
    """What a job that does not fit would do is null."""
    base = _base(rows)
    return [
        {
            "mode": mode,
            "job": r.name,
            "nodes": r.nodes,
            "gpus": r.gpus,
            "tokens_per_step": r.tokens,
            "step_s": r.step_s if r.fits else None,
            "tokens_per_s": r.tokens_per_s if r.fits else None,
            "tokens_per_s_per_gpu": r.per_gpu if r.fits else None,
            "tflops_per_gpu": r.tflops_per_gpu if r.fits else None,
            "speedup": r.tokens_per_s / base.tokens_per_s if r.fits else None,
            "efficiency": r.per_gpu / base.per_gpu if r.fits else None,
            "memory_bytes": r.memory_bytes,
            "state_bytes": r.state_bytes,
            "fits": r.fits,
        }
        for r in rows
    ]


def draw(tables: dict[str, list[Row]], stem: Path, title: str, workers: str = "GPUs") -> list[Path]:
    """tokens/s over GPUs, or what `workers` calls them, of jobs that fit, of several sizes with the ideal
    line; stem.png and stem.svg. ValueError when matplotlib is missing."""
    plt = plotting.pyplot()
    from matplotlib import ticker

    figure, panel = plt.subplots(figsize=(3.8, 3.0), layout="constrained")
    tables = {mode: [r for r in rows if r.fits] for mode, rows in tables.items()}
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
    whole = math.lcm(*(n // math.gcd(n, sizes[0]) for n in sizes))
    if uneven := [n for n in sizes if micro_batches * sizes[0] % n]:
        raise ValueError(
            f"micro_batches={micro_batches} of {sizes[0]} GPUs cannot be dealt to {uneven[0]} GPUs for strong scaling; "
            f"{remedies.multiple('micro_batches', micro_batches, whole)}, or --mode weak"
        )
    return {n: micro_batches * sizes[0] // n for n in sizes}


def predict(job: Any, gpus: Sequence[int], mode: str) -> list[Row]:
    """A row of every number of GPUs by the step model. job: a perf.step_time.Job of any of them. Memory: of
    perf.memory. ValueError names argument, value and remedy, also where nothing fits."""
    from hybrid_ep.perf import memory
    from hybrid_ep.perf.step_time import step

    batches = (
        strong_micro_batches(gpus, job.micro_batches) if mode == "strong" else dict.fromkeys(gpus, job.micro_batches)
    )
    rows = []
    for n in sorted(gpus):
        at = replace(job, gpus=n, micro_batches=batches[n])
        seconds, need = step(at).seconds, memory.per_gpu(at)
        tokens = at.tokens * at.micro_batches * n / at.pp
        nodes = -(-n // job.cluster.ranks_per_node)
        rows.append(
            Row(
                f"{job.model.name} EP{job.ep} PP{job.pp}",
                nodes,
                n,
                tokens,
                seconds,
                need.total,
                job.model.train_flops_per_token(job.sequence, job.mtp),
                need.total <= memory.budget_bytes(job.cluster),
                need.state,
            )
        )
    if not any(r.fits for r in rows):
        raise ValueError(f"--gpus {','.join(str(r.gpus) for r in rows)}: {said_of_fit(job, rows)}")
    return rows


def said_of_fit(job: Any, rows: Sequence[Row]) -> str:
    """What does not fit of a predicted table, and what would; "" where all rows do. job: as for `predict`."""
    from hybrid_ep.perf.memory import RESERVE, budget_bytes, fewest_gpus

    lacking = {r.gpus: r.memory_bytes / 1e9 for r in rows if not r.fits and r.memory_bytes}
    if not lacking:
        return ""
    most = max(lacking)
    needs = f"{lacking[most]:,.0f} GB" if len(lacking) == 1 else f"{lacking[most]:,.0f} GB or more"
    layout = f"EP {job.ep}, PP {job.pp} and TP {job.tensor}"
    fewest = fewest_gpus(job)
    remedy = (
        f"the fewest GPUs that hold it with {layout} are {fewest}: give --gpus {fewest} or more"
        if fewest
        else f"with {layout} no number of GPUs holds it: give a larger --ep, --pp or --tensor; hybrid-ep simulate "
        "--recommend has layouts that fit"
    )
    return (
        f"{job.model.name} does not fit {', '.join(map(str, sorted(lacking)))} GPUs, for they take {needs} of "
        f"the {budget_bytes(job.cluster) / 1e9:.1f} GB of a GPU ({RESERVE:.0%} is left free); {remedy}"
    )
