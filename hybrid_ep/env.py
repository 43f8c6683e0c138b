"""All environment variables of hybrid_ep, in one table. No other module reads os.environ.

`python -m hybrid_ep.env` prints the table with the values in force."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Variable:
    name: str
    parse: Callable[[str], Any]
    type_name: str
    default: Any
    meaning: str


def _positive_int(text: str) -> int:
    if (value := int(text)) < 1:
        raise ValueError
    return value


def _count(text: str) -> int:
    if (value := int(text)) < 0:
        raise ValueError
    return value


def _positive_float(text: str) -> float:
    if not 0 < (value := float(text)) < float("inf"):
        raise ValueError
    return value


TABLE = {v.name: v for v in (
    Variable("HYBRID_EP_RANKS_PER_NODE", _positive_int, "positive integer", None,
             "Ranks of one NVLink domain. Default: the ranks of one host."),
    Variable("NUM_OF_HYBRID_EP_RANKS_PER_NVLINK_DOMAIN", _positive_int, "positive integer", None,
             "deep_ep's name for HYBRID_EP_RANKS_PER_NODE, which wins when both are set."),
    Variable("HYBRID_EP_TIMEOUT_S", _positive_float, "positive number of seconds", 100.0,
             "Deadline of every wait for another rank."),
    Variable("HYBRID_EP_EXECUTOR", str, "name of an executor", "host",
             "Which machine runs the pipeline; hybrid_ep._core.executors() lists them."),
    Variable("HYBRID_EP_NUM_BLOCKS", _positive_int, "positive integer", None,
             "Blocks of an operation where num_sms_* say nothing. Default: from link rates on GPUs (sm_plan), else 1."),
    Variable("HYBRID_EP_TUNING", str, "path of a file", None,
             "File of `hybrid-ep tune`: blocks (where num_sms_* say nothing) and chunks, by device and shape."),
    Variable("HYBRID_EP_RESULT_CACHE_MIB", _count, "number of MiB, 0 or more", 512,
             "Idle host memory that a buffer keeps for its next large results; 0: none."),
    Variable("EXPERT_STATISTIC_ITER_RANGE", str, "range of iterations, 100-200", None,
             "TensorRT-LLM's name: megatron_patches counts tokens per layer and expert in these iterations, the last "
             "not included. The flags --hybrid-ep-load-stats and --hybrid-ep-load-stats-range win."),
    Variable("EXPERT_STATISTIC_PATH", str, "path", "expert_statistic",
             "TensorRT-LLM's name for where they are written: a folder, or a name that ends in .jsonl."),
    Variable("HYBRID_EP_SEED", int, "integer", 0,
             "Seed of the checking executors' choices of order."),
)}


def get(name: str) -> Any:
    """The variable's value, or its default when it is unset or empty. ValueError names a malformed value."""
    variable = TABLE[name]
    text = os.environ.get(name, "").strip()
    if not text:
        return variable.default
    try:
        return variable.parse(text)
    except ValueError:
        raise ValueError(f"environment variable {name}={text!r} is not a {variable.type_name}; {variable.meaning}") \
            from None


def table() -> str:
    """The table as Markdown."""
    lines = ["| variable | type | default | meaning |", "|---|---|---|---|"]
    lines += [f"| `{v.name}` | {v.type_name} | {'' if v.default is None else v.default} | {v.meaning} |"
              for v in TABLE.values()]
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
    for known in TABLE:
        print(f"{known} = {get(known)}")
