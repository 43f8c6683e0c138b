"""`--recommend`: the plans that fit, fastest first, and why; beside them a job of yours, where its layout is given."""

from __future__ import annotations

import argparse
import functools
from dataclasses import asdict, replace
from fractions import Fraction
from typing import Any

from hybrid_ep.cli import names, outputs
from hybrid_ep.cli.progress import track
from hybrid_ep.cli.simulate import job as job_flags
from hybrid_ep.cli.simulate.job import command_of
from hybrid_ep.hardware.clusters import Cluster
from hybrid_ep.perf import memory, models, recommend, step_time, training
from hybrid_ep.perf.models import MoeModel
from hybrid_ep.perf.recommend import Plan

_GPUS_OF_A_HOST = 8
_COLUMNS = "#    EP  PP x VPP  TP  ranks/node  SMs  chunk  dtype  moves   exchange us  tokens/s/GPU  state GB  total GB"


def run(args: argparse.Namespace, cluster: Cluster) -> dict[str, Any]:
    """Prints the plans; returns them. ValueError when --gpus is missing or nothing fits."""
    if args.gpus is None:
        raise ValueError("--recommend needs --gpus N, the GPUs of the whole job")
    model = models.get(args.recommend)
    own = _own(args)
    job: dict[str, Any] = {
        "dtype": args.precision,
        **job_flags.recompute(args, model.name),
        "moments": args.moments,
        "fp8_params": args.fp8_params,
        "cv_slow": args.cv_slow,
        "tokens": args.tokens * own.tensor if own else args.tokens,
        "overlap": args.overlap,
        "sequence": args.sequence,
        "batches": Fraction(own.micro_batches, own.pp * own.tensor) if own else recommend.BATCHES,
    }
    job_flags.check_precision(args)
    watch = functools.partial(track, what="layouts")
    try:
        plans = recommend.recommend(model, cluster, args.gpus, watch=watch, **job)
    except ValueError as error:
        raise ValueError(_remedied(str(error), model, cluster, args.gpus, job)) from None
    _show(args, model, cluster, plans, job, own)
    best = plans[0]
    yours = _yours(own, best) if own else None
    sure = recommend.job_of(model, cluster, args.gpus, best.ep, best.pp, best.tensor, **job)
    assert sure is not None
    if best.move != "weights":  # of which the step model knows no job
        asked = replace(sure, num_sms=best.num_sms or 1, dispatch_dtype=best.dispatch_dtype)
        print(f"# the first by another verb: {command_of(asked)}")
    _say(
        f"# state GB: {memory.STATE_HOLDS} of the fullest GPU; total GB: with activations and buffers, as hybrid-ep "
        f"launch counts them, of {memory.budget_bytes(cluster) / 1e9:.1f} ({memory.RESERVE:.0%} is left free); weights "
        "that move: two layers more, and no buffers"
    )
    _say(f"# tokens/s/GPU with {step_time.said_of_compute(sure)}; differences between plans mean more than the number")
    for line in training.said_of(own or sure).splitlines():
        _say(f"# {line}")
    return {
        "model": model.name,
        "cluster": cluster.name,
        "gpus": args.gpus,
        **{name: value for name, value in job.items() if name != "batches"},
        "tokens_per_step": _tokens_per_step(args.gpus, job),
        "plans": [asdict(p) for p in plans],
        "yours": yours,
    }


def _gb(state: int, total: int) -> str:
    return f" {state / 1e9:9.2f} {total / 1e9:9.2f}"


def _tokens_per_step(gpus: int, job: dict[str, Any]) -> int:
    """Of the whole job."""
    return int(gpus * job["batches"] * job["tokens"])


