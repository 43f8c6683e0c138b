"""One training job, asked about in one way: its flags, the perf.step_time.Job they make, the command that asks again.

`hybrid-ep launch`, `simulate --recommend` and `report scaling --simulate` all answer with the step model about such a
Job; `command_of` prints the line that gives the same answer, so that nobody has to guess which inputs differed."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Collection
from typing import Any

from hybrid_ep.cli import UsageError, names
from hybrid_ep.cli.parser import one_of
from hybrid_ep.hardware import clusters
from hybrid_ep.perf import job_fields, models, recommend
from hybrid_ep.perf.shape import DTYPES
from hybrid_ep.perf.step_time import CV_SLOW, DISPATCHERS, Job

_ADVICE = "simulate --recommend"  # where SMs are the model's choice, and EP says that a job is meant
# flag: (field of Job, type, default, help)
_FLAGS: dict[str, tuple[str, Any, Any, str]] = {
    "--ep": ("ep", int, 8, "expert parallel size"),
    "--pp": ("pp", int, 1, "pipeline stages"),
    "--virtual-pp": ("virtual_pp", int, 1, "model chunks of a stage, interleaved"),
    "--tensor": ("tensor", int, 1, "tensor parallel size, with sequence parallelism"),
    "--tokens": ("tokens", int, 4096, "of a rank and micro-batch"),
    "--sequence": ("sequence", int, 4096, "tokens of a sequence, for the FLOPs of attention"),
    "--micro-batches": ("micro_batches", int, 32, "of the smallest job's step"),
    "--num-sms": ("num_sms", int, 0, "SMs of each operation; 0 = as suggested"),
    "--overlap": ("overlap", float, 0.0, "share of the exchange hidden behind compute"),
    "--cv-slow": ("cv_slow", float, CV_SLOW, "variation of speed between nodes"),
}
_CHOICES = {
    "--precision": ("dtype", job_fields.PRECISIONS, "bf16", "of the GEMMs: their share of the GPU's peak"),
    "--dispatch-dtype": ("dispatch_dtype", DTYPES, "bf16", "of rows dispatched in the forward"),
    "--moments": ("moments", job_fields.MOMENTS, "fp32", "of Adam, as launch has them; for memory"),
    "--fp8-params": (
        "fp8_params",
        job_fields.FP8_PARAMS,
        "auto",
        "weights kept in 8 bits alone, as launch has it; auto: with mxfp8; for memory",
    ),
}
# Whose values have other names in the step model: (field of Job, type, default, metavar, help).
_NAMES: dict[str, tuple[str, Any, Any, str, str]] = {
    "--recompute": (
        "recompute",
        names.recompute,
        "selective",
        "WHAT",
        "none, selective, full or modules, as launch has them. full: every layer's forward and its exchange twice; "
        "moe: the experts' and the exchange; other modules, and selective, save memory and take no time here",
    ),
    "--dispatcher": (
        "dispatcher",
        names.dispatcher_of(DISPATCHERS),
        "hybrid_ep",
        "NAME",
        f"who moves the tokens: one of {', '.join(map(names.dispatcher, DISPATCHERS))}",
    ),
    "--pipeline-layout": (
        "layout",
        str,
        "",
        "LAYOUT",
        "layers of the pipeline's chunks as Megatron writes them, 'Et*4|(tttt|)*14tmL'; equal stages by default",
    ),
}
_FIELDS = {
    **{flag: (field, default) for flag, (field, _, default, _) in {**_FLAGS, **_CHOICES}.items()},
    **{flag: (field, default) for flag, (field, _, default, *_) in _NAMES.items()},
}

FLAGS = tuple(_FIELDS)
# Of errors, as cli.arguments takes them.
ARGUMENTS = {**{field: f"{flag} " for flag, (field, _) in _FIELDS.items()}, "gpus": "--gpus ", "cluster": "--cluster "}


def add_flags(add: Any, of: str, besides: Collection[str] = ()) -> None:
    """Adds every flag of a job but model, cluster, GPUs and those that are there. add: a parser's add_argument; of:
    the flag that they belong to."""
    for flag, (_, kind, default, what) in _FLAGS.items():
        if flag not in besides:
            add(flag, type=kind, default=default, help=f"of {of}: {what}")
    for flag, (_, choices, default, what) in _CHOICES.items():
        if flag not in besides:
            add(flag, default=default, **one_of(choices, f"of {of}: {what}"))
    for flag, (_, kind, default, metavar, what) in _NAMES.items():
        if flag not in besides:
            add(flag, type=kind, default=default, metavar=metavar, help=f"of {of}: {what}")


def check_precision(args: argparse.Namespace) -> None:
    """UsageError where the cluster's GPUs have no such GEMMs: said before a search for what fits."""
    gpu = clusters.get(args.cluster).gpu
    if args.precision == "mxfp8" and not gpu.has_mxfp8:
        raise UsageError(f"--precision mxfp8: {gpu.name} has no mxfp8 tensor cores; give --precision fp8 or bf16")


def from_flags(args: argparse.Namespace, model: str, gpus: int) -> Job:
    """Without --num-sms with the SMs that the model would take. UsageError or ValueError names flag or argument, value
    and remedy."""
    given = {field: getattr(args, flag[2:].replace("-", "_")) for flag, (field, _) in _FIELDS.items()}
    for flag, (field, kind, default, _) in _FLAGS.items():
        least = min(default, 1)
        if kind is int and given[field] < least:
            raise UsageError(f"{flag} {given[field]}: must be at least {least}")
    check_precision(args)
    given |= recompute(args, model)
    given["dispatcher"] = names.modelled_dispatcher(given["dispatcher"])
    given["num_sms"] = given["num_sms"] or 1
    job = Job(models.get(model), clusters.get(args.cluster), gpus, **given)
    return job if args.num_sms else recommend.tuned(job)


def recompute(args: argparse.Namespace, model: str) -> dict[str, Any]:
    """The fields of a Job that --recompute says."""
    modules = job_fields.recompute_modules(args.recompute, models.get(model).latent)
    return {"recompute": job_fields.modelled_recompute(args.recompute), "recompute_modules": modules}


def given(args: argparse.Namespace, flags: Collection[str]) -> list[str]:
    """Those of a job's flags that are not at their defaults."""
    return [flag for flag in flags if getattr(args, flag[2:].replace("-", "_")) != _FIELDS[flag][1]]


def command_of(job: Job, verb: str = "report scaling --simulate") -> str:
    """The command whose first row is this job's step and memory, or with "simulate --recommend" whose row "yours" is;
    flags at their defaults are left out."""
    words = [f"hybrid-ep {verb} {job.model.name} --cluster {job.cluster.name} --gpus {job.gpus}"]
    if verb == _ADVICE:
        words.append(f"--ep {job.ep} --num-sms {job.num_sms}")
    for flag, (field, default) in _FIELDS.items():
        value = getattr(job, field)
        if flag == "--recompute":
            value = job_fields.said_recompute(job.recompute, job.recompute_modules, job.model.latent)
        if flag == "--fp8-params" and job.keeps_fp8_params == job_fields.keeps_fp8_params(job.dtype, default):
            value = default
        if value != default and not (verb == _ADVICE and flag in ("--ep", "--num-sms")):
            value = names.dispatcher(value) if flag == "--dispatcher" else value
            words.append(f"{flag} {value:g}" if isinstance(value, float) else f"{flag} {shlex.quote(str(value))}")
    return " ".join(words if verb == _ADVICE else [*words, "--mode weak"])
