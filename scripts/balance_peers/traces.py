"""Planners on recorded traces of real routers (scripts/record_router_traces.py): a trace is one layer of one run.

Judged are the last JUDGED steps of every trace, one plan a step; a static placement is made of the mean loads of WINDOW
steps that end k steps before the one it is judged on (`stale by k`), or once, of the last WINDOW steps before the first
one judged (`daily`: as far as an operator who plans once a day gets within the trace)."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch
from balance_peers import eplb

from hybrid_ep import balance
from hybrid_ep.balance.placement import rank_loads

JUDGED, WINDOW = 100, 8
STALE = (1, 10, 100)
SPARE = (1, 2)
EXPERTS_A_RANK = (4, 8)
PLACED = ("home", "slow", "apart")


def load(path: Path) -> tuple[dict[str, np.ndarray], dict[str, dict]]:
    """({run: int64 [steps, layers, experts]}, what each run was). ValueError for a file of another kind."""
    with np.load(path) as file:
        if "about" not in file:
            raise ValueError(f"{path}: holds no 'about': give a file of scripts/record_router_traces.py")
        about = json.loads(str(file["about"]))
        counts = {name: file[name].astype(np.int64) for name in about}
    short = {name: len(c) for name, c in counts.items() if len(c) < JUDGED + max(STALE) + WINDOW}
    if short:
        raise ValueError(f"{path}: steps of {short}: {JUDGED + max(STALE) + WINDOW} are needed, record longer runs")
    return counts, about


def static(counts: np.ndarray, num_ranks: int, stale: int | None) -> np.ndarray:
    """float64 [JUDGED, layers]: imbalance under EPLB's placements with one spare slot a rank. stale: steps between the
    loads and the step they are used in; None: planned once."""
    experts = counts.shape[2]
    slots = experts + num_ranks
    first = len(counts) - JUDGED
    left, placed = [], None
    for step in range(first, len(counts)):
        end = first if stale is None else step - stale + 1  # loads of the steps before `end` are known
        if stale is not None or placed is None:
            past = counts[end - WINDOW : end].sum(axis=0)
            placed = eplb.place(torch.from_numpy(past).float(), slots, 1, 1, num_ranks).numpy()
        left.append([balance.imbalance_ratio(row) for row in rank_loads(counts[step], placed, num_ranks)])
    return np.array(left)


def exact(counts: np.ndarray, num_ranks: int, spare: int, placed: np.ndarray | None = None) -> tuple[np.ndarray, ...]:
    """(imbalance, clones, above, proved) of exact plans, [JUDGED, layers] each. above: the fullest rank is above the
    target, of layers that were out of balance by more than the planner lets pass; proved: so it is in every plan.
    placed int [layers, experts]: the expert of every slot (default: in their order)."""
    num_experts = counts.shape[2]
    placed = np.arange(num_experts)[None].repeat(counts.shape[1], 0) if placed is None else placed
    planners = []
    for experts in placed:
        owner = np.empty(num_experts, np.int32)
        owner[experts] = np.arange(num_experts) // (num_experts // num_ranks)
        planners.append(balance.MicrobatchPlanner(num_ranks, num_experts, owner, spare_slots=spare))
    by_rank = np.zeros((num_ranks, counts.shape[2]), np.int64)  # no plan depends on who sends
    left, clones, above, proved = [], [], [], []
    for step in counts[-JUDGED:]:
        for planner, by_rank[0] in zip(planners, step, strict=True):
            plan = planner.plan(by_rank)
            left.append(plan.imbalance())
            clones.append(plan.num_copies)
            wanted = plan.imbalance(balanced=False) > planners[0].options.skip_below
            above.append(wanted and int(plan.tokens_of_ranks().max()) > plan.target)
            proved.append(above[-1] and round((1 + plan.bound()) * int(step.sum()) / num_ranks) > plan.target)
    shape = (JUDGED, counts.shape[1])
    return tuple(np.array(x).reshape(shape) for x in (left, clones, above, proved))


def shapes(counts: dict[str, np.ndarray]) -> list[tuple[str, int]]:
    """(run, ranks) of every row of the table."""
    found = [(name, run.shape[2] // share) for name, run in counts.items() for share in EXPERTS_A_RANK]
    return [(name, ranks) for name, ranks in found if ranks >= 4]


def unbalanced(counts: np.ndarray, num_ranks: int) -> np.ndarray:
    """float64 [JUDGED, layers]: imbalance of ranks without balancing."""
    by_rank = counts[-JUDGED:].reshape(JUDGED, counts.shape[1], num_ranks, -1).sum(axis=3)
    return np.array([[balance.imbalance_ratio(row) for row in step] for step in by_rank])


def check(made: list[dict], counts: dict[str, np.ndarray], stale_of: int = 1) -> None:
    """ValueError where rows of `rows` are not those of these counts: a row for every run and number of ranks, its means
    and mosts those of its traces, each recomputed; stale placements, which take longest, of `stale_of` rows."""
    have, wanted = [(row["run"], row["EP"]) for row in made], shapes(counts)
    if have != wanted:
        raise ValueError(f"the table has rows of {have}, its traces are {wanted}: make it again with bench_balance.py")
    for number, row in enumerate(made):
        run, ranks, where = counts[row["run"]], row["EP"], f"row {row['run']} at EP{row['EP']}"
        of_run = {"traces": run.shape[1], "experts": run.shape[2], "pairs a rank": int(run[-1, 0].sum()) // ranks}
        for what, value in of_run.items():
            if row[what] != value:
                raise ValueError(f"{where}: {what} is {row[what]}, its counts have {value}: make the table again")
        for what, by_trace in row["by trace"].items():
            most = row["most by trace"][what]
            if len(by_trace) != run.shape[1] or len(most) != run.shape[1]:
                raise ValueError(f"{where}: {what} has {len(by_trace)} traces of {run.shape[1]}: make the table again")
            same(f"{where}: {what} mean", row[f"{what} mean"], float(np.mean(by_trace)))
            same(f"{where}: {what} most", row[f"{what} most"], max(most))
        again = {"none": unbalanced(run, ranks), "EPLB daily": static(run, ranks, None)}
        again |= {f"exact +{spare}": exact(run, ranks, spare)[0] for spare in SPARE}
        again |= {f"EPLB stale {k}": static(run, ranks, k) for k in STALE if number < stale_of}
        for what, left in again.items():
            for trace, (mean, most) in enumerate(zip(left.mean(axis=0), left.max(axis=0), strict=True)):
                same(f"{where}: {what} of trace {trace}, mean", row["by trace"][what][trace], mean)
                same(f"{where}: {what} of trace {trace}, most", row["most by trace"][what][trace], most)


def same(what: str, written: float, computed: float) -> None:
    """ValueError where two numbers differ by more than rounding to four digits makes them."""
    if not abs(written - computed) <= 1e-4:
        raise ValueError(f"{what} is {written}, computed {computed:.6f}: make the table again with bench_balance.py")


def rows(counts: dict[str, np.ndarray]):
    """One row a run and number of experts a rank: over its traces and judged steps, mean and most of each."""
    for name, ranks in shapes(counts):
        run = counts[name]
        experts = run.shape[2]
        columns = {"none": unbalanced(run, ranks)}
        plans = {spare: exact(run, ranks, spare) for spare in SPARE}
        columns |= {f"exact +{spare}": plans[spare][0] for spare in SPARE}
        columns |= {"EPLB daily": static(run, ranks, None)}
        columns |= {f"EPLB stale {k}": static(run, ranks, k) for k in STALE}
        yield {
            "run": name,
            "traces": run.shape[1],
            "EP": ranks,
            "experts": experts,
            "pairs a rank": int(run[-1, 0].sum()) // ranks,
            **{f"{what} mean": float(x.mean()) for what, x in columns.items()},
            **{f"{what} most": float(x.max()) for what, x in columns.items()},
            **{f"clones +{spare}": float(plans[spare][1].mean()) for spare in SPARE},
            **{f"above +{spare}": int(plans[spare][2].sum()) for spare in SPARE},
            **{f"proved +{spare}": int(plans[spare][3].sum()) for spare in SPARE},
            "by trace": {what: [round(float(v), 4) for v in x.mean(axis=0)] for what, x in columns.items()},
            "most by trace": {what: [round(float(v), 4) for v in x.max(axis=0)] for what, x in columns.items()},
        }


def apart_rows(counts: dict[str, np.ndarray]):
    """One row a run and number of experts a rank: exact plans with one spare slot over three placements of the experts:
    at home, in their order; slow mode's by averages; and kept apart, by covariances as well. Both are planned once, of
    all steps before the first one judged."""
    for name, ranks in shapes(counts):
        run = counts[name]
        past, experts = run[:-JUDGED].transpose(1, 0, 2), run.shape[2]
        home = np.arange(experts)[None].repeat(run.shape[1], 0)
        load = past.sum(axis=1)
        slow = balance.plan_placement(load, experts, ranks, current=home)
        # Covariances times a constant, in whole numbers: the same bits on any machine.
        joint = past.shape[1] * np.einsum("lse,lsf->lef", past, past) - load[:, :, None] * load[:, None, :]
        apart = balance.plan_placement(load, experts, ranks, current=slow.phy2log, covariance=joint)
        row = {"run": name, "EP": ranks, "layers x steps": JUDGED * run.shape[1], "slots moved": int(apart.moved.sum())}
        for word, placed in (("home", home), ("slow", slow.phy2log), ("apart", apart.phy2log)):
            left, clones, above, _ = exact(run, ranks, 1, placed)
            before = np.stack([rank_loads(step, placed, ranks) for step in run[-JUDGED:]])
            row |= {
                f"none, {word}": float((before.max(axis=2) / before.mean(axis=2) - 1).mean()),
                f"above, {word}": int(above.sum()),
                f"most, {word}": float(left.max()),
                f"clones, {word}": float(clones.mean()),
            }
        yield row


def apart_markdown(made: list[dict]) -> str:
    """The table of a page."""
    head = ["run", "EP", "layers x steps"]
    lines = [[*head, *(f"{n}: home" if w == "home" else w for n in ("none", "above", "most") for w in PLACED), "slots"]]
    for row in made:
        cells = [row[h] for h in head] + [f"{row[f'none, {w}']:.3f}" for w in PLACED]
        cells += [row[f"above, {w}"] for w in PLACED] + [f"{row[f'most, {w}']:.3f}" for w in PLACED]
        lines.append([*cells, row["slots moved"]])
    lines.insert(1, ["---", *["---:"] * (len(lines[0]) - 1)])
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def markdown(made: list[dict]) -> str:
    """The table of a page: mean / most of each."""
    names = ["none", "exact +1", "exact +2", "EPLB daily", *(f"EPLB stale {k}" for k in STALE)]
    head = ["run", "traces", "EP", "pairs a rank", *names, "clones +1", "clones +2"]
    lines = ["| " + " | ".join(head) + " |", "|---" + "|---:" * (len(head) - 1) + "|"]
    for row in made:
        cells = [row["run"], row["traces"], row["EP"], f"{row['pairs a rank']:,}"]
        cells += [f"{row[f'{n} mean']:.3f} / {row[f'{n} most']:.2f}" for n in names]
        cells += [f"{row[f'clones +{spare}']:.1f}" for spare in SPARE]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)
