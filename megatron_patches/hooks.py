"""The places in Megatron-Core we touch or rely on, each with a check that fails by name when it has moved.

A hook is checked against the code that is installed, not against a version table alone: a patch release
that moves one is refused with the sentence that says which. `check()` returns the findings, `require()`
raises.
"""

from __future__ import annotations

import importlib
import inspect
import re
import warnings
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any

SUPPORTED = ((0, 16), (0, 19))  # first and last minor release this package was tested with
MOE = "megatron.core.transformer.moe"

# What Megatron may ask of our manager; manager.HybridEPManager has them all, a test compares.
MANAGER_INTERFACE = frozenset(
    {
        "setup_metadata",
        "dispatch",
        "combine",
        "get_permuted_hidden_states_by_experts",
        "get_restored_hidden_states_by_experts",
        "get_number_of_tokens_per_expert",
        "reset_transient_forward_state",
        "token_probs",
        "dispatched_probs",
        "routing_map",
        "over_budget",
        "moe_expert_rank_capacity_factor",
    }
)
# Asked only of other backends, or through hasattr / getattr with a default.
OPTIONAL_INTERFACE = frozenset(
    {"_zc_fwd_token_buf", "_zc_bwd_token_buf", "_bootstrapped", "required_recv", "grow_recv_capacity", "token_indices"}
)
DISPATCHER_METHODS = (
    "dispatch_preprocess",
    "token_dispatch",
    "dispatch_postprocess",
    "combine_preprocess",
    "token_combine",
    "combine_postprocess",
)

# Modules that know a checkpoint by this name, where a release has them; te_checkpoint is None without that library.
CHECKPOINTS = {
    "checkpoint": ("megatron.core.tensor_parallel", "megatron.core.tensor_parallel.random"),
    "te_checkpoint": (
        "megatron.core.extensions.transformer_engine",
        "megatron.core.transformer.transformer_block",
        "megatron.core.recompute",
        f"{MOE}.moe_layer",
    ),
}


class HookError(RuntimeError):
    """Megatron-Core is missing, of an unknown version, or a place we patch has changed."""


def core_version() -> tuple[int, int, int]:
    """(major, minor, patch) of the megatron-core that would be imported. Raises HookError without one."""
    try:
        info = importlib.import_module("megatron.core.package_info")
    except ImportError as error:
        raise HookError(
            "megatron-core is not importable; install it: pip install 'megatron-core>=0.16,<0.20' "
            f"(0.17 and newer need Python >= 3.12) [{error}]"
        ) from error
    return int(info.MAJOR), int(info.MINOR), int(info.PATCH)


def _parameters(function: Callable[..., Any]) -> tuple[str, ...]:
    return tuple(inspect.signature(function).parameters)


def _check_version() -> str | None:
    version = core_version()
    low, high = SUPPORTED
    if not low <= version[:2] <= high:
        text = ".".join(map(str, version))
        return (
            f"megatron-core {text} is outside {low[0]}.{low[1]} - {high[0]}.{high[1]}, "
            "the releases known here; install one of those, or a newer megatron_patches"
        )
    return None


def _check_moe_layer() -> str | None:
    layer = importlib.import_module(f"{MOE}.moe_layer")
    cls = getattr(layer, "MoEFlexTokenDispatcher", None)
    if not inspect.isclass(cls):
        return f"{MOE}.moe_layer has no class MoEFlexTokenDispatcher to replace"
    want = ("self", "num_local_experts", "local_expert_indices", "config", "pg_collection")
    if _parameters(cls.__init__) != want:
        return f"MoEFlexTokenDispatcher.__init__ takes {_parameters(cls.__init__)}, not {want}"
    if "MoEFlexTokenDispatcher(" not in inspect.getsource(layer.MoELayer.__init__):
        return "MoELayer.__init__ no longer builds MoEFlexTokenDispatcher by that name"
    return None


def _check_base_class() -> str | None:
    tokens = importlib.import_module(f"{MOE}.token_dispatcher")
    base, flex = tokens.MoETokenDispatcher, tokens.MoEFlexTokenDispatcher
    if _parameters(base.__init__) != ("self", "config", "pg_collection"):
        return f"MoETokenDispatcher.__init__ takes {_parameters(base.__init__)}, not config and pg_collection"
    source = inspect.getsource(base.__init__)
    missing = [name for name in ("tp_ep_group", "tp_size", "ep_size") if f"self.{name}" not in source]
    missing += [name for name in DISPATCHER_METHODS if not callable(getattr(flex, name, None))]
    if missing:
        return f"the flex token dispatcher lacks {', '.join(missing)}"
    return None


