"""Memory of one GPU in a `ClusterRun`: weights, gradients, optimizer, activations, clones, hybrid_ep's buffers.

The registered buffers are exact to the byte, from the compiled layout itself. Weights, gradients and optimizer state
are counted parameters times Megatron's bytes a parameter. Activations are an estimate in bf16 with experts evenly
loaded, made of the tensors that the backward pass needs; allocator and library overhead is `memory_reserve`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

from .cluster import ClusterRun

_BF16, _FP32 = 2, 4
# fp32 master weight and Adam's two moments, by the type of the moments.
_OPTIMIZER_BYTES = {"fp32": 12, "bf16": 8}


@dataclass(frozen=True)
class Memory:
    """Bytes on the fullest GPU, that of pipeline rank `stage`."""

    stage: int
    parameters: int
    weights: int
    gradients: int
    optimizer: int
    activations: int
    clones: int
    buffers: int

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer + self.activations + self.clones + self.buffers

    def __str__(self) -> str:
        names = [f.name for f in fields(self) if f.name not in ("stage", "parameters")] + ["total"]
        return "\n".join(f"  {name:<12}{getattr(self, name) / 1e9:>10.2f} GB" for name in names)


def per_gpu(run: ClusterRun) -> Memory:
    """The fullest pipeline rank's memory."""
    buffers = registered_bytes(run)
    return max((_of_stage(run, rank, buffers) for rank in range(run.pipeline)), key=lambda memory: memory.total)


def budget_bytes(run: ClusterRun) -> int:
    """What a GPU holds less the reserve."""
    return int(run.hardware.memory_bytes * (1 - run.memory_reserve))


