"""Architectures that the advice and the step model know; every fact from the model's published config.json."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class MoeModel:
    """hidden, expert_hidden, shared_hidden, dense_hidden: widths of rows, of a routed expert, of a MoE layer's shared
    experts together and of a layer without experts; moe_layers of num_layers have experts. total: billions of
    parameters. attention_params: of one layer's projections. attention_flops: forward FLOPs a token and layer for each
    token it attends to (scores and values, all heads). mtp_layers: of multi-token prediction, beyond num_layers, each
    with experts and a pass of the output layer of its own."""

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


MODELS = {
    m.name: m
    for m in (
        MoeModel(
            "deepseek_v3",
            7168,
            2048,
            61,
            58,
            256,
            8,
            671.0,
            latent_params(7168, 128, 1536, 512, 128, 64, 128),
            2 * 128 * (192 + 128),
            "deepseek-ai/DeepSeek-V3 config.json; 671B total (technical report)",
            shared_hidden=2048,
            dense_hidden=18432,
            vocab=129280,
            mtp_layers=1,
        ),
        MoeModel(
            "qwen3_235b_a22b",
            4096,
            1536,
            94,
            94,
            128,
            8,
            235.0,
            grouped_params(4096, 64, 4, 128),
            2 * 64 * (128 + 128),
            "Qwen/Qwen3-235B-A22B config.json and model card",
            vocab=151936,
        ),
        MoeModel(
            "qwen3_30b_a3b",
            2048,
            768,
            48,
            48,
            128,
            8,
            30.5,
            grouped_params(2048, 32, 4, 128),
            2 * 32 * (128 + 128),
            "Qwen/Qwen3-30B-A3B config.json and model card",
            vocab=151936,
        ),
        MoeModel(
            "mixtral_8x7b",
            4096,
            14336,
            32,
            32,
            8,
            2,
            46.7,
            grouped_params(4096, 32, 8, 128),
            2 * 32 * (128 + 128),
            "mistralai/Mixtral-8x7B-v0.1 config.json and paper",
            vocab=32000,
        ),
    )
}


def get(name: str) -> MoeModel:
    """The model of that name; ValueError lists those there are."""
    if name not in MODELS:
        raise ValueError(f"model={name!r}: use one of {', '.join(MODELS)}")
    return MODELS[name]
