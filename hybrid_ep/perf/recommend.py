"""Advice: which EP degree, ranks per node, SMs, chunk, dispatch dtype, and whether to move tokens or weights.

Every plan that fits the memory is timed with the step model, which has the exchange model inside; the fastest wins.
SMs are the fewest within 5 % of the fastest exchange: what an exchange does not need, overlapped compute gets."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from hybrid_ep.hardware import clusters
from hybrid_ep.hardware.clusters import Cluster
from hybrid_ep.perf import dwdp, model, routing
from hybrid_ep.perf.implementations import HYBRID_EP
from hybrid_ep.perf.models import MoeModel
from hybrid_ep.perf.routing import Traffic
from hybrid_ep.perf.shape import Shape
from hybrid_ep.perf.stages import ONE_LAYER
from hybrid_ep.perf.step_time import Job, compute_us, step

_SMS = (4, 8, 16, 24, 32, 48, 64)
_CHUNKS = (16, 32, 64, 128)
_SMS_WITHIN, _CHUNK_WITHIN = 1.05, 1.02  # of the fastest
_TUNED_TOKENS = 8192  # with more the fewest SMs are the same, and a prediction takes longer
_MEMORY_SHARE = 0.7  # of HBM for weights, gradients, optimizer; activations and buffers take the rest
# Bytes a parameter. Transformer Engine keeps 8-bit weights and their transposes beside the bf16 ones; with mxfp8 they
# are all that is kept, as in NVIDIA's mixed-precision recipes. Gradients, master weights and moments are fp32.
_WEIGHT_BYTES = {"bf16": 2, "fp8": 4, "mxfp8": 2}
_GRADIENT_BYTES, _OPTIMIZER_BYTES = 4, 12
STATE_HOLDS = "weights, gradients and optimizer state (moments in fp32), without activations and buffers"
_PP = (1, 2, 4, 8, 16, 32)
_BATCHES = 8  # micro-batches a GPU and step, the same global batch for every plan


@dataclass(frozen=True)
class Tuning:
    """The least SMs within 5 % of the fastest dispatch + combine, then the largest chunk within 2 %, and that time."""

    num_sms: int
    chunk: int
    exchange_us: float


@dataclass(frozen=True)
class Plan:
    """One candidate. why: what is good or bad about it, in words."""

    ep: int
    pp: int
    ranks_per_node: int
    num_sms: int
    chunk: int
    dispatch_dtype: str
    move: str
    exchange_us: float
    step_seconds: float
    tokens_per_s_per_gpu: float
    state_gb: float
    why: str


def tune(shape: Shape, cluster: Cluster, dispatch_dtype: str = "bf16", traffic: Traffic | None = None) -> Tuning:
    """SMs and chunk for this exchange. A single node has no rail, hence the default chunk."""
    traffic = traffic or routing.uniform(shape)
    sms = _tune_sms(shape, cluster.name, dispatch_dtype, traffic)
    sizes = _CHUNKS if shape.nodes > 1 else (HYBRID_EP.chunk,)
    by_chunk = {c: _exchange(shape, cluster.name, dispatch_dtype, traffic, sms, c) for c in sizes}
    # the largest that will do is kindest to the NIC: fewest messages and flags
    chunk = max(c for c, us in by_chunk.items() if us <= _CHUNK_WITHIN * min(by_chunk.values()))
    return Tuning(sms, chunk, by_chunk[chunk])


def tuned(job: Job) -> Job:
    """The job with the SMs that `tune` would take for its exchange, of 8,192 tokens where it has more: time grows with
    tokens from there on, whatever the SMs, and so does what it takes to say so."""
    if job.ep == 1:
        return job
    shape = replace(job.shape, tokens=min(job.tokens, _TUNED_TOKENS))
    return replace(job, num_sms=_tune_sms(shape, job.cluster.name, job.dispatch_dtype, routing.uniform(shape)))


@lru_cache(maxsize=512)
def _tune_sms(shape: Shape, cluster_name: str, dtype: str, traffic: Traffic) -> int:
    most = clusters.get(cluster_name).gpu.num_sms.value
    by_sms = {n: _exchange(shape, cluster_name, dtype, traffic, n, 32) for n in _SMS if n <= most}
    return min(n for n, us in by_sms.items() if us <= _SMS_WITHIN * min(by_sms.values()))


def _exchange(shape: Shape, cluster_name: str, dtype: str, traffic: Traffic, num_sms: int, chunk: int) -> float:
    dispatch = _call("dispatch", shape, cluster_name, dtype, traffic, num_sms, chunk)
    return dispatch + _call("combine", shape, cluster_name, "bf16", traffic, num_sms, chunk)


@lru_cache(maxsize=8192)  # a combine serves both dtypes of the dispatch
def _call(op: str, shape: Shape, cluster_name: str, dtype: str, traffic: Traffic, num_sms: int, chunk: int) -> float:
    cluster = clusters.get(cluster_name)
    return model.predict(op, shape, cluster, num_sms=num_sms, chunk=chunk, traffic=traffic, dtype=dtype).api_us


def state_gb(job: Job) -> float:
    """What `STATE_HOLDS` names, on a rank of an average pipeline stage."""
    return sum(_state_gb(job))


def _state_gb(job: Job) -> tuple[float, float]:
    """(what no number of GPUs makes less: weights and gradients; a share of the optimizer)."""
    kept = sum(job.rank_params)
    replicas = job.gpus // (job.pp * job.tensor), job.gpus // (job.ep * job.pp)
    sharded = sum(params / n for params, n in zip(job.rank_params, replicas, strict=True))
    return (_WEIGHT_BYTES[job.dtype] + _GRADIENT_BYTES) * kept / 1e9, _OPTIMIZER_BYTES * sharded / 1e9


def fits(job: Job) -> bool:
    """Whether the state alone leaves a GPU any of its memory."""
    return state_gb(job) <= job.cluster.gpu.hbm_gb.value


def fewest_gpus(job: Job) -> int | None:
    """Of the same layout, that hold its state: more of them share the optimizer. None where weights and gradients are
    too much already."""
    kept, sharded = _state_gb(job)
    room = job.cluster.gpu.hbm_gb.value - kept
    if room <= 0:
        return None
    step_of = math.lcm(job.ep * job.pp, job.tensor * job.pp)
    return max(1, math.ceil(sharded * job.gpus / room / step_of)) * step_of


def candidates(m: MoeModel, cluster: Cluster, gpus: int) -> Iterator[tuple[int, int]]:
    """(EP, PP) that divide experts, layers' stages and GPUs."""
    for pp in _PP:
        for ep in range(1, min(m.experts, gpus) + 1):
            if m.experts % ep == 0 and gpus % (ep * pp) == 0 and pp <= m.num_layers:
                if ep <= cluster.ranks_per_node or ep % cluster.ranks_per_node == 0:
                    yield ep, pp


