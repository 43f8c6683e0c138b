"""Balancing in training: owners of experts that may move between steps, and clones of hot experts for one micro-batch.

Slow: columns of the map are put in the order of the owners (`balance_slow` moves them between steps). Exact:

    counts of all ranks -> plan -> my tokens to instances -> dispatch over physical slots, clones of weights pushed
    meanwhile -> own experts -> clones -> combine;  backward: weights pushed again, clone gradients summed into the
    owner's, both beside own experts

Router, auxiliary losses, expert bias, optimizer and checkpoints see logical experts only: the map is rewritten after
all of them, and clones are no parameters. The spare slots are shared by all layers, so a clone's weights are not kept
for the backward: saved tensors name their place in the slots, which the backward refills before it reads them.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from hybrid_ep.balance import MicrobatchPlan, MicrobatchPlanner
from hybrid_ep.balance.owners import Owners
from megatron_patches import balance_experts, balance_kernels, balance_push, buffers, graphs, hooks, recompute, settings
from megatron_patches.balance_arriving import Arriving
from megatron_patches.manager import HybridEPManager
from megatron_patches.static_rows import StaticRows, filled

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np
    from megatron.core.transformer.moe.experts import SequentialMLP
    from megatron.core.transformer.moe.moe_layer import MoELayer
    from megatron.core.transformer.transformer_config import TransformerConfig

    from hybrid_ep.balance import MicrobatchOptions
    from hybrid_ep.balance.microbatch import RankPart
    from hybrid_ep.clones import ClonePlan
    from megatron_patches.balance_experts import SequentialWeights, StackedWeights
    from megatron_patches.balance_move import Move
    from megatron_patches.experts import GroupedExperts

# attribute of TransformerConfig -> the flag that sets it: what balancing does not support, refused when truthy.
UNSUPPORTED = {
    "moe_pad_expert_input_to_capacity": "--moe-pad-expert-input-to-capacity",
    "moe_expert_rank_capacity_factor": "--moe-expert-rank-capacity-factor",
    "moe_apply_probs_on_input": "--moe-apply-probs-on-input",
    "add_bias_linear": "linear biases (give --disable-bias-linear)",
    "fp4": "--fp4-format",
    "use_transformer_engine_op_fuser": "--use-transformer-engine-op-fuser",
}
# The same, of Megatron's experts; ours, in their place, say themselves with what they work.
UNSUPPORTED_EXPERTS = {
    "moe_grouped_gemm": "--moe-grouped-gemm without --hybrid-ep-grouped-gemm",
    "delay_wgrad_compute": "--delay-wgrad-compute without --hybrid-ep-grouped-gemm",
    "fp8": "--fp8-format without --hybrid-ep-grouped-gemm and --hybrid-ep-grouped-gemm-precision fp8 or params",
}
# The same, of clones of single MLPs: their gradients go through autograd, which our grouped experts do anyway.
UNSUPPORTED_BY_CLONES = {
    "gradient_accumulation_fusion": "gradient accumulation fusion (give --no-gradient-accumulation-fusion)"
}


def check_supported(
    config: TransformerConfig,
    tp_size: int,
    mode: str,
    clones: bool = True,
    grouped: bool = False,
    asks_no_host: bool = False,
) -> None:
    """ValueError that names every flag which this mode of balancing does not work with.

    clones: hot experts are cloned. grouped: experts are those of --hybrid-ep-grouped-gemm. asks_no_host: see
    `asks_no_host`."""
    refused = dict(UNSUPPORTED)
    if not grouped:
        refused |= UNSUPPORTED_EXPERTS | (UNSUPPORTED_BY_CLONES if clones else {})
    found = [flag for name, flag in refused.items() if getattr(config, name, None) not in (None, False, "none")]
    found += hooks.split_weights(config)
    graph = graphs.with_dispatch(config)
    if graph is not None and not (asks_no_host and graphs.of_iterations(config)):
        found.append(f"{graph}, and in a graph of whole iterations exact does with {_NO_HOST}")
    if tp_size > 1:
        found.append("--expert-tensor-parallel-size above 1")
    if found:
        raise ValueError(f"--hybrid-ep-balance {mode} does not work with {', '.join(found)}: drop them, or balance off")


_NO_HOST = (
    "--hybrid-ep-static-rows drop, --hybrid-ep-grouped-gemm of backend triton or auto and --hybrid-ep-balance-push "
    "kernels or auto"
)


def asks_no_host(wanted: settings.Settings) -> bool:
    """Whether a layer so balanced asks nothing of the host, forward and backward: on a GPU a graph may hold it. Experts
    that move between steps change what is captured."""
    balance, experts = wanted.balance, wanted.experts
    return (
        balance.mode == "exact"
        and balance.static_rows == "drop"
        and balance.push != "torch"
        and experts.grouped
        and experts.backend in ("auto", "triton")
    )


class SlowManager(HybridEPManager):
    """HybridEPManager whose experts have owners: the map it is given is logical, the map it dispatches follows them.

    owners: `Owners` of the layer, the identity until `balance_slow` moves experts; equal on all ranks.
    record: called with the logical counts int64 [E] of every micro-batch that trains; `balance_slow` sets it.
    arriving: a move of this layer's experts that is under way, whose weights and owners are not in force yet.
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
        tp_size = num_experts // config.num_moe_experts
        how = wanted.balance.clones, wanted.experts.grouped, asks_no_host(wanted)
        check_supported(config, tp_size, wanted.balance.mode, *how)
        self.owners = Owners(num_experts, group.size())
        self._experts: SequentialMLP | GroupedExperts | None = None
        self._weights: SequentialWeights | StackedWeights | None = None
        self.record: Callable[[torch.Tensor], None] | None = None
        self.arriving: Move | None = None
        spare = wanted.balance.spare_slots if wanted.balance.clones else 0
        super().__init__(group, num_local_experts + spare, num_experts, router_topk, config)

    @property
    def experts(self) -> SequentialMLP | GroupedExperts:
        """The layer's experts module. RuntimeError before attach()."""
        if self._experts is None:
            raise RuntimeError("the balancer has no experts: call attach(experts) after building the layer")
        return self._experts

    @property
    def weights(self) -> SequentialWeights | StackedWeights:
        """What balancing sees of them. RuntimeError before attach()."""
        if self._weights is None:
            raise RuntimeError("the balancer has no experts: call attach(experts) after building the layer")
        return self._weights

    def attach(self, experts: SequentialMLP | GroupedExperts) -> None:
        """Give the layer's experts to the balancer: it moves them, and their checkpoints name them logically."""
        self._weights = balance_experts.weights_of(experts, self.settings.balance.mode)
        self._experts = experts
        self._weights.name_logically(self.owners)

    def dispatch(
        self, hidden_states: torch.Tensor, async_finish: bool = True, allocate_on_comm_stream: bool = True
    ) -> torch.Tensor:
        """As the base class; rows arrive for the owner slots of this rank, in their order."""
        self.settle()
        routing_map, probs = self.routed()
        self._record(routing_map)
        if not self.owners.is_identity:
            columns = self.owners.columns(0, routing_map.device)
            self.routing_map = torch.empty_like(routing_map).index_copy_(1, columns, routing_map)
            self.token_probs = torch.zeros_like(probs).index_copy(1, columns, probs)
        return super().dispatch(hidden_states)

    def settle(self) -> None:
        """Put the experts' weights and owners in force that a move under way brings to this layer."""
        if self.arriving is not None:
            self.arriving.land_weights()

    def _record(self, routing_map: torch.Tensor) -> None:
        """Count what trains: a recomputed forward counts once, in the pass that has gradients; evaluation never."""
        if not self.settings.balance.migrates or not torch.is_grad_enabled():
            return
        if self.record is None:
            raise RuntimeError(
                f"balance={self.settings.balance.mode} has no optimizer to move state of: build it with "
                "megatron.core.optimizer.get_megatron_optimizer after apply(), or call "
                "megatron_patches.balance_slow.attach(optimizer, model_chunks)"
            )
        self.record(routing_map.sum(dim=0))


