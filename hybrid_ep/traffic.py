"""The closed form of the byte counters: what HybridEPBuffer.traffic() must say, from routing alone.

Every token crosses the rail once to each other node that needs it. There the rank of its rail hands it to each rank
that needs it: its metadata once, its row as often as that rank wants. Where results lie in registered memory (landed),
that is once for each chosen expert (on GPUs once, and the rank copies it for its others), else once, and the rank
copies it. combine is the same backwards, with one sum a rank, or, where the outputs of a host's rank lie in registered
memory, the row of each of the token's experts there. Nothing here looks at how the bytes really move."""

from __future__ import annotations

from collections.abc import Sequence

import torch

COUNTERS = (
    "rail_rows",
    "rail_bytes",
    "node_rows",
    "node_bytes",
    "self_rows",
    "self_bytes",
    "copied_rows",
    "copied_bytes",
    "partial_rows",
    "count_bytes",
)
_HEADER_WORDS = 16


def message_bytes(topk: int, num_local_ranks: int, row_bytes: int, scale_bytes: int = 0, weights: bool = True) -> int:
    """Bytes of one token on a link in dispatch: its record, weights, scales, payload; each 16-byte
    aligned."""
    return metadata_bytes(topk, num_local_ranks, weights) + _align(scale_bytes, 16) + row_bytes


def metadata_bytes(topk: int, num_local_ranks: int, weights: bool = True) -> int:
    """Of these, what is no row: the record and the weights."""
    return _align(16 + 8 * min(topk, num_local_ranks) + 8 * topk, 16) + (_align(4 * topk, 16) if weights else 0)


def partial_bytes(topk: int, hidden: int, element_bytes: int, weights: bool = False) -> int:
    """Bytes of one partial sum on a link in combine. element_bytes: 4 with fp32_partials."""
    return hidden * element_bytes + (_align(4 * topk, 16) if weights else 0)