def recommend(
    m: MoeModel,
    cluster: Cluster,
    gpus: int,
    *,
    tokens: int = 4096,
    top: int = 5,
    overlap: float = 0.0,
    watch: Callable[[Iterable[Any]], Iterable[Any]] = iter,
    **of_the_job: Any,
) -> list[Plan]:
    """The best plans, fastest first. overlap: share of what moves, tokens or weights, that hides behind compute.
    watch: sees the layouts go by, for a progress bar. of_the_job: fields of every plan's Job: dtype, recompute,
    cv_slow. ValueError when no plan fits the memory."""
    if gpus < 1:
        raise ValueError(f"gpus={gpus} must be at least 1")
    room = cluster.gpu.hbm_gb.value * _MEMORY_SHARE
    of_the_job |= {"tokens": tokens, "overlap": overlap}
    jobs = [job_of(m, cluster, gpus, ep, pp, **of_the_job) for ep, pp in candidates(m, cluster, gpus)]
    sizes = [state_gb(job) for job in jobs]
    fitting = [(job, gb) for job, gb in zip(jobs, sizes, strict=True) if gb <= room]
    if not fitting:
        smallest = min(sizes, default=float("inf"))
        raise ValueError(
            f"gpus={gpus}: no EP x PP of {m.name} fits; a rank needs {smallest:.0f} GB or more of state "
            f"and has {room:.0f} GB ({_MEMORY_SHARE:.0%} of {cluster.gpu.hbm_gb.value:.0f}); take more"
        )
    plans = [plan for job, gb in watch(fitting) for plan in _plans(job, gb)]
    plans.sort(key=lambda p: p.step_seconds)
    kept: list[Plan] = []
    for plan in plans:  # a runner-up differs in something that matters
        if all((plan.ep, plan.pp, plan.move) != (k.ep, k.pp, k.move) for k in kept):
            kept.append(plan)
    best = kept[0]
    other = [p for p in kept[top:] if p.move not in {k.move for k in kept[:top]}]
    kept = kept[:top] + other[:1]  # what moving the other thing would cost belongs to the advice
    dtypes = {p.dispatch_dtype: p for p in reversed(plans) if (p.ep, p.pp, p.move) == (best.ep, best.pp, best.move)}
    return [replace(_with_chunk(p, m, cluster, tokens), why=_why(p, best, m, cluster, tokens, dtypes)) for p in kept]


