"""A lazy tuple is, to whoever reads it, the tuple of what its elements make; and each is made once, or never."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from examples import Example, make_inputs

from hybrid_ep import plan_maps
from hybrid_ep.lazy_tuple import Later, LazyTuple
from hybrid_ep.testing import VirtualWorld

PLAIN = (1, 20, 30, "x")


def lazy(made: list | None = None) -> LazyTuple:
    """PLAIN, whose numbers from 20 on are made together; made: gets an entry each time they are."""
    def make() -> tuple:
        if made is not None:
            made.append("both")
        return 20, 30

    return LazyTuple((1, *Later.several(2, make), "x"))


def call(*elements):
    return elements


@pytest.mark.parametrize("read", [
    tuple, list, len, repr, copy.copy, copy.deepcopy, lambda t: pickle.loads(pickle.dumps(t)),
    lambda t: t[2], lambda t: t[-3], lambda t: t[1:3], lambda t: t[::-1], lambda t: t + (5,), lambda t: (5,) + t,
    lambda t: t * 2, lambda t: 2 * t, lambda t: 30 in t, lambda t: t.index(20), lambda t: t.count(30), hash,
    lambda t: t == PLAIN, lambda t: PLAIN == t, lambda t: t != PLAIN, lambda t: (*t, 1), lambda t: call(*t),
    lambda t: [b for _, b, *_ in [t]], lambda t: tuple(zip(t, t, strict=True)), lambda t: [*reversed(t)],
    lambda t: isinstance(t, tuple), lambda t: t < (1, 21)])
def test_reads_as_the_plain_tuple(read):
    assert read(lazy()) == read(PLAIN)


def test_elements_are_made_when_read_and_once():
    made: list = []
    t = lazy(made)
    assert t[0] == 1 and t[3] == "x" and len(t) == 4 and t.given() == [1, "x"] and not made
    assert t[2] == 30 and t[1] == 20 and list(t) == list(PLAIN) and made == ["both"]


def test_a_call_makes_no_map_that_nobody_reads(monkeypatch):
    def unwanted(plan):
        raise AssertionError("somebody made a map")

    monkeypatch.setattr(plan_maps, "rail_maps", unwanted)
    monkeypatch.setattr(plan_maps, "expert_maps", unwanted)
    ex = Example(2, 1, 2, (5, 7), 2, 16)
    world = VirtualWorld(2, 1)
    buffers = world.buffers(16, 8, 2, timeout_s=30)

    def work(rank, _):
        mine, buffer = make_inputs(ex, rank), buffers[rank]
        rows, weights, _, _, handle = buffer.dispatch_with_permute(hidden=mine.hidden, num_of_experts=4,
                                                                   **mine.routing())
        out, probs = buffer.combine_with_unpermute(hidden=rows, probs=weights, handle=handle)
        buffer.dispatch_with_permute(hidden=out, probs=probs, handle=handle)
        rows, *_, handle = buffer.dispatch(mine.hidden, num_of_experts=4, **mine.routing())
        buffer.combine(rows, handle=handle)
        with pytest.raises(AssertionError, match="somebody made a map"):
            tuple(handle)
        return torch.isfinite(out.float()).all()

    assert all(world.run(work))