def _check_manager_interface() -> str | None:
    """Every attribute Megatron reads from a manager must be one ours has."""
    tokens = importlib.import_module(f"{MOE}.token_dispatcher")
    source = inspect.getsource(tokens.MoEFlexTokenDispatcher)
    for name in ("megatron.core.models.gpt.fine_grained_callables", f"{MOE}.paged_stash"):
        try:
            source += inspect.getsource(importlib.import_module(name))
        except ModuleNotFoundError as error:
            if error.name != name:  # the module exists and what it imports does not: no verdict possible
                return f"{name} cannot be imported: {error}"
    unknown = set(re.findall(r"_comm_manager\.(\w+)", source)) - MANAGER_INTERFACE - OPTIONAL_INTERFACE
    if unknown:
        return f"Megatron asks new things of a communication manager: {', '.join(sorted(unknown))}"
    return None


def _check_backend_name() -> str | None:
    """1F1B overlap keeps or frees tensors by the backend's name; under another, backward reads freed ones."""
    config = importlib.import_module("megatron.core.transformer.transformer_config").TransformerConfig
    if "hybridep" not in str(config.__annotations__.get("moe_flex_dispatcher_backend", "")):
        return "TransformerConfig.moe_flex_dispatcher_backend does not list 'hybridep'"
    calls = importlib.import_module("megatron.core.models.gpt.fine_grained_callables")
    if '"hybridep"' not in inspect.getsource(calls):
        return "the 1F1B overlap schedule (fine_grained_callables) no longer knows the backend 'hybridep'"
    return None


def _check_checkpoint() -> str | None:
    """Recomputed forwards are paired by the function that is given to this one, first."""
    tensor_parallel = importlib.import_module("megatron.core.tensor_parallel")
    found = _parameters(tensor_parallel.checkpoint)
    if found[:2] != ("function", "distribute_saved_activations"):
        return f"tensor_parallel.checkpoint takes {found}, not function and distribute_saved_activations first"
    return None


def _check_fused_a2a() -> str | None:
    fused = importlib.import_module(f"{MOE}.fused_a2a")
    tokens = importlib.import_module(f"{MOE}.token_dispatcher")
    absent = [
        f"fused_a2a.{name}"
        for name in ("HAVE_HYBRIDEP", "_hybrid_ep_buffer", "hybrid_ep_dispatch", "hybrid_ep_combine")
        if not hasattr(fused, name)
    ]
    absent += [
        f"token_dispatcher.{name}" for name in ("hybrid_ep_dispatch", "hybrid_ep_combine") if not hasattr(tokens, name)
    ]
    if absent:
        return f"{', '.join(absent)} moved"
    return None


def _check_experts() -> str | None:
    """What experts.py stands on: how MoELayer is given its experts, how MLP builds and describes one."""
    layer = importlib.import_module(f"{MOE}.moe_layer")
    mlp = importlib.import_module("megatron.core.transformer.mlp")
    if _parameters(layer.MoELayer.__init__)[:3] != ("self", "config", "submodules"):
        return f"MoELayer.__init__ takes {_parameters(layer.MoELayer.__init__)}, not config and submodules first"
    if "experts" not in getattr(layer.MoESubmodules, "__dataclass_fields__", {}):
        return "MoESubmodules has no field experts"
    source = inspect.getsource(layer.MoELayer.__init__)
    if "self.submodules.experts" not in source or "pg_collection=pg_collection" not in source:
        return "MoELayer.__init__ no longer builds submodules.experts with pg_collection"
    missing = {"config", "submodules", "is_expert", "ffn_hidden_size", "tp_group"} - set(_parameters(mlp.MLP.__init__))
    if missing:
        return f"MLP.__init__ lacks {', '.join(sorted(missing))}"
    if _parameters(mlp.MLP.sharded_state_dict) != ("self", "prefix", "sharded_offsets", "metadata"):
        return f"MLP.sharded_state_dict takes {_parameters(mlp.MLP.sharded_state_dict)}"
    if not hasattr(importlib.import_module("megatron.core.transformer.utils"), "ensure_metadata_has_dp_cp_group"):
        return "transformer.utils has no ensure_metadata_has_dp_cp_group"
    mapping = importlib.import_module("megatron.core.dist_checkpointing.mapping")
    want = {"key", "data", "build_fn", "merge_fn", "replica_id"}
    if missing := want - set(mapping.ShardedTensorFactory.__dataclass_fields__):
        return f"ShardedTensorFactory lacks {', '.join(sorted(missing))}"
    freed_inputs()
    return None


def metrics_reduction() -> tuple[ModuleType | type, str]:
    """(owner, name) of the function that reduces Megatron's auxiliary losses over ranks, whichever release it is."""
    try:
        logging = importlib.import_module(f"{MOE}.moe_logging")  # from 0.18 on
    except ModuleNotFoundError:
        return importlib.import_module(f"{MOE}.moe_utils"), "reduce_aux_losses_tracker_across_ranks"
    return logging.MoEMetricsTracker, "_sync_metrics"


def split_weights(config: Any) -> list[str]:
    """The flag by which ranks keep parts of each expert's matrices and gather them to multiply, from 0.19 on; [] where
    they have whole ones. Such a parameter is neither stacked, nor cloned, nor moved."""
    split = getattr(config, "expert_gtp_weight_remat_size", 1) > 1
    return ["--expert-tensor-parallel-num-weight-shards above --expert-tensor-parallel-size"] if split else []


