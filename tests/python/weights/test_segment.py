"""Registered memory as the weights use it: counters and copies, bounds checked before anything is written."""

from __future__ import annotations

import pytest
import torch

from hybrid_ep import _core


def test_pieces_are_copied_in_their_order():
    one, two, to = (_core.Segment.private(64) for _ in range(3))
    for n, segment in enumerate((one, two), 1):
        torch.frombuffer(segment, dtype=torch.uint8).fill_(n)
    to.pull([one, two], [(0, 0, 8, 16), (1, 8, 16, 4)])
    assert torch.frombuffer(to, dtype=torch.uint8).tolist() == [0] * 8 + [1] * 8 + [2] * 4 + [1] * 4 + [0] * 40


@pytest.mark.parametrize("piece", [(2, 0, 0, 1), (0, 60, 0, 5), (0, 0, 60, 5), (1, 2**63, 0, 1), (0, 0, 1, 2**64 - 1)])
def test_pieces_outside_are_refused_before_any_is_copied(piece):
    one, two, to = (_core.Segment.private(64) for _ in range(3))
    torch.frombuffer(one, dtype=torch.uint8).fill_(1)
    with pytest.raises(IndexError, match="lie outside"):
        to.pull([one, two], [(0, 0, 0, 64), piece])
    assert not any(torch.frombuffer(to, dtype=torch.uint8).tolist())


def test_counters():
    segment = _core.Segment.private(64)
    segment.publish(56, 2**63 + 1)
    assert segment.observe(56) == 2**63 + 1 and segment.observe(0) == 0
    for offset in (4, 64, 2**63):
        with pytest.raises(IndexError, match=f"offset={offset}"):
            segment.observe(offset)


def test_a_tensor_keeps_its_segment():
    tensor = torch.frombuffer(_core.Segment.private(1 << 20), dtype=torch.float32)
    tensor.fill_(3.0)
    assert tensor.sum() == 3 * tensor.numel()
