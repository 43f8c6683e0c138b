"""Megatron's routed experts as two grouped GEMMs, without Transformer Engine: `--hybrid-ep-grouped-gemm`.

One parameter a matrix, all local experts stacked, [E, out, in] as torch.nn.Linear stores them, so that nothing is
copied on the way into the grouped GEMM:

    rows [P, H] -> grouped_mm(weight1) -> weighted activation with the probabilities -> grouped_mm(weight2) -> [P, H]

Everything else is Megatron's. It builds each expert (ColumnParallelLinear and RowParallelLinear inside MLP), whose
initial weights, shapes under expert tensor parallelism and attributes we take over, and it says how an expert lies in
a distributed checkpoint. So checkpoints are those of SequentialMLP and TEGroupedMLP, to the name and to the shape.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import importlib
import itertools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.activations import fast_gelu, squared_relu
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.utils import ensure_metadata_has_dp_cp_group

from hybrid_ep.moe import grouped_mm, weighted_activation
from megatron_patches import buffers, hooks, settings

if TYPE_CHECKING:
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
    from megatron.core.transformer.transformer_config import TransformerConfig

    from hybrid_ep.moe.grouped import Arrivals
    from megatron_patches.patch_set import Replace

# activation function of the configuration -> (plain, gated) kind of weighted_activation
KINDS = {
    torch.nn.functional.silu: ("silu", "swiglu"),
    torch.nn.functional.gelu: ("gelu_erf", "geglu_erf"),
    fast_gelu: ("gelu", "geglu"),
    torch.nn.functional.relu: ("relu", None),
    squared_relu: ("relu2", None),
}
# attribute of TransformerConfig -> the flag that sets it: what these experts do not do, refused when truthy.
UNSUPPORTED = {
    "add_bias_linear": "linear biases (give --disable-bias-linear)",
    "fp4": "--fp4-format",
    "use_transformer_engine_op_fuser": "--use-transformer-engine-op-fuser",
    "use_te_activation_func": "--use-te-activation-func",
    "activation_func_fp8_input_store": "activation_func_fp8_input_store",
    "moe_paged_stash": "--moe-paged-stash",
    "use_kitchen": "--use-kitchen",
    "activation_func_clamp_value": "--activation-func-clamp-value",
    "glu_linear_offset": "--glu-linear-offset",
    "moe_mlp_glu_interleave_size": "--moe-mlp-glu-interleave-size",
    "overlap_dispatch_backward_with_experts_wgrad": "--overlap-dispatch-backward-with-experts-wgrad",
}
# What --fp8-format asks of the rest of the model does not say what these experts do.
WITHOUT_PRECISION = (
    "without --hybrid-ep-grouped-gemm-precision (give fp8, for products in fp8 with block scales, or params, for "
    "products in the dtype of the parameters)"
)
MATRICES = {"weight1": "linear_fc1", "weight2": "linear_fc2"}  # our parameter -> Megatron's module


def check_supported(config: TransformerConfig, precision: str | None = None) -> str:
    """The kind of weighted activation; ValueError that names every option these experts do not work with.

    precision: grouped_gemm_precision, of the settings."""
    found = [flag for name, flag in UNSUPPORTED.items() if getattr(config, name, None)] + hooks.split_weights(config)
    if getattr(config, "fp8", None) and precision is None:
        found.append(f"--fp8-format {config.fp8} {WITHOUT_PRECISION}")
    modules = getattr(config, "offload_modules", None) or ()
    found += [f"{name} among --offload-modules" for name in ("moe_act", "expert_fc1") if name in modules]
    if getattr(config, "transformer_impl", None) == "inference_optimized":
        found.append("--transformer-impl inference_optimized")
    kind = KINDS.get(config.activation_func, (None, None))[bool(config.gated_linear_unit)]
    if kind is None:
        name = getattr(config.activation_func, "__name__", config.activation_func)
        found.append(f"the activation {name}{' with a gate' if config.gated_linear_unit else ''}")
    if config.moe_apply_probs_on_input and config.moe_router_topk != 1:
        found.append("--moe-apply-probs-on-input with a top-k above 1")
    if found:
        raise ValueError(f"--hybrid-ep-grouped-gemm does not work with {', '.join(found)}: drop them, or the flag")
    assert kind is not None  # or it were in `found`
    return kind


class GroupedExperts(MegatronModule):
    """The local experts of an MoE layer, E of them; takes the place of SequentialMLP and TEGroupedMLP.

    weight1 [E, F1, H] (F1 = F, or 2F with a gate: gate first) and weight2 [E, H, F], of this rank's part of F under
    expert tensor parallelism. `state_dict()` has SequentialMLP's names; loading takes its names, TEGroupedMLP's and
    ours. `sharded_state_dict()` has the keys, shapes and offsets both of them have. ValueError for a configuration
    that is not supported.
    """

    def __init__(
        self,
        num_local_experts: int,
        config: TransformerConfig,
        submodules: MLPSubmodules | None = None,
        pg_collection: ProcessGroupCollection = None,
        name: str | None = None,
    ) -> None:
        wanted = settings.current().experts
        kind = check_supported(config, wanted.precision)
        if config.moe_ffn_hidden_size != config.ffn_hidden_size:  # MLP reads the dense width for its second matrix
            config = copy.deepcopy(config)
            config.ffn_hidden_size = config.moe_ffn_hidden_size
        super().__init__(config=config)
        self.kind, self.num_local_experts = kind, num_local_experts
        self.backend, self.precision = wanted.backend, wanted.precision or "params"
        self.ep_group, self.tp_group, self.dp_group = pg_collection.ep, pg_collection.expt_tp, pg_collection.expt_dp
        expert: MLP
        for local in range(num_local_experts):
            expert = MLP(
                config,
                submodules or MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear),
                ffn_hidden_size=config.moe_ffn_hidden_size,
                is_expert=True,
                tp_group=pg_collection.expt_tp,
            )
            for own, linear in MATRICES.items():
                weight = getattr(expert, linear).weight
                if local == 0:
                    self.register_parameter(own, _stacked_like(weight, num_local_experts))
                with torch.no_grad():
                    getattr(self, own)[local].copy_(weight)
        for linear in MATRICES.values():
            getattr(expert, linear).weight.data = torch.empty(0, dtype=torch.float32, device="cpu")
        self._delayed: list[tuple[torch.nn.Parameter, Callable[[], torch.Tensor]]] = []
        self._when_made: list[Callable[[], None]] = []
        for own in MATRICES if config.delay_wgrad_compute else ():
            setattr(getattr(self, own), "skip_backward_post_hook", True)  # noqa: B010 - what DDP asks
        # Megatron's description of one expert, asked when a checkpoint is made. In a tuple: not a submodule of ours.
        self._described_by = (expert,)

    def expert_weights(self, local: int) -> dict[str, torch.Tensor]:
        """{"linear_fc1.weight": [F1, H], "linear_fc2.weight": [H, F]}: one expert's matrices, views of ours."""
        return {f"{linear}.weight": getattr(self, own)[local] for own, linear in MATRICES.items()}

    def expert_ids(self) -> Sequence[int]:
        """The logical experts on this rank, in the order of the stacks; re-homing replaces this."""
        first = self.ep_group.rank() * self.num_local_experts
        return range(first, first + self.num_local_experts)

    def forward(
        self,
        permuted_local_hidden_states: torch.Tensor,
        tokens_per_expert: torch.Tensor,
        permuted_probs: torch.Tensor,
        further: Sequence[tuple[torch.Tensor, torch.Tensor]] = (),
        arriving: Sequence[Arrivals | None] = (None, None),
    ) -> tuple[torch.Tensor, None]:
        """([P, H], None): expert outputs times their probabilities; rows behind the last expert's come out as zeros.

        permuted_local_hidden_states [P, H] by expert; tokens_per_expert int [E] on the host or on the device, with a
        sum of at most P; permuted_probs [P]. With counts on the device nothing waits for it, where `grouped_mm`'s
        backend does not.

        further: (weights like weight1 [S, F1, H], like weight2 [S, H, F]) of S further experts, which live elsewhere
        and whose rows follow, a pair for each place where some live; tokens_per_expert counts them, too. arriving: who
        brings these weights, of either product, where they are still under way."""
        if self._delayed and torch.is_grad_enabled():
            raise RuntimeError(
                "these experts' weight gradients of a backward before were not made: call backward_dw() behind it, as "
                "the schedules of --delay-wgrad-compute do, or forget_delayed() where an error ended that backward"
            )
        rows, probs = permuted_local_hidden_states, permuted_probs.float()
        weights: torch.Tensor | None = probs
        if self.config.moe_apply_probs_on_input:
            rows, weights = (rows * probs.unsqueeze(-1)).to(rows.dtype), None
        ends, tail = self.group_ends(tokens_per_expert, rows)
        pairs = [(self.weight1, self.weight2), *further]
        stacks = [tuple(pair[n].transpose(1, 2) for pair in pairs) for n in (0, 1)]
        first_rows: tuple[int, ...] | None = None  # of counts on the device nobody on the host asks it
        if tokens_per_expert.device.type == "cpu":
            before = itertools.accumulate(len(pair[0]) for pair in pairs[:-1])
            first_rows = (0, *(int(tokens_per_expert[:experts].sum()) for experts in before))
        how = {"backend": self.backend, "tail": tail, "first_rows": first_rows, "precision": self.precision}
        later = [self._delay(weight) for weight in (self.weight1, self.weight2)]
        # Where probabilities were multiplied in, it is not this gradient that combine sums.
        dispatched = weights is not None and not self._freed(rows)
        lender = buffers.place(rows.shape[1], rows.dtype) if dispatched else None
        h = grouped_mm(rows, stacks[0], ends, **how, arriving=arriving[0], delay=later[0], gradient_place=lender)
        again = self._activated_again(h, weights)
        h = weighted_activation(h, weights, self.kind)
        how |= {"arriving": arriving[1], "delay": later[1], "remake": again}
        place = None if self._freed(h) else buffers.place(self.weight2.shape[1], h.dtype)
        return grouped_mm(h, stacks[1], ends, **how, place=place), None

    def _activated_again(
        self, h: torch.Tensor, weights: torch.Tensor | None
    ) -> tuple[Callable[..., torch.Tensor], tuple[torch.Tensor | None, ...]] | None:
        """With moe_act among --recompute-modules: the second product's rows, of what the activation keeps anyway."""
        config = self.config
        if config.recompute_granularity != "selective" or "moe_act" not in config.recompute_modules:
            return None
        kept = h.detach(), None if weights is None else weights.detach()
        return functools.partial(weighted_activation, kind=self.kind), kept

    def _freed(self, like: torch.Tensor) -> bool:
        """Whether rows that we make are freed by resizing their storage to nothing, as the 1F1B overlap does, which a
        host's arena does not let it do."""
        return like.device.type == "cpu" and self.config.overlap_moe_expert_parallel_comm

    @staticmethod
    def group_ends(tokens_per_expert: torch.Tensor, rows: torch.Tensor) -> tuple[torch.Tensor, bool]:
        """(int32 [E] on the rows' device: where each expert's rows end, whether rows may lie behind the last)."""
        ends = tokens_per_expert.cumsum(0)
        tail = ends.device.type != "cpu" or int(ends[-1]) != rows.shape[0]
        return ends.to(device=rows.device, dtype=torch.int32, non_blocking=True), tail

    def _delay(self, weight: torch.nn.Parameter) -> Callable[[Callable[[], torch.Tensor]], None] | None:
        if not self.config.delay_wgrad_compute:
            return None
        return lambda make: self._delayed.append((weight, make))

    def register_wgrad_accumulation_and_reduce_hooks(self, hook: Callable[[], None]) -> None:
        """DDP's, with --delay-wgrad-compute: called when gradients are made, in place of autograd's."""
        self._when_made.append(hook)

    def forget_delayed(self) -> None:
        """Of a backward that an error ended: its weight gradients will not be made."""
        self._delayed.clear()

    def backward_dw(self) -> None:
        """With --delay-wgrad-compute, make the weight gradients that the backward has left; nothing without.
        RuntimeError where DDP was not told that they are delayed."""
        if not self._delayed:
            return
        delayed, self._delayed = self._delayed, []
        if not self._when_made and any(hasattr(weight, "main_grad") for weight, _ in delayed):
            raise RuntimeError(
                "these experts' weight gradients are delayed and DDP does not know: give DistributedDataParallelConfig "
                "delay_wgrad_compute=True where the model's configuration has it"
            )
        for weight, make in delayed:
            made = make().transpose(1, 2)
            weight.grad = made if weight.grad is None else weight.grad + made
        for hook in self._when_made:
            hook()

    # ---- checkpoints

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        for local in range(self.num_local_experts):
            for name, weight in self.expert_weights(local).items():
                key = f"{prefix}local_experts.{local}.{name}"
                destination[key] = weight if keep_vars else weight.detach()
                destination[key.removesuffix("weight") + "_extra_state"] = None  # Megatron's linears have one too

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        _metadata: dict[str, Any],
        strict: bool,
        missing: list[str],
        unexpected: list[str],
        errors: list[str],
    ) -> None:
        """Takes SequentialMLP's names, TEGroupedMLP's, and what sharded_state_dict returns."""
        known: set[str] = set()
        for own, linear in MATRICES.items():
            parameter = getattr(self, own)
            layouts = (
                [f"{prefix}{own}"],
                [f"{prefix}local_experts.{i}.{linear}.weight" for i in range(self.num_local_experts)],
                [f"{prefix}{linear}.weight{i}" for i in range(self.num_local_experts)],
            )
            known.update(key for keys in layouts for key in keys)
            keys = next((keys for keys in layouts if keys[0] in state_dict), layouts[1])
            absent = [key for key in keys if key not in state_dict]
            missing.extend(absent)
            for place, key in zip(
                [parameter] if len(keys) == 1 and keys[0] == f"{prefix}{own}" else parameter, keys, strict=True
            ):
                if key in absent:
                    continue
                if state_dict[key].shape != place.shape:
                    errors.append(
                        f"size mismatch for {key}: {tuple(state_dict[key].shape)} in the checkpoint, "
                        f"{tuple(place.shape)} in the experts"
                    )
                    continue
                with torch.no_grad():
                    place.copy_(state_dict[key])
        if strict:
            unexpected.extend(
                key for key in state_dict if key.startswith(prefix) and key not in known and "_extra_state" not in key
            )

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[tuple[int, int, int], ...] = (),
        metadata: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """What SequentialMLP returns, a stacked parameter a matrix in place of an entry an expert.

        Each is a factory of the very ShardedTensors that SequentialMLP makes, so a checkpoint (and the distributed
        optimizer's states in it) is the same to the byte layout, and loads at another EP or ETP size."""
        metadata = ensure_metadata_has_dp_cp_group(metadata)  # as SequentialMLP does: a caller may give none
        singles = bool((metadata or {}).get("singleton_local_shards", False))
        ids, total = self.expert_ids(), self.ep_group.size() * self.num_local_experts
        per_matrix: dict[str, list[ShardedTensor | ShardedTensorFactory]] = {own: [] for own in MATRICES}
        others: dict[str, Any] = {}
        for local, expert in enumerate(ids):
            offsets = sharded_offsets if singles else (*sharded_offsets, (len(sharded_offsets), expert, total))
            inside = f"{prefix}local_experts.{local}."
            target = f"{prefix}experts.{expert}." if singles else f"{prefix}experts."
            for key, entry in self._describe(local, inside, offsets, metadata).items():
                entry.key = target + entry.key.removeprefix(inside)
                entry.replica_id = (*entry.replica_id[:2], self.dp_group.rank())
                own = next((o for o, linear in MATRICES.items() if key == f"{inside}{linear}.weight"), None)
                if own is None:
                    others[key] = entry
                else:
                    per_matrix[own].append(entry)
        stacked = {f"{prefix}{own}": _factory(getattr(self, own), entries) for own, entries in per_matrix.items()}
        return stacked | others

    def _describe(
        self, local: int, prefix: str, offsets: tuple[tuple[int, int, int], ...], metadata: dict[str, Any] | None
    ) -> dict[str, Any]:
        """Megatron's sharded_state_dict of one expert, over views of our parameters."""
        (expert,) = self._described_by
        for name, weight in self.expert_weights(local).items():
            getattr(expert, name.split(".")[0]).weight.data = weight.detach()
        try:
            return expert.sharded_state_dict(prefix, offsets, metadata)
        finally:
            for linear in MATRICES.values():
                getattr(expert, linear).weight.data = torch.empty(0, dtype=torch.float32, device="cpu")


