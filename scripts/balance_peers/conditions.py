"""Conditions that planners are measured under besides the tables of bench_balance.py: loads of any scale, steep loads,
placements that have to change, experts that are hot together, and how long plans of these take. Each function yields
the rows of one table."""

from __future__ import annotations

import time

import numpy as np
import torch
from balance_peers import eplb

from hybrid_ep import balance
from hybrid_ep.balance import loads
from hybrid_ep.balance.placement import rank_loads

SHAPES = [
    ("global 16", 272, 1, 1, 16),
    ("global 32", 288, 1, 1, 32),
    ("global 64", 320, 1, 1, 64),
    ("hierarchical 32/4", 288, 8, 4, 32),
]
LARGE = ("512 experts, global 64", 576, 1, 1, 64)
KINDS = [("zipf", value) for value in (0.8, 1.2, 1.4, 2.0, 2.5, 3.0)] + [
    ("lognormal", value) for value in (1.0, 2.0, 3.0)
]
# name, ranks, blocks: as many as ranks, or groups
BLOCKS = [
    ("rank's experts, EP16", 16, 16),
    ("rank's experts, EP32", 32, 32),
    ("rank's experts, EP64", 64, 64),
    ("8 groups, EP32", 32, 8),
    ("8 groups, EP64", 64, 8),
]
# ranks, experts: of the table of times
TIMED = [(16, 256), (32, 256), (64, 256), (128, 256), (256, 256), (128, 512), (256, 512), (512, 512)]


def seconds(call, calls=3):
    """Processor time of this thread, the least of so many calls."""
    times = []
    for _ in range(calls):
        start = time.thread_time_ns()
        call()
        times.append(time.thread_time_ns() - start)
    return min(times) / 1e9


def scale_rows(rng):
    """Float loads by their sum: imbalance left, in truth and as the plan says, and layers planned as in whole units."""
    share = loads.popularity(rng, 10, 256, "lognormal", 1.0)
    whole = balance.plan_placement(share, 288, 32)
    for total in (1e-300, 1e-30, 1e-6, 1e-3, 0.01, 0.1, 1.0, 1e6, 1e30, 1e300):
        plan = balance.plan_placement(share * total, 288, 32)
        true = (
            whole.imbalance(share)
            if (plan.phy2log == whole.phy2log).all()
            else balance.PlacementPlan(plan.phy2log, share, 32, plan.moved, plan.kept, plan.fresh).imbalance()
        )
        yield {
            "sum": total,
            "left": true.max(),
            "said": plan.imbalance().max(),
            "same plan": int((plan.phy2log == whole.phy2log).all(axis=1).sum()),
        }


def fresh_rows(rng, num_layers):
    """Fresh plans of float loads against EPLB in its float32, and the time of both calls."""
    for name, slots, groups, nodes, ranks in [*SHAPES, LARGE]:
        experts = 512 if name == LARGE[0] else 256
        for kind, value in KINDS:
            load = loads.popularity(rng, num_layers, experts, kind, value)
            weight, shape = torch.from_numpy(load), (slots, groups, nodes, ranks)
            theirs = rank_loads(load, eplb.place(weight, *shape).numpy(), ranks).max(axis=1)
            ours = rank_loads(load, balance.rebalance_experts(weight, *shape)[0].numpy(), ranks).max(axis=1)
            ours_s = seconds(lambda w=weight, s=shape: balance.rebalance_experts(w, *s))
            their_s = seconds(lambda w=weight, s=shape: eplb.place(w, *s))
            yield {
                "case": name,
                "load": f"{kind} {value}",
                "eplb": (theirs * ranks - 1).mean(),
                "ours": (ours * ranks - 1).mean(),
                "ours max": (ours * ranks - 1).max(),
                "behind": int((ours > theirs * (1 + 1e-12)).sum()),
                "ours us a layer": ours_s / num_layers * 1e6,
                "eplb here / ours": their_s / ours_s,
            }


def incremental_rows(rng, num_layers):
    """From the placement of other loads: where it ends beside a fresh plan, changed slots, and why."""
    for name, slots, groups, nodes, ranks in SHAPES:
        hier = groups if groups > 1 else 0
        for kind, value in KINDS:
            for drift in (0.15, 0.5, None):
                share = loads.popularity(rng, num_layers, 256, kind, value)
                later = share[::-1].copy() if drift is None else loads.drift(rng, share, drift)
                first = balance.plan_placement(share, slots, ranks, nodes, num_groups=hier)
                call = dict(
                    load=later,
                    num_slots=slots,
                    num_ranks=ranks,
                    num_nodes=nodes,
                    num_groups=hier,
                    current=first.phy2log,
                )
                start = time.thread_time_ns()
                plan = balance.plan_placement(**call)
                used = (time.thread_time_ns() - start) / 1e6 / num_layers
                each = [
                    seconds(
                        lambda one=slice(n, n + 1), all=call: balance.plan_placement(
                            **all | {"load": all["load"][one], "current": all["current"][one]}
                        )
                    )
                    for n in range(num_layers)
                ]
                over = plan.imbalance() - np.maximum(plan.target, plan.fresh + 0.01)
                yield {
                    "case": name,
                    "load": f"{kind} {value}",
                    "drift": "other layer" if drift is None else drift,
                    "fresh": plan.fresh.mean(),
                    "left": plan.imbalance().mean(),
                    "above fresh + 1 % and target": int((over > 1e-9).sum()),
                    "slots": plan.moved.mean(),
                    "slots max": int(plan.moved.max()),
                    "ms a layer": used,
                    "ms max": max(each) * 1e3,
                }


