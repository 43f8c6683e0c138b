"""Architectures that the advice and the step model know; every fact from the model's published config.json."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class MoeModel:
    """hidden, expert_hidden: row widths; moe_layers of num_layers have experts; total, active: billions of parameters.
    attention_flops: forward FLOPs a token and layer for each token it attends to (scores and values, all heads)."""

    name: str
    hidden: int
    expert_hidden: int
    num_layers: int
    moe_layers: int
    experts: int
    topk: int
    total: float
    active: float
    attention_flops: float
    source: str

    @property
    def expert_params(self) -> float:
        """Parameters of one expert: gate, up and down projection."""
        return 3.0 * self.hidden * self.expert_hidden

    @property
    def routed_params(self) -> float:
        """Parameters of all routed experts of all layers."""
        return self.expert_params * self.experts * self.moe_layers

    def train_flops_per_token(self, sequence: int) -> float:
        """Forward and backward: 6 a parameter, three times the forward's attention over half a sequence."""
        return 6e9 * self.active + 3 * self.num_layers * self.attention_flops * sequence / 2


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
            37.0,
            2 * 128 * (192 + 128),
            "deepseek-ai/DeepSeek-V3 config.json; 671B total, 37B active (technical report)",
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
            22.0,
            2 * 64 * (128 + 128),
            "Qwen/Qwen3-235B-A22B config.json and model card",
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
            3.3,
            2 * 32 * (128 + 128),
            "Qwen/Qwen3-30B-A3B config.json and model card",
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
            12.9,
            2 * 32 * (128 + 128),
            "mistralai/Mixtral-8x7B-v0.1 config.json and paper",
        ),
    )
}


def get(name: str) -> MoeModel:
    """The model of that name; ValueError lists those there are."""
    if name not in MODELS:
        raise ValueError(f"model={name!r}: use one of {', '.join(MODELS)}")
    return MODELS[name]
