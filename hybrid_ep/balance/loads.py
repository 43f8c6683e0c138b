"""Synthetic expert loads, seeded: for tests, the benchmark and the committed experiment. numpy only.

Popularity is what an expert would get of very many tokens; counts are what a batch gives it. Between the two lie
drift of the popularity from batch to batch (`delta`) and sampling (multinomial).
"""

from __future__ import annotations

import numpy as np


def popularity(rng: np.random.Generator, num_layers: int, num_experts: int, kind: str, value: float) -> np.ndarray:
    """float64 [L, E], rows sum to 1. kind "lognormal": log-popularity N(0, value). "zipf": rank ** -value,
    experts in random order. "flat": all alike (value is ignored)."""
    if kind == "lognormal":
        weight = np.exp(rng.normal(0.0, value, (num_layers, num_experts)))
    elif kind == "zipf":
        weight = np.arange(1, num_experts + 1, dtype=np.float64) ** -value
        weight = np.stack([rng.permutation(weight) for _ in range(num_layers)])
    elif kind == "flat":
        weight = np.ones((num_layers, num_experts))
    else:
        raise ValueError(f"kind is {kind!r}: choose lognormal, zipf or flat")
    return weight / weight.sum(axis=1, keepdims=True)


def drift(rng: np.random.Generator, share: np.ndarray, delta: float) -> np.ndarray:
    """The popularity of another batch: log-popularity moved by N(0, delta), rows sum to 1 again."""
    moved = share * np.exp(rng.normal(0.0, delta, share.shape))
    return moved / moved.sum(axis=-1, keepdims=True)


def correlated(
    rng: np.random.Generator, num_layers: int, num_experts: int, num_blocks: int, across: float, within: float
) -> np.ndarray:
    """float64 [L, E], rows sum to 1: experts of a block are hot together. Log-popularity N(0, across) of each of
    `num_blocks` consecutive blocks plus N(0, within) of each expert. As many blocks as ranks: a rank's own experts;
    fewer: groups of experts, as group-limited routing makes them."""
    block = np.repeat(rng.normal(0.0, across, (num_layers, num_blocks)), num_experts // num_blocks, axis=1)
    weight = np.exp(block + rng.normal(0.0, within, (num_layers, num_experts)))
    return weight / weight.sum(axis=1, keepdims=True)


def counts(rng: np.random.Generator, share: np.ndarray, num_ranks: int, tokens_per_rank: int) -> np.ndarray:
    """int64 [R, E]: `tokens_per_rank` (token, expert) pairs of every rank drawn from `share` [E]."""
    return rng.multinomial(tokens_per_rank, share, size=num_ranks).astype(np.int64)
