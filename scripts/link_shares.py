"""For what share of an exchange its link is busy, by the event engine: a JSON file and its tables.

    python scripts/link_shares.py [--json docs/results/2026-11-26-link-shares.json] [--only hybrid-ep-blog-h100-32]
                                  [--quick] [--shares [--tokens N]]
    python scripts/link_shares.py --from docs/results/2026-11-26-link-shares.json

The three conditions of `hybrid-ep bench --preset hybrid-ep-blog`, every rank and every row of them. A share is the
time for which the busiest rank's port (of several nodes: NIC) is busy in an operation, over the time of its kernel on
all ranks, with the time that nodes enter it apart, which is fitted (docs/performance_model.md); the same by the model,
for this library's kernels and the published ones. Why the rest is missing is asked of the engine: for what the roles
wait, and what the operations take when something is free (ABLATION_TOKENS tokens, or all). --from prints the tables of
a file that is there. --only: one of the conditions. --shares: nothing is free; --tokens: fewer or more of them.
--quick: eight ranks and few tokens, for a test. The whole takes twenty minutes. Predictions: no GPU has run them."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from hybrid_ep.cli.bench.presets import CONDITIONS, Condition
from hybrid_ep.explorer import world
from hybrid_ep.explorer.world import World
from hybrid_ep.hardware import clusters
from hybrid_ep.perf import events, model
from hybrid_ep.perf.implementations import HYBRID_EP, PUBLISHED
from hybrid_ep.perf.shape import Shape

READINGS = ("formed", "in place")  # partial rows formed of all rows, or of those with several experts on a rank
ROLES = {
    "dispatch": ("g2s", "s2g", "n2n", "deliver_g2s", "deliver_s2g"),
    "combine": ("unpermute_g2s", "unpermute_reduce", "node_sum_g2s", "node_sum_reduce", "final_sum_g2s",
                "final_sum_reduce"),
}  # fmt: skip
LOCAL_LANES = ("deliver_load_ps", "deliver_store_ps", "sum_partial_ps", "sum_pair_ps")
LANES = ("g2s_token_ps", "s2g_token_ps", "s2g_destination_ps", "s2g_pair_ps", "n2n_token_ps", "sum_token_ps",
         "sum_destination_ps", "sum_row_ps")  # fmt: skip
# What costs nothing, by the name that the table has for it; then settings of the world that change.
FREE = {
    "ports of NVLink": ("nvlink_egress_mbps", "nvlink_ingress_mbps"),
    "ports where rows arrive": ("nvlink_ingress_mbps",),
    "latency of NVLink": ("nvlink_latency_ps",),
    "NICs' bytes": ("nic_mbps", "nic_message_ps"),
    "latency of the NIC": ("nic_latency_ps",),
    "lanes of local work, metadata": LOCAL_LANES,
    "lanes that feed links": LANES,
    "SMs' copy engines": ("tma_read_mbps", "tma_write_mbps", "tma_op_ps"),
    "sums": ("reduce_mbps", "round_mbps"),
    "looks at flags and counters": ("poll_ps",),
    "fences": ("fence_ps",),
    "flags on their way": ("flag_ps",),
    "looks, fences, flags": ("poll_ps", "fence_ps", "flag_ps"),
    "memory": ("hbm_mbps",),
    "both kinds of lanes": LOCAL_LANES + LANES,
}
ON_RAIL = ("NICs' bytes", "latency of the NIC")
MORE_LOCAL, MORE_SLOTS = "twice the SMs for local work", "four times the rail's slots"
ABLATION_TOKENS = 1024
AT_FULL_LENGTH = ("looks, fences, flags", MORE_LOCAL)  # with all tokens as well


def shape_of(c: Condition) -> Shape:
    return Shape(c.ranks, c.ranks_per_node, c.tokens, c.hidden, c.topk, c.experts)


def run(c: Condition, reading: str, costs: dict[str, int] | None = None, **changes: int) -> World:
    """A dispatch and a combine of all ranks. costs: in place of some; changes: of the world's settings."""
    shape, cluster = shape_of(c), clusters.get(c.cluster)
    spec = events.spec_of(shape, cluster, num_sms=c.num_sms, in_place=reading == READINGS[1])
    got = world.measure(spec | changes, events.costs_of(shape, cluster) | (costs or {}))
    world.require_whole(got)
    return got


def busy_us(got: World, link: str) -> dict[tuple[str, int], float]:
    """By port or NIC and rank, both directions: microseconds."""
    found: dict[tuple[str, int], float] = defaultdict(float)
    for each in got.links:
        if each.name.startswith("nic" if link == "rail" else "nvlink"):
            found[each.name, each.rank] += each.busy_us
    return found


