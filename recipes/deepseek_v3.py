"""deepseek_v3: 671 B parameters, 256 experts in 8 groups, top-8, multi-head latent attention, one MTP layer."""

from __future__ import annotations

from typing import Any

from hybrid_ep.perf import architecture

from .cluster import ClusterRun
from .config import RunConfig
from .hardware import get_hardware, layout
from .tiny_cpu import tiny_cpu_smoke

ARCHITECTURE = architecture.get("deepseek_v3")
# Megatron Bridge's: the last chunk has one layer beside MTP and the two passes of the output layer, which take as long
# as three or four, and the embedding takes none.
_CHUNKS_16 = "Et*4|(tttt|)*14tmL"
# Sizes and SMs are the performance model's, within some per cent of the fastest that fits with room to spare:
# docs/results/recipe-layouts.md. On B200, GB200 and GB300 they are those of Megatron Bridge's summary of 26.04.01.
_VARIANTS: dict[str, dict[str, Any]] = {
    "h100_8x400g": dict(
        num_hosts=128,
        tensor=2,
        pipeline=16,
        virtual_pipeline=1,
        expert=16,
        precision="fp8",
        pipeline_layout=_CHUNKS_16,
        num_sms=8,
        global_batch_size=8192,
    ),
    "h200_8x400g": dict(tensor=1),
    "b200_8x400g": dict(
        num_hosts=32,
        tensor=1,
        pipeline=8,
        virtual_pipeline=2,
        expert=32,
        overlap=True,
        precision="mxfp8",
        pipeline_layout=_CHUNKS_16,
        num_sms=4,
        global_batch_size=2048,
    ),
    "b300_8x800g": dict(pipeline=4, virtual_pipeline=4, expert=64, micro_batch_size=2, num_sms=8),
    "gb200_nvl72": dict(
        num_hosts=64,
        tensor=1,
        pipeline=4,
        virtual_pipeline=4,
        expert=64,
        precision="mxfp8",
        pipeline_layout=_CHUNKS_16,
        num_sms=16,
        global_batch_size=2048,
    ),
    "gb300_nvl72": dict(pipeline=2, virtual_pipeline=8, expert=32),
}


def deepseek_v3(hardware: str = "h100_8x400g") -> ClusterRun:
    """DeepSeek-V3 on 1,024 H100, H200 or H800; 256 B200, B300, GB200 or GB300."""
    machine = get_hardware(hardware)
    return ClusterRun("deepseek_v3", ARCHITECTURE, machine, lr=2.2e-4, moments="bf16", **layout(_VARIANTS, machine))


def deepseek_v3_proxy() -> RunConfig:
    """DeepSeek-V3 in small on CPUs: latent attention, top-8 of 32 experts, one shared, MTP."""
    return tiny_cpu_smoke().derive(
        recipe="deepseek_v3_proxy",
        model={
            "num_layers": 3,
            "num_experts": 32,
            "topk": 8,
            "num_dense_layers": 1,
            "score_function": "sigmoid",
            "router_num_groups": 4,
            "router_group_topk": 2,
            "topk_scaling_factor": 2.5,
            "expert_bias": True,
            "shared_ffn_hidden_size": 32,
            "aux_loss_coeff": 1e-4,
            "qk_layernorm": True,
            "q_lora_rank": 48,
            "kv_lora_rank": 32,
            "rope_head_dim": 8,
            "mtp_layers": 1,
            "mtp_loss_scale": 0.3,
        },
    )
