"""What a GPU recipe comes to, in words: parameters, layout, memory of the fullest GPU, predicted step time."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from hybrid_ep.cli.outputs import count
from hybrid_ep.cli.simulate.job import command_of
from hybrid_ep.perf import deepep_rates, efficiency, recommend, step_time, training

from . import CLUSTER_RECIPES, layouts, memory
from .cluster import ClusterRun
from .modelled import job_of

_DEAR = 0.1  # of the step: launches worth a word
# What the event engine takes for our dispatch and combine on GB200, to what the model has that steps go by: all rows of
# docs/results/simulator-model.md together. Elsewhere the two agree better, and on both sides.
_SLOWER_ON_GRACE = 1.38
_CLOSE = 0.01  # two steps nearer than this are the same to a model with residuals of several per cent


def describe(run: ClusterRun) -> str:
    """Parameters, layout, memory and predicted step time. ValueError where it does not fit."""
    model, need = run.architecture, memory.check_fits(run)
    return "\n".join(
        [
            f"{run.recipe}: {model.total_params / 1e9:.2f} B parameters, {model.active_params / 1e9:.2f} B active "
            f"({model.source})",
            f"{count(run.num_hosts, 'host')} x {run.hardware.gpus_per_host} {run.hardware.gpu}: TP {run.tensor}, PP "
            f"{run.pipeline} x {run.virtual_pipeline}, EP {run.expert} in domains of {run.domain}, DP {run.data}; "
            f"{run.precision}, recompute {run.recompute}, "
            f"micro-batches {run.num_microbatches}, balance {run.balance}"
            + (f" with {run.clones} spare slots a rank ({memory.clone_bytes(run):,} bytes)" if run.clones else ""),
            f"fullest GPU (pipeline rank {need.stage}), {memory.budget_bytes(run) / 1e9:.1f} GB to use; hybrid_ep "
            f"registers {need.buffers:,} bytes:",
            str(need),
            predict(run),
        ]
    )


def as_json(run: ClusterRun) -> dict[str, Any]:
    """What `describe` says, for programs. step: None, with why_not, where the model cannot tell."""
    need, job, step, why_not = memory.check_fits(run), None, None, None
    try:
        job = job_of(run)
        step = step_time.step(job)
    except ValueError as error:
        why_not = str(error)
    return {
        "schema": "hybrid_ep.launch/1",
        "simulated": True,
        "recipe": run.recipe,
        "cluster": run.hardware.name,
        "nodes": run.num_hosts,
        "gpus": run.num_gpus,
        "parameters": run.architecture.total_params,
        "active_parameters": run.architecture.active_params,
        "layout": {
            **{name: getattr(run, name) for name in layouts.FIELDS},
            "ranks_per_domain": run.domain,
            "data": run.data,
            "micro_batches": run.num_microbatches,
        },
        "memory_bytes": {**asdict(need), "state": need.state, "total": need.total, "budget": memory.budget_bytes(run)},
        "step": step and asdict(step),
        "why_not": why_not,
        "assumes": _assumed(run, job) if job else [],
        "candidates": [asdict(c) for c in candidates(run, job)] if job else [],
        "same_by_another_verb": job and command_of(job),
    }


def predict(run: ClusterRun) -> str:
    """Step time by the performance model, with the assumptions it rests on, beside what the other dispatchers would
    take; says so where the model cannot tell."""
    try:
        job = job_of(run)
        step = step_time.step(job)
    except ValueError as error:
        return f"step time: no prediction ({error})"
    return "\n".join(
        [
            f"step time: {step.seconds:.2f} s, {step.tokens_per_s_per_gpu:,.0f} tokens/s and "
            f"{step.tflops_per_gpu:.0f} TFLOP/s a GPU (model, not measured); it assumes",
            *(f"  {assumption}" for assumption in _assumed(run, job)),
            training.said_of(job),
            *_of_launches(run, job, step),
            *_of_precision(run),
            *_side_by_side(run, job),
            f"the same by another verb: {command_of(job)}",
            f"among other layouts: {command_of(job, 'simulate --recommend')}",
            *_of_memory(run),
            f"those of them that fit: hybrid-ep launch {run.recipe} --cluster {run.hardware.name}{_nodes(run)} "
            "--layouts, with the same --set",
        ]
    )


def _assumed(run: ClusterRun, job: step_time.Job) -> list[str]:
    """What a predicted step rests on, one assumption a line."""
    rows = ", their rows dispatched again" if run.dispatcher == "hybrid_ep" else ", their exchange too"
    again = {
        "none": "what is recomputed counted as free" if run.recompute_modules else "",
        "moe": f"experts computed twice{rows}",
        "full": f"all layers computed twice{rows}",
    }[job.recompute]
    return [
        step_time.said_of_compute(job),
        *([again] if again else []),
        f"{job.overlap:.0%} of the exchange hidden" if run.overlap else "no exchange hidden",
        "no load imbalance",
        f"nodes that differ by {job.cv_slow:.1%}",
    ]


def _nodes(run: ClusterRun) -> str:
    """The flag that asks for the run's hosts, where they are not the recipe's."""
    theirs = CLUSTER_RECIPES[run.recipe](run.hardware.name).num_hosts
    return "" if run.num_hosts == theirs else f" --nodes {run.num_hosts}"


def _of_precision(run: ClusterRun) -> list[str]:
    """With the balancer experts are ours, whose quantising nobody has timed."""
    if run.precision != "fp8" or run.balance == "off":
        return []
    return [
        "experts in fp8 are the balancer's grouped GEMMs, taken for Transformer Engine's here: quantising rows and "
        "weights for every product is not counted"
    ]


def _of_memory(run: ClusterRun) -> list[str]:
    """What of the run's memory the other verbs know nothing of."""
    unknown = [
        *(["clones of the balancer"] if run.clones else []),
        *(["Megatron-FSDP's shards"] if run.sharding == "megatron_fsdp" else []),
        *([f"domains of {run.ranks_per_node} ranks"] if run.ranks_per_node else []),
    ]
    return [f"memory there: as above, but without {' and '.join(unknown)}"] if unknown else []