def shares(c: Condition) -> Iterator[dict[str, Any]]:
    """Of both operations, with the waits of their roles."""
    alone = run(c, READINGS[0], combine=0)
    there = busy_us(alone, c.link)
    yield share_row(c, "dispatch", "landed", alone, max(there.values()))
    yield from waits(c, "dispatch", "landed", alone)
    for reading in READINGS:
        got = run(c, reading)
        back = max(us - there[key] for key, us in busy_us(got, c.link).items())
        yield share_row(c, "combine", reading, got, back)
        yield from waits(c, "combine", reading, got)


def share_row(c: Condition, op: str, rows: str, got: World, busy: float) -> dict[str, Any]:
    cluster, kernel = clusters.get(c.cluster), got.kernel_us(op)
    told = [model.predict(op, shape_of(c), cluster, num_sms=c.num_sms, impl=impl) for impl in (HYBRID_EP, PUBLISHED)]
    rate = cluster.nic.rate if c.link == "rail" else cluster.gpu.nvlink_rate
    ours, published = (t.physical[c.link] / rate for t in told)
    skew = cluster.gpu.skew_us.value if c.nodes > 1 else 0.0  # the published times have it, and so has the model
    return named(c, "share", op, rows) | {"kernel_us": kernel, "skew_us": skew, "busy_us": busy,
                                          "share": busy / (kernel + skew), "model": ours,
                                          "published_by_model": published}  # fmt: skip


def waits(c: Condition, op: str, rows: str, got: World) -> Iterator[dict[str, Any]]:
    """Microseconds of a rank's roles, the mean over ranks, as shares of what all of the role's lanes have."""
    by: dict[str, dict[str, float]] = {}
    for role in got.roles:
        if role.name in ROLES[op]:
            us = by.setdefault(role.name, defaultdict(float))
            for site, took in (("busy", role.busy_us), *role.waited_us.items()):
                us[site] += took
    for name, us in by.items():
        spent = sum(us.values())
        found = {site: t / spent for site, t in sorted(us.items(), key=lambda item: -item[1]) if t > 0.005 * spent}
        yield named(c, "waits", op, rows) | {"role": name, "of": found}


def cases(c: Condition) -> Iterator[tuple[str, dict[str, int], dict[str, int]]]:
    """Name, costs and settings of the world in place of some."""
    spec = events.spec_of(shape_of(c), clusters.get(c.cluster), num_sms=c.num_sms)
    yield "nothing", {}, {}
    for name, fields in FREE.items():
        if c.nodes > 1 or name not in ON_RAIL:
            yield name, dict.fromkeys(fields, 0), {}
    yield MORE_LOCAL, {}, {name: 2 * spec[name] for name in ("permute_blocks", "unpermute_blocks")}
    if c.nodes > 1:
        yield MORE_SLOTS, {}, {"rail_slots": 4 * spec["rail_slots"]}


def ablations(c: Condition, tokens: int, free: bool) -> Iterator[dict[str, Any]]:
    """Kernels' microseconds with something free, beside those with nothing free; not free: these alone, few tokens."""
    few = replace(c, tokens=min(c.tokens, tokens))
    for reading in READINGS:
        for name, costs, changes in cases(few):
            if free or name == "nothing":
                yield ablation(few, reading, name, run(few, reading, costs, **changes))
    for name, costs, changes in cases(c) if free else ():
        if c != few and name in ("nothing", *AT_FULL_LENGTH):
            yield ablation(c, READINGS[1], name, run(c, READINGS[1], costs, **changes))


def ablation(c: Condition, reading: str, name: str, got: World) -> dict[str, Any]:
    return named(c, "ablation", "both", reading) | {"free": name, **{f"{op}_us": got.kernel_us(op) for op in model.OPS}}


def named(c: Condition, kind: str, op: str, rows: str) -> dict[str, Any]:
    return {"kind": kind, "world": c.name, "tokens": c.tokens, "num_sms": c.num_sms, "op": op, "rows": rows}


def measured(conditions: list[Condition], tokens: int, free: bool) -> Iterator[dict[str, Any]]:
    for c in conditions:
        for rows in (shares(c), ablations(c, tokens, free)):
            began = time.monotonic()
            for row in rows:
                print(f"# {time.monotonic() - began:4.0f} s  {c.name} {row['kind']} {row['op']} {row['rows']} "
                      f"{row.get('free', row.get('role', ''))}", file=sys.stderr)  # fmt: skip
                yield row


def percent(value: float) -> str:
    return f"{100 * value:.0f} %"


def tables(found: list[dict[str, Any]]) -> str:
    """Markdown: shares, waits, and ablations with few tokens and with all."""
    lengths = sorted({r["tokens"] for r in of(found, "ablation")})
    changes = [ablation_table(found, n) for n in lengths if {r["free"] for r in of(found, "ablation")} != {"nothing"}]
    return "\n\n".join((share_table(found), wait_table(found), *changes))