def link_rows(routes: Sequence[torch.Tensor], num_local_ranks: int) -> list[dict[str, int]]:
    """rail, node and self rows of every rank in one dispatch. routes[r]: bool [T_r, num_experts].

    rail: of this rank's own tokens, to other nodes. node, self: copies that this rank makes, for every token
    of its rail that its node needs, to the other ranks of the node and to itself; node_pairs, self_pairs: one for each
    chosen expert there."""
    num_ranks = len(routes)
    chosen = [r.view(r.shape[0], num_ranks, r.shape[1] // num_ranks).sum(dim=2) for r in routes]  # [T_r, num_ranks]
    needed = [c > 0 for c in chosen]
    rows = []
    for rank in range(num_ranks):
        node, local = divmod(rank, num_local_ranks)
        by_node = needed[rank].view(-1, num_ranks // num_local_ranks, num_local_ranks).any(dim=2)
        rail = int(by_node.sum() - by_node[:, node].sum())
        mates = torch.cat([needed[r] for r in range(num_ranks) if r % num_local_ranks == local])
        here = mates[:, node * num_local_ranks : (node + 1) * num_local_ranks]
        own = int(here[:, local].sum())
        pairs = torch.cat([chosen[r] for r in range(num_ranks) if r % num_local_ranks == local])
        pairs = pairs[:, node * num_local_ranks : (node + 1) * num_local_ranks]
        own_pairs = int(pairs[:, local].sum())
        rows.append(
            {
                "rail": rail,
                "node": int(here.sum()) - own,
                "self": own,
                "node_pairs": int(pairs.sum()) - own_pairs,
                "self_pairs": own_pairs,
            }
        )
    return rows


def largest_topk(routes: Sequence[torch.Tensor]) -> int:
    """Experts of the token that has most of them, at least 1."""
    return max(1, *(int(r.sum(dim=1).max()) if r.shape[0] else 0 for r in routes))


def dispatch(
    routes: Sequence[torch.Tensor],
    num_local_ranks: int,
    token_bytes: int,
    metadata: int,
    *,
    permute: bool = True,
    landed: bool = True,
    once: bool = False,
) -> list[dict[str, int]]:
    """Counters of every rank for one dispatch, without the counts exchange. token_bytes: of a token on a link
    (message_bytes), metadata of them not its row (metadata_bytes). landed: whether the results of all ranks lie in
    registered memory; once: whether such a row then crosses to a rank once, as on GPUs, whatever the token's experts
    there."""
    result, links = [], link_rows(routes, num_local_ranks)
    row, per_rank = token_bytes - metadata, routes[0].shape[1] // len(routes)
    for rank, r in enumerate(links):
        kind = "_pairs" if permute and landed and not once else ""
        here = torch.cat(list(routes))[:, rank * per_rank : (rank + 1) * per_rank]
        tokens = int(here.any(dim=1).sum())
        delivered = int(here.sum()) if permute else tokens
        stored = 0 if not landed else tokens if once else delivered  # where they are to be, by who sends them
        copied = delivered - stored
        result.append(
            {
                **_counters(r["rail"], r["node"], r["self"], token_bytes),
                "node_bytes": r["node" + kind] * row + r["node"] * metadata,
                "self_bytes": r["self" + kind] * row + r["self"] * metadata,
                "copied_rows": copied,
                "copied_bytes": copied * row,
            }
        )
    return result


def combine(
    routes: Sequence[torch.Tensor],
    num_local_ranks: int,
    row_bytes: int,
    *,
    every_pair: bool = False,
    weight_bytes: int = 0,
) -> list[dict[str, int]]:
    """Counters of every rank for one combine of row_bytes (partial_bytes) a partial sum: it sends over the
    rail one node sum for each token that its rail peers sent here. every_pair: the outputs of all ranks lie in
    registered memory of hosts, where sums read the row of every pair, and of a partial only the weight_bytes."""
    num_ranks, result = len(routes), []
    rows = link_rows(routes, num_local_ranks)
    for rank in range(num_ranks):
        node, local = divmod(rank, num_local_ranks)
        per_node = routes[0].shape[1] // (num_ranks // num_local_ranks)
        sums = sum(
            int(routes[r][:, node * per_node : (node + 1) * per_node].any(dim=1).sum())
            for r in range(num_ranks)
            if r % num_local_ranks == local and r != rank
        )
        counters = _counters(sums, rows[rank]["node"], rows[rank]["self"], row_bytes)
        per_rank = routes[0].shape[1] // num_ranks
        here = torch.cat(list(routes))[:, rank * per_rank : (rank + 1) * per_rank]
        counters["partial_rows"] = 0 if every_pair else int(here.any(dim=1).sum())
        for kind in ("node", "self") if every_pair else ():
            read = rows[rank][f"{kind}_pairs"] * (row_bytes - weight_bytes) + rows[rank][kind] * weight_bytes
            counters[f"{kind}_bytes"] = read
        result.append(counters)
    return result


def exchange(num_nodes: int, num_local_ranks: int, num_experts: int) -> dict[str, int]:
    """Counters of every rank for one exchange of counts: its vector to the rail, its rail's vectors to the
    node."""
    num_ranks = num_nodes * num_local_ranks
    vector = _align(4 * (_HEADER_WORDS + num_ranks + num_nodes + num_experts), 64)
    sent = num_nodes - 1 + num_nodes * (num_local_ranks - 1)
    return {**_counters(0, 0, 0, 0), "count_bytes": sent * vector}


def add(*counters: dict[str, int]) -> dict[str, int]:
    return {name: sum(c[name] for c in counters) for name in COUNTERS}


def _counters(rail: int, node: int, own: int, row_bytes: int) -> dict[str, int]:
    return {
        "rail_rows": rail,
        "rail_bytes": rail * row_bytes,
        "node_rows": node,
        "node_bytes": node * row_bytes,
        "self_rows": own,
        "self_bytes": own * row_bytes,
        "copied_rows": 0,
        "copied_bytes": 0,
        "partial_rows": 0,
        "count_bytes": 0,
    }


def _align(n: int, to: int) -> int:
    return -(-n // to) * to
