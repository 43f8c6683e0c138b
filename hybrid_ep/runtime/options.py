"""The constructor's arguments, checked on this rank and then agreed by all ranks."""

from __future__ import annotations

import math
import numbers
import socket
from dataclasses import dataclass, field
from typing import Any

import torch

from hybrid_ep import _core, env, tuning
from hybrid_ep.buffer_sizes import FIRST_TOPK, default_arena_bytes, first_recv_rows, whole_bytes
from hybrid_ep.config import DEFAULT_CHUNK_TOKENS, HybridEpConfigInstance
from hybrid_ep.hardware import block_split
from hybrid_ep.runtime import clones as clone_plans
from hybrid_ep.runtime import devices, nvshmem, sm_plan, topology, validation
from hybrid_ep.runtime import spares as spare_slots
from hybrid_ep.runtime.bootstrap import GroupView, Rendezvous, agree

OVERFLOW_POLICIES = ("raise", "drop")
TOPIC = "buffer"  # of the exchange in which ranks compare their options
MOST_ARENA_STREAMS = 8
_ASKED = "(executor= or HYBRID_EP_EXECUTOR asks for it, or a group with nccl)"


@dataclass
class Options:
    """What a buffer is made for. max_tokens: the largest over the ranks once agreed, and no less than latency_tokens.
    num_blocks_*: None where nobody said, until agree() has asked the tuning file, if there is one. chunks: tokens of a
    rail message."""

    hidden_dim: int
    max_tokens: int
    num_local_experts: int
    use_fp8: bool
    num_blocks_dispatch: int | None  # None: as the links need, once the topology is known
    num_blocks_combine: int | None
    num_blocks_permute: int | None  # None: of sm_plan's by block_split; hosts: dispatch's
    num_blocks_unpermute: int | None  # likewise, of combine
    ranks_per_node: int | None
    ranks_per_node_origin: str
    capacity_factor: float | None
    overflow: str
    timeout_s: float
    executor: str
    device: torch.device
    tuning: tuning.Table | None
    arena_mib: int | None = None  # None: by shape
    arena_streams: int = 1  # that a GPU's is shared among
    topk: int = FIRST_TOPK  # experts of a token for which there is room before any call
    latency_tokens: int = 0  # of a rank, on the latency path; 0: there is none
    auto_latency_tokens: int = 0  # up to so many auto takes it: all, or fewer by the tuning file; agree()
    clones: clone_plans.PlannerOptions | None = None  # None: plan_clones plans none
    landing: str | None = None  # of env.LANDINGS, this rank's; None: as the engine chooses
    spares: spare_slots.SpareLayout | None = None  # registered slots; None: none
    num_blocks_exchange: int | None = None  # None: by the tokens of a call
    local_work_apart: bool = False  # a dispatch has blocks for local work alone, without being told; choose_blocks
    reach: devices.Reach | None = None  # on GPUs with ranks of their own: found in agree()
    chunks: dict[str, int] = field(default_factory=lambda: dict.fromkeys(("dispatch", "combine"), DEFAULT_CHUNK_TOKENS))

    def agree(self, meet: Rendezvous) -> topology.Topology:
        """Collective: ValueError on every rank when the ranks differ; takes the largest max_tokens."""
        answers = meet.exchange(
            TOPIC,
            {
                "must_agree": {
                    "hidden_dim": self.hidden_dim,
                    "num_local_experts": self.num_local_experts,
                    "num_of_hybrid_ep_ranks_per_nvlink_domain": self.ranks_per_node,
                    "num_sms_dispatch_api": self.num_blocks_dispatch,
                    "num_sms_combine_api": self.num_blocks_combine,
                    "num_blocks_permute": self.num_blocks_permute,
                    "num_blocks_unpermute": self.num_blocks_unpermute,
                    "capacity_factor": self.capacity_factor,
                    "overflow": self.overflow,
                    "executor": self.executor,
                    "arena_mib": self.arena_mib,
                    "arena_streams": self.arena_streams,
                    "latency_tokens": self.latency_tokens,
                    "topk": self.topk,
                    "clones": self.clones and repr(self.clones),
                    "spares": self.spares and repr(self.spares),
                    "tuning": self.tuning and self.tuning.identity,
                },
                "host": socket.gethostname(),
                "world_rank": meet.view.world_rank,
                "max_tokens": self.max_tokens,
            },
        )
        agree([f["must_agree"] for f in answers], "HybridEPBuffer")
        # A call by lines cannot grow the buffer, whose records and receive rows both paths share.
        self.max_tokens = max(self.latency_tokens, *(f["max_tokens"] for f in answers))
        hosts, domains = [f["host"] for f in answers], None
        if devices.is_probed(self.executor) and not meet.view.virtual:
            self.reach = devices.probe(meet, self.device)
            domains = self.reach.domains()
        found = topology.resolve(
            meet.view.rank,
            hosts,
            self.ranks_per_node,
            self.ranks_per_node_origin,
            [f["world_rank"] for f in answers],
            domains,
        )
        if domains is not None and self.ranks_per_node is not None:
            topology.warn_of_cut_domains(found, domains, f"{self.ranks_per_node_origin}={self.ranks_per_node}")
        self._settle(found)
        return found

    def _settle(self, where: topology.Topology) -> None:
        """Blocks and chunks: the caller's, else the tuning file's; else choose_blocks and the default. Of the latency
        path auto takes what there is room for, or less where the file has measured that."""
        tuned, self.auto_latency_tokens = None, self.latency_tokens
        if self.tuning is not None:
            num_experts = self.num_local_experts * where.num_ranks
            key = tuning.Key(where.num_ranks, where.num_local_ranks, self.hidden_dim, num_experts)
            tuned = self.tuning.find(key, self.max_tokens)
            crossover = self.tuning.crossover(key)
            if crossover is not None:
                self.auto_latency_tokens = min(self.latency_tokens, crossover)
        if tuned is not None:
            self.chunks = {"dispatch": tuned.chunk_dispatch, "combine": tuned.chunk_combine}
        self.num_blocks_dispatch = self.num_blocks_dispatch or (tuned.num_sms_dispatch if tuned else None)
        self.num_blocks_combine = self.num_blocks_combine or (tuned.num_sms_combine if tuned else None)

    def choose_blocks(self, where: topology.Topology, virtual: bool) -> sm_plan.SmPlan | None:
        """Fills in the block counts that nobody gave. On GPUs with ranks of their own: by sm_plan, which is returned;
        else 1, for virtual ranks share one device, whose SMs must hold all their blocks at once. An exchange has one
        block on a host, whatever was given: blocks of a rank take turns there."""
        plan = None
        if devices.is_cuda(self.executor) and not virtual:
            name, capability = devices.name_and_capability(self.device)
            plan = sm_plan.plan(
                sm_plan.cluster_of(name, capability),
                where.num_nodes,
                where.num_local_ranks,
                self.num_local_experts * where.num_ranks,
                2 * self.hidden_dim,
            )
        if not devices.is_cuda(self.executor):
            self.num_blocks_exchange = 1
        elif virtual:
            self.num_blocks_exchange = self.num_blocks_exchange or 1
        self.local_work_apart = plan is not None
        default = plan.num_sms if plan else 1
        if default > 1:  # the plan's number has the local work in it
            if not self.num_blocks_dispatch and self.num_blocks_permute is None:
                self.num_blocks_dispatch, self.num_blocks_permute = block_split.parts("dispatch", default)
            if not self.num_blocks_combine and self.num_blocks_unpermute is None:
                self.num_blocks_combine, self.num_blocks_unpermute = block_split.parts("combine", default)
        self.num_blocks_dispatch = self.num_blocks_dispatch or default
        self.num_blocks_combine = self.num_blocks_combine or default
        return plan

    @property
    def blocks(self) -> tuple[int, int]:
        """(dispatch, combine), once choose_blocks has filled in what nobody gave."""
        if self.num_blocks_dispatch is None or self.num_blocks_combine is None:
            raise RuntimeError("the numbers of blocks are not settled yet: agree() and choose_blocks() come first")
        return self.num_blocks_dispatch, self.num_blocks_combine

    def template(self, where: topology.Topology) -> HybridEpConfigInstance:
        """What deep_ep's callers read and tune."""
        dispatch_blocks, combine_blocks = self.blocks
        return HybridEpConfigInstance(
            hidden_dim=self.hidden_dim,
            max_num_of_tokens_per_rank=self.max_tokens,
            num_of_experts_per_rank=self.num_local_experts,
            num_of_ranks_per_node=where.num_local_ranks,
            num_of_nodes=where.num_nodes,
            use_fp8=self.use_fp8,
            num_of_blocks_dispatch_api=dispatch_blocks,
            num_of_blocks_combine_api=combine_blocks,
            num_of_blocks_preprocessing_api=self.num_blocks_exchange,
            num_of_blocks_permute=self.num_blocks_permute,
            num_of_blocks_unpermute=self.num_blocks_unpermute,
            num_of_tokens_per_chunk_dispatch_api=self.chunks["dispatch"],
            num_of_tokens_per_chunk_combine_api=self.chunks["combine"],
        )

    def first_shape(self, num_ranks: int) -> dict[str, int]:
        """What to lay the memory out for before any call is known."""
        num_experts, tokens = self.num_local_experts * num_ranks, max(self.max_tokens, 1)
        row_bytes, topk = validation.least_row_bytes(self.hidden_dim), min(self.topk, num_experts)
        return {
            "num_experts": num_experts,
            "max_tokens": tokens,
            "max_topk": topk,
            "row_bytes": row_bytes,
            "scale_bytes": 0,
            "recv_rows": first_recv_rows(self.capacity_factor, tokens, topk, num_ranks),
            "partial_row_bytes": row_bytes,
            "chunk_tokens": max(self.chunks.values()),
            "arena_bytes": 0,
        }

    def fixed_shape(self, where: topology.Topology) -> dict[str, Any]:
        """What of the memory's layout never grows."""
        return {
            "latency_tokens": self.latency_tokens,
            "clones": clone_plans.core_shape(self.clones, self.num_local_experts, where),
            "spares": None if self.spares is None else self.spares.core_shape(),
        }

    def less_memory(self, arena_bytes: int) -> str:
        """What to change where a buffer with that arena does not fit; the arena is most of a small one. Of spare slots,
        which have no tokens, what made them large."""
        if self.spares is not None:
            one = self.spares.num_bytes // self.spares.spare_slots
            return (
                f", or lower spare_slots={self.spares.spare_slots}: by shapes, each has {one} bytes for an expert in "
                f"{self.spares.dtype}{' and its gradients in fp32' if self.spares.gradients else ''}"
            )
        by_lines = f", latency_tokens={self.latency_tokens}" if self.latency_tokens else ""
        said = f", or lower max_num_of_tokens_per_rank{by_lines} or capacity_factor"
        if not arena_bytes:
            return said
        return (
            f"{said}; {arena_bytes >> 20} MiB of it are the arena, where results lie: arena_mib=0 (or "
            "HYBRID_EP_ARENA_MIB=0) does without, and dispatched rows are copied once more"
        )

    def arena_bytes(self, shape: dict[str, int]) -> int:
        """Registered bytes for results of a buffer of this shape."""
        wanted = default_arena_bytes(shape, self.arena_streams) if self.arena_mib is None else self.arena_mib << 20
        return wanted if self.device.type == "cpu" else whole_bytes(wanted, self.arena_streams)


