"""One MoE exchange in numbers: who takes part, how many tokens, how wide, routed to how many experts."""

from __future__ import annotations

from dataclasses import dataclass, replace

from hybrid_ep.perf import remedies

# Payload and scale bytes of a row, by dtype. fp8 carries one fp32 scale per 128 elements, mxfp8 one byte per 32,
# nvfp4 one byte per 16 elements of half a byte.
_ELEMENT = {"bf16": (2.0, 0.0), "fp8": (1.0, 4 / 128), "mxfp8": (1.0, 1 / 32), "nvfp4": (0.5, 1 / 16)}
DTYPES = tuple(_ELEMENT)


def element_bytes(dtype: str) -> float:
    """Bytes of an element on the wire, its share of the scales included. ValueError for an unknown dtype."""
    if dtype not in _ELEMENT:
        raise ValueError(f"dtype={dtype!r}: use one of {', '.join(DTYPES)}")
    return sum(_ELEMENT[dtype])


def scale_bytes(dtype: str, hidden: int) -> int:
    """Bytes of the scales that travel beside a row, in whole units of 16; 0 of a row that has none."""
    return -(-int(_ELEMENT[dtype][1] * hidden) // 16) * 16


@dataclass(frozen=True)
class Shape:
    """ranks: of the EP group; ranks_per_node: of one NVLink domain; tokens: of each rank; experts: of the group.

    ValueError names argument, value and remedy."""

    ranks: int
    ranks_per_node: int
    tokens: int
    hidden: int
    topk: int
    experts: int

    def __post_init__(self) -> None:
        for name, least in (("ranks", 1), ("ranks_per_node", 1), ("tokens", 1), ("hidden", 8), ("topk", 1)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ValueError(f"{name}={value!r} must be an integer of at least {least}")
        if self.ranks % self.ranks_per_node:
            raise ValueError(f"ranks_per_node={self.ranks_per_node} must divide ranks={self.ranks}")
        if self.experts < self.ranks or self.experts % self.ranks:
            raise ValueError(
                f"experts={self.experts} must be a positive multiple of ranks={self.ranks}; "
                f"{remedies.multiple('experts', self.experts, self.ranks)}"
            )
        if self.topk > self.experts:
            raise ValueError(f"topk={self.topk} must be at most experts={self.experts}")
        if self.hidden % 8:
            raise ValueError(
                f"hidden={self.hidden} must be a multiple of 8, so that a row is whole 16-byte units; "
                f"{remedies.multiple('hidden', self.hidden, 8)}"
            )

    @property
    def nodes(self) -> int:
        return self.ranks // self.ranks_per_node

    @property
    def local_experts(self) -> int:
        return self.experts // self.ranks

    def row_bytes(self, dtype: str) -> float:
        """Payload and scales of one token; what published bandwidths count."""
        return self.hidden * element_bytes(dtype)

    def with_(self, **changes: int) -> Shape:
        return replace(self, **changes)
