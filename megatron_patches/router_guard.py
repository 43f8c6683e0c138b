"""Megatron's gates, checked at the first forward after they were made or loaded: before a token is dispatched.

    from megatron_patches import router_guard
    router_guard.attach(model)      # after the model is built, before or after a checkpoint is loaded

Not at construction: with perform_initialization off, or on the meta device, gates are garbage until a checkpoint
fills them, and that is fine. Hooks of torch.nn.Module only; nothing of Megatron is replaced.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from hybrid_ep.moe import check_gates

if TYPE_CHECKING:
    from megatron.core.transformer.moe.router import TopKRouter


def attach(model: torch.nn.Module | Sequence[torch.nn.Module]) -> tuple[str, ...]:
    """Guard every TopKRouter of `model` (a module, or the list of chunks that Megatron makes); returns their names.

    The first forward of each, and the first after load_state_dict, raises `hybrid_ep.moe.RouterError` for a gate
    that is not finite, all equal or has equal rows. Routers whose logits Megatron replaces by random ones
    (moe_router_force_load_balancing) are left alone. ValueError when the model has no router. Idempotent."""
    from megatron.core.transformer.moe.router import TopKRouter

    chunks = [model] if isinstance(model, torch.nn.Module) else list(model)
    routers = {
        name or "router": module
        for chunk in chunks
        for name, module in chunk.named_modules()
        if isinstance(module, TopKRouter) and not module.config.moe_router_force_load_balancing
    }
    if not routers:
        raise ValueError(f"model has no TopKRouter to guard in {len(chunks)} chunks: pass the model with MoE layers")
    for name, router in routers.items():
        attach_one(router, functools.partial(_check_gate, name))
    return tuple(routers)


def _check_gate(name: str, router: TopKRouter) -> None:
    check_gates({name: router.weight})


def attach_one(router: TopKRouter, check: Callable[[TopKRouter], None]) -> None:
    """Run check(router) at the first forward of a router and at the first after loading; the first check stays."""
    if not hasattr(router, "_hybrid_ep_gate_checked"):

        def once(module: TopKRouter, _inputs: tuple[object, ...]) -> None:
            if not module._hybrid_ep_gate_checked and not module.config.moe_router_force_load_balancing:
                check(module)
                module._hybrid_ep_gate_checked = True

        router.register_forward_pre_hook(once)
        router.register_load_state_dict_post_hook(_forget)
    router._hybrid_ep_gate_checked = False


def _forget(router: TopKRouter, _keys: object) -> None:
    """What was loaded is checked anew."""
    router._hybrid_ep_gate_checked = False
