"""A training run on a GPU cluster: an architecture, the hardware, and every choice between the two.

`ClusterRun` refuses layouts that cannot be; whether one fits the GPUs' memory is `recipes.memory`'s business, and
what it means in Megatron's words that of `recipes.megatron_arguments`.
"""

from __future__ import annotations

import dataclasses
import math
import shlex
from dataclasses import dataclass
from typing import Any

from hybrid_ep.cli import names
from hybrid_ep.hardware.clusters import with_article
from hybrid_ep.perf import job_fields, memory, remedies, stages
from hybrid_ep.perf.architecture import Architecture
from megatron_patches.settings import BALANCE_PUSHES, CLONE_REACHES, DISPATCH_DTYPES, OVERFLOWS, Balance

from . import safe_yaml
from .hardware import Hardware

PRECISIONS = ("bf16", "fp8", "mxfp8")
SHARDING = ("distributed_optimizer", "megatron_fsdp")
DISPATCHERS = ("hybrid_ep", "alltoall")
BALANCE = ("off", "exact", "slow", "both")
AUTO = ("auto", "yes", "no")


@dataclass(frozen=True)
class ClusterRun:
    """Parallel sizes multiply: hosts x gpus_per_host = tensor x pipeline x data, and data x tensor holds the
    expert-parallel groups. ValueError names field, value and remedy."""

    recipe: str
    architecture: Architecture
    hardware: Hardware
    num_hosts: int
    tensor: int
    pipeline: int
    expert: int
    virtual_pipeline: int = 1
    pipeline_layout: str = ""
    """Megatron's --pipeline-model-parallel-layout; empty: layers in equal parts, embedding and loss counted as one
    layer each when the layers alone do not divide."""
    seq_length: int = 4096
    micro_batch_size: int = 1
    global_batch_size: int = 2048
    train_steps: int = 500
    lr: float = 3e-4
    dispatcher: str = "hybrid_ep"
    num_sms: int = 24
    dispatch_dtype: str = "bf16"
    """What the forward dispatch sends: bf16, or fp8 or mxfp8 with scales; experts get bf16 (docs/megatron.md)."""
    ranks_per_node: int = 0
    """Of one NVLink domain as hybrid_ep sees it; 0: the largest the hardware and the group allow."""
    precision: str = "bf16"
    recompute: str = "selective"
    """none, full, selective (layernorm, moe_act, mla_up_proj: large and cheap to compute again), or the names of
    modules, separated by commas."""
    fp8_params: str = "auto"
    """Keep and gather weights in 8 bits and in no other type: yes, no, or auto: with mxfp8."""
    moments: str = "fp32"
    """Adam's two moments; bf16 needs Transformer Engine's precision-aware optimizer."""
    fusions: str = "auto"
    """Fused cross-entropy and router: yes, no, or auto: unless the router is guarded or experts are balanced by us."""
    gc_interval: int = 100
    """Steps from one garbage collection of Python's, which all ranks make together, to the next; 0: as Python likes."""
    expandable_segments: bool = True
    """PyTorch's allocator maps memory as it grows, in place of fragments of fixed size."""
    cuda_graphs: str = "none"
    """What of a layer Transformer Engine replays as a CUDA graph: none, attn, or router: attention, router and shared
    experts, up to dispatch."""
    published_weights: bool = False
    """Training goes on from the published weights, whose rotary positions are scaled; from scratch they are not."""
    overlap: bool = False
    """Hide the exchange of one micro-batch behind the compute of another (Megatron's 1F1B overlap)."""
    sharding: str = "distributed_optimizer"
    balancer: str = "aux_loss"
    """aux_loss: the architecture's own loss or bias; force: tokens spread by chance, for benchmarks alone."""
    balance: str = "off"
    """The expert balancer: exact clones hot experts for every micro-batch, slow moves experts between steps; both. With
    it, experts are those of --hybrid-ep-grouped-gemm in place of Transformer Engine's (docs/balancer.md)."""
    spare_slots: int = 1
    """Slots for clones on every rank, of exact and both."""
    balance_clones: str = "auto"
    """Ranks that may hold an expert's clones, of exact and both: those of its owner's node, anywhere, near, or auto."""
    balance_push: str = "auto"
    """What brings weights to clones, of exact and both: kernels, torch, or auto, kernels where they can."""
    static_rows: str = "none"
    """Of exact and both: dispatched rows of every micro-batch, whatever the router does; what one without a plan does:
    grow, drop or raise. none: as many rows as there are."""
    balance_interval: int = 100
    """Steps from one placement to the next, of slow and both."""
    apex: str = "auto"
    """Fused kernels of apex: yes, no, or auto: when importable where the arguments are made."""
    memory_reserve: float = memory.RESERVE
    """Share of the GPU left to CUDA, NCCL and fragmentation."""
    megatron_path: str = "Megatron-LM"
    data_path: str = ""
    """Prefix of Megatron's indexed data set; empty: mock data."""
    tokenizer: str = ""
    """Name or folder of a Hugging Face tokenizer; needed with data_path."""
    save_interval: int = 100
    megatron_args: str = ""
    """More flags for pretrain_gpt.py, written as in a shell; they come last and win."""

    def __post_init__(self) -> None:
        for name in (
            "num_hosts",
            "tensor",
            "pipeline",
            "expert",
            "virtual_pipeline",
            "seq_length",
            "micro_batch_size",
            "global_batch_size",
            "train_steps",
            "num_sms",
            "save_interval",
            "spare_slots",
            "balance_interval",
        ):
            _require(getattr(self, name) >= 1, name, getattr(self, name), "must be 1 or more")
        remedy = names.dispatcher_remedy(self.dispatcher, DISPATCHERS)
        _require(self.dispatcher in DISPATCHERS, "dispatcher", self.dispatcher, remedy)
        for name, known in (
            ("precision", PRECISIONS),
            ("moments", job_fields.MOMENTS),
            ("sharding", SHARDING),
            ("balancer", ("aux_loss", "force")),
            ("apex", AUTO),
            ("balance", BALANCE),
            ("balance_clones", CLONE_REACHES),
            ("balance_push", BALANCE_PUSHES),
            ("static_rows", ("none", *OVERFLOWS)),
            ("dispatch_dtype", DISPATCH_DTYPES),
            ("fp8_params", AUTO),
            ("fusions", AUTO),
            ("cuda_graphs", ("none", "attn", "router")),
        ):
            _require(getattr(self, name) in known, name, getattr(self, name), f"use one of {', '.join(known)}")
        _require(0 <= self.memory_reserve < 1, "memory_reserve", self.memory_reserve, "must lie in [0, 1)")
        _require(self.gc_interval >= 0, "gc_interval", self.gc_interval, "must be 0 or more")
        _require(
            self.fp8_params != "yes" or self.precision != "bf16",
            "fp8_params",
            self.fp8_params,
            "weights in 8 bits need precision=fp8 or mxfp8",
        )
        _require(self.lr > 0, "lr", self.lr, "must be greater than 0")
        model, gpus, parts = self.architecture, self.num_gpus, self.tensor * self.pipeline
        _require(
            gpus % parts == 0,
            "num_hosts",
            self.num_hosts,
            f"gives {gpus} GPUs, which tensor={self.tensor} x pipeline={self.pipeline} = {parts} must divide; "
            f"{self._fewest_hosts()}",
        )
        _require(
            model.num_experts % self.expert == 0,
            "expert",
            self.expert,
            f"must divide the {model.num_experts} experts; "
            f"{remedies.divisor('expert', self.expert, model.num_experts)}",
        )
        stage = gpus // self.pipeline
        _require(
            stage % self.expert == 0,
            "num_hosts",
            self.num_hosts,
            f"gives {stage} GPUs a stage of pipeline={self.pipeline}, which expert={self.expert} must divide; "
            f"{self._fewest_hosts()}",
        )
        self._check_batch()
        _require(
            self.ranks_per_node == 0 or self.expert % self.ranks_per_node == 0,
            "ranks_per_node",
            self.ranks_per_node,
            f"must divide expert={self.expert}",
        )
        _require(
            not self.hardware.hopper or self.precision != "mxfp8",
            "precision",
            self.precision,
            "Hopper has no mxfp8 tensor cores; use fp8",
        )
        _require(
            self.sharding != "megatron_fsdp" or self.pipeline == 1,
            "sharding",
            self.sharding,
            f"Megatron-FSDP shards in place of a pipeline; set pipeline=1, not {self.pipeline}",
        )
        _require(
            not self.overlap or self.recompute != "full",
            "overlap",
            self.overlap,
            "cannot be combined with recompute=full; use selective",
        )
        _require(
            not (self.data_path and not self.tokenizer),
            "tokenizer",
            self.tokenizer,
            "data_path needs the tokenizer that made it",
        )
        self._check_dispatch()
        self._check_balance()
        self._check_recompute()
        self.more_flags()
        self.stages()

    def _check_batch(self) -> None:
        per_step = self.data * self.micro_batch_size
        _require(
            self.global_batch_size % per_step == 0,
            "global_batch_size",
            self.global_batch_size,
            f"must be a multiple of {self.data} data-parallel ranks x micro_batch_size={self.micro_batch_size} = "
            f"{per_step}; {remedies.multiple('global_batch_size', self.global_batch_size, per_step)}",
        )
        _require(
            self.num_microbatches >= self.pipeline,
            "global_batch_size",
            self.global_batch_size,
            f"gives {self.num_microbatches} micro-batches; {self.pipeline} stages need at least as many",
        )
        _require(
            self.virtual_pipeline == 1 or self.num_microbatches % self.pipeline == 0,
            "global_batch_size",
            self.global_batch_size,
            f"gives {self.num_microbatches} micro-batches; with virtual stages they must be a multiple of "
            f"pipeline={self.pipeline}",
        )
        _require(
            self.virtual_pipeline == 1 or self.pipeline > 1,
            "virtual_pipeline",
            self.virtual_pipeline,
            "one pipeline stage has no virtual ones; use 1",
        )

    def _check_dispatch(self) -> None:
        _require(
            self.num_sms <= self.hardware.num_sms,
            "num_sms",
            self.num_sms,
            f"must be at most {self.hardware.num_sms}, the SMs of {with_article(self.hardware.gpu)}",
        )
        _require(
            self.dispatch_dtype == "bf16" or self.dispatcher == "hybrid_ep",
            "dispatch_dtype",
            self.dispatch_dtype,
            f"only hybrid_ep sends quantised rows, not dispatcher={self.dispatcher}; use bf16",
        )

    def _check_balance(self) -> None:
        """What the balancer and its grouped experts do not work with, all of it in one message."""
        wanted = {
            "dispatcher": "hybrid_ep",
            "precision": "fp8" if self.precision == "fp8" else "bf16",  # they have no products in mxfp8
            "sharding": "distributed_optimizer",
            "moments": "fp32",
            "fp8_params": "no" if self.fp8_params == "yes" else self.fp8_params,  # theirs stay in 16 bits
        }
        changes = [f"{name}={str(value).lower()}" for name, value in wanted.items() if getattr(self, name) != value]
        remedy = " ".join(f"--set {change}" for change in changes)
        _require(self.balance == "off" or not changes, "balance", self.balance, f"needs {remedy}")
        _require(
            self.static_rows == "none" or self.clones > 0,
            "static_rows",
            self.static_rows,
            "only exact balancing makes rows of every rank alike; use balance=exact or both, or static_rows=none",
        )

    def _check_recompute(self) -> None:
        model = self.architecture
        _require(
            self.cuda_graphs == "none" or not {"full", "moe"} & {self.recompute, *self.recompute_modules},
            "recompute",
            self.recompute,
            f"layers that are run again cannot be replayed with cuda_graphs={self.cuda_graphs!r}; use selective",
        )
        lacking = {
            "mla_up_proj": not model.mla and "it has no latent attention",
            "mlp": not model.num_dense_layers and "all its layers have experts",
            "shared_experts": not model.shared_ffn_hidden_size and "it has no shared experts",
            "moe": self.overlap and "it cannot be combined with overlap",
        }
        for name in self.recompute_modules:
            _require(name in job_fields.RECOMPUTE_MODULES, "recompute", self.recompute, job_fields.RECOMPUTE_REMEDY)
            _require(not lacking.get(name), "recompute", self.recompute, f"leave {name} out: {lacking.get(name)}")

    @property
    def recompute_modules(self) -> tuple[str, ...]:
        """Names for --recompute-modules; none where nothing or everything is recomputed."""
        return job_fields.recompute_modules(self.recompute, self.architecture.mla)

    @property
    def keeps_fp8_params(self) -> bool:
        """Whether weights are kept in 8 bits alone; auto: not under Megatron-FSDP."""
        auto = self.fp8_params if self.sharding == "distributed_optimizer" else "no"
        return job_fields.keeps_fp8_params(self.precision, auto if self.fp8_params == "auto" else self.fp8_params)

    @property
    def fused(self) -> bool:
        """Whether cross-entropy and router are Megatron's fused ones. Router guards choose experts themselves."""
        guarded = any(flag in self.megatron_args for flag in ("--hybrid-ep-router-guard", "--hybrid-ep-router-tie"))
        return self.fusions == "yes" or (self.fusions == "auto" and self.balance == "off" and not guarded)

    def more_flags(self) -> list[str]:
        """The words of megatron_args."""
        try:
            words = shlex.split(self.megatron_args)
        except ValueError as error:
            raise ValueError(f"megatron_args={self.megatron_args!r}: {error}; quote it as for a shell") from error
        _require(
            not words or words[0].startswith("--"),
            "megatron_args",
            self.megatron_args,
            "must begin with a flag, --name",
        )
        return words

    @property
    def clones(self) -> int:
        """Spare slots on every rank; 0 where no expert is cloned."""
        return self.spare_slots if self.balance in ("exact", "both") else 0

    @property
    def pushed_by(self) -> str:
        """kernels or torch: what brings weights to clones, as megatron_patches.balance_kernels chooses it."""
        return "torch" if self.balance_push == "torch" else "kernels"

    @property
    def balance_settings(self) -> Balance:
        """The balancer's settings, as the flags of the run give them."""
        rows = None if self.static_rows == "none" else self.static_rows
        return Balance(mode=self.balance, spare_slots=self.clones or 1, reach=self.balance_clones, static_rows=rows)

    @property
    def clones_stay(self) -> bool:
        """Whether every clone lies in the NVLink domain of its owner."""
        domains = self.expert // self.domain
        return domains == 1 or self.balance_settings.within_node(domains)

    def _fewest_hosts(self) -> str:
        """The remedy for hosts that tensor, pipeline and expert do not divide."""
        stage, host = math.lcm(self.tensor, self.expert), self.hardware.gpus_per_host
        gpus = math.lcm(stage * self.pipeline, host)
        hosts = gpus // host
        return f"give num_hosts={hosts}, {gpus} GPUs, the fewest with these sizes, or a multiple"

    @property
    def num_gpus(self) -> int:
        return self.num_hosts * self.hardware.gpus_per_host

    @property
    def data(self) -> int:
        """Data-parallel replicas of the dense parameters."""
        return self.num_gpus // (self.tensor * self.pipeline)

    @property
    def expert_data(self) -> int:
        """Replicas of each expert."""
        return self.num_gpus // (self.pipeline * self.expert)

    @property
    def num_microbatches(self) -> int:
        return self.global_batch_size // (self.data * self.micro_batch_size)

    @property
    def tokens_per_rank(self) -> int:
        """Tokens of a micro-batch on one rank; with tensor parallelism the sequence is split (sequence parallel)."""
        return self.micro_batch_size * self.seq_length // self.tensor

    @property
    def domain(self) -> int:
        """Ranks of the expert-parallel group in one NVLink domain.

        Groups of consecutive ranks tile hosts, so a domain is a whole divisor of both."""
        if self.ranks_per_node:
            return self.ranks_per_node
        most = min(self.expert, self.hardware.ranks_per_nvlink_domain)
        return next(n for n in range(most, 0, -1) if self.expert % n == 0)

    def stages(self) -> list[list[str]]:
        """For every pipeline rank its model chunks, each as letters E (embedding), t (layer), m (MTP), L (loss)."""
        model = self.architecture
        _require(
            bool(self.pipeline_layout) or stages.splits(model.num_layers, self.pipeline * self.virtual_pipeline),
            "pipeline",
            self.pipeline,
            f"x virtual_pipeline={self.virtual_pipeline} must divide {model.num_layers} layers "
            f"(or {model.num_layers + 2} with both ends); else give pipeline_layout",
        )
        layers = model.num_layers, model.num_layers - model.num_dense_layers, model.num_mtp_layers
        try:
            ranks = stages.chunks(*layers, self.pipeline, self.virtual_pipeline, self.pipeline_layout)
        except ValueError as error:
            raise ValueError(f"pipeline_{error}") from None
        return [[chunk.replace("d", "t") for chunk in chunks] for chunks in ranks]

    @property
    def counts_ends_as_layers(self) -> bool:
        """Whether embedding and loss count as a layer each in an equal split."""
        return self.architecture.num_layers % (self.pipeline * self.virtual_pipeline) != 0

    def derive(self, **changes: Any) -> ClusterRun:
        """A checked copy; ValueError on an unknown name or a value of the wrong type."""
        fixed = {"recipe", "architecture", "hardware"}
        known = {f.name: type(getattr(self, f.name)) for f in dataclasses.fields(self) if f.name not in fixed}
        for name, value in changes.items():
            _require(name in known, name, value, f"unknown; choose one of {', '.join(known)}")
            changes[name] = value = safe_yaml.as_type(value, known[name])
            _require(type(value) is known[name], name, value, f"must be of type {known[name].__name__}")
        if "dispatcher" in changes:
            changes["dispatcher"] = names.dispatcher(changes["dispatcher"])
        return dataclasses.replace(self, **changes)


def _require(ok: bool, name: str, value: object, remedy: str) -> None:
    if not ok:
        raise ValueError(f"{name}={value!r}: {remedy}")
