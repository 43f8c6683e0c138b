"""qwen3_235b_a22b: 235 B parameters, 128 experts, top-8, grouped queries with normed heads, no shared expert."""

from __future__ import annotations

from typing import Any

from hybrid_ep.perf import architecture

from .cluster import ClusterRun
from .config import RunConfig
from .hardware import get_hardware, layout
from .tiny_cpu import tiny_cpu_smoke

ARCHITECTURE = architecture.get("qwen3_235b_a22b")
# Sizes and SMs are the performance model's, within some per cent of the fastest that fits:
# docs/results/recipe-layouts.md.
_VARIANTS: dict[str, dict[str, Any]] = {
    "h100_8x400g": dict(num_hosts=32, tensor=2, pipeline=8, virtual_pipeline=4, expert=32, overlap=True, num_sms=8),
    "h200_8x400g": dict(tensor=1, expert=16, num_sms=16),
    "b200_8x400g": dict(
        num_hosts=16, tensor=1, pipeline=8, virtual_pipeline=4, expert=8, precision="mxfp8", num_sms=24
    ),
    "b300_8x800g": dict(pipeline=4, virtual_pipeline=8, micro_batch_size=2),
    "gb200_nvl72": dict(
        num_hosts=32, tensor=1, pipeline=8, virtual_pipeline=4, expert=8, precision="mxfp8", num_sms=16
    ),
    "gb300_nvl72": dict(pipeline=4, virtual_pipeline=8, micro_batch_size=2),
}


def qwen3_235b_a22b(hardware: str = "h100_8x400g") -> ClusterRun:
    """Qwen3-235B-A22B on 256 H100, H200 or H800; 128 B200, B300, GB200 or GB300."""
    machine = get_hardware(hardware)
    return ClusterRun("qwen3_235b_a22b", ARCHITECTURE, machine, **layout(_VARIANTS, machine))


def qwen3_235b_a22b_proxy() -> RunConfig:
    """Qwen3-235B in small on CPUs: top-8 of 32 experts, 8 heads in 2 groups, normed."""
    return tiny_cpu_smoke().derive(
        recipe="qwen3_235b_a22b_proxy",
        model={
            "num_layers": 3,
            "num_experts": 32,
            "topk": 8,
            "num_attention_heads": 8,
            "num_query_groups": 2,
            "qk_layernorm": True,
            "aux_loss_coeff": 1e-3,
        },
    )
