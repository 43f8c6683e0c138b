"""Megatron's gates, checked at the first forward after they were made or loaded: before a token is dispatched.

    from megatron_patches import router_guard
    router_guard.attach(model)      # after the model is built, before or after a checkpoint is loaded

Not at construction: with perform_initialization off, or on the meta device, gates are garbage until a checkpoint
fills them, and that is fine. Hooks of torch.nn.Module only; nothing of Megatron is replaced.
"""

from hybrid_ep.moe import check_gates


def attach(model):
    """Guard every TopKRouter of `model` (a module, or the list of chunks that Megatron makes); returns their names.

    The first forward of each, and the first after load_state_dict, raises `hybrid_ep.moe.RouterError` for a gate
    that is not finite, all equal or has equal rows. Routers whose logits Megatron replaces by random ones
    (moe_router_force_load_balancing) are left alone. ValueError when the model has no router. Idempotent."""
    from megatron.core.transformer.moe.router import TopKRouter

    chunks = model if isinstance(model, (list, tuple)) else [model]
    routers = {
        name or "router": module
        for chunk in chunks
        for name, module in chunk.named_modules()
        if isinstance(module, TopKRouter) and not module.config.moe_router_force_load_balancing
    }
    if not routers:
        raise ValueError(f"model has no TopKRouter to guard in {len(chunks)} chunks: pass the model with MoE layers")
    for name, router in routers.items():
        if not hasattr(router, "_hybrid_ep_gate_checked"):
            router.register_forward_pre_hook(_checker(name))
            router.register_load_state_dict_post_hook(_forget)
        router._hybrid_ep_gate_checked = False
    return tuple(routers)


def _checker(name):
    def check(router, _inputs):
        if not router._hybrid_ep_gate_checked:
            check_gates({name: router.weight})
            router._hybrid_ep_gate_checked = True

    return check


def _forget(router, _keys):
    """What was loaded is checked anew."""
    router._hybrid_ep_gate_checked = False
