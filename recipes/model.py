"""Builds the Megatron-Core GPT of a run, with weights that depend on names alone.

Every dense parameter is drawn from a generator seeded by its name, every expert by its global index. So the
same run at EP 1, 2 or 4 starts from the same weights, and no two experts are alike: a token that reaches the
wrong expert changes the loss.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_block_spec,
    get_gpt_layer_local_spec,
    get_gpt_mtp_block_spec,
)
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

from . import latent_attention
from .config import RunConfig

if TYPE_CHECKING:
    from megatron.core.transformer.moe.moe_layer import MoELayer
    from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionBlockSubmodules
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

# What a dispatcher is called in TransformerConfig. hybrid_ep plugs in under Megatron's own name for it.
_MEGATRON_DISPATCHER = {
    "hybrid_ep": {"moe_token_dispatcher_type": "flex", "moe_flex_dispatcher_backend": "hybridep"},
    "alltoall": {"moe_token_dispatcher_type": "alltoall"},
    "allgather": {"moe_token_dispatcher_type": "allgather"},
}
_LOCAL_EXPERT = re.compile(r"\.local_experts\.(\d+)\.")


def _forced_bias(deviation: float) -> dict[str, float]:
    """Megatron's own skew of the router; ValueError where this release has none."""
    if not deviation:
        return {}
    if "moe_router_force_biased" not in {field.name for field in dataclasses.fields(TransformerConfig)}:
        raise ValueError(
            f"model.forced_bias={deviation}: this megatron-core cannot skew its router; install 0.17 or "
            "newer, or give 0"
        )
    return {"moe_router_force_biased": deviation}


def transformer_config(config: RunConfig) -> TransformerConfig:
    """Megatron's view of the model and its parallel layout."""
    model = config.model
    dtype = torch.bfloat16 if model.dtype == "bf16" else torch.float32
    config_class: type[TransformerConfig] = MLATransformerConfig if model.kv_lora_rank else TransformerConfig
    return config_class(
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        num_attention_heads=model.num_attention_heads,
        ffn_hidden_size=model.moe_ffn_hidden_size,
        moe_ffn_hidden_size=model.moe_ffn_hidden_size,
        num_moe_experts=model.num_experts,
        moe_router_topk=model.topk,
        moe_router_dtype="fp32",
        moe_router_load_balancing_type="aux_loss" if model.aux_loss_coeff else "none",
        moe_aux_loss_coeff=model.aux_loss_coeff,
        moe_grouped_gemm=False,
        expert_model_parallel_size=config.parallel.expert_parallel_size,
        expert_tensor_parallel_size=1,
        add_bias_linear=False,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        init_method_std=model.init_std,
        use_cpu_initialization=True,
        bf16=model.dtype == "bf16",
        params_dtype=dtype,
        pipeline_dtype=dtype,
        gradient_accumulation_fusion=False,
        bias_dropout_fusion=False,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        **_forced_bias(model.forced_bias),
        **_block_options(config),
        **_MEGATRON_DISPATCHER[config.parallel.dispatcher],
    )


def _block_options(config: RunConfig) -> dict[str, Any]:
    """Attention and router options that a plain model leaves to Megatron."""
    options: dict[str, Any] = {}
    model = config.model
    if model.num_query_groups:
        options["num_query_groups"] = model.num_query_groups
    if model.num_dense_layers:
        moe = model.num_layers - model.num_dense_layers
        options["moe_layer_freq"] = [0] * model.num_dense_layers + [1] * moe
    if model.shared_ffn_hidden_size:
        options["moe_shared_expert_intermediate_size"] = model.shared_ffn_hidden_size
    if model.router_num_groups:
        options["moe_router_num_groups"] = model.router_num_groups
        options["moe_router_group_topk"] = model.router_group_topk
    if model.kv_lora_rank:
        head = model.hidden_size // model.num_attention_heads
        options |= {
            "multi_latent_attention": True,
            "q_lora_rank": model.q_lora_rank,
            "kv_lora_rank": model.kv_lora_rank,
        }
        options |= {"qk_head_dim": head, "v_head_dim": head, "qk_pos_emb_head_dim": model.rope_head_dim}
        options |= {"rope_type": "rope"}
    if model.mtp_layers:
        options |= {"mtp_num_layers": model.mtp_layers, "mtp_loss_scaling_factor": model.mtp_loss_scale}
    if model.topk_scaling_factor:
        options["moe_router_topk_scaling_factor"] = model.topk_scaling_factor
    return {
        "qk_layernorm": model.qk_layernorm,
        "moe_router_score_function": model.score_function,
        "moe_router_enable_expert_bias": model.expert_bias,
        **options,
    }


