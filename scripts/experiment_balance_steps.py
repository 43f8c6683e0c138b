"""What a training step would take without balancing and with it, on clusters that are not here: all of it a prediction.

    python scripts/experiment_balance_steps.py [--engine model,events] [--zipf 1.0,...] [--json FILE]
    python scripts/experiment_balance_steps.py --redo FILE       the tables again: exchanges of FILE, steps anew

DeepSeek-V3's layers, zipf routing whose hot experts differ from layer to layer and drift from micro-batch to
micro-batch. Drawn tokens are planned by the library's own planners, their columns rewritten as a rank does it, and the
exchange of what comes out is timed by the event engine (this library's kernels, every rank) or the queueing model.
Experts compute as long as the fullest rank's rows. What balancing itself moves takes as long as the busiest port of
each step: a clone's weights (bf16) to its slot in the forward and again in the backward, its gradient (fp32) home, and
of slow mode 14 bytes a parameter of a moved expert, over the steps from one placement to the next; between nodes, where
the kernels have one step, within what their rings hold (`balance_pushes`). What grouped experts compute meanwhile hides
some of it.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from balance_pushes import Pushes, port_us, pushes, shown_us

from hybrid_ep.balance import MicrobatchPlan, MicrobatchPlanner, imbalance_ratio, loads, plan_placement
from hybrid_ep.balance.owners import Owners
from hybrid_ep.hardware import clusters
from hybrid_ep.perf import events, model, models, routing
from hybrid_ep.perf.step_time import CV_SLOW, Job, Layer, step

MODES = ("off", "slow", "exact", "exact by torch", "exact near", "exact in the node", "both")
OF_NODES = ("exact by torch", "exact near", "exact in the node")
DRIFT = 0.2  # of log-popularity from micro-batch to micro-batch
INTERVAL = 100  # steps from one placement of slow mode to the next
LASTING_DRIFT = 0.15  # of log-popularity from one placement to the next
MOVED_BYTES = 14  # a parameter
# Of each engine's rows the expert-parallel degree and the tokens of a rank's micro-batch: what the event engine runs
# whole in some ten seconds of a core.
ENGINES = {"model": (64, 4096), "events": (32, 768)}


def job_of(cluster: str, ep: int, tokens: int) -> Job:
    """DeepSeek-V3 in bf16, 1,024 H100 or 256 GB200."""
    large = cluster.startswith("h100")
    return Job(
        models.get("deepseek_v3"),
        clusters.get(cluster),
        gpus=1024 if large else 256,
        ep=ep,
        pp=8 if large else 4,
        virtual_pp=4,
        tokens=tokens,
        micro_batches=64,
        num_sms=32,
        cv_slow=CV_SLOW,
    )


@dataclass(frozen=True)
class Balanced:
    """One layer of one micro-batch: columns over physical slots [R, T, k], of `slots` in all; the fullest rank's excess
    over the mean; clones, and what they and moved experts take beside the exchange."""

    columns: np.ndarray
    slots: int
    imbalance: float
    clones: int
    pushes: Pushes


def balanced(mode: str, choices: np.ndarray, past: np.ndarray, earlier: np.ndarray, job: Job, spare: int) -> Balanced:
    """choices: [R, T, k] logical experts. past: loads that a placement is planned from; earlier: those before them."""
    shape = job.shape
    ranks, experts = shape.ranks, shape.experts
    owners, moved_us = Owners(experts, ranks), 0.0
    if mode in ("slow", "both"):
        before = plan_placement(earlier[None], experts, ranks, current=np.arange(experts)[None]).phy2log
        plan = plan_placement(past[None], experts, ranks, current=before)
        owners.assign(before[0])
        left = owners.rank_of.copy()
        owners.assign(plan.phy2log[0])
        size = MOVED_BYTES * job.model.expert_params
        moves = [(int(left[e]), int(owners.rank_of[e]), size) for e in np.flatnonzero(left != owners.rank_of)]
        moved_us = port_us(moves, job) / (INTERVAL * job.micro_batches)
    counts = np.stack([np.bincount(mine.ravel(), minlength=experts) for mine in choices])
    if mode in ("off", "slow"):
        columns = owners.host_columns(0)
        load = np.bincount(owners.rank_of, weights=counts.sum(axis=0), minlength=ranks)
        return Balanced(columns[choices], experts, imbalance_ratio(load), 0, Pushes(moved_us=moved_us))
    planner = MicrobatchPlanner(
        ranks,
        experts,
        owners.rank_of,
        spare_slots=spare,
        num_nodes=shape.nodes,
        within_node=mode == "exact in the node" and shape.nodes > 1,
        near=mode == "exact near",
    )
    plan = planner.plan(counts)
    columns = np.stack([_redirected(plan, rank, choices[rank], owners.host_columns(spare)) for rank in range(ranks)])
    slots = experts + ranks * spare
    made = replace(pushes(plan, job, kernels=mode != "exact by torch"), moved_us=moved_us)
    return Balanced(columns, slots, plan.imbalance(), plan.num_copies, made)


def _redirected(plan: MicrobatchPlan, rank: int, chosen: np.ndarray, columns: np.ndarray) -> np.ndarray:
    """Columns [T, k] over physical slots of one rank's tokens: as `megatron_patches.balance.to_physical`."""
    column = columns[chosen]
    pairs = chosen.ravel()  # tokens in order
    order = np.argsort(pairs, kind="stable")
    first = np.searchsorted(pairs[order], np.arange(len(columns)))
    number = np.empty(len(pairs), np.int64)
    number[order] = np.arange(len(pairs)) - first[pairs[order]]
    number = number.reshape(chosen.shape)
    for expert, after, jump in plan.part_of_rank(rank, columns).redirects:
        column[(chosen == expert) & (number >= after)] += jump
    return column


