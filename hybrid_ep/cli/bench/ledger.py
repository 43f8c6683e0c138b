"""The bytes of a case in closed form: what must be delivered, and what each way of delivering it moves.

Payload and quantisation scales; weights, counts and padding are left out. All numbers are per rank and for one
dispatch; combine moves the same rows the other way, in the width of the sum's dtype.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import comb

import torch

from hybrid_ep.cli.bench.routing import Routing

# How an implementation puts rows on the wire:
# hierarchical - once per (token, remote node) over the rail, then once per (token, rank) inside the node;
# per-rank     - once per (token, rank), straight from source to destination;
# per-expert   - once per (token, expert), straight from source to destination.
WIRES = ("hierarchical", "per-rank", "per-expert")

# How often an operation moves rows as they are dispatched, and as they are summed. What is under STAGES never leaves
# a rank.
_MOVES = {
    "route": (0, 0),
    "dispatch": (1, 0),
    "permute": (1, 0),
    "unpermute": (0, 1),
    "combine": (0, 1),
    "pair": (1, 1),
    "chain": (1, 1),
    "step": (1, 3),
}  # a step's backward is not quantised
STAGES = ("route", "permute", "unpermute")


@dataclass(frozen=True)
class Traffic:
    """Bytes that each rank puts on the rail (to another node), on the node (to another rank), on itself."""

    rail: tuple[int, ...]
    node: tuple[int, ...]
    self_: tuple[int, ...]


@dataclass(frozen=True)
class Ledger:
    """Rows and bytes of one case, index = rank."""

    row_bytes: int  # of a dispatched row, its scales included
    sum_row_bytes: int  # of a row that combine moves
    num_nodes: int
    token_rows: tuple[int, ...]  # tokens that the rank holds before dispatch
    recv_rows: tuple[int, ...]  # distinct tokens that the rank receives, its own included
    permuted_rows: tuple[int, ...]  # (token, local expert) pairs: rows of the expert-major layout
    node_pairs: tuple[int, ...]  # (token, node) pairs of the rank's tokens, own node included
    rail_pairs: tuple[int, ...]  # (token, node) pairs of the rank's tokens, own node excluded
    traffic: dict[str, Traffic]  # key: one of WIRES

    @property
    def size_bytes(self) -> list[int]:
        """Deduplicated received payload of each rank, its own tokens included (algbw's numerator)."""
        return [rows * self.row_bytes for rows in self.recv_rows]

    @property
    def logical_bytes(self) -> list[int]:
        """DeepEP's "logical" bytes: several nodes: (token, node) pairs sent, own node included;
        one node: rows received, own tokens included."""
        rows = self.node_pairs if self.num_nodes > 1 else self.recv_rows
        return [count * self.row_bytes for count in rows]

    def link_rows(self, wire: str) -> dict[str, int]:
        """Rows on each kind of link in one dispatch, all ranks together."""
        traffic = self.traffic[wire]
        by_link = {"rail": traffic.rail, "node": traffic.node, "self": traffic.self_}
        return {link: sum(counts) // self.row_bytes for link, counts in by_link.items()}

    def bottleneck_bytes(self, wire: str) -> list[int]:
        """Bytes that cross the scarcest link (busbw's numerator): the rail, or with one node the node."""
        traffic = self.traffic[wire]
        return list(traffic.rail if self.num_nodes > 1 else traffic.node)

    def floor_bytes(self, op: str, permute: bool) -> int:
        """Memory traffic (reads + writes, all ranks) without which `op` cannot be done by anybody:
        each input row read once, each output row written once."""
        outputs = self.permuted_rows if permute else self.recv_rows
        one_way = (sum(self.token_rows) + sum(outputs)) * self.row_bytes
        return round(one_way * self.directions(op))

    def one_pass_bytes(self, op: str, permute: bool) -> int:
        """Memory traffic (all ranks) where rows land where experts read them, and are summed where experts wrote them:
        the floor, and rail rows written and read once more between nodes."""
        return self.floor_bytes(op, permute) + round(2 * sum(self.rail_pairs) * self.row_bytes * self.directions(op))

    def directions(self, op: str) -> float:
        """Bytes that `op` moves over those of one dispatch."""
        dispatched, summed = _MOVES[op]
        return dispatched + summed * self.sum_row_bytes / self.row_bytes

    @property
    def imbalance(self) -> float:
        """(max - mean) / mean of (token, expert) pairs over ranks."""
        mean = sum(self.permuted_rows) / len(self.permuted_rows)
        return max(self.permuted_rows) / mean - 1 if mean else 0.0

    def staged_bytes(self, op: str, permute: bool) -> int:
        """Memory traffic (all ranks) of a hierarchical data path that stores rows aside and copies them, if no row
        stays in a cache: rail rows read and written, delivered rows read and written, and, with permute, delivered
        rows read again and permuted rows written."""
        rows = 2 * sum(self.rail_pairs) + 2 * sum(self.recv_rows)
        if permute:
            rows += sum(self.recv_rows) + sum(self.permuted_rows)
        return round(rows * self.row_bytes * self.directions(op))


def hit_ranks(routing: Routing, num_experts: int, num_ranks: int) -> torch.Tensor:
    """bool [num_tokens, num_ranks]: the token has at least one expert on the rank."""
    ranks = routing.topk_idx // (num_experts // num_ranks)
    return torch.zeros(routing.num_tokens, num_ranks, dtype=torch.bool, device="cpu").scatter_(1, ranks, True)


def expected_groups(num_groups: int, num_experts: int, topk: int) -> float:
    """Expected distinct groups that a token reaches when its `topk` experts are drawn uniformly:
    G (1 - C(E - E/G, k) / C(E, k)), with experts spread evenly over G groups."""
    outside = num_experts - num_experts // num_groups
    return num_groups * (1 - comb(outside, topk) / comb(num_experts, topk))


def build_ledger(
    routings: list[Routing], num_experts: int, num_local_ranks: int, row_bytes: int, sum_row_bytes: int | None = None
) -> Ledger:
    """Count every row of a case. Rank r is local rank r % L of node r // L, L = `num_local_ranks`. sum_row_bytes:
    default row_bytes."""
    num_ranks = len(routings)
    num_nodes = num_ranks // num_local_ranks
    num_local_experts = num_experts // num_ranks
    pairs = torch.zeros(num_ranks, num_ranks, dtype=torch.int64, device="cpu")  # [source, destination] (token, expert)
    deliveries = torch.zeros_like(pairs)  # [source, destination] (token, rank)
    node_pairs = torch.zeros(num_ranks, num_nodes, dtype=torch.int64, device="cpu")  # [source, node] (token, node)
    for source, routing in enumerate(routings):
        hits = hit_ranks(routing, num_experts, num_ranks)
        deliveries[source] = hits.sum(0)
        node_pairs[source] = hits.view(-1, num_nodes, num_local_ranks).any(2).sum(0)
        pairs[source] = torch.bincount((routing.topk_idx // num_local_experts).flatten(), minlength=num_ranks)
    ranks = torch.arange(num_ranks, dtype=torch.int64, device="cpu")
    own_node = ranks // num_local_ranks
    rail_pairs = node_pairs.sum(1) - node_pairs[ranks, own_node]
    return Ledger(
        row_bytes=row_bytes,
        sum_row_bytes=row_bytes if sum_row_bytes is None else sum_row_bytes,
        num_nodes=num_nodes,
        token_rows=tuple(routing.num_tokens for routing in routings),
        recv_rows=tuple(deliveries.sum(0).tolist()),
        permuted_rows=tuple(pairs.sum(0).tolist()),
        node_pairs=tuple(node_pairs.sum(1).tolist()),
        rail_pairs=tuple(rail_pairs.tolist()),
        traffic={
            "hierarchical": _hierarchical(deliveries, rail_pairs, num_local_ranks, row_bytes),
            "per-rank": _direct(deliveries, num_local_ranks, row_bytes),
            "per-expert": _direct(pairs, num_local_ranks, row_bytes),
        },
    )


def _direct(rows: torch.Tensor, num_local_ranks: int, row_bytes: int) -> Traffic:
    """Every row goes from its source straight to its destination; `rows` is [source, destination]."""
    nodes = torch.arange(rows.shape[0], dtype=torch.int64, device="cpu") // num_local_ranks
    same_node = nodes.unsqueeze(1) == nodes.unsqueeze(0)
    itself = rows.diagonal()
    rail = (rows * ~same_node).sum(1)
    node = (rows * same_node).sum(1) - itself
    return Traffic(*(tuple((count * row_bytes).tolist()) for count in (rail, node, itself)))


def _hierarchical(deliveries: torch.Tensor, rail_pairs: torch.Tensor, num_local_ranks: int, row_bytes: int) -> Traffic:
    """Inside a node the rank on the token's rail hands out all rows, also those that came over the rail."""
    num_ranks = deliveries.shape[0]
    num_nodes = num_ranks // num_local_ranks
    # [source node, local rank, destination node, destination local rank] summed over source nodes
    by_rail = deliveries.view(num_nodes, num_local_ranks, num_nodes, num_local_ranks).sum(0)
    handed_out = by_rail.permute(1, 0, 2).reshape(num_nodes, num_local_ranks, num_local_ranks)
    itself = handed_out.diagonal(dim1=1, dim2=2)  # [destination node, local rank]
    node = handed_out.sum(2) - itself
    return Traffic(
        tuple((rail_pairs * row_bytes).tolist()),
        tuple((node.reshape(-1) * row_bytes).tolist()),
        tuple((itself.reshape(-1) * row_bytes).tolist()),
    )
