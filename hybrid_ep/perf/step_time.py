"""A training step at scale, in a page of arithmetic on top of the exchange model.

    micro-batch of a stage = compute (1 + cv_fast g(EP)) + launches + exposed exchange + fixed cost of its calls
                             + tensor parallel + exposed transfers to the next stage
    step = (micro-batches x the slowest stage's + the others' together / virtual stages) x (1 + cv_slow g(nodes))
           + exposed gradient exchange

g(n) is the expected maximum of n standard normals: within an EP group every layer waits for its slowest rank
(cv_fast, fresh in every layer), the whole job waits for its slowest node (cv_slow, persistent). Load imbalance is an
input: it multiplies the experts' compute and the exchange. Recompute of all layers makes the forward twice, of the MoE
layers (moe) the experts alone, and the exchange in both: all of it with other dispatchers, with ours a dispatch by the
first forward's handle, whose combine nobody reads (`megatron_patches.recompute`)."""

from __future__ import annotations

import collections
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

from hybrid_ep.hardware import clusters
from hybrid_ep.hardware.clusters import Cluster
from hybrid_ep.perf import deepep_rates, efficiency, job_fields, model, peers, remedies, routing, stages
from hybrid_ep.perf.costs import hbm_us
from hybrid_ep.perf.efficiency import Load
from hybrid_ep.perf.implementations import PUBLISHED
from hybrid_ep.perf.models import MoeModel
from hybrid_ep.perf.order_statistics import expected_max
from hybrid_ep.perf.shape import Shape
from hybrid_ep.perf.stages import ONE_LAYER, Stage

DISPATCHERS = ("hybrid_ep", "published_hybrid_ep", "node_dedup", "a2a", "deepep_v1")
RECOMPUTE = ("none", "moe", "full")
# Variation of speed between nodes that torchtitan's published rows have: docs/performance_model.md.
CV_SLOW = 0.034
# Rows of a tile of the grouped GEMMs of CUTLASS and DeepGEMM: each expert's last tile is half empty on average.
GEMM_TILE_ROWS = 128
# CollectiveX: an fp8 dispatch costs 27 to 65 us more than a bf16 one, whatever its size, to quantise.
QUANTISE_US = 46.0


