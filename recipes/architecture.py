"""What a published model is: the numbers of its config.json, and its parameters counted from them.

Counting is exact, so it can be compared with what the published checkpoints hold. Nothing here knows of GPUs.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Architecture:
    """Widths are in elements. `source`: where every number was read. 0 switches an optional part off."""

    name: str
    source: str
    num_layers: int
    num_dense_layers: int
    """Leading layers with a dense feed-forward block in place of experts."""
    hidden_size: int
    ffn_hidden_size: int
    """Width of a dense layer's SwiGLU."""
    moe_ffn_hidden_size: int
    num_experts: int
    topk: int
    vocab_size: int
    num_attention_heads: int
    num_query_groups: int = 0
    head_dim: int = 128
    qk_layernorm: bool = False
    rotary_base: int = 10_000
    max_positions: int = 4096
    norm_epsilon: float = 1e-6
    shared_ffn_hidden_size: int = 0
    num_mtp_layers: int = 0
    # Multi-head latent attention (DeepSeek): ranks of the low-rank projections and parts of a head.
    q_lora_rank: int = 0
    kv_lora_rank: int = 0
    rope_head_dim: int = 0
    # Router.
    score_function: str = "softmax"
    router_num_groups: int = 0
    router_group_topk: int = 0
    topk_scaling_factor: float = 0.0
    expert_bias: bool = False
    aux_loss: str = "aux_loss"
    aux_loss_coeff: float = 1e-3
    bias_update_rate: float = 1e-3
    init_method_std: float = 0.02
    # How rotary positions of the published weights are scaled (YaRN); training from scratch at 4K scales none.
    rope_factor: float = 1.0
    rope_mscale: float = 1.0
    rope_mscale_all_dim: float = 0.0

    @property
    def mla(self) -> bool:
        """Whether attention is multi-head latent attention."""
        return self.kv_lora_rank > 0

    @property
    def expert_params(self) -> int:
        """Of one routed expert: gate, up and down projection."""
        return 3 * self.hidden_size * self.moe_ffn_hidden_size

    @property
    def attention_params(self) -> int:
        """Of one layer's attention, its own norms included, the layer's two norms not."""
        h, heads = self.hidden_size, self.num_attention_heads
        if self.mla:
            query_key = self.head_dim + self.rope_head_dim
            query = h * self.q_lora_rank + self.q_lora_rank + self.q_lora_rank * heads * query_key
            key_value = h * (self.kv_lora_rank + self.rope_head_dim) + self.kv_lora_rank
            key_value += self.kv_lora_rank * heads * 2 * self.head_dim
            return query + key_value + heads * self.head_dim * h
        projections = h * self.head_dim * (2 * heads + 2 * self.num_query_groups)
        return projections + (2 * self.head_dim if self.qk_layernorm else 0)

    @property
    def replicated_params(self) -> int:
        """Of one layer's dense parameters, those that tensor parallelism leaves whole on every rank: norms and the
        down-projections of latent attention. A MoE layer has its router beside them."""
        whole = 2 * self.hidden_size
        if self.mla:
            latents = self.q_lora_rank + self.kv_lora_rank
            return whole + self.hidden_size * (latents + self.rope_head_dim) + latents
        return whole + (2 * self.head_dim if self.qk_layernorm else 0)

    @property
    def router_params(self) -> int:
        """Of one MoE layer."""
        return self.hidden_size * self.num_experts + (self.num_experts if self.expert_bias else 0)

    @property
    def moe_dense_params(self) -> int:
        """Of one MoE layer, all that every rank of an expert-parallel group holds: attention, norms, router, shared."""
        shared = 3 * self.hidden_size * self.shared_ffn_hidden_size
        return self.attention_params + 2 * self.hidden_size + self.router_params + shared

    @property
    def dense_layer_params(self) -> int:
        """Of one leading dense layer."""
        return self.attention_params + 2 * self.hidden_size + 3 * self.hidden_size * self.ffn_hidden_size

    @property
    def mtp_extra_params(self) -> int:
        """Of one multi-token-prediction layer beyond a MoE layer: projection of two states, three norms."""
        return 2 * self.hidden_size**2 + 3 * self.hidden_size

    @property
    def embedding_params(self) -> int:
        """Of the embedding alone; the output layer is not tied to it and is as large."""
        return self.vocab_size * self.hidden_size

    @property
    def total_params(self) -> int:
        """Of the model without multi-token prediction, as published sizes are given."""
        moe = self.num_layers - self.num_dense_layers
        layers = self.num_dense_layers * self.dense_layer_params
        layers += moe * (self.moe_dense_params + self.num_experts * self.expert_params)
        return layers + 2 * self.embedding_params + self.hidden_size

    @property
    def active_params(self) -> int:
        """That one token meets: top-k experts in place of all."""
        moe = self.num_layers - self.num_dense_layers
        return self.total_params - moe * (self.num_experts - self.topk) * self.expert_params
