"""What Megatron's optimizers keep for a model parameter on this rank: which elements, and the tensors over them.

    states = OptimizerStates(optimizer)
    shard = states.shard(parameter)     # Shard(start, end, {"main": ..., "exp_avg": ..., "exp_avg_sq": ...})

One view of three layouts: the distributed optimizer (a contiguous range of each parameter, cut without regard to its
bounds), the mixed-precision one (all of it, with an fp32 copy) and the fp32 one (all of it, the parameter itself).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from megatron.core.optimizer.optimizer import MegatronOptimizer

MAIN = "main"  # the fp32 copy that the optimizer updates, where it is not the parameter's own memory
FindMain = Callable[[], tuple[int, int, torch.Tensor]]  # () -> (start, end, main parameter)


@dataclasses.dataclass(frozen=True)
class Shard:
    """Elements [start, end) of a parameter, and flat views [end - start] of what is kept for them, by name.

    tensors: every state tensor of the parameter's shape (both moments of Adam), and MAIN unless it is the parameter's
    memory. scalars: the rest, equal for all parameters that step together (Adam's step count).
    """

    start: int = 0
    end: int = 0
    tensors: dict[str, torch.Tensor] = dataclasses.field(default_factory=dict)
    scalars: dict[str, Any] = dataclasses.field(default_factory=dict)

    def part(self, first: int, size: int) -> Shard:
        """What is kept of elements [first, first + size), counted from the first of them; an empty Shard if nothing."""
        start, end = max(self.start, first), min(self.end, first + size)
        if start >= end:
            return Shard()
        tensors = {name: value[start - self.start : end - self.start] for name, value in self.tensors.items()}
        return Shard(start - first, end - first, tensors, self.scalars)


class OptimizerStates:
    """Looks shards up in Megatron's optimizer, chained or not.

    ValueError, naming the flag, for optimizers whose state is elsewhere: Transformer Engine's precision-aware one,
    CPU offload, FSDP, layer-wise ones, more than one optimizer instance.
    """

    def __init__(self, optimizer: MegatronOptimizer) -> None:
        self.parts = [p for p in getattr(optimizer, "chained_optimizers", [optimizer]) if p.optimizer is not None]
        self._find: dict[torch.nn.Parameter, tuple[torch.optim.Optimizer, FindMain]] = {}
        for part in self.parts:
            _check(part)
            for parameter, find in _entries(part):
                self._find[parameter] = (part.optimizer, find)

    @property
    def inner(self) -> list[torch.optim.Optimizer]:
        """The torch optimizers, dense parameters before experts."""
        return [part.optimizer for part in self.parts]

    def shard(self, parameter: torch.nn.Parameter) -> Shard:
        """`Shard` of a model parameter; an empty one if this rank keeps nothing of it."""
        if parameter not in self._find:
            return Shard()
        inner, find = self._find[parameter]
        start, end, main = find()
        state = inner.state.get(main, {})
        same = {k: v for k, v in state.items() if torch.is_tensor(v) and v.shape == main.shape and v.dim() > 0}
        tensors = {name: value.detach().view(-1) for name, value in same.items()}
        if main.untyped_storage().data_ptr() != parameter.untyped_storage().data_ptr():
            tensors[MAIN] = main.detach().view(-1)
        return Shard(start, end, tensors, {k: v for k, v in state.items() if k not in same})

    def set_state(
        self, parameter: torch.nn.Parameter, tensors: dict[str, torch.Tensor], scalars: dict[str, Any]
    ) -> None:
        """Create the state that a fresh optimizer lacks: flat tensors and scalars, as `shard` gives them, less MAIN."""
        inner, find = self._find[parameter]
        main = find()[2]
        inner.state[main] = {k: v.clone() if torch.is_tensor(v) else v for k, v in scalars.items()}
        for name, value in tensors.items():
            inner.state[main][name] = value.clone().view(main.shape)


def _check(part: MegatronOptimizer) -> None:
    config, name = part.config, type(part).__name__
    for flag in ("use_precision_aware_optimizer", "optimizer_cpu_offload"):
        if getattr(config, flag, False):
            raise ValueError(f"--{flag.replace('_', '-')}: expert balancing cannot move its state; drop it")
    ddp = getattr(part, "ddp_config", None)
    for flag in ("use_megatron_fsdp", "overlap_param_gather"):
        if getattr(ddp, flag, False):
            raise ValueError(f"--{flag.replace('_', '-')}: expert balancing does not work with it; drop one of them")
    if (getattr(ddp, "num_distributed_optimizer_instances", 1) or 1) > 1:
        raise ValueError("--num-distributed-optimizer-instances above 1: expert balancing does not work with it")
    if name not in ("DistributedOptimizer", "Float16OptimizerWithFloat16Params", "FP32Optimizer"):
        raise ValueError(f"--optimizer: expert balancing cannot move the state of {name}; use adam or sgd")


def _entries(part: MegatronOptimizer) -> Iterator[tuple[torch.nn.Parameter, FindMain]]:
    """(model parameter, () -> (start, end, main parameter)) of one Megatron optimizer."""
    if hasattr(part, "model_param_group_index_map"):
        for parameter, (group, order) in part.model_param_group_index_map.items():
            yield parameter, _range_of(part, parameter, group, order)
        return
    pairs = [(p, p) for group in part.optimizer.param_groups for p in group["params"]]
    if hasattr(part, "float16_groups"):
        pairs = [
            pair
            for models, mains in zip(part.float16_groups, part.fp32_from_float16_groups, strict=True)
            for pair in zip(models, mains, strict=True)
        ]
        pairs += [(p, p) for group in part.fp32_from_fp32_groups for p in group]
    for parameter, main in pairs:
        yield parameter, functools.partial(_whole, main)


def _whole(main: torch.Tensor) -> tuple[int, int, torch.Tensor]:
    return 0, main.numel(), main


def _range_of(part: MegatronOptimizer, parameter: torch.nn.Parameter, group: int, order: int) -> FindMain:
    def find() -> tuple[int, int, torch.Tensor]:
        elements = part._get_model_param_range_map(parameter)["param"]
        return elements.start, elements.end, part.optimizer.param_groups[group]["params"][order]

    return find