@dataclass(frozen=True)
class Job:
    """gpus = EP x PP x replicas. tokens: of a rank and micro-batch; with tensor parallelism its part of the sequence
    (sequence parallel), experts whole on their rank. efficiency: of all compute, of the GPU's peak, launches
    included; None: as published steps have it (`efficiency`). iteration_graph: one CUDA graph holds an iteration, and
    no layer's launches cost anything. overlap, grad_overlap: share of exchange and of gradient traffic hidden behind
    compute; transfers between pipeline stages hide as gradients do where stages are virtual ones too, and not at all
    elsewhere. fixed_us: of each call, beyond the exchange model. mtp_layers: of multi-token prediction; None: as
    many as the model has. layout: of the pipeline, as Megatron's --pipeline-model-parallel-layout has it; "": equal
    stages, as far as layers and loss divide. Of memory alone: moments, the type of Adam's two; fp8_params, whether
    weights are kept in 8 bits and in no other type: yes, no or auto, with mxfp8; recompute_modules, of Megatron's
    --recompute-modules, of which time counts `moe`. ValueError names argument, value and remedy."""

    model: MoeModel
    cluster: Cluster
    gpus: int
    ep: int
    pp: int = 1
    virtual_pp: int = 1
    tokens: int = 4096
    sequence: int = 4096
    micro_batches: int = 32
    dtype: str = "bf16"
    dispatch_dtype: str = "bf16"  # forward; gradients travel in bf16
    dispatcher: str = "hybrid_ep"
    num_sms: int = 24
    efficiency: float | None = None
    overlap: float = 0.0
    grad_overlap: float = 0.9
    imbalance: float = 0.0
    cv_fast: float = 0.0
    cv_slow: float = 0.0
    fixed_us: float = 0.0
    tensor: int = 1
    recompute: str = "none"
    iteration_graph: bool = False
    mtp_layers: int | None = None
    layout: str = ""
    moments: str = "fp32"
    fp8_params: str = "auto"
    recompute_modules: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        job_fields.check(vars(self), {"dispatcher": DISPATCHERS, "recompute": RECOMPUTE})
        if self.model.experts % self.ep:
            raise ValueError(
                f"ep={self.ep} must divide the {self.model.experts} experts of {self.model.name}; "
                f"{remedies.divisor('ep', self.ep, self.model.experts)}"
            )
        if self.gpus % (part := self.ep * self.pp):
            raise ValueError(
                f"gpus={self.gpus} must be a positive multiple of ep={self.ep} x pp={self.pp} = {part}; "
                f"{remedies.multiple('gpus', self.gpus, part)}"
            )
        if self.gpus % (part := self.tensor * self.pp):
            raise ValueError(
                f"tensor={self.tensor} x pp={self.pp} = {part} must divide gpus={self.gpus}; "
                f"{remedies.divisor('tensor', self.tensor, self.gpus // self.pp)}"
            )
        if self.dtype == "mxfp8" and not self.cluster.gpu.has_mxfp8:
            raise ValueError(f"dtype='mxfp8': {self.cluster.gpu.name} has no mxfp8 tensor cores; use fp8 or bf16")
        if self.layout:
            _ = self.stages

    @property
    def mtp(self) -> int:
        """Layers of multi-token prediction."""
        return self.model.mtp_layers if self.mtp_layers is None else self.mtp_layers

    @property
    def recomputed(self) -> tuple[str, ...]:
        """The modules that are recomputed where not all is."""
        return self.recompute_modules or (("moe",) if self.recompute == "moe" else ())

    @property
    def keeps_fp8_params(self) -> bool:
        """Whether weights are kept in 8 bits alone."""
        return job_fields.keeps_fp8_params(self.dtype, self.fp8_params)

    @cached_property
    def stages(self) -> tuple[Stage, ...]:
        """What each pipeline stage holds, from the first to the last."""
        m = self.model
        return stages.stages(m.num_layers, m.moe_layers, self.mtp, self.pp, self.virtual_pp, self.layout)

    @cached_property
    def chunks(self) -> tuple[tuple[str, ...], ...]:
        """The model chunks of each pipeline stage, in letters (`stages.chunks`)."""
        m = self.model
        return stages.chunks(m.num_layers, m.moe_layers, self.mtp, self.pp, self.virtual_pp, self.layout)

    @cached_property
    def shape(self) -> Shape:
        """Of one MoE layer's exchange."""
        local = min(self.ep, self.cluster.ranks_per_node)
        while self.ep % local:
            local -= 1
        return Shape(self.ep, local, self.tokens, self.model.hidden, self.model.topk, self.model.experts)

    # Cached, as the two above: a fit asks for steps of one job some thousand times, of which compute alone changes.
    @cached_property
    def exchange_us(self) -> float:
        """Dispatch + combine of one MoE layer, permute included, microseconds: mean of forward and backward. Only the
        forward exchanges routing; the backward has its handle."""
        if self.ep == 1:
            return 0.0
        forward = _exchange(self.shape, self.cluster.name, self.dispatcher, self.num_sms, self.dispatch_dtype)
        backward = _exchange(self.shape, self.cluster.name, self.dispatcher, self.num_sms, "bf16", cached=True)
        return (forward + (QUANTISE_US if self.dispatch_dtype != "bf16" else 0.0) + backward) / 2

    @property
    def rank_params(self) -> tuple[float, float]:
        """Parameters on a rank of an average pipeline stage, multi-token prediction included: dense ones, which
        tensor ranks share but for norms, routers and down-projections, and of routed experts, which they do not."""
        m = self.model
        dense = m.total * 1e9 - m.routed_params + self.mtp * (m.moe_layer_params + m.mtp_params)
        experts = m.routed_params * (1 + self.mtp / m.moe_layers)
        whole = m.architecture.whole_params(self.mtp) if m.architecture else 0
        return (whole + (dense - whole) / self.tensor) / self.pp, experts / (self.ep * self.pp)

    @cached_property
    def gradient_us(self) -> float:
        """Gradients reduce-scattered in fp32 and weights gathered in bf16 over the replicas, by the slower link,
        microseconds."""
        dense, experts = self.rank_params
        rate = self.cluster.nic.rate if self.gpus > self.cluster.ranks_per_node else self.cluster.gpu.nvlink_rate
        over = (dense, self.gpus // (self.pp * self.tensor)), (experts, self.gpus // (self.ep * self.pp))
        return sum(6 * params * (1 - 1 / n) for params, n in over) / (rate * 1e3)

    @cached_property
    def load(self) -> Load:
        """What a token brings."""
        return Load.of(self.model, self.cluster, self.dtype, self.sequence)

    @cached_property
    def host(self) -> str:
        """The CPU beside the GPUs."""
        return efficiency.host_word(self.cluster)

    @cached_property
    def work(self) -> _Work:
        return _work(self)

    @cached_property
    def beside(self) -> _Beside:
        return _beside(self, None)

    @property
    def peak_tflops(self) -> float:
        gpu = self.cluster.gpu
        return (gpu.bf16_tflops if self.dtype == "bf16" else gpu.fp8_tflops).value


@dataclass(frozen=True)
class Step:
    """Seconds of one step and where they go; shares are of the step."""

    seconds: float
    tokens_per_s_per_gpu: float
    tflops_per_gpu: float
    exchange_us: float  # dispatch + combine of one layer, one way
    shares: dict[str, float]


def recompute_us(job: Job) -> float:
    """What recompute exchanges again of one MoE layer, microseconds: 0 without it."""
    if job.recompute == "none" or job.ep == 1:
        return 0.0
    quantise = QUANTISE_US if job.dispatch_dtype != "bf16" else 0.0
    cached, ops = (True, ("dispatch",)) if _by_handle(job) else (False, model.OPS)
    return quantise + _exchange(
        job.shape, job.cluster.name, job.dispatcher, job.num_sms, job.dispatch_dtype, cached, ops
    )


def _by_handle(job: Job) -> bool:
    """Whether a recomputed forward goes by the handle of the first: what published software does not."""
    return job.dispatcher == "hybrid_ep"


@lru_cache(maxsize=4096)
def _exchange(
    shape: Shape,
    cluster_name: str,
    dispatcher: str,
    num_sms: int,
    dispatch_dtype: str,
    cached: bool = False,
    ops: tuple[str, ...] = model.OPS,
) -> float:
    """cached: the handle of a call before."""
    cluster, total = clusters.get(cluster_name), 0.0
    for op in ops:
        dtype = dispatch_dtype if op == "dispatch" else "bf16"
        if dispatcher == "a2a":
            total += peers.flat(op, shape, cluster, dtype).us
        elif dispatcher == "node_dedup":
            total += peers.node_dedup(op, shape, cluster, dtype).us
        elif dispatcher == "hybrid_ep":
            total += peers.hybrid(op, shape, cluster, dtype, num_sms, cached=cached).us
        else:
            t = routing.uniform(shape)
            permute = hbm_us(cluster, (t.received + t.pairs) * shape.row_bytes(dtype))
            if dispatcher == "deepep_v1":
                rate = deepep_rates.rate(op, shape, cluster_name)
                total += rate.us(t, shape.tokens, shape.row_bytes(dtype)) + permute
            else:
                got = model.predict(op, shape, cluster, num_sms=num_sms, dtype=dtype, impl=PUBLISHED)
                total += got.api_us + permute
    return total


class _Compute(NamedTuple):
    """Microseconds of a micro-batch, forward and backward, launches left out: of a MoE layer, of a layer without
    experts, of what multi-token prediction has beyond a MoE layer, of a pass of the output layer."""

    moe: float
    dense: float
    mtp_more: float
    head: float

    def of(self, stage: Stage) -> float:
        return stage.moe * self.moe + stage.dense * self.dense + stage.mtp * self.mtp_more + stage.heads * self.head


def compute_us(job: Job, stage: Stage, fitted: efficiency.Compute | None = None) -> float:
    """Forward and backward of a micro-batch on a stage, launches left out. The experts' products take the longer of
    their FLOPs and their memory: weights read twice (with recompute three times) and fp32 gradients accumulated, 12
    (14) bytes a parameter of this rank. Their GEMMs compute whole tiles: half a tile of rows more an expert than it
    has. The output layer is not recomputed."""
    return _compute(job, fitted).of(stage)


def _compute(job: Job, fitted: efficiency.Compute | None) -> _Compute:
    if job.efficiency is None:
        token = job.load.at(fitted or efficiency.FITTED)
    else:
        token = efficiency.at_share(job.model, job.cluster, job.dtype, job.sequence, job.efficiency)
    expert_gemms, expert_tensors, moe_others, dense_layer, mtp_more, head = token
    products, tensors, memory, layers, a_head = job.work
    experts = max(products * expert_gemms, memory) + tensors * expert_tensors
    return _Compute(layers * moe_others + experts, layers * dense_layer, layers * mtp_more, a_head * head)


class _Work(NamedTuple):
    """What the times of a token are multiplied by, whatever the fitted numbers are: of experts' products, with whole
    tiles, and of the tensors around them; of layers; of the output layer. memory: microseconds of experts' weights and
    gradients, the least that their products take."""

    products: float
    tensors: float
    memory: float
    layers: float
    head: float


def _work(job: Job) -> _Work:
    m, again = job.model, job.recompute != "none"
    memory = hbm_us(job.cluster, (14 if again else 12) * m.expert_params * m.experts / job.ep)
    more = (4 / 3 if again else 1) * (1 + job.imbalance)
    tiles = 1 + GEMM_TILE_ROWS / 2 / (job.tokens * m.topk * job.ep / m.experts)
    layers = (4 / 3 if job.recompute == "full" else 1) * job.tokens
    return _Work(more * tiles * job.tokens, more * job.tokens, memory, layers, job.tokens)


def launches_us(job: Job, stage: Stage, fitted: efficiency.Compute | None = None) -> float:
    """What a micro-batch on a stage takes beside that for its launches; in a given `efficiency` they are contained."""
    if job.efficiency is not None or job.iteration_graph:
        return 0.0
    again = 4 / 3 if job.recompute == "full" else 1
    return again * efficiency.layer_us_beside(job.host, fitted) * stage.layers


def said_of_compute(job: Job) -> str:
    """What the compute of a prediction is taken to reach, in words."""
    if job.efficiency is not None:
        return f"{job.efficiency:.0%} of peak in compute, as given"
    share = efficiency.share_of_peak(job.model, job.cluster, job.dtype, job.sequence)
    launches = efficiency.layer_us(job.cluster) / 1e3
    said = f"{share:.0%} of peak in compute and {launches:.1f} ms of launches a layer and micro-batch on "
    said += f"{efficiency.host_word(job.cluster)} hosts, as published steps have it"
    return said.replace(f"{launches:.1f} ms", "nothing") if job.iteration_graph else said


def tensor_us(job: Job, stage: Stage) -> float:
    """All-gathers and reduce-scatters of a micro-batch on a stage, over NVLink and not overlapped: one of each around
    attention, and around the MLP of a layer without experts, in the forward and, mirrored, in the backward. Each moves
    the other tensor ranks' tokens, bf16. Those around shared experts and the output layer are left out."""
    m, passes = job.model, 3 if job.recompute == "full" else 2
    blocks = stage.layers + stage.dense
    return 2 * passes * blocks * (job.tensor - 1) * job.tokens * m.hidden * 2 / (job.cluster.gpu.nvlink_rate * 1e3)


def pipeline_us(job: Job) -> float:
    """Transfers of a micro-batch to the next stage and, of its gradients, to the one before, in full view: bf16, once a
    chunk of layers, over a NIC where the stages are not in one node. Megatron hides them behind other chunks where
    stages are virtual ones too, and waits for them where they are not."""
    if job.pp == 1:
        return 0.0
    rate = job.cluster.nic.rate if job.gpus > job.cluster.ranks_per_node else job.cluster.gpu.nvlink_rate
    shown = 1 - job.grad_overlap if job.virtual_pp > 1 else 1.0
    return 2 * job.virtual_pp * job.tokens * job.model.hidden * 2 / (rate * 1e3) * shown


@dataclass(frozen=True)
class Layer:
    """What one MoE layer of a micro-batch takes where somebody knows it, microseconds, of the rank that all wait for.

    one_way_us: dispatch + combine, mean of forward and backward. beside_us: in full view beside the exchange, forward
    and backward together. ValueError for a time below 0."""

    one_way_us: float
    beside_us: float = 0.0

    def __post_init__(self) -> None:
        for name in ("one_way_us", "beside_us"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name}={getattr(self, name)!r} must be at least 0")


def step(job: Job, layer: Layer | None = None, fitted: efficiency.Compute | None = None) -> Step:
    """One optimizer step of the job. fitted: in place of `efficiency.FITTED`. layer: takes the place of the exchange
    model and of what imbalance does to it, for a job without recompute (ValueError), whose `imbalance` then is of the
    experts' compute alone."""
    beside = job.beside if layer is None else _beside(job, layer)
    parts = _parts(job, beside, fitted)
    total = sum(parts)
    rate = _rate(job, total)
    return Step(
        total / 1e6,
        rate,
        rate * job.model.train_flops_per_token(job.sequence, job.mtp) / 1e12,
        beside.one_way,
        {name: part / total for name, part in zip(_PARTS, parts, strict=True)},
    )


def tokens_per_s_per_gpu(job: Job, fitted: efficiency.Compute | None = None) -> float:
    """As of `step`, without shares and FLOPs, which a fit does not ask for."""
    return _rate(job, sum(_parts(job, job.beside, fitted)))


def _rate(job: Job, total: float) -> float:
    return job.tokens * job.micro_batches / (total / 1e6) / job.pp


_PARTS = (
    *("compute", "launches", "exchange", "fixed", "tensor parallel", "pipeline transfers", "waiting in the EP group"),
    *("bubble", "slowest node", "gradients"),
)


class _Beside(NamedTuple):
    """What compute and launches have no part in, microseconds of a micro-batch. stages: each kind of stage with how
    many there are of it and its exchange, fixed cost, tensor parallel and pipeline transfers. waits, slow: expected
    maxima of ranks of an EP group and of nodes. gradients: of the step, in full view."""

    one_way: float
    stages: list[tuple[Stage, int, tuple[float, ...]]]
    waits: float
    slow: float
    gradients: float


def _beside(job: Job, layer: Layer | None) -> _Beside:
    if layer is not None and job.recompute != "none":
        raise ValueError(f"recompute={job.recompute!r}: a given layer says nothing of a recomputed exchange; use none")
    one_way = job.exchange_us * (1 + job.imbalance) if layer is None else layer.one_way_us
    # forward, and each is the other's backward
    exchange = (2 * one_way + recompute_us(job) * (1 + job.imbalance)) * (1 - job.overlap)
    calls = 4 + (0 if job.recompute == "none" else 1 if _by_handle(job) else 2)
    fixed = calls * job.fixed_us + (layer.beside_us if layer else 0.0)
    transfers = pipeline_us(job)
    return _Beside(
        one_way,
        [
            (stage, count, (stage.moe * exchange, stage.moe * fixed, tensor_us(job, stage), transfers))
            for stage, count in collections.Counter(job.stages).items()
        ],
        expected_max(job.ep),
        expected_max(max(1, job.gpus // min(8, job.gpus))),
        job.gradient_us * (1 - job.grad_overlap),
    )


def _parts(job: Job, beside: _Beside, fitted: efficiency.Compute | None) -> list[float]:
    """Microseconds of a step by `_PARTS`."""
    of_moe, of_dense, of_mtp, of_head = _compute(job, fitted)
    a_launch, cv_fast, waits = launches_us(job, ONE_LAYER, fitted), job.cv_fast, beside.waits
    known = []
    for (moe, dense, mtp, heads), _, others in beside.stages:  # as `_Compute.of`, a fit's innermost loop
        compute = moe * of_moe + dense * of_dense + mtp * of_mtp + heads * of_head
        known.append((compute, (moe + dense) * a_launch, *others, compute * cv_fast * waits))
    of_stage = list(map(sum, known))
    slowest = of_stage.index(max(of_stage))
    # What is before the first and behind the last micro-batch of the slowest: one of each other stage, a chunk of it.
    others_us = sum([n * us for (_, n, _), us in zip(beside.stages, of_stage, strict=True)]) - of_stage[slowest]
    parts = [us * job.micro_batches for us in known[slowest]]
    parts.append(others_us / job.virtual_pp)
    parts.append(sum(parts) * job.cv_slow * beside.slow)
    parts.append(beside.gradients)
    return parts