def build_model(config: RunConfig) -> GPTModel:
    """The GPT of this rank, weights set, parallel groups of Megatron already initialised."""
    megatron_config = transformer_config(config)
    spec = _layer_spec(config, megatron_config)
    if config.model.kv_lora_rank:
        latent_attention.use(spec)
    model = GPTModel(
        config=megatron_config,
        transformer_layer_spec=spec,
        mtp_block_spec=mtp_spec(config, megatron_config, spec),
        vocab_size=config.model.vocab_size,
        max_sequence_length=config.model.seq_length,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=True,
    )
    if megatron_config.bf16:
        model = model.bfloat16()
    set_weights_by_name(model, config)
    return model


def _layer_spec(config: RunConfig, megatron_config: TransformerConfig) -> ModuleSpec | TransformerBlockSubmodules:
    """The spec of every layer: one for all, or layer by layer where the first ones have no experts."""
    if config.model.num_dense_layers:
        return get_gpt_decoder_block_spec(megatron_config, use_transformer_engine=False)
    return get_gpt_layer_local_spec(
        num_experts=config.model.num_experts,
        moe_grouped_gemm=False,
        qk_layernorm=config.model.qk_layernorm,
        multi_latent_attention=config.model.kv_lora_rank > 0,
    )


def mtp_spec(
    config: RunConfig, megatron_config: TransformerConfig, spec: ModuleSpec | TransformerBlockSubmodules
) -> MultiTokenPredictionBlockSubmodules | None:
    """The spec of layers that predict further tokens: each is a layer like the last one, with experts."""
    if not config.model.mtp_layers:
        return None
    return get_gpt_mtp_block_spec(megatron_config, spec, use_transformer_engine=False)


def set_weights_by_name(model: torch.nn.Module, config: RunConfig) -> None:
    """Overwrites every matrix; norms keep their ones. Experts are named by their global index."""
    experts_per_rank = config.model.num_experts // config.parallel.expert_parallel_size
    first_expert = parallel_state.get_expert_model_parallel_rank() * experts_per_rank

    def global_name(name: str) -> str:
        return _LOCAL_EXPERT.sub(lambda match: f".experts.{first_expert + int(match[1])}.", name)

    for name, parameter in _matrices(model):
        digest = hashlib.sha256(f"{config.seed} {global_name(name)}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
        std = config.model.init_std
        if name.endswith(("linear_fc2.weight", "linear_proj.weight")):  # these write to the residual stream
            std /= math.sqrt(2 * config.model.num_layers)
        with torch.no_grad():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float32, device="cpu") * std)


def logical_owners(layer: MoELayer) -> list[int]:
    """The logical expert in every owner slot of an MoE layer, over all ranks; migration changes it."""
    owners = getattr(getattr(layer.token_dispatcher, "_comm_manager", None), "owners", None)
    return list(range(layer.config.num_moe_experts) if owners is None else owners.expert_of_slot)


def logical_experts(layer: MoELayer) -> list[int]:
    """Logical ids of an MoE layer's experts on this rank, in the order of its parameters."""
    return [logical_owners(layer)[slot] for slot in layer.local_expert_indices]


def _matrices(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor) of every matrix; those of stacked experts go by SequentialMLP's names."""
    for name, parameter in model.named_parameters():
        owner: Any = model.get_submodule(name.rpartition(".")[0])  # GroupedExperts, or anything with parameters
        if not hasattr(owner, "expert_weights"):
            if parameter.dim() >= 2:
                yield name, parameter
        elif parameter is owner.weight1:
            for expert in range(owner.num_local_experts):
                for own, weight in owner.expert_weights(expert).items():
                    yield f"{name.rpartition('.')[0]}.local_experts.{expert}.{own}", weight


def moe_layers(model: torch.nn.Module) -> list[MoELayer]:
    """The MoE layers of this rank, in order of depth."""
    return [module for module in model.modules() if hasattr(module, "token_dispatcher")]
