"""Routing generators: which experts every token of every rank goes to, reproducible from one seed.

Every rank generates the routing of all ranks, so expected results and byte counts need no exchange.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from hybrid_ep.cli import UsageError
from hybrid_ep.cli.bench.routing_spec import RAGGED, RoutingSpec

_SEARCH_TOKENS, _SEARCH_STEPS, _MOST_FAVOUR = 4096, 24, 30.0  # of the favour that gives an --imbalance
_SEED_STRIDE = 1_000_003  # keeps the streams of (seed, rank) and (seed + 1, rank) apart


@dataclass(frozen=True)
class Routing:
    """The routing of one rank: topk_idx int64 [num_tokens, topk], topk_weights fp32 [num_tokens, topk]."""

    topk_idx: torch.Tensor
    topk_weights: torch.Tensor

    @property
    def num_tokens(self) -> int:
        return self.topk_idx.shape[0]

    def to_map(self, num_experts: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Dense form: routing_map bool [num_tokens, num_experts], probs fp32 of the same shape."""
        shape = (self.num_tokens, num_experts)
        routing_map = torch.zeros(shape, dtype=torch.bool, device="cpu").scatter_(1, self.topk_idx, True)
        probs = torch.zeros(shape, dtype=torch.float32, device="cpu").scatter_(1, self.topk_idx, self.topk_weights)
        return routing_map, probs


def token_counts(ragged: str, num_tokens: int, num_ranks: int, seed: int) -> list[int]:
    """Tokens of each rank. random: uniform in [0, num_tokens], rank 0 full; zero-last: the last has none."""
    if ragged == "none":
        return [num_tokens] * num_ranks
    if ragged == "zero-last":
        return [num_tokens] * (num_ranks - 1) + [0]
    if ragged == "random":
        draws = torch.randint(
            0, num_tokens + 1, (num_ranks,), generator=_generator(seed, 0), dtype=torch.int64, device="cpu"
        )
        return [num_tokens, *draws[1:].tolist()]
    raise UsageError(f"--ragged {ragged!r}: use one of {', '.join(RAGGED)}")


def generate(spec: RoutingSpec, counts: list[int], num_experts: int, topk: int, seed: int) -> list[Routing]:
    """The routing of every rank: `counts[r]` tokens each, `topk` distinct experts a token.

    uniform: every set of experts equally likely. zipf: expert i drawn with probability ~ (i + 1)^-A,
    without replacement. one-hot: every token to experts 0 .. topk - 1, the worst imbalance there is.
    file: int64 [ranks, tokens, topk], saved by torch.save or as .npy, the first `counts[r]` tokens used.
    imbalance: rank 0's experts are likelier than the others, all alike, so that the ratio comes out.
    """
    if not 1 <= topk <= num_experts:
        raise UsageError(f"--topk {topk}: must be in 1 .. {num_experts} (--experts)")
    if spec.kind == "file":
        choices = _from_file(spec.path, counts, num_experts, topk)
    else:
        favour = _favour(spec, len(counts), num_experts, topk, seed)
        choices = [
            _draw(spec, count, num_experts, topk, _generator(seed, rank), favour) for rank, count in enumerate(counts)
        ]
    return [Routing(chosen, _weights(chosen)) for chosen in choices]


def draw(spec: RoutingSpec, num_ranks: int, tokens: int, num_experts: int, topk: int, seed: int) -> np.ndarray:
    """The choices of `generate` as int64 [ranks, tokens, topk], the same tokens on every rank."""
    return np.stack([r.topk_idx.numpy() for r in generate(spec, [tokens] * num_ranks, num_experts, topk, seed)])


def _generator(seed: int, rank: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed * _SEED_STRIDE + rank)


def _favour(spec: RoutingSpec, num_ranks: int, num_experts: int, topk: int, seed: int) -> torch.Tensor:
    """Log-weights [num_experts] that experts get beside their noise: 0, or rank 0's as the asked ratio needs."""
    extra = torch.zeros(num_experts, dtype=torch.float32, device="cpu")
    if spec.kind != "imbalance":
        return extra
    hot, low, high = num_experts // num_ranks, 0.0, _MOST_FAVOUR
    wanted = (1 + spec.ratio) / num_ranks * topk * _SEARCH_TOKENS  # pairs of rank 0's experts
    for _ in range(_SEARCH_STEPS):  # the number of pairs grows with the favour: the noise is the same every time
        extra[:hot] = (low + high) / 2
        drawn = _draw(spec, _SEARCH_TOKENS, num_experts, topk, _generator(seed, num_ranks), extra)
        low, high = (low, (low + high) / 2) if int((drawn < hot).sum()) > wanted else ((low + high) / 2, high)
    return extra


def _draw(
    spec: RoutingSpec, num_tokens: int, num_experts: int, topk: int, generator: torch.Generator, favour: torch.Tensor
) -> torch.Tensor:
    if spec.kind == "one-hot":
        return torch.arange(topk, dtype=torch.int64, device="cpu").repeat(num_tokens, 1)
    noise = torch.rand(num_tokens, num_experts, generator=generator, dtype=torch.float32, device="cpu")
    noise.clamp_(1e-9, 1 - 1e-7)
    if spec.kind == "zipf":
        # Gumbel keys: the top k of log p + Gumbel noise are k draws without replacement from p.
        log_popularity = -spec.exponent * torch.log(torch.arange(1, num_experts + 1, dtype=torch.float32, device="cpu"))
        noise = log_popularity - torch.log(-torch.log(noise))
    if spec.kind == "imbalance":
        noise = favour - torch.log(-torch.log(noise))
    return noise.topk(topk, dim=1).indices


def _from_file(path: str, counts: list[int], num_experts: int, topk: int) -> list[torch.Tensor]:
    table = torch.from_numpy(np.load(path)) if path.endswith(".npy") else torch.load(path, weights_only=True)
    wanted = f"int64 [ranks >= {len(counts)}, tokens >= {max(counts)}, topk = {topk}]"
    is_tensor = torch.is_tensor(table) and table.dtype == torch.int64 and table.dim() == 3
    fits = is_tensor and table.shape[0] >= len(counts) and table.shape[1] >= max(counts)
    if not fits or table.shape[2] != topk:
        found = f"{table.dtype} {list(table.shape)}" if torch.is_tensor(table) else type(table).__name__
        raise UsageError(f"--routing file:{path}: holds {found}, needs {wanted}")
    chosen = [table[rank, :count].contiguous() for rank, count in enumerate(counts)]
    for rank, experts in enumerate(chosen):
        ordered = experts.sort(dim=1).values
        if experts.numel() and (ordered.min() < 0 or ordered.max() >= num_experts):
            raise UsageError(f"--routing file:{path}: rank {rank} names experts beyond 0 .. {num_experts - 1}")
        if (ordered[:, 1:] == ordered[:, :-1]).any():
            raise UsageError(f"--routing file:{path}: rank {rank} has a token that names an expert twice")
    return chosen


def _weights(topk_idx: torch.Tensor) -> torch.Tensor:
    """Weights in eighths, 1/8 .. 8/8: exact in every dtype and different from neighbour to neighbour."""
    tokens = torch.arange(topk_idx.shape[0], dtype=torch.int64, device="cpu").unsqueeze(1)
    return ((topk_idx * 3 + tokens * 5) % 8 + 1).to(torch.float32) / 8
