"""Published end-to-end rows beside the step model, and what a call costs beside its bytes. What rows do not say of
themselves one of a pair sets, and the other tests it."""

from __future__ import annotations

import csv
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from hybrid_ep.hardware import clusters
from hybrid_ep.perf import models, routing
from hybrid_ep.perf.step_time import Job, step

CSV = Path(__file__).parent / "data" / "published_end_to_end.csv"


def calibrate(value: float, predicted: Callable[[float], float], low: float, high: float) -> float:
    """The input with which an increasing prediction equals value. ValueError outside low .. high."""
    if not predicted(low) <= value <= predicted(high):
        raise ValueError(f"{value} is not between {predicted(low):.4g} and {predicted(high):.4g}")
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if predicted(middle) < value else (low, middle)
    return (low + high) / 2


@dataclass(frozen=True)
class EndToEnd:
    """A published end-to-end row and the model's answer; `calibrates`: an input was set by this very row."""

    source: str
    job: Job
    unit: str
    value: float
    predicted: float
    calibrates: bool
    note: str

    @property
    def residual(self) -> float:
        return self.predicted / self.value - 1


# The public recipes give EP and sometimes PP; what they do not give is taken alike on both sides of a pair.
_PP = {("deepseek_v3", 64): 4, ("qwen3_235b_a22b", 32): 8}


def published_rows() -> list[EndToEnd]:
    """All rows. A row with a reference takes its compute efficiency from that row; torchtitan's rows take the
    variation between nodes from the 128-GPU row. Nothing else is set by a row."""
    with CSV.open(newline="") as file:
        records = list(csv.DictReader(file))
    jobs: list[Job] = []
    answered: list[EndToEnd] = []
    for record in records:
        job = _job(record)
        if record["reference"]:
            job = replace(job, efficiency=jobs[int(record["reference"])].efficiency)
        else:
            job = _with_efficiency(job, record["unit"], float(record["value"]))
        jobs.append(job)
    # increasing prediction: less variation is faster
    last = max(i for i, r in enumerate(records) if "torchtitan" in r["source"])
    cv = -calibrate(
        float(records[last]["value"]),
        lambda x: _in_unit(replace(jobs[last], cv_slow=-x), records[last]["unit"]),
        -0.5,
        0.0,
    )
    for index, (record, job) in enumerate(zip(records, jobs, strict=True)):
        if "torchtitan" in record["source"]:
            job = replace(job, cv_slow=cv)
        answered.append(
            EndToEnd(
                record["source"],
                job,
                record["unit"],
                float(record["value"]),
                _in_unit(job, record["unit"]),
                not record["reference"] or index == last,
                record["note"],
            )
        )
    return answered


def _job(record: dict[str, str]) -> Job:
    name = {"hybrid_ep": "published_hybrid_ep"}.get(record["dispatcher"], record["dispatcher"])
    ep = int(record["ep"])
    return Job(
        models.get(record["model"]),
        clusters.get(record["cluster"]),
        int(record["gpus"]),
        ep,
        pp=_PP.get((record["model"], ep), 1),
        virtual_pp=4,
        dtype=record["dtype"],
        dispatcher=name,
        num_sms=32,
    )  # the public recipes' --moe-hybridep-num-sms


def _in_unit(job: Job, unit: str) -> float:
    got = step(job)
    return got.tflops_per_gpu if unit.startswith("TFLOPS") else got.tokens_per_s_per_gpu


def _with_efficiency(job: Job, unit: str, value: float) -> Job:
    found = calibrate(value, lambda e: _in_unit(replace(job, efficiency=e), unit), 0.01, 1.0)
    return replace(job, efficiency=found)


# awslabs, Qwen3-235B, EP32 on B300, TP8 with sequence parallelism, 94 layers over 2 stages: micro-batches, seconds of a
# step with a flat exchange and with one that deduplicates by node, by size of a micro-batch; 94 of 100 GB/s a GPU.
_AWSLABS = {4: (16, 15.76, 19.16), 1: (64, 33.36, 46.88)}


@dataclass(frozen=True)
class FixedCost:
    """What a call costs beside its bytes, from one measured pair, and what that says about another pair."""

    fixed_us: float
    published_s: float
    predicted_s: float


def fixed_cost_check() -> FixedCost:
    """Fixed cost a call of the deduplicating exchange from the pair at micro-batch 4, and with it the difference at
    micro-batch 1. Bytes alone have the wrong sign: dedup should have been faster both times."""
    m, nodes, layers, calls_a_layer = models.get("qwen3_235b_a22b"), 4, 47, 4

    def saved_s(size: int, micro_batches: int) -> float:
        rows = 2048 * size / 4 * (m.topk - routing.distinct(nodes, m.experts, m.topk)) * (1 - 1 / nodes)
        return rows * m.hidden * 2 / 94e9 * micro_batches * layers * calls_a_layer

    batches, flat_s, dedup_s = _AWSLABS[4]
    fixed = (dedup_s - flat_s + saved_s(4, batches)) / (batches * layers * calls_a_layer)
    batches, flat_s, dedup_s = _AWSLABS[1]
    predicted = fixed * batches * layers * calls_a_layer - saved_s(1, batches)
    return FixedCost(fixed * 1e6, dedup_s - flat_s, predicted)
