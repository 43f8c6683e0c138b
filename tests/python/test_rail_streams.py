"""A rail stream that has to wait must not hold up another: routing under which in-order service deadlocks.

Node 0's early tokens go to node 2 and its late ones to node 1; node 3's early tokens go to node 1 and its late ones to
node 2. In combine node 0 needs all of node 2's early rows before it consumes any of node 1's, and node 3 the other way
round. If nodes 1 and 2 answered their peers chunk by chunk in turn, each would wait for a credit that only comes once
the other has moved. Both parts are longer than the ring."""

import pytest
import torch

from hybrid_ep.testing import VirtualWorld

EARLY, LATE, HIDDEN, NODES = 600, 600, 16, 4
EARLY_NODE = {0: 2, 3: 1}
LATE_NODE = {0: 1, 3: 2}


def _experts(rank):
    if rank not in EARLY_NODE:
        return torch.zeros(0, 1, dtype=torch.int64)
    return torch.tensor([EARLY_NODE[rank]] * EARLY + [LATE_NODE[rank]] * LATE).unsqueeze(1)


@pytest.mark.parametrize("executor", ["host", "host_checked"])
@pytest.mark.parametrize("num_blocks", [1, 3])
def test_skewed_streams_do_not_wait_for_each_other(executor, num_blocks):
    world = VirtualWorld(NODES, 1)
    buffers = world.buffers(
        HIDDEN,
        EARLY + LATE,
        1,
        timeout_s=20,
        executor=executor,
        num_sms_dispatch_api=num_blocks,
        num_sms_combine_api=num_blocks,
    )

    def work(rank, _group):
        idx = _experts(rank)
        x = torch.arange(idx.shape[0]).remainder(251).unsqueeze(1).expand(-1, HIDDEN).to(torch.bfloat16).contiguous()
        rows, _, _, _, handle = buffers[rank].dispatch_with_permute(hidden=x, topk_idx=idx, num_of_experts=NODES)
        back, _ = buffers[rank].combine_with_unpermute(hidden=rows * 2, handle=handle)
        assert torch.equal(back, x * 2)
        return idx.shape[0]

    assert world.run(work) == [EARLY + LATE, 0, 0, EARLY + LATE]
    shape = buffers[0]._session.shape
    assert min(EARLY, LATE) > shape.rail_slots * shape.chunk_tokens, "it fits the ring: this test could not fail"
