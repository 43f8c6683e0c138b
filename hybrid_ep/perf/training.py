"""Published training steps beside the step model, which is fitted to them; to each half of them, to predict the other.

The rows are Megatron Bridge's performance summaries, Megatron-LM's MoE recipes and the Qwen3 page of
Megatron-MoE-ModelZoo: dropless, experts force-balanced. Summaries give the layout; dispatcher, overlap of the exchange,
CUDA graphs and recompute are those of the recipe for this layout in the project's repository at the date of the summary
(`known`). Where there is none of just this layout they are those of the nearest, or assumed, and such a row sets
nothing; nor does one whose step has what this model lacks (its `note`). Whether a step of DeepSeek-V3 had its layer of
multi-token prediction is told by its TFLOPS over its tokens/s, a token's FLOPs. What no source says is taken alike for
all: 32 SMs, nine tenths of an overlapped exchange hidden. Recompute of all layers or of `moe` counts; of other modules
it is free, as everywhere. DeepEP counts as the published Hybrid-EP does, between nodes and inside one: no rate of it is
published for H100.

A configuration is measured again by every release of the software: the newest counts, the others are `older`."""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import astuple, dataclass, replace
from functools import cache, lru_cache
from pathlib import Path

from hybrid_ep.hardware import clusters
from hybrid_ep.perf import efficiency, models
from hybrid_ep.perf.efficiency import Compute, gpu_word, precision_class
from hybrid_ep.perf.step_time import CV_SLOW, Job, tokens_per_s_per_gpu

CSV = Path(__file__).parent / "data" / "published_training.csv"
KINDS = ("fits", "older", "assumed")
HALVES = (1, 2)
_SEQUENCE = 4096
_NUM_SMS = 32
_OVERLAP = 0.9
_DISPATCHERS = {"hybrid_ep": "published_hybrid_ep", "deepep": "published_hybrid_ep", "alltoall": "a2a"}


@dataclass(frozen=True)
class Row:
    """One published step. tokens_per_s: of a GPU. kind: "fits": `efficiency` is fitted to it; "older": to newer
    software that ran the same; "assumed": to neither, for no recipe says just how it exchanged, or it did what the
    model has not. recompute: none, full or Megatron's modules. half: of the configurations, 1 or 2, each of which
    predicts the other; 0 where assumed. note: what is confirmed and what inferred, where that needs a word."""

    source: str
    job: Job
    tokens_per_s: float
    dispatcher: str
    graphs: str
    recompute: str
    kind: str
    half: int = 0
    note: str = ""

    def predicted(self, fitted: Compute | None = None) -> float:
        """Tokens/s of a GPU."""
        return tokens_per_s_per_gpu(self.job, fitted)

    @property
    def residual(self) -> float:
        return self.predicted() / self.tokens_per_s - 1

    @property
    def held_out(self) -> float:
        """The residual by the numbers of the half that the row's configuration is not in. ValueError where assumed."""
        if self.half not in HALVES:
            raise ValueError(f"{self}: its exchange is assumed, and no half has it")
        return self.predicted(of_half(3 - self.half)) / self.tokens_per_s - 1

    @property
    def how(self) -> str:
        """The exchange, the graphs, and the recompute that the model counts, in words."""
        said = [self.dispatcher]
        said += ["overlapped"] if self.job.overlap else []
        said += [f"{self.graphs} CUDA graphs"] if self.graphs != "none" else []
        said += [f"{self.job.recompute} recompute"] if self.job.recompute != "none" else []
        return ", ".join(said)

    @property
    def configuration(self) -> tuple[Job, str, str]:
        """What a later release runs again: the model has one job for dispatchers that it cannot tell apart."""
        return self.job, self.dispatcher, self.graphs

    def __str__(self) -> str:
        j = self.job
        stages = f"PP {j.pp}" + (f" x {j.virtual_pp}" if j.virtual_pp > 1 else "")
        return (
            f"{j.model.name} on {j.gpus} {gpu_word(j.cluster)}, {j.dtype}, EP {j.ep}, {stages}, TP {j.tensor} "
            f"({self.source})"
        )


@lru_cache(maxsize=1)
def rows() -> tuple[Row, ...]:
    """All, in the file's order: releases of old software first."""
    found = list(_read())
    newest = {row.configuration: n for n, row in enumerate(found) if row.kind != "assumed"}
    alike: dict[tuple[str, bool], list[Job]] = {}  # each fitted number needs rows that show it
    for job in dict.fromkeys(job for job, _, _ in newest):  # no job is in both halves
        alike.setdefault((efficiency.host_word(job.cluster), job.iteration_graph), []).append(job)
    half = {job: HALVES[i % 2] for jobs in alike.values() for i, job in enumerate(jobs)}
    return tuple(
        row
        if row.kind == "assumed"
        else replace(row, kind="fits" if newest[row.configuration] == n else "older", half=half[row.job])
        for n, row in enumerate(found)
    )


