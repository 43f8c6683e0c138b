"""Experts' weights travel in place of tokens: `--hybrid-ep-move weights`.

    forward    tokens are permuted on their rank -> all experts: own stack, kept copies, fetched buffer -> unpermuted
               meanwhile the next layer's experts are pulled out of the other ranks' registered memory
    backward   the layer's experts are fetched again, gradients of other homes' experts are summed in fp32, here
    step       before gradients are reduced: homes add what all ranks have for them, in the order of the ranks
               in the first forward behind it: weights are published anew

Router, losses, optimizer and checkpoints see the experts that they always see: those at home on their rank. No forward
and no backward has a collective; ranks wait for one another where gradients go home and where weights are published.
"""

from __future__ import annotations

import functools
import importlib
import socket
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from hybrid_ep.errors import HybridEPError
from hybrid_ep.runtime import devices
from hybrid_ep.runtime.bootstrap import GroupView, Rendezvous, agree
from hybrid_ep.runtime.options import asked_executor
from hybrid_ep.weights import ExpertStore, WeightLayout, WeightPrefetcher
from megatron_patches import graphs, settings, weights_choice
from megatron_patches.experts import GroupedExperts
from megatron_patches.manager import HybridEPManager
from megatron_patches.saved_places import SavedPlaces
from megatron_patches.trained import SomeTrain
from megatron_patches.weights_autograd import FetchAgain, Through, Travelled, Use

if TYPE_CHECKING:
    from megatron.core.transformer.moe.moe_layer import MoELayer
    from megatron.core.transformer.transformer_config import TransformerConfig

    from megatron_patches.patch_set import Replace

# attribute of TransformerConfig -> the flag that sets it: what does not work with travelling weights, refused when set.
UNSUPPORTED = {
    "moe_expert_rank_capacity_factor": "--moe-expert-rank-capacity-factor",
    "overlap_moe_expert_parallel_comm": "--overlap-moe-expert-parallel-comm",
    "delay_wgrad_compute": "--delay-wgrad-compute",
    "fp8": "--fp8-format",
    "fp4": "--fp4-format",
}


def check_supported(config: TransformerConfig, tp_size: int, num_ranks: int, wanted: settings.Weights) -> None:
    """ValueError that names every flag which does not work with weights that travel."""
    found = [flag for name, flag in UNSUPPORTED.items() if getattr(config, name, None) not in (None, False, "none")]
    graph = graphs.with_dispatch(config)
    found += [] if graph is None else [graph]
    if tp_size > 1:
        found.append("--expert-tensor-parallel-size above 1")
    if found:
        raise ValueError(
            f"--hybrid-ep-move {wanted.move} does not work with {', '.join(found)}: drop them, or move tokens"
        )
    if wanted.group is not None and num_ranks % wanted.group:
        raise ValueError(
            f"weight_group (--hybrid-ep-weight-group) is {wanted.group}, and groups of ranks that hold all experts "
            f"among them divide the {num_ranks} of the expert-parallel group: give one of "
            f"{', '.join(str(n) for n in range(1, num_ranks + 1) if num_ranks % n == 0)}"
        )
    total = config.num_moe_experts
    least = wanted.share(total, num_ranks)
    if wanted.local_experts is not None and not least <= wanted.local_experts <= total:
        raise ValueError(
            f"local_experts (--hybrid-ep-local-experts) is {wanted.local_experts}: give {least} (a rank's share among "
            f"the {wanted.group or num_ranks} that hold all) to {total} (all)"
        )


_alone: tuple[Any, Any] | None = None  # (the job's group, this rank as a group)


def alone() -> Any:
    """This rank as a group, for dispatch and combine on the rank."""
    global _alone
    world = dist.group.WORLD
    if _alone is None or _alone[0] is not world:
        _alone = world, dist.new_group([dist.get_rank()], use_local_synchronization=True)
    return _alone[1]