def _show(
    args: argparse.Namespace,
    model: MoeModel,
    cluster: Cluster,
    plans: list[Plan],
    job: dict[str, Any],
    own: step_time.Job | None,
) -> None:
    """Prints what is asked and the table of the plans."""
    whose = "yours" if own else f"{recommend.BATCHES} micro-batches a GPU, the default"
    _say(
        f"# {model.name} on {args.gpus} x {cluster.gpu.name} ({cluster.name}), {job['tokens']} tokens a "
        f"micro-batch, {args.precision}, recompute {names.said_of_recompute(args.recompute)}, {args.overlap:.0%} of "
        f"what moves hidden; a step of {_tokens_per_step(args.gpus, job) / args.sequence:,.0f} sequences of "
        f"{args.sequence} ({whose}); below each plan why"
    )
    print(_COLUMNS)
    for rank, p in enumerate(plans):
        state, total = (round(1e9 * gb) for gb in (p.state_gb, p.memory_gb))
        exchange = f"{p.exchange_us:11.0f} {p.tokens_per_s_per_gpu:13.0f}"
        print(
            f"{rank + 1:2d} {p.ep:5d} {f'{p.pp} x {p.virtual_pp}':>9} {p.tensor:3d} {p.ranks_per_node:11d} "
            f"{p.num_sms or '-':>4} {p.chunk or '-':>6}  {p.dispatch_dtype:<6} {p.move:<8}{exchange}{_gb(state, total)}"
        )
        _say(f"      {p.why}")


def _say(line: str) -> None:
    print(outputs.narrowed(line))


def _remedied(reason: str, model: MoeModel, cluster: Cluster, gpus: int, job: dict[str, Any]) -> str:
    """Why no layout fits, with the nearest numbers of GPUs that one does: more of them is no remedy where EP x PP does
    not divide them."""
    if not reason.endswith(recommend.TAKE_MORE):
        return reason
    nearest = recommend.nearest_gpus(model, cluster, gpus, _GPUS_OF_A_HOST, **job)
    if fitting := " or ".join(f"--gpus {n}" for n in nearest if n):
        remedy = f"EP x PP and TP x PP must divide the GPUs: give {fitting}, the nearest that fit"
    else:
        others = [
            *(["--recompute full"] if job["recompute"] != "full" and not job["overlap"] else []),
            *(["--moments bf16"] if job["moments"] != "bf16" else []),
            *(["fewer --tokens"] if job["tokens"] > job["sequence"] else []),
        ]
        remedy = f"no number of GPUs helps: give {', '.join([*others, 'or'] if others else [])} a --cluster with more "
        remedy = remedy.replace(", or", " or").replace("  ", " ") + "memory"
    return f"{reason.removesuffix(recommend.TAKE_MORE)}; {remedy}"


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
    got, need, room = step_time.step(job), memory.per_gpu(job), memory.budget_bytes(job.cluster)
    slower = best.tokens_per_s_per_gpu / got.tokens_per_s_per_gpu - 1
    sms = job.num_sms if job.dispatcher == "hybrid_ep" else "-"
    exchange = f"{got.exchange_us:11.0f} {got.tokens_per_s_per_gpu:13.0f}"
    print(
        f"yours {job.ep:2d} {f'{job.pp} x {job.virtual_pp}':>9} {job.tensor:3d} {job.shape.ranks_per_node:11d} "
        f"{sms:>4} {'-':>6}  {job.dispatch_dtype:<6} {'tokens':<8}{exchange}{_gb(need.state, need.total)}"
    )
    _say(
        f"      {slower:+.1%} step time, {got.seconds:.2f} s with {names.dispatcher(job.dispatcher)}, "
        f"micro-batches {job.micro_batches}"
        + (f"; it does not fit the {room / 1e9:.1f} GB of a GPU" if need.total > room else "")
    )
    return {
        "step_s": got.seconds,
        "tokens_per_s_per_gpu": got.tokens_per_s_per_gpu,
        "exchange_us": got.exchange_us,
        "state_gb": need.state / 1e9,
        "memory_gb": need.total / 1e9,
        "fits": need.total <= room,
    }
