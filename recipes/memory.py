"""Memory of one GPU in a `ClusterRun`: what `hybrid_ep.perf.memory` counts of its job, and what that knows nothing of:
the expert balancer's clones and Megatron-FSDP's shards."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from hybrid_ep import buffer_sizes
from hybrid_ep.perf import memory, models, shape
from hybrid_ep.perf.architecture import Architecture
from hybrid_ep.perf.memory import Memory
from hybrid_ep.perf.models import MoeModel
from hybrid_ep.perf.step_time import Job

from .cluster import ClusterRun
from .modelled import job_of

_BF16, _FP32 = 2, 4


def per_gpu(run: ClusterRun) -> Memory:
    """The fullest pipeline rank's memory."""
    job = job_of(run, _model(run.architecture))
    stages = memory.of_stages(job, registered_bytes(run))
    if run.sharding == "megatron_fsdp":
        stages = [_sharded(run, job, stage) for stage in stages]
    if run.clones:
        clones = clone_bytes(run)
        parts = memory.parameters(job)
        stages = [replace(s, clones=clones) if parts[s.stage][1] else s for s in stages]
    return memory.fullest(stages)


@lru_cache(maxsize=64)
def _model(architecture: Architecture) -> MoeModel:
    """Whatever its name is: counting needs no published model."""
    return models.of(architecture)


def budget_bytes(run: ClusterRun) -> int:
    """What a GPU holds less the reserve."""
    return int(run.hardware.memory_bytes * (1 - run.memory_reserve))


def check_fits(run: ClusterRun) -> Memory:
    """The memory; ValueError with the number that is over, and by how much, where it does not fit."""
    need, budget = per_gpu(run), budget_bytes(run)
    if need.total > budget:
        parts = ", ".join(
            f"{name} {getattr(need, name) / 1e9:.1f}"
            for name in ("weights", "gradients", "optimizer", "activations", "clones", "buffers")
            if getattr(need, name) or name != "clones"
        )
        raise ValueError(
            f"num_hosts={run.num_hosts}: {run.recipe} on {run.num_gpus} x {run.hardware.gpu}: a GPU of pipeline rank "
            f"{need.stage} needs {need.total / 1e9:.1f} GB ({parts}), {(need.total - budget) / 1e9:.1f} GB over "
            f"the {budget / 1e9:.1f} GB there are (reserve {run.memory_reserve:.0%}); use {_more_hosts(run)}a longer "
            "pipeline, a larger expert group or more recompute"
        )
    return need


def _more_hosts(run: ClusterRun) -> str:
    """The fewest hosts that hold the run as it is, where up to eight times as many do; else nothing."""
    for hosts in range(run.num_hosts + 1, 8 * run.num_hosts + 1):
        try:
            more = run.derive(num_hosts=hosts)
        except ValueError:  # its sizes do not divide so many
            continue
        if per_gpu(more).total <= budget_bytes(more):
            return f"num_hosts={hosts}, "
    return ""


def registered_bytes(run: ClusterRun) -> int:
    """Bytes that hybrid_ep's buffer registers on each rank for this run, to the byte; 0 with another dispatcher. Spare
    slots are `clone_bytes`; every rank's are columns of the map, as its owner slots are."""
    if run.dispatcher != "hybrid_ep":
        return 0
    model, nodes, clones = run.architecture, run.expert // run.domain, None
    if run.clones:
        from hybrid_ep.balance import MicrobatchOptions

        options = MicrobatchOptions(**run.balance_settings.planner_options(nodes))
        clones = options.shape(run.expert, model.num_experts)
    return buffer_sizes.registered_bytes(
        nodes,
        run.domain,
        model.num_experts,
        run.tokens_per_rank,
        model.topk,
        _BF16 * model.hidden_size,
        shape.scale_bytes(run.dispatch_dtype, model.hidden_size),
        run.clones,
        clones,
    )


def _sharded(run: ClusterRun, job: Job, stage: Memory) -> Memory:
    """With weights and gradients in Megatron-FSDP's shards, beside those of the layers that are gathered."""
    dense, experts = memory.parameters(job)[stage.stage]
    one_layer, shards = _largest_layer(run), dense // run.data + experts // run.expert_data
    return replace(
        stage,
        weights=shards * memory.weight_bytes_of(job) + 2 * one_layer * _BF16,
        gradients=shards * _FP32 + one_layer * _FP32,
    )


def clone_bytes(run: ClusterRun) -> int:
    """Bytes that exact balancing takes on each rank, to the byte, for all layers together.

    A spare slot holds one expert in bf16, and a layer's backward has the clones' gradients as the GEMM makes them.
    Where kernels push, both slots and gradients in fp32 are registered, and owners add what they read there. Where
    torch does, the backward has gradients in fp32 to be sent as well, and twice as many that a rank relays and sums.
    Between nodes some GPUs leave it to torch where the choice is auto: then it is the more of the two. Where forwards
    and backwards take turns, forwards have slots of their own.
    """
    one = run.clones * run.architecture.expert_params
    by_torch = one * (_BF16 * (2 if run.overlap else 1) + _BF16 + _FP32 + 2 * _FP32)
    if not run.clones or run.pushed_by == "torch":
        return by_torch
    by_kernels = spare_bytes(run) + one * _BF16
    if run.overlap:
        by_kernels += spare_bytes(run, gradients=False)
    return by_kernels if run.clones_stay or run.balance_push == "kernels" else max(by_kernels, by_torch)


def spare_bytes(run: ClusterRun, gradients: bool = True) -> int:
    """Bytes that `hybrid_ep.spares.SpareSlots` registers on each rank for all layers of this run, to the byte."""
    import torch

    from hybrid_ep import _core
    from hybrid_ep.runtime import spares
    from hybrid_ep.runtime.validation import least_row_bytes

    model, ranks = run.architecture, run.expert
    shapes = [(2 * model.moe_ffn_hidden_size, model.hidden_size), (model.hidden_size, model.moe_ffn_hidden_size)]
    slots = spares.layout(run.clones, model.num_experts // ranks, shapes, torch.bfloat16, run.clones_stay, gradients)
    # A session that dispatches nothing has room for one row of eight values.
    topk, row_bytes = min(8, ranks), least_row_bytes(8)
    shape = _core.BufferShape(
        num_nodes=ranks // run.domain,
        num_local_ranks=run.domain,
        num_experts=ranks,
        recv_rows=buffer_sizes.first_recv_rows(None, 1, topk, ranks),
        partial_row_bytes=row_bytes,
        max_tokens=1,
        max_topk=topk,
        row_bytes=row_bytes,
        spares=slots.core_shape(),
    )
    return shape.total_bytes


def _largest_layer(run: ClusterRun) -> int:
    model = run.architecture
    moe = model.moe_dense_params + model.num_experts // run.expert * model.expert_params
    return max(model.embedding_params, model.dense_layer_params, moe)
