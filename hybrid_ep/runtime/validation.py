"""What may be passed in. Every complaint is a ValueError that names the argument, its value and the
remedy."""

from __future__ import annotations

import contextvars
import operator
import warnings
from typing import TYPE_CHECKING, Any

import torch

from hybrid_ep import env
from hybrid_ep.runtime import tensors
from hybrid_ep.runtime.handle_kinds import PERMUTED, HandleKind
from hybrid_ep.runtime.plan import Plan, Routed

if TYPE_CHECKING:
    from hybrid_ep.config import HybridEpConfigInstance
    from hybrid_ep.runtime.topology import Topology

DTYPES = tuple(
    getattr(torch, name)
    for name in (
        "bfloat16",
        "float16",
        "float32",
        "uint8",
        "int8",
        "float8_e4m3fn",
        "float8_e5m2",
        "float8_e8m0fnu",
        "int16",
        "int32",
        "float64",
        "int64",
    )
    if hasattr(torch, name)
)
SUMMABLE = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
ROW_ALIGNMENT = 16  # bytes; rows move in units of 16
MOST = (1 << 31) - 1  # of what the core counts in 32 bits
MOST_EXPERTS = 1 << 20  # of a group
MOST_TOPK = 65535  # experts of a token, which the core counts in 16 bits
MOST_PADDING = 1 << 16  # rows to which an expert's group is padded


# Where the tensors of the call in progress must lie: on the device of its buffer.
_device: contextvars.ContextVar[torch.device | None] = contextvars.ContextVar("device", default=None)


def enter(device: torch.device) -> contextvars.Token[torch.device | None]:
    """From here until leave() tensors must lie on this device."""
    return _device.set(device)


def leave(outer: contextvars.Token[torch.device | None]) -> None:
    _device.reset(outer)


def integer(name: str, value: Any, least: int, remedy: str = "", most: int | None = None) -> int:
    """value as int; accepts whatever is an integer, 0-d integer tensors too."""
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = None
    if number is None or number < least or (most is not None and number > most):
        limits = f"of at least {least}" if most is None else f"from {least} to {most}"
        raise ValueError(f"{name}={value!r} must be an integer {limits}{'; ' + remedy if remedy else ''}")
    return number


def hidden_dim(value: Any) -> int:
    """Elements of a row, of which the dtype is not known yet: an even number, for rows are multiples of 16 bytes and
    elements have 8 at most, and one whose row has less than 4 GiB in any."""
    number = integer("hidden_dim", value, 1, most=(1 << 29) - 2)
    if number % 2:
        raise ValueError(
            f"hidden_dim={number} must be even, and a multiple of 8 for bfloat16 and float16, of 4 for "
            f"float32: a row is a multiple of {ROW_ALIGNMENT} bytes"
        )
    return number


def least_row_bytes(hidden_dim: int) -> int:
    """Registered bytes of a row of 2-byte elements, of which rows of wider ones make the buffer grow."""
    return -(-2 * hidden_dim // ROW_ALIGNMENT) * ROW_ALIGNMENT


def flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"{name}={value!r} must be True or False")
    return value


def describe(x: Any) -> str:
    if isinstance(x, torch.Tensor):
        return f"a {x.dtype} tensor of shape {tuple(x.shape)} on {x.device}"
    return f"{type(x).__name__} {x!r:.60}"


def _device_remedy(x: torch.Tensor, device: torch.device) -> str:
    if device.type == "cpu":
        return f"give CPU tensors{', or make the buffer with executor=' + repr('cuda') if x.is_cuda else ''}"
    return f"give tensors on {device}"


def tensor(name: str, x: Any, dims: int, remedy: str) -> torch.Tensor:
    device = _device.get() or torch.device("cpu")
    if not isinstance(x, torch.Tensor):
        raise ValueError(f"{name} is {describe(x)}; give a tensor: {remedy}")
    if x.device != device:
        raise ValueError(f"{name} is {describe(x)}, but this buffer runs on {device}; {_device_remedy(x, device)}")
    if x.layout != torch.strided:
        raise ValueError(f"{name} has layout {x.layout}; give a dense tensor")
    if x.dim() != dims:
        raise ValueError(f"{name} is {describe(x)}; it must have {dims} dimensions: {remedy}")
    tensors.require_memory(name, x)
    return x


