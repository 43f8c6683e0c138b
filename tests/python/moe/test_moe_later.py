"""Grouped GEMM that makes the first stack's weight gradients later, or its rows again: the bits of one that does
neither, and what is kept meanwhile."""

from __future__ import annotations

import itertools
import weakref

import pytest
import torch
from test_moe_grouped import COUNTS, offsets_of, problem
from test_moe_turns import Bringer

from hybrid_ep.moe import grouped_mm


def gradients(counts, tail, cuts, backend, arrives=False, remake=False, **wishes):
    x, w, grad = problem(counts, tail, torch.float32, transposed=True)
    parts = [part.clone().requires_grad_() for part in w.tensor_split(list(cuts))]
    x.requires_grad_()
    bringer, rows = Bringer(parts[1:]) if arrives else None, x
    if remake:  # rows that are made of x, as by an activation
        rows, kept = x * 1, x.detach()
        wishes["remake"] = (lambda kept: kept * 1, (kept,))
    first_rows = [sum(counts[:cut]) for cut in (0, *cuts)]
    out = grouped_mm(
        rows, parts, offsets_of(counts), backend=backend, first_rows=first_rows, arriving=bringer, **wishes
    )
    made, rows = weakref.ref(rows), None
    assert remake == (made() is None), "rows that can be made again are not kept"
    out.backward(grad)
    return x.grad, parts[0].grad, [part.grad for part in parts[1:]] if bringer is None else bringer.made


@pytest.mark.parametrize("remake", [False, True])
@pytest.mark.parametrize("arrives", [False, True])
@pytest.mark.parametrize("backend", ["torch", "loop"])
def test_what_is_made_later_has_the_bits_of_what_is_not(backend, arrives, remake):
    for counts, tail, cuts in itertools.product(COUNTS, (0, 5), ((), (2,), (1, 2))):
        if not sum(counts) + tail or (arrives and not cuts):
            continue
        case, later = (counts, tail, cuts, backend, arrives), []
        dx, first, others = gradients(*case)
        if remake:
            found = gradients(*case, remake=True)
            assert torch.equal(found[0], dx) and torch.equal(found[1], first), case
            assert all(torch.equal(a, b) for a, b in zip(found[2], others, strict=True)), case
        got_dx, none, got_others = gradients(*case, remake=remake, delay=later.append)
        assert none is None and torch.equal(got_dx, dx), case
        assert all(torch.equal(a, b) for a, b in zip(got_others, others, strict=True)), case
        (make,) = later
        made = make()
        assert torch.equal(made, first) and not made.requires_grad, case


def test_gradients_of_rows_alone_leave_nothing_to_make():
    later = []
    x, w, grad = problem((3, 2), 0, torch.float32)
    out = grouped_mm(x.requires_grad_(), w.requires_grad_(), offsets_of((3, 2)), delay=later.append)
    torch.autograd.grad(out, [x], grad)
    assert not later


def test_hooks_outside_are_given_what_rows_are_made_of():
    x, w, grad = problem((3, 2), 0, torch.float32)
    packed, h = [], x.clone()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t.data_ptr()) or t, lambda t: t):
        out = grouped_mm(x, w.requires_grad_(), offsets_of((3, 2)), remake=(torch.clone, (h,)))
    assert h.data_ptr() in packed and x.data_ptr() not in packed
    out.backward(grad)


def test_nothing_is_left_and_nothing_made_again_for_weights_that_are_frozen():
    later, again = [], []
    x, w, grad = problem((3, 2), 0, torch.float32)
    wishes = {"delay": later.append, "remake": (lambda: again.append(0), ())}
    grouped_mm(x.requires_grad_(), w, offsets_of((3, 2)), **wishes).backward(grad)
    assert x.grad is not None and not later and not again


def test_what_cannot_be_called_is_refused_and_so_are_other_rows():
    x, w, grad = problem((3, 2), 0, torch.float32)
    with pytest.raises(ValueError, match="delay=1 is not callable; give a function of a function, or None"):
        grouped_mm(x, w, offsets_of((3, 2)), delay=1)
    for wrong in (1, (1, ()), lambda: x):
        with pytest.raises(
            ValueError, match=r"remake=.* is no \(function, tensors\); give what makes x again, or None"
        ):
            grouped_mm(x, w, offsets_of((3, 2)), remake=wrong)
    out = grouped_mm(x, w.requires_grad_(), offsets_of((3, 2)), remake=(torch.Tensor.double, (x,)))
    with pytest.raises(ValueError, match="remake made torch.float64 .* where x was torch.float32"):
        out.backward(grad)
