"""Activation recompute: the second run of a forward goes by the handles of the first.

    checkpoint(function): first run, no gradients -> each dispatch keeps its handle here
                          second run, in backward -> each dispatch takes its handle: no routing is exchanged or placed,
                                                     the last combine is left out where nobody reads its sums

Megatron's `checkpoint` is given a `Replayed` in place of its function, so that the two runs are paired by the object
that autograd keeps for the second, in whatever order schedules run backwards, and what is kept goes when that goes.
A checkpoint inside of another is given a new object when the outer one runs again, and so exchanges again.

A recomputed router decides as it did, for Megatron restores its random numbers. Should one not, rows would go by the
first decision and weights by the second: a fingerprint of the map tells.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.modules import module as torch_module

from megatron_patches import settings

if TYPE_CHECKING:
    from megatron_patches.manager import HybridEPManager


@dataclasses.dataclass(frozen=True)
class Kept:
    """What the first run of a dispatch leaves to the second: the balancer's plan is None without one."""

    manager: HybridEPManager
    handle: tuple[Any, ...]
    fingerprint: torch.Tensor
    plan: Any


_ANOTHER_ORDER = (
    "a recomputed forward dispatches in another order than the first one did: turn the reuse of handles off with "
    "--hybrid-ep-recompute repeat"
)


class Replayed:
    """A function that a checkpoint runs twice, with what its dispatches keep from the first run to the second."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.kept: list[Kept] = []
        self.again = False

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        """The function's result. A third run keeps handles of its own, as the first did, and so does a run after one
        that raised, whose rest nobody takes any more. torch's non-reentrant checkpoint ends its second run so as well,
        by an exception of its own when the last saved tensor has been made again: later dispatches are not missed.

        RuntimeError for a second run that ends by itself with fewer dispatches than the first."""
        left = 0
        _stack().append(self)
        try:
            result = self.function(*arguments, **keywords)
            left = len(self.kept) if self.again else 0
        except BaseException:
            self.kept.clear()
            raise
        finally:
            _stack().pop()
            if left:
                self.kept.clear()
            self.again = bool(self.kept)
        if left:
            raise RuntimeError(_ANOTHER_ORDER)
        return result

    def reads_sums_of(self, manager: HybridEPManager) -> bool:
        """Whether anything may read the sums of this manager's combine in the second run, which is for its graph.

        Not where it ends the function and nothing behind it keeps its input for the backward: in Megatron's own MoE
        layer recomputed by itself, and in the last transformer layer of a chunk, which end in additions and dropout.
        What is not known to be so is read: multi-token prediction, for instance, ends in a norm, and forward hooks are
        given what a module returns.
        """
        if getattr(manager.config, "moe_latent_size", None) is not None:  # a projection of the sums
            return True
        name, around = getattr(self.function, "__qualname__", ""), _closure(self.function)
        layer: Any = around.get("self")
        if "checkpointed_forward." in name and "end" in around:
            last = layer.layers[around["end"] - 1]
            layer = getattr(last, "mlp", None)
            if not _is_plain(last, "TransformerLayer"):
                return True
        elif not name.startswith("MoELayer.forward."):
            return True
        return not _is_plain(layer, "MoELayer") or layer.token_dispatcher._comm_manager is not manager


def _is_plain(module: Any, name: str) -> bool:
    """Whether it is Megatron's own class of this name, and no forward hook is given what it returns."""
    known = type(module).__name__ == name and type(module).__module__.startswith("megatron.core.")
    return known and not module._forward_hooks and not torch_module._global_forward_hooks


def _closure(function: Any) -> dict[str, Any]:
    """The variables that a function has from around it, those that have values."""
    names = getattr(getattr(function, "__code__", None), "co_freevars", ())
    values = {}
    for name, cell in zip(names, getattr(function, "__closure__", None) or (), strict=True):
        with contextlib.suppress(ValueError):  # the variable has no value
            values[name] = cell.cell_contents
    return values


_local = threading.local()


def _stack() -> list[Replayed]:
    """The checkpointed functions that this thread is in, the innermost last: backwards run on threads of autograd."""
    if not hasattr(_local, "stack"):
        _local.stack = []
    return _local.stack


def wrapper(original: Callable[..., Any]) -> Callable[..., Any]:
    """A replacement for a `checkpoint` whose first argument is the function, Megatron's or Transformer Engine's."""

    @functools.wraps(original)
    def checkpoint(function: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
        wanted = settings.current()
        if wanted.enabled and wanted.exchange.recompute != "repeat":
            function = Replayed(function)
        return original(function, *arguments, **keywords)

    return checkpoint


def first_run(manager: HybridEPManager) -> Kept | None:
    """What the dispatch that this one repeats has kept; None in a first run, and outside of checkpoints."""
    running = _stack()[-1] if _stack() else None
    if running is None or not running.again:
        return None
    if not running.kept or running.kept[0].manager is not manager:
        raise RuntimeError(_ANOTHER_ORDER)
    return running.kept[0]


def checked(first: Kept, routing_map: torch.Tensor, probs: torch.Tensor, look: bool) -> torch.Tensor:
    """probs, if the map is that of the first run. look: whether the host can look, for it is no GPU that it waits for.

    Otherwise RuntimeError where it can. On a GPU the probabilities are NaN then, and so are the gradients, which
    Megatron checks before it makes a step."""
    same = fingerprint(routing_map) == first.fingerprint
    if not look:
        return torch.where(same, probs, float("nan"))
    if not same:
        raise RuntimeError(
            "a recomputed router chose other experts than in the forward: gradients would be of another function. Make "
            "it deterministic (random numbers, atomics), or exchange again with --hybrid-ep-recompute repeat"
        )
    return probs


def dispatched(
    manager: HybridEPManager, first: Kept | None, handle: tuple[Any, ...], routing_map: torch.Tensor, plan: Any
) -> bool:
    """Note that a dispatch has run: its first run keeps what its second will need. Returns whether anything may read
    the sums of its combine."""
    running = _stack()[-1] if _stack() else None
    if running is None:
        return True
    if first is None:
        running.kept.append(Kept(manager, handle, fingerprint(routing_map), plan))
        return True
    running.kept.pop(0)
    return bool(running.kept) or running.reads_sums_of(manager)


_SEED, _MIX = 20251, (-0x61C8864680B583EB, -0x3B314601E57A13AD)  # odd, far from small multiples of powers of two


def fingerprint(routing_map: torch.Tensor) -> torch.Tensor:
    """int64 []: equal for equal maps bool [T, E], and for different ones with a chance of about 2^-60.

    Eight choices a word, each mixed with a random number of its place before they are added; bits alone would do, but
    a map is a megabyte for each layer and micro-batch in flight."""
    flat = routing_map.reshape(-1)
    words = torch.nn.functional.pad(flat, (0, -flat.numel() % 8)).view(torch.int64)
    z = (words ^ _keys(words.numel(), words.device)) * _MIX[0]
    z = (z ^ (z >> 29)) * _MIX[1]
    return (z ^ (z >> 32)).sum()


_known_keys: dict[torch.device, torch.Tensor] = {}


def _keys(count: int, device: torch.device) -> torch.Tensor:
    """int64 [count] random numbers, of a place always the same."""
    known = _known_keys.get(device)
    if known is None or known.numel() < count:
        size = 1 << max(count - 1, 1023).bit_length()
        generator = torch.Generator(device="cpu").manual_seed(_SEED)
        limit = torch.iinfo(torch.int64)
        known = torch.randint(limit.min, limit.max, (size,), generator=generator, dtype=torch.int64, device="cpu")
        known = _known_keys[device] = known.to(device)
    return known[:count]