class WeightsManager(HybridEPManager):
    """HybridEPManager whose tokens stay on their rank while experts come to them; with "auto" where the roofline says.

    layer: the layer's experts among those of the group. last_plan and `over_budget` stay as they begin.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        num_local_experts: int,
        num_experts: int,
        router_topk: int,
        config: TransformerConfig,
    ) -> None:
        wanted = settings.current()
        check_supported(config, num_experts // config.num_moe_experts, group.size(), wanted.weights)
        super().__init__(group, num_local_experts, num_experts, router_topk, config)
        self.here = HybridEPManager(alone(), num_experts, num_experts, router_topk, config)
        self.layer: LayerWeights | None = None

    def attach(self, experts: torch.nn.Module) -> None:
        """Give the layer's experts, whose forward also runs those of other ranks from now on."""
        if not isinstance(experts, GroupedExperts):
            raise ValueError(
                f"--hybrid-ep-move {self.settings.weights.move} works with the experts of --hybrid-ep-grouped-gemm, "
                f"not {type(experts).__name__}: give that flag"
            )
        self.layer = joined(self.group, self.settings).add(experts)
        setattr(experts, "forward", self.layer.forward)  # noqa: B010 - an instance attribute over a method

    def reset_transient_forward_state(self) -> None:
        """As the base class."""
        super().reset_transient_forward_state()
        if hasattr(self, "here"):
            self.here.reset_transient_forward_state()

    def dispatch(
        self, hidden_states: torch.Tensor, async_finish: bool = True, allocate_on_comm_stream: bool = True
    ) -> torch.Tensor:
        """[T, H] -> [P, H] grouped by expert: all of them, in this rank's order, where weights travel.

        Nothing is exchanged then, but by the first forward of all layers, which sets the weights up."""
        if self.layer is None:
            raise RuntimeError("weights that travel have no experts: call attach(experts) after building the layer")
        if not self.layer.travels(self.config, hidden_states):
            return super().dispatch(hidden_states)
        routing_map, probs = self.routed()
        order = self.layer.group.order
        assert order is not None  # since they travel
        self.here.setup_metadata(routing_map.index_select(1, order), probs.index_select(1, order))
        rows = self.here.dispatch(hidden_states)
        self.dispatched_probs, self.tokens_per_expert = self.here.dispatched_probs, self.here.tokens_per_expert
        return rows

    def combine(
        self, hidden_states: torch.Tensor, async_finish: bool = True, allocate_on_comm_stream: bool = True
    ) -> torch.Tensor:
        """[P, H] -> [T, H], as the base class."""
        if self.layer is None or not self.layer.chosen:
            return super().combine(hidden_states)
        return self.here.combine(hidden_states)