def _stacked_like(weight: torch.nn.Parameter, num_experts: int) -> torch.nn.Parameter:
    """An empty parameter [num_experts, *weight.shape] with what Megatron noted on the weight of one expert."""
    stacked = torch.nn.Parameter(weight.new_empty(num_experts, *weight.shape), requires_grad=weight.requires_grad)
    for name in ("allreduce", "tensor_model_parallel", "partition_stride"):
        if hasattr(weight, name):
            setattr(stacked, name, getattr(weight, name))
    if hasattr(weight, "partition_dim"):
        dim = weight.partition_dim
        setattr(stacked, "partition_dim", dim + 1 if dim >= 0 else dim)  # noqa: B010 - Megatron's attribute
    return stacked


def _factory(
    parameter: torch.nn.Parameter, entries: Sequence[ShardedTensor | ShardedTensorFactory]
) -> ShardedTensorFactory:
    """One ShardedTensorFactory over [E, ...] from Megatron's entries (tensors or factories) of the E experts."""
    own_key = entries[0].key

    def build(key: str, stacked: torch.Tensor, replica_id: tuple[int, ...], flattened_range: slice | None) -> list[Any]:
        before = key.removesuffix(own_key)  # the optimizer puts its states' names there
        parts = []
        for entry, data in zip(entries, stacked.unbind(0), strict=True):
            changes = {"key": before + entry.key, "data": data, "replica_id": replica_id}
            if isinstance(entry, ShardedTensor):
                changes["dtype"] = data.dtype
            part = dataclasses.replace(entry, **changes)
            parts.append(part.build() if isinstance(part, ShardedTensorFactory) else part)
        return parts

    def merge(parts: list[Any]) -> torch.Tensor:
        return torch.stack(
            [
                entry.merge_fn(part) if isinstance(entry, ShardedTensorFactory) else part
                for entry, part in zip(entries, parts, strict=True)
            ]
        )

    return ShardedTensorFactory(own_key, parameter, build, merge, entries[0].replica_id)


