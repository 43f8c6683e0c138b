"""Where a buffer's registered bytes go, exact to the byte."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hybrid_ep import _core


# What the large regions are there for, beside their bytes.
_PURPOSES = {
    "clone_counts": "tokens of every rank by logical expert, for plan_clones",
    "latency_slabs": "rows of the latency path, of every rank, two steps of them",
    "rail_send_ring": "chunks of tokens on their way to other nodes",
    "rail_receive_ring": "and from them",
    "receive_rows": "metadata; partial sums of combine; rows without room in the arena, copied once more",
    "spare_weights": "weights of clones, a stack of spare slots for every matrix of an expert",
    "spare_gradients": "their gradients in fp32",
    "spare_channel_rings": "chunks of both on their way along rails, 4 to 64 a channel, direction and end",
    "arena": "results, where rows land to stay",
}


@dataclass(frozen=True)
class MemoryReport:
    """Registered memory of one rank. regions: bytes by name, in the order they lie in the segment, and behind it an
    arena that lies apart, as GPUs' do; padding_bytes: between and after them; total_bytes: of all; mapped_bytes:
    address space that this rank maps: every rank's segment, and the arenas of its node where they lie apart."""

    regions: dict[str, int]
    padding_bytes: int
    total_bytes: int
    mapped_bytes: int

    def __str__(self) -> str:
        rows = [*self.regions.items(), ("padding", self.padding_bytes), ("total", self.total_bytes)]
        return "\n".join(f"{name:<24}{num_bytes:>20,}  {_PURPOSES.get(name, '')}".rstrip() for name, num_bytes in rows)


def report(shape: _core.BufferShape, num_ranks: int) -> MemoryReport:
    """From the layout itself: regions() and the two sums of the compiled core's shape."""
    regions: dict[str, int] = {}
    for name, _, num_bytes in shape.regions():
        regions[name] = regions.get(name, 0) + num_bytes
    apart = shape.total_bytes - shape.segment_bytes
    mapped = shape.segment_bytes * num_ranks + apart * shape.num_local_ranks
    return MemoryReport(regions, shape.total_bytes - sum(regions.values()), shape.total_bytes, mapped)
