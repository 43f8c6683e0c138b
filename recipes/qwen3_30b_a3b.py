"""qwen3_30b_a3b: 30.5 B parameters, 128 experts, top-8, experts only 768 wide: the exchange weighs most here."""

from __future__ import annotations

from typing import Any

from hybrid_ep.perf import architecture

from .cluster import ClusterRun
from .config import RunConfig
from .hardware import get_hardware, layout
from .tiny_cpu import tiny_cpu_smoke

ARCHITECTURE = architecture.get("qwen3_30b_a3b")
# Sizes and SMs are the performance model's, within some per cent of the fastest that fits and spreads experts at all:
# docs/results/recipe-layouts.md. A host takes as long to launch a layer for one sequence as for four, so that several
# make a micro-batch where memory allows it; on Blackwell they are as many as in Megatron Bridge's.
_VARIANTS: dict[str, dict[str, Any]] = {
    "h100_8x400g": dict(num_hosts=4, tensor=1, pipeline=1, expert=8, global_batch_size=512, num_sms=16),
    "h800_8x400g": dict(num_sms=8),
    "h200_8x400g": dict(micro_batch_size=2),
    "b200_8x400g": dict(
        num_hosts=2,
        tensor=1,
        pipeline=1,
        expert=8,
        global_batch_size=512,
        micro_batch_size=4,
        precision="mxfp8",
        num_sms=24,
    ),
    "b300_8x800g": dict(expert=4, micro_batch_size=8, num_sms=32),
    "gb200_nvl72": dict(
        num_hosts=4,
        tensor=1,
        pipeline=1,
        expert=4,
        global_batch_size=512,
        micro_batch_size=4,
        precision="mxfp8",
        num_sms=32,
    ),
    "gb300_nvl72": dict(micro_batch_size=8),
}


def qwen3_30b_a3b(hardware: str = "h100_8x400g") -> ClusterRun:
    """Qwen3-30B-A3B on 32 H100, H200 or H800; 16 B200, B300, GB200 or GB300."""
    machine = get_hardware(hardware)
    return ClusterRun("qwen3_30b_a3b", ARCHITECTURE, machine, **layout(_VARIANTS, machine))


def qwen3_30b_a3b_proxy() -> RunConfig:
    """Qwen3-30B in small on CPUs: top-8 of 32 experts, 4 heads in 2 groups, normed."""
    return tiny_cpu_smoke().derive(
        recipe="qwen3_30b_a3b_proxy",
        model={"num_experts": 32, "topk": 8, "num_query_groups": 2, "qk_layernorm": True, "aux_loss_coeff": 1e-3},
    )
