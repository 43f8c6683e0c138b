"""Grouped GEMM whose further stacks are still on their way: the bits of a call that has them, and what waits for what.

What arrives is NaN until it is waited for, in the forward and again in the backward, as spare slots are that other
layers have had meanwhile."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_moe_grouped import COUNTS, NeverWritten, SpoilsNeighbours, StaleAccumulator, offsets_of, problem

from hybrid_ep.moe import grouped, grouped_mm
from hybrid_ep.moe.backends import BACKENDS, LoopBackend


class Bringer:
    """Holds back what the stacks are to be. log: what was called, and products, in their order."""

    def __init__(self, stacks):
        self.stacks, self.real = stacks, [stack.detach().clone() for stack in stacks]
        self.log, self.made = [], None
        self.take()

    def take(self):
        self._under_way = True
        for stack in self.stacks:
            stack.data.fill_(float("nan"))

    def under_way(self):
        return self._under_way

    def wait(self):
        self.log.append("wait")
        self._under_way = False
        for stack, real in zip(self.stacks, self.real, strict=True):
            stack.data.copy_(real)

    def gradients(self, made):
        self.log.append("gradients")
        self.made = [gradient.clone() for gradient in made]


def compare(counts, tail, cuts, backend, dtype=torch.float32, known=True, again=True):
    """A call with everything there against one whose further stacks arrive. again: in the backward, too."""
    x, w, grad = problem(counts, tail, dtype, transposed=True)
    how = {"backend": backend, "first_rows": [sum(counts[:cut]) for cut in (0, *cuts)] if known else None}
    parts = [part.clone().requires_grad_() for part in w.tensor_split(list(cuts))]
    x.requires_grad_()
    want = grouped_mm(x, parts, offsets_of(counts), **how)
    want.backward(grad)
    wanted = [x.grad.clone(), *(part.grad.clone() for part in parts)]
    x.grad = None
    for part in parts:
        part.grad = None
    bringer = Bringer(parts[1:])
    out = grouped_mm(x, parts, offsets_of(counts), **how, arriving=bringer)
    assert torch.equal(out, want) and not bringer.under_way()
    if again:
        bringer.take()
    out.backward(grad)
    assert not bringer.under_way(), "nobody waited"
    assert all(part.grad is None for part in parts[1:]), "handed over, and given to autograd too"
    got = [x.grad, parts[0].grad, *bringer.made]
    assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True)), (counts, tail, cuts)
    return bringer.log


@pytest.mark.parametrize("again", [True, False])
@pytest.mark.parametrize("backend", ["torch", "loop", "auto"])
def test_bits_are_those_of_stacks_that_are_there(backend, again):
    cases = [*COUNTS, (0, 0, 0, 9), (9, 0, 0, 0)]
    for counts, tail, cuts, known in itertools.product(cases, (0, 5), ((3,), (1, 2), (2,)), (True, False)):
        if sum(counts) + tail:
            log = compare(counts, tail, cuts, backend, known=known, again=again)
            assert log == (["wait", "gradients", "wait"] if again else ["wait", "gradients"])


@given(
    st.lists(st.sampled_from([0, 0, 1, 2, 8, 9, 16]), min_size=2, max_size=9),
    st.integers(0, 9),
    st.data(),
    st.booleans(),
)
def test_any_counts_and_stacks(counts, tail, data, again):
    cuts = data.draw(st.lists(st.integers(1, len(counts) - 1), min_size=1, max_size=3, unique=True).map(sorted))
    compare(tuple(counts), tail, tuple(cuts), "auto", again=again)


@pytest.mark.parametrize("backend", [StaleAccumulator, NeverWritten, SpoilsNeighbours], ids=lambda b: b.name)
def test_with_every_remedy(backend, monkeypatch):
    monkeypatch.setitem(BACKENDS, backend.name, backend)
    for counts, cuts, known in itertools.product(COUNTS, ((3,), (1, 2), (2, 2)), (True, False)):
        if sum(counts):
            compare(counts, 5, cuts, backend.name, known=known)


class Noted(LoopBackend):
    name = "noted"
    log: list[str] = []  # noqa: RUF012 - emptied by the test

    @classmethod
    def mm(cls, x, stacks, groups, out=None, of=None):
        cls.log.append(f"rows of {'all' if of is None else list(of)}")
        return LoopBackend.mm(x, stacks, groups, out, of)

    @classmethod
    def wgrad(cls, x, g, groups, of=None):
        cls.log.append(f"gradients of {'all' if of is None else list(of)}")
        return LoopBackend.wgrad(x, g, groups, of)


class AllAtOnce(Noted):
    name = "at once"
    in_turns = False
    log: list[str] = []  # noqa: RUF012


def noted(backend, monkeypatch, again=True, needs=(True, True, True)):
    """What is called for a product of two stacks, forward and backward. needs: gradients of rows and stacks."""
    monkeypatch.setitem(BACKENDS, backend.name, backend)
    x, w, grad = problem((3, 2, 4), 0, torch.float32)
    parts = [part.clone().requires_grad_(asked) for part, asked in zip(w.tensor_split([2]), needs[1:], strict=True)]
    grouped_mm(x, parts, offsets_of((3, 2, 4)), backend=backend.name)  # is probed
    bringer, backend.log = Bringer(parts[1:]), []
    bringer.log = backend.log
    out = grouped_mm(x.requires_grad_(needs[0]), parts, offsets_of((3, 2, 4)), backend=backend.name, arriving=bringer)
    backend.log.append("|")
    if again:
        bringer.take()
    out.backward(grad)
    return backend.log


def test_own_rows_and_all_gradients_do_not_wait(monkeypatch):
    forward = ["rows of [0]", "wait", "rows of [1]", "|"]
    assert noted(Noted, monkeypatch) == [
        *forward,
        *("rows of [0]", "gradients of [1]", "gradients", "gradients of [0]", "wait", "rows of [1]"),
    ]
    assert noted(Noted, monkeypatch, again=False) == [
        *forward,
        *("gradients of [1]", "gradients", "rows of [0, 1]", "gradients of [0]"),
    ]


def test_what_is_not_asked_for_is_not_computed(monkeypatch):
    forward = ["rows of [0]", "wait", "rows of [1]", "|"]
    rows_alone = noted(Noted, monkeypatch, needs=(True, False, False))
    assert rows_alone == [*forward, "rows of [0]", "wait", "rows of [1]"]
    weights_alone = noted(Noted, monkeypatch, needs=(False, True, True))
    assert weights_alone == [*forward, "gradients of [1]", "gradients", "gradients of [0]", "wait"]
    own = noted(Noted, monkeypatch, needs=(False, True, False))
    assert own == [*forward, "gradients of [0]", "wait"]


def test_a_backend_without_turns_waits_first(monkeypatch):
    assert noted(AllAtOnce, monkeypatch) == [
        *("wait", "rows of all", "|"),
        *("gradients of all", "gradients", "wait", "rows of all"),
    ]
    assert noted(AllAtOnce, monkeypatch, needs=(True, True, False))[3:] == ["gradients of all", "wait", "rows of all"]


def test_one_stack_has_nothing_to_wait_for():
    x, w, grad = problem((3, 2), 0, torch.float32)
    bringer = Bringer([])
    want = grouped_mm(x, w, offsets_of((3, 2)))
    out = grouped_mm(x, w.requires_grad_(), offsets_of((3, 2)), arriving=bringer)
    out.backward(grad)
    assert torch.equal(out, want) and not bringer.log and w.grad is not None


def test_no_rows_at_all():
    for again in (True, False):
        compare((0, 0, 0), 0, (2,), "auto", again=again)


FAULTS = {
    "reads before it waits": lambda *given, of: (*given, of and (range(0) if of.start else range(2))),
    "takes the same rows twice": lambda *given, of: (*given, of and range(1)),
    "leaves the rest undefined": lambda *given, of: (*given[:-1], None, of),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_noticed(fault, monkeypatch):
    inner, empty = grouped._rows_times_stacks, torch.Tensor.new_empty
    # Rows that nobody writes are no rows of an earlier result, which may be the right one.
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda *given, **options: empty(*given, **options).fill_(math.nan))
    monkeypatch.setattr(
        grouped,
        "_rows_times_stacks",
        lambda x, stacks, groups, machine, tail, out=None, of=None: inner(
            *FAULTS[fault](x, stacks, groups, machine, tail, out, of=of)
        ),
    )
    with pytest.raises(AssertionError):
        compare((3, 2, 4), 0, (2,), "loop")
