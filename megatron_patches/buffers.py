"""One HybridEPBuffer per (process group, hidden, dtype, experts per rank), shared by all layers that fit it.

A buffer is created at the first dispatch, when the number of tokens is known; all ranks of the group arrive
there together, because dispatch itself is collective. Layers take turns on a buffer: handles outlive the
next call.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import torch
import torch.distributed as dist

from hybrid_ep import env
from hybrid_ep.balance import MicrobatchOptions
from hybrid_ep.runtime import places, topology
from hybrid_ep.runtime.bootstrap import GroupView, Rendezvous
from hybrid_ep.runtime.options import asked_executor

if TYPE_CHECKING:
    from hybrid_ep import HybridEPBuffer
    from megatron_patches.settings import Exchange, Settings

T = TypeVar("T")
_Key = tuple[dist.ProcessGroup, int, torch.dtype, int, "Settings", frozenset[tuple[str, int]]]
_buffers: dict[_Key, HybridEPBuffer] = {}  # (group, hidden, dtype, experts per rank, settings, configured) -> buffer
_RANKS_PER_NODE = "ranks_per_node (--hybrid-ep-ranks-per-node)"
_alike: dict[dist.ProcessGroup, bool] = {}  # whether its ranks brought as many tokens as each other when first asked
_places: dict[dist.ProcessGroup, dict[places.Asked, places.Places]] = {}  # by group and what its layers ask for


def get(
    group: dist.ProcessGroup,
    *,
    hidden: int,
    dtype: torch.dtype,
    num_local_experts: int,
    num_tokens: int,
    wanted: Settings,
    num_sms: int | None = None,
    configured: dict[str, int] | None = None,
) -> HybridEPBuffer:
    """The shared buffer for this shape, created if new.

    group: torch process group of the tensor x expert parallel ranks. hidden: elements of a row. num_tokens: rows
    of this call; the buffer grows by itself when a later call brings more. wanted: the layer's `Settings`.
    num_sms: Megatron's wish; that of `wanted` and a tuning file win. configured: arguments of the buffer that
    Megatron's configuration decides."""
    configured = configured or {}
    key = (group, hidden, dtype, num_local_experts, wanted, frozenset(configured.items()))
    if key not in _buffers:
        _buffers[key] = _create(group, hidden, num_tokens, num_local_experts, num_sms, wanted, configured)
    return _buffers[key]


def tokens_alike(group: dist.ProcessGroup, num_tokens: int, wanted: Settings) -> bool:
    """Whether all ranks of a group bring as many tokens [T] as this one. Collective in its first call, by which later
    ones go; rank 0 says where they do not."""
    if group not in _alike:
        view, limit = GroupView.of(group), wanted.exchange.longest_wait_s
        said = Rendezvous(view, limit).exchange("tokens of a micro-batch", num_tokens)
        _alike[group] = len(set(said)) == 1
        if not _alike[group] and view.rank == 0:
            print(
                f"hybrid_ep: ranks of a group of {view.size} bring {min(said)} to {max(said)} tokens in a micro-batch, "
                f"so that none of them takes the latency path (latency_tokens={wanted.exchange.latency_tokens})",
                file=sys.stderr,
                flush=True,
            )
    return _alike[group]


# The buffer of the layer between its dispatch and its combine, with hidden and dtype of its rows: one at a time, for a
# forward is over before the next one begins, also where schedules put backwards in between.
_serving: tuple[HybridEPBuffer, int, torch.dtype] | None = None


def serve(buffer: HybridEPBuffer | None, hidden: int = 0, dtype: torch.dtype = torch.float32) -> None:
    """Note that a layer has dispatched rows [P, hidden] on this buffer; None: that it combines them."""
    global _serving
    _serving = None if buffer is None else (buffer, hidden, dtype)


def place(hidden: int, dtype: torch.dtype) -> HybridEPBuffer | None:
    """The buffer in whose memory experts' outputs, and gradients of dispatched rows, of this width and type are read in
    place. None where no layer is between dispatch and combine with such rows, or its buffer lends no memory."""
    if _serving is None or _serving[1:] != (hidden, dtype):
        return None
    return _serving[0] if all(hasattr(_serving[0], name) for name in ("empty", "registered")) else None


