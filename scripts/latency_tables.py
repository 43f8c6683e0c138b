"""What the event engine says of the latency path over nodes: a JSON file, and the table of it for a page of results.

    python scripts/latency_tables.py [--json docs/results/2026-11-25-latency-nodes.json] [--quick]
    python scripts/latency_tables.py --from docs/results/2026-11-25-latency-nodes.json

Rows of 7168 bf16, top-8 of 256 experts, uniform routing. Both paths with the same SMs in all, that is with those that
feed links and those for local work; times of both without what a launch takes. --from prints the tables of a file that
is there. --quick: a row or two, for a test. Predictions: no GPU has run them."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hybrid_ep.hardware import clusters
from hybrid_ep.hardware.clusters import Cluster
from hybrid_ep.perf import events, latency_events
from hybrid_ep.perf.model import permute_blocks
from hybrid_ep.perf.shape import Shape

HIDDEN, TOPK, EXPERTS, SEED = 7168, 8, 256, 1
# (cluster, nodes, ranks a node); one node first, to compare with.
GROUPS = (("h100_8x400g", 1, 8), ("h100_8x400g", 2, 8), ("h100_8x400g", 4, 8), ("h100_8x400g", 8, 8))
TOKENS, SMS = (16, 64, 128), (32, 128)
QUICK = (GROUPS[1:2], (4,), (8,))
HEADS = ("cluster", "nodes x ranks", "tokens a rank", "SMs", "dispatch us", "combine us", "NVLink port us", "NIC us",
         "NIC MB", "throughput path: dispatch us", "combine us", "a pair by lines, of the other")  # fmt: skip


def feeding(cluster: Cluster, num_sms: int, op: str) -> int:
    """Of so many SMs of an operation those that feed links: as many as leave room for its local work."""
    return max(n for n in range(1, num_sms + 1) if n + permute_blocks(cluster, n, op=op) <= num_sms)


def throughput_us(shape: Shape, cluster: Cluster, num_sms: int) -> dict[str, float]:
    """Microseconds by operation of the other path, which has so many SMs in all."""
    by_op = {}
    for op in ("dispatch", "combine"):
        by_op[op] = events.measure(shape, cluster, num_sms=feeding(cluster, num_sms, op)).time_us[op]
    return by_op


def rows(
    groups: tuple[tuple[str, int, int], ...], tokens: tuple[int, ...], sms: tuple[int, ...]
) -> Iterator[dict[str, Any]]:
    """A dictionary a row of the table: shape, what stands for what, times in microseconds, bytes."""
    for name, nodes, local in groups:
        for count in tokens:
            for num_sms in sms:
                began = time.monotonic()
                cluster, shape = clusters.get(name), Shape(nodes * local, local, count, HIDDEN, TOPK, EXPERTS)
                got = latency_events.measure(shape, cluster, num_sms=num_sms, seed=SEED)
                other = throughput_us(shape, cluster, num_sms)
                print(f"# {name} {nodes} x {local}, {count}, {num_sms}: {time.monotonic() - began:.0f} s",
                      file=sys.stderr)  # fmt: skip
                yield {
                    "cluster": name,
                    "nodes": nodes,
                    **asdict(shape),
                    "num_sms": num_sms,
                    "seed": SEED,
                    "warps_in_one": latency_events.warps_in_one(shape, num_sms),
                    **asdict(got),
                    "throughput_dispatch_us": other["dispatch"],
                    "throughput_combine_us": other["combine"],
                }


def table(found: list[dict[str, Any]]) -> str:
    """Markdown of rows."""
    lines = ["| " + " | ".join(HEADS) + " |", "|---" * 2 + "|--:" * (len(HEADS) - 2) + "|"]
    for row in found:
        pair = row["dispatch_us"] + row["combine_us"]
        other = row["throughput_dispatch_us"] + row["throughput_combine_us"]
        cells = [
            row["cluster"],
            f"{row['nodes']} x {row['ranks_per_node']}",
            str(row["tokens"]),
            str(row["num_sms"]),
            f"{row['dispatch_us']:.1f}",
            f"{row['combine_us']:.1f}",
            f"{row['nvlink_us']:.1f}",
            f"{row['nic_us']:.1f}",
            f"{row['nic_bytes'] / 1e6:.2f}",
            f"{row['throughput_dispatch_us']:.1f}",
            f"{row['throughput_combine_us']:.1f}",
            f"{pair / other:.2f}",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Tables of the latency path over nodes, by the event engine.")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there")
    parser.add_argument("--from", type=Path, metavar="FILE", dest="source", help="rows that were written before")
    parser.add_argument("--quick", action="store_true", help="one row alone")
    args = parser.parse_args(argv)
    if args.source and (args.json or args.quick):
        parser.error("--from: the rows are there; leave --json and --quick out")
    if args.json and not args.json.resolve().parent.is_dir():
        parser.error(f"--json {args.json}: no such folder; create it first")
    if args.source:
        found = json.loads(args.source.read_text(encoding="utf-8"))
    else:
        found = list(rows(*(QUICK if args.quick else (GROUPS, TOKENS, SMS))))
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(table(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
