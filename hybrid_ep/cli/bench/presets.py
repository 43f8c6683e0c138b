"""Published conditions by name. `hybrid-ep-blog`: the three that NVIDIA's article on Hybrid-EP describes.

The article gives no numbers with its claims; tables that do are in DeepEP's README of the hybrid-ep branch, at another
hidden size (hybrid_ep.perf.published holds them)."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from hybrid_ep.cli import UsageError


@dataclass(frozen=True)
class Condition:
    """4,096 tokens of 8,192 elements, top-8, two experts a rank, bf16, on `nodes` domains of `ranks_per_node`; `claim`
    is about the bandwidth of `link` with `num_sms` SMs."""

    name: str
    claim: str
    cluster: str
    gpu: str
    nodes: int
    ranks_per_node: int
    num_sms: int
    link: str
    tokens: int = 4096
    hidden: int = 8192
    topk: int = 8
    dtype: str = "bf16"

    @property
    def ranks(self) -> int:
        return self.nodes * self.ranks_per_node

    @property
    def experts(self) -> int:
        return 2 * self.ranks


CONDITIONS = {c.name: c for c in (
    Condition("hybrid-ep-blog-h100-8", "8 SMs fill NVLink on one DGX H100", "h100_8x400g", "H100", 1, 8, 8, "nvlink"),
    Condition("hybrid-ep-blog-h100-32", "about 4 SMs come near the NIC's peak on four DGX H100", "h100_8x400g", "H100",
              4, 8, 4, "rail"),
    Condition("hybrid-ep-blog-gb200-36", "16 SMs fill NVLink on 36 GPUs of a GB200 NVL", "gb200_nvl36", "GB200", 1, 36,
              16, "nvlink"),
)}  # fmt: skip
GROUPS = {"hybrid-ep-blog": tuple(CONDITIONS)}
NAMES = (*GROUPS, *CONDITIONS)
# Flags whose values a preset sets, with the values that they have otherwise.
SHAPE_DEFAULTS = {"min_tokens": 1024, "max_tokens": 4096, "factor": 4, "tokens": None, "hidden": 2048, "topk": 8,
                  "experts": 64, "dtype": "bf16", "routing": "uniform", "imbalance": None, "ragged": "none",
                  "ranks": None, "ranks_per_node": None, "cluster": None, "nodes": None}  # fmt: skip


def conditions(name: str) -> tuple[Condition, ...]:
    """Those of a preset."""
    return tuple(CONDITIONS[c] for c in GROUPS.get(name, (name,)))


def refuse_shape_flags(args: argparse.Namespace) -> None:
    """UsageError when a flag contradicts the preset, which sets the whole shape."""
    given = [name for name, default in SHAPE_DEFAULTS.items() if getattr(args, name) != default]
    if given:
        raise UsageError(
            f"--preset {args.preset}: sets the shape, and --{given[0].replace('_', '-')} "
            f"{getattr(args, given[0])} says another; give one of them"
        )


def apply_to_ranks(args: argparse.Namespace) -> None:
    """Host and cuda: the preset's values in place of the flags that it stands for."""
    if args.preset is None:
        return
    if args.preset in GROUPS:
        raise UsageError(
            f"--preset {args.preset}: is {len(GROUPS[args.preset])} worlds, which --backend sim runs at "
            f"once; with --backend {args.backend} give one of {', '.join(GROUPS[args.preset])}"
        )
    refuse_shape_flags(args)
    (condition,) = conditions(args.preset)
    for name in ("hidden", "topk", "experts", "dtype", "ranks", "ranks_per_node"):
        setattr(args, name, getattr(condition, name))
    args.tokens = (condition.tokens,)
    if args.num_sms == (0,):
        args.num_sms = (condition.num_sms,)