def grouped_experts_spec(submodules: MLPSubmodules | None = None) -> ModuleSpec | Callable[..., GroupedExperts]:
    """What the `experts` field of MoESubmodules takes: a ModuleSpec on megatron-core 0.16, a builder from 0.17 on.

    submodules: MLPSubmodules that build one expert, Megatron's own parallel linears when None."""
    if hooks.core_version() < (0, 17):
        return ModuleSpec(module=GroupedExperts, submodules=submodules)
    return functools.partial(GroupedExperts, submodules=submodules)


def layer_init(original: Callable[..., None]) -> Callable[..., None]:
    """A replacement for MoELayer.__init__ that builds our experts when the settings ask for them."""

    @functools.wraps(original)
    def __init__(
        self: MoELayer, config: TransformerConfig, submodules: MoESubmodules | None = None, *args: Any, **keywords: Any
    ) -> None:
        if settings.current().experts.grouped and submodules is not None:
            submodules = dataclasses.replace(submodules, experts=grouped_experts_spec())
        original(self, config, submodules, *args, **keywords)

    return __init__


def keeps_rows(original: Callable[..., bool]) -> Callable[..., bool]:
    """A replacement for the 1F1B overlap's should_free_input: rows that went into our experts are kept for their
    backward. With --fp8-format Megatron frees them, for Transformer Engine's experts keep them in fp8."""

    @functools.wraps(original)
    def should_free_input(name: str, *args: Any, **keywords: Any) -> bool:
        kept = name == "mlp" and settings.current().experts.grouped
        return not kept and original(name, *args, **keywords)

    return should_free_input


def install(replace: Replace) -> None:
    """Put ours in place through `replace(owner, name, value)`, which remembers how to undo it."""
    layer = importlib.import_module(f"{hooks.MOE}.moe_layer").MoELayer
    replace(layer, "__init__", layer_init(layer.__init__))
    schedule = hooks.freed_inputs()
    replace(schedule, "should_free_input", keeps_rows(schedule.should_free_input))