class LayerWeights:
    """One layer of a `GroupWeights`: its experts' forward. chosen: whether weights travel in this layer, None before
    the first forward. number: its place among the layers that do."""

    def __init__(self, group: GroupWeights, experts: GroupedExperts) -> None:
        self.group, self.experts, self.plain_forward = group, experts, experts.forward
        self.chosen: bool | None = None
        self.number = -1
        self._some_train = SomeTrain(group.group, group.wanted.exchange.longest_wait_s)
        experts.register_load_state_dict_post_hook(lambda module, keys: group.changed())

    @property
    def owners(self) -> list[torch.nn.Parameter]:
        """The experts' parameters, as they are now."""
        return [self.experts.weight1, self.experts.weight2]

    def travels(self, config: TransformerConfig, hidden_states: torch.Tensor) -> bool:
        """Whether weights travel here. The first call of the group's layers decides, and is collective."""
        if self.chosen is None:
            self.group.set_up(config, hidden_states.shape[0], hidden_states.device)
        if self.chosen and torch.is_grad_enabled() and self._trains():
            self.group.prefetcher.store.open_gradients()
        return bool(self.chosen)

    def forward(
        self, rows: torch.Tensor, tokens_per_expert: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The experts' forward: own ones with their parameters, the others with what was fetched."""
        if not self.chosen:
            return self.plain_forward(rows, tokens_per_expert, probs)
        prefetcher = self.group.ready()
        try:
            prefetcher.store.check_unchanged(self.number, self.owners)
        except HybridEPError:
            raise
        except RuntimeError as error:
            raise RuntimeError(
                f"{error}. With Megatron's DDP that happens behind its finish_grad_sync; where weights change "
                "otherwise, or a forward ran between that and the step, call megatron_patches.weights.changed(), and "
                "where another wrapper trains, megatron_patches.weights.bring_home() behind the last backward of a step"
            ) from None
        there = prefetcher.acquire(self.number)
        try:
            trained = torch.is_grad_enabled() and self._trains()
            use = Use(self, trained)
            # What has gradients of other homes' experts made although all experts at home here may be frozen, and
            # nothing else of this rank ask for gradients. Not by torch.autograd.grad, which is asked for other tensors:
            # they would come home a second time.
            asked = rows.new_empty(0).requires_grad_() if trained else None
            rows, probs = Through.apply(use, asked, rows, probs)
            stacks = Travelled.apply(use, there, asked, *self.owners)
            further = list(zip(stacks[::2], stacks[1::2], strict=True))
            with SavedPlaces(self._place_of, lambda place: self.group.prefetcher.at(place)):
                output, bias = self.plain_forward(rows, tokens_per_expert, probs, further=further)
            return FetchAgain.apply(use, output), bias
        finally:
            again = torch._C._current_graph_task_id() != -1  # recomputed in the backward, whose way it goes
            prefetcher.release(self.number, backward=again, training=self.experts.training)

    def _trains(self) -> bool:
        """Whether gradients of this layer's experts go home, of all ranks the same. Collective in its first call."""
        return self._some_train.ask(self.owners) or any(owner.requires_grad for owner in self.owners)

    def _place_of(self, tensor: torch.Tensor) -> Any:
        """Of a tensor that lies in a buffer: other layers will use the memory."""
        return self.group.ready().place_of(self.number, tensor)


class GroupWeights:
    """The layers of one expert-parallel group whose experts travel, in the order in which they were built."""

    def __init__(self, group: dist.ProcessGroup, wanted: settings.Settings) -> None:
        self.group, self.wanted = group, wanted
        self.layers: list[LayerWeights] = []
        self.has_gradients = False
        self._fresh = False  # what is published is what the owners hold
        self._fetched_again: list[Use] = []  # by backwards that have not come to their end
        self._prefetcher: WeightPrefetcher | None = None
        self.order: torch.Tensor | None = None  # int64 [E], experts as this rank has them, once weights travel

    def add(self, experts: GroupedExperts) -> LayerWeights:
        self.layers.append(LayerWeights(self, experts))
        return self.layers[-1]

    @property
    def is_set_up(self) -> bool:
        return bool(self.layers) and self.layers[0].chosen is not None

    @property
    def travelling(self) -> list[LayerWeights]:
        return [layer for layer in self.layers if layer.chosen]

    @property
    def prefetcher(self) -> WeightPrefetcher:
        if self._prefetcher is None:
            raise RuntimeError("the weights of these layers were released: build the model anew, or apply() before it")
        return self._prefetcher

    def set_up(self, config: TransformerConfig, num_tokens: int, device: torch.device) -> None:
        """Decide what travels in each layer, register memory, exchange handles. Collective, once.

        ValueError where tensors lie elsewhere than the executor's, where ranks of the host's executor lie on
        several hosts, or GPUs do not map each other's memory: experts are read from memory that ranks share."""
        limit = self.wanted.exchange.longest_wait_s
        view = GroupView.of(self.group)
        meet = Rendezvous(view, limit)
        owners, executor = self.layers[0].owners, asked_executor(None, view)
        on_gpus = devices.is_cuda(executor)
        mine = {"tokens": num_tokens, "host": socket.gethostname()}
        common = {
            "layers": len(self.layers),
            "shapes": [list(p.shape) for p in owners],
            "dtype": str(owners[0].dtype),
            "executor": executor,
        }
        try:
            for name, where in (("tokens", device), ("experts", owners[0].device)):
                if (where.type == "cuda") != on_gpus:
                    raise ValueError(
                        f"--hybrid-ep-move {self.wanted.weights.move}: {name} are on {where}, and "
                        f"executor {executor} has weights travel in memory of {'GPUs' if on_gpus else 'the host'}: set "
                        f"HYBRID_EP_EXECUTOR={'host' if on_gpus else 'cuda'}, or move tokens"
                    )
        except ValueError as error:
            meet.refuse("weights", error)
            raise
        said = meet.exchange("weights", {**mine, "must_agree": common})
        agree([one["must_agree"] for one in said], f"--hybrid-ep-move {self.wanted.weights.move}")
        if not on_gpus and len(hosts := {one["host"] for one in said}) > 1:
            raise ValueError(
                f"--hybrid-ep-move {self.wanted.weights.move} reads experts out of memory that ranks share, and those "
                f"of this group lie on hosts {', '.join(sorted(hosts))}: give groups inside a host, or move tokens"
            )
        mean = max(1, sum(one["tokens"] for one in said) // len(said))
        for number, layer in enumerate(self.layers):
            place = number, len(self.layers)
            layer.chosen = weights_choice.travels(self.wanted.weights, config, layer.experts, place, mean, self.group)
        if not self.travelling:
            return
        for number, layer in enumerate(self.travelling):
            layer.number = number
        shapes = tuple(tuple(owner.shape[1:]) for owner in owners)
        layout = WeightLayout(
            config.num_moe_experts,
            self.group.size(),
            len(self.travelling),
            shapes,
            owners[0].dtype,
            self.wanted.weights.local_experts or self.wanted.weights.share(config.num_moe_experts, self.group.size()),
            self.wanted.weights.group or self.group.size(),
        )
        self.order = torch.tensor(layout.order(view.rank), dtype=torch.int64, device=device)
        store = ExpertStore(self.group, layout, timeout_s=limit, executor=executor)
        self._prefetcher = WeightPrefetcher(store, num_buffers=self.wanted.weights.buffers)
        weakref.finalize(self, self._prefetcher.close)  # its thread would live on otherwise

    def changed(self) -> None:
        """The owners' weights have changed, or will have by the next forward, on every rank."""
        self._fresh = False

    def ready(self) -> WeightPrefetcher:
        """The prefetcher, when what the owners hold is published."""
        if not self._fresh:
            self._let_go()
            self.prefetcher.publish([[owner.detach() for owner in layer.owners] for layer in self.travelling])
            self._fresh = True
        return self.prefetcher

    def fetch_again(self, use: Use) -> None:
        """A layer's weights, for its backward."""
        self.prefetcher.acquire(use.layer.number)
        self._fetched_again.append(use)

    def release_again(self, use: Use) -> None:
        """When that backward is through with them, which several may notice."""
        if use in self._fetched_again:
            self._fetched_again.remove(use)
            self.prefetcher.release(use.layer.number, backward=True)

    def _let_go(self) -> None:
        """Of layers whose backward an error ended half-way: nobody reads them any more."""
        while self._fetched_again:
            self.release_again(self._fetched_again[-1])

    def drop_gradients(self) -> None:
        """Forget what backwards have brought since gradients last went home, on every rank; nothing without any."""
        if self._prefetcher is None:
            return
        self._let_go()
        self._prefetcher.store.drop_gradients()
        self.has_gradients = False

    def bring_home(self) -> None:
        """Add what all ranks have for the experts at home here to main_grad, or to grad where there is none. Once a
        step; nothing where no backward has run."""
        if not self.has_gradients:
            return
        self.has_gradients = False
        layers = self.travelling
        with torch.no_grad():
            self.prefetcher.store.bring_home(lambda layer, n, parts: _add(layers[layer].owners[n], parts))
        self.changed()

    def close(self) -> None:
        if self._prefetcher is not None:
            self._prefetcher.close()
        self._prefetcher = None


def _add(owner: torch.nn.Parameter, parts: list[torch.Tensor]) -> None:
    """Sum in fp32 behind what the owner has of its own tokens, rounded once where its gradient is not fp32."""
    if not owner.requires_grad:
        return
    total = getattr(owner, "main_grad", None)
    if total is None:
        if owner.grad is None:
            owner.grad = torch.zeros_like(owner)
        total = owner.grad
    total = total.view_as(owner)
    summed = total if total.dtype == torch.float32 else total.float()
    for part in parts:
        summed.add_(part)
    if summed is not total:
        total.copy_(summed)


_groups: list[weakref.ref[GroupWeights]] = []
_open: dict[tuple[dist.ProcessGroup, settings.Settings], GroupWeights] = {}  # layers may still join


def joined(group: dist.ProcessGroup, wanted: settings.Settings) -> GroupWeights:
    """Where a layer that is being built joins: those of its group until their first forward, then others."""
    found = _open.get((group, wanted))
    if found is None or found.is_set_up:
        found = _open[group, wanted] = GroupWeights(group, wanted)
        _groups.append(weakref.ref(found))
    return found


def live() -> list[GroupWeights]:
    """Those whose models live."""
    return [found for one in _groups if (found := one()) is not None]


def bring_home() -> None:
    """What `finish_grad_sync` of Megatron's DDP does here, for training without it: call it on every rank behind the
    last backward of a step. It waits for the ranks of the group, by counters in memory."""
    for group in live():
        group.bring_home()


def drop_gradients() -> None:
    """What `zero_grad_buffer` of Megatron's DDP does here, for training without it: call it on every rank where the
    gradients of a step are thrown away, after a backward that raised, say. Without it they would go home with those of
    the next step."""
    for group in live():
        group.drop_gradients()


def changed() -> None:
    """Call it on every rank after weights have changed other than by an optimizer behind `bring_home` or by loading."""
    for group in live():
        group.changed()


def release() -> None:
    """End the copying threads; layers that live on cannot compute any more."""
    for group in live():
        group.close()
    _groups.clear()
    _open.clear()


def layer_init(original: Callable[..., None]) -> Callable[..., None]:
    """A replacement for MoELayer.__init__ that hands the experts to the manager."""

    @functools.wraps(original)
    def __init__(self: MoELayer, *args: Any, **keywords: Any) -> None:
        original(self, *args, **keywords)
        manager = getattr(self.token_dispatcher, "_comm_manager", None)
        if isinstance(manager, WeightsManager):
            manager.attach(self.experts)

    return __init__


def gradient_wrapper(original: Callable[..., None]) -> Callable[..., None]:
    """A replacement for DistributedDataParallel.finish_grad_sync: gradients go home before they are reduced."""

    @functools.wraps(original)
    def finish_grad_sync(self: Any, *args: Any, **keywords: Any) -> None:
        groups = [group for group in live() if group.has_gradients]
        for name in ("overlap_grad_reduce", "overlap_param_gather"):
            if groups and getattr(self.ddp_config, name, False):
                raise ValueError(
                    f"--hybrid-ep-move weights does not work with {name} (--{name.replace('_', '-')}): gradients of "
                    "experts are not complete before all have gone home; turn it off"
                )
        for group in groups:
            group.bring_home()
        original(self, *args, **keywords)

    return finish_grad_sync


def zero_wrapper(original: Callable[..., None]) -> Callable[..., None]:
    """A replacement for DistributedDataParallel.zero_grad_buffer: gradients that have not gone home are zeroed too."""

    @functools.wraps(original)
    def zero_grad_buffer(self: Any, *args: Any, **keywords: Any) -> None:
        drop_gradients()
        original(self, *args, **keywords)

    return zero_grad_buffer


def install(replace: Replace) -> None:
    """Put all in place through `replace(owner, name, value)`, which remembers how to undo it."""
    from megatron_patches import hooks

    layer = importlib.import_module(f"{hooks.MOE}.moe_layer").MoELayer
    replace(layer, "__init__", layer_init(layer.__init__))
    ddp = importlib.import_module("megatron.core.distributed").DistributedDataParallel
    replace(ddp, "finish_grad_sync", gradient_wrapper(ddp.finish_grad_sync))
    replace(ddp, "zero_grad_buffer", zero_wrapper(ddp.zero_grad_buffer))