def registered_rows(function: Callable[[], T], rows: int) -> T:
    """function(), a product of somebody else's that puts out so many rows of the layer that is being served: there, if
    they have room. Just function() where no layer is, or its buffer lends no memory."""
    lender = None if _serving is None else place(*_serving[1:])
    return function() if _serving is None or lender is None else lender.registered(function, rows, *_serving[1:])


def _create(
    group: dist.ProcessGroup,
    hidden: int,
    num_tokens: int,
    num_local_experts: int,
    num_sms: int | None,
    wanted: Settings,
    configured: dict[str, int] | None = None,
) -> HybridEPBuffer:
    asked = wanted.exchange
    buffer_class = asked.buffer_class
    if buffer_class is None:
        from hybrid_ep import HybridEPBuffer

        buffer_class = HybridEPBuffer
    tuning = asked.tuning if asked.tuning is not None else env.get("HYBRID_EP_TUNING")
    # Megatron's own number has a default and so is not a wish: a tuning file knows better.
    sms = asked.num_sms if asked.num_sms is not None or tuning is not None else num_sms
    options = {
        "num_sms_dispatch_api": sms,
        "num_sms_combine_api": sms,
        "tuning": tuning,
        "timeout_s": asked.timeout_s,
        "num_of_hybrid_ep_ranks_per_nvlink_domain": asked.ranks_per_node,
        "latency_tokens": asked.latency_tokens,
        "arena_mib": asked.arena_mib,
        "clones": _clones(group, wanted),
        **(configured or {}),
    }
    return buffer_class(
        group=group,
        hidden_dim=hidden + -hidden % 8,  # room to begin with, which a buffer counts in rows of 2-byte values
        max_num_of_tokens_per_rank=max(num_tokens, 1),
        num_local_experts=num_local_experts,
        **{name: value for name, value in options.items() if value is not None},
    )


def _clones(group: dist.ProcessGroup, wanted: Settings) -> MicrobatchOptions | None:
    """What the buffer plans clones by, where the balancer wants some; its layers have found the nodes already."""
    if not wanted.balance.clones:
        return None
    return MicrobatchOptions(**wanted.balance.planner_options(num_nodes(group, wanted)))


def num_nodes(group: dist.ProcessGroup, wanted: Settings) -> int:
    """Nodes that the group's ranks lie on: by the declared number of ranks per node, of `wanted` or of the
    environment, else NVLink domains on GPUs and hosts elsewhere.

    Layers ask when they are built, so that a job that cannot run ends there. Collective at the first layer of a group,
    through the group's store. ValueError when the group straddles nodes unevenly or its ranks were told different
    things, BootstrapError when ranks are missing."""
    view, known = GroupView.of(group), _places.setdefault(group, {})
    found = places.find(view, partial(_asked, wanted.exchange), known, "Megatron's dispatcher", _RANKS_PER_NODE)
    return found.topology(view.rank).num_nodes


def _asked(exchange: Exchange, view: GroupView) -> places.Asked:
    declared, origin = exchange.ranks_per_node, _RANKS_PER_NODE
    if declared is None:
        declared, origin = topology.requested_ranks_per_node(None)
    return places.Asked(asked_executor(None, view), declared, origin, exchange.longest_wait_s)


def release() -> None:
    """Forget all buffers and free those that offer to be freed; the balancer's shared slots and weights that others
    read go with them."""
    _places.clear()
    _alike.clear()
    serve(None)
    for name in ("balance_kernels", "balance_push", "weights"):
        module = sys.modules.get(f"megatron_patches.{name}")
        if module is not None:
            module.release()
    while _buffers:
        _, buffer = _buffers.popitem()
        destroy = getattr(buffer, "destroy", None)
        if destroy is not None:
            destroy()


def live() -> tuple[HybridEPBuffer, ...]:
    """The buffers in use, oldest first."""
    return tuple(_buffers.values())


def describe() -> tuple[str, ...]:
    """One line a buffer, and one for each set of spare slots."""
    slots = sys.modules.get("megatron_patches.balance_kernels")
    return (*_lines(), *(slots.describe() if slots is not None else ()))


def _lines() -> Iterator[str]:
    yield from (
        f"{type(buffer).__name__}: {group.size()} ranks, hidden {hidden}, {dtype}, {experts} experts a rank"
        for (group, hidden, dtype, experts, *_), buffer in _buffers.items()
    )
