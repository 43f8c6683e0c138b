"""Registered bytes of DeepSeek-V3 at EP64, and what partial sums need of them: a JSON file and the tables of the docs.

    python scripts/receive_rows.py [--json docs/results/2026-11-25-receive-rows.json]
    python scripts/receive_rows.py --from docs/results/2026-11-25-receive-rows.json

The bytes are those of `memory_report()`, of the layout that a buffer makes for 4096 tokens of 7168 bf16, top-8 of 256,
before any call (docs/design.md). A receive row needs a partial where its token has several experts on the rank: their
share is counted of drawn routings, at EP 8, 32 and 64, uniform and limited to 4 of 8 groups of experts, with the region
that those rows alone would take. --from prints the tables of a file that is there."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from hybrid_ep import _core, memory
from hybrid_ep.buffer_sizes import default_arena_bytes, first_recv_rows, recv_capacity

TOKENS, HIDDEN, TOPK, EXPERTS, RANKS = 4096, 7168, 8, 256, 64
ROW_BYTES = 2 * HIDDEN
GROUPS, LIMIT = 8, 4  # of DeepSeek-V3's routing
SIZES, SEED = (8, 32, 64), 1
MIB = 1 << 20
RINGS = ("rail_send_ring", "rail_receive_ring")


def report(nodes: int, ranks: int, recv_rows: int) -> memory.MemoryReport:
    shape = {"max_tokens": TOKENS, "max_topk": TOPK, "row_bytes": ROW_BYTES, "scale_bytes": 0}
    layout = _core.BufferShape(
        num_nodes=nodes,
        num_local_ranks=ranks // nodes,
        num_experts=EXPERTS,
        recv_rows=recv_rows,
        partial_row_bytes=ROW_BYTES,
        arena_bytes=default_arena_bytes(shape),
        max_tokens=TOKENS,
        max_topk=TOPK,
        row_bytes=ROW_BYTES,
    )
    return memory.report(layout, ranks)


def memory_rows() -> list[dict[str, Any]]:
    """One NVLink domain, and nodes of 8 over NVSHMEM; with receive rows for every token, which a buffer had once, and
    as it has now."""
    found = []
    for nodes in (1, RANKS // 8):
        for what, rows in (
            ("every token", recv_capacity(None, TOKENS, RANKS)),
            ("twice the mean", first_recv_rows(None, TOKENS, TOPK, RANKS)),
        ):
            got = report(nodes, RANKS, rows)
            found.append({"kind": "memory", "nodes": nodes, "rows_for": what, "recv_rows": rows,
                          "total": got.total_bytes, "regions": got.regions})  # fmt: skip
    return found


def drawn(rng: np.random.Generator, limited: bool) -> np.ndarray:
    """int [TOKENS, TOPK]: distinct experts of a rank's tokens, every choice equally likely; limited: within LIMIT of
    GROUPS groups."""
    keys = rng.random((TOKENS, EXPERTS), dtype=np.float32)
    if limited:
        order = rng.random((TOKENS, GROUPS), dtype=np.float32).argsort(1).argsort(1)
        keys += np.repeat(order >= LIMIT, EXPERTS // GROUPS, axis=1)
    return keys.argpartition(TOPK, axis=1)[:, :TOPK]


def shares(ranks: int, limited: bool, seed: int = SEED) -> dict[str, Any]:
    """Of a rank, the mean and the largest of all: receive rows, and those whose token has several experts there."""
    rng = np.random.default_rng(seed)
    received, several = np.zeros(ranks, np.int64), np.zeros(ranks, np.int64)
    for _ in range(ranks):
        on_rank = drawn(rng, limited) // (EXPERTS // ranks)
        pairs = (on_rank[:, :, None] == np.arange(ranks)).sum(1)
        received += (pairs > 0).sum(0)
        several += (pairs > 1).sum(0)
    return {
        "kind": "partials",
        "ranks": ranks,
        "routing": f"{LIMIT} of {GROUPS} groups" if limited else "uniform",
        "received_mean": float(np.mean(received)),
        "received_most": int(np.max(received)),
        "several_mean": float(np.mean(several)),
        "several_most": int(np.max(several)),
        "share": int(np.sum(several)) / int(np.sum(received)),
        "region_now": report(1, ranks, first_recv_rows(None, TOKENS, TOPK, ranks)).regions["receive_rows"],
        "arena": report(1, ranks, 1).regions["arena"],
    }


def mib(num_bytes: float) -> str:
    return f"{num_bytes / MIB:.0f}"


def memory_table(found: list[dict[str, Any]]) -> str:
    """As docs/design.md has it."""
    lines = ["| | receive rows for every token | for twice the mean, the default |", "|---|--:|--:|"]
    for nodes, head, beside in (
        (1, f"{RANKS} ranks of one NVLink domain: receive rows, arena, total", (("arena",),)),
        (8, f"{RANKS // 8} nodes of 8 over NVSHMEM: receive rows, arena, rings, total", (("arena",), RINGS)),
    ):
        cells = [
            ", ".join(mib(sum(r["regions"][name] for name in names)) for names in (("receive_rows",), *beside))
            + f", {mib(r['total'])}"
            for r in found
            if r["kind"] == "memory" and r["nodes"] == nodes
        ]
        lines.append(f"| {head} | {' | '.join(cells)} |")
    return "\n".join(lines)


def partial_table(found: list[dict[str, Any]]) -> str:
    """twice: of the mean, as receive rows have it."""
    lines = ["| EP, routing | receive rows: mean, most | with several experts: mean, most | share | their partials,"
             " MiB: most, twice the mean | receive rows now, MiB | arena, MiB |",
             "|---|--:|--:|--:|--:|--:|--:|"]  # fmt: skip
    for r in found:
        if r["kind"] == "partials":
            lines.append(
                f"| {r['ranks']}, {r['routing']} | {r['received_mean']:.0f}, {r['received_most']} | "
                f"{r['several_mean']:.0f}, {r['several_most']} | {100 * r['share']:.1f} % | "
                f"{mib(r['several_most'] * ROW_BYTES)}, {mib(2 * r['several_mean'] * ROW_BYTES)} | "
                f"{mib(r['region_now'])} | {mib(r['arena'])} |"
            )
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Registered bytes of DeepSeek-V3, and what partial sums need of them.")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there")
    parser.add_argument("--from", type=Path, metavar="FILE", dest="source", help="rows that were written before")
    args = parser.parse_args(argv)
    if args.source and args.json:
        parser.error("--from: the rows are there; leave --json out")
    if args.json and not args.json.resolve().parent.is_dir():
        parser.error(f"--json {args.json}: no such folder; create it first")
    if args.source:
        found = json.loads(args.source.read_text(encoding="utf-8"))
    else:
        found = [*memory_rows(), *(shares(ranks, limited) for limited in (False, True) for ranks in SIZES)]
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(memory_table(found), partial_table(found), sep="\n\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
