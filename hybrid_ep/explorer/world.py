"""A whole simulated world as one function call: shapes, routing and seed in; failure, or virtual times, out.

The kernels are the ones that run everywhere else; only the machine under them is simulated (docs/simulator.md).
`explore` draws an interleaving from a seed, moves every byte and compares the results with an oracle;
`measure` runs on a virtual clock with the costs of a cluster and moves no payload."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hybrid_ep import _core

STRATEGIES = tuple(_core.sim_strategies())
FAULTS = ("none", "rank_dies", "rail_stops", "put_lost")
DTYPES = ("bf16", "fp16", "fp32")
ROUTINGS = ("uniform", "one_expert", "own_node", "few_experts", "skewed_nodes")
_NAMED = {"strategy": STRATEGIES, "fault": FAULTS, "dtype": DTYPES, "routing": ROUTINGS}
PS_PER_US = 1_000_000


@dataclass(frozen=True)
class Failure:
    """How a world ended badly. kind: deadlock, rule, wrong, error, or memory, where this machine has none for it; rule:
    which one; what: in words."""

    kind: str
    rule: str
    what: str


@dataclass(frozen=True)
class Link:
    """What one server of the machine did: busy time in microseconds, bytes that crossed it, copies served."""

    name: str
    rank: int
    block: int
    busy_us: float
    num_bytes: int
    copies: int


@dataclass(frozen=True)
class Kernel:
    """One launch on one rank, times in microseconds of the world's clock."""

    name: str
    rank: int
    start_us: float
    end_us: float

    @property
    def time_us(self) -> float:
        return self.end_us - self.start_us


@dataclass(frozen=True)
class Role:
    """A warp role of one rank, summed over its blocks: busy and waited (by site) microseconds."""

    name: str
    rank: int
    busy_us: float
    waited_us: dict[str, float]


@dataclass(frozen=True)
class Span:
    """One use of one link, for a trace. start, end in microseconds."""

    operation: str
    role: str
    rank: int
    block: int
    link: str
    start_us: float
    end_us: float
    num_bytes: int


@dataclass(frozen=True)
class World:
    """What a world left behind. `ranks`: by rank its timeout report (a dict with error, site, role, peer) or Nones.
    Times, links, roles and spans are of measured worlds only."""

    spec: dict[str, int]
    failure: Failure | None
    ranks: tuple[dict, ...]
    steps: int
    log: tuple[str, ...] = ()
    kernels: tuple[Kernel, ...] = ()
    links: tuple[Link, ...] = ()
    roles: tuple[Role, ...] = ()
    spans: tuple[Span, ...] = field(default=(), repr=False)

    def kernel_us(self, name: str) -> float:
        """The longest launch of a kernel over all ranks (its makespan where ranks enter together)."""
        return max((k.time_us for k in self.kernels if k.name == name), default=0.0)

    def operation_us(self, *names: str) -> float:
        """From the first start to the last end of the named kernels over all ranks: the whole operation."""
        chosen = [k for k in self.kernels if k.name in names]
        return max(k.end_us for k in chosen) - min(k.start_us for k in chosen) if chosen else 0.0

    def link_bytes(self) -> dict[str, dict[int, int]]:
        """Bytes that crossed each kind of link, by rank: {link: {rank: bytes}}."""
        table: dict[str, dict[int, int]] = defaultdict(lambda: defaultdict(int))
        for link in self.links:
            table[link.name][link.rank] += link.num_bytes
        return {name: dict(by_rank) for name, by_rank in table.items()}


def require_whole(got: World) -> None:
    """MemoryError for a world that was too large for this machine; RuntimeError for one whose kernels failed."""
    if got.failure is None:
        return
    if got.failure.kind == "memory":
        raise MemoryError(f"the simulated world is too large for this machine: {got.failure.what}")
    raise RuntimeError(f"the simulated kernels failed: {got.failure.kind} {got.failure.rule} {got.failure.what}")


