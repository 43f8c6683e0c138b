"""SpareSlots takes matrices of all owners in stacks, and says what is wrong with one of them."""

from __future__ import annotations

import hypothesis
import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from test_spares import SHAPES, drawn, make, owners_of, random_plan

from hybrid_ep.testing import VirtualWorld

pytestmark = pytest.mark.balance
OWNED = 3


def stacks(rank: int, seed: int, dtype=torch.float32) -> list[torch.Tensor]:
    return [drawn((OWNED, *shape), seed, rank, n, dtype=dtype) for n, shape in enumerate(SHAPES)]


@hypothesis.given(
    ranks=st.sampled_from([(1, 1), (1, 3), (2, 2)]),
    spare=st.integers(1, 2),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    seed=st.integers(0, 99),
)
def test_stacks_are_what_their_matrices_are_by_themselves(ranks, spare, dtype, seed):
    random, num_ranks = np.random.default_rng(seed), ranks[0] * ranks[1]
    owners = owners_of(random, num_ranks, OWNED)
    plan = random_plan(random, num_ranks, spare, owners)

    def work(rank, group):
        weights, found = stacks(rank, seed, dtype), []
        slots = make(group, spare, OWNED, dtype, num_of_hybrid_ep_ranks_per_nvlink_domain=ranks[1])
        for apart in (False, True):
            sums = stacks(rank, seed + 100)
            given = (lambda of: [[stack[e] for stack in of] for e in range(OWNED)]) if apart else tuple
            for stack in slots.weights:
                stack.zero_()
            slots.push(plan, given(weights), owners)
            slots.wait()
            for n, stack in enumerate(slots.gradients):
                stack.copy_(drawn(stack.shape, seed, rank, n, 9))
            slots.collect(plan, given(sums), owners)
            found.append([stack.clone() for stack in slots.weights] + sums)
        assert all(map(torch.equal, *found))
        for slot, expert in enumerate(plan[rank].tolist()):
            home = owners.slot_of[expert]
            for stack, held in zip(stacks(home // OWNED, seed, dtype), found[0], strict=False):
                assert expert < 0 or torch.equal(held[slot], stack[home % OWNED])

    VirtualWorld(*ranks).run(work)


def test_other_stacks_of_the_same_places_are_other_matrices():
    """Of wider elements, and where the memory has been given to others since."""
    memory = torch.zeros(4 * 2 * OWNED * 1000, dtype=torch.uint8)

    def at_the_same_place(dtype):
        found = []
        for n, shape in enumerate(SHAPES):
            part = memory[n * 8000 :].view(dtype)[: OWNED * int(np.prod(shape))]
            found.append(part.view(OWNED, *shape))
        return found

    def work(rank, group):
        slots = make(group, 1, OWNED, torch.bfloat16)
        plan = torch.full((1, 1), 2, dtype=torch.int32)
        weights = at_the_same_place(torch.bfloat16)
        for n, stack in enumerate(weights):
            stack.copy_(drawn(stack.shape, n, dtype=torch.bfloat16))
        slots.push(plan, weights)
        slots.wait()
        assert all(torch.equal(held[0], stack[2]) for held, stack in zip(slots.weights, weights, strict=True))
        sums = at_the_same_place(torch.float32)
        for stack, gradient in zip(sums, slots.gradients, strict=True):
            stack.zero_()
            gradient.fill_(3.0)
        slots.collect(plan, sums)
        assert all((stack[:2] == 0).all() and (stack[2] == 3).all() for stack in sums)

    VirtualWorld(1, 1).run(work)


REFUSED = {
    "too few": (lambda x: x[:2], r"weights has 2 tensors; give 3 of each of the 3 experts .* or 3 tensors"),
    "too many": (lambda x: x + x[:1], "weights has 4 tensors"),
    "none": (lambda x: [], r"weights has \[\] matrices of 0 experts"),
    "another number of owners": (lambda x: [x[0][:2], *x[1:]], r"weights\[0\] is .*\(2, 3, 8\).*give .*\[3, 3, 8\]"),
    "of another type": (lambda x: [x[0], x[1].double(), x[2]], r"weights\[1\] is a torch.float64"),
    "apart in memory": (
        lambda x: [*x[:2], x[2].transpose(1, 2).contiguous().transpose(1, 2)],
        r"weights\[2\] is not con",
    ),
    "at an odd address": (
        lambda x: [torch.empty(x[0].numel() + 1, dtype=x[0].dtype)[1:].view_as(x[0]), *x[1:]],
        r"weights\[0\] is not contiguous from an address that is a multiple of 16",
    ),
    "a negative view": (lambda x: [x[0], torch._neg_view(x[1]), x[2]], r"weights\[1\] is a view of the negative"),
    "without memory": (lambda x: [x[0], x[1].to("meta"), x[2]], r"weights\[1\] is .* on meta"),
    "a tensor among lists": (lambda x: [x[0], list(x[1]), list(x[2])], r"weights\[0\]\[1\] is .*give .* \[16\]"),
    "no sequence": (lambda x: 7, "weights is int 7, no matrices by expert"),
}


@pytest.mark.parametrize("wrong", REFUSED)
def test_a_stack_that_does_not_fit_is_refused_by_name_and_the_slots_stay_usable(wrong):
    change, said = REFUSED[wrong]

    def work(rank, group):
        slots, weights = make(group, 1, OWNED), stacks(rank, 0)
        plan = torch.zeros(1, 1, dtype=torch.int32)
        with pytest.raises(ValueError, match=said):
            slots.push(plan, change(list(weights)))
        slots.push(plan, weights)
        slots.wait()
        assert torch.equal(slots.weights[0][0], weights[0][0])

    VirtualWorld(1, 1).run(work)


def test_a_stack_whose_storage_was_freed_is_refused():
    def work(rank, group):
        slots, weights = make(group, 1, OWNED), stacks(rank, 0)
        plan = torch.zeros(1, 1, dtype=torch.int32)
        slots.push(plan, weights)
        slots.wait()
        weights[1].untyped_storage().resize_(0)
        with pytest.raises(ValueError, match=r"weights\[1\] .*its storage was freed"):
            slots.push(plan, weights)

    VirtualWorld(1, 1).run(work)
