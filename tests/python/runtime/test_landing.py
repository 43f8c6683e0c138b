"""Rows of permuted verbs land in all rows of a token on a rank, or in the first of them: as each rank likes."""

from __future__ import annotations

import pytest
import torch

from hybrid_ep import HybridEPBuffer
from hybrid_ep.testing import VirtualWorld


def landed(landings):
    """Of a rank for each: (its permuted rows, its sums, rows that it copied)."""
    world = VirtualWorld(1, len(landings))
    tokens, experts = 64, 4 * len(landings)
    idx = (torch.arange(tokens)[:, None] + torch.arange(3)) % experts  # most tokens have several experts on a rank

    def body(rank, group):
        buffer = HybridEPBuffer(group, 128, tokens, 4, timeout_s=30, landing=landings[rank])
        x = (torch.arange(tokens * 128).reshape(tokens, 128) % 61 + rank).bfloat16()
        rows, *_, handle = buffer.dispatch_with_permute(hidden=x, topk_idx=idx, num_of_experts=experts)
        kept = rows.clone()
        sums, _ = buffer.combine_with_unpermute(hidden=rows, handle=handle)
        return kept, sums, buffer.traffic()["copied_rows"]

    return world.run(body)


def test_ranks_land_rows_as_each_of_them_likes_and_have_the_same_bits(monkeypatch):
    alike = landed([None, None, None])
    mixed = landed(["first", None, "all"])
    monkeypatch.setenv("HYBRID_EP_LANDING", "first")
    told = landed([None, "all", None])
    for found in (mixed, told):
        for (rows, sums, _), (same_rows, same_sums, _) in zip(found, alike, strict=True):
            assert torch.equal(rows, same_rows) and torch.equal(sums, same_sums)
    assert [copied for *_, copied in alike] == [0, 0, 0]
    assert [copied > 0 for *_, copied in mixed] == [True, False, False]
    assert [copied > 0 for *_, copied in told] == [True, False, True]


@pytest.mark.parametrize("landing", ["last", "", 1, True])
def test_a_landing_that_there_is_not_is_refused(landing):
    with pytest.raises(ValueError, match=r"landing=.* must be one of \('first', 'all'\), or None"):
        VirtualWorld(1, 1).buffers(64, 8, 2, timeout_s=5, landing=landing)
