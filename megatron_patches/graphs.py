"""Which of Megatron's CUDA graphs hold an MoE layer's router, and which its dispatch, experts and combine.

A graph of `--cuda-graph-modules attn moe_router moe_preprocess` ends where the routing is known: Megatron replays it,
puts the map and the probabilities it made into the dispatcher, and runs the rest of the layer as Python. Whatever is
decided in dispatch (plans of clones, moves of experts) works behind such a graph, and cannot where the graph goes on.
What looks at each routing by Python (load statistics, router guards) needs a router that no graph holds.
"""

from __future__ import annotations

from typing import Any

# Parts of a layer that a graph may hold without its router, and with it but without its dispatch.
_BEFORE_ROUTER = {"attn", "mlp", "mamba"}
_BEFORE_DISPATCH = _BEFORE_ROUTER | {"moe_router", "moe_preprocess"}


def with_router(config: Any) -> str | None:
    """The flags that put an MoE layer's router into a CUDA graph, and which do not; None where none does.

    config: a TransformerConfig of any release that is supported (0.16 calls the modules a scope)."""
    return _beyond(config, _BEFORE_ROUTER)


def with_dispatch(config: Any) -> str | None:
    """The same of the layer's dispatch, experts and combine."""
    return _beyond(config, _BEFORE_DISPATCH)


def of_iterations(config: Any) -> bool:
    """Whether one graph holds the forward and the backward of all layers and micro-batches of a step."""
    impl, _, modules = _given(config)
    return impl == "full_iteration" or (impl == "local" and "full_iteration" in modules)


def _given(config: Any) -> tuple[str, str, set[str]]:
    """(what captures, how its modules' flag ends, the modules)."""
    impl = getattr(config, "cuda_graph_impl", None) or "none"
    if impl == "none":
        for name, old in (("enable_cuda_graph", "local"), ("external_cuda_graph", "transformer_engine")):
            impl = old if getattr(config, name, False) else impl
    flag = "modules" if hasattr(config, "cuda_graph_modules") else "scope"
    return impl, flag, _names(getattr(config, f"cuda_graph_{flag}", None))


def _beyond(config: Any, allowed: set[str]) -> str | None:
    impl, flag, modules = _given(config)
    if impl == "none":
        return None
    whole = {"attn"} if impl == "local" else set()  # Megatron's own graph of attn is the whole layer, in a GPT
    if impl != "full_iteration" and modules and modules <= allowed - whole:
        return None
    said = f" with --cuda-graph-{flag} {' '.join(sorted(modules))}" if modules else ""
    others = " ".join(sorted(allowed - {"mlp", "mamba"}))
    return f"--cuda-graph-impl {impl}{said} (transformer_engine with --cuda-graph-{flag} {others} does work)"


def _names(modules: Any) -> set[str]:
    """A list, an enumeration's member, or a string with commas, as releases have it: the names. "full" is none."""
    parts = modules.split(",") if isinstance(modules, str) else modules if isinstance(modules, (list, tuple)) else ()
    return {getattr(part, "name", part) for part in parts if part} - {"full"}
