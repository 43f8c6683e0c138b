"""Exact MoE compute around the exchange: grouped GEMM, weighted activations, unpermute, router guards.

For example::

    from hybrid_ep.moe import grouped_mm, weighted_swiglu, unpermute, check_gates

Needs torch alone: neither the compiled core nor Megatron. Submodules load on demand. docs/moe_compute.md is the
page on it, with what each operator moves and what has run where.
"""

from __future__ import annotations

import importlib
from typing import Any

_LAZY = {
    "grouped_mm": "hybrid_ep.moe.grouped",
    "pad_groups": "hybrid_ep.moe.padding",
    "row_alignment": "hybrid_ep.moe.padding",
    "probe": "hybrid_ep.moe.probing",
    "weighted_activation": "hybrid_ep.moe.activations",
    "weighted_swiglu": "hybrid_ep.moe.activations",
    **dict.fromkeys(
        ("RouterError", "RouterGuard", "check_gates", "routing_statistics", "tie_break"), "hybrid_ep.moe.router_guard"
    ),
    "inverse_map": "hybrid_ep.moe.combining",
    "unpermute": "hybrid_ep.moe.combining",
}

__all__ = [*_LAZY]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'hybrid_ep.moe' has no attribute {name!r}")
    module = importlib.import_module(_LAZY[name])
    value = globals()[name] = getattr(module, name)
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_LAZY])
