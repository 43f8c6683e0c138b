"""The event engine: this library's kernels, all ranks, on the virtual clock of `world`, with a cluster's costs.

A world's cost in real time is its rows. One that is too large is run twice with fewer tokens, and its time continued
along the line through both: every phase of an exchange is linear in tokens once its pipeline is full
(docs/performance_model.md has the check against full runs)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from hybrid_ep.hardware.clusters import Cluster
from hybrid_ep.perf.costs import event_costs
from hybrid_ep.perf.implementations import HYBRID_EP
from hybrid_ep.perf.model import OPS, permute_blocks
from hybrid_ep.perf.shape import Shape
from hybrid_ep.perf.trace import TrackSpan

if TYPE_CHECKING:
    from hybrid_ep.explorer.world import World

# Rows delivered: in a world of some ten seconds of one core, in the largest of some minutes, in one that is traced.
QUICK_ROWS, ROW_BUDGET, _TRACE_ROWS = 300_000, 1_000_000, 12_000
_TRACE_SPANS = 200_000  # beyond it the trace holds the first ranks only
KERNELS = {"dispatch": ("exchange", "dispatch"), "combine": ("combine",)}
_ASIDE, _FIRST_PAIR = 0, 2  # where rows of a dispatch land: csrc/sim/world_spec.h


@dataclass(frozen=True)
class Events:
    """Times in microseconds by operation, from the first launch's start to the last one's end over all ranks.
    simulated_tokens: of the largest world that ran; `exact` when that is what was asked. link_us: busy time of the
    busiest port by link. link_bytes: largest over ranks, of the largest world. role_share: of its blocks' time."""

    time_us: dict[str, float]
    kernel_us: dict[str, float]
    simulated_tokens: int
    exact: bool
    link_us: dict[str, float]
    link_bytes: dict[str, int]
    role_us: dict[str, float]
    spans: tuple[TrackSpan, ...] = field(default=(), repr=False)


def missing() -> str | None:
    """Why there is no event engine here, or None."""
    try:
        from hybrid_ep import _core
    except ImportError as error:
        return f"the compiled core is missing ({error})"
    return None if hasattr(_core, "simulate") else "this build of the core has no simulator"


def rows(shape: Shape) -> int:
    """Rows that a world of this shape delivers and forwards: what its simulation costs."""
    return shape.tokens * min(shape.topk, shape.ranks) * shape.ranks * (2 if shape.nodes > 1 else 1)