def share_table(found: list[dict[str, Any]]) -> str:
    """With what the time begins with and what it grows by, from the time of few tokens."""
    lines = ["| world, SMs that feed links | operation, rows | kernel us | nodes apart us | link busy us | share |"
             " begins with us | share of further tokens | share by the model | published kernels, by the model |",
             "|---|---|--:|--:|--:|--:|--:|--:|--:|--:|"]  # fmt: skip
    for r in of(found, "share"):
        few = next(
            a
            for a in of(found, "ablation")
            if a["world"] == r["world"] and a["free"] == "nothing" and (r["op"] == "dispatch" or a["rows"] == r["rows"])
        )
        grows = (r["kernel_us"] - few[f"{r['op']}_us"]) / max(1, r["tokens"] - few["tokens"]) * r["tokens"]
        further = percent(r["busy_us"] / grows) if grows else "-"
        begins = r["kernel_us"] - grows
        lines.append(f"| {r['world']}, {r['num_sms']} | {r['op']}, {r['rows']} | {r['kernel_us']:.0f} | "
                     f"{r['skew_us']:.0f} | {r['busy_us']:.0f} | {percent(r['share'])} | {begins:.0f} | {further} | "
                     f"{percent(r['model'])} | {percent(r['published_by_model'])} |")  # fmt: skip
    return "\n".join(lines)


def wait_table(found: list[dict[str, Any]]) -> str:
    lines = ["| world | operation, rows | role | busy | waits for |", "|---|---|---|--:|---|"]
    for r in of(found, "waits"):
        others = ", ".join(f"{site} {percent(s)}" for site, s in r["of"].items() if site != "busy" and s >= 0.05)
        lines.append(f"| {r['world']} | {r['op']}, {r['rows']} | {r['role']} | {percent(r['of'].get('busy', 0.0))} | "
                     f"{others or '-'} |")  # fmt: skip
    return "\n".join(lines)


def ablation_table(found: list[dict[str, Any]], tokens: int) -> str:
    """What is free by line; by column an operation of a world and its rows: microseconds with nothing free, else the
    change."""
    columns: dict[tuple[str, str, str], dict[str, float]] = {}
    for r in of(found, "ablation"):
        for op in model.OPS if r["tokens"] == tokens else ():
            rows = r["rows"] if op == "combine" else ""  # how sums read changes no dispatch
            columns.setdefault((r["world"], op, rows), {}).setdefault(r["free"], r[f"{op}_us"])
    if not columns:
        return ""
    heads = [
        " ".join(part for part in (w.removeprefix("hybrid-ep-blog-"), op, rows) if part) for w, op, rows in columns
    ]
    lines = [f"| free or changed, {tokens} tokens | {' | '.join(heads)} |", "|---" + "|--:" * len(heads) + "|"]
    for name in dict.fromkeys(name for us in columns.values() for name in us):
        cells = [
            "-" if name not in us else f"{us[name]:.0f} us" if name == "nothing" else
            f"{100 * (us[name] / us['nothing'] - 1):+.0f} %"
            for us in columns.values()
        ]  # fmt: skip
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def of(found: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [row for row in found if row["kind"] == kind]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Shares of the link's time by the event engine, and what they lack.")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there")
    parser.add_argument("--from", type=Path, metavar="FILE", dest="source", help="rows that were written before")
    parser.add_argument("--shares", action="store_true", help="shares and waits alone: nothing is free")
    parser.add_argument("--only", choices=CONDITIONS, help="one of the conditions")
    parser.add_argument("--tokens", type=int, metavar="N", help="of a rank, for the condition's own; with --shares")
    parser.add_argument("--quick", action="store_true", help="eight ranks, few tokens")
    args = parser.parse_args(argv)
    if args.source and (args.json or args.quick or args.shares):
        parser.error("--from: the rows are there; leave --json, --shares and --quick out")
    if args.tokens is not None and (args.tokens < 1 or not args.shares):
        parser.error(f"--tokens {args.tokens}: give a number above 0, and --shares with it")
    if args.json and not args.json.resolve().parent.is_dir():
        parser.error(f"--json {args.json}: no such folder; create it first")
    chosen = [replace(c, tokens=args.tokens or c.tokens) for n, c in CONDITIONS.items() if args.only in (None, n)]
    if args.quick:
        chosen = [replace(chosen[0], tokens=64, hidden=1024)]
    found = json.loads(args.source.read_text(encoding="utf-8")) if args.source else []
    for row in () if args.source else measured(chosen, 64 if args.quick else ABLATION_TOKENS, not args.shares):
        found.append(row)
        if args.json:  # after every row: the whole takes twenty minutes
            args.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(tables(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
