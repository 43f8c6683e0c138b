"""The parity table of `python scripts/parity.py --field-notes`, and what must move it.

Megatron's alltoall with SequentialMLP against hybrid_ep with grouped experts, which get their rows in a static buffer:
places behind the last row name row 0 again, as a gather with unused places does, so that whatever is left there in a
gradient lands on a real token. fp32 and bf16; router as it is, force-load-balanced, or trained from scratch with three
of eight experts closed at first. `--break NAME` plants one fault of the field notes into our experts of the worker
process; nothing in the library knows of it.
"""

import contextlib
import json

# the fault -> what it is; every one was found in somebody's training run or is the tempting wrong remedy for one
BREAKS = {
    "empty_wgrad": "an expert without rows gets the accumulator of the one before it as weight gradient",
    "tail_rows": "rows behind the last group keep what memory held, in outputs and in the hidden gradients",
    "count_clamp": "counts raised to 8 without adding rows: experts multiply their neighbour's rows",
    "rounding": "fp32 cut off to bf16 in place of rounded to nearest even (Triton's interpreter does that)",
    "prob_position": "the probability applied to the expert's input, before the nonlinearity",
}
CASES = ("notes_fp32", "notes_bf16", "notes_forced_fp32", "notes_forced_bf16", "notes_opening_fp32",
         "notes_opening_bf16")
NUMBERS = ("loss", "grad_norm", "expert_output")
# Largest relative difference over the steps, of each of NUMBERS. In bf16 the two dispatchers round at other places, and
# where the router learns that moves tokens to other experts; with forced routing it does not.
TOLERANCES = {
    "fp32": (2e-6, 2e-6, 2e-6),
    "forced bf16": (2e-4, 5e-3, 1e-3),
    "bf16": (1e-3, 3e-2, 3e-2),
}
SLACK_ROWS = 16
STALE = 3.0  # what memory held


@contextlib.contextmanager
def built(case):
    """Our experts on a static buffer, with the fault of the case in them; Megatron's are left alone."""
    if not case.grouped:
        yield
        return
    from megatron_patches.experts import GroupedExperts

    honest = GroupedExperts.forward

    def forward(self, rows, tokens_per_expert, probs):
        if not rows.shape[0]:
            return honest(self, rows, tokens_per_expert, probs)
        place = _static_places(rows)
        out, bias = honest(self, rows[place], tokens_per_expert, probs[place] * (place.new_tensor(
            [1] * rows.shape[0] + [0] * SLACK_ROWS)))
        return out[: rows.shape[0]], bias

    with _attribute(GroupedExperts, "forward", forward), _fault(case.broken):
        yield


def _static_places(rows):
    import torch

    return torch.cat([torch.arange(rows.shape[0]), torch.zeros(SLACK_ROWS, dtype=torch.int64)])


@contextlib.contextmanager
def _attribute(owner, name, value):
    before = owner.__dict__[name]
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def _fault(name):
    if not name:
        return contextlib.nullcontext()
    return {"empty_wgrad": _empty_wgrad, "tail_rows": _tail_rows, "count_clamp": _count_clamp, "rounding": _rounding,
            "prob_position": _prob_position}[name]()


def _empty_wgrad():
    import torch

    from hybrid_ep.moe import grouped

    honest = grouped._weight_gradient

    def weight_gradient(x, grad, offsets, backend, remedy):
        dw = honest(x, grad, offsets, backend, remedy)
        counts = torch.diff(offsets, prepend=offsets.new_zeros(1))
        for e in range(1, len(counts)):
            if counts[e] == 0:
                dw[e] = dw[e - 1]
        return dw

    return _attribute(grouped, "_weight_gradient", weight_gradient)


def _tail_rows():
    from hybrid_ep.moe import padding

    def stale(rows, offsets):
        rows[int(offsets[-1]) :] = STALE
        return rows

    return _attribute(padding, "zero_tail_", stale)


def _count_clamp():
    from megatron_patches.experts import GroupedExperts

    honest = GroupedExperts.__dict__["group_ends"].__func__

    def group_ends(tokens_per_expert, rows):
        ends, _ = honest(tokens_per_expert.clamp(min=8), rows)
        return ends.clamp(max=rows.shape[0]), True

    return _attribute(GroupedExperts, "group_ends", staticmethod(group_ends))


def _rounding():
    import torch

    from hybrid_ep.moe import activations

    forward, backward = activations._forward, activations._backward

    def cut(x, like):
        if like.dtype != torch.bfloat16:
            return x
        bits = x.float().view(torch.int32) & ~0xFFFF
        return bits.view(torch.float32).to(torch.bfloat16)

    def cut_forward(h, prob, kind):
        return cut(forward(h.float(), prob, kind), h)

    def cut_backward(h, prob, grad, kind, want_dprob):
        dh, dprob = backward(h.float(), prob, grad.float(), kind, want_dprob)
        return cut(dh, h), dprob

    stack = contextlib.ExitStack()
    stack.enter_context(_attribute(activations, "_forward", cut_forward))
    stack.enter_context(_attribute(activations, "_backward", cut_backward))
    return stack


