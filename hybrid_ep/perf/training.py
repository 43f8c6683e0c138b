"""Published training steps beside the step model: half of them set the compute efficiency, half say how well it does.

The rows are Megatron Bridge's performance summaries and Megatron-LM's MoE recipes: dropless, experts force-balanced.
What they do not say is taken alike for all: our exchange with 32 SMs, nothing hidden, no recompute; so a row's
efficiency also holds what its recompute and its launches cost, and small models, whose GEMMs are narrow, have the
lowest.

Rows of releases after those stand in a table of their own, `later()`. They set nothing: what the same model says of
software that is newer than its numbers is what they are there to show."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

from hybrid_ep.hardware import clusters
from hybrid_ep.perf import efficiency, models
from hybrid_ep.perf.efficiency import STANDS_IN, gpu_word, precision_class
from hybrid_ep.perf.step_time import CV_SLOW, Job, calibrate, step

_DATA = Path(__file__).parent / "data"
CSV, LATER = _DATA / "published_training.csv", _DATA / "published_training_later.csv"
_SEQUENCE = 4096
_NUM_SMS = 32


@dataclass(frozen=True)
class Row:
    """One published step. tokens_per_s: of a GPU. fits: it is one of those that set the efficiency of its group."""

    source: str
    job: Job
    tokens_per_s: float
    fits: bool

    @property
    def group(self) -> tuple[str, str]:
        return gpu_word(self.job.cluster), precision_class(self.job.dtype)

    def predicted(self) -> float:
        """Tokens/s of a GPU with the efficiency of its group, or of the GPU that stands in for it."""
        share = efficiency.of(self.job.cluster, self.job.dtype).share
        return step(replace(self.job, efficiency=share)).tokens_per_s_per_gpu

    def __str__(self) -> str:
        j = self.job
        return (
            f"{j.model.name} on {j.gpus} {gpu_word(j.cluster)}, {j.dtype}, EP {j.ep}, PP {j.pp}, TP {j.tensor} "
            f"({self.source})"
        )


@lru_cache(maxsize=1)
def rows() -> tuple[Row, ...]:
    """Those of the first releases, in the file's order; of every group the first, third, .. set its efficiency."""
    found: list[Row] = []
    for row in _read(CSV):
        earlier = sum(r.group == row.group for r in found)
        found.append(replace(row, fits=earlier % 2 == 0))
    return tuple(found)


@lru_cache(maxsize=1)
def later() -> tuple[Row, ...]:
    """Those of later releases, oldest first. None sets an efficiency."""
    return tuple(_read(LATER))


def _read(path: Path) -> Iterator[Row]:
    with path.open(newline="") as file:
        for record in csv.DictReader(file):
            job = _job(record)
            value = float(record["value"])
            if record["unit"] == "TFLOPS":
                value *= 1e12 / job.model.train_flops_per_token(_SEQUENCE)
            yield Row(record["source"], job, value, False)


def _job(record: dict[str, str]) -> Job:
    gpus, tensor, pipeline, size = (int(record[k]) for k in ("gpus", "tensor", "pipeline", "micro_batch"))
    batches = int(record["global_batch"]) // (gpus // (tensor * pipeline) * size)
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
        num_sms=_NUM_SMS,
        tensor=tensor,
        cv_slow=CV_SLOW,
    )


def fit(group: tuple[str, str]) -> float:
    """The efficiency of a group from the rows that set it: their geometric mean."""
    found = [_fitted(row) for row in rows() if row.fits and row.group == group]
    return math.exp(sum(map(math.log, found)) / len(found))


def _fitted(row: Row) -> float:
    """The efficiency with which the model gives the row's own rate."""
    return calibrate(row.tokens_per_s, lambda e: step(replace(row.job, efficiency=e)).tokens_per_s_per_gpu, 0.005, 1.0)


def nearest(job: Job) -> Row:
    """The published row that a prediction is best compared with: the same GPU first, or else that whose efficiency is
    taken, then model, precision, size; of equally near ones the newest."""
    return min((*reversed(later()), *reversed(rows())), key=lambda row: distance(row, job))


def distance(row: Row, job: Job) -> tuple[int, bool, bool, float]:
    gpu, precision = gpu_word(job.cluster), precision_class(job.dtype)
    near = [gpu, STANDS_IN.get((gpu, precision), gpu)]
    theirs = gpu_word(row.job.cluster)
    return (
        near.index(theirs) if theirs in near else len(near),
        row.job.model.name != job.model.name,
        precision_class(row.job.dtype) != precision_class(job.dtype),
        abs(math.log(row.job.gpus / job.gpus)) + abs(math.log(row.job.ep / job.ep)),
    )


def said_of(job: Job) -> str:
    """The nearest row in a line, and what the model says of that row."""
    row = nearest(job)
    published, predicted = row.tokens_per_s, row.predicted()
    return (
        f"nearest published step: {row}: {published:,.0f} tokens/s a GPU; this model says {predicted:,.0f} of it, "
        f"{percent(predicted / published - 1)}{' (it is among the rows that set the efficiency)' if row.fits else ''}"
    )


def percent(residual: float) -> str:
    """With its sign, "+0%" for what rounds to nothing from either side."""
    return f"{round(residual, 2) + 0.0:+.0%}"


def spread(chosen: Iterable[Row]) -> tuple[float, float]:
    """(median, worst) of the residuals' sizes."""
    sizes = sorted(abs(row.predicted() / row.tokens_per_s - 1) for row in chosen)
    return sizes[len(sizes) // 2] if len(sizes) % 2 else sum(sizes[len(sizes) // 2 - 1 :][:2]) / 2, sizes[-1]
