"""The engine that launches nothing answers an exchange as a world does in which all ranks send alike."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "scripts"))

from bench_host_time import lone_buffer

from hybrid_ep import HybridEPBuffer, _core
from hybrid_ep.testing import VirtualWorld

HIDDEN, TOKENS, TOPK, EXPERTS = 16, 6, 3, 2


def routing(kind: str, num_ranks: int) -> dict:
    idx = torch.randint(-1, num_ranks * EXPERTS, (TOKENS, TOPK), generator=torch.Generator().manual_seed(5))
    if kind == "topk_idx":
        return {"topk_idx": idx, "num_of_experts": num_ranks * EXPERTS}
    chosen = torch.zeros(TOKENS, num_ranks * EXPERTS + 1, dtype=torch.bool).scatter_(
        1, idx % (num_ranks * EXPERTS), True
    )
    return {"routing_map": chosen[:, :-1].contiguous()}


def counts(buffer: HybridEPBuffer, arguments: dict) -> tuple:
    x = torch.zeros(TOKENS, HIDDEN, dtype=torch.bfloat16)
    rows, _, _, padded, handle = buffer.dispatch_with_permute(
        hidden=x, pad_multiple=4, pad_empty_experts=True, **arguments
    )
    plan = handle.config.plan
    core = plan.core
    return rows.shape, padded.tolist(), core.tokens_per_expert, core.num_recv_rows, core.max_recv_rows, plan.from_nodes


@pytest.mark.parametrize("kind", ["topk_idx", "routing_map"])
@pytest.mark.parametrize("nodes, local_ranks", [(1, 4), (2, 2)])
def test_its_counts_are_those_of_ranks_that_send_alike(kind, nodes, local_ranks):
    num_ranks = nodes * local_ranks
    arguments = routing(kind, num_ranks)
    world = VirtualWorld(nodes, local_ranks)
    buffers = world.buffers(HIDDEN, TOKENS, EXPERTS)
    expected = world.run(lambda rank, _: counts(buffers[rank], arguments))
    for rank in range(num_ranks):
        buffer = lone_buffer(rank, num_ranks, local_ranks, HIDDEN, TOKENS, EXPERTS)
        before = buffer._session.num_launches()
        assert counts(buffer, arguments) == expected[rank]
        assert buffer._session.num_launches() == before + 2  # counted, as the guard of a call relies on


def test_nobody_gets_it_by_name():
    assert not [name for name in _core.executors() if "unlaunched" in name]
    with pytest.raises(ValueError, match="is not in this build"):
        _core.Engine(
            0,
            _core.BufferShape(num_nodes=1, num_local_ranks=1, num_experts=1),
            [_core.Segment.private(1 << 20)],
            1.0,
            "unlaunched",
        )
