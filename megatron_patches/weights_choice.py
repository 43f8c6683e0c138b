"""Whether weights travel in a layer, or tokens: what was asked for, or the roofline's answer, printed."""

from __future__ import annotations

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
    number: int,
    tokens: int,
    group: dist.ProcessGroup,
) -> bool:
    """Of the layer with this number, for micro-batches of so many tokens a rank; equal on ranks told the same.

    With "auto" rank 0 of the group prints the roofline's microseconds to stderr. In a group of one rank there is
    nothing to choose, and tokens move."""
    if wanted.cluster is None or group.size() == 1:
        return wanted.move == "weights"
    cluster = clusters.get(wanted.cluster)
    found = dwdp.choose(model_of(config, experts), cluster, tokens, group.size(), "bf16", training=experts.training)
    if group.rank() == 0:
        print(
            f"hybrid_ep: MoE layer {number} moves {found.move}: on {cluster.name}, with {tokens} tokens a rank "
            f"in bf16, {found.tokens_us:.0f} us moving tokens and {found.weights_us:.0f} us moving weights",
            file=sys.stderr,
            flush=True,
        )
    return found.move == "weights"


def model_of(config: TransformerConfig, experts: GroupedExperts) -> MoeModel:
    """What the roofline asks of a model: attention as four square matrices, experts as they are."""
    layers, hidden = config.num_layers, config.hidden_size
    expert = sum(owner[0].numel() for owner in (experts.weight1, experts.weight2))
    active = layers * (4 * hidden**2 + config.moe_router_topk * expert) / 1e9
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
        active,
        4.0 * hidden,
        "TransformerConfig",
    )
