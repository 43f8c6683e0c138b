"""The parts that can be put into Megatron, one function each: what is replaced, and by what.

Each is known to the process's `PATCHES` by its id, installs itself once, and imports Megatron only when it is asked
for. Who asks, and in which order: `patch.apply`, and `flags` once Megatron's arguments are parsed.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys

from megatron_patches import hooks
from megatron_patches.patch_set import PatchSet
from megatron_patches.settings import Settings

PATCHES = PatchSet()


def install_dispatcher() -> None:
    """Hook "token_dispatcher": MoE layers build our token dispatcher."""
    from megatron_patches import dispatcher, own_outputs

    layer = importlib.import_module(f"{hooks.MOE}.moe_layer")
    PATCHES.replace("dispatcher", layer, "MoEFlexTokenDispatcher", dispatcher.HybridEPTokenDispatcher)
    PATCHES.replace("dispatcher", layer.MoELayer, "__init__", own_outputs.layer_init(layer.MoELayer.__init__))


def install_recompute() -> None:
    """Checkpointed functions keep handles from their first run to their second, Megatron's and Transformer Engine's."""
    from megatron_patches import recompute

    for name, module_names in hooks.CHECKPOINTS.items():
        modules = [importlib.import_module(module) for module in module_names if importlib.util.find_spec(module)]
        for module in modules:
            if getattr(module, name, None) is not None:
                PATCHES.replace("recompute", module, name, recompute.wrapper(getattr(module, name)))


def install_as_deep_ep(buffer_class: type | None) -> None:
    """Hook "deep_ep": serve as deep_ep, then let fused_a2a bind it: it decides when imported, so import it anew."""
    from hybrid_ep import compat

    fused = importlib.import_module(f"{hooks.MOE}.fused_a2a")
    tokens = importlib.import_module(f"{hooks.MOE}.token_dispatcher")
    names_before = dict(fused.__dict__)

    def restore_fused() -> None:
        fused.__dict__.clear()
        fused.__dict__.update(names_before)

    PATCHES.record("deep_ep", "sys.modules", "deep_ep", compat.uninstall)
    served = compat.install_as_deep_ep()  # refuses to hide a real deep_ep
    if buffer_class is not None:
        served.__dict__["HybridEPBuffer"] = buffer_class
    PATCHES.record("deep_ep", fused.__name__, "HAVE_HYBRIDEP", restore_fused)
    importlib.reload(fused)
    if not fused.HAVE_HYBRIDEP:
        raise hooks.HookError("fused_a2a: HybridEPBuffer was not taken from the package deep_ep we serve")
    for name in ("hybrid_ep_dispatch", "hybrid_ep_combine"):
        PATCHES.replace("deep_ep", tokens, name, getattr(fused, name))


def install_flags() -> None:
    """Megatron's parser knows the --hybrid-ep flags."""
    from megatron_patches import flags

    PATCHES.replace("flags", flags.arguments_module(), "add_megatron_arguments", flags.wrapper(install_compute))


def install_balance() -> None:
    """MoE layers hand their experts to the balancer; without it the class stays Megatron's own."""
    if "balance" in PATCHES:
        return
    from megatron_patches import balance

    layer = importlib.import_module(f"{hooks.MOE}.moe_layer").MoELayer
    PATCHES.replace("balance", layer, "__init__", balance.layer_init(layer.__init__))


def install_migrating() -> None:
    """Optimizers move experts after their steps, and Megatron-LM's checkpoints find them where they began."""
    if "migration" in PATCHES:
        return
    from megatron_patches import balance_slow

    importlib.import_module("megatron.core.optimizer")
    for name, wrapper, modules in (
        ("get_megatron_optimizer", balance_slow.optimizer_wrapper, ("core.optimizer", "training.training")),
        ("save_checkpoint", balance_slow.save_wrapper, ("training.checkpointing", "training.training")),
    ):
        for module in (sys.modules.get(f"megatron.{part}") for part in modules):
            if module is not None and hasattr(module, name):
                PATCHES.replace("migration", module, name, wrapper(getattr(module, name)))
    PATCHES.record("migration", balance_slow.__name__, "models", balance_slow.release)


def install_load_stats(flags_may_ask: bool) -> None:
    """Routers are counted, where flags may still ask for it or settings or environment do."""
    from megatron_patches import load_stats

    if "load_stats" in PATCHES or not (flags_may_ask or load_stats.wanted()):
        return
    PATCHES.record("load_stats", load_stats.__name__, "collector", load_stats.release)
    schedules = importlib.import_module(load_stats.SCHEDULES)
    for name in load_stats.NAMES:
        PATCHES.replace("load_stats", schedules, name, load_stats.schedule(getattr(schedules, name)))
    layer = importlib.import_module(f"{hooks.MOE}.moe_layer").MoELayer
    PATCHES.replace("load_stats", layer, "__init__", load_stats.layer_init(layer.__init__))


def install_compute(wanted: Settings) -> None:
    """What `wanted` asks for besides the exchange: experts, router guards, travelling weights. HookError: no change.

    Called by apply(), and once flags are parsed; Megatron stays its own where nothing is asked."""
    asked_for = {
        "experts": wanted.experts.grouped,
        "router_training": wanted.router.watches,
        "weights": wanted.weights.may_move,
    }
    for name, asked in asked_for.items():
        if not asked or name in PATCHES:
            continue
        hooks.require(name)
        module = importlib.import_module(f"megatron_patches.{name}")
        module.install(functools.partial(PATCHES.replace, name))