def seconds(timeout_s: Any) -> float:
    """The deadline of every wait; None: what HYBRID_EP_TIMEOUT_S says. ValueError for what is none."""
    timeout_s = env.get("HYBRID_EP_TIMEOUT_S") if timeout_s is None else timeout_s
    if not _positive(timeout_s) or timeout_s > env.MOST_SECONDS:
        raise ValueError(
            f"timeout_s={timeout_s!r} must be a positive number of seconds, at most {env.MOST_SECONDS:.0e}"
        )
    return float(timeout_s)


def parse(
    *,
    hidden_dim: Any,
    max_num_of_tokens_per_rank: Any,
    num_local_experts: Any,
    use_fp8: Any,
    num_sms_dispatch_api: Any,
    num_sms_combine_api: Any,
    num_blocks_permute: Any,
    num_blocks_unpermute: Any,
    ranks_per_node: Any,
    capacity_factor: Any,
    overflow: Any,
    timeout_s: Any,
    executor: Any,
    tuning_file: Any = None,
    arena_mib: Any = None,
    arena_streams: Any = 1,
    num_sms_preprocessing_api: Any = None,
    topk: Any = None,
    latency_tokens: Any = 0,
    clones: Any = None,
    landing: Any = None,
) -> Options:
    """Local checks; ValueError names argument, value and remedy."""
    env.check(files=False)  # an argument may name another tuning file
    hidden_dim = validation.hidden_dim(hidden_dim)
    if overflow not in OVERFLOW_POLICIES:
        raise ValueError(f"overflow={overflow!r} must be one of {OVERFLOW_POLICIES}")
    if capacity_factor is not None and not _positive(capacity_factor):
        raise ValueError(f"capacity_factor={capacity_factor!r} must be a positive number, or None for the worst case")
    timeout_s = seconds(timeout_s)
    executor, device = machine(executor)
    arena_mib = (
        env.get("HYBRID_EP_ARENA_MIB")
        if arena_mib is None
        else validation.integer("arena_mib", arena_mib, 0, most=env.MOST_MIB)
    )
    landing = env.get("HYBRID_EP_LANDING") if landing is None else landing
    if landing is not None and landing not in env.LANDINGS:
        raise ValueError(
            f"landing={landing!r} must be one of {env.LANDINGS}, or None for the one that suits the machine"
        )
    tuning_file = env.get("HYBRID_EP_TUNING") if tuning_file is None else tuning_file
    table = None if tuning_file in (None, "") else tuning.load(tuning_file, tuning.device_name(device))
    ranks_per_node, origin = topology.requested_ranks_per_node(ranks_per_node)
    num_local_experts = validation.integer("num_local_experts", num_local_experts, 1, most=validation.MOST_EXPERTS)
    return Options(
        hidden_dim,
        validation.integer("max_num_of_tokens_per_rank", max_num_of_tokens_per_rank, 0, most=validation.MOST),
        num_local_experts,
        validation.flag("use_fp8", use_fp8),
        _blocks("num_sms_dispatch_api", num_sms_dispatch_api, env.get("HYBRID_EP_NUM_BLOCKS")),
        _blocks("num_sms_combine_api", num_sms_combine_api, env.get("HYBRID_EP_NUM_BLOCKS")),
        _blocks("num_blocks_permute", num_blocks_permute),
        _blocks("num_blocks_unpermute", num_blocks_unpermute),
        ranks_per_node,
        origin,
        None if capacity_factor is None else float(capacity_factor),
        overflow,
        timeout_s,
        executor,
        device,
        table,
        arena_mib,
        validation.integer("arena_streams", arena_streams, 1, most=MOST_ARENA_STREAMS),
        num_blocks_exchange=_blocks("num_sms_preprocessing_api", num_sms_preprocessing_api),
        topk=FIRST_TOPK if topk is None else validation.integer("topk", topk, 1, most=validation.MOST_TOPK),
        latency_tokens=validation.integer("latency_tokens", latency_tokens, 0, most=validation.MOST),
        clones=clone_plans.checked_options(clones, num_local_experts),
        landing=landing,
    )


