"""mixtral_8x7b: 46.7 B parameters, 8 wide experts, top-2: few large experts, one a rank."""

from __future__ import annotations

from typing import Any

from hybrid_ep.perf import architecture

from .cluster import ClusterRun
from .config import RunConfig
from .hardware import get_hardware, layout
from .tiny_cpu import tiny_cpu_smoke

ARCHITECTURE = architecture.get("mixtral_8x7b")
# Sizes and SMs are the performance model's, within some per cent of the fastest that fits:
# docs/results/recipe-layouts.md. Two sequences a micro-batch where they fit: launches of a layer take as long for one.
_VARIANTS: dict[str, dict[str, Any]] = {
    "h100_8x400g": dict(
        num_hosts=8, tensor=1, pipeline=4, virtual_pipeline=8, expert=8, global_batch_size=256, num_sms=16
    ),
    "h800_8x400g": dict(num_sms=8),
    "h200_8x400g": dict(micro_batch_size=2),
    "b200_8x400g": dict(
        num_hosts=2, tensor=1, pipeline=1, expert=8, global_batch_size=256, micro_batch_size=2, num_sms=24
    ),
    "b300_8x800g": dict(micro_batch_size=4),
    "gb200_nvl72": dict(num_hosts=4, tensor=1, pipeline=1, expert=8, global_batch_size=256, num_sms=24),
    "gb300_nvl72": dict(micro_batch_size=4),
}


def mixtral_8x7b(hardware: str = "h100_8x400g") -> ClusterRun:
    """Mixtral 8x7B on 64 H100, H200 or H800; 16 B200, B300, GB200 or GB300."""
    machine = get_hardware(hardware)
    return ClusterRun("mixtral_8x7b", ARCHITECTURE, machine, **layout(_VARIANTS, machine))


def mixtral_8x7b_proxy() -> RunConfig:
    """Mixtral in small on CPUs: 8 experts, top-2, 4 heads in 2 groups."""
    return tiny_cpu_smoke().derive(
        recipe="mixtral_8x7b_proxy",
        model={"num_experts": 8, "topk": 2, "num_query_groups": 2, "moe_ffn_hidden_size": 128, "aux_loss_coeff": 2e-2},
    )
