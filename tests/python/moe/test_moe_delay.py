"""Grouped GEMM whose first stack's weight gradients are made later: the bits of those that are made in the backward."""

from __future__ import annotations

import itertools

import pytest
import torch
from test_moe_grouped import COUNTS, offsets_of, problem
from test_moe_turns import Bringer

from hybrid_ep.moe import grouped_mm


def gradients(counts, tail, cuts, backend, delay=None, arrives=False):
    x, w, grad = problem(counts, tail, torch.float32, transposed=True)
    parts = [part.clone().requires_grad_() for part in w.tensor_split(list(cuts))]
    x.requires_grad_()
    bringer = Bringer(parts[1:]) if arrives else None
    first_rows = [sum(counts[:cut]) for cut in (0, *cuts)]
    how = {"backend": backend, "first_rows": first_rows, "arriving": bringer, "delay": delay}
    grouped_mm(x, parts, offsets_of(counts), **how).backward(grad)
    return x.grad, parts[0].grad, [part.grad for part in parts[1:]] if bringer is None else bringer.made


@pytest.mark.parametrize("arrives", [False, True])
@pytest.mark.parametrize("backend", ["torch", "loop"])
def test_what_is_made_later_has_the_bits_of_what_is_not(backend, arrives):
    for counts, tail, cuts in itertools.product(COUNTS, (0, 5), ((), (2,), (1, 2))):
        if not sum(counts) + tail or (arrives and not cuts):
            continue
        case, later = (counts, tail, cuts, backend), []
        dx, first, others = gradients(*case, arrives=arrives)
        got_dx, none, got_others = gradients(*case, delay=later.append, arrives=arrives)
        assert none is None and torch.equal(got_dx, dx), case
        assert all(torch.equal(a, b) for a, b in zip(got_others, others, strict=True)), case
        (make,) = later
        assert torch.equal(make(), first), case


def test_nothing_is_left_for_weights_that_are_frozen():
    later = []
    x, w, grad = problem((3, 2), 0, torch.float32)
    grouped_mm(x.requires_grad_(), w, offsets_of((3, 2)), delay=later.append).backward(grad)
    assert x.grad is not None and not later


def test_what_cannot_be_called_is_refused():
    x, w, _ = problem((3, 2), 0, torch.float32)
    with pytest.raises(ValueError, match="delay=1 is not callable; give a function of a function, or None"):
        grouped_mm(x, w, offsets_of((3, 2)), delay=1)
