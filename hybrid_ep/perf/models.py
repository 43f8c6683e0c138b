"""Architectures that the advice and the step model know; every fact from the model's published config.json."""

from __future__ import annotations

from dataclasses import dataclass

from hybrid_ep.perf import architecture
from hybrid_ep.perf.architecture import Architecture


@dataclass(frozen=True)
class MoeModel:
    """hidden, expert_hidden, shared_hidden, dense_hidden: widths of rows, of a routed expert, of a MoE layer's shared
    experts together and of a layer without experts; moe_layers of num_layers have experts. total: billions of
    parameters. attention_params: of one layer's projections. attention_flops: forward FLOPs a token and layer for each
    token it attends to (scores and values, all heads). mtp_layers: of multi-token prediction, beyond num_layers, each
    with experts and a pass of the output layer of its own. architecture: where parameters are counted one by one, norms
    and routers too: memory is, and a model without one has none that is known."""

    name: str
    hidden: int
    expert_hidden: int
    num_layers: int
    moe_layers: int
    experts: int
    topk: int
    total: float
    attention_params: float
    attention_flops: float
    source: str
    shared_hidden: int = 0
    dense_hidden: int = 0
    vocab: int = 0
    mtp_layers: int = 0
    architecture: Architecture | None = None

    @property
    def latent(self) -> bool:
        """Whether attention is known to be latent attention."""
        return self.architecture is not None and self.architecture.mla

    @property
    def expert_params(self) -> float:
        """Parameters of one expert: gate, up and down projection."""
        return 3.0 * self.hidden * self.expert_hidden

    @property
    def routed_params(self) -> float:
        """Parameters of all routed experts of all layers."""
        return self.expert_params * self.experts * self.moe_layers

    @property
    def moe_layer_params(self) -> float:
        """Parameters of a MoE layer that multiply every token: projections of attention and shared experts."""
        return self.attention_params + 3 * self.hidden * self.shared_hidden

    @property
    def dense_layer_params(self) -> float:
        """Parameters of a layer without experts that multiply a token."""
        return self.attention_params + 3 * self.hidden * self.dense_hidden

    @property
    def head_params(self) -> float:
        """Parameters of the output layer. The input embedding is as large and multiplies nothing: it is a lookup."""
        return float(self.hidden * self.vocab)

    @property
    def mtp_params(self) -> float:
        """Parameters of a layer of multi-token prediction beyond a MoE layer and the output layer: the projection of
        two states to one, and three norms, which Megatron counts."""
        return 2.0 * self.hidden**2 + 3 * self.hidden

    def train_flops_per_token(self, sequence: int, mtp_layers: int = 0) -> float:
        """Forward and backward as Megatron's `num_floating_point_operations` has them, which published TFLOPS go by: 6
        a parameter that multiplies the token, three times the forward's attention over half a sequence. Routers and
        the embedding are not in it; the norms of latent attention are. mtp_layers: that the run trains."""
        moe, dense = self.moe_layers + mtp_layers, self.num_layers - self.moe_layers
        params = moe * (self.moe_layer_params + self.topk * self.expert_params) + dense * self.dense_layer_params
        params += self.head_params * (1 + mtp_layers) + mtp_layers * self.mtp_params
        return 6 * params + 3 * (self.num_layers + mtp_layers) * self.attention_flops * sequence / 2


def grouped_params(hidden: int, heads: int, groups: int, head_dim: int) -> float:
    """Parameters of one layer's grouped-query attention: queries, keys and values, output."""
    return 2.0 * hidden * head_dim * (heads + groups)


def latent_params(hidden: int, heads: int, query_rank: int, key_rank: int, nope: int, rope: int, value: int) -> float:
    """Parameters of one layer's latent attention. rope, nope: the part of a head of queries and keys that is rotated
    and the part that is not; value: a head's width of values. Megatron counts the two latents' norms."""
    queries = query_rank * (hidden + heads * (nope + rope) + 1)
    keys_values = key_rank * (hidden + heads * (nope + value) + 1) + hidden * rope
    return float(queries + keys_values + heads * value * hidden)


def of(a: Architecture, total: float | None = None, source: str = "") -> MoeModel:
    """What the step model knows of an architecture. total: billions of parameters as published; None: as counted."""
    return MoeModel(
        a.name,
        a.hidden_size,
        a.moe_ffn_hidden_size,
        a.num_layers,
        a.num_layers - a.num_dense_layers,
        a.num_experts,
        a.topk,
        a.total_params / 1e9 if total is None else total,
        _attention_params(a),
        2.0 * a.num_attention_heads * (a.head_dim + a.rope_head_dim + a.head_dim),
        source or a.source,
        shared_hidden=a.shared_ffn_hidden_size,
        dense_hidden=a.ffn_hidden_size if a.num_dense_layers else 0,
        vocab=a.vocab_size,
        mtp_layers=a.num_mtp_layers,
        architecture=a,
    )


def _attention_params(a: Architecture) -> float:
    if not a.mla:
        return grouped_params(a.hidden_size, a.num_attention_heads, a.num_query_groups, a.head_dim)
    widths = (a.q_lora_rank, a.kv_lora_rank, a.head_dim, a.rope_head_dim, a.head_dim)
    return latent_params(a.hidden_size, a.num_attention_heads, *widths)


MODELS = {
    m.name: m
    for m in (
        of(
            architecture.get("deepseek_v3"), 671.0, "deepseek-ai/DeepSeek-V3 config.json; 671B total (technical report)"
        ),
        of(architecture.get("qwen3_235b_a22b"), 235.0, "Qwen/Qwen3-235B-A22B config.json and model card"),
        of(architecture.get("qwen3_30b_a3b"), 30.5, "Qwen/Qwen3-30B-A3B config.json and model card"),
        of(architecture.get("mixtral_8x7b"), 46.7, "mistralai/Mixtral-8x7B-v0.1 config.json and paper"),
    )
}


def get(name: str) -> MoeModel:
    """The model of that name; ValueError lists those there are."""
    if name not in MODELS:
        raise ValueError(f"model={name!r}: use one of {', '.join(MODELS)}")
    return MODELS[name]