def together_rows(rng, num_layers, tokens):
    """Exact plans where experts are hot together: layers above 1 %, how many of them no plan levels, by slots."""
    for name, ranks, blocks in BLOCKS:
        for across in (0.3, 0.6, 1.0):
            share = loads.correlated(rng, num_layers, 256, blocks, across, 0.3)
            total = rng.multinomial(tokens * ranks, share)
            for spare in (1, 2, 4):
                planner = balance.MicrobatchPlanner(ranks, 256, spare_slots=spare)
                counts, left, bound, used, bound_used = np.zeros((ranks, 256), np.int64), [], [], [], []
                for counts[0] in total:
                    start = time.thread_time_ns()
                    plan = planner.plan(counts)
                    used.append((time.thread_time_ns() - start) / 1e3)
                    left.append(plan.imbalance())
                    start = time.thread_time_ns()
                    bound.append(plan.bound())
                    bound_used.append((time.thread_time_ns() - start) / 1e6)
                left, bound = np.array(left), np.array(bound)
                yield {
                    "case": name,
                    "across": across,
                    "slots": spare,
                    "layers": num_layers,
                    "above 1 %": int((left > 0.0101).sum()),
                    "proved": int((bound > 0.0101).sum()),
                    "left": left.mean(),
                    "left max": left.max(),
                    "bound": np.maximum(bound, 0).mean(),
                    "most above bound": (left - np.maximum(bound, 0.01)).max(),
                    "us": np.median(used),
                    "us max": max(used),
                    "bound ms max": max(bound_used),
                }


def time_rows(rng, num_layers, tokens):
    """Processor time of exact plans where experts are hot together: ranks' experts and 8 groups, log-popularity sigma
    0.3 to 1.5 of a block and 0 or 0.3 of each expert, so many layers each; a row a shape and number of slots. Of each
    layer the best of five calls; "worst once" is the slowest first call."""
    for ranks, experts in TIMED:
        for spare in (1, 2, 4):
            planner, slowest = balance.MicrobatchPlanner(ranks, experts, spare_slots=spare), []
            for blocks in (ranks, 8):
                for across in (0.3, 0.6, 1.0, 1.5):
                    for within in (0.0, 0.3):
                        share = loads.correlated(rng, num_layers, experts, blocks, across, within)
                        counts, used, once = np.zeros((ranks, experts), np.int64), [], []
                        for counts[0] in rng.multinomial(tokens * ranks, share):
                            once.append(seconds(lambda p=planner, c=counts: p.plan(c), 1) * 1e6)
                            used.append(seconds(lambda p=planner, c=counts: p.plan(c), 5) * 1e6)
                        kind = "8 groups" if blocks == 8 else "rank's experts"
                        slowest.append((max(used), float(np.median(used)), max(once), kind, across, within))
            yield {
                "ranks": ranks,
                "experts": experts,
                "slots": spare,
                "layers": num_layers * len(slowest),
                "us, median of the fastest case": min(row[1] for row in slowest),
                "of the slowest": max(row[1] for row in slowest),
                "us, worst layer": max(slowest)[0],
                "worst once": max(row[2] for row in slowest),
                "the worst's case": "{3}, sigma {4} and {5}".format(*max(slowest)),
            }


def apart_rows(rng, num_batches, tokens):
    """Slow placements by averages, and by covariances as well, of 200 micro-batches whose blocks of experts are hot
    together, anew in each; judged on `num_batches` others: imbalance without clones, micro-batches that exact plans
    with one slot leave above 1 %. Slots: changed by the covariances, and again by those of 200 more micro-batches."""
    for name, ranks, blocks in BLOCKS:
        for across in (0.3, 0.6, 1.0):
            lasting = rng.normal(0.0, 0.3, 256)

            def drawn(number, ranks=ranks, blocks=blocks, across=across, lasting=lasting):
                block = np.repeat(rng.normal(0.0, across, (number, blocks)), 256 // blocks, axis=1)
                share = np.exp(block + lasting)
                return rng.multinomial(tokens * ranks, share / share.sum(axis=1, keepdims=True))

            past, later, now = drawn(200), drawn(200), drawn(num_batches)
            load = past.mean(axis=0, keepdims=True)
            plain = balance.plan_placement(load, 256, ranks, current=np.arange(256)[None])
            start = time.thread_time_ns()
            joint = np.cov(past.T.astype(float))[None]
            apart = balance.plan_placement(load, 256, ranks, current=plain.phy2log, covariance=joint)
            used = (time.thread_time_ns() - start) / 1e6
            joint = np.cov(later.T.astype(float))[None]
            load = later.mean(axis=0, keepdims=True)
            again = balance.plan_placement(load, 256, ranks, current=apart.phy2log, covariance=joint)
            row = {"case": name, "across": across}
            for word, placed in (("averages", plain.phy2log[0]), ("apart", apart.phy2log[0])):
                owner = np.empty(256, np.int32)
                owner[placed] = np.arange(256) // (256 // ranks)
                planner, left, before = balance.MicrobatchPlanner(ranks, 256, owner, spare_slots=1), [], []
                counts = np.zeros((ranks, 256), np.int64)
                for counts[0] in now:
                    plan = planner.plan(counts)
                    left.append(plan.imbalance())
                    before.append(plan.imbalance(balanced=False))
                row |= {
                    f"none, {word}": np.mean(before),
                    f"above 1 %, {word}": int((np.array(left) > 0.0101).sum()),
                    f"left, {word}": np.mean(left),
                    f"most, {word}": max(left),
                }
            yield row | {"batches": num_batches, "slots": int(apart.moved[0]), "again": int(again.moved[0]), "ms": used}