class ExactManager(SlowManager):
    """SlowManager over physical slots: num_local_experts owners, then the spare slots, on every rank.

    plan_with: counts int64 [R, E] -> MicrobatchPlan, of plans that are made on the host; tests put forced plans here.
    None: the ranks' own kernels plan, in one launch that also puts the map over physical slots.
    last_plan: the plan of the latest dispatch, for meters; a recomputed dispatch has that of its first run. part: what
    this rank has to do of it. push: its clones, on their way here. static: of --hybrid-ep-static-rows, with what it
    counts; None without.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        num_local_experts: int,
        num_experts: int,
        router_topk: int,
        config: TransformerConfig,
    ) -> None:
        wanted, size = settings.current(), group.size()
        super().__init__(group, num_local_experts, num_experts, router_topk, config)
        nodes = buffers.num_nodes(group, wanted)
        self.planner = MicrobatchPlanner(size, num_experts, **wanted.balance.planner_options(nodes))
        if nodes > 1 and wanted.balance.reach == "auto":
            balance_kernels.say(group, _chosen(wanted.balance.within_node(nodes), nodes))
        self.static = StaticRows(wanted.balance, config) if wanted.balance.static_rows else None
        self.plan_with: Callable[[np.ndarray], MicrobatchPlan] | None = None
        self.clones: balance_push.CloneExperts | None = None
        self.push: Arriving | None = None
        self._num_rows: int | None = None  # of the dispatch under way, where rows are static

    def attach(self, experts: SequentialMLP | GroupedExperts) -> None:
        """As the base class; the experts' forward also runs the clones from now on."""
        super().attach(experts)
        self.clones = balance_kernels.clone_experts(self)
        setattr(experts, "forward", self.clones.forward)  # noqa: B010 - an instance attribute over a method

    def dispatch(
        self, hidden_states: torch.Tensor, async_finish: bool = True, allocate_on_comm_stream: bool = True
    ) -> torch.Tensor:
        """As the base class, after planning: rows arrive for owners first, then for the clones on this rank."""
        if self.clones is None:
            raise RuntimeError("exact balancing has no experts to clone: call attach(experts) after building the layer")
        self.clones.check_type()
        self.settle()
        routing_map, probs = self.routed()
        self._record(routing_map)
        first = recompute.first_run(self)
        known = None if first is None else first.plan
        if self.plan_with is None:
            plan, *routed = self._planned_by_kernels(hidden_states, routing_map, probs, known)
        else:
            plan, *routed = self._planned_on_host(self.plan_with, routing_map, probs, known)
        self.last_plan = plan
        self.push = Arriving(self.clones, self.clones.work_of(plan), plan, known is not None)  # beside the tokens
        self.routing_map, self.token_probs = routed
        self._num_rows = None
        if self.static is not None:
            pairs = len(routing_map) * self.router_topk
            self._num_rows = self.static.admit(plan, self.group.rank(), pairs)
        rows = HybridEPManager.dispatch(self, hidden_states)
        if self._num_rows is not None and self.tokens_per_expert is not None:
            owners = self.num_local_experts - self.planner.options.spare_slots
            self.tokens_per_expert = filled(self.tokens_per_expert, self._num_rows, owners, self.clones.may_clone(plan))
        return rows

    def _static_rows(self, num_tokens: int) -> tuple[int, int | None] | tuple[None, None]:
        """As the base class; what the latest plan was admitted with."""
        return (None, None) if self._num_rows is None else (self._num_rows, None)

    def part_of(self, plan: MicrobatchPlan) -> RankPart:
        """What this rank has to do of the plan that is in force now."""
        columns = self.owners.host_columns(self.planner.options.spare_slots)
        return plan.part or plan.part_of_rank(self.group.rank(), columns)

    @property
    def part(self) -> RankPart | None:
        """The same of the latest dispatch's; None before it."""
        return None if self.last_plan is None else self.part_of(self.last_plan)

    def _planned_by_kernels(
        self, hidden_states: torch.Tensor, routing_map: torch.Tensor, probs: torch.Tensor, known: MicrobatchPlan | None
    ) -> tuple[MicrobatchPlan, torch.Tensor, torch.Tensor]:
        """(plan, map and probabilities over physical slots). Collective, unless the plan is known."""
        made = self.buffer_for(hidden_states).plan_clones(
            routing_map=routing_map, owners=self.owners, plan=known.clones if isinstance(known, KernelPlan) else None
        )
        assert made.routing_map is not None and made.columns is not None  # for a map was given
        plan = known or KernelPlan(made.plan, self.owners, self.planner.options)
        shape = made.routing_map.shape
        physical = torch.zeros(shape, dtype=probs.dtype, device=probs.device).scatter(1, made.columns, probs)
        return plan, made.routing_map, physical

    def _planned_on_host(
        self,
        plan_with: Callable[[np.ndarray], MicrobatchPlan],
        routing_map: torch.Tensor,
        probs: torch.Tensor,
        known: MicrobatchPlan | None,
    ) -> tuple[MicrobatchPlan, torch.Tensor, torch.Tensor]:
        """The same of a plan that the host makes of all ranks' counts."""
        plan = known
        if plan is None:
            counts = routing_map.sum(dim=0)
            gathered = counts.new_empty((self.group.size(), counts.numel()))
            dist.all_gather(list(gathered.unbind()), counts, group=self.group)
            plan = plan_with(gathered.cpu().numpy())
        return plan, *to_physical(routing_map, probs, self.part_of(plan), plan.slot_expert.shape, self.owners)


