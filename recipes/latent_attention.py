"""The inner product of latent attention without Transformer Engine: Megatron's own, told that heads of queries and keys
are wider than those of values."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from megatron.core import package_info
from megatron.core.transformer.dot_product_attention import DotProductAttention

if TYPE_CHECKING:
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules


class LatentDotProductAttention(DotProductAttention):
    """DotProductAttention, which multiplies heads of any width, with the two widths that latent attention passes.

    k_channels: of queries and keys, rotated part included. v_channels: of values, and of what comes out; ValueError
    where Megatron would lay it out with another width."""

    def __init__(
        self, *args: Any, k_channels: int | None = None, v_channels: int | None = None, **keywords: Any
    ) -> None:
        super().__init__(*args, **keywords)  # Megatron makes one without widths first, and throws it away
        if v_channels not in (None, self.config.kv_channels):
            raise ValueError(f"v_head_dim is {v_channels}: give hidden_size / num_attention_heads")


def use(spec: ModuleSpec | TransformerBlockSubmodules) -> None:
    """Puts it into the spec of a layer, or of every layer of a block. Specs are made anew for each model. ValueError
    for a release whose latent attention asks Transformer Engine for more."""
    if (package_info.MAJOR, package_info.MINOR) < (0, 17):
        raise ValueError(
            f"model.kv_lora_rank: megatron-core {package_info.MAJOR}.{package_info.MINOR} has no latent attention "
            "without Transformer Engine; install 0.17 or newer (Python 3.12), or give 0, and 0 for q_lora_rank and "
            "rope_head_dim"
        )
    for layer in getattr(spec, "layer_specs", None) or [spec]:
        layer.submodules.self_attention.submodules.core_attention = LatentDotProductAttention