def _with_chunk(p: Plan, m: MoeModel, cluster: Cluster, tokens: int) -> Plan:
    if p.move != "tokens":
        return p
    shape = Job(m, cluster, p.ep * p.pp, p.ep, pp=p.pp, tokens=tokens).shape
    return replace(p, chunk=tune(shape, cluster, p.dispatch_dtype).chunk)


def job_of(m: MoeModel, cluster: Cluster, gpus: int, ep: int, pp: int, **more: Any) -> Job:
    """The job that a plan is judged by: the same global batch for all, virtual stages where there are layers."""
    virtual_pp = max(1, min(4, m.num_layers // (2 * pp)))
    return Job(m, cluster, gpus, ep, pp=pp, virtual_pp=virtual_pp, micro_batches=_BATCHES * pp, **more)


def _plans(base: Job, gb: float) -> Iterator[Plan]:
    m, cluster, ep, overlap = base.model, base.cluster, base.ep, base.overlap
    if ep == 1:
        yield _plan(base, 0, 0, "nothing", 0.0, gb)
        return
    for dtype in ("bf16", "fp8"):
        sms = _tune_sms(base.shape, cluster.name, dtype, routing.uniform(base.shape))
        job = replace(base, num_sms=sms, dispatch_dtype=dtype)
        yield _plan(job, sms, 0, "tokens", 0.0, gb)
    if ep <= cluster.ranks_per_node:
        move_us = 3 * dwdp.weight_bytes(m, ep, "bf16") / (cluster.gpu.nvlink_rate * 1e3) * dwdp.CONTENTION
        exposed = max(move_us * (1 - overlap), move_us - compute_us(base, ONE_LAYER))
        two_layers = 2 * dwdp.weight_bytes(m, ep, "bf16") / 1e9
        yield _plan(replace(base, overlap=1.0), 0, 0, "weights", exposed, gb + two_layers, move_us)


def _plan(job: Job, num_sms: int, chunk: int, move: str, exposed_us: float, gb: float, move_us: float = 0.0) -> Plan:
    """exposed_us: of each layer, beyond what the step model counts."""
    got, m = step(job), job.model
    seconds = 1 / got.tokens_per_s_per_gpu + exposed_us * m.moe_layers / 1e6 / job.tokens
    return Plan(
        job.ep,
        job.pp,
        job.shape.ranks_per_node,
        num_sms,
        chunk,
        job.dispatch_dtype,
        move,
        move_us or got.exchange_us,
        seconds,
        1 / seconds,
        gb,
        "",
    )


def _why(p: Plan, best: Plan, m: MoeModel, cluster: Cluster, tokens: int, dtypes: dict[str, Plan]) -> str:
    """dtypes: the best plan with each dispatch dtype."""
    slower = p.step_seconds / best.step_seconds - 1
    crossover = "every rank has every expert"
    if p.ep > 1:
        least = dwdp.byte_crossover(m, p.ep, "bf16", training=True)
        crossover = f"moving weights takes fewer bytes from {least:,.0f} tokens per rank, here {tokens:,}"
    if p is best:
        where = "inside one NVLink domain" if p.ep <= cluster.ranks_per_node else "over the rail"
        pipeline = f", {p.pp} pipeline stages" if p.pp > 1 else ""
        others = [
            f"{dtype} dispatch would cost {q.step_seconds / p.step_seconds - 1:+.1%}"
            for dtype, q in dtypes.items()
            if dtype != p.dispatch_dtype
        ]
        return "; ".join([where + pipeline, *others, crossover])
    reasons = []
    if p.move != best.move:
        reasons.append(f"moves {p.move}: {crossover}")
    if p.ep > cluster.ranks_per_node >= best.ep:
        reasons.append("its exchange crosses the rail")
    elif p.move == best.move and p.exchange_us > best.exchange_us:
        reasons.append(f"its exchange takes {p.exchange_us / best.exchange_us:.1f} times as long")
    if p.pp > best.pp:
        reasons.append("a longer pipeline bubble")
    if p.pp < best.pp:
        reasons.append("more of each expert's gradients to exchange and memory to read")
    return f"{slower:+.1%} step time" + (": " + "; ".join(reasons) if reasons else "")
