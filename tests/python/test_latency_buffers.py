"""The latency path of buffers that are unlike: handles that go from one to another, and tokens of many experts."""

from __future__ import annotations

import pytest
import torch

from hybrid_ep import HybridEPBuffer
from hybrid_ep.runtime import latency
from hybrid_ep.runtime.handle_kinds import OVERFLOW_FLAG
from hybrid_ep.testing import VirtualWorld

RANKS, EXPERTS, HIDDEN = 2, 64, 64
TOKENS = [40, 10]


def drawn(rank: int, topk: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(hidden, topk_idx) of a rank: whole numbers, whose sums are exact in any order."""
    random = torch.Generator().manual_seed(rank)
    hidden = torch.randint(-8, 9, (TOKENS[rank], HIDDEN), generator=random).to(torch.bfloat16)
    idx = torch.rand(TOKENS[rank], EXPERTS, generator=random).topk(topk, dim=1).indices
    return hidden, idx


def dispatched(buffer, rank: int, topk: int, path: str, **how):
    """(hidden, rows, handle) of a call of static size."""
    hidden, idx = drawn(rank, topk)
    if how.pop("as_map", False):
        routing = {"routing_map": torch.zeros(len(idx), EXPERTS, dtype=torch.bool).scatter_(1, idx, True)}
    else:
        routing = {"topk_idx": idx}
    budget = sum(TOKENS) * topk
    rows, *_, handle = buffer.dispatch_with_permute(
        hidden=hidden, **routing, num_permuted_tokens=budget, non_blocking=True, path=path, **how
    )
    return hidden, rows, handle


@pytest.mark.parametrize("latency_tokens", [48, 40, 39, 10, 0])
def test_a_handle_by_lines_serves_on_a_buffer_with_less_room_for_them(monkeypatch, latency_tokens):
    """All ranks go the same way there, whatever tokens each of them has."""
    world = VirtualWorld(1, RANKS)
    ours = world.buffers(HIDDEN, 64, EXPERTS // RANKS, latency_tokens=48, timeout_s=20)
    others = world.buffers(HIDDEN, 64, EXPERTS // RANKS, latency_tokens=latency_tokens, timeout_s=20)
    asked, went = latency.takes_planned, []
    monkeypatch.setattr(latency, "takes_planned", lambda *given: went.append(asked(*given)) or went[-1])

    def run(rank, _):
        hidden, rows, handle = dispatched(ours[rank], rank, 3, "latency")
        other = others[rank]
        again = other.dispatch_with_permute(hidden=hidden, handle=handle, num_permuted_tokens=len(rows))[0]
        assert torch.equal(again, rows)
        sums, _ = other.combine_with_unpermute(hidden=rows, handle=handle)
        assert torch.equal(sums, 3 * hidden)
        if latency_tokens < max(TOKENS):
            with pytest.raises(ValueError, match="latency_tokens"):
                other.combine_with_unpermute(hidden=rows, handle=handle, path="latency")

    world.run(run)
    assert went == 2 * RANKS * [latency_tokens >= max(TOKENS)]


@pytest.mark.parametrize("nodes, ranks", [(1, 2), (2, 1)])
@pytest.mark.parametrize("path", ["latency", "throughput"])
@pytest.mark.parametrize("beside", [False, True], ids=["host", "as_on_gpu"])
def test_a_buffer_that_is_told_the_width_of_maps_has_room_for_it_at_once(nodes, ranks, path, beside):
    """beside: the host looks at no map, as on a GPU."""
    world = VirtualWorld(nodes, ranks)
    buffers = world.buffers(HIDDEN, 64, EXPERTS // RANKS, latency_tokens=48, topk=20, timeout_s=20)

    def run(rank, _):
        buffers[rank]._session.runs_beside = beside
        hidden, rows, handle = dispatched(buffers[rank], rank, 20, path, as_map=True)
        assert not int(handle[OVERFLOW_FLAG])
        sums, _ = buffers[rank].combine_with_unpermute(hidden=rows, handle=handle)
        assert torch.equal(sums, 20 * hidden)

    world.run(run)


def test_maps_that_are_wider_than_a_buffer_was_told_are_refused_or_flagged():
    world = VirtualWorld(1, RANKS)
    buffers = world.buffers(HIDDEN, 64, EXPERTS // RANKS, latency_tokens=48, timeout_s=20)

    def run(rank, _):
        with pytest.raises(ValueError, match="a token with 20 experts.*laid out for 8 .*topk= the most of any token"):
            dispatched(buffers[rank], rank, 20, "latency", as_map=True)
        buffers[rank]._session.runs_beside = True
        *_, handle = dispatched(buffers[rank], rank, 20, "latency", as_map=True)
        assert int(handle[OVERFLOW_FLAG])
        buffers[rank]._session.runs_beside = False

    world.run(run)


@pytest.mark.parametrize("topk", [0, -1, 65536, 2.0, True, "8"])
def test_a_width_that_cannot_be_is_named(topk):
    with pytest.raises(ValueError, match="topk="):
        VirtualWorld(1, 1).buffers(HIDDEN, 8, 4, topk=topk)


def test_ranks_say_the_same_width_and_it_takes_no_more_than_all_experts():
    def unlike(rank, group):
        with pytest.raises(ValueError, match="topk"):
            HybridEPBuffer(group, HIDDEN, 8, 4, topk=9 + rank, executor="host", timeout_s=20)

    VirtualWorld(1, 2).run(unlike)
    sizes = [VirtualWorld(1, 1).buffers(HIDDEN, 8, 4, topk=topk)[0].memory_report().regions for topk in (4, 60000)]
    assert sizes[0] == sizes[1]
