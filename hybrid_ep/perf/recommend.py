"""Advice: which EP degree, ranks per node, SMs, chunk, dispatch dtype, and whether to move tokens or weights.

Every plan that Megatron accepts and that fits the memory (`perf.memory`, as `hybrid-ep launch` judges) is timed with
the step model, which has the exchange model inside; the fastest wins.
SMs are the fewest within 5 % of the fastest exchange: what an exchange does not need, overlapped compute gets."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache
from typing import Any

from hybrid_ep.hardware import clusters
from hybrid_ep.hardware.clusters import Cluster
from hybrid_ep.perf import dwdp, memory, model, routing, stages
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
_PP = (1, 2, 4, 8, 16, 32)
_VIRTUAL = (4, 3, 2, 1)
_LEAST_LAYERS = 2  # of a virtual stage
_TENSOR = (1, 2, 4, 8)
BATCHES = Fraction(8)  # micro-batches of a GPU and step, where no batch is given
TAKE_MORE = "; take more"  # what an error ends with where other numbers of GPUs are the remedy


@dataclass(frozen=True)
class Tuning:
    """The least SMs within 5 % of the fastest dispatch + combine, then the largest chunk within 2 %, and that time."""

    num_sms: int
    chunk: int
    exchange_us: float


@dataclass(frozen=True)
class Plan:
    """One candidate, of the same global batch as the others. virtual_pp, layout: of the pipeline, as Megatron is asked
    for it. tensor: the least that fits. state_gb, memory_gb: of the fullest GPU, as `perf.memory` counts. why: what is
    good or bad about it, in words."""

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
    memory_gb: float
    virtual_pp: int
    tensor: int
    micro_batches: int
    layout: str
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


def candidates(m: MoeModel, cluster: Cluster, gpus: int) -> Iterator[tuple[int, int]]:
    """(EP, PP) that divide experts, layers' stages and GPUs."""
    return ((ep, pp) for ep, pp in _sizes(m, cluster) if gpus % (ep * pp) == 0)


def _sizes(m: MoeModel, cluster: Cluster) -> Iterator[tuple[int, int]]:
    """(EP, PP) on whatever number of GPUs: groups lie in an NVLink domain or fill several."""
    for pp in _PP:
        for ep in range(1, m.experts + 1):
            if m.experts % ep == 0 and pp <= m.num_layers:
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
    batches: Fraction = BATCHES,
    watch: Callable[[Iterable[Any]], Iterable[Any]] = iter,
    **of_the_job: Any,
) -> list[Plan]:
    """The best plans, fastest first. tokens: of a micro-batch, which tensor ranks share. overlap: share of what moves,
    tokens or weights, that hides behind compute. batches: micro-batches of a step of a plan with neither pipeline nor
    tensor parallelism; others have PP x TP times as many, so that all have one global batch. watch: sees the layouts
    go by, for a progress bar. of_the_job: fields of every plan's Job: dtype, recompute, recompute_modules, moments,
    fp8_params, cv_slow. ValueError when no plan fits the memory."""
    if gpus < 1:
        raise ValueError(f"gpus={gpus}: must be at least 1")
    _check_overlap(overlap, of_the_job)
    of_the_job |= {"tokens": tokens, "overlap": overlap, "batches": batches}
    plans = [plan for job in watch(_fitting(m, cluster, gpus, of_the_job)) for plan in _plans(job)]
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


def _check_overlap(overlap: float, of_the_job: dict[str, Any]) -> None:
    """ValueError for what Megatron refuses of every layout."""
    again = of_the_job.get("recompute", "none")
    if overlap > 0 and again != "none":
        raise ValueError(
            f"overlap={overlap:g}: Megatron hides no exchange of experts that are recomputed, here recompute={again}; "
            "give overlap=0 or recompute=selective"
        )


def _fitting(m: MoeModel, cluster: Cluster, gpus: int, of_the_job: dict[str, Any]) -> list[Job]:
    """Of every EP x PP that Megatron accepts the job with the least tensor parallelism that fits. ValueError where
    there is none."""
    room, fitting, least = memory.budget_bytes(cluster), [], math.inf
    for ep, pp in candidates(m, cluster, gpus):
        for tensor in _tensors(m, cluster):
            job = job_of(m, cluster, gpus, ep, pp, tensor, **of_the_job)
            if job is None:
                continue
            total = memory.per_gpu(job).total
            least = min(least, total)
            if total <= room:
                fitting.append(job)
                break
    if least == math.inf:
        raise ValueError(f"gpus={gpus}: Megatron accepts no EP x PP x TP of {m.name} with this batch{TAKE_MORE}")
    if not fitting:
        raise ValueError(
            f"gpus={gpus}: no EP x PP x TP of {m.name} fits; a rank needs {least / 1e9:.0f} GB or more, activations "
            f"and buffers included, and has {room / 1e9:.0f} GB ({1 - memory.RESERVE:.0%} of "
            f"{cluster.gpu.hbm_gb.value:.0f}){TAKE_MORE}"
        )
    return fitting


