"""Whether weights travel in a layer, or tokens: what was asked for, or the roofline's answer, printed."""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING

from hybrid_ep.hardware import clusters
from hybrid_ep.perf import dwdp
from hybrid_ep.perf.models import MoeModel

if TYPE_CHECKING:
    import torch.distributed as dist
    from megatron.core.transformer.transformer_config import TransformerConfig

    from megatron_patches import settings
    from megatron_patches.experts import GroupedExperts


def travels(
    wanted: settings.Weights,
    config: TransformerConfig,
    experts: GroupedExperts,
    place: tuple[int, int],
    tokens: int,
    group: dist.ProcessGroup,
) -> bool:
    """Of a layer, for micro-batches of so many tokens a rank; equal on ranks told the same. place: its number, and of
    how many layers.

    With "auto" rank 0 of the group prints the roofline's microseconds to stderr, and the memory of all layers. It is a
    training step's choice where the experts are trained, also when an evaluation comes first. In a group of one rank
    there is nothing to choose, and tokens move."""
    if wanted.cluster is None or group.size() == 1:
        return wanted.move == "weights"
    cluster = clusters.get(wanted.cluster)
    number, layers = place
    model, ranks, training = model_of(config, experts), group.size(), experts.weight1.requires_grad
    found = dwdp.choose(
        model,
        cluster,
        tokens,
        ranks,
        "bf16",
        training=training,
        micro_batches=micro_batches(),
        held=wanted.local_experts,
        group=wanted.group,
        resident=wanted.buffers >= layers,
    )
    memory = dwdp.memory_bytes(
        model,
        ranks,
        layers,
        "bf16",
        training=training,
        buffers=wanted.buffers,
        held=wanted.local_experts,
        group=wanted.group,
    )
    if group.rank() == 0:
        print(
            f"hybrid_ep: MoE layer {number} moves {found.move}: on {cluster.name}, with {tokens} tokens a rank "
            f"in bf16, {found.tokens_us:.0f} us moving tokens and {found.weights_us:.0f} us moving weights, "
            f"for which {layers} layers take {memory / 2**20:,.0f} MiB a rank beside its parameters",
            file=sys.stderr,
            flush=True,
        )
    return found.move == "weights"


def micro_batches() -> int:
    """Of a step, as Megatron's training loop counts them; 1 without it."""
    known = importlib.import_module("megatron.core.num_microbatches_calculator")
    return 1 if known._GLOBAL_NUM_MICROBATCHES_CALCULATOR is None else int(known.get_num_microbatches())


def model_of(config: TransformerConfig, experts: GroupedExperts) -> MoeModel:
    """What the roofline asks of a model: attention as four square matrices, experts as they are."""
    layers, hidden = config.num_layers, config.hidden_size
    expert = sum(owner[0].numel() for owner in (experts.weight1, experts.weight2))
    total = layers * (4 * hidden**2 + config.num_moe_experts * expert) / 1e9
    width = expert // (3 * hidden) or 1  # three matrices of this width have as many elements
    return MoeModel(
        "of the configuration",
        hidden,
        width,
        layers,
        layers,
        config.num_moe_experts,
        config.moe_router_topk,
        total,
        4.0 * hidden**2,
        4.0 * hidden,
        "TransformerConfig",
    )
