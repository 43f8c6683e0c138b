"""Published bandwidths as rows, the model's answer to each, and the fit of the few numbers that are fitted.

data/published_bandwidth.csv holds the rows with their source and conditions. `basis` says what the GB/s count:
"rdma logical" counts a token once per node that needs it, its own node included; "nvlink logical" once per rank,
itself included. `scope`: "kernel" is the named kernel alone; "api" the Python call with a cached handle, so the
routing exchange, the scan and the host's synchronisation are left out of both."""

from __future__ import annotations

import csv
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from hybrid_ep.hardware import clusters
from hybrid_ep.hardware.clusters import FITTED_FROM, Cluster, Quantity
from hybrid_ep.perf import model, routing
from hybrid_ep.perf.implementations import PUBLISHED, Implementation
from hybrid_ep.perf.shape import Shape

CSV = Path(__file__).parent / "data" / "published_bandwidth.csv"
_CLUSTER = {
    "H100": "h100_8x400g",
    "SM90": "h100_8x400g",
    "H800": "h800_8x400g",
    "B200": "b200_8x400g",
    "SM100": "b200_8x400g",
    "GB200": "gb200_nvl36",
}
_INTEGERS = ("ranks", "ranks_per_node", "tokens_per_rank", "hidden", "topk", "experts", "num_sms")


@dataclass(frozen=True)
class Row:
    """One published number."""

    source: str
    gpu: str
    network: str
    op: str
    dtype: str
    ranks: int
    ranks_per_node: int
    tokens_per_rank: int
    hidden: int
    topk: int
    experts: int
    num_sms: int
    scope: str
    basis: str
    gb_per_s: float
    note: str

    @property
    def shape(self) -> Shape:
        return Shape(self.ranks, self.ranks_per_node, self.tokens_per_rank, self.hidden, self.topk, self.experts)

    @property
    def own_kernels(self) -> bool:
        """Are these the kernels whose structure the model has? DeepEP's are other kernels, told for comparison."""
        return self.source.startswith("Hybrid-EP")


@dataclass(frozen=True)
class Answer:
    """The model's answer to a row: GB/s on the row's basis, (model - published) / published, what binds."""

    row: Row
    gb_per_s: float
    binds: str

    @property
    def residual(self) -> float:
        return self.gb_per_s / self.row.gb_per_s - 1


def _row(record: dict[str, str]) -> Row:
    fields: dict[str, Any] = {
        k: int(v) if k in _INTEGERS else float(v) if k == "gb_per_s" else v for k, v in record.items()
    }
    return Row(**fields)


@lru_cache
def rows() -> tuple[Row, ...]:
    """Every row of the table, in its order."""
    with CSV.open(newline="") as file:
        return tuple(_row(record) for record in csv.DictReader(file))


def cluster_of(row: Row) -> Cluster:
    """The one that has the row's GPU."""
    return clusters.get(_CLUSTER[row.gpu])


def answer(row: Row, cluster: Cluster | None = None, impl: Implementation = PUBLISHED) -> Answer:
    """Predict one row on `cluster` (default: the one of its GPU), as if these kernels had run."""
    cluster = cluster or cluster_of(row)
    traffic = routing.uniform(row.shape, 8, 4) if "top-4 groups" in row.note else routing.uniform(row.shape)
    got = model.predict(row.op, row.shape, cluster, num_sms=row.num_sms, dtype=row.dtype, traffic=traffic, impl=impl)
    link = "rail" if row.basis.startswith("rdma") else "nvlink"
    time_us = got.api_us if row.scope == "api" else got.kernel_us
    return Answer(row, got.logical[link] * got.kernel_us / time_us, got.binds)


def answers(chosen: Iterable[Row] | None = None) -> list[Answer]:
    return [answer(row) for row in (rows() if chosen is None else chosen)]


def floor_rows(found: Sequence[Answer]) -> list[Answer]:
    """Those the floors are about: bf16 rows, dispatch and combine, of Hybrid-EP on H100."""
    return [a for a in found if a.row.own_kernels and a.row.gpu == "H100" and a.row.dtype == "bf16"]


def spread(found: Sequence[Answer]) -> tuple[float, float]:
    """(median, worst) |residual|."""
    sizes = [abs(a.residual) for a in found]
    return statistics.median(sizes), max(sizes)


# -- the fit --------------------------------------------------------------------------------------------------------

# For each fitted number: the cluster that it is fitted on, and which row must come out.
_FITS: dict[tuple[str, str], tuple[str, dict[str, object]]] = {
    ("hopper", "copy_ns"): ("h100_8x400g", {"gpu": "H100", "ranks": 16, "num_sms": 4, "op": "dispatch"}),
    ("hopper", "pull_us"): ("h100_8x400g", {"gpu": "H100", "ranks": 16, "num_sms": 4, "op": "combine"}),
    ("hopper", "skew_us"): ("h100_8x400g", {"gpu": "H100", "ranks": 16, "num_sms": 16, "op": "dispatch"}),
    ("blackwell", "copy_ns"): ("b200_8x400g", {"gpu": "B200", "ranks": 8, "num_sms": 16, "op": "dispatch"}),
    ("blackwell", "pull_us"): ("gb200_nvl36", {"gpu": "GB200", "ranks": 8, "num_sms": 16, "op": "combine"}),
    ("blackwell", "nvlink_efficiency"): ("gb200_nvl36", {"gpu": "GB200", "ranks": 8, "num_sms": 32, "op": "dispatch"}),
}
assert _FITS.keys() == FITTED_FROM.keys()
_RANGES = {"copy_ns": (0.0, 400.0), "pull_us": (0.1, 10.0), "skew_us": (0.0, 2000.0), "nvlink_efficiency": (0.4, 1.0)}


def fit(generation: str, name: str) -> float:
    """The value of a fitted number with which its row comes out exactly. ValueError when none in range does."""
    cluster_name, wanted = _FITS[generation, name]
    wanted = {**wanted, "dtype": "bf16", "scope": "kernel"}
    (row,) = [r for r in rows() if r.own_kernels and all(getattr(r, k) == v for k, v in wanted.items())]
    cluster = clusters.get(cluster_name)
    low, high = _RANGES[name]
    return _bisect(lambda value: answer(row, with_value(cluster, name, value)).residual, low, high, name)


def with_value(cluster: Cluster, name: str, value: float) -> Cluster:
    """The cluster with another value for a number of its GPU or, for nic_*, of its NIC."""
    part = "nic" if name.startswith("nic_") else "gpu"
    attribute = name.removeprefix("nic_")
    thing = getattr(cluster, part)
    old: Quantity = getattr(thing, attribute)
    return replace(cluster, **{part: replace(thing, **{attribute: old._replace(value=value)})})


def _bisect(f: Callable[[float], float], low: float, high: float, name: str) -> float:
    """The zero of a monotone function."""
    at_low, at_high = f(low), f(high)
    if at_low * at_high > 0:
        raise ValueError(f"{name}: residual {at_low:+.3f} at {low} and {at_high:+.3f} at {high}; nothing between fits")
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if f(middle) * at_low > 0 else (low, middle)
    return (low + high) / 2