def _of_launches(run: ClusterRun, job: step_time.Job, step: step_time.Step) -> list[str]:
    """What a larger micro-batch would take, with more recompute where it needs that: it pays for its launches once.
    What launches cost is the least certain of the fitted numbers, so with those of the nearest published step too."""
    share = step.shares["launches"]
    if share < _DEAR:
        return []
    said, found = f"launches of layers are {share:.0%} of the step: ", layouts.with_larger_micro_batches(run)
    if not found:
        again = "and overlap allows no more recompute" if run.overlap else "whatever is recomputed"
        return [f"{said}no larger micro_batch_size fits memory and batch, {again}"]
    best = min(found, key=lambda layout: layout.seconds)
    if best.seconds >= step.seconds:
        return [f"{said}a larger micro_batch_size that fits is not predicted to be faster"]
    words = layouts.set_words(best.changes(run))
    return [
        f"{said}{words} fits and is predicted to take {best.seconds:.2f} s",
        *_with_launches_shown(job, job_of(best.run)),
    ]


def _with_launches_shown(own: step_time.Job, advised: step_time.Job) -> list[str]:
    """What both would take if launches cost what the nearest published step has for them; where there is none, that
    the advice rests on the fitted number alone."""
    shown = training.launches_shown(own)
    if shown is None:
        return [
            "  no published step of this model, GPU and precision shows what launches cost there: measure before you "
            "take it"
        ]
    row, us = shown
    fitted = efficiency.with_layer_us(own.host, us)
    one, other = (step_time.step(job, fitted=fitted).seconds for job in (own, advised))
    said = (
        f"  with {us / 1e3:.1f} ms of launches a layer, with which the model gives the step of {row}, "
        f"it would take {other:.2f} s, and the run as it is {one:.2f} s"
    )
    return [said if other < (1 - _CLOSE) * one else f"{said}: measure before you take it"]


@dataclass(frozen=True)
class Candidate:
    """A way to move the tokens and what the model says of it. change: what --set would choose it; "" for the run's own,
    None for what recipes cannot start. exchange_us: dispatch and combine of one layer. rate: where it is from, of what
    has no model."""

    name: str
    num_sms: int
    change: str | None
    seconds: float
    exchange_us: float
    rate: str = ""