def hidden_rows(name: str, x: Any, rows: int | None = None) -> torch.Tensor:
    """The payload [rows, hidden] of a dispatch."""
    x = tensor(name, x, 2, "[num_tokens, hidden]")
    if x.dtype not in DTYPES:
        raise ValueError(f"{name} has dtype {x.dtype}; supported: {', '.join(str(d) for d in DTYPES)}")
    if x.shape[1] < 1 or x.shape[1] * x.element_size() % ROW_ALIGNMENT:
        step = ROW_ALIGNMENT // x.element_size()
        raise ValueError(
            f"{name} has hidden={x.shape[1]} of {x.dtype}; a row must be a positive multiple of "
            f"{ROW_ALIGNMENT} bytes: make hidden a multiple of {step}"
        )
    if rows is not None and x.shape[0] != rows:
        raise ValueError(
            f"{name} has {x.shape[0]} rows; the handle's dispatch had {rows} tokens on this rank: give one row for each"
        )
    return x


def summable_rows(name: str, x: Any, rows: int, at_least: bool) -> torch.Tensor:
    """The payload of a combine: `rows` rows, or at_least that many."""
    x = hidden_rows(name, x)
    if x.dtype not in SUMMABLE:
        raise ValueError(f"{name} has dtype {x.dtype}; combine sums bfloat16, float16 or float32: convert it first")
    if x.shape[0] != rows and not (at_least and x.shape[0] > rows):
        raise ValueError(
            f"{name} has {x.shape[0]} rows; the handle's dispatch returned {rows}"
            f"{' (or more, as padding)' if at_least else ''}: give the rows in that order"
        )
    return x


def weights(name: str, w: Any, shape: tuple[int, ...], at_least: bool = False) -> torch.Tensor:
    w = tensor(name, w, len(shape), f"float32 {list(shape)}")
    if w.dtype != torch.float32:
        raise ValueError(f"{name} has dtype {w.dtype}; give float32: {name}.float()")
    fits = w.shape[0] >= shape[0] if at_least else w.shape[0] == shape[0]
    if not fits or tuple(w.shape[1:]) != shape[1:]:
        raise ValueError(f"{name} has shape {tuple(w.shape)}; it must have shape {shape}")
    return w


def topk(idx: Any, rows: int, num_experts: int, look: bool = True) -> torch.Tensor:
    """int64 [rows, topk], from any signed integers; -1 drops a choice. look: read the numbers, for which a GPU must be
    waited for."""
    idx = tensor("topk_idx", idx, 2, "integers [num_tokens, topk]")
    if idx.dtype not in (torch.int64, torch.int32, torch.int16, torch.int8):
        raise ValueError(f"topk_idx has dtype {idx.dtype}; give int64 expert numbers")
    if idx.shape[0] != rows:
        raise ValueError(f"topk_idx has {idx.shape[0]} rows but hidden has {rows}; give one row for each token")
    if idx.shape[1] < 1:
        raise ValueError(f"topk_idx has shape {tuple(idx.shape)}; give at least one choice a token (-1 drops it)")
    if look:
        choices(idx, num_experts)
    return idx.long()


def choices(idx: torch.Tensor, num_experts: int) -> None:
    """The numbers themselves; waits for a GPU."""
    if idx.numel():
        low, high = (int(v) for v in idx.aminmax())
        if low < -1 or high >= num_experts:
            raise ValueError(
                f"topk_idx holds {low if low < -1 else high}; experts are 0..{num_experts - 1}, -1 drops a choice"
            )


def routing_map(route: Any, rows: int, num_experts: int | None, num_ranks: int) -> torch.Tensor:
    route = tensor("routing_map", route, 2, "bool [num_tokens, num_experts]")
    if route.dtype not in (torch.bool, torch.uint8):
        raise ValueError(
            f"routing_map has dtype {route.dtype}; give bool (or uint8, 0: not chosen): routing_map.bool()"
        )
    if route.shape[0] != rows:
        raise ValueError(f"routing_map has {route.shape[0]} rows but hidden has {rows}; give one row for each token")
    if num_experts is not None and route.shape[1] != num_experts:
        raise ValueError(
            f"routing_map has {route.shape[1]} columns but the number of experts is {num_experts}; give "
            "one column for each expert of the group"
        )
    experts_of_group("routing_map's number of columns", route.shape[1], num_ranks)
    return route.bool()


def experts_of_group(name: str, num_experts: Any, num_ranks: int) -> int:
    num_experts = integer(name, num_experts, 1, most=MOST_EXPERTS)
    if num_experts % num_ranks:
        raise ValueError(f"{name}={num_experts} must be a multiple of the group's {num_ranks} ranks; pad the experts")
    return num_experts


