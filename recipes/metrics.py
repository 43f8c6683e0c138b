"""The names of a run's metrics, once: metrics.jsonl, Weights & Biases and TensorBoard use the same. docs/metrics.md is
this table.
"""

from __future__ import annotations

from typing import Any

import numpy as np

# name -> (unit, meaning). What is listed by layer has one entry a layer in a logger, counted from 1.
SCALARS = {
    "train_loss": ("nats a token", "mean over ranks and micro-batches of the step"),
    "held_out_loss": ("nats a token", "on held-out text, in the steps that evaluate"),
    "grad_norm": ("1", "before clipping"),
    "lr": ("1", "learning rate of the step"),
    "tokens": ("tokens", "trained on so far"),
    "step_s": ("s", "wall time of the step"),
    "tokens_per_s": ("tokens/s", "of all ranks together"),
    "dispatch_s": ("s", "in dispatch, forward and backward, mean over ranks"),
    "combine_s": ("s", "in combine, likewise"),
    "memory_bytes": ("bytes", "most that any rank's process has held so far; on a GPU, that torch has allocated"),
    "rank_imbalance": ("(max - mean) / mean", "of routed tokens over ranks without balancing, mean over layers"),
    "rank_imbalance_max": ("(max - mean) / mean", "the same of the worst layer"),
    "expert_imbalance": ("(max - mean) / mean", "of routed tokens over experts, mean over layers"),
    "balanced_imbalance": ("(max - mean) / mean", "of computed tokens over ranks with balancing, mean over layers"),
    "balanced_imbalance_max": ("(max - mean) / mean", "the same of the worst layer"),
    "clones": ("experts", "pushed to spare slots in the latest micro-batch, mean over layers"),
    "moved_experts": ("experts", "moved to other ranks so far, slow balancing"),
}
LISTS = {
    "expert_load": ("tokens [layer][expert]", "routed to each expert in the step"),
    "rank_sent": ("tokens [source rank][rank of its group]", "routed to experts there without balancing, all layers"),
    "rank_waited": ("s [rank][rank of its group]", "waited for it to come to an operation; zeros but over hybrid_ep"),
    "balanced_rank_load": ("tokens [layer][rank]", "computed by each rank in the latest micro-batch, with clones"),
}
BY_LAYER = {
    "rank_load_ratio/layer_N": ("max / mean", "of routed tokens over ranks, without balancing"),
    "balanced_load_ratio/layer_N": ("max / mean", "of computed tokens over ranks, with balancing"),
    "expert_load_ratio/layer_N": ("max / mean", "of routed tokens over experts"),
}


def rank_load(record: dict[str, Any], num_ranks: int) -> np.ndarray:
    """float64 [layers, ranks]: tokens of a step by rank if experts stay where contiguous owners put them."""
    load = np.asarray(record["expert_load"], dtype=np.float64)
    return load.reshape(len(load), num_ranks, -1).sum(axis=2)


def ratio(load: np.ndarray) -> np.ndarray:
    """max / mean over the last dimension, 1 where there are no tokens."""
    mean = load.mean(axis=-1)
    return np.divide(load.max(axis=-1), mean, out=np.ones_like(mean), where=mean > 0)


def flatten(record: dict[str, Any], num_ranks: int) -> dict[str, float]:
    """What a logger of scalars gets of one step: the scalars, and the ratios by layer."""
    flat = {name: value for name, value in record.items() if name not in LISTS and name != "step"}
    loads = {"rank_load_ratio": rank_load(record, num_ranks), "expert_load_ratio": np.asarray(record["expert_load"])}
    if "balanced_rank_load" in record:
        loads["balanced_load_ratio"] = np.asarray(record["balanced_rank_load"])
    for name, load in loads.items():
        flat |= {f"{name}/layer_{n}": float(r) for n, r in enumerate(ratio(load.astype(np.float64)), 1)}
    return flat


def table() -> str:
    """The names as Markdown."""
    lines = []
    for title, names in (
        ("metrics.jsonl and loggers", SCALARS),
        ("metrics.jsonl alone", LISTS),
        ("loggers alone, for every layer N", BY_LAYER),
    ):
        lines += [f"## In {title}", "", "| name | unit | meaning |", "|---|---|---|"]
        lines += [f"| `{name}` | {unit} | {meaning} |" for name, (unit, meaning) in names.items()] + [""]
    return "\n".join(lines).rstrip()


if __name__ == "__main__":
    print(table())