def exchange(engine: str, got: Balanced, job: Job) -> tuple[float, float]:
    """(dispatch, combine), microseconds of the call, or of the kernels with events."""
    shape = job.shape.with_(experts=got.slots)
    if engine == "model":
        traffic = routing.count(got.columns, shape)
        times = [
            model.predict(op, shape, job.cluster, num_sms=job.num_sms, traffic=traffic, cached=cached).api_us
            for op, cached in (("dispatch", False), ("dispatch", True), ("combine", False))
        ]
        return (times[0] + times[1]) / 2, times[2]
    found = events.measure(
        shape, job.cluster, num_sms=job.num_sms, choices=got.columns, row_budget=2 * events.rows(shape)
    )
    assert found.exact  # all tokens of all ranks ran
    return found.time_us["dispatch"], found.time_us["combine"]


def rows(
    cluster: str, engine: str, exponents: list[float], modes: list[str], num_layers: int, seed: int
) -> Iterator[dict[str, Any]]:
    """One row an exponent and mode: means over layers."""
    job = job_of(cluster, *ENGINES[engine])
    shape, spare = job.shape, 1
    sample = shape.with_(tokens=min(1024, shape.tokens))
    for exponent in exponents:
        rng = np.random.default_rng(seed)
        earlier = loads.popularity(rng, num_layers, shape.experts, "zipf", exponent)
        share = loads.drift(rng, earlier, LASTING_DRIFT)
        past = sum(loads.drift(rng, share, DRIFT) for _ in range(8))
        now = loads.drift(rng, share, DRIFT)
        drawn = [routing.popularity(sample, now[layer], seed + layer) for layer in range(num_layers)]
        for mode in modes:
            if mode in OF_NODES and shape.nodes == 1:
                continue
            start = time.thread_time()
            made = [balanced(mode, c, past[n], earlier[n], job, spare) for n, c in enumerate(drawn)]
            moved = np.mean([exchange(engine, one, job) for one in made], axis=0)
            left = replace(job, imbalance=float(np.mean([one.imbalance for one in made])))
            pushed = float(np.mean([one.pushes.all_us for one in made]))
            shown = float(np.mean([shown_us(one.pushes, job) for one in made]))
            yield {
                **steps(left, float(moved.sum()), pushed, shown),
                "cluster": cluster,
                "engine": engine,
                "EP": shape.ranks,
                "tokens": shape.tokens,
                "zipf": exponent,
                "mode": mode,
                "imbalance": left.imbalance,
                "clones": float(np.mean([one.clones for one in made])),
                "dispatch_us": float(moved[0]),
                "combine_us": float(moved[1]),
                "pushed_us": pushed,
                "shown_us": shown,
                "layers": num_layers,
                "processor_s": round(time.thread_time() - start, 1),
            }