def of_kind(*kinds: str) -> list[Row]:
    """The rows of these `KINDS`."""
    return [row for row in rows() if row.kind in kinds]


def _read() -> Iterator[Row]:
    with CSV.open(newline="") as file:
        for record in csv.DictReader(file):
            job = _job(record)
            value = float(record["value"])
            if record["unit"] == "TFLOPS":
                value *= 1e12 / job.model.train_flops_per_token(_SEQUENCE, job.mtp)
            elif record["unit"] == "s":
                value = int(record["global_batch"]) * _SEQUENCE / value / job.gpus
            kind = "" if record["known"] == "1" else "assumed"
            dispatcher, graphs, again = record["dispatcher"], record["graphs"], record["recompute"]
            yield Row(record["source"], job, value, dispatcher, graphs, again, kind, note=record["note"])


def _job(record: dict[str, str]) -> Job:
    gpus, tensor, pipeline, size = (int(record[k]) for k in ("gpus", "tensor", "pipeline", "micro_batch"))
    batches = int(record["global_batch"]) // (gpus // (tensor * pipeline) * size)
    again = record["recompute"].split()
    return Job(
        models.get(record["model"]),
        clusters.get(record["cluster"]),
        gpus,
        int(record["expert"]),
        pipeline,
        int(record["virtual_pipeline"]),
        _SEQUENCE * size // tensor,
        _SEQUENCE,
        batches,
        dtype=record["precision"],
        dispatcher=_DISPATCHERS[record["dispatcher"]],
        num_sms=_NUM_SMS,
        overlap=_OVERLAP * int(record["overlap"]),
        tensor=tensor,
        recompute=again[0] if again in (["none"], ["full"]) else "moe" if "moe" in again else "none",
        cv_slow=CV_SLOW,
        iteration_graph=record["graphs"] == "iteration",
        mtp_layers=int(record["mtp"]),
        layout=record["layout"],
    )


# -- the fit --------------------------------------------------------------------------------------------------------

# Where it starts, several times over, for products and tensors can stand in for each other; and the most of each.
_STARTS = [Compute(gemm, passes, 4000.0, 400.0) for gemm in (0.4, 0.7) for passes in (2.0, 8.0, 16.0)]
_MOST = Compute(1.0, 100.0, 1e5, 1e5)
_WIDE = 0.1  # residuals beyond this count by their size, those within by their square


def fit(chosen: Iterable[Row] | None = None) -> Compute:
    """The numbers with which the rows (default: both halves) come out nearest: least of a loss that outliers move
    little, found by steps of one number at a time that get smaller, in logarithms. Deterministic; a few seconds."""
    return _fit(tuple(of_kind("fits") if chosen is None else chosen))


@lru_cache(maxsize=16)
def _fit(used: tuple[Row, ...]) -> Compute:

    @cache  # a way that turns asks again for where it was
    def loss(logs: _Numbers) -> float:
        fitted = Compute(*map(math.exp, logs))
        return sum(_loss(row, fitted) for row in used)

    found = [_descend(loss, _logs(astuple(start)), _logs(astuple(_MOST))) for start in _STARTS]
    best = min(found, key=loss)
    return Compute(*map(math.exp, best))


def fit_apart(chosen: Iterable[Row], name: str) -> dict[str, Compute]:
    """As `fit`, by precision class: bf16 has a number of its own in place of this of `Compute`, and shares the others
    with fp8. From where `fit` ends."""
    used = tuple(chosen)
    common = fit(used)

    def both(logs: _Numbers) -> dict[str, Compute]:
        *shared, own = map(math.exp, logs)
        return {"fp8": Compute(*shared), "bf16": replace(Compute(*shared), **{name: own})}

    @cache
    def loss(logs: _Numbers) -> float:
        fitted = both(logs)
        return sum(_loss(row, fitted[precision_class(row.job.dtype)]) for row in used)

    start, most = ((*astuple(numbers), getattr(numbers, name)) for numbers in (common, _MOST))
    return both(_descend(loss, _logs(start), _logs(most)))


def _loss(row: Row, fitted: Compute) -> float:
    error = math.log(row.predicted(fitted) / row.tokens_per_s) / _WIDE
    return math.sqrt(1 + error * error) - 1