def _chosen(within_node: bool, nodes: int) -> str:
    """What --hybrid-ep-balance-clones auto comes to, in words."""
    if within_node:
        return (
            f"clones stay on the nodes of their owners, of which the group spans {nodes}: ranks are level within a "
            "node; --hybrid-ep-balance-clones anywhere levels all of them, and pushes weights over NICs"
        )
    return (
        f"clones may lie on any of {nodes} nodes, for --hybrid-ep-static-rows asks that all ranks be level; "
        "--hybrid-ep-balance-clones node keeps weights off NICs"
    )


class KernelPlan(MicrobatchPlan):
    """A plan that the ranks' kernels made; the host reads what it asks for, when it asks. clones: where it lies for
    them, to be replayed."""

    def __init__(self, made: ClonePlan, owners: Owners, options: MicrobatchOptions) -> None:
        columns = owners.columns(options.spare_slots, made.counts.device)
        self.__dict__.update(
            clones=made, owner=owners.rank_of, options=options, part=None, _shape=None, owner_columns=columns
        )

    def load_of_ranks(self) -> torch.Tensor:
        """int64 [R] on the kernels' device, without a wait for it: tokens_of_ranks()."""
        made, (num_ranks, spare) = self.clones, self.clones.slot_expert.shape
        owner = self.owner_columns // (len(self.owner_columns) // num_ranks + spare)
        load = made.counts.new_zeros(num_ranks).index_add(0, owner, made.counts.sum(0))
        given = torch.where(made.slot_expert >= 0, made.slot_tokens, 0)
        back = owner[made.slot_expert.long().clamp(min=0)]  # whoever would have computed them
        return load.add_(given.sum(1)).index_add_(0, back.flatten(), given.flatten(), alpha=-1)

    def __getattr__(self, name: str) -> Any:
        """What the kernels wrote. On a GPU it waits for them: meters ask, and torch's push."""
        if name == "target":
            value: Any = int(self.clones.numbers[2])
        elif name in ("slot_expert", "slot_tokens", "counts"):
            value = getattr(self.clones, name).cpu().numpy()
        else:
            raise AttributeError(f"{type(self).__name__} has no {name!r}")
        self.__dict__[name] = value
        return value


