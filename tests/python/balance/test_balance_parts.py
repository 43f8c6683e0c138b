"""What parts of a plan refuse: columns, slots and counts that cannot be. What they say is tested with the planner."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from hybrid_ep import balance


def test_a_part_needs_a_rank_and_whole_ranks_of_experts():
    counts = np.ones((4, 8), np.int64)
    planner, columns = balance.MicrobatchPlanner(4, 8), np.arange(8) * 3 // 2
    with pytest.raises(ValueError, match="^rank is 4: give an integer from 0 to 3"):
        planner.plan_of_rank(counts, 4, columns)
    with pytest.raises(ValueError, match=r"^columns has shape \(7,\): give the column of each of the 8 experts"):
        planner.plan_of_rank(counts, 0, columns[:7])
    uneven = balance.MicrobatchPlanner(4, 6, np.zeros(6, np.int32))
    with pytest.raises(ValueError, match="^num_experts: 6 must be a multiple of the 4 ranks"):
        uneven.plan_of_rank(counts[:, :6], 0, columns[:6])


def test_a_part_takes_columns_of_any_kind_that_are_those_of_owners():
    counts = np.arange(32).reshape(4, 8) * 10
    planner, columns = balance.MicrobatchPlanner(4, 8), np.arange(8) * 3 // 2
    want = planner.plan_of_rank(counts, 1, columns).part
    p = planner.plan(counts)
    for kind in (columns, columns.tolist(), tuple(columns), columns.astype(np.int16), torch.from_numpy(columns)):
        for part in (planner.plan_of_rank(counts, 1, kind).part, p.part_of_rank(1, kind)):
            assert (part.redirects == want.redirects).all() and (part.pushes == want.pushes).all()
    wrong = [
        (columns / 1, "^columns is of type float64: give integers"),
        (columns[None], r"^columns has shape \(1, 8\)"),
        (np.arange(8), "^columns: is 2 for expert 2 of rank 1; give each expert a column of its own from 3 to 4"),
        ([0, 0, 3, 4, 6, 7, 9, 10], "^columns: is 0 for expert 1 of rank 0; give"),
        ([0, 1, 3, 4, 6, 7, 9, -1], "^columns: is -1 for expert 7 of rank 3; give"),
        ([0, 1, 3, 4, 6, 7, 9, -(2**63)], "^columns: is -9223372036854775808 for expert 7"),
        ([0, 1, 3, 4, 6, 7, 9, 2**62], "^columns: is 4611686018427387904 for expert 7"),
        ([0, 2, 3, 4, 6, 7, 9, 10], "^columns: is 2 for expert 1 of rank 0; give .* from 0 to 1"),
    ]
    for bad, message in wrong:
        for call in (lambda b: planner.plan_of_rank(counts, 1, b), lambda b: p.part_of_rank(1, b)):
            with pytest.raises(ValueError, match=message):
                call(bad)


def test_a_plan_that_its_counts_do_not_allow_is_refused():
    counts = np.full((4, 8), 10)
    counts[:, 0] = 300
    good = balance.plan_microbatch(counts)
    columns = np.arange(8) * 3 // 2
    (rank, *_), (slot, *_) = np.nonzero(good.slot_expert == 0)

    def asked(name, value, at=(rank, slot)):
        array = getattr(good, name).copy()
        array[at] = value
        changed = dataclasses.replace(good, **{name: array})
        return (lambda: changed.part_of_rank(0, columns), lambda: changed.share_of_source(0))

    for name, value, at, message in (
        (
            "slot_expert",
            -2,
            (rank, slot),
            f"^slot_expert: is -2 in slot {slot} of rank {rank}; give experts from 0 to 7",
        ),
        ("slot_expert", 8, (rank, slot), f"^slot_expert: is 8 in slot {slot} of rank {rank}"),
        ("slot_tokens", -1, (rank, slot), f"^slot_tokens: is -1 in slot {slot} of rank {rank}; give 0 or more"),
        ("slot_tokens", 1201, (rank, slot), "^slot_tokens: is 1201 .* at most the tokens that counts has for it"),
        ("slot_tokens", 2**63 - 1, (slice(None), slot), "^slot_tokens: is 9223372036854775807 "),
        ("counts", -1, (2, 5), "^counts: is -1 for expert 5; give 0 or more"),
        ("counts", 2**62, (slice(None), 5), "^counts: is 4611686018427387904 for expert 5"),
    ):
        for call in asked(name, value, at):
            with pytest.raises(ValueError, match=message):
                call()
    for call in asked("slot_tokens", 0):
        call()