def measure(
    shape: Shape,
    cluster: Cluster,
    *,
    num_sms: int,
    chunk: int = HYBRID_EP.chunk,
    dtype: str = "bf16",
    choices: np.ndarray | None = None,
    row_budget: int = ROW_BUDGET,
    permute_sms: int | None = None,
    landed: bool = True,
    in_place: bool = False,
) -> Events:
    """One dispatch and one combine of all ranks. choices: int [ranks, tokens, topk], default drawn uniformly.
    num_sms, permute_sms, landed: as in `model.predict`. in_place: experts' outputs lie where combine may read them, by
    a token's only pair on a rank. ValueError for what the simulator refuses; MemoryError for a world too large for this
    machine; RuntimeError when its kernels failed, which no routing may cause."""
    if why := missing():
        raise ValueError(f"engine=events: {why}; use engine=model or build the core")
    blocks = _blocks(cluster, num_sms, permute_sms)
    most = max(64, row_budget * shape.tokens // rows(shape))
    available = shape.tokens if choices is None else min(shape.tokens, choices.shape[1])
    if available == shape.tokens <= most:  # a sample of drawn choices cannot be run whole
        return _events(shape, cluster, blocks, chunk, dtype, choices, landed, in_place, False)
    # whole rounds of chunks over blocks, so that both worlds end alike; two of them at least. A block of one node forms
    # two sums at once.
    round_ = num_sms * chunk * (2 if shape.nodes == 1 else 1)
    rounds = max(2, min(most, available) // round_)
    if rounds * round_ > available:
        if available < shape.tokens:
            raise ValueError(
                f"choices of shape {choices.shape if choices is not None else None} are of {available} tokens a rank: "
                f"give at least {rounds * round_} to continue their times to {shape.tokens}, or a shape of {available}"
            )
        return _events(shape, cluster, blocks, chunk, dtype, choices, landed, in_place, False)
    large, less = rounds * round_, rounds // 2 * round_
    small = _events(shape.with_(tokens=less), cluster, blocks, chunk, dtype, choices, landed, in_place, False)
    full = _events(shape.with_(tokens=large), cluster, blocks, chunk, dtype, choices, landed, in_place, False)
    ratio = (shape.tokens - large) / (large - less)

    def extend(a: dict[str, Any], b: dict[str, Any]) -> dict[str, Any]:
        return {k: b[k] + (b[k] - a.get(k, 0)) * ratio for k in b}

    return Events(
        extend(small.time_us, full.time_us),
        extend(small.kernel_us, full.kernel_us),
        large,
        False,
        extend(small.link_us, full.link_us),
        extend(small.link_bytes, full.link_bytes),
        extend(small.role_us, full.role_us),
    )


def timeline(
    shape: Shape,
    cluster: Cluster,
    *,
    num_sms: int,
    chunk: int = HYBRID_EP.chunk,
    dtype: str = "bf16",
    choices: np.ndarray | None = None,
    permute_sms: int | None = None,
    landed: bool = True,
    in_place: bool = False,
) -> Events:
    """The same with every use of every link, of as many tokens as a trace can show (`simulated_tokens`)."""
    if why := missing():
        raise ValueError(f"engine=events: {why}; use engine=model or build the core")
    blocks = _blocks(cluster, num_sms, permute_sms)
    tokens = min(shape.tokens, max(32, _TRACE_ROWS * shape.tokens // rows(shape)))
    return _events(shape.with_(tokens=tokens), cluster, blocks, chunk, dtype, choices, landed, in_place, True)


def spec_of(
    shape: Shape,
    cluster: Cluster,
    *,
    num_sms: int,
    chunk: int = HYBRID_EP.chunk,
    dtype: str = "bf16",
    permute_sms: int | None = None,
    landed: bool = True,
    in_place: bool = False,
) -> dict[str, int]:
    """The world that `measure` runs whole: for `explorer.world.measure`, with other costs than `costs_of` or one
    operation alone."""
    return _spec(shape, cluster, _blocks(cluster, num_sms, permute_sms), chunk, dtype, landed, in_place)


def costs_of(shape: Shape, cluster: Cluster, dtype: str = "bf16") -> dict[str, int]:
    """The costs that `measure` gives such a world."""
    return event_costs(cluster, HYBRID_EP.link_row_bytes(shape, dtype, "dispatch"), shape)


def _blocks(cluster: Cluster, num_sms: int, permute_sms: int | None) -> tuple[int, int, int]:
    there, back = (permute_blocks(cluster, num_sms, permute_sms, op) for op in OPS)
    return num_sms, there, back


def _spec(
    shape: Shape, cluster: Cluster, blocks: tuple[int, int, int], chunk: int, dtype: str, landed: bool, in_place: bool
) -> dict[str, int]:
    """blocks: that feed links, and for local work of a dispatch and of a combine."""
    from hybrid_ep.explorer import world

    payload = 2 * shape.hidden if dtype == "bf16" else shape.hidden
    scales = 0 if dtype == "bf16" else -(-int(shape.row_bytes(dtype) - payload) // 16) * 16
    if dtype not in ("bf16", "fp8"):
        raise ValueError(f"dtype={dtype!r}: the event engine moves bf16 or fp8 rows; use engine=model")
    return world.spec_of(
        looks=shape.nodes == 1 and cluster.gpu.generation == "blackwell",  # sm_90a's and NVSHMEM's kernels do not
        num_nodes=shape.nodes,
        num_local_ranks=shape.ranks_per_node,
        experts_per_rank=shape.local_experts,
        tokens=shape.tokens,
        topk=shape.topk,
        hidden=shape.hidden,
        row_bytes=payload,
        scale_bytes=scales,
        chunk_tokens=chunk,
        rail_slots=HYBRID_EP.rail_slots(shape),
        num_blocks=blocks[0],
        permute_blocks=blocks[1],
        unpermute_blocks=blocks[2],
        landing=_FIRST_PAIR if landed else _ASIDE,
        reading=int(in_place),
        smem_bytes=int(cluster.gpu.smem_kib.value) * 1024,
    )


def _events(
    shape: Shape,
    cluster: Cluster,
    blocks: tuple[int, int, int],
    chunk: int,
    dtype: str,
    choices: np.ndarray | None,
    landed: bool,
    in_place: bool,
    trace: bool,
) -> Events:
    from hybrid_ep.explorer import world

    spec = _spec(shape, cluster, blocks, chunk, dtype, landed, in_place)
    given: Sequence[Sequence[int]] = ()
    if choices is not None:
        given = [choices[r, : shape.tokens].ravel().tolist() for r in range(shape.ranks)]
    got = world.measure(spec, costs_of(shape, cluster, dtype), trace=trace, topk_idx=given)
    world.require_whole(got)
    link_us: dict[str, float] = {}
    for link in got.links:
        link_us[link.name] = max(link_us.get(link.name, 0.0), link.busy_us)
    roles: dict[str, float] = {}
    for role in got.roles:
        roles[role.name] = max(roles.get(role.name, 0.0), role.busy_us / (blocks[0] + max(blocks[1:])))
    names = {k.name for k in got.kernels}
    return Events(
        {op: got.operation_us(*kernels) for op, kernels in KERNELS.items()},
        {n: got.kernel_us(n) for n in names},
        shape.tokens,
        True,
        link_us,
        {name: max(by.values()) for name, by in got.link_bytes().items()},
        roles,
        tuple(_spans(got)) if trace else (),
    )


def _spans(got: World) -> list[TrackSpan]:
    """Tracks: of each rank its kernels, its blocks' roles by link, its ports."""
    spans = [TrackSpan(f"rank {k.rank}", "kernels", k.name, k.start_us, k.time_us, {}) for k in got.kernels]
    ranks = max(k.rank for k in got.kernels) + 1
    shown = max(1, min(ranks, _TRACE_SPANS * ranks // max(1, len(got.spans))))
    lanes: dict[tuple[int, str], list[float]] = {}
    for s in sorted(got.spans, key=lambda s: s.start_us):
        if s.link == "kernel" or s.rank >= shown:
            continue
        # the SM's own copy path by role; of the ports, what this rank's lanes made them do
        base = f"block {s.block:03d} {s.role} {s.link}" if s.link.startswith("tma") else s.link
        # a link that serves several at once gets as many tracks as overlap
        ends = lanes.setdefault((s.rank, base), [])
        lane = next((i for i, end in enumerate(ends) if end <= s.start_us + 1e-9), len(ends))
        ends[lane : lane + 1] = [s.end_us]
        track = base if lane == 0 else f"{base} ({lane + 1})"
        spans.append(
            TrackSpan(
                f"rank {s.rank}",
                track,
                s.operation,
                s.start_us,
                s.end_us - s.start_us,
                {"role": s.role, "block": s.block, "bytes": s.num_bytes},
            )
        )
    return spans