def to_physical(
    routing_map: torch.Tensor, probs: torch.Tensor, part: RankPart, slots: tuple[int, int], owners: Owners
) -> tuple[torch.Tensor, torch.Tensor]:
    """Spread this rank's tokens over instances: (map, probs) over logical experts -> over physical slots.

    routing_map bool [T, E], probs [T, E]; slots: ranks, spare slots of each; columns of the result: for every rank its
    owner slots, then its spare slots. Of an expert's tokens, in order, the first stay for its owner and the rest go to
    the clones in slot order, as `part` says. Gradients of probs flow back.
    """
    num_ranks, spare = slots
    device = routing_map.device
    column = owners.columns(spare, device).expand(routing_map.shape[0], -1)
    if len(part.redirects):
        expert, first, step = torch.from_numpy(part.redirects).to(device).unbind(1)
        number = routing_map.index_select(1, expert).cumsum(0)  # of each token among the expert's, from 1
        column = column.index_add(1, expert, (number > first) * step)
    shape = (routing_map.shape[0], routing_map.shape[1] + num_ranks * spare)
    physical_map = torch.zeros(shape, dtype=torch.bool, device=device).scatter_(1, column, routing_map)
    return physical_map, torch.zeros(shape, dtype=probs.dtype, device=device).scatter(1, column, probs)


def layer_init(original: Callable[..., None]) -> Callable[..., None]:
    """A replacement for MoELayer.__init__ that hands the experts to a balancing manager."""

    @functools.wraps(original)
    def __init__(self: MoELayer, *args: Any, **keywords: Any) -> None:
        original(self, *args, **keywords)
        manager = getattr(self.token_dispatcher, "_comm_manager", None)
        if isinstance(manager, SlowManager):
            manager.attach(self.experts)

    return __init__
