"""Faults of the field notes, planted into our experts of a worker process: what the table of parity_field_table.py must
notice, and nothing in the library knows of.

Our experts get their rows in a static buffer: places behind the last row name row 0 again, as a gather with unused
places does, so that whatever is left there in a gradient lands on a real token.
"""

import contextlib

# the fault -> what it is; every one was found in somebody's training run or is the tempting wrong remedy for one
BREAKS = {
    "empty_wgrad": "an expert without rows gets the accumulator of the one before it as weight gradient",
    "tail_rows": "rows behind the last group keep what memory held, in outputs and in the hidden gradients",
    "count_clamp": "counts raised to 8 without adding rows: experts multiply their neighbour's rows",
    "rounding": "fp32 cut off to bf16 in place of rounded to nearest even (Triton's interpreter does that)",
    "prob_position": "the probability applied to the expert's input, before the nonlinearity",
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

    def forward(self, rows, tokens_per_expert, probs, **further):
        if not rows.shape[0]:
            return honest(self, rows, tokens_per_expert, probs, **further)
        place = _static_places(rows)
        out, bias = honest(
            self,
            rows[place],
            tokens_per_expert,
            probs[place] * (place.new_tensor([1] * rows.shape[0] + [0] * SLACK_ROWS)),
            **further,
        )
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
    return {
        "empty_wgrad": _empty_wgrad,
        "tail_rows": _tail_rows,
        "count_clamp": _count_clamp,
        "rounding": _rounding,
        "prob_position": _prob_position,
    }[name]()


def _empty_wgrad():
    import torch

    from hybrid_ep.moe import grouped

    honest = grouped._weight_gradients

    def weight_gradients(x, grad, groups, machine):
        stacks = honest(x, grad, groups, machine)
        experts = [dw for stack in stacks for dw in stack]  # views, so that what is written to them stays
        counts = torch.diff(groups.ends, prepend=groups.ends.new_zeros(1))
        for e in range(1, len(counts)):
            if counts[e] == 0:
                experts[e].copy_(experts[e - 1])
        return stacks

    return _attribute(grouped, "_weight_gradients", weight_gradients)


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
