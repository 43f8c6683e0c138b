#!/usr/bin/env python
"""Parity: one seeded GPT, trained through Megatron's own token dispatchers and through hybrid_ep.

    python scripts/parity.py           fp32; allgather, alltoall and hybrid_ep; expert parallel 1, 2 and 4
    python scripts/parity.py --all     every variant: bf16, recompute, shared experts, overlap, capacity...
    python scripts/parity.py --quick   the subset CI runs

Four gloo ranks on a CPU, eight for EP 8. Loss and gradient norm of every step are compared with the first run of a
variant (alltoall at the smallest EP; in bf16 at the same EP). Exit 0 when all agree, 1 when a relative difference
exceeds the variant's tolerance (2e-6 in fp32), 2 when a run did not finish. `--sabotage BUG` plants a bug
in our dispatcher: it must exit 1. `--move weights` has experts' weights travel, those of our experts. `--field-notes`
is another table: see parity_field_table.py; with `--break NAME` it must exit 1 too, with `--break all` it exits 0 when
each fault is noticed.
"""

import argparse
import json
import sys

import parity_field_notes
import parity_field_table
import parity_world
from parity_worker import SABOTAGE, VARIANTS, Case, run_cases

NUM_RANKS = 4
QUICK = ("plain", "recompute", "starved")


def arguments(argv):
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument(
        "--ep", type=int, nargs="+", default=[1, 2, 4], choices=[1, 2, 4, 8], help="EP sizes; 8 makes it eight ranks"
    )
    parser.add_argument(
        "--hook",
        choices=["token_dispatcher", "deep_ep", "both"],
        default="token_dispatcher",
        help="how hybrid_ep gets into Megatron",
    )
    chosen = parser.add_mutually_exclusive_group()
    chosen.add_argument("--variant", nargs="+", choices=sorted(VARIANTS), default=None)
    chosen.add_argument("--all", action="store_true", help="every variant")
    chosen.add_argument("--quick", action="store_true", help="CI subset: EP 1 and 4, no allgather")
    chosen.add_argument("--field-notes", action="store_true", help="the table of the field notes: --seeds, --break")
    parser.add_argument("--seeds", type=int, default=2, help="with --field-notes: runs of every row")
    parser.add_argument(
        "--break",
        choices=[*parity_field_notes.BREAKS, "all"],
        default=None,
        dest="broken",
        help="with --field-notes: plant this fault into our experts (all: each in turn)",
    )
    parser.add_argument("--markdown", metavar="FILE", help="with --field-notes: write the tables there")
    parser.add_argument(
        "--move",
        choices=["tokens", "weights"],
        default="tokens",
        help="what travels in our runs; weights: of our experts, with the hook token_dispatcher",
    )
    parser.add_argument("--sabotage", choices=SABOTAGE, default="", help="put this bug into our dispatcher")
    parser.add_argument("--reference", action="store_true", help="hybrid_ep.reference in place of the engine")
    parser.add_argument("--per-step", action="store_true", help="print every step of every run")
    parser.add_argument("--json", metavar="FILE", help="write all records there")
    parser.add_argument("--timeout", type=float, default=900.0, help="seconds for all runs together")
    options = parser.parse_args(argv)
    if (options.broken or options.markdown) and not options.field_notes:
        parser.error("--break and --markdown belong to --field-notes")
    if options.sabotage and options.hook != "token_dispatcher":
        parser.error("--sabotage sits in our dispatcher: it needs --hook token_dispatcher")
    if options.move != "tokens" and (options.hook != "token_dispatcher" or options.reference or options.field_notes):
        parser.error("--move weights needs --hook token_dispatcher, and neither --reference nor --field-notes")
    return options


def plan(options, megatron_minor):
    """The cases to run, neighbours sharing an EP size as far as order allows, and sentences about those
    left out."""
    names = list(VARIANTS) if options.all else list(QUICK) if options.quick else options.variant or ["plain"]
    hooks = ["token_dispatcher", "deep_ep"] if options.hook == "both" else [options.hook]
    sizes = sorted(set(options.ep) & {1, 4} or options.ep) if options.quick else sorted(set(options.ep))
    cases, left_out = [], []
    for ep in sizes:
        for name in names:
            variant = VARIANTS[name]
            if megatron_minor < variant.since:
                left_out.append(f"{name}: Megatron-Core has it for the flex dispatcher since 0.{variant.since}")
                continue
            others = ["alltoall", "allgather"] if name == "plain" and not options.quick else ["alltoall"]
            for dispatcher in others + hooks:
                ours = dispatcher in hooks
                if dispatcher == "deep_ep" and ep == 1 and megatron_minor < 17:
                    left_out.append("s1 at EP 1: the flex dispatcher of Megatron-Core 0.16 needs more than one rank")
                    continue
                if ours and options.move == "weights" and variant.overlap:
                    left_out.append(f"{name}: refused with weights that travel, nothing of which is left to overlap")
                    continue
                overlap = variant.overlap and ours and ep > 1  # the baseline: the same steps, not overlapped
                cases.append(
                    Case(
                        name,
                        dispatcher,
                        ep,
                        options.steps,
                        overlap=overlap,
                        sabotage=options.sabotage if ours else "",
                        reference=ours and options.reference,
                        grouped=ours and options.move == "weights",
                        move=options.move if ours else "tokens",
                    )
                )
    return cases, sorted(set(left_out))


