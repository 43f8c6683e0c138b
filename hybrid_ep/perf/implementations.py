"""Who moves the rows, and with how much work: this library's kernels, and the published ones it is checked with.

The model is the same for all; an implementation says how often a row passes through an SM, what travels with it
on a link, how many stages load ahead, and what the call does beside its kernel."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from hybrid_ep import _core
from hybrid_ep.perf.shape import Shape, element_bytes


@dataclass(frozen=True)
class Implementation:
    """stage_rail: an SM copies each rail row into a send ring (else the NIC reads a staged copy of the input).
    local_pass: what the same launches do between received rows and the caller's tensors: "permute", "copy" (as they
    came) or "none". per_row_messages: work requests a rail row costs
    (0: one a chunk). pull_stages: rows in flight of one summing role, (one node, several). prologue_passes: times the
    input is copied before the kernel, several nodes. epilogue_passes: times the received rows are copied after it.
    launches: of the API call, (dispatch, combine), without that of an exchange. barriers: of the call."""

    name: str
    summary: str
    stage_rail: bool
    local_pass: Literal["permute", "copy", "none"]
    per_row_messages: int
    pull_stages: tuple[int, int]
    pulling_roles: tuple[int, int]
    prologue_passes: int
    epilogue_passes: int
    launches: tuple[int, int]
    barriers: int
    chunk: int  # rows of a rail message where nobody chose
    rail_ring: bool  # as many chunks in flight per rail peer as its ring holds; else a place for every token
    metadata: str  # what travels with a row: "record" (ours) or "probs" (weights of all experts of the node)
    # sums and the exchange take what sum_loops.py and route_time.py say of this library's code; else the time of sums
    # is in pull_us, and no exchange is charged
    compiled: bool

    def link_row_bytes(self, shape: Shape, dtype: str, op: str) -> float:
        """Bytes of one row on a link; its payload rounded up to 16."""
        payload = _align(shape.row_bytes(dtype))
        if op == "combine":
            return payload
        if self.metadata == "probs":
            return payload + 4 * shape.local_experts * shape.ranks_per_node
        dsts = min(shape.topk, shape.ranks_per_node)
        return payload + _align(16 + 8 * dsts + 8 * shape.topk) + _align(4 * shape.topk)

    def rail_slots(self, shape: Shape) -> int:
        """Chunks in flight per rail peer; 0: any number."""
        return _core.BufferShape.rail_slots_of(shape.nodes) if self.rail_ring else 0

    def rows_in_flight(self, shape: Shape) -> float:
        """Rows that one summing role has in flight."""
        return self.pull_stages[shape.nodes > 1] / self.sum_tiles(shape)

    def sum_tiles(self, shape: Shape) -> int:
        """Loads, each with a stage of its own, that a summing role makes of one row."""
        return 1 if self.metadata == "probs" else -(-shape.hidden // SUM_TILE_ELEMENTS)


SUM_TILE_ELEMENTS = _core.BufferShape.sum_tile_elements  # of a stage of the summing roles


def _align(number: float, to: int = 16) -> int:
    return -(-int(number) // to) * to


HYBRID_EP = Implementation(
    name="hybrid_ep",
    summary="this library: permute fused, one message a chunk, rail rows through a ring",
    stage_rail=True,
    local_pass="permute",
    per_row_messages=0,
    # combine.h, 227 KiB, bf16: stages of one tile; two summing roles share the memory of an SM
    pull_stages=(12, 12),
    pulling_roles=(2, 2),
    prologue_passes=0,
    epilogue_passes=0,
    launches=(1, 1),
    barriers=2,
    chunk=16,  # csrc/layout/buffer.h
    rail_ring=True,
    metadata="record",
    compiled=True,
)
PUBLISHED = Implementation(
    name="published_hybrid_ep",
    summary="NVIDIA's Hybrid-EP as its README measured it: no permute in the kernel, copies before and after",
    stage_rail=False,
    local_pass="none",
    per_row_messages=3,
    pull_stages=(5, 4),
    pulling_roles=(2, 2),
    prologue_passes=1,
    epilogue_passes=1,
    launches=(4, 4),
    barriers=2,
    chunk=64,  # its default
    rail_ring=False,
    metadata="probs",
    compiled=False,
)
# Its calls without permute: received rows still pass once more through the SMs, to and from the caller's tensors.
UNPERMUTED = replace(HYBRID_EP, name="hybrid_ep without permute", local_pass="copy")
LOCAL_GROUPS = 2  # summing roles of a block that does nothing but local work
GROUP_ROWS = 16  # receive rows that local work takes and waits for together: pipeline/landed_rows.h
IMPLEMENTATIONS = {i.name: i for i in (HYBRID_EP, PUBLISHED)}


def payload_share(shape: Shape, dtype: str) -> float:
    """Bytes of dtype over bytes of bf16."""
    return element_bytes(dtype) / element_bytes("bf16")
