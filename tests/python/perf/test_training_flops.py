"""FLOPs of a token: against numbers computed by hand, against the recipes' architectures, against published TFLOPS."""

from __future__ import annotations

import csv

import pytest

from hybrid_ep.perf import models, training
from recipes import CLUSTER_RECIPES

# By hand, from the config.json of each, parameters that multiply a token: layers x (attention + experts + shared) +
# dense layers + output layer; a sequence of 4,096 attends to 2,048 on average. Of DeepSeek-V3 with and without its
# layer of multi-token prediction, which passes the output layer once more.
_DEEPSEEK_ATTENTION = 1536 * (7168 + 128 * 192 + 1) + 512 * (7168 + 128 * 256 + 1) + 7168 * 64 + 128 * 128 * 7168
_DEEPSEEK_LAYER = _DEEPSEEK_ATTENTION + 9 * 3 * 7168 * 2048
_DEEPSEEK_SCORES = 3 * 2 * 128 * (192 + 128) * 2048
BY_HAND = {
    ("mixtral_8x7b", 0): 6 * (32 * (4096 * (4096 + 2 * 1024) + 4096 * 4096 + 2 * 3 * 4096 * 14336) + 4096 * 32000)
    + 3 * 32 * 4 * 4096 * 2048,
    ("qwen3_30b_a3b", 0): 6 * (48 * (2048 * (4096 + 2 * 512) + 4096 * 2048 + 8 * 3 * 2048 * 768) + 2048 * 151936)
    + 3 * 48 * 4 * 4096 * 2048,
    ("qwen3_235b_a22b", 0): 6 * (94 * (4096 * (8192 + 2 * 512) + 8192 * 4096 + 8 * 3 * 4096 * 1536) + 4096 * 151936)
    + 3 * 94 * 4 * 8192 * 2048,
    ("deepseek_v3", 0): 6 * (58 * _DEEPSEEK_LAYER + 3 * (_DEEPSEEK_ATTENTION + 3 * 7168 * 18432) + 7168 * 129280)
    + 61 * _DEEPSEEK_SCORES,
    ("deepseek_v3", 1): 6
    * (59 * _DEEPSEEK_LAYER + 3 * (_DEEPSEEK_ATTENTION + 3 * 7168 * 18432) + 2 * 7168 * 129280 + 2 * 7168**2 + 3 * 7168)
    + 62 * _DEEPSEEK_SCORES,
}


@pytest.mark.parametrize("name, mtp_layers", BY_HAND)
def test_flops_of_a_token_by_hand(name, mtp_layers):
    assert models.get(name).train_flops_per_token(4096, mtp_layers) == BY_HAND[name, mtp_layers]


@pytest.mark.parametrize("name", CLUSTER_RECIPES)
def test_the_step_model_s_models_are_the_recipes(name):
    m, a = models.get(name), CLUSTER_RECIPES[name]("h100_8x400g").architecture
    assert (m.hidden, m.expert_hidden, m.num_layers) == (a.hidden_size, a.moe_ffn_hidden_size, a.num_layers)
    assert (m.experts, m.topk, m.vocab, m.mtp_layers) == (a.num_experts, a.topk, a.vocab_size, a.num_mtp_layers)
    assert m.moe_layers == a.num_layers - a.num_dense_layers and m.shared_hidden == a.shared_ffn_hidden_size
    assert m.dense_hidden == (a.ffn_hidden_size if a.num_dense_layers else 0)
    assert 1e9 * m.total == pytest.approx(a.total_params, rel=2e-3)
    norms = 2 * a.head_dim if a.qk_layernorm and not a.mla else 0
    assert m.attention_params == a.attention_params - norms


@pytest.mark.parametrize("name", CLUSTER_RECIPES)
def test_the_input_embedding_multiplies_nothing(name):
    """What a token meets is the products, the embedding, routers and norms; the last two are less than 0.5 %."""
    m, a = models.get(name), CLUSTER_RECIPES[name]("h100_8x400g").architecture
    products = (m.train_flops_per_token(0)) / 6
    assert 0 <= (a.active_params - a.embedding_params - products) / products < 5e-3


def test_published_tflops_tell_what_a_step_trained():
    """Tokens/s and TFLOPS of one row: their ratio is a token's FLOPs, to the rounding of either. It tells DeepSeek-V3
    with its layer of multi-token prediction, 4 % more, from that without."""
    with training.CSV.open(newline="") as file:
        records = list(csv.DictReader(file))
    both = [(r, row) for r, row in zip(records, training.rows(), strict=True) if r["published_tflops"]]
    assert len(both) == len(records) - 23  # Megatron-LM's recipes: TFLOPS alone
    for record, row in both:
        published = 1e12 * float(record["published_tflops"]) / row.tokens_per_s
        m = row.job.model
        assert published == pytest.approx(m.train_flops_per_token(4096, row.job.mtp), rel=0.01), row
        if m.mtp_layers:
            assert abs(published / m.train_flops_per_token(4096, 1 - row.job.mtp) - 1) > 0.03, row
    without = [row for _, row in both if row.job.model.mtp_layers and not row.job.mtp]
    assert len(without) == 4 and all(row.source == "Megatron Bridge 25.11" for row in without)
