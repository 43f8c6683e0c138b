"""route(): what a dispatch does before it sends a row, apart."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from examples import Example, expected, make_inputs, same

from hybrid_ep.streams import EventOverlap
from hybrid_ep.testing import VirtualWorld

EX = Example(2, 2, 2, (5, 0, 7, 3), 3, 16, scale_columns=4, pad_multiple=4, seed=5)


@pytest.fixture(scope="module")
def group():
    world = VirtualWorld(2, 2)
    return world, world.buffers(16, 8, 2, timeout_s=30)


def routing(mine) -> dict:
    return {"num_of_experts": EX.world.num_experts, **mine.routing()}


@pytest.mark.parametrize("beside", [False, True])
@pytest.mark.parametrize("permute", [False, True])
def test_a_dispatch_by_what_was_routed_is_the_dispatch(group, permute, beside):
    world, buffers = group
    want = expected(EX)

    def work(rank, _):
        buffer, mine = buffers[rank], make_inputs(EX, rank)
        buffer._session.runs_beside = beside
        launches = buffer._session.num_launches()
        pad = {"pad_multiple": 4} if permute else {}
        routed = buffer.route(mine.hidden, permute=permute, scaling_factor=mine.scale, **pad, **routing(mine))
        after_route = buffer._session.num_launches()
        verb = buffer.dispatch_with_permute if permute else buffer.dispatch
        for _ in range(2):
            *found, handle = verb(hidden=mine.hidden, scaling_factor=mine.scale, handle=routed)
            right = (want.permuted if permute else want.dispatched)[rank]
            for i, name in enumerate(("rows", "weights", "scales")):
                same(name, found[i], right[i])
        spent = after_route - launches, buffer._session.num_launches() - after_route
        back = buffer.combine_with_unpermute if permute else buffer.combine
        direct = verb(hidden=mine.hidden, scaling_factor=mine.scale, **pad, **routing(mine))
        same("sums", back(hidden=found[0], handle=handle)[0], back(hidden=direct[0], handle=direct[-1])[0])
        return spent

    world.run(work)
    assert world.run(work) == [(1, 2)] * 4


def test_what_was_routed_for_the_other_verb_is_refused(group):
    world, buffers = group

    def work(rank, _):
        mine = make_inputs(EX, rank)
        routed, event = buffers[rank].route(mine.hidden, permute=True, async_finish=True, **routing(mine))
        assert isinstance(event, EventOverlap)
        with pytest.raises(ValueError, match=r"route\(\)'s for dispatch_with_permute.*permute=False"):
            buffers[rank].dispatch(mine.hidden, handle=routed)
        with pytest.raises(ValueError, match="give one row for each"):
            buffers[rank].dispatch_with_permute(hidden=torch.zeros(99, 16), handle=routed)

    world.run(work)


def test_kernel_seconds_count_from_the_first_question_on_and_through_growth(group):
    world = VirtualWorld(1, 2)
    buffers = world.buffers(16, 2, 2, timeout_s=30)

    def work(rank, _):
        buffer, clock = buffers[rank], [buffers[rank].kernel_seconds()]
        for tokens in (2, 2, 40, 40):  # the third grows the buffer, whose engine is another then
            buffer.dispatch(torch.zeros(tokens, 16), topk_idx=torch.zeros(tokens, 1, dtype=torch.int64))
            clock.append(buffer.kernel_seconds())
        return clock

    for clock in world.run(work):
        assert clock[0] == 0 and all(a < b for a, b in zip(clock, clock[1:], strict=False))


def test_a_missing_core_is_said_clearly():
    program = "import sys; sys.modules['hybrid_ep._core'] = None; import hybrid_ep.buffer"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert "ImportError: hybrid_ep's compiled core (hybrid_ep._core) is missing" in done.stderr