def freed_inputs() -> ModuleType:
    """Where the 1F1B overlap schedule asks should_free_input(node, ...), whichever release it is. HookError."""
    for name in ("megatron.core.models.common.utils", "megatron.core.models.gpt.fine_grained_callables"):
        try:
            module = importlib.import_module(name)
        except ModuleNotFoundError:  # the first is there from 0.19 on
            continue
        if _parameters(getattr(module, "should_free_input", lambda: None))[:1] == ("name",):
            return module
    raise HookError("the 1F1B overlap schedule has no should_free_input(name, ...), which says what it frees")


def layer_number(module: Any) -> int:
    """Number of an MoE layer, or of its router, among all layers of the model, from 1, as Megatron's metrics count.

    Layers that predict further tokens come after the others; Megatron numbers them from 1 again. 0: it has none."""
    number = module.layer_number or 0
    return number + module.config.num_layers if number and getattr(module, "is_mtp_layer", False) else number


def _check_router() -> str | None:
    """What router_training.py stands on: the object that top-k asks, and the reduction that statistics ride on."""
    router = importlib.import_module(f"{MOE}.router").TopKRouter
    replay = importlib.import_module(f"{MOE}.router_replay").RouterReplay
    utils = importlib.import_module(f"{MOE}.moe_utils")
    want = ("self", "scores", "topk", "num_groups", "group_topk", "default_compute_topk")
    if _parameters(replay.get_replay_topk) != want:
        return f"RouterReplay.get_replay_topk takes {_parameters(replay.get_replay_topk)}, not {want}"
    if "router_replay.get_replay_topk(" not in inspect.getsource(utils.topk_routing_with_score_function):
        return "top-k routing no longer asks router_replay.get_replay_topk"
    if "self.router_replay" not in inspect.getsource(router.__init__):
        return "TopKRouter has no attribute router_replay"
    owner, name = metrics_reduction()
    if not callable(getattr(owner, name, None)):
        return f"{owner.__name__}.{name} moved: statistics have no reduction to ride on"
    if "all_reduce" not in inspect.getsource(getattr(owner, name)):
        return f"{owner.__name__}.{name} reduces nothing"
    return None


def _check_gradients() -> str | None:
    """What weights.py stands on: the one place where DDP reduces gradients behind the last backward of a step, and the
    one where it zeroes them."""
    module = importlib.import_module("megatron.core.distributed.distributed_data_parallel")
    cls = module.DistributedDataParallel
    for name in ("finish_grad_sync", "zero_grad_buffer"):
        if _parameters(getattr(cls, name, lambda: None))[:1] != ("self",):
            return f"DistributedDataParallel has no method {name}"
    if "finish_grad_sync" not in inspect.getsource(
        importlib.import_module("megatron.core.distributed.finalize_model_grads").finalize_model_grads
    ):
        return "finalize_model_grads no longer calls finish_grad_sync"
    return None


CHECKS = {
    "version": _check_version,
    "moe_layer": _check_moe_layer,
    "base_class": _check_base_class,
    "manager_interface": _check_manager_interface,
    "backend_name": _check_backend_name,
    "checkpoint": _check_checkpoint,
    "fused_a2a": _check_fused_a2a,
    "experts": _check_experts,
    "router": _check_router,
    "gradients": _check_gradients,
}
NEEDED = {
    "token_dispatcher": ("version", "moe_layer", "base_class", "manager_interface", "backend_name", "checkpoint"),
    "deep_ep": ("version", "fused_a2a"),
    "experts": ("version", "experts"),
    "router_training": ("version", "router"),
    "weights": ("version", "experts", "gradients"),
}


HOOKS = ("token_dispatcher", "deep_ep")  # what `apply` can replace, by its name
FORMER_NAMES = {"s3": "token_dispatcher", "s1": "deep_ep"}


def renamed(hook: str) -> str:
    """The name of a hook that may be given by its former one, which a FutureWarning says."""
    if hook in FORMER_NAMES:
        warnings.warn(f"the hook {hook!r} is called {FORMER_NAMES[hook]!r} now", FutureWarning, stacklevel=3)
    return FORMER_NAMES.get(hook, hook)


def check(names: Iterable[str] = tuple(CHECKS)) -> dict[str, str]:
    """dict hook -> "ok" or the sentence that says what changed. A check that breaks is a finding too."""
    findings = {}
    for name in names:
        try:
            findings[name] = CHECKS[name]() or "ok"
        except Exception as error:
            findings[name] = f"{type(error).__name__}: {error}"
    return findings


def require(hook: str) -> dict[str, str]:
    """Raise HookError unless all that `hook`, a key of NEEDED, stands on is where we know it."""
    findings = check(NEEDED[hook])
    broken = [f"{name}: {text}" for name, text in findings.items() if text != "ok"]
    if broken:
        raise HookError(
            "hybrid_ep cannot be patched into this Megatron-Core, and nothing was changed. " + "; ".join(broken)
        )
    return findings
