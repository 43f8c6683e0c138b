"""FLOPs of a token are those of Megatron's own formula, which published TFLOPS go by."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from hybrid_ep.perf import models
from recipes import CLUSTER_RECIPES

training = pytest.importorskip(
    "megatron.training.training", reason="megatron.training is not there", exc_type=ImportError
)


class Arguments(SimpleNamespace):
    """What is not given is off, as releases differ in what they ask for."""

    def __getattr__(self, name: str) -> None:
        return None


@pytest.mark.parametrize(
    "name, mtp_layers", [*((name, 0) for name in CLUSTER_RECIPES), ("deepseek_v3", 1), ("qwen3_30b_a3b", 2)]
)
def test_flops_are_megatron_s(name, mtp_layers):
    a = CLUSTER_RECIPES[name]("h100_8x400g").architecture
    arguments = Arguments(
        hidden_size=a.hidden_size,
        num_layers=a.num_layers,
        seq_length=4096,
        group_query_attention=not a.mla,
        num_attention_heads=a.num_attention_heads,
        num_query_groups=a.num_query_groups or a.num_attention_heads,
        kv_channels=a.head_dim,
        num_experts=a.num_experts,
        moe_layer_freq=[0] * a.num_dense_layers + [1] * (a.num_layers - a.num_dense_layers),
        moe_router_topk=a.topk,
        moe_ffn_hidden_size=a.moe_ffn_hidden_size,
        ffn_hidden_size=a.ffn_hidden_size,
        moe_shared_expert_intermediate_size=a.shared_ffn_hidden_size or None,
        swiglu=True,
        multi_latent_attention=a.mla,
        q_lora_rank=a.q_lora_rank,
        kv_lora_rank=a.kv_lora_rank,
        qk_head_dim=a.head_dim,
        qk_pos_emb_head_dim=a.rope_head_dim,
        v_head_dim=a.head_dim,
        padded_vocab_size=a.vocab_size,
        mtp_num_layers=mtp_layers or None,
    )
    theirs = training.num_floating_point_operations(arguments, 3) / (3 * 4096)
    assert models.get(name).train_flops_per_token(4096, mtp_layers) == pytest.approx(theirs, rel=1e-12)
