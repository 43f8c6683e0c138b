"""Where the time of a call on hosts goes, from the JSON of `hybrid-ep bench` on Linux: a table for a results page.

    hybrid-ep bench --ranks 4 -b 4096 -e 4096 --hidden 2048 --experts 64 --topk 8 -n 25 --heap warm --json four.json
    python scripts/host_shares.py four.json [two.json ...]

A row an operation of hybrid_ep. limit: the one-pass bytes of the fullest rank at the rate of that run's memmove. Of all
ranks and iterations together: for what shares of the calls ranks ran, were ready without a core, and slept, waiting for
others. On cores: the same share of the limit, if calls and memmove both had taken only the time in which they ran."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

COPY = ("copy", "memcpy")
HEAD = (
    "| ranks | op | call us | of the limit | ran | no core | slept | memmove ran | of the limit, on cores |\n"
    "|--:|---|--:|--:|--:|--:|--:|--:|--:|"
)


def samples(case: dict[str, Any], kind: str) -> dict[tuple[str, str], list[list[float]]]:
    """(op, implementation) -> [rank][iteration] seconds."""
    return {(one["op"], one["implementation"]): one["by_rank"] for one in case[kind]}


def total(by_rank: list[list[float]]) -> float:
    """Of all ranks and iterations."""
    return sum(map(sum, by_rank))


def rows(document: dict[str, Any], name: str = "hybrid_ep") -> list[dict[str, Any]]:
    """One an operation: what HEAD names. ValueError for a file without the times on cores."""
    found = []
    for case in document["cases"]:
        calls, running, queued = (
            samples(case, kind) for kind in ("samples_s", "running_samples_s", "queued_samples_s")
        )
        if COPY not in queued:
            raise ValueError("the file has no times on cores: run the bench on Linux, with --backend host")
        copied = total(running[COPY]) / total(calls[COPY])
        for limit in case["limits"]:
            key = limit["op"], limit["implementation"]
            if key[1] != name or key not in queued:
                continue
            whole, ran, ready = (total(of[key]) for of in (calls, running, queued))
            # the slowest rank's median is what the limit is a share of; the cores' share goes by all ranks' mean
            mean = whole / sum(map(len, calls[key]))
            found.append(
                {
                    "ranks": len(calls[key]),
                    "op": key[0],
                    "call_us": statistics.median(map(max, zip(*calls[key], strict=True))) * 1e6,
                    "share": limit["one_pass_share"],
                    "ran": ran / whole,
                    "no_core": ready / whole,
                    "copy_ran": copied,
                    "share_on_cores": limit["one_pass_us"] * copied / (mean * 1e6 * ran / whole),
                }
            )
    return found


def table(found: list[dict[str, Any]]) -> str:
    """As Markdown."""
    lines = [
        f"| {r['ranks']} | {r['op']} | {r['call_us']:.0f} | {r['share']:.0%} | {r['ran']:.0%} | {r['no_core']:.0%} | "
        f"{max(0.0, 1 - r['ran'] - r['no_core']):.0%} | {r['copy_ran']:.0%} | {r['share_on_cores']:.0%} |"
        for r in found
    ]
    return "\n".join([HEAD, *lines])


def main(argv: list[str]) -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE")
    args = parser.parse_args(argv)
    found = []
    for path in args.files:
        try:
            found += rows(json.loads(path.read_text()))
        except (OSError, ValueError, KeyError) as error:
            parser.error(f"{path}: {error}")
    print(table(found))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