def asked_executor(executor: Any, view: GroupView) -> Any:
    """The executor that an argument names, else HYBRID_EP_EXECUTOR, else "cuda" for a group of GPUs, "host" for others.
    Nothing takes the place of one that cannot be used: `machine` refuses it."""
    executor = env.get("HYBRID_EP_EXECUTOR") if executor is None else executor
    return executor if executor is not None else "cuda" if view.of_gpus else "host"


def machine(executor: Any) -> tuple[str, torch.device]:
    """An executor's name, and where its tensors lie. ValueError where none has that name, or it cannot be used here."""
    device = _device(executor)
    if executor == nvshmem.EXECUTOR:  # asked for by name: whatever path there is between the nodes
        try:
            nvshmem.load()
        except RuntimeError as error:
            raise ValueError(f"executor={executor!r} cannot be used here: {error} {_ASKED}") from error
    if executor not in _core.executors():
        raise ValueError(
            f"executor={executor!r} must be one of {list(_core.executors())}, on a machine with a GPU also 'cuda' "
            f"{_ASKED}"
        )
    return executor, device


def _device(executor: Any) -> torch.device:
    """Where the tensors of this executor lie."""
    if not isinstance(executor, str) or not devices.is_cuda(executor):
        return torch.device("cpu")
    try:
        return devices.current()
    except ValueError as error:
        raise ValueError(f"{error} {_ASKED}") from error


def _positive(x: Any) -> bool:
    """Whether it is a positive number that is one as a float, too."""
    if isinstance(x, bool) or not isinstance(x, numbers.Real):
        return False
    try:
        return 0 < float(x) < math.inf
    except OverflowError:
        return False


def _blocks(name: str, value: Any, default: int | None = None) -> int | None:
    if value is None:
        return default
    return validation.integer(name, value, 1, "it is the number of blocks (SMs) of the operation", env.MOST_BLOCKS)
