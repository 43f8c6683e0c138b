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

    def whole_params(self, mtp_layers: int) -> int:
        """Of the whole model with so many layers of multi-token prediction, those that tensor parallelism leaves whole
        on every rank."""
        routers = self.num_layers - self.num_dense_layers + mtp_layers
        norms = self.hidden_size * (1 + 3 * mtp_layers)  # before the output layer, and of multi-token prediction
        return (self.num_layers + mtp_layers) * self.replicated_params + routers * self.router_params + norms

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


ARCHITECTURES = {
    a.name: a
    for a in (
        Architecture(
            name="deepseek_v3",
            source="huggingface.co/deepseek-ai/DeepSeek-V3 config.json; bias, loss, initialisation, moments: "
            "arXiv 2412.19437, sections 3.3 and 4.2",
            num_layers=61,
            num_dense_layers=3,
            hidden_size=7168,
            ffn_hidden_size=18432,
            moe_ffn_hidden_size=2048,
            num_experts=256,
            topk=8,
            vocab_size=129280,
            num_attention_heads=128,
            head_dim=128,
            q_lora_rank=1536,
            kv_lora_rank=512,
            rope_head_dim=64,
            shared_ffn_hidden_size=2048,
            num_mtp_layers=1,
            score_function="sigmoid",
            router_num_groups=8,
            router_group_topk=4,
            topk_scaling_factor=2.5,
            expert_bias=True,
            aux_loss="seq_aux_loss",
            aux_loss_coeff=1e-4,
            qk_layernorm=True,
            init_method_std=0.006,
            rope_factor=40.0,
            rope_mscale=1.0,
            rope_mscale_all_dim=1.0,
        ),
        Architecture(
            name="qwen3_235b_a22b",
            source="huggingface.co/Qwen/Qwen3-235B-A22B config.json; global-batch balance: arXiv 2505.09388, section 2",
            num_layers=94,
            num_dense_layers=0,
            hidden_size=4096,
            ffn_hidden_size=12288,
            moe_ffn_hidden_size=1536,
            num_experts=128,
            topk=8,
            vocab_size=151936,
            num_attention_heads=64,
            num_query_groups=4,
            head_dim=128,
            qk_layernorm=True,
            rotary_base=1_000_000,
            max_positions=40960,
            aux_loss="global_aux_loss",
        ),
        Architecture(
            name="qwen3_30b_a3b",
            source="huggingface.co/Qwen/Qwen3-30B-A3B config.json; global-batch balance: arXiv 2505.09388, section 2",
            num_layers=48,
            num_dense_layers=0,
            hidden_size=2048,
            ffn_hidden_size=6144,
            moe_ffn_hidden_size=768,
            num_experts=128,
            topk=8,
            vocab_size=151936,
            num_attention_heads=32,
            num_query_groups=4,
            head_dim=128,
            qk_layernorm=True,
            rotary_base=1_000_000,
            max_positions=40960,
            aux_loss="global_aux_loss",
        ),
        Architecture(
            name="mixtral_8x7b",
            source="huggingface.co/mistralai/Mixtral-8x7B-v0.1 config.json",
            num_layers=32,
            num_dense_layers=0,
            hidden_size=4096,
            ffn_hidden_size=14336,
            moe_ffn_hidden_size=14336,
            num_experts=8,
            topk=2,
            vocab_size=32000,
            num_attention_heads=32,
            num_query_groups=8,
            head_dim=128,
            rotary_base=1_000_000,
            max_positions=32768,
            norm_epsilon=1e-5,
            aux_loss_coeff=2e-2,
        ),
    )
}


def get(name: str) -> Architecture:
    """The architecture of that name; ValueError lists those there are."""
    if name not in ARCHITECTURES:
        raise ValueError(f"model={name!r}: use one of {', '.join(ARCHITECTURES)}")
    return ARCHITECTURES[name]
