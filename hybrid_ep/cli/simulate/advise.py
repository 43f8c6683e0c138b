"""`--recommend`: the plans that fit, fastest first, and why; beside them a job of yours, where its layout is given."""

from __future__ import annotations

import argparse
import functools
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any, NoReturn

from hybrid_ep.cli import names, outputs
from hybrid_ep.cli.progress import track
from hybrid_ep.cli.simulate import job as job_flags
from hybrid_ep.cli.simulate.job import command_of
from hybrid_ep.hardware.clusters import Cluster
from hybrid_ep.perf import models, recommend, step_time, training
from hybrid_ep.perf.models import MoeModel
from hybrid_ep.perf.recommend import Plan

_GPUS_OF_A_HOST = 8
_TRIED = 1024  # numbers of hosts below and above; each takes a fraction of a millisecond


def run(args: argparse.Namespace, cluster: Cluster) -> dict[str, Any]:
    """Prints the plans; returns them. ValueError when --gpus is missing or nothing fits."""
    if args.gpus is None:
        raise ValueError("--recommend needs --gpus N, the GPUs of the whole job")
    model = models.get(args.recommend)
    own = _own(args)
    job: dict[str, Any] = {
        "dtype": args.precision,
        "recompute": names.modelled_recompute(args.recompute),
        "cv_slow": args.cv_slow,
        "tokens": args.tokens,
        "overlap": args.overlap,
        "sequence": args.sequence,
    }
    job_flags.check_precision(args)
    _check_gpus(model, cluster, args.gpus, args.precision)
    plans = recommend.recommend(model, cluster, args.gpus, watch=functools.partial(track, what="layouts"), **job)
    _say(
        f"# {model.name} on {args.gpus} x {cluster.gpu.name} ({cluster.name}), {args.tokens} tokens a rank and "
        f"micro-batch, {args.precision}, recompute {names.said_of_recompute(args.recompute)}, {args.overlap:.0%} of "
        "what moves hidden"
    )
    print("#    EP  PP  ranks/node  SMs  chunk  dtype  moves    exchange us  tokens/s/GPU  state GB; below it why")
    for rank, p in enumerate(plans):
        print(
            f"{rank + 1:2d} {p.ep:5d} {p.pp:3d} {p.ranks_per_node:11d} {p.num_sms or '-':>4} {p.chunk or '-':>6}  "
            f"{p.dispatch_dtype:<6} {p.move:<8} {p.exchange_us:11.0f} {p.tokens_per_s_per_gpu:13.0f} "
            f"{p.state_gb:9.1f}"
        )
        _say(f"      {p.why}")
    best = plans[0]
    yours = _yours(own, best) if own else None
    if best.move != "weights":  # of which the step model knows no job
        asked = recommend.job_of(
            model,
            cluster,
            args.gpus,
            best.ep,
            best.pp,
            **job,
            num_sms=best.num_sms or 1,
            dispatch_dtype=best.dispatch_dtype,
        )
        print(f"# the first by another verb: {command_of(asked, recompute=args.recompute)}")
    _say(f"# state GB: {recommend.STATE_HOLDS}, which hybrid-ep launch counts too; weights that move: two layers more")
    sure = recommend.job_of(model, cluster, args.gpus, best.ep, best.pp, **job)
    _say(f"# tokens/s/GPU with {step_time.said_of_compute(sure)}; differences between plans mean more than the number")
    for line in training.said_of(own or sure).splitlines():
        _say(f"# {line}")
    return {
        "model": model.name,
        "cluster": cluster.name,
        "gpus": args.gpus,
        **job,
        "plans": [asdict(p) for p in plans],
        "yours": yours,
    }


def _say(line: str) -> None:
    print(outputs.narrowed(line))


class _Fits(Exception):
    """There is a layout, and none need be timed."""


def _fits(model: MoeModel, cluster: Cluster, gpus: int, precision: str) -> str:
    """Why no layout fits so many GPUs; empty where one does."""

    def seen(_layouts: Iterable[Any]) -> NoReturn:
        raise _Fits

    try:
        recommend.recommend(model, cluster, gpus, watch=seen, dtype=precision)
    except _Fits:
        return ""
    except ValueError as error:
        return str(error)
    return ""


def _check_gpus(model: MoeModel, cluster: Cluster, gpus: int, precision: str) -> None:
    """ValueError with the nearest numbers of GPUs that a layout fits: more of them is no remedy where EP x PP does not
    divide them."""
    if gpus < 1:
        raise ValueError(f"--gpus {gpus}: must be at least 1")
    if not (reason := _fits(model, cluster, gpus, precision)):
        return
    at = gpus - gpus % _GPUS_OF_A_HOST
    down = range(at - (at == gpus) * _GPUS_OF_A_HOST, 0, -_GPUS_OF_A_HOST)
    up = range(at + _GPUS_OF_A_HOST, at + _TRIED * _GPUS_OF_A_HOST, _GPUS_OF_A_HOST)
    nearest = [
        next((n for n in numbers[:_TRIED] if not _fits(model, cluster, n, precision)), None) for numbers in (down, up)
    ]
    fitting = " or ".join(f"--gpus {n}" for n in nearest if n)
    remedy = f"give {fitting}, the nearest that fit" if fitting else "give a --cluster with more memory"
    raise ValueError(f"{reason.removesuffix('; take more')}; EP x PP must divide the GPUs: {remedy}")


def _own(args: argparse.Namespace) -> step_time.Job | None:
    """The job whose layout the flags give, with the SMs that the model would take where none are given."""
    if args.ep is None:
        if flags := job_flags.given(
            args,
            (
                "--pp",
                "--virtual-pp",
                "--pipeline-layout",
                "--tensor",
                "--micro-batches",
                "--dispatcher",
                "--dispatch-dtype",
                "--num-sms",
            ),
        ):
            raise ValueError(
                f"{' '.join(flags)}: the plans have their own; give --ep too for a job of yours beside them"
            )
        return None
    return job_flags.from_flags(args, args.recommend, args.gpus)


def _yours(job: step_time.Job, best: Plan) -> dict[str, Any]:
    """Prints its row."""
    got = step_time.step(job)
    slower = best.tokens_per_s_per_gpu / got.tokens_per_s_per_gpu - 1
    sms = job.num_sms if job.dispatcher == "hybrid_ep" else "-"
    print(
        f"yours {job.ep:2d} {job.pp:3d} {job.shape.ranks_per_node:11d} {sms:>4} {'-':>6}  {job.dispatch_dtype:<6} "
        f"{'tokens':<8} {got.exchange_us:11.0f} {got.tokens_per_s_per_gpu:13.0f} "
        f"{recommend.state_gb(job):9.1f}"
    )
    _say(
        f"      {slower:+.1%} step time, {got.seconds:.2f} s with {names.dispatcher(job.dispatcher)}, TP {job.tensor}, "
        f"virtual stages {job.virtual_pp}, micro-batches {job.micro_batches}"
    )
    return {
        "step_s": got.seconds,
        "tokens_per_s_per_gpu": got.tokens_per_s_per_gpu,
        "exchange_us": got.exchange_us,
        "state_gb": recommend.state_gb(job),
    }