def _prob_position():
    from megatron_patches.experts import GroupedExperts

    honest = GroupedExperts.__dict__["forward"]

    def forward(self, rows, tokens_per_expert, probs):
        return honest(self, (rows * probs.unsqueeze(-1)).to(rows.dtype), tokens_per_expert, (probs > 0).float())

    return _attribute(GroupedExperts, "forward", forward)


# ---- the table

def tolerances(variant):
    """(loss, gradient norm, expert output) of a variant."""
    return TOLERANCES["fp32" if variant.endswith("fp32") else "forced bf16" if "forced" in variant else "bf16"]


def plan(sizes, seeds, steps, broken):
    """The cases, neighbours sharing an EP size. broken: "" for none, "all", or one of BREAKS; faults at seed 0 only, of
    the largest EP size that leaves a rank two experts: an expert without neighbours cannot take from them."""
    from parity_worker import EXPERTS, Case

    faults = [] if not broken else list(BREAKS) if broken == "all" else [broken]
    cases, faulty_ep = [], max((ep for ep in sizes if EXPERTS // ep > 1), default=sizes[-1])
    for ep in sizes:
        for seed in range(seeds):
            for name in CASES:
                cases.append(Case(name, "alltoall", ep, steps, seed=seed))
                cases.append(Case(name, "s3", ep, steps, seed=seed, grouped=True))
                if ep == faulty_ep and seed == 0:
                    cases += [Case(name, "s3", ep, steps, seed=seed, grouped=True, broken=fault) for fault in faults]
    return cases


def compared(cases, records):
    """[(case, record, differences, all within tolerance)]; fp32 against alltoall at the smallest EP size. bf16 against
    alltoall at the same, whose sums are rounded in the same places; forced routing too, because Megatron draws it from
    a generator seeded by the expert-parallel rank, so that each EP size routes differently."""
    baselines, rows = {}, []
    for case, record in zip(cases, records, strict=True):
        at = case.ep if case.variant.endswith("bf16") or "forced" in case.variant else None
        base = baselines.setdefault((case.variant, case.seed, at), record)
        found = [max(abs(a - b) / abs(b) if a == a else float("inf") for a, b in zip(record[k], base[k], strict=True))
                 for k in NUMBERS]
        limits = tolerances(case.variant)
        rows.append((case, record, found, all(d <= limit for d, limit in zip(found, limits, strict=True))))
    return rows


def tables(rows):
    """Markdown: a row a run, then a row a fault and variant."""
    head = ("variant", "build", "EP", "seed", "loss first, last", "norm first, last", "empty groups", "d loss",
            "d norm", "d output", "within")
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    for case, record, found, ok in rows:
        name = "alltoall, SequentialMLP" if not case.grouped else "hybrid_ep, grouped" + (
            f", **{case.broken}**" if case.broken else "")
        loss, norm, empty = record["loss"], record["grad_norm"], record["empty"]
        lines.append(
            f"| {case.variant.removeprefix('notes_')} | {name} | {case.ep} | {case.seed} "
            f"| {loss[0]:.6f}, {loss[-1]:.6f} | {norm[0]:.5f}, {norm[-1]:.5f} | {empty[0]} to {empty[-1]} | "
            + " | ".join(f"{d:.1e}" for d in found) + f" | {'yes' if ok else '**no**'} |")
    return "\n".join(lines)


def report(options, num_ranks):
    """Run, print, write, and return the exit code: 0 when every honest row is within its tolerances and, with
    `--break all`, every fault puts a row beyond them; with one fault, 1 when it does."""
    import parity_world
    from parity_worker import run_cases

    cases = plan(sorted(set(options.ep)), options.seeds, options.steps, options.broken or "")
    outcome = parity_world.run_world(run_cases, num_ranks, (cases,), timeout_s=options.timeout)[0]
    rows = compared(cases, outcome["records"])
    text = tables(rows)
    honest = sum(not ok for case, *_, ok in rows if not case.broken)
    noticed = {fault: [c.variant.removeprefix("notes_") for c, *_, ok in rows if c.broken == fault and not ok]
               for fault in dict.fromkeys(case.broken for case in cases if case.broken)}
    setting = (f"megatron-core {outcome['megatron_core']}, torch {outcome['torch']}, {num_ranks} gloo ranks, "
               f"{options.steps} steps")
    print(f"# {setting}\n{text}")
    for fault, where in noticed.items():
        print(f"# {fault} ({BREAKS[fault]}): {'moves ' + ', '.join(where) if where else 'NOT NOTICED'}")
    print(f"# {honest} honest rows beyond their tolerances")
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump({"megatron_core": outcome["megatron_core"], "torch": outcome["torch"], "steps": options.steps,
                       "tolerances": TOLERANCES, "noticed": noticed,
                       "rows": [{"case": vars(c), **r, "differences": d, "ok": ok} for c, r, d, ok in rows]}, file)
            file.write("\n")
    if options.markdown:
        with open(options.markdown, "w", encoding="utf-8") as file:
            file.write(f"# Parity of the field notes\n\n{setting}\n\n{text}\n\n" + "".join(
                f"* `{fault}`: {BREAKS[fault]}. Beyond tolerance in {', '.join(where) or 'no row'}.\n"
                for fault, where in noticed.items()))
    if options.broken in BREAKS:
        return 1 if honest or noticed[options.broken] else 0
    return 1 if honest or not all(noticed.values()) else 0
