"""Memory of one GPU in a job: weights, gradients, optimizer, activations, hybrid_ep's buffers. `hybrid-ep launch`,
`simulate --recommend` and `report scaling --simulate` have it from here.

The registered buffers are exact to the byte, from the compiled layout itself. Weights, gradients and optimizer state
are counted parameters times Megatron's bytes a parameter. Activations are an estimate in bf16 with experts evenly
loaded, made of the tensors that the backward pass needs; allocator and library overhead is the reserve."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache

from hybrid_ep import buffer_sizes
from hybrid_ep.hardware.clusters import Cluster
from hybrid_ep.perf import shape
from hybrid_ep.perf.architecture import Architecture
from hybrid_ep.perf.step_time import Job

STATE_HOLDS = "weights, gradients and optimizer state"
RESERVE = 0.10  # of a GPU's memory, left to CUDA, NCCL and fragmentation
_BF16, _FP32 = 2, 4
# fp32 master weight and Adam's two moments, by the type of the moments.
_OPTIMIZER_BYTES = {"fp32": 12, "bf16": 8}
_MOST_GPUS = 1 << 24  # what no number up to this holds, none does


@dataclass(frozen=True)
class Memory:
    """Bytes on a GPU of pipeline rank `stage`. clones: of the expert balancer, of which the step model knows none."""

    stage: int
    parameters: int
    weights: int
    gradients: int
    optimizer: int
    activations: int
    clones: int
    buffers: int

    @property
    def state(self) -> int:
        """`STATE_HOLDS`."""
        return self.weights + self.gradients + self.optimizer

    @property
    def total(self) -> int:
        return self.state + self.activations + self.clones + self.buffers

    def __str__(self) -> str:
        names = [f.name for f in fields(self) if f.name not in ("stage", "parameters")]
        names.insert(names.index("optimizer") + 1, "state")
        return "\n".join(f"  {name:<12}{getattr(self, name) / 1e9:>10.2f} GB" for name in [*names, "total"])


def per_gpu(job: Job) -> Memory:
    """The memory of the fullest pipeline rank. ValueError for a model whose architecture is not known."""
    return fullest(of_stages(job, registered_bytes(job)))


def fullest(stages: Sequence[Memory]) -> Memory:
    """Of the pipeline ranks that of the one with most."""
    return max(stages, key=lambda memory: memory.total)


def budget_bytes(cluster: Cluster, reserve: float = RESERVE) -> int:
    """What a GPU holds less the reserve."""
    return int(hbm_bytes(cluster) * (1 - reserve))


def hbm_bytes(cluster: Cluster) -> int:
    """Of one GPU, as its data sheet counts, GB = 1e9."""
    return int(cluster.gpu.hbm_gb.value * 10**9)


def fits(job: Job) -> bool:
    """Whether the fullest GPU has room for it, the reserve left free."""
    return per_gpu(job).total <= budget_bytes(job.cluster)


def fewest_gpus(job: Job) -> int | None:
    """Of the same layout, that hold it: more of them share the optimizer. None where the rest is too much already."""
    step_of = math.lcm(job.ep * job.pp, job.tensor * job.pp)
    below, enough = 0, _MOST_GPUS // step_of
    if not fits(replace(job, gpus=enough * step_of)):
        return None
    while enough - below > 1:
        middle = (below + enough) // 2
        below, enough = (below, middle) if fits(replace(job, gpus=middle * step_of)) else (middle, enough)
    return enough * step_of


def of_stages(job: Job, buffers: int) -> list[Memory]:
    """Of every pipeline rank, with so many bytes of registered buffers."""
    data, expert_data = job.gpus // (job.pp * job.tensor), job.gpus // (job.pp * job.ep)
    weight_bytes, optimizer_bytes, found = weight_bytes_of(job), _OPTIMIZER_BYTES[job.moments], []
    for rank, (dense, experts) in enumerate(parameters(job)):
        optimizer = optimizer_bytes * (-(-dense // data) + -(-experts // expert_data))
        weights, gradients = (dense + experts) * weight_bytes, (dense + experts) * _FP32
        found.append(Memory(rank, dense + experts, weights, gradients, optimizer, activations(job, rank), 0, buffers))
    return found


def weight_bytes_of(job: Job) -> int:
    """Bytes of a weight. Transformer Engine keeps 8-bit weights and their transposes beside the bf16 ones, but for
    `keeps_fp8_params`. Our experts keep none and quantise a product's as they multiply: that is less."""
    return _BF16 if job.dtype == "bf16" or job.keeps_fp8_params else _BF16 + 2


