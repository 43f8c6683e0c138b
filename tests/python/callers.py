"""What dispatch and combine mean to deep_ep's callers, in plain torch.distributed: nothing of hybrid_ep is used."""

from __future__ import annotations

import torch
import torch.distributed as dist


def gather_rows(x: torch.Tensor, group) -> list[torch.Tensor]:
    """Every rank's rows, whose numbers may differ."""
    gathered: list = [None] * dist.get_world_size(group)
    dist.all_gather_object(gathered, x.detach().clone(), group=group)
    return gathered


class Oracle:
    """One routing: topk_idx int64 [T, K] of this rank, -1 dropped, and num_local_experts on each."""

    def __init__(self, group, topk_idx: torch.Tensor, num_local_experts: int):
        self.group, self.rank = group, dist.get_rank(group)
        self.idx, self.local = gather_rows(topk_idx, group), num_local_experts
        self.size = len(self.idx)

    def _sends(self, source: int, rank: int) -> torch.Tensor:
        """Tokens of source, ascending, that go to rank."""
        idx = self.idx[source]
        return ((idx >= 0) & (idx // self.local == rank)).any(1).nonzero().flatten()

    def dispatch(self, x: torch.Tensor) -> torch.Tensor:
        """Rows by source rank, then token."""
        return torch.cat([rows[self._sends(s, self.rank)] for s, rows in enumerate(gather_rows(x, self.group))])

    def local_idx(self) -> torch.Tensor:
        idx = torch.cat([idx[self._sends(s, self.rank)] for s, idx in enumerate(self.idx)])
        idx = torch.where(idx >= 0, idx - self.rank * self.local, -1)
        return torch.where((idx >= 0) & (idx < self.local), idx, -1)

    def local_weights(self, topk_weights: torch.Tensor) -> torch.Tensor:
        return self.dispatch(topk_weights) * (self.local_idx() >= 0)

    def rows_per_expert(self) -> list[int]:
        return [int((self.local_idx() == e).sum()) for e in range(self.local)]

    def combine(self, x: torch.Tensor) -> torch.Tensor:
        """Sums, in fp64, of what the ranks return for this rank's tokens."""
        out = torch.zeros(len(self.idx[self.rank]), x.shape[1], dtype=torch.float64)
        for rank, rows in enumerate(gather_rows(x, self.group)):
            first = sum(len(self._sends(s, rank)) for s in range(self.rank))
            tokens = self._sends(self.rank, rank)
            out[tokens] += rows[first : first + len(tokens)].double()
        return out


def routing(seed: int, tokens: int, num_experts: int, topk: int, dropped: float = 0.2):
    """(topk_idx, topk_weights fp32 of eighths): distinct experts, some dropped."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.rand(tokens, num_experts, generator=generator).argsort(1)[:, :topk]
    idx = order.masked_fill(torch.rand(tokens, topk, generator=generator) < dropped, -1)
    weights = torch.randint(1, 9, (tokens, topk), generator=generator) / 8
    return idx, weights.float()


def integers(seed: int, rows: int, hidden: int, dtype=torch.bfloat16) -> torch.Tensor:
    """Small integers: their sums are exact in bf16."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-4, 5, (rows, hidden), generator=generator).to(dtype)


# A layer whose answer is known: expert e multiplies its rows by e + 1.


def layer_inputs(seed: int, tokens: int, num_experts: int, topk: int, hidden: int):
    """(x fp32 of small integers, topk_idx without drops, topk_weights): every sum below is exact in fp32."""
    idx, weights = routing(seed, tokens, num_experts, topk, dropped=0.0)
    return integers(seed + 1000, tokens, hidden, torch.float32).requires_grad_(), idx, weights.requires_grad_()


def check_layer(layer, x: torch.Tensor, idx: torch.Tensor, weights: torch.Tensor) -> None:
    """layer(x, idx, weights) -> [T, H], forward and backward, against the closed form."""
    grad = integers(7 + len(x), len(x), x.shape[1], torch.float32)
    out = layer(x, idx, weights)
    out.backward(grad)
    scale = (weights * (idx + 1)).detach().sum(1, keepdim=True)
    assert torch.equal(out.detach(), x.detach() * scale), "forward"
    assert torch.equal(x.grad, grad * scale), "gradient of hidden"
    want = (idx + 1) * (x.detach() * grad).sum(1, keepdim=True)
    assert torch.equal(weights.grad, want), "gradient of the weights"


def experts_of_choices(rows, recv_idx, recv_weights, first: int):
    """The local experts over rows that carry choices: [M, H] with recv_topk_idx and recv_topk_weights [M, K]."""
    return rows * (recv_weights * (recv_idx + 1 + first).masked_fill(recv_idx < 0, 0)).sum(1, keepdim=True)


def experts_of_groups(rows, counts, first: int):
    """The local experts over rows grouped by expert, counts[e] of each; rows behind the groups stay as they are."""
    scale = torch.repeat_interleave(torch.arange(len(counts)) + 1 + first, counts.long().cpu())
    return rows * torch.cat([scale, scale.new_zeros(len(rows) - len(scale))])[:, None]


def dense(idx, weights, num_experts: int):
    """Differentiable (routing_map, probs) of choices."""
    probs = torch.zeros(len(idx), num_experts).scatter(1, idx, weights)
    return torch.zeros(len(idx), num_experts, dtype=torch.bool).scatter(1, idx, True), probs
