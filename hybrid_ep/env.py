"""All environment variables of hybrid_ep, in one table. No other module reads os.environ.

`python -m hybrid_ep.env` prints the table with the values in force."""

from __future__ import annotations

import difflib
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


def _integer(least: int, most: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not least <= (value := int(text)) <= most:
            raise ValueError
        return value

    return parse


def _one_of(*names: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text not in names:
            raise ValueError
        return text

    return parse


def _executor(text: str) -> str:
    """Those of the GPU by name: their library adds them only when it is loaded."""
    if text not in CUDA_EXECUTORS:
        try:
            from hybrid_ep import _core
        except ImportError:  # said where it is needed, with its remedy
            return text
        if text not in _core.executors():
            raise ValueError
    return text


def _seconds(text: str) -> float:
    if not 0 < (value := float(text)) <= MOST_SECONDS:
        raise ValueError
    return value


# Ranges are wide enough for every machine there is, and narrow enough that a slip of a digit is refused by name instead
# of ending in an allocation that fails.
MOST_BLOCKS = 1024  # of an operation: several times the SMs of any GPU, and what a host still starts at once
MOST_SECONDS = 1e9  # of a deadline: 30 years, which still fit the nanoseconds that kernels count in
_MOST_RANKS, MOST_MIB, _MOST_SEED = 1 << 20, 1 << 24, (1 << 63) - 1
LANDINGS = ("first", "all")
CUDA_EXECUTORS = ("cuda", "cuda_loopback", "cuda_nvshmem")


TABLE = {
    v.name: v
    for v in (
        Variable(
            "HYBRID_EP_RANKS_PER_NODE",
            _integer(1, _MOST_RANKS),
            f"integer from 1 to {_MOST_RANKS}",
            None,
            "Ranks of one NVLink domain. Default: what the GPUs find out; elsewhere the ranks of one host.",
        ),
        Variable(
            "NUM_OF_HYBRID_EP_RANKS_PER_NVLINK_DOMAIN",
            _integer(1, _MOST_RANKS),
            f"integer from 1 to {_MOST_RANKS}",
            None,
            "deep_ep's name for HYBRID_EP_RANKS_PER_NODE, which wins when both are set.",
        ),
        Variable(
            "HYBRID_EP_TIMEOUT_S",
            _seconds,
            f"number of seconds above 0, at most {MOST_SECONDS:.0e}",
            100.0,
            "Deadline of every wait for another rank.",
        ),
        Variable(
            "HYBRID_EP_EXECUTOR",
            _executor,
            "name of an executor",
            None,
            "Which machine runs the pipeline: host, cuda, or another of hybrid_ep._core.executors(). Default: cuda for "
            "a group that nccl serves, host for others.",
        ),
        Variable(
            "HYBRID_EP_NUM_BLOCKS",
            _integer(1, MOST_BLOCKS),
            f"integer from 1 to {MOST_BLOCKS}",
            None,
            "Blocks of an operation where num_sms_* say nothing. Default: from link rates on GPUs (sm_plan), else 1.",
        ),
        Variable(
            "HYBRID_EP_TUNING",
            str,
            "path of a file",
            None,
            "File of `hybrid-ep tune`: blocks (where num_sms_* say nothing) and chunks, by device and shape.",
        ),
        Variable(
            "HYBRID_EP_RESULT_CACHE_MIB",
            _integer(0, MOST_MIB),
            f"number of MiB from 0 to {MOST_MIB}",
            512,
            "Idle host memory that a buffer keeps for its next large results; 0: none.",
        ),
        Variable(
            "HYBRID_EP_ARENA_MIB",
            _integer(0, MOST_MIB),
            f"number of MiB from 0 to {MOST_MIB}",
            None,
            "Registered memory of a buffer for results of dispatch, where rows land without a copy; 0: none. Default: "
            "two and a half results of a balanced call, at most 1 GiB. A GPU's has 10 MiB at least.",
        ),
        Variable(
            "HYBRID_EP_LANDING",
            _one_of(*LANDINGS),
            f"one of {', '.join(LANDINGS)}",
            None,
            "Where dispatched rows land in the arena: at all of a token's pairs on a rank, or at the first, whose rank "
            "copies it to the others. Default: all on hosts, first on GPUs.",
        ),
        Variable(
            "EXPERT_STATISTIC_ITER_RANGE",
            str,
            "range of iterations, 100-200",
            None,
            "TensorRT-LLM's name: megatron_patches counts tokens per layer and expert in these iterations, the last "
            "not included. The flags --hybrid-ep-load-stats and --hybrid-ep-load-stats-range win.",
        ),
        Variable(
            "EXPERT_STATISTIC_PATH",
            str,
            "path",
            "expert_statistic",
            "TensorRT-LLM's name for where they are written: a folder, or a name that ends in .jsonl.",
        ),
        Variable(
            "HYBRID_EP_SEED",
            _integer(0, _MOST_SEED),
            f"integer from 0 to {_MOST_SEED}",
            0,
            "Seed of the checking executors' choices of order.",
        ),
    )
}

# Of the set-up and of the tests, read where this package is not there yet, or is what is tested.
OUTSIDE = (
    "HYBRID_EP_CUDA",
    "HYBRID_EP_PYTHON",
    "HYBRID_EP_TORCH_INDEX",
    "HYBRID_EP_TEST_EXAMPLES",
    "HYBRID_EP_TEST_MATRIX",
    "HYBRID_EP_TEST_CALLERS",
)


def torch_allocator_conf() -> str:
    """What the environment asks of PyTorch's CUDA allocator, by its newer name or its older one; not ours to check."""
    return os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")


# Of NVSHMEM: who chooses a rank's NIC, and among which.
NIC_LIST = "NVSHMEM_HCA_LIST"
NIC_BY_LIST = "NVSHMEM_ENABLE_NIC_PE_MAPPING"
NIC_CHOICES = (NIC_BY_LIST, "NVSHMEM_HCA_PE_MAPPING", "NVSHMEM_NETDEVS_POLICY", "NVSHMEM_IBGDA_ENABLE_MULTI_PORT")


def nvshmem_nics() -> dict[str, str]:
    """What the environment says of the NICs that NVSHMEM uses; not ours to check."""
    return {name: value for name in (NIC_LIST, *NIC_CHOICES) if (value := os.environ.get(name, ""))}


def name_nvshmem_nic(nic: str) -> None:
    """Gives NVSHMEM, which has not started in this process, one NIC: "mlx5_0:1", a name and a port. The list alone is
    not enough: from 3.8 on NVSHMEM reads it only with the other variable."""
    os.environ.update({NIC_LIST: nic, NIC_BY_LIST: "1"})


def unknown() -> dict[str, str | None]:
    """Variables that are set and look like ours, and nothing reads; with the name that may have been meant."""
    ours = "HYBRID_EP_"  # which all share, so that it makes none alike
    known = {name.replace(ours, ""): name for name in (*TABLE, *OUTSIDE)}
    strange = sorted(name for name in os.environ if ours in name and name not in known.values())
    near = {name: difflib.get_close_matches(name.replace(ours, ""), known, n=1, cutoff=0.55) for name in strange}
    return {name: known[found[0]] if found else None for name, found in near.items()}


def get(name: str) -> Any:
    """The variable's value, or its default when it is unset or empty. ValueError names a malformed value."""
    return parse(name, os.environ.get(name, ""))


def parse(name: str, text: str) -> Any:
    """What `get` returns where the variable has this text; for variables of a job that starts elsewhere."""
    variable = TABLE[name]
    text = text.strip()
    if not text:
        return variable.default
    try:
        return variable.parse(text)
    except ValueError:
        raise ValueError(
            f"environment variable {name}={text!r:.80} is not a valid {variable.type_name}; unset or "
            f"mend it: {variable.meaning}"
        ) from None


def check(files: bool = True) -> None:
    """ValueError for the first malformed variable, whether it is needed later or not: a rank that finds one in the
    middle of a collective set-up would let the others wait. files: also for a file that a variable names in vain."""
    for name in TABLE:
        get(name)
    if files and (file := get("HYBRID_EP_TUNING")):
        from hybrid_ep import tuning

        tuning.load(file, "")


def table() -> str:
    """The table as Markdown."""
    lines = ["| variable | type | default | meaning |", "|---|---|---|---|"]
    lines += [
        f"| `{v.name}` | {v.type_name} | {'' if v.default is None else v.default} | {v.meaning} |"
        for v in TABLE.values()
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
    for known in TABLE:
        print(f"{known} = {get(known)}")