def check_fits(run: ClusterRun) -> Memory:
    """The memory; ValueError with the number that is over, and by how much, where it does not fit."""
    memory, budget = per_gpu(run), budget_bytes(run)
    if memory.total > budget:
        parts = ", ".join(
            f"{name} {getattr(memory, name) / 1e9:.1f}"
            for name in ("weights", "gradients", "optimizer", "activations", "clones", "buffers")
            if getattr(memory, name) or name != "clones"
        )
        raise ValueError(
            f"num_hosts={run.num_hosts}: {run.recipe} on {run.num_gpus} x {run.hardware.gpu}: a GPU of pipeline rank "
            f"{memory.stage} needs {memory.total / 1e9:.1f} GB ({parts}), {(memory.total - budget) / 1e9:.1f} GB over "
            f"the {budget / 1e9:.1f} GB there are (reserve {run.memory_reserve:.0%}); use {_more_hosts(run)}a longer "
            "pipeline, a larger expert group or more recompute"
        )
    return memory


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
    slots are `clone_bytes`.

    One buffer serves all layers. Its receive rows are those that it begins with: for twice the mean of the group, or
    every token of the group if that is less; a rank that receives more makes all ranks' grow. Its arena is the default.
    A quantised dispatch has scales beside its rows from its first call on.
    """
    if run.dispatcher != "hybrid_ep":
        return 0
    import torch

    from hybrid_ep import _core
    from hybrid_ep.balance import MicrobatchOptions
    from hybrid_ep.payload import quantize
    from hybrid_ep.runtime.device_arena import whole_bytes
    from hybrid_ep.runtime.options import default_arena_bytes, first_recv_rows
    from hybrid_ep.runtime.tensors import padded_row_bytes

    model, tokens = run.architecture, run.tokens_per_rank
    row_bytes = _BF16 * model.hidden_size
    # Every rank's spare slots are columns of the map, as its owner slots are.
    # A buffer opens for eight experts a token and grows when a call brings more.
    call = {
        "max_tokens": tokens,
        "max_topk": min(max(8, model.topk), model.num_experts),
        "row_bytes": row_bytes,
        "scale_bytes": 0,
    }
    nodes, clones, scale_bytes = run.expert // run.domain, None, 0
    if quantised := quantize.format_of(run.dispatch_dtype, model.hidden_size):
        blocks = model.hidden_size // quantised.block
        scale_bytes = padded_row_bytes(torch.empty(1, blocks, dtype=quantised.scale_dtype, device="meta"))
    if run.clones:
        options = MicrobatchOptions(**run.balance_settings.planner_options(nodes))
        clones = options.shape(run.expert, model.num_experts)
    shape = _core.BufferShape(
        num_nodes=nodes,
        num_local_ranks=run.domain,
        num_experts=model.num_experts + run.expert * run.clones,
        recv_rows=first_recv_rows(None, tokens, call["max_topk"], run.expert),
        partial_row_bytes=row_bytes,
        arena_bytes=whole_bytes(default_arena_bytes(call)),
        clones=clones,
        max_tokens=tokens,
        max_topk=call["max_topk"],
        row_bytes=row_bytes,
        scale_bytes=scale_bytes,
    )
    return shape.total_bytes


def _of_stage(run: ClusterRun, rank: int, buffers: int) -> Memory:
    dense, experts = _parameters(run, rank)
    weight_bytes = _BF16
    if run.precision != "bf16" and not run.keeps_fp8_params:
        # Transformer Engine keeps 8-bit weights and their transposes beside the bf16 ones. Our experts keep none and
        # quantise a product's as they multiply: that is less.
        weight_bytes += 2
    if run.sharding == "megatron_fsdp":
        one_layer = _largest_layer(run)
        shards = dense // run.data + experts // run.expert_data
        weights, gradients = shards * weight_bytes + 2 * one_layer * _BF16, shards * _FP32 + one_layer * _FP32
    else:
        weights, gradients = (dense + experts) * weight_bytes, (dense + experts) * _FP32
    optimizer = _OPTIMIZER_BYTES[run.moments] * (-(-dense // run.data) + -(-experts // run.expert_data))
    clones = clone_bytes(run) if experts else 0
    return Memory(rank, dense + experts, weights, gradients, optimizer, _activations(run, rank), clones, buffers)


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
    from hybrid_ep.runtime.options import first_recv_rows
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
        recv_rows=first_recv_rows(None, 1, topk, ranks),
        partial_row_bytes=row_bytes,
        max_tokens=1,
        max_topk=topk,
        row_bytes=row_bytes,
        spares=slots.core_shape(),
    )
    return shape.total_bytes


def _parameters(run: ClusterRun, rank: int) -> tuple[int, int]:
    """(dense, expert) parameters on a GPU of pipeline rank `rank`. Tensor parallelism splits the dense ones but for
    `whole`, which every tensor rank has: norms, routers, down-projections of latent attention."""
    model, dense, whole, experts, layer = run.architecture, 0, 0, 0, 0
    kinds = _kinds(run)
    for letter in "".join(run.stages()[rank]):
        if letter == "t":
            moe, layer = kinds[rank][layer], layer + 1
        else:
            moe = letter == "m"
        if letter in "EL":
            dense += model.embedding_params
            whole += model.hidden_size if letter == "L" else 0
            continue
        kept = model.replicated_params
        if moe:
            kept += model.router_params + (3 * model.hidden_size if letter == "m" else 0)
            dense += model.moe_dense_params + (model.mtp_extra_params if letter == "m" else 0)
            experts += model.num_experts // run.expert * model.expert_params
        else:
            dense += model.dense_layer_params
        whole, dense = whole + kept, dense - kept
    return -(-dense // run.tensor) + whole, experts


def _kinds(run: ClusterRun) -> list[list[bool]]:
    """For every pipeline rank, whether each of its layers has experts, in the order of its chunks."""
    stages, index = run.stages(), 0
    kinds: list[list[bool]] = [[] for _ in stages]
    for chunk in range(run.virtual_pipeline):
        for rank, chunks in enumerate(stages):
            for _ in range(chunks[chunk].count("t")):
                kinds[rank].append(index >= run.architecture.num_dense_layers)
                index += 1
    return kinds


def _largest_layer(run: ClusterRun) -> int:
    model = run.architecture
    moe = model.moe_dense_params + model.num_experts // run.expert * model.expert_params
    return max(model.embedding_params, model.dense_layer_params, moe)


def _activations(run: ClusterRun, rank: int) -> int:
    """Kept by the micro-batches in flight, the working set of one recomputed layer, and the logits."""
    chunks = run.stages()[rank]
    layers = max(chunk.count("t") + chunk.count("m") for chunk in chunks)
    now = bytes_per_token(run, run.recompute == "full", run.recompute_modules)
    kept = layers * run.tokens_per_rank * now
    total = _chunks_in_flight(run, rank) * kept
    if run.recompute != "none":
        total += run.tokens_per_rank * (bytes_per_token(run) - now)
    losses = sum(chunk.count("L") + chunk.count("m") for chunk in chunks)
    # bf16 logits and their fp32 softmax, which becomes the gradient in place.
    return total + losses * run.tokens_per_rank * run.architecture.vocab_size * (_BF16 + _FP32)


def _chunks_in_flight(run: ClusterRun, rank: int) -> int:
    """Model chunks whose activations are alive at once: 1F1B, interleaved when there are virtual stages."""
    ahead = run.pipeline - rank - 1
    if run.virtual_pipeline == 1:
        alive = ahead + 1
    else:
        alive = 2 * ahead + (run.virtual_pipeline - 1) * run.pipeline + 1
    return min(alive + int(run.overlap), run.num_microbatches * run.virtual_pipeline)


def bytes_per_token(run: ClusterRun, full: bool = False, modules: Sequence[str] = ()) -> int:
    """Kept for the backward by one MoE layer and one token, of which all or these modules are recomputed. Tensor
    parallelism does not appear: it halves heads and doubles the tokens that a rank's heads see. core_attn and mlp save
    nothing here: attention is fused, and dense layers, which keep less, are counted as MoE layers."""
    m = run.architecture
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
    projected = 0 if "mla_up_proj" in modules else projected
    activated = 0 if "moe_act" in modules else activated
    shared = 0 if "shared_experts" in modules else shared
    of_experts = shared + m.topk * (expert_in + gate_up + activated)
    scores = 2 * _FP32 * m.num_experts
    if "moe" in modules:  # of the whole MoE layer its input is kept, which is among `inputs` and `norms`
        of_experts, scores = (0 if norms else m.hidden_size), 0
    return _BF16 * (inputs + norms + attention_out + latents + projected + of_experts) + scores