def group_experts(num_experts: Any, per_rank: Any, num_ranks: int) -> Any:
    """num_of_experts, from num_of_experts_per_rank where that is given."""
    if per_rank is None:
        return num_experts
    per_rank = integer("num_of_experts_per_rank", per_rank, 1, most=MOST_EXPERTS)
    if num_experts is not None and num_experts != per_rank * num_ranks:
        raise ValueError(
            f"num_of_experts={num_experts!r} is not num_of_experts_per_rank={per_rank} times "
            f"the group's {num_ranks} ranks; give only one of them"
        )
    return per_rank * num_ranks


def template(config: HybridEpConfigInstance) -> None:
    """Of the fields with an effect, that later calls can use them."""
    sizes = {
        "hidden_dim": (0, MOST),
        "max_num_of_tokens_per_rank": (0, MOST),
        "num_of_experts_per_rank": (1, MOST_EXPERTS),
        "pad_multiple": (0, MOST_PADDING),
    }
    for name, (least, most) in sizes.items():
        integer(name, getattr(config, name), least, most=most)
    blocks = config.num_of_blocks_preprocessing_api
    tuned = config.tuned() | ({} if blocks is None else {"num_of_blocks_preprocessing_api": blocks})
    for name, value in tuned.items():
        integer(name, value, 1, most=env.MOST_BLOCKS if "blocks" in name else MOST)


def deprecated(name: str, what: str) -> None:
    """By a verb, of an argument that deep_ep's callers still give."""
    warnings.warn(f"{name} {what}", DeprecationWarning, stacklevel=3)


def token_slots(slots: Any, hidden: Any) -> None:
    """num_of_tokens_per_rank, as deep_ep's callers give it for ranks with unequal numbers of tokens."""
    if not isinstance(hidden, torch.Tensor):
        return  # which is complained of where it is used
    if slots is not None and integer("num_of_tokens_per_rank", slots, 0) < len(hidden):
        raise ValueError(
            f"num_of_tokens_per_rank={int(slots)} is less than the {len(hidden)} rows of hidden; give "
            "the largest number of tokens of any rank, or None"
        )


def scales(scale: Any, hidden: torch.Tensor) -> torch.Tensor:
    scale = tensor("scaling_factor", scale, 2, "[num_tokens, scales of a token]")
    if scale.shape[0] != hidden.shape[0]:
        raise ValueError(
            f"scaling_factor has {scale.shape[0]} rows but hidden has {hidden.shape[0]}; give one row for each token"
        )
    if scale.shape[1] < 1 or scale.dtype not in DTYPES:
        raise ValueError(
            f"scaling_factor is {describe(scale)}; give at least one column of float32, uint8 or float8_e8m0fnu"
        )
    return scale


def fp8_agrees(use_fp8: Any, hidden: torch.Tensor) -> None:
    if use_fp8 is not None and flag("use_fp8", use_fp8) and hidden.element_size() != 1:
        raise ValueError(f"use_fp8=True but hidden has dtype {hidden.dtype}; give 1-byte elements or use_fp8=False")


def require_tuple(handle: Any, kind: HandleKind) -> None:
    """That it may be what the verb of this kind returned."""
    if not isinstance(handle, (tuple, list)):
        raise ValueError(f"handle is {describe(handle)}; give the handle tuple that {kind.verb}() returned")
    if len(handle) != kind.length:
        raise ValueError(f"handle has {len(handle)} elements; give the {kind.length}-tuple that {kind.verb}() returned")


def handle(value: Any, kind: HandleKind, topology: Topology) -> Any:
    """The plan inside a handle of this kind, made for this group."""
    if isinstance(value, Routed):
        if value.kind is not kind:
            raise ValueError(
                f"handle is route()'s for {value.kind.verb}(); give it to that verb, or route with "
                f"permute={kind is PERMUTED}"
            )
        return _of_group(value.plan, topology)
    require_tuple(value, kind)
    plan = getattr(value[kind.config], "plan", None)
    if plan is None:
        raise ValueError(
            f"handle's config element carries no plan; give the handle that {kind.verb}() returned, unchanged"
        )
    return _of_group(plan, topology)


def _of_group(plan: Plan, topology: Topology) -> Plan:
    if (plan.rank, plan.num_ranks, plan.num_local_ranks) != (
        topology.rank,
        topology.num_ranks,
        topology.num_local_ranks,
    ):
        raise ValueError(
            f"handle belongs to rank {plan.rank} of {plan.num_ranks} ranks in nodes of "
            f"{plan.num_local_ranks}; this buffer is rank {topology.rank} of {topology.num_ranks} in "
            f"nodes of {topology.num_local_ranks}: use it with the group that made it"
        )
    return plan