def spec_of(**settings: int | str) -> dict[str, int]:
    """A complete spec from keyword settings; strategy, fault, dtype and routing may be given by name.
    ValueError for an unknown name; see `csrc/sim/world_spec.h` for the fields."""
    spec = _core.sim_defaults()
    for name, value in settings.items():
        if name not in spec:
            raise ValueError(f"{name}: no such field of a simulated world; there are {', '.join(spec)}")
        if isinstance(value, str):
            names = _NAMED.get(name, ())
            if value not in names:
                raise ValueError(f"{name}: {value!r} is none of {', '.join(names) or 'the numbers it takes'}")
            value = names.index(value)
        spec[name] = int(value)
    return spec


def _run(spec: Mapping[str, int], **options: Any) -> World:
    raw = _core.simulate(dict(spec), **options)
    us = PS_PER_US
    return World(
        spec=dict(spec),
        failure=Failure(**raw["failure"]) if raw["failure"] else None,
        ranks=tuple(raw["ranks"]),
        steps=raw["steps"],
        log=tuple(raw["log"]),
        kernels=tuple(Kernel(name, rank, start / us, end / us) for name, rank, start, end in raw["kernels"]),
        links=tuple(Link(name, rank, block, busy / us, num_bytes, copies)
                    for name, rank, block, busy, num_bytes, copies in raw["links"]),
        roles=tuple(Role(role, rank, busy / us, {site: t / us for site, t in waited.items()})
                    for rank, role, busy, waited in raw["roles"]),
        spans=tuple(Span(op, role, rank, block, link, start / us, end / us, num_bytes)
                    for op, role, rank, block, link, start, end, num_bytes in raw["spans"]),
    )  # fmt: skip


def explore(
    spec: Mapping[str, int], *, log: bool = False, timeout_s: float = 100.0, topk_idx: Sequence[Sequence[int]] = ()
) -> World:
    """One interleaving of a world, every byte moved and checked.

    spec: from `spec_of` or `random_spec`. timeout_s: virtual deadline of every wait in a world with a fault;
    0 = none, so that the world deadlocks and `failure` holds the wait-for graph.
    topk_idx: by rank a flat list [tokens * topk], -1 = dropped; empty = drawn from data_seed.
    ValueError for a spec that makes no sense; a world that goes wrong is a result, not an exception."""
    if not 0 <= timeout_s <= 1e6:
        raise ValueError(f"timeout_s: is {timeout_s}; give seconds from 0 (no deadlines) to 1e6")
    return _run(spec, log=log, timeout_s=timeout_s, topk_idx=[list(map(int, row)) for row in topk_idx])


def measure(
    spec: Mapping[str, int], costs: Mapping[str, int], *, trace: bool = False, topk_idx: Sequence[Sequence[int]] = ()
) -> World:
    """The world on a virtual clock. costs: the fields of `csrc/arch/sim/costs.h`, times in integer picoseconds,
    rates in integer MB/s, 0 or missing = free. Deterministic: no seed of an interleaving, no measured time.
    trace: keep every use of every link (`World.spans`). ValueError as for `explore`."""
    known = _core.sim_cost_fields()
    for name, value in costs.items():
        if name not in known:
            raise ValueError(f"costs: no cost is called {name!r}; there are {', '.join(known)}")
        if int(value) != value or value < 0:
            raise ValueError(f"costs: {name} is {value}; give a whole number >= 0 (picoseconds or MB/s)")
    return _run(
        spec,
        costs={k: int(v) for k, v in costs.items()},
        trace=trace,
        topk_idx=[list(map(int, row)) for row in topk_idx],
    )


def random_spec(seed: int, strategy: str | None = None) -> dict[str, int]:
    """The world that a seed of the soak stands for; strategy None = chosen by the seed."""
    return _core.sim_random_world(seed, -1 if strategy is None else STRATEGIES.index(strategy))