def steps(job: Job, exchange_us: float, pushed_us: float, shown_us: float) -> dict[str, float]:
    """Seconds of a step, of one whose pushes are all in full view, and of one where they cost nothing."""
    named = {"step_s": shown_us, "step_in_full_view_s": pushed_us, "step_without_pushes_s": 0.0}
    return {name: step(job, Layer(exchange_us, beside)).seconds for name, beside in named.items()}


def again(row: dict[str, Any]) -> dict[str, Any]:
    """A row of an earlier run with the steps that the model has now; nothing is hidden where it does not say so."""
    job = replace(job_of(row["cluster"], *ENGINES[row["engine"]]), imbalance=row["imbalance"])
    return row | steps(
        job, row["dispatch_us"] + row["combine_us"], row["pushed_us"], row.get("shown_us", row["pushed_us"])
    )


def markdown(made: list[dict[str, Any]]) -> str:
    """A table a cluster and engine: a line an exponent and mode; times of a step against off."""
    lines = []
    for key in dict.fromkeys((r["cluster"], r["engine"], r["EP"]) for r in made):
        cluster, engine, ep = key
        lines += [f"**{cluster}, EP{ep}, {engine}, {ENGINES[engine][1]:,} tokens a rank and micro-batch**", ""]
        lines += [
            "| zipf | mode | imbalance | clones | exchange, us | pushes, us | shown, us | step, s | against off |"
        ]
        lines += ["|---:|---|---:|---:|---:|---:|---:|---:|---:|"]
        mine = [r for r in made if (r["cluster"], r["engine"], r["EP"]) == key]
        off = {r["zipf"]: r["step_s"] for r in mine if r["mode"] == "off"}  # --modes has it first
        for r in mine:
            bounds = f" ({r['step_in_full_view_s']:.1f}, {r['step_without_pushes_s']:.1f})" if r["pushed_us"] else ""
            cells = (
                f"{r['zipf']:.1f}",
                r["mode"],
                f"{r['imbalance']:.3f}",
                f"{r['clones']:.0f}",
                f"{r['dispatch_us'] + r['combine_us']:,.0f}",
                f"{r['pushed_us']:,.0f}",
                f"{r['shown_us']:,.0f}",
                f"{r['step_s']:.1f}{bounds}",
                f"{r['step_s'] / off[r['zipf']]:.2f}",
            )
            lines.append(f"| {' | '.join(cells)} |")
        lines.append("")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cluster", default="h100_8x400g,gb200_nvl72")
    parser.add_argument("--engine", default="model", help="model, events or both, comma between")
    parser.add_argument("--zipf", default="1.0,1.2,1.4,1.6,1.8,2.0", help="exponents, commas between")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES), metavar="MODE")
    parser.add_argument("--layers", type=int, default=3, help="layers a row is the mean of")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, help="write the rows here, after every row")
    parser.add_argument("--redo", type=Path, nargs="+", help="print tables of these files' rows with steps timed anew")
    args = parser.parse_args(argv)
    if args.redo:
        print(markdown([again(row) for file in args.redo for row in json.loads(file.read_text())["rows"]]))
        return 0
    engines = args.engine.split(",")
    if strange := [e for e in engines if e not in ENGINES]:
        parser.error(f"--engine {strange[0]}: use {', '.join(ENGINES)}")
    made: list[dict[str, Any]] = []
    exponents = [float(z) for z in args.zipf.split(",")]
    for engine in engines:
        for cluster in args.cluster.split(","):
            for row in rows(cluster, engine, exponents, args.modes, args.layers, args.seed):
                made.append(row)
                print(json.dumps(row), flush=True)
                if args.json:
                    args.json.write_text(json.dumps({"rows": made}, indent=1) + "\n")
    print(markdown(made))
    return 0


if __name__ == "__main__":
    sys.exit(main())
