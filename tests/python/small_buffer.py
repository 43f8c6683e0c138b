"""The smallest buffer that shows whether dispatch and combine still do what they should."""

from __future__ import annotations

import torch

from hybrid_ep import HybridEPBuffer

H, E = 64, 4
X, IDX = torch.ones(4, H), torch.tensor([[0, 1], [2, 3], [1, -1], [3, 0]])
CHOICES = torch.tensor([2.0, 2.0, 1.0, 2.0])


def round_trip(buffer, num_tokens: int = 4) -> None:
    """What every test below ends with: the buffer does what it should."""
    idx = IDX.repeat(num_tokens // 4, 1)
    rows, *_, handle = buffer.dispatch_with_permute(hidden=X.repeat(num_tokens // 4, 1), topk_idx=idx, num_of_experts=E)
    out, _ = buffer.combine_with_unpermute(hidden=rows, handle=handle)
    assert torch.equal(out[:, 0], CHOICES.repeat(num_tokens // 4))


def make(group, **options) -> HybridEPBuffer:
    return HybridEPBuffer(group, H, 8, E // group.size(), timeout_s=50, **options)