def registered_bytes(job: Job) -> int:
    """Bytes that hybrid_ep's buffer registers on each rank, to the byte; 0 with another dispatcher. What else other
    dispatchers hold is not known."""
    if job.dispatcher != "hybrid_ep":
        return 0
    s = job.shape
    scales = shape.scale_bytes(job.dispatch_dtype, s.hidden)
    return buffer_sizes.registered_bytes(
        s.nodes, s.ranks_per_node, s.experts, s.tokens, s.topk, _BF16 * s.hidden, scales
    )


def parameters(job: Job) -> tuple[tuple[int, int], ...]:
    """(dense, expert) parameters on a GPU of each pipeline rank. Tensor parallelism splits the dense ones but for
    norms, routers and down-projections of latent attention, which every tensor rank has whole."""
    return _parameters(_architecture(job), job.chunks, job.ep, job.tensor)


@lru_cache(maxsize=4096)
def _parameters(
    model: Architecture, chunks: tuple[tuple[str, ...], ...], ep: int, tensor: int
) -> tuple[tuple[int, int], ...]:
    found = []
    for rank in chunks:
        dense, whole, experts = 0, 0, 0
        for letter in "".join(rank):
            if letter in "EL":
                dense += model.embedding_params
                whole += model.hidden_size if letter == "L" else 0
                continue
            kept = model.replicated_params
            if letter == "d":
                dense += model.dense_layer_params
            else:
                kept += model.router_params + (3 * model.hidden_size if letter == "m" else 0)
                dense += model.moe_dense_params + (model.mtp_extra_params if letter == "m" else 0)
                experts += model.num_experts // ep * model.expert_params
            whole, dense = whole + kept, dense - kept
        found.append((-(-dense // tensor) + whole, experts))
    return tuple(found)


def activations(job: Job, rank: int) -> int:
    """Kept by the micro-batches in flight, the working set of one recomputed layer, and the logits: bytes on a GPU of
    that pipeline rank."""
    model, chunks = _architecture(job), job.chunks[rank]
    layers = max(sum(map(chunk.count, "dtm")) for chunk in chunks)
    now = bytes_per_token(model, job.recompute == "full", job.recomputed)
    total = _chunks_in_flight(job, rank) * layers * job.tokens * now
    if job.recompute == "full" or job.recomputed:
        total += job.tokens * (bytes_per_token(model) - now)
    losses = sum(chunk.count("L") + chunk.count("m") for chunk in chunks)
    # bf16 logits and their fp32 softmax, which becomes the gradient in place.
    return total + losses * job.tokens * model.vocab_size * (_BF16 + _FP32)


def _chunks_in_flight(job: Job, rank: int) -> int:
    """Model chunks whose activations are alive at once: 1F1B, interleaved when there are virtual stages."""
    ahead = job.pp - rank - 1
    alive = ahead + 1 if job.virtual_pp == 1 else 2 * ahead + (job.virtual_pp - 1) * job.pp + 1
    return min(alive + int(job.overlap > 0), job.micro_batches * job.virtual_pp)


@lru_cache(maxsize=256)
def bytes_per_token(model: Architecture, full: bool = False, modules: tuple[str, ...] = ()) -> int:
    """Kept for the backward by one MoE layer and one token, of which all or these modules are recomputed. Tensor
    parallelism does not appear: it halves heads and doubles the tokens that a rank's heads see. core_attn and mlp save
    nothing here: attention is fused, and dense layers, which keep less, are counted as MoE layers."""
    m = model
    if full:
        return _BF16 * m.hidden_size
    heads = m.num_attention_heads
    inputs, norms = 2 * m.hidden_size, 2 * m.hidden_size
    attention_out = heads * m.head_dim
    if m.mla:
        latents = m.q_lora_rank + m.kv_lora_rank + m.rope_head_dim
        projected = heads * (2 * (m.head_dim + m.rope_head_dim) + m.head_dim)
    else:
        latents, projected = 0, (heads + 2 * m.num_query_groups) * m.head_dim
    expert_in, gate_up, activated = m.hidden_size, 2 * m.moe_ffn_hidden_size, m.moe_ffn_hidden_size
    shared = 3 * m.shared_ffn_hidden_size
    norms = 0 if "layernorm" in modules else norms
    projected = 0 if m.mla and "mla_up_proj" in modules else projected
    activated = 0 if "moe_act" in modules else activated
    shared = 0 if "shared_experts" in modules else shared
    of_experts = shared + m.topk * (expert_in + gate_up + activated)
    scores = 2 * _FP32 * m.num_experts
    if "moe" in modules:  # of the whole MoE layer its input is kept, which is among `inputs` and `norms`
        of_experts, scores = (0 if norms else m.hidden_size), 0
    return _BF16 * (inputs + norms + attention_out + latents + projected + of_experts) + scores


def _architecture(job: Job) -> Architecture:
    if job.model.architecture is None:
        raise ValueError(f"model={job.model.name!r}: its memory is not known; give it an architecture")
    return job.model.architecture