def _logs(numbers: Iterable[float]) -> _Numbers:
    return tuple(map(math.log, numbers))


def of_half(half: int) -> Compute:
    """The numbers that one of `HALVES` gives."""
    return fit(row for row in of_kind("fits") if row.half == half)


_Numbers = tuple[float, ...]


def _descend(loss: Callable[[_Numbers], float], at: _Numbers, most: _Numbers) -> _Numbers:
    best, stride = loss(at), 0.5
    while stride > 1e-4:
        before = at
        for i in range(len(at)):
            for sign in (1, -1):
                tried = (*at[:i], min(at[i] + sign * stride, most[i]), *at[i + 1 :])
                if (there := loss(tried)) < best:
                    at, best = tried, there
                    break
        if at == before:
            stride /= 2
            continue
        # The same way once more, which a narrow valley needs.
        tried = tuple(min(2 * a - b, m) for a, b, m in zip(at, before, most, strict=True))
        if (there := loss(tried)) < best:
            at, best = tried, there
    return at


# -- what is said of a prediction -----------------------------------------------------------------------------------


def nearest(job: Job) -> Row:
    """The published row that a prediction is best compared with: the same GPU first, or else one of its architecture,
    then model, precision, size; of equally near ones the newest whose conditions are known."""
    return min(reversed(rows()), key=lambda row: (*distance(row, job), row.kind == "assumed", row.job != job))


def distance(row: Row, job: Job) -> tuple[int, bool, bool, float]:
    theirs, ours = row.job.cluster, job.cluster
    alike = theirs.gpu.generation == ours.gpu.generation
    same_host = efficiency.host_word(theirs) == efficiency.host_word(ours)
    return (
        0 if gpu_word(theirs) == gpu_word(ours) else 1 if alike and same_host else 2 if alike else 3,
        row.job.model.name != job.model.name,
        precision_class(row.job.dtype) != precision_class(job.dtype),
        abs(math.log(row.job.gpus / job.gpus)) + abs(math.log(row.job.ep / job.ep)),
    )


def launches_shown(job: Job) -> tuple[Row, float] | None:
    """The nearest row of the job's model, GPU and precision whose layers' launches are in its step, conditions known,
    and the launches of a layer with which the model gives its rate, microseconds: 0 where it is too slow without any.
    None where no row is such."""
    alike = [row for row in reversed(rows()) if distance(row, job)[:3] == (0, False, False)]
    alike = [row for row in alike if row.kind != "assumed" and not row.job.iteration_graph]
    if not alike:
        return None
    row = min(alike, key=lambda row: distance(row, job))
    host = row.job.host
    fitted = efficiency.layer_us_beside(host)
    without = 1 / row.predicted(efficiency.with_layer_us(host, 0.0))
    us = fitted * (1 / row.tokens_per_s - without) / (1 / row.predicted() - without)  # a step's time is linear in them
    return row, max(0.0, us)


def fastest(job: Job) -> Row | None:
    """The published row of this model, GPU and precision with most tokens/s a GPU; None where there is none."""
    return max((row for row in rows() if distance(row, job)[:3] == (0, False, False)), key=_rate, default=None)


def _rate(row: Row) -> float:
    return row.tokens_per_s


def said_of(job: Job) -> str:
    """The nearest row in a line and the fastest, where that is another, in one more; what the model says of both."""
    row, best = nearest(job), fastest(job)
    said = f"nearest published step: {_with_residual(row)}"
    if best is not None and best.tokens_per_s > 1.03 * row.tokens_per_s:
        said += f"\nfastest published of model, GPU and precision: {_with_residual(best)}"
    return said


def _with_residual(row: Row) -> str:
    fitted = " (the model is fitted to this configuration)"
    assumed = row.note.partition(";")[0] or "how it exchanged is assumed"
    notes = {"fits": fitted, "older": fitted, "assumed": f" ({assumed})"}
    return (
        f"{row}, {row.how}: {row.tokens_per_s:,.0f} tokens/s a GPU; this model says {row.predicted():,.0f} of it, "
        f"{percent(row.residual)}{notes[row.kind]}"
    )


def percent(residual: float) -> str:
    """With its sign, "+0%" for what rounds to nothing from either side."""
    return f"{round(residual, 2) + 0.0:+.0%}"


def spread(residuals: Iterable[float]) -> tuple[float, float]:
    """(median, worst) of their sizes."""
    sizes = sorted(map(abs, residuals))
    return sizes[len(sizes) // 2] if len(sizes) % 2 else sum(sizes[len(sizes) // 2 - 1 :][:2]) / 2, sizes[-1]
