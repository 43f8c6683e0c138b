"""What a training step would take without balancing and with it, on clusters that are not here: all of it a prediction.

    python scripts/experiment_balance_steps.py [--engine model,events] [--zipf 1.0,...] [--json FILE]
    python scripts/experiment_balance_steps.py --redo FILE       the tables again: exchanges of FILE, steps anew

DeepSeek-V3's layers, zipf routing whose hot experts differ from layer to layer and drift from micro-batch to
micro-batch. Drawn tokens are planned by the library's own planners, their columns rewritten as a rank does it, and the
exchange of what comes out is timed by the event engine (this library's kernels, every rank) or the queueing model.
Experts compute as long as the fullest rank's rows. What balancing itself moves takes as long as the busiest port of
each step: a clone's weights (bf16) to its slot in the forward and again in the backward, its gradient (fp32) home, and
of slow mode 14 bytes a parameter of a moved expert, over the steps from one placement to the next. What grouped experts
compute meanwhile hides some of it (`shown_us`).
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from hybrid_ep.balance import MicrobatchPlan, MicrobatchPlanner, imbalance_ratio, loads, plan_placement
from hybrid_ep.balance.owners import Owners
from hybrid_ep.balance.relays import relays
from hybrid_ep.hardware import clusters
from hybrid_ep.perf import efficiency, events, model, models, routing
from hybrid_ep.perf.step_time import CV_SLOW, Job, Layer, step
from hybrid_ep.spares import COLLECT_BLOCKS, PUSH_BLOCKS

MODES = ("off", "slow", "exact", "exact in the node", "both")
DRIFT = 0.2  # of log-popularity from micro-batch to micro-batch
INTERVAL = 100  # steps from one placement of slow mode to the next
LASTING_DRIFT = 0.15  # of log-popularity from one placement to the next
WEIGHT_BYTES, GRADIENT_BYTES, MOVED_BYTES = 2, 4, 14  # a parameter
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
class Pushes:
    """Microseconds that clones and moved experts of a layer take of a micro-batch. there_us: weights to the slots,
    once; back_us: gradients home; own, load: rows of each rank's own experts, and all that it computes, over the mean.
    """

    there_us: float = 0.0
    back_us: float = 0.0
    moved_us: float = 0.0
    own: np.ndarray = field(default_factory=lambda: np.ones(1))
    load: np.ndarray = field(default_factory=lambda: np.ones(1))

    @property
    def all_us(self) -> float:
        return 2 * self.there_us + self.back_us + self.moved_us


@dataclass(frozen=True)
class Balanced:
    """One layer of one micro-batch: columns over physical slots [R, T, k], of `slots` in all; the fullest rank's excess
    over the mean; clones, and what they and moved experts take beside the exchange."""

    columns: np.ndarray
    slots: int
    imbalance: float
    clones: int
    pushes: Pushes


Move = tuple[int, int, float]  # (from, to, bytes)


def port_us(moves: list[Move], job: Job) -> float:
    """Busy time of the busiest port: NVLink inside a node, the NIC between nodes."""
    shape = job.shape
    at = {"nvlink": np.zeros((2, shape.ranks)), "nic": np.zeros((2, shape.ranks))}
    for source, target, num_bytes in moves:
        kind = "nvlink" if source // shape.ranks_per_node == target // shape.ranks_per_node else "nic"
        at[kind][0, source] += num_bytes
        at[kind][1, target] += num_bytes
    rate = {"nvlink": job.cluster.gpu.nvlink_rate, "nic": job.cluster.nic.rate if at["nic"].any() else 1.0}
    return max(float(at[kind].max()) / (rate[kind] * 1e3) for kind in at)


def by_rails(plan: MicrobatchPlan, width: int) -> Iterator[list[Move]]:
    """What torch sends of weights of one byte, step by step, as `megatron_patches.balance_relay` does."""
    part = 1 / width
    for relayed in relays(plan.slot_expert, plan.owner, width):
        scatter, rail, spread = [], [], []
        for relay in relayed:
            home = relay.owner // width
            for local in range(width):
                scatter.append((relay.owner, home * width + local, part))
                for node, clones in relay.nodes.items():
                    rail.append((home * width + local, node * width + local, part))
                    spread += [(node * width + local, rank, part) for rank, _ in clones]
        yield from ([move for move in moves if move[0] != move[1]] for moves in (scatter, rail, spread))


def by_holders(plan: MicrobatchPlan) -> Iterator[list[Move]]:
    """What the kernels store of weights of one byte: owners a part to each clone, these to one another."""
    scatter, spread = [], []
    for relay in itertools.chain(*relays(plan.slot_expert, plan.owner, len(plan.slot_expert))):
        (holders,) = ([rank for rank, _ in clones] for clones in relay.nodes.values())
        part = 1 / len(holders)
        scatter += [(relay.owner, rank, part) for rank in holders]
        spread += [(source, rank, part) for source in holders for rank in holders if source != rank]
    yield from (scatter, spread)


def pushes(plan: MicrobatchPlan, job: Job) -> Pushes:
    """Weights to the slots, twice, and gradients home the same way back. No step begins before the one before has
    ended."""
    within = job.shape.nodes == 1 or plan.options.within_node
    steps = list(by_holders(plan) if within else by_rails(plan, job.shape.ranks_per_node))
    params, there_us, back_us = job.model.expert_params, 0.0, 0.0
    for moves in steps:
        there_us += port_us([(source, to, WEIGHT_BYTES * params * part) for source, to, part in moves], job)
        back_us += port_us([(to, source, GRADIENT_BYTES * params * part) for source, to, part in moves], job)
    load, cloned = plan.tokens_of_ranks(), np.where(plan.slot_expert >= 0, plan.slot_tokens, 0).sum(axis=1)
    return Pushes(there_us, back_us, own=(load - cloned) / load.mean(), load=load / load.mean())


def shown_us(got: Pushes, job: Job) -> float:
    """What is seen of them beside grouped experts (`hybrid_ep.moe.grouped`). Of these products, forward and backward, a
    third each are rows, their gradients, and weight gradients, two thirds of each those of the first matrices.

    Forward: a rank with clones computes the first product of its own rows. Weights in the backward: all but the experts
    of the layer behind, which has had the slots, then the second product's gradients of own rows, and all of its weight
    gradients. Gradients home, from when the last rank has those of the first matrix: what is left of that product's
    backward. Dispatches hide nothing, for they take the same links. What is hidden takes SMs from what runs beside, one
    a block; nccl's kernels are charged as many as ours."""
    if not got.there_us:
        return got.moved_us
    token = efficiency.per_token(job.model, job.cluster, job.dtype, job.sequence)
    ninth = job.tokens * token.expert_gemms / 9
    clones = got.load - got.own
    holds = clones > 0
    hidden = (
        2 * ninth * got.own[holds].min(),
        2 / 3 * job.tokens * token.moe_others + ninth * (got.own + got.load)[holds].min(),
        max(0.0, ninth * (4 * got.load.min() - 2 * clones.max())),
    )
    shown = got.moved_us
    for time_us, beside_us, blocks in zip(
        (got.there_us, got.there_us, got.back_us), hidden, (PUSH_BLOCKS, PUSH_BLOCKS, COLLECT_BLOCKS), strict=True
    ):
        unseen = min(time_us, beside_us)
        shown += time_us - unseen + unseen * blocks / job.cluster.gpu.num_sms.value
    return shown


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
    )
    plan = planner.plan(counts)
    columns = np.stack([_redirected(plan, rank, choices[rank], owners.host_columns(spare)) for rank in range(ranks)])
    slots = experts + ranks * spare
    made = replace(pushes(plan, job), moved_us=moved_us)
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
            if mode == "exact in the node" and shape.nodes == 1:
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
