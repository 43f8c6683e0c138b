"""`--hybrid-ep-load-stats`: what Megatron's routers decided in a range of iterations, as files for the offline tools.

A forward hook on every router counts its map, whatever dispatcher moves the tokens; Megatron's schedules say where an
iteration begins and ends, so that any script is served. `hybrid_ep.balance.collector` keeps the counts on the device,
sums them over the job with the last iteration, and writes what there is when the run ends before that.
"""

from __future__ import annotations

import atexit
import functools
import os
import signal
import sys
import threading
import weakref
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from megatron.core import parallel_state
from megatron.core.utils import get_model_config

from hybrid_ep import env
from hybrid_ep.balance.collector import LoadCollector
from hybrid_ep.balance.statistics import parse_range
from megatron_patches import graphs, hooks, settings

if TYPE_CHECKING:
    from megatron.core.transformer.moe.moe_layer import MoELayer

SCHEDULES = "megatron.core.pipeline_parallel.schedules"
NAMES = (
    "forward_backward_no_pipelining",
    "forward_backward_pipelining_with_interleaving",
    "forward_backward_pipelining_without_interleaving",
)
_collector: LoadCollector | None = None
_iteration = 0


def wanted() -> tuple[str, int, int] | None:
    """(path, first, last) of the settings, else of TensorRT-LLM's variables, else None."""
    asked = settings.current().load_stats
    if asked.path is not None and asked.iterations is not None:
        return asked.path, *asked.iterations
    text = env.get("EXPERT_STATISTIC_ITER_RANGE")
    if text is None:
        return None
    first, stop = parse_range(text)
    if stop <= first:
        raise ValueError(f"EXPERT_STATISTIC_ITER_RANGE={text}: holds no iteration, the second number is not included")
    return env.get("EXPERT_STATISTIC_PATH"), first, stop - 1


def layer_init(original: Callable[..., None]) -> Callable[..., None]:
    """A replacement for MoELayer.__init__ that counts what the layer's router decides, where that is asked for."""

    @functools.wraps(original)
    def __init__(self: MoELayer, *args: Any, **keywords: Any) -> None:
        original(self, *args, **keywords)
        asked = wanted()
        if asked is not None:
            _count(self, asked)

    return __init__


def schedule(original: Callable[..., Any]) -> Callable[..., Any]:
    """A replacement for one of Megatron's schedules: a call that trains is an iteration."""

    @functools.wraps(original)
    def forward_backward(*args: Any, **keywords: Any) -> Any:
        global _iteration
        if not keywords.get("forward_only", False):
            _join(keywords.get("model"))
        if _collector is None or keywords.get("forward_only", False):
            return original(*args, **keywords)
        _iteration = _iteration_of_script() or _iteration + 1
        _collector.begin(_iteration)
        try:
            result = original(*args, **keywords)
        except BaseException as error:
            _collector.close(f"{type(error).__name__} in iteration {_iteration}")
            raise
        _collector.end()
        return result

    return forward_backward


def release() -> None:
    """Forget the collector, after writing what it has."""
    global _collector, _iteration
    if _collector is not None:
        _collector.close("hybrid_ep was taken out")
        atexit.unregister(_collector.close)
    _collector, _iteration = None, 0


def _join(model: Any) -> None:
    """A collector for a pipeline stage without MoE layers, too, of a model that has some: all ranks sum together."""
    asked = wanted()
    if _collector is not None or asked is None or model is None:
        return
    config = get_model_config(model[0] if isinstance(model, list) else model)
    if config.num_moe_experts:
        _collect(asked, config)


def _collect(asked: tuple[str, int, int], config: Any) -> LoadCollector:
    global _collector
    if _collector is None:
        own = parallel_state.get_expert_model_parallel_rank()
        _collector = LoadCollector(*asked, topk=config.moe_router_topk, own_rank=own)
        atexit.register(_collector.close, "the run ended")
        _on_sigterm()
    return _collector


def _count(layer: MoELayer, asked: tuple[str, int, int]) -> None:
    """Hook the layer's router. Counted in training and where gradients are recorded: once, also with recomputation."""
    config = layer.config
    graph = graphs.with_router(config)
    if graph is not None:
        raise ValueError(f"--hybrid-ep-load-stats does not work with {graph}: a replayed graph runs no hook; drop one")
    collector, owner = _collect(asked, config), weakref.ref(layer)  # no cycle, and nothing in the layer that pickles

    def hook(router: torch.nn.Module, _inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
        if collector.counting and router.training and torch.is_grad_enabled():
            collector.add(hooks.layer_number(owner()), output[1])

    layer.router.register_forward_hook(hook)


def _iteration_of_script() -> int | None:
    """The number that Megatron's training loop prints for the iteration under way; None in other loops."""
    module = sys.modules.get("megatron.training.global_vars")
    done = getattr(getattr(module, "_GLOBAL_ARGS", None), "curr_iteration", None)
    return None if done is None else done + 1


def _on_sigterm() -> None:
    """A launcher ends the others with SIGTERM when a rank fails: write first. A handler of the script's own stays."""
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        return

    def handler(number: int, _frame: FrameType | None) -> None:
        if _collector is not None:
            _collector.close("SIGTERM")
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    signal.signal(signal.SIGTERM, handler)