def _tensors(m: MoeModel, cluster: Cluster) -> list[int]:
    """Sizes of tensor parallelism in an NVLink domain that divide attention's heads and groups."""
    a = m.architecture
    parts = (a.num_attention_heads, a.num_query_groups or a.num_attention_heads) if a else (1,)
    return [n for n in _TENSOR if n <= cluster.ranks_per_node and not any(part % n for part in parts)]


def nearest_gpus(
    m: MoeModel, cluster: Cluster, gpus: int, host: int, **of_the_job: Any
) -> tuple[int | None, int | None]:
    """The nearest numbers of GPUs below and above, in whole hosts, that a layout of `recommend` fits; None where none
    is. host: GPUs of one. of_the_job: as `recommend` has it."""
    below: list[int] = []
    above: list[int] = []
    for (ep, pp), tensor in itertools.product(_sizes(m, cluster), _tensors(m, cluster)):
        part = math.lcm(ep, tensor) * pp
        job = job_of(m, cluster, part, ep, pp, tensor, **of_the_job)
        if job is None or (fewest := memory.fewest_gpus(job)) is None:
            continue
        step_of = math.lcm(part, host)
        least = -(-fewest // step_of) * step_of
        above.append(max(least, (gpus // step_of + 1) * step_of))
        if least < gpus:
            below.append((gpus - 1) // step_of * step_of)
    return max(below, default=None), min(above, default=None)


def _with_chunk(p: Plan, m: MoeModel, cluster: Cluster, tokens: int) -> Plan:
    if p.move != "tokens":
        return p
    shape = Job(m, cluster, p.ep * p.pp, p.ep, pp=p.pp, tokens=tokens // p.tensor).shape
    return replace(p, chunk=tune(shape, cluster, p.dispatch_dtype).chunk)


def job_of(
    m: MoeModel,
    cluster: Cluster,
    gpus: int,
    ep: int,
    pp: int,
    tensor: int = 1,
    *,
    tokens: int = 4096,
    batches: Fraction = BATCHES,
    **more: Any,
) -> Job | None:
    """The job that a plan is judged by: `batches` x PP x TP micro-batches of so many tokens, virtual stages where there
    are layers. None where Megatron accepts none: equal chunks, its own or by a layout, do not hold the layers,
    micro-batches are no whole number or fewer than stages, sizes do not divide GPUs or tokens."""
    micro_batches = batches * pp * tensor
    if micro_batches.denominator != 1 or micro_batches < pp or tokens % tensor or gpus % (tensor * pp):
        return None
    for virtual_pp in _VIRTUAL if pp > 1 and micro_batches % pp == 0 else (1,):
        if virtual_pp > 1 and m.num_layers < _LEAST_LAYERS * pp * virtual_pp:
            continue
        try:
            layout = stages.equal_layout(m.num_layers, m.mtp_layers, pp * virtual_pp)
        except ValueError:
            continue
        more |= {"micro_batches": int(micro_batches), "tensor": tensor, "layout": layout}
        return Job(m, cluster, gpus, ep, pp, virtual_pp, tokens // tensor, **more)
    return None


def _plans(base: Job) -> Iterator[Plan]:
    """Of a job that fits, those of its ways to move tokens or weights that do."""
    m, cluster, ep, overlap = base.model, base.cluster, base.ep, base.overlap
    need, room = memory.per_gpu(base), memory.budget_bytes(cluster)
    if ep == 1:
        yield _plan(base, 0, 0, "nothing", 0.0, need.state, need.total)
        return
    for dtype in ("bf16", "fp8"):
        sms = _tune_sms(base.shape, cluster.name, dtype, routing.uniform(base.shape))
        job = replace(base, num_sms=sms, dispatch_dtype=dtype)
        total = memory.per_gpu(job).total
        if total <= room:
            yield _plan(job, sms, 0, "tokens", 0.0, need.state, total)
    if ep <= cluster.ranks_per_node:
        move_us = 3 * dwdp.weight_bytes(m, ep, "bf16") / (cluster.gpu.nvlink_rate * 1e3) * dwdp.CONTENTION
        exposed = max(move_us * (1 - overlap), move_us - compute_us(base, ONE_LAYER))
        two_layers = int(2 * dwdp.weight_bytes(m, ep, "bf16"))
        total = need.total - need.buffers + two_layers
        if total <= room:
            job = replace(base, overlap=1.0)
            yield _plan(job, 0, 0, "weights", exposed, need.state + two_layers, total, move_us)


def _plan(
    job: Job, num_sms: int, chunk: int, move: str, exposed_us: float, state: int, total: int, move_us: float = 0.0
) -> Plan:
    """exposed_us: of each layer, beyond what the step model counts. state, total: bytes of the fullest GPU."""
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
        state / 1e9,
        total / 1e9,
        job.virtual_pp,
        job.tensor,
        job.micro_batches,
        job.layout,
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
