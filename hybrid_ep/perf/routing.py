"""Routing as row counts: how many rows a rank sends over the rail, copies inside its node, receives.

Uniform routing has a closed form (`distinct`); anything else is drawn, and counted exactly. Counts are of the
busiest rank, since an exchange is over when its last rank is done."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np

from hybrid_ep.hardware.distinct import distinct
from hybrid_ep.perf.shape import Shape

_SAMPLE = 4096  # tokens drawn per rank at most; counts are scaled to the real number


@dataclass(frozen=True)
class Traffic:
    """Rows of the busiest rank in one dispatch (combine moves the same rows backwards).

    rail_out, rail_in: tokens sent to and arriving from rail peers. copies: rows that this rank writes to ranks of
    its node, itself included; node_out, node_in: those that cross NVLink, from and to this rank. received: rows in
    its receive buffer. pairs: (token, expert) pairs of its experts. nodes_per_token, ranks_per_token: how many a
    token goes to. imbalance: (max - mean) / mean of pairs over ranks."""

    rail_out: float
    rail_in: float
    copies: float
    node_out: float
    node_in: float
    received: float
    pairs: float
    nodes_per_token: float
    ranks_per_token: float
    imbalance: float

    @property
    def nvlink_rows(self) -> float:
        """Rows through the busier direction of the NVLink port."""
        return max(self.node_out, self.node_in)

    def scaled(self, factor: float) -> Traffic:
        """The same routing for `factor` times the tokens."""
        keep = ("nodes_per_token", "ranks_per_token", "imbalance")
        return Traffic(**{f.name: getattr(self, f.name) * (1 if f.name in keep else factor) for f in fields(self)})


def uniform(shape: Shape, groups: int = 1, group_limit: int = 1) -> Traffic:
    """Every set of topk experts equally likely, or with groups > 1: every set inside every choice of `group_limit`
    of `groups` equal groups of experts (group-limited routing).

    ValueError for groups that are not equal, that nodes or ranks cut unevenly, or that have too few experts."""
    _require_groups(shape, groups, group_limit)
    if groups == group_limit:
        nodes, ranks = (distinct(n, shape.experts, shape.topk) for n in (shape.nodes, shape.ranks))
    else:
        nodes, ranks = (n * (1 - _missed(shape, n, groups, group_limit)) for n in (shape.nodes, shape.ranks))
    return from_means(shape, nodes, ranks)


def _require_groups(shape: Shape, groups: int, limit: int) -> None:
    for name, value, most in (("groups", groups, shape.experts), ("group_limit", limit, groups)):
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
            raise ValueError(f"{name}={value!r} must be an integer from 1 to {most}")
    uneven = [n for n in (shape.nodes, shape.ranks) if n % groups and groups % n]
    if shape.experts % groups or uneven:
        raise ValueError(
            f"groups={groups} must divide the {shape.experts} experts, and divide or be a multiple of the "
            f"{shape.nodes} nodes and the {shape.ranks} ranks: give a number that does"
        )
    if (within := shape.experts // groups * limit) < shape.topk:
        raise ValueError(
            f"group_limit={limit} leaves a token {within} experts, fewer than topk={shape.topk}: give more groups, or "
            "larger ones"
        )


def _missed(shape: Shape, units: int, groups: int, limit: int) -> float:
    """Probability that one of `units` equal parts of the experts gets nothing of a token in group-limited routing."""
    open_experts = shape.experts // groups * limit

    def none_of(experts: int) -> float:
        return math.comb(open_experts - experts, shape.topk) / math.comb(open_experts, shape.topk)

    if units > groups:  # a part of one group
        chosen = limit / groups
        return 1 - chosen + chosen * none_of(shape.experts // units)
    held = groups // units
    ways = math.comb(groups, limit)
    return sum(
        math.comb(held, j) * math.comb(groups - held, limit - j) / ways * none_of(shape.experts // groups * j)
        for j in range(min(held, limit) + 1)
    )


def from_means(shape: Shape, nodes_per_token: float, ranks_per_token: float) -> Traffic:
    """Symmetric routing in which a token goes to so many nodes and ranks."""
    tokens = shape.tokens
    rail = tokens * nodes_per_token * (1 - 1 / shape.nodes)
    copies = tokens * ranks_per_token
    crossing = copies * (1 - 1 / shape.ranks_per_node)
    return Traffic(
        rail,
        rail,
        copies,
        crossing,
        crossing,
        copies,
        float(tokens * shape.topk),
        nodes_per_token,
        ranks_per_token,
        0.0,
    )


def count(choices: np.ndarray, shape: Shape) -> Traffic:
    """Exact counts of int [ranks, tokens, topk] expert choices, -1 = dropped; scaled to shape.tokens."""
    if choices.ndim != 3 or choices.shape[0] != shape.ranks or choices.shape[2] > shape.experts:
        raise ValueError(f"choices of shape {choices.shape} must be [ranks={shape.ranks}, tokens, topk]")
    if choices.size and (choices.min() < -1 or choices.max() >= shape.experts):
        raise ValueError(f"choices name experts beyond -1 .. {shape.experts - 1}")
    per_rank, ranks, local = shape.local_experts, shape.ranks, shape.ranks_per_node
    received, pairs = np.zeros(ranks), np.zeros(ranks)
    rail_out, rail_in, copies, own = np.zeros(ranks), np.zeros(ranks), np.zeros(ranks), np.zeros(ranks)
    any_local: list[int] = []  # tokens of each rank that its own node needs
    for rank in range(ranks):
        hit = np.zeros((choices.shape[1], ranks + 1), dtype=bool)
        home = np.where(choices[rank] < 0, ranks, choices[rank] // per_rank)
        np.put_along_axis(hit, home, True, axis=1)
        pairs += np.bincount(home.ravel(), minlength=ranks + 1)[:ranks]
        to_rank = hit[:, :ranks].sum(axis=0)
        received += to_rank
        to_node = hit[:, :ranks].reshape(-1, shape.nodes, local).any(axis=2).sum(axis=0)
        for node in range(shape.nodes):
            forwarder = node * local + rank % local  # the rank of our rail there writes our tokens to its node
            here = to_rank[node * local : (node + 1) * local]
            copies[forwarder] += here.sum()
            own[forwarder] += here[rank % local]
            if node == rank // local:
                any_local.append(int(to_node[node]))
            else:
                rail_out[rank] += to_node[node]
                rail_in[forwarder] += to_node[node]
    tokens = max(1, choices.shape[1])
    remote = float(rail_out.sum()) / (ranks * tokens)  # other nodes a token goes to
    local_nodes = float(sum(any_local)) / (ranks * tokens)
    out, into, copied, crossing, coming, most, paired = (
        float(np.max(rows)) for rows in (rail_out, rail_in, copies, copies - own, received - own, received, pairs)
    )
    result = Traffic(
        out,
        into,
        copied,
        crossing,
        coming,
        most,
        paired,
        remote + local_nodes,
        float(received.sum()) / (ranks * tokens),
        float(np.max(pairs)) / float(np.mean(pairs)) - 1 if pairs.any() else 0.0,
    )
    return result.scaled(shape.tokens / tokens)


def zipf(shape: Shape, exponent: float, seed: int = 1) -> np.ndarray:
    """Choices int64 [ranks, tokens, topk]: expert i drawn with probability ~ (i + 1)^-exponent, without replacement;
    which expert is hot is a random permutation, so that the hot ones are spread over ranks."""
    if not 0 <= exponent < math.inf:
        raise ValueError(f"exponent={exponent!r} of zipf must be a number of at least 0")
    return popularity(shape, np.arange(1, shape.experts + 1, dtype=np.float64) ** -exponent, seed, shuffle=True)


def popularity(shape: Shape, weights: np.ndarray, seed: int = 1, *, shuffle: bool = False) -> np.ndarray:
    """Choices drawn without replacement, expert e with a probability ~ weights[e] (Gumbel keys)."""
    weights = np.asarray(weights, dtype=np.float64)
    if weights.shape != (shape.experts,) or not np.isfinite(weights).all() or (weights < 0).any():
        raise ValueError(f"load of shape {weights.shape} must be {shape.experts} numbers >= 0, one an expert")
    if (weights > 0).sum() < shape.topk:
        raise ValueError(f"load names {(weights > 0).sum()} experts with tokens, fewer than topk={shape.topk}")
    rng = np.random.default_rng(seed)
    if shuffle:
        weights = weights[rng.permutation(shape.experts)]
    with np.errstate(divide="ignore"):
        log_weights = np.log(weights / weights.sum())
    tokens = min(shape.tokens, _SAMPLE)
    drawn = np.empty((shape.ranks, tokens, shape.topk), dtype=np.int64)
    for rank in range(shape.ranks):
        keys = log_weights + rng.gumbel(size=(tokens, shape.experts))
        drawn[rank] = np.argpartition(keys, -shape.topk, axis=1)[:, -shape.topk :]
    return drawn


def load_file(path: str, shape: Shape, seed: int = 1) -> np.ndarray:
    """A load file: one number an expert (text, or .npy [experts]), or choices (.npy int [ranks, tokens, topk])."""
    if not Path(path).is_file():
        raise ValueError(f"load file {path!r} does not exist; give one number an expert as text, or an .npy array")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # of a file without numbers, which is an error here
            table = np.load(path) if path.endswith(".npy") else np.loadtxt(path, ndmin=1)
    except ValueError as error:
        raise ValueError(f"load file {path!r} is neither an .npy array nor numbers as text: {error}") from None
    if not table.size:
        raise ValueError(f"load file {path!r} is empty; give {shape.experts} numbers, one an expert")
    return table if table.ndim == 3 else popularity(shape, table.ravel(), seed)


def parse(text: str, shape: Shape, seed: int = 1) -> np.ndarray | None:
    """uniform -> None (it has a closed form); zipf:A | file:PATH -> choices. ValueError for anything else."""
    kind, _, argument = text.partition(":")
    if text == "uniform":
        return None
    if kind == "zipf":
        try:
            exponent = float(argument)
        except ValueError:
            raise ValueError(f"routing={text!r}: zipf needs an exponent, as in zipf:1.2") from None
        try:
            return zipf(shape, exponent, seed)
        except ValueError as error:
            raise ValueError(f"routing={text!r}: {error}") from None
    if kind == "file" and argument:
        return load_file(argument, shape, seed)
    raise ValueError(f"routing={text!r}: use uniform, zipf:A or file:PATH")


def traffic_of(text: str, shape: Shape, seed: int = 1) -> Traffic:
    """The row counts of `parse(text)`."""
    choices = parse(text, shape, seed)
    return uniform(shape) if choices is None else count(choices, shape)