def candidates(run: ClusterRun, job: step_time.Job) -> list[Candidate]:
    """Those that are modelled on this hardware, the run's own first: hybrid_ep with its SMs and with those that the
    model would take, Megatron's alltoall, and DeepEP V1 where a rate is published that the exchange could have."""
    mine = "" if run.dispatcher == "hybrid_ep" else "dispatcher=hybrid_ep"
    tuned = recommend.tuned(job).num_sms
    more = " ".join(filter(None, [mine, f"num_sms={tuned}"]))
    wanted: list[tuple[str, str, int, str | None]] = [
        ("hybrid_ep", "hybrid_ep", job.num_sms, mine),
        ("alltoall", "a2a", 0, "" if run.dispatcher == "alltoall" else "dispatcher=alltoall"),
    ]
    if tuned != job.num_sms:
        wanted.append(("hybrid_ep", "hybrid_ep", tuned, more))
    if job.ep > 1:
        wanted.append(("deepep_v1", "deepep_v1", deepep_rates.NUM_SMS, None))
    found = []
    for name, dispatcher, num_sms, change in sorted(wanted, key=lambda w: w[3] != ""):
        try:
            rows = job.dispatch_dtype if dispatcher == "hybrid_ep" else "bf16"
            other = replace(job, dispatcher=dispatcher, num_sms=num_sms or job.num_sms, dispatch_dtype=rows)
            step = step_time.step(other)
        except ValueError:  # the model has no rate of it on this hardware
            continue
        rate = deepep_rates.rate("dispatch", job.shape, job.cluster.name).said if dispatcher == "deepep_v1" else ""
        found.append(Candidate(name, num_sms, change, step.seconds, step.exchange_us, rate))
    return found


def _side_by_side(run: ClusterRun, job: step_time.Job) -> list[str]:
    """The table of the candidates, and a warning where another dispatcher is faster than the run's own."""
    found = candidates(run, job)
    lines = [f"  {'tokens by':<10}{'SMs':>5}{'step s':>9}{'exchange us':>13}"]
    for c in found:
        what = (
            "as it is"
            if c.change == ""
            else "recipes do not start it"
            if c.change is None
            else "--set " + " --set ".join(c.change.split())
        )
        what += f"; rate of {c.rate}" if c.rate else ""
        lines.append(f"  {c.name:<10}{c.num_sms or '-':>5}{c.seconds:>9.2f}{c.exchange_us:>13.0f}  {what}")
    own = found[0]
    rival = min((c for c in found if c.name != own.name), key=lambda c: c.seconds, default=own)
    if not any(c.name == "deepep_v1" for c in found):
        lines.append(f"  {'deepep_v1':<10}{'-':>5}{'-':>9}{'-':>13}  no rate of it is published for this")
    if rival.seconds < (1 - _CLOSE) * own.seconds:
        best, change = min(((c, c.change) for c in found if c.change is not None), key=lambda c: c[0].seconds)
        remedy = (
            "no --set makes it faster"
            if best is own
            else "--set " + " --set ".join(change.split()) + (f" is predicted to take {best.seconds:.2f} s")
        )
        lines.append(
            f"WARNING: {rival.name} is predicted faster than {own.name} as it is here, {rival.seconds:.2f} s "
            f"against {own.seconds:.2f} s; {remedy}"
        )
    return [*lines, *_within_the_engines_gap(job, found)]


def _within_the_engines_gap(job: step_time.Job, found: list[Candidate]) -> list[str]:
    """A line where ours leads by less than the event engine is slower than the model."""
    ours = min((c for c in found if c.name == "hybrid_ep"), key=lambda c: c.seconds)
    other = min((c for c in found if c.name != "hybrid_ep"), key=lambda c: c.seconds)
    if job.host != "Grace" or not ours.seconds < other.seconds:
        return []
    step = step_time.step(replace(job, dispatcher="hybrid_ep", num_sms=ours.num_sms))
    slower = step.seconds * (1 + (_SLOWER_ON_GRACE - 1) * step.shares["exchange"])
    if other.seconds >= slower:
        return []
    return [
        f"hybrid_ep's lead over {other.name} is within the model's error: the event engine takes {_SLOWER_ON_GRACE} "
        f"times the model's exchange on GB200, with which hybrid_ep would take {slower:.2f} s; measure both"
    ]