def differences(record, baseline):
    """Largest relative difference of loss and of gradient norm over the steps."""

    def largest(key):
        pairs = list(zip(record[key], baseline[key], strict=True))
        return max(abs(a - b) / abs(b) if a == a else float("inf") for a, b in pairs)  # a nan differs from everything

    return largest("loss"), largest("grad_norm")


def compare(cases, records):
    """One row a case: (case, record, loss difference, norm difference, within tolerance)."""
    baselines, rows = {}, []
    for case, record in zip(cases, records, strict=True):
        variant = VARIANTS[case.variant]
        baseline = baselines.setdefault((case.variant, case.ep if variant.same_ep else None), record)
        loss, norm = differences(record, baseline)
        largest_loss, largest_norm = variant.tolerance, variant.norm_tolerance
        if case.grouped and variant.dtype == "bfloat16":  # our experts round at other places than Megatron's
            largest_loss, largest_norm, _ = parity_field_table.TOLERANCES["bf16"]
        rows.append((case, record, loss, norm, loss <= largest_loss and norm <= largest_norm))
    return rows


def label(case):
    """How a dispatcher is called in the table."""
    name = {"token_dispatcher": "hybrid_ep", "deep_ep": "hybrid_ep (s1)"}.get(case.dispatcher, case.dispatcher)
    name += " weights" if case.move == "weights" else ""
    return name + (" reference" if case.reference else "") + (f" +{case.sabotage}" if case.sabotage else "")


def print_table(rows, per_step):
    """The table, grouped by variant."""
    print(
        f"{'variant':16}{'dispatcher':22}{'EP':>3}{'loss first':>12}{'last':>10}{'grad norm':>11}{'last':>9}"
        f"{'d loss':>10}{'d norm':>10}  ok"
    )
    for case, record, loss, norm, ok in sorted(rows, key=lambda row: list(VARIANTS).index(row[0].variant)):
        values, norms = record["loss"], record["grad_norm"]
        print(
            f"{case.variant:16}{label(case):22}{case.ep:3}{values[0]:12.6f}{values[-1]:10.6f}{norms[0]:11.6f}"
            f"{norms[-1]:9.6f}{loss:10.1e}{norm:10.1e}  {'yes' if ok else 'NO'}"
        )
        if per_step:
            for step, (value, size) in enumerate(zip(values, norms, strict=True)):
                print(f"{'':16}step {step:3}  loss {value:.9f}  grad norm {size:.9f}")


def megatron_minor():
    """Minor number of the megatron-core that would be imported, without importing it."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return int(version("megatron-core").split(".")[1])
    except PackageNotFoundError:
        sys.exit("megatron-core is not installed: pip install 'megatron-core>=0.16,<0.20'")


def main(argv=None):
    """Run, print, and return the exit code."""
    options = arguments(argv)
    num_ranks = max(NUM_RANKS, *options.ep)
    if options.field_notes:
        return parity_field_table.report(options, num_ranks)
    cases, left_out = plan(options, megatron_minor())
    try:
        outcome = parity_world.run_world(run_cases, num_ranks, (cases,), timeout_s=options.timeout)[0]
    except parity_world.WorldError as error:
        print(f"parity: no result\n{error}", file=sys.stderr)
        return 2
    rows = compare(cases, outcome["records"])
    print(
        f"# megatron-core {outcome['megatron_core']}, torch {outcome['torch']}, {num_ranks} gloo ranks, "
        f"{options.steps} steps, relative differences against the first row of each variant"
    )
    print_table(rows, options.per_step)
    for sentence in left_out:
        print(f"# left out: {sentence}")
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump(
                [
                    {"case": vars(case), **record, "loss_difference": loss, "norm_difference": norm, "ok": ok}
                    for case, record, loss, norm, ok in rows
                ],
                file,
                indent=1,
            )
    bad = sum(not row[-1] for row in rows)
    print(f"# {len(rows) - bad} of {len(rows)} runs agree")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
