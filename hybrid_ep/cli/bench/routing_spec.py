"""What --routing, --imbalance and --ragged may say. routing.py makes the tensors: a flag is refused without torch,
whose import takes seconds."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from hybrid_ep.cli import UsageError

RAGGED = ("none", "random", "zero-last")


@dataclass(frozen=True)
class RoutingSpec:
    """A parsed --routing: kind in uniform, zipf, one-hot, file, imbalance; `exponent` for zipf, `path` for file,
    `ratio` for imbalance."""

    kind: str
    exponent: float = 0.0
    path: str = ""
    ratio: float = 0.0

    def __str__(self) -> str:
        argument = {"zipf": f":{self.exponent:g}", "file": f":{self.path}", "imbalance": f" {self.ratio:g}"}
        return self.kind + argument.get(self.kind, "")


def parse_routing(text: str) -> RoutingSpec:
    """uniform | zipf:A | one-hot | file:PATH -> RoutingSpec; UsageError for anything else."""
    kind, _, argument = text.partition(":")
    if text in ("uniform", "one-hot"):
        return RoutingSpec(text)
    if kind == "zipf":
        try:
            exponent = float(argument)
        except ValueError:
            exponent = -1.0
        if exponent < 0:
            raise UsageError(f"--routing {text!r}: zipf needs an exponent >= 0, as in zipf:1.2")
        return RoutingSpec("zipf", exponent=exponent)
    if kind == "file" and argument:
        if not Path(argument).is_file():
            raise UsageError(f"--routing {text!r}: no such file; save an int64 tensor [ranks, tokens, topk]")
        return RoutingSpec("file", path=argument)
    raise UsageError(f"--routing {text!r}: use uniform, zipf:A, one-hot or file:PATH")


def with_imbalance(spec: RoutingSpec, ratio: float | None, num_experts: int, topk: int, num_ranks: int) -> RoutingSpec:
    """`spec`, or routing with one hot rank when --imbalance is given; UsageError where no routing has that ratio."""
    if ratio is None:
        return spec
    if spec.kind != "uniform":
        raise UsageError(f"--imbalance {ratio:g}: --routing {spec} says otherwise; give one of them")
    most = min(topk, num_experts // num_ranks) / topk * num_ranks - 1
    if not 0 <= ratio <= most:
        raise UsageError(
            f"--imbalance {ratio:g}: the ratio (max - mean) / mean over {num_ranks} ranks lies in 0 .. "
            f"{most:g} with topk {topk} of {num_experts} experts"
        )
    return RoutingSpec("imbalance", ratio=float(ratio))
