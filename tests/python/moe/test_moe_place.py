"""place and gradient_place of grouped_mm: where the result and the gradient of rows lie, and that they are the same."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_moe_grouped import offsets_of, problem
from test_moe_turns import Bringer

from hybrid_ep.errors import BufferFailedError
from hybrid_ep.moe import backends, grouped_mm


class Lender:
    """Memory full of NaN, and calls that are counted."""

    def __init__(self):
        self.lent, self.entered = [], []

    def empty(self, rows, columns, dtype):
        self.lent.append(torch.full((rows, columns), math.nan, dtype=dtype))
        return self.lent[-1]

    def registered(self, function, rows, columns, dtype):
        self.entered.append((rows, columns, dtype))
        return function()


def gradients(counts, tail, dtype, lender, backend="auto", stacks=1):
    x, w, grad = problem(counts, tail, dtype)
    x.requires_grad_()
    parts = [part.clone().requires_grad_() for part in w.tensor_split(stacks)]
    out = grouped_mm(x, parts, offsets_of(counts), backend=backend, gradient_place=lender)
    return torch.autograd.grad(out, [x, *parts], grad)


@given(
    counts=st.lists(st.integers(0, 9), min_size=2, max_size=6).map(tuple),
    tail=st.integers(0, 4),
    dtype=st.sampled_from((torch.float32, torch.bfloat16)),
    stacks=st.sampled_from((1, 2)),
)
def test_the_gradient_lies_where_it_is_told_and_has_the_same_bits(counts, tail, dtype, stacks):
    lender = Lender()
    dx, *dw = gradients(counts, tail, dtype, lender, stacks=stacks)
    want, *want_dw = gradients(counts, tail, dtype, None, backend="loop", stacks=stacks)
    assert torch.equal(dx, want) and all(map(torch.equal, dw, want_dw))
    if len(dx):
        (lent,) = lender.lent
        assert lent.data_ptr() == dx.data_ptr() and not lender.entered
    else:
        assert not lender.lent


def test_who_stores_where_it_chooses_does_so_inside_the_call():
    lender = Lender()
    assert not backends.BACKENDS["torch"].stores
    dx, _ = gradients((3, 0, 5), 2, torch.bfloat16, lender, backend="torch")
    assert lender.entered == [(*dx.shape, torch.bfloat16)] and not lender.lent
    gradients((3, 0, 5), 2, torch.bfloat16, lender, backend="torch", stacks=2)
    assert len(lender.entered) == 1, "several stacks make more than the gradient"


def test_a_buffer_that_ended_since_the_forward_lends_nothing():
    def ended(*_):
        raise BufferFailedError("this buffer was destroyed")

    lender = Lender()
    lender.empty = lender.registered = ended
    for backend in ("loop", "torch"):
        want, *_ = gradients((3, 0, 5), 2, torch.bfloat16, None, backend=backend)
        assert torch.equal(gradients((3, 0, 5), 2, torch.bfloat16, lender, backend=backend)[0], want)


def test_memory_of_another_device_is_left_alone():
    lender = Lender()
    lender.empty = lambda rows, columns, dtype: torch.empty(rows, columns, dtype=dtype, device="meta")
    want, *_ = gradients((3, 0, 5), 2, torch.float32, None, backend="loop")
    assert torch.equal(gradients((3, 0, 5), 2, torch.float32, lender, backend="loop")[0], want)


def test_no_gradient_of_rows_takes_no_memory():
    lender, (x, w, grad) = Lender(), problem((3, 2), 0, torch.float32)
    w.requires_grad_()
    grouped_mm(x, w, offsets_of((3, 2)), gradient_place=lender).backward(grad)
    assert not lender.lent and not lender.entered


def test_what_lends_nothing_is_refused():
    x, w, _ = problem((3, 2), 0, torch.float32)
    with pytest.raises(ValueError, match="gradient_place='here' must lend memory"):
        grouped_mm(x, w, offsets_of((3, 2)), gradient_place="here")
    with pytest.raises(ValueError, match="^place=7 must lend memory"):
        grouped_mm(x, w, offsets_of((3, 2)), place=7)


def test_rows_of_stacks_on_their_way_come_into_the_same_memory():
    lender, (x, w, grad) = Lender(), problem((3, 2, 4), 0, torch.float32)
    want, *_ = gradients((3, 2, 4), 0, torch.float32, None, backend="loop", stacks=2)
    parts = [part.clone().requires_grad_() for part in w.tensor_split(2)]
    bringer = Bringer(parts[1:])
    rows, seen = x.requires_grad_() * 1, []
    rows.register_hook(seen.append)
    out = grouped_mm(rows, parts, offsets_of((3, 2, 4)), gradient_place=lender, arriving=bringer)
    bringer.take()
    out.backward(grad)
    assert torch.equal(seen[0], want) and seen[0].data_ptr() == lender.lent[0].data_ptr() and len(lender.lent) == 1


@pytest.mark.parametrize("backend", ["auto", "loop", "torch"])
@pytest.mark.parametrize("stacks", [1, 2])
def test_the_result_lies_where_who_multiplies_can_put_it(backend, stacks):
    lender, (x, w, _) = Lender(), problem((3, 0, 5, 2), 2, torch.bfloat16)
    parts, ends = list(w.tensor_split(stacks)), offsets_of((3, 0, 5, 2))
    want = grouped_mm(x, parts, ends, backend="loop" if backend == "auto" else backend)
    out = grouped_mm(x, parts, ends, backend=backend, place=lender)
    assert torch.equal(out, want)
    if backend == "torch":
        assert not lender.lent and len(lender.entered) == (stacks == 1)
    else:
        assert lender.lent[0].data_ptr() == out.data_ptr() and not lender.entered


def test_memory_that_is_given_goes_before_a_lender():
    lender, (x, w, _) = Lender(), problem((3, 2), 0, torch.float32)
    out = torch.empty(5, w.shape[2], dtype=torch.float32)
    assert grouped_mm(x, w, offsets_of((3, 2)), out=out, place=lender) is out and not lender.lent
