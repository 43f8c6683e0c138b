"""Recipes: Python functions that return complete training configurations, found by name.

To add one, write a function that returns a `RunConfig` and list it in `RECIPES`.
"""

from __future__ import annotations

from collections.abc import Callable

from . import deepseek_v3, mixtral_8x7b, qwen3_30b_a3b, qwen3_235b_a22b
from .cluster import ClusterRun
from .config import RunConfig
from .tiny_cpu import tiny_cpu, tiny_cpu_smoke

RECIPES: dict[str, Callable[[], RunConfig]] = {
    "tiny_cpu": tiny_cpu,
    "tiny_cpu_smoke": tiny_cpu_smoke,
    "deepseek_v3_proxy": deepseek_v3.deepseek_v3_proxy,
    "qwen3_235b_a22b_proxy": qwen3_235b_a22b.qwen3_235b_a22b_proxy,
    "qwen3_30b_a3b_proxy": qwen3_30b_a3b.qwen3_30b_a3b_proxy,
    "mixtral_8x7b_proxy": mixtral_8x7b.mixtral_8x7b_proxy,
}
# For GPU clusters: functions of the hardware's name; `hybrid-ep launch` runs them through Megatron-LM.
CLUSTER_RECIPES: dict[str, Callable[[str], ClusterRun]] = {
    "deepseek_v3": deepseek_v3.deepseek_v3,
    "qwen3_235b_a22b": qwen3_235b_a22b.qwen3_235b_a22b,
    "qwen3_30b_a3b": qwen3_30b_a3b.qwen3_30b_a3b,
    "mixtral_8x7b": mixtral_8x7b.mixtral_8x7b,
}


def get_recipe(name: str) -> RunConfig:
    """The configuration of recipe `name`; ValueError lists the known names."""
    if name in CLUSTER_RECIPES:
        raise ValueError(f"recipe={name!r}: runs on GPUs, by hybrid-ep launch {name} --dry-run; {name}_proxy runs here")
    if name not in RECIPES:
        raise ValueError(f"recipe={name!r}: unknown; choose one of {', '.join(RECIPES)}")
    return RECIPES[name]()
