"""Slow balancing: between optimizer steps, experts move to ranks that have been idler, a few layers a step.

    router's counts -> LoadWindow -> every `balance_interval` steps: plan_placement(current=owners) -> after this step
    and the next ones `layer_updates_per_iter` layers move (`balance_move`): weight, fp32 copy, both moments

A step boundary is the one moment when no gradient is half summed and no forward is under way: what moves is sent then,
and travels during the next step, whose forward waits for a layer's weights and whose optimizer for the rest.
Everything is decided from counts summed over all ranks in integers, so that every rank plans the same.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from hybrid_ep.balance import plan_placement
from hybrid_ep.balance.window import LoadWindow
from megatron_patches import settings
from megatron_patches.balance import SlowManager
from megatron_patches.balance_move import Move, Mover, Placement
from megatron_patches.optimizer_state import OptimizerStates

if TYPE_CHECKING:
    import torch
    from megatron.core.optimizer.optimizer import MegatronOptimizer

TARGET = 0.02  # a layer within this of the mean stays as it is
DECAY = 0.9

# Megatron's own state dicts go by slot, in either direction: right while every expert is where it began.
_BY_SLOT = ("state_dict", "load_state_dict", "sharded_state_dict", "save_parameter_state", "load_parameter_state")


class Migrator:
    """Counts the loads of one model's MoE layers on this rank and moves its experts after optimizer steps.

    plan_with: (load float64 [L, E], current int64 [L, E]) -> expert of every slot [L, E]; tests force plans here.
    moved: slots that changed so far. layers: the managers, in the order of the model. under_way: the latest move, until
    all of it is in force.
    """

    def __init__(self, optimizer: MegatronOptimizer, model_chunks: Sequence[torch.nn.Module]) -> None:
        self.settings = settings.current().balance
        modules = [m for chunk in model_chunks for m in chunk.modules()]
        managers = [getattr(getattr(m, "token_dispatcher", None), "_comm_manager", None) for m in modules]
        self.layers: list[SlowManager] = [manager for manager in managers if isinstance(manager, SlowManager)]
        self.states = OptimizerStates(optimizer)
        self.mover: Mover | None = None
        self.under_way: Move | None = None
        self.plan_with: Callable[[np.ndarray, np.ndarray], np.ndarray] = self._plan
        self.steps, self.moved = 0, 0
        self.covariance: np.ndarray | None = None  # [L, E, E], of the plan that is due, where experts are kept apart
        self.pending: list[tuple[int, Placement]] = []
        if self.layers:
            experts = len(self.layers[0].owners.slot_of)
            self.window = LoadWindow(len(self.layers), experts, DECAY, covariance=self.settings.apart)
        for index, manager in enumerate(self.layers):
            manager.record = functools.partial(self.window.add, index)

    @property
    def current(self) -> np.ndarray:
        """int64 [L, E]: the expert in every owner slot."""
        return np.array([manager.owners.expert_of_slot for manager in self.layers], dtype=np.int64)

    def after_step(self) -> None:
        """Tell it that an optimizer step has been made. Collective over the expert ranks of the stage."""
        if not self.layers:
            return
        if self.steps == 0:
            self._mover_of_layers().check_trained()  # and not when the interval is over
        self.steps += 1
        self.window.advance()
        if self.steps % self.settings.interval == 0 and not self.pending:  # or the last layers never move
            experts = self.layers[0].experts
            groups, current = (experts.ep_group, experts.dp_group), self.current
            load = self.window.reduced(*groups)
            self.covariance = self.window.covariance(*groups) if self.settings.apart else None
            new = np.asarray(self.plan_with(load, current))
            self.pending = [(layer, new[layer]) for layer in range(len(new)) if (new[layer] != current[layer]).any()]
        count = self.settings.layer_updates_per_iter
        now, self.pending = self.pending[:count], self.pending[count:]
        self.begin(dict(now))

    def _plan(self, load: np.ndarray, current: np.ndarray) -> np.ndarray:
        num_experts = current.shape[1]
        plan = plan_placement(
            load,
            num_experts,
            self.layers[0].owners.num_ranks,
            current=current,
            target=TARGET,
            move_cost=self.settings.move_cost,
            horizon=self.settings.interval if self.settings.move_cost else 0,
            covariance=self.covariance,
        )
        return plan.phy2log

    def begin(self, changes: Mapping[int, Placement]) -> None:
        """Begin to put {layer: expert of every slot} in force, all layers or none. Collective; errors as of
        `Mover.begin`, and of `finish`, by which the move before ends."""
        if not changes:
            return
        self.finish()
        mover, current = self._mover_of_layers(), self.current
        mover.check_trained()
        self.under_way = mover.begin(changes)
        self.moved += sum(int((np.asarray(new) != current[layer]).sum()) for layer, new in changes.items())

    def _mover_of_layers(self) -> Mover:
        """The mover. Collective where there is none yet."""
        if self.mover is None:
            self.mover = Mover(self.layers, self.states)
        return self.mover

    def finish(self) -> None:
        """Put in force what is under way. Local. DeadlineError when a rank did not send."""
        if self.under_way is not None:
            self.under_way.finish()
            self.under_way = None

    def move(self, changes: Mapping[int, Placement]) -> None:
        """`begin` and `finish`."""
        self.begin(changes)
        self.finish()

    def state(self) -> dict[str, Any]:
        """What `restore` takes to continue exactly: owners, moves to come, steps, this rank's window. Finishes what is
        under way: read the weights and the optimizer's state behind it."""
        self.finish()
        pending = [(layer, [int(expert) for expert in new]) for layer, new in self.pending]
        window = self.window.state() if self.layers else None
        return {
            "owners": self.current.tolist(),
            "pending": pending,
            "steps": self.steps,
            "window": window,
            "num_ranks": [manager.owners.num_ranks for manager in self.layers],
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Take up a `state` before the weights are loaded; does nothing where the layers are spread otherwise."""
        if state["num_ranks"] != [manager.owners.num_ranks for manager in self.layers] or not self.layers:
            return
        self.finish()
        for manager, owners in zip(self.layers, state["owners"], strict=True):
            manager.owners.assign(owners)
        self.pending, self.steps = list(state["pending"]), state["steps"]
        self.window.restore(state["window"])

    @contextlib.contextmanager
    def identity_owners(self) -> Iterator[None]:
        """Every expert where it began while the block runs, then back: for state dicts that go by slot. Collective."""
        self.finish()
        away = {i: np.array(m.owners.expert_of_slot) for i, m in enumerate(self.layers) if not m.owners.is_identity}
        self.move({layer: np.arange(len(new)) for layer, new in away.items()})
        yield
        self.move(away)


_migrators: list[Migrator] = []  # of this process, for identity_owners()


@contextlib.contextmanager
def identity_owners() -> Iterator[None]:
    """`Migrator.identity_owners` of every model of this process."""
    with contextlib.ExitStack() as stack:
        for migrator in _migrators:
            stack.enter_context(migrator.identity_owners())
        yield


def attach(optimizer: MegatronOptimizer, model_chunks: Sequence[torch.nn.Module]) -> Migrator:
    """Move experts of `model_chunks` behind every successful `optimizer.step()`; returns the `Migrator`.

    optimizer: Megatron's, over all of model_chunks. Done by `get_megatron_optimizer` itself once `apply()` asked for
    slow or both. ValueError for an optimizer whose state cannot be moved.
    """
    found = getattr(optimizer, "hybrid_ep_migrator", None)
    if found is not None:
        return found
    migrator, step = Migrator(optimizer, model_chunks), optimizer.step

    @functools.wraps(step)
    def step_and_move(*args: Any, **keywords: Any) -> Any:
        migrator.finish()
        result = step(*args, **keywords)
        if result[0]:  # an overflow skipped the step: nothing is counted, the next one is a step later
            migrator.after_step()
        return result

    optimizer.step, optimizer.hybrid_ep_migrator = step_and_move, migrator
    for name in _BY_SLOT:
        if hasattr(optimizer, name):
            setattr(optimizer, name, _only_at_identity(getattr(optimizer, name), migrator))
    _migrators.append(migrator)
    return migrator


def release() -> None:
    """Forget the models of this process."""
    _migrators.clear()


def _only_at_identity(method: Callable[..., Any], migrator: Migrator) -> Callable[..., Any]:
    @functools.wraps(method)
    def guarded(*args: Any, **keywords: Any) -> Any:
        migrator.finish()
        if not all(manager.owners.is_identity for manager in migrator.layers):
            raise ValueError(
                f"optimizer.{method.__name__}() goes by slot, and --hybrid-ep-balance {migrator.settings.mode} has "
                "moved experts: call it inside `with megatron_patches.balance_slow.identity_owners():`"
            )
        return method(*args, **keywords)

    return guarded


def optimizer_wrapper(original: Callable[..., MegatronOptimizer]) -> Callable[..., MegatronOptimizer]:
    """A replacement for get_megatron_optimizer that attaches what it builds."""

    @functools.wraps(original)
    def get_megatron_optimizer(
        config: object, model_chunks: Sequence[torch.nn.Module], *args: Any, **keywords: Any
    ) -> MegatronOptimizer:
        optimizer = original(config, model_chunks, *args, **keywords)
        if settings.current().enabled and settings.current().balance.migrates:
            attach(optimizer, model_chunks)
        return optimizer

    return get_megatron_optimizer


def save_wrapper(original: Callable[..., None]) -> Callable[..., None]:
    """A replacement for Megatron-LM's save_checkpoint: experts go to their first owners for it, so files of any format
    are logical."""

    @functools.wraps(original)
    def save_checkpoint(*args: Any, **keywords: Any) -> None:
        with identity_owners():
            return original(*args, **keywords)

    return save_checkpoint
