"""Microseconds that clones of a layer take of a micro-batch: what goes from rank to rank, by ports and by what the
kernels have on its way, and what of it grouped experts hide. All of it a prediction."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np

from hybrid_ep.balance import MicrobatchPlan
from hybrid_ep.balance.relays import relays
from hybrid_ep.perf import efficiency
from hybrid_ep.perf.step_time import Job
from hybrid_ep.spares import COLLECT_BLOCKS, PUSH_BLOCKS, PUSH_BLOCKS_OF_NODES

WEIGHT_BYTES, GRADIENT_BYTES = 2, 4  # a parameter
# Of the kernels between nodes (csrc/kernels/spare_rails.h, csrc/layout/spare_channels.h): bytes of a chunk, of what a
# warp loads of a copy together, and of how many copies; warps that post for a channel.
CHUNK, LOADS, COPIES, POSTING = 32 * 1024, 4096, 2, 4
OWNER_WARPS, HOLDER_WARPS = 4, 2  # of a block that goes along rails, which two thirds of a launch's do


@dataclass(frozen=True)
class Pushes:
    """Microseconds that clones and moved experts of a layer take of a micro-batch. there_us: weights to the slots,
    once; back_us: gradients home; own, load: rows of each rank's own experts, and all that it computes, over the mean;
    blocks: of a launch that pushes."""

    there_us: float = 0.0
    back_us: float = 0.0
    moved_us: float = 0.0
    own: np.ndarray = field(default_factory=lambda: np.ones(1))
    load: np.ndarray = field(default_factory=lambda: np.ones(1))
    blocks: int = PUSH_BLOCKS

    @property
    def all_us(self) -> float:
        return 2 * self.there_us + self.back_us + self.moved_us


Move = tuple[int, int, float]  # (from, to, bytes)


def port_us(moves: list[Move], job: Job) -> float:
    """Busy time of the busiest port: NVLink inside a node, the NIC between nodes."""
    shape = job.shape
    at = {"nvlink": np.zeros((2, shape.ranks)), "nic": np.zeros((2, shape.ranks))}
    for source, target, num_bytes in moves:
        kind = "nvlink" if source // shape.ranks_per_node == target // shape.ranks_per_node else "nic"
        at[kind][0, source] += num_bytes
        at[kind][1, target] += num_bytes
    rate = {"nvlink": job.cluster.gpu.nvlink_rate, "nic": job.cluster.nic.rate if at["nic"].any() else 1.0}
    return max(float(at[kind].max()) / (rate[kind] * 1e3) for kind in at)


def by_rails(plan: MicrobatchPlan, width: int) -> Iterator[list[Move]]:
    """What torch sends of weights of one byte, step by step, as `megatron_patches.balance_relay` does."""
    part = 1 / width
    for relayed in relays(plan.slot_expert, plan.owner, width):
        scatter, rail, spread = [], [], []
        for relay in relayed:
            home = relay.owner // width
            for local in range(width):
                scatter.append((relay.owner, home * width + local, part))
                for node, clones in relay.nodes.items():
                    rail.append((home * width + local, node * width + local, part))
                    spread += [(node * width + local, rank, part) for rank, _ in clones]
        yield from ([move for move in moves if move[0] != move[1]] for moves in (scatter, rail, spread))


def by_holders(plan: MicrobatchPlan) -> Iterator[list[Move]]:
    """What the kernels store of weights of one byte: owners a part to each clone, these to one another."""
    scatter, spread = [], []
    for relay in itertools.chain(*relays(plan.slot_expert, plan.owner, len(plan.slot_expert))):
        (holders,) = ([rank for rank, _ in clones] for clones in relay.nodes.values())
        part = 1 / len(holders)
        scatter += [(relay.owner, rank, part) for rank in holders]
        spread += [(source, rank, part) for source in holders for rank in holders if source != rank]
    yield from (scatter, spread)


def pushes(plan: MicrobatchPlan, job: Job, kernels: bool = False) -> Pushes:
    """Weights to the slots, twice, and gradients home the same way back. No step begins before the one before has
    ended. kernels: between nodes the kernels push, else torch does; within a node they always do."""
    nodes, width = job.shape.nodes, job.shape.ranks_per_node
    within = nodes == 1 or plan.options.within_node
    together = kernels and not within
    steps = list(by_rails(plan, width)) if not within and not kernels else list(by_holders(at_home(plan, width)))
    params, times = job.model.expert_params, []
    for back, size in ((False, WEIGHT_BYTES * params), (True, GRADIENT_BYTES * params)):
        each = [port_us(sized(moves, size, back), job) for moves in steps]
        times.append(beside_rails_us(plan, job, size, back, each) if together else sum(each))
    load, cloned = plan.tokens_of_ranks(), np.where(plan.slot_expert >= 0, plan.slot_tokens, 0).sum(axis=1)
    blocks = PUSH_BLOCKS_OF_NODES if together else PUSH_BLOCKS
    return Pushes(*times, blocks=blocks, own=(load - cloned) / load.mean(), load=load / load.mean())


def sized(moves: list[Move], size: float, back: bool) -> list[Move]:
    return [(to, source, size * part) if back else (source, to, size * part) for source, to, part in moves]


def at_home(plan: MicrobatchPlan, width: int) -> MicrobatchPlan:
    """Without the clones on other nodes than their owners'."""
    slots = plan.slot_expert
    owners = np.where(slots >= 0, plan.owner[slots] // width, -1)
    return replace(plan, slot_expert=np.where(owners == np.arange(len(slots))[:, None] // width, slots, -1))


def beside_rails_us(plan: MicrobatchPlan, job: Job, size: float, back: bool, each: list[float]) -> float:
    """Some blocks serve the node, in its two steps (each), while others go along the rails, through the same ports; an
    owner adds its node's clones, the first step of the two, when those of the other nodes are added."""
    scatter, spread = by_holders(at_home(plan, job.shape.ranks_per_node))
    here = spread if back else scatter + spread
    beside_us, behind_us = (each[1], each[0]) if back else (sum(each), 0.0)
    ports_us = port_us(sized(here + crossing_moves(plan, job), size, back), job)
    return max(beside_us, ports_us, channels_us(plan, job, size, back)) + behind_us


def crossings(plan: MicrobatchPlan, width: int) -> list[tuple[int, int, list[int]]]:
    """(owner, node, ranks there that hold it) of each expert that goes to another node."""
    relayed = itertools.chain(*relays(plan.slot_expert, plan.owner, width))
    return [
        (relay.owner, node, [rank for rank, _ in relay.nodes[node]])
        for relay in relayed
        for node in set(relay.nodes) - {relay.owner // width}
    ]


def crossing_moves(plan: MicrobatchPlan, job: Job) -> list[Move]:
    """What the kernels between nodes move of weights of one byte: a stripe along each rail."""
    width = job.shape.ranks_per_node
    moves: list[Move] = []
    for owner, node, holders in crossings(plan, width):
        for here, there in ((owner // width * width + j, node * width + j) for j in range(width)):
            way = [(owner, here), (here, there), *((there, holder) for holder in holders)]
            moves += [(source, to, 1 / width) for source, to in way if source != to]
    return moves


def channels_us(plan: MicrobatchPlan, job: Job, size: float, back: bool) -> float:
    """Of the kernels between nodes: all their ports are busy at once, no channel, from an owner to a node along a rail,
    carries more than its ring holds while a chunk goes and its place comes back, or its warps post, and no rank moves
    more than the warps have that its end of the channels has."""
    width = job.shape.ranks_per_node
    crossing = crossings(plan, width)
    if not crossing:
        return 0.0
    copies = max(len(holders) for _, _, holders in crossing)
    round_us = chunk_round_us(job, copies, back)
    chunk_us = max(round_us / places(job.shape.nodes, width), job.cluster.nic.post_us.value / POSTING)
    of_owner = Counter(owner for owner, _, _ in crossing)
    of_node = Counter(node for _, node, _ in crossing)
    of_channel = Counter((owner, node) for owner, node, _ in crossing)
    blocks = COLLECT_BLOCKS if back else PUSH_BLOCKS_OF_NODES
    blocks -= blocks // 3
    owner_us, holder_us = (
        us / (blocks * warps) for us, warps in zip(end_us(job, copies, back), (OWNER_WARPS, HOLDER_WARPS), strict=True)
    )
    chunks = size / width / CHUNK  # of an expert's stripe
    return round_us + max(
        port_us(sized(crossing_moves(plan, job), size, back), job),
        max(of_channel.values()) * chunks * chunk_us,
        max(of_owner.values()) * width * chunks * owner_us,
        max(of_node.values()) * chunks * holder_us,
    )


def end_us(job: Job, copies: int, back: bool) -> tuple[float, float]:
    """What a warp takes with a chunk at the owner's end of a channel, and at the holders'."""
    gpu = job.cluster.gpu
    load_us = gpu.hbm_load_us.value + gpu.nvlink_latency_us.value
    if not back:  # a bulk copy by way of a stage, to another rank
        return load_us + gpu.fence_us.value, load_us + gpu.fence_us.value
    return CHUNK / LOADS * load_us, CHUNK / LOADS * load_us * math.ceil(copies / COPIES) + gpu.fence_us.value


def places(nodes: int, width: int) -> int:
    """Of a ring, as the core lays it out: chunks of a channel on their way."""
    return 1 << min(max(1024 // ((nodes - 1) * width), 4), 64).bit_length() - 1


def chunk_round_us(job: Job, copies: int, back: bool) -> float:
    """From when a chunk's place in a channel is free to when it is again: what one warp takes to move the chunk into
    the ring and out of it, a post and a trip along the rail there and back, flags within both nodes."""
    gpu, nic = job.cluster.gpu, job.cluster.nic
    flag_us = gpu.flag_us.value + gpu.nvlink_latency_us.value
    if back:  # loads over NVLink, of all copies, then of the sum and the gradient that it is added to
        ends = sum(end_us(job, copies, back))
    else:  # bulk copies by way of a stage
        ends = 2 * (gpu.hbm_load_us.value + gpu.fence_us.value)
    return ends + 2 * (nic.post_us.value + nic.latency_us.value) + 2 * flag_us


def shown_us(got: Pushes, job: Job) -> float:
    """What is seen of them beside grouped experts (`hybrid_ep.moe.grouped`). Of these products, forward and backward, a
    third each are rows, their gradients, and weight gradients, two thirds of each those of the first matrices.

    Forward: a rank with clones computes the first product of its own rows. Weights in the backward: all but the experts
    of the layer behind, which has had the slots, then the second product's gradients of own rows, and all of its weight
    gradients. Gradients home, from when the last rank has those of the first matrix: what is left of that product's
    backward. Dispatches hide nothing, for they take the same links. What is hidden takes SMs from what runs beside, one
    a block; nccl's kernels are charged as many as ours."""
    if not got.there_us:
        return got.moved_us
    token = efficiency.per_token(job.model, job.cluster, job.dtype, job.sequence)
    ninth = job.tokens * token.expert_gemms / 9
    clones = got.load - got.own
    holds = clones > 0
    hidden = (
        2 * ninth * got.own[holds].min(),
        2 / 3 * job.tokens * token.moe_others + ninth * (got.own + got.load)[holds].min(),
        max(0.0, ninth * (4 * got.load.min() - 2 * clones.max())),
    )
    shown = got.moved_us
    for time_us, beside_us, blocks in zip(
        (got.there_us, got.there_us, got.back_us), hidden, (got.blocks, got.blocks, COLLECT_BLOCKS), strict=True
    ):
        unseen = min(time_us, beside_us)
        shown += time_us - unseen + unseen * blocks / job.cluster.gpu.num_sms.value
    return shown
