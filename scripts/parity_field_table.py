"""The parity table of `python scripts/parity.py --field-notes`, and what must move it.

Megatron's alltoall with SequentialMLP against hybrid_ep with grouped experts. fp32 and bf16; router as it is,
force-load-balanced, or trained from scratch with three of eight experts closed at first. `--break NAME` plants one
fault of parity_field_notes.py.
"""

import json

import parity_world
from parity_field_notes import BREAKS
from parity_worker import EXPERTS, Case, run_cases

CASES = (
    "notes_fp32",
    "notes_bf16",
    "notes_forced_fp32",
    "notes_forced_bf16",
    "notes_opening_fp32",
    "notes_opening_bf16",
)
NUMBERS = ("loss", "grad_norm", "expert_output")
# Largest relative difference over the steps, of each of NUMBERS. In bf16 the two dispatchers round at other places, and
# where the router learns that moves tokens to other experts; with forced routing it does not.
TOLERANCES = {"fp32": (2e-6, 2e-6, 2e-6), "forced bf16": (2e-4, 5e-3, 1e-3), "bf16": (1e-3, 3e-2, 3e-2)}


def tolerances(variant):
    """(loss, gradient norm, expert output) of a variant."""
    return TOLERANCES["fp32" if variant.endswith("fp32") else "forced bf16" if "forced" in variant else "bf16"]


def plan(sizes, seeds, steps, broken):
    """The cases, neighbours sharing an EP size. broken: "" for none, "all", or one of BREAKS; faults at seed 0 only, of
    the largest EP size that leaves a rank two experts: an expert without neighbours cannot take from them."""
    faults = [] if not broken else list(BREAKS) if broken == "all" else [broken]
    cases, faulty_ep = [], max((ep for ep in sizes if EXPERTS // ep > 1), default=sizes[-1])
    for ep in sizes:
        for seed in range(seeds):
            for name in CASES:
                cases.append(Case(name, "alltoall", ep, steps, seed=seed))
                cases.append(Case(name, "token_dispatcher", ep, steps, seed=seed, grouped=True))
                if ep == faulty_ep and seed == 0:
                    cases += [
                        Case(name, "token_dispatcher", ep, steps, seed=seed, grouped=True, broken=fault)
                        for fault in faults
                    ]
    return cases


def compared(cases, records):
    """[(case, record, differences, all within tolerance)]; fp32 against alltoall at the smallest EP size. bf16 against
    alltoall at the same, whose sums are rounded in the same places; forced routing too, because Megatron draws it from
    a generator seeded by the expert-parallel rank, so that each EP size routes differently."""
    baselines, rows = {}, []
    for case, record in zip(cases, records, strict=True):
        at = case.ep if case.variant.endswith("bf16") or "forced" in case.variant else None
        base = baselines.setdefault((case.variant, case.seed, at), record)
        found = [
            max(abs(a - b) / abs(b) if a == a else float("inf") for a, b in zip(record[k], base[k], strict=True))
            for k in NUMBERS
        ]
        limits = tolerances(case.variant)
        rows.append((case, record, found, all(d <= limit for d, limit in zip(found, limits, strict=True))))
    return rows


def tables(rows):
    """Markdown: a row a run, then a row a fault and variant."""
    head = (
        "variant",
        "build",
        "EP",
        "seed",
        "loss first, last",
        "norm first, last",
        "empty groups",
        "d loss",
        "d norm",
        "d output",
        "within",
    )
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    for case, record, found, ok in rows:
        name = (
            "alltoall, SequentialMLP"
            if not case.grouped
            else "hybrid_ep, grouped" + (f", **{case.broken}**" if case.broken else "")
        )
        loss, norm, empty = record["loss"], record["grad_norm"], record["empty"]
        lines.append(
            f"| {case.variant.removeprefix('notes_')} | {name} | {case.ep} | {case.seed} "
            f"| {loss[0]:.6f}, {loss[-1]:.6f} | {norm[0]:.5f}, {norm[-1]:.5f} | {empty[0]} to {empty[-1]} | "
            + " | ".join(f"{d:.1e}" for d in found)
            + f" | {'yes' if ok else '**no**'} |"
        )
    return "\n".join(lines)


def report(options, num_ranks):
    """Run, print, write, and return the exit code: 0 when every honest row is within its tolerances and, with
    `--break all`, every fault puts a row beyond them; with one fault, 1 when it does."""
    cases = plan(sorted(set(options.ep)), options.seeds, options.steps, options.broken or "")
    outcome = parity_world.run_world(run_cases, num_ranks, (cases,), timeout_s=options.timeout)[0]
    rows = compared(cases, outcome["records"])
    text = tables(rows)
    honest = sum(not ok for case, *_, ok in rows if not case.broken)
    noticed = {
        fault: [c.variant.removeprefix("notes_") for c, *_, ok in rows if c.broken == fault and not ok]
        for fault in dict.fromkeys(case.broken for case in cases if case.broken)
    }
    setting = (
        f"megatron-core {outcome['megatron_core']}, torch {outcome['torch']}, {num_ranks} gloo ranks, "
        f"{options.steps} steps"
    )
    print(f"# {setting}\n{text}")
    for fault, where in noticed.items():
        print(f"# {fault} ({BREAKS[fault]}): {'moves ' + ', '.join(where) if where else 'NOT NOTICED'}")
    print(f"# {honest} honest rows beyond their tolerances")
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump(
                {
                    "megatron_core": outcome["megatron_core"],
                    "torch": outcome["torch"],
                    "steps": options.steps,
                    "tolerances": TOLERANCES,
                    "noticed": noticed,
                    "rows": [{"case": vars(c), **r, "differences": d, "ok": ok} for c, r, d, ok in rows],
                },
                file,
            )
            file.write("\n")
    if options.markdown:
        with open(options.markdown, "w", encoding="utf-8") as file:
            file.write(
                f"# Parity of the field notes\n\n{setting}\n\n{text}\n\n"
                + "".join(
                    f"* `{fault}`: {BREAKS[fault]}. Beyond tolerance in {', '.join(where) or 'no row'}.\n"
                    for fault, where in noticed.items()
                )
            )
    if options.broken in BREAKS:
        return 1 if honest or noticed[options.broken] else 0
    return 1 if honest or not all(noticed.values()) else 0
