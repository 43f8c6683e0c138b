"""What a run is: frozen dataclasses that hold every choice, check themselves and survive a round trip.

A recipe returns one `RunConfig`. Variants derive from a base with `config.derive(...)`, which checks again.
Nothing here imports torch, so a wrong flag is refused in milliseconds.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, get_type_hints

from hybrid_ep.cli import names
from megatron_patches.settings import BALANCE_MODES, BALANCE_PUSHES, CLONE_REACHES, DISPATCH_DTYPES

from . import safe_yaml

DISPATCHERS = ("hybrid_ep", "alltoall", "allgather")
DTYPES = ("fp32", "bf16")


def _require(ok: bool, name: str, value: Any, remedy: str) -> None:
    if not ok:
        raise ValueError(f"{name}={value!r}: {remedy}")


def _require_positive(owner: Any, section: str, *names: str) -> None:
    for name in names:
        value = getattr(owner, name)
        _require(value > 0, f"{section}.{name}", value, "must be greater than 0")


@dataclass(frozen=True)
class ModelConfig:
    """A GPT whose every layer is a Mixture of Experts."""

    num_layers: int = 4
    hidden_size: int = 128
    num_attention_heads: int = 4
    num_experts: int = 16
    topk: int = 4
    moe_ffn_hidden_size: int = 128
    """Width of one expert's SwiGLU, in elements."""
    aux_loss_coeff: float = 1e-2
    """Weight of the load-balancing loss; 0 leaves the router alone."""
    seq_length: int = 256
    vocab_size: int = 256
    init_std: float = 0.02
    forced_bias: float = 0.0
    """Megatron's moe_router_force_biased, a skew generator: the same random bias on all ranks, drawn with this standard
    deviation, negative for one that stays; 0 leaves the router alone. Needs megatron-core 0.17."""
    dtype: str = "fp32"
    num_query_groups: int = 0
    """Heads of keys and values; 0: one for each head of queries."""
    qk_layernorm: bool = False
    num_dense_layers: int = 0
    """Leading layers without experts."""
    shared_ffn_hidden_size: int = 0
    """Width of the expert that every token visits; 0: none."""
    score_function: str = "softmax"
    router_num_groups: int = 0
    """Groups of experts, of which a token may use router_group_topk; 0: no groups."""
    router_group_topk: int = 0
    topk_scaling_factor: float = 0.0
    """What the chosen weights are multiplied with; 0: nothing."""
    expert_bias: bool = False
    """Balance by a bias on the router's scores; needs score_function=sigmoid."""
    kv_lora_rank: int = 0
    """Width of the latent that keys and values are made of (latent attention, MLA); 0: plain attention."""
    q_lora_rank: int = 0
    """With kv_lora_rank: the same of queries."""
    rope_head_dim: int = 0
    """With kv_lora_rank: elements of a head, beside hidden_size / num_attention_heads, that are rotated."""
    mtp_layers: int = 0
    """Layers that predict the tokens after the next one, each with experts (multi-token prediction)."""
    mtp_loss_scale: float = 0.1
    """Weight of their loss."""

    def __post_init__(self) -> None:
        _require_positive(
            self,
            "model",
            "num_layers",
            "hidden_size",
            "num_attention_heads",
            "num_experts",
            "topk",
            "moe_ffn_hidden_size",
            "seq_length",
            "vocab_size",
            "init_std",
        )
        _require(self.dtype in DTYPES, "model.dtype", self.dtype, f"choose one of {', '.join(DTYPES)}")
        _require(
            self.hidden_size % (2 * self.num_attention_heads) == 0,
            "model.hidden_size",
            self.hidden_size,
            f"must be a multiple of 2 x num_attention_heads = {2 * self.num_attention_heads} "
            "(rotary embeddings turn pairs of elements of each head)",
        )
        _require(
            self.topk <= self.num_experts, "model.topk", self.topk, f"must not exceed num_experts={self.num_experts}"
        )
        _require(self.aux_loss_coeff >= 0, "model.aux_loss_coeff", self.aux_loss_coeff, "must be 0 or more")
        self._check_block()

    def _check_latents(self) -> None:
        for name in ("q_lora_rank", "rope_head_dim"):
            value, latent = getattr(self, name), self.kv_lora_rank > 0
            _require(
                (value > 0) == latent,
                f"model.{name}",
                value,
                f"kv_lora_rank={self.kv_lora_rank}: latent attention needs both, plain attention none",
            )
        _require(
            self.rope_head_dim % 2 == 0, "model.rope_head_dim", self.rope_head_dim, "must be even: pairs are rotated"
        )
        _require(
            not (self.kv_lora_rank and self.num_query_groups),
            "model.num_query_groups",
            self.num_query_groups,
            "latent attention has no groups: give 0",
        )

    def _check_block(self) -> None:
        for name in (
            "num_query_groups",
            "num_dense_layers",
            "shared_ffn_hidden_size",
            "router_num_groups",
            "router_group_topk",
            "topk_scaling_factor",
            "kv_lora_rank",
            "q_lora_rank",
            "rope_head_dim",
            "mtp_layers",
            "mtp_loss_scale",
        ):
            _require(getattr(self, name) >= 0, f"model.{name}", getattr(self, name), "must be 0 or more")
        _require(
            self.num_query_groups == 0 or self.num_attention_heads % self.num_query_groups == 0,
            "model.num_query_groups",
            self.num_query_groups,
            f"must divide num_attention_heads={self.num_attention_heads}",
        )
        self._check_latents()
        _require(
            self.num_dense_layers < self.num_layers,
            "model.num_dense_layers",
            self.num_dense_layers,
            f"must leave experts in one of the {self.num_layers} layers",
        )
        _require(
            self.score_function in ("softmax", "sigmoid"),
            "model.score_function",
            self.score_function,
            "choose softmax or sigmoid",
        )
        _require(
            not self.expert_bias or self.score_function == "sigmoid",
            "model.expert_bias",
            self.expert_bias,
            "needs score_function=sigmoid",
        )
        groups, chosen = self.router_num_groups, self.router_group_topk
        _require(
            groups == 0
            or (
                self.num_experts % groups == 0
                and 1 <= chosen <= groups
                and self.topk <= chosen * (self.num_experts // groups)
                and self.topk % chosen == 0
            ),
            "model.router_num_groups",
            groups,
            f"must divide num_experts={self.num_experts}, and "
            f"router_group_topk={chosen} groups must hold topk={self.topk}",
        )


@dataclass(frozen=True)
class ParallelConfig:
    """How ranks share the model: data parallel outside the experts, expert parallel inside."""

    num_ranks: int = 4
    expert_parallel_size: int = 4
    ranks_per_node: int = 2
    """Ranks that share an NVLink domain; the EP group spans expert_parallel_size / ranks_per_node nodes."""
    dispatcher: str = "hybrid_ep"
    dispatch_dtype: str = "bf16"
    """What hybrid_ep's forward dispatch sends: bf16 (rows as they are), fp8 or mxfp8."""
    balance: str = "off"
    """`exact`: clones of hot experts for every micro-batch; `slow`: experts change ranks between steps; `both`. See
    docs/balancer.md."""
    spare_slots: int = 1
    """Slots for clones on every rank."""
    balance_clones: str = "anywhere"
    """Ranks that may hold clones: those of the owner's `node`, `anywhere`, `near`, `auto`. All ranks share a host."""
    balance_push: str = "auto"
    """What brings weights to clones: the ranks' `kernels`, `torch`, or `auto`, kernels where they can."""
    balance_interval: int = 20
    """Steps from one placement of `slow` to the next."""
    layer_updates_per_iter: int = 1
    """Layers of `slow` that move after one step."""
    grouped_gemm: bool = False
    """Experts as grouped GEMMs (megatron_patches.experts) in place of one MLP after the other."""

    def __post_init__(self) -> None:
        _require_positive(self, "parallel", "num_ranks", "expert_parallel_size", "ranks_per_node")
        _require(
            self.num_ranks % self.expert_parallel_size == 0,
            "parallel.expert_parallel_size",
            self.expert_parallel_size,
            f"must divide num_ranks={self.num_ranks}",
        )
        _require(
            self.expert_parallel_size % self.ranks_per_node == 0,
            "parallel.ranks_per_node",
            self.ranks_per_node,
            f"must divide expert_parallel_size={self.expert_parallel_size}",
        )
        _require(
            self.dispatcher in DISPATCHERS,
            "parallel.dispatcher",
            self.dispatcher,
            names.dispatcher_remedy(self.dispatcher, DISPATCHERS),
        )
        _require(
            self.dispatch_dtype in DISPATCH_DTYPES,
            "parallel.dispatch_dtype",
            self.dispatch_dtype,
            f"choose one of {', '.join(DISPATCH_DTYPES)}",
        )
        _require(
            self.dispatch_dtype == "bf16" or self.dispatcher == "hybrid_ep",
            "parallel.dispatch_dtype",
            self.dispatch_dtype,
            f"must be bf16 with dispatcher={self.dispatcher}, which quantises nothing",
        )
        _require_positive(self, "parallel", "spare_slots", "balance_interval", "layer_updates_per_iter")
        choices = {"balance": BALANCE_MODES, "balance_clones": CLONE_REACHES, "balance_push": BALANCE_PUSHES}
        for name, known in choices.items():
            value = getattr(self, name)
            _require(value in known, f"parallel.{name}", value, f"choose one of {', '.join(known)}")
        _require(
            self.balance == "off" or self.dispatcher == "hybrid_ep",
            "parallel.balance",
            self.balance,
            f"needs the dispatcher hybrid_ep, not {self.dispatcher}",
        )
        _require(
            not self.grouped_gemm or self.dispatcher == "hybrid_ep",
            "parallel.grouped_gemm",
            self.grouped_gemm,
            f"needs the dispatcher hybrid_ep, not {self.dispatcher}",
        )


@dataclass(frozen=True)
class DataConfig:
    """Text to train on. Files are ordered by path and split by a hash of the path, never by chance."""

    source: str = "python_stdlib"
    """`python_stdlib`, or a folder whose *.py, *.txt, *.md and *.rst files are the text."""
    held_out_one_in: int = 20
    """One file in this many is held out."""
    cache_dir: str = "runs/.data"
    """Folder of the indexed datasets; the key of an entry is a hash of the text itself."""

    def __post_init__(self) -> None:
        _require(bool(self.source), "data.source", self.source, "name python_stdlib or a folder")
        _require(
            self.held_out_one_in >= 2,
            "data.held_out_one_in",
            self.held_out_one_in,
            "must be 2 or more, or nothing is left to train on",
        )


@dataclass(frozen=True)
class OptimizerConfig:
    """Adam with decoupled weight decay, its state sharded over the data-parallel ranks."""

    lr: float = 3e-3
    min_lr: float = 3e-4
    weight_decay: float = 0.1
    adam_beta1: float = 0.9
    adam_beta2: float = 0.95
    adam_eps: float = 1e-8
    clip_grad: float = 1.0
    distributed: bool = True

    def __post_init__(self) -> None:
        _require_positive(self, "optimizer", "lr", "adam_eps", "clip_grad")
        _require(0 <= self.min_lr <= self.lr, "optimizer.min_lr", self.min_lr, f"must lie between 0 and lr={self.lr}")
        _require(self.weight_decay >= 0, "optimizer.weight_decay", self.weight_decay, "must be 0 or more")
        for name in ("adam_beta1", "adam_beta2"):
            value = getattr(self, name)
            _require(0 <= value < 1, f"optimizer.{name}", value, "must lie in [0, 1)")


@dataclass(frozen=True)
class ScheduleConfig:
    """Length of the run, batch shape, learning-rate curve, and when to look at held-out text."""

    train_steps: int = 500
    warmup_steps: int = 25
    """Linear warm-up; a cosine from lr to min_lr follows and ends with the run."""
    micro_batch_size: int = 2
    """Sequences a rank handles at once."""
    num_microbatches: int = 1
    """Micro-batches a rank accumulates before a step."""
    eval_every: int = 100
    eval_sequences: int = 64
    """Held-out sequences an evaluation reads, over all ranks; always the same ones."""
    must_learn: bool = True
    """Whether a run to the end whose held-out loss is above the unigram entropy has failed."""

    def __post_init__(self) -> None:
        _require_positive(
            self, "schedule", "train_steps", "micro_batch_size", "num_microbatches", "eval_every", "eval_sequences"
        )
        _require(
            0 <= self.warmup_steps < self.train_steps,
            "schedule.warmup_steps",
            self.warmup_steps,
            f"must be at least 0 and below train_steps={self.train_steps}",
        )


@dataclass(frozen=True)
class RuntimeConfig:
    """What the machine is and how patient the job is with it."""

    device: str = "cpu"
    threads_per_rank: int = 1
    torch_compile: bool = False
    """Megatron compiles small fusions with torch.compile; on a CPU that costs more than it brings."""
    timeout_s: float = 100.0
    """Deadline of every collective."""

    def __post_init__(self) -> None:
        _require(self.device == "cpu", "runtime.device", self.device, "only cpu is supported so far")
        _require_positive(self, "runtime", "threads_per_rank", "timeout_s")


@dataclass(frozen=True)
class LoggingConfig:
    """What is kept and what is shown."""

    runs_dir: str = "runs"
    line_every: int = 10
    """Without a terminal one line is printed every so many steps."""
    checkpoint_every: int = 200
    """A checkpoint is also written at the end and when the run is stopped."""
    wandb: bool = True
    """Log to Weights & Biases too, if the package is installed."""
    tensorboard: bool = True
    """Write event files too, if TensorBoard is installed."""
    wandb_project: str = "hybrid_ep"
    profile_step: int = 0
    """Write profile.md: what this step launches. 0: none. The first steps also make buffers."""

    def __post_init__(self) -> None:
        _require_positive(self, "logging", "line_every", "checkpoint_every")
        _require(self.profile_step >= 0, "logging.profile_step", self.profile_step, "a step from 1 on, or 0 for none")
        _require(bool(self.runs_dir), "logging.runs_dir", self.runs_dir, "name a folder")


@dataclass(frozen=True)
class RunConfig:
    """A complete training run. `recipe` names the function that made it."""

    recipe: str
    seed: int = 1234
    model: ModelConfig = field(default_factory=ModelConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    runtime: RuntimeConfig = field(default_factory=RuntimeConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)

    def __post_init__(self) -> None:
        experts, ep = self.model.num_experts, self.parallel.expert_parallel_size
        _require(
            experts % ep == 0, "model.num_experts", experts, f"must be a multiple of parallel.expert_parallel_size={ep}"
        )
        per_eval = self.parallel.num_ranks * self.schedule.micro_batch_size
        sequences = self.schedule.eval_sequences
        _require(
            sequences % per_eval == 0,
            "schedule.eval_sequences",
            sequences,
            f"must be a multiple of num_ranks x micro_batch_size = {per_eval}",
        )
        row_bytes = self.model.hidden_size * (4 if self.model.dtype == "fp32" else 2)
        _require(
            row_bytes % 16 == 0,
            "model.hidden_size",
            self.model.hidden_size,
            "a token's row must be a multiple of 16 bytes to be dispatched",
        )
        steps = self.schedule.train_steps
        _require(
            self.logging.profile_step <= steps,
            "logging.profile_step",
            self.logging.profile_step,
            f"must be one of the run's steps, 1 to train_steps={steps}, or 0 for none",
        )

    @property
    def global_batch_size(self) -> int:
        """Sequences in one optimizer step, over all ranks."""
        per_rank = self.schedule.micro_batch_size * self.schedule.num_microbatches
        return self.parallel.num_ranks * per_rank

    @property
    def tokens_per_step(self) -> int:
        """Tokens in one optimizer step, over all ranks."""
        return self.global_batch_size * self.model.seq_length

    def derive(self, **changes: Any) -> RunConfig:
        """A checked copy. Sections take a dict of fields: `derive(schedule={"train_steps": 10})`."""
        known = {f.name for f in dataclasses.fields(self)}
        for name in changes:
            _require(name in known, "derive", name, f"unknown; the sections are {', '.join(sorted(known))}")
        replaced = {}
        for name, value in changes.items():
            current = getattr(self, name)
            if dataclasses.is_dataclass(current) and not isinstance(current, type) and isinstance(value, dict):
                if name == "parallel" and "dispatcher" in value:
                    value = {**value, "dispatcher": names.dispatcher(value["dispatcher"])}
                value = _from_dict(type(current), {**dataclasses.asdict(current), **value}, name)
            replaced[name] = value
        return dataclasses.replace(self, **replaced)

    def to_dict(self) -> dict[str, Any]:
        """Plain nested dict of strings, numbers and bools."""
        return dataclasses.asdict(self)

    @staticmethod
    def from_dict(values: dict[str, Any]) -> RunConfig:
        """Inverse of `to_dict`; ValueError on unknown names, missing names, wrong types, wrong values."""
        return _from_dict(RunConfig, values, "config")


def _from_dict(cls: type, values: Any, path: str) -> Any:
    if not isinstance(values, dict):
        raise ValueError(f"{path}={values!r}: must be a mapping of field names to values")
    hints = get_type_hints(cls)
    fields = {f.name: f for f in dataclasses.fields(cls)}
    unknown = sorted(set(values) - set(fields))
    if unknown:
        raise ValueError(f"{path}.{unknown[0]}: unknown field; known are {', '.join(fields)}")
    made = {}
    for name, value in values.items():
        wanted = hints[name]
        if isinstance(wanted, type) and dataclasses.is_dataclass(wanted):
            made[name] = _from_dict(wanted, value, f"{path}.{name}")
            continue
        value = safe_yaml.as_type(value, wanted)
        if type(value) is not wanted:
            raise ValueError(f"{path}.{name}={value!r}: must be of type {wanted.__name__}")
        made[name] = value
    absent = dataclasses.MISSING
    required = [f.name for f in fields.values() if f.default is absent and f.default_factory is absent]
    missing = [name for name in required if name not in made]
    if missing:
        raise ValueError(f"{path}.{missing[0]}: missing; give it a value")
    return cls(**made)


def dump_yaml(config: RunConfig) -> str:
    """The configuration as YAML text, sections in their declared order."""
    import yaml

    return yaml.safe_dump(config.to_dict(), sort_keys=False, default_flow_style=False)


def load_yaml(text: str) -> RunConfig:
    """Inverse of `dump_yaml`; ValueError says which field is wrong."""
    return RunConfig.from_dict(safe_yaml.load(text, "config"))
