"""Exact balancing of one micro-batch of one layer: counts after the router -> clones in spare slots.

    plan = plan_microbatch(counts, spare_slots=1)      # the same on every rank, bit for bit
    take = plan.share_of_source(rank)                  # how many of my tokens go to which clone

The arithmetic is the role `csrc/roles/plan_clones.h`; `twin_microbatch.py` is the same algorithm to read, and
tests hold the two together.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from hybrid_ep import _core
from hybrid_ep.balance import bounds, inputs
from hybrid_ep.balance.one_clone import OneCloneSearch

PPM = 1_000_000
STRATEGIES = ("best", "alias", "best_fit")
MAX_TOKENS = 2**40  # of a micro-batch, and so of all that is reckoned in them (csrc/balance/microbatch.cpp)
MAX_SPARE_SLOTS = 4096
# MicrobatchOptions that are integers: from, to.
_INTEGERS = {
    "spare_slots": (0, MAX_SPARE_SLOTS),
    "num_nodes": (1, inputs.INT32_MAX),
    "min_chunk": (1, MAX_TOKENS),
    "instance_cost": (0, MAX_TOKENS),
    "tile": (1, MAX_TOKENS),
}
_SAFE_LOADS = 1e-290, 1e300  # largest loads, times their number, whose mean is neither cut nor infinite
_SEARCHED = 65_536  # experts that a search looks at where nobody says how many nodes: some 0.3 ms of a host's core


def default_owner(num_experts: int, num_ranks: int) -> np.ndarray:
    """int32 [num_experts]: contiguous owners, num_experts / num_ranks experts a rank."""
    num_experts, num_ranks = inputs.integer("num_experts", num_experts, 1), inputs.integer("num_ranks", num_ranks, 1)
    if num_experts % num_ranks:
        raise ValueError(f"owner: {num_experts} experts do not divide among {num_ranks} ranks: give owner=")
    return np.repeat(np.arange(num_ranks, dtype=np.int32), num_experts // num_ranks)


@dataclass(frozen=True)
class MicrobatchOptions:
    """What a planner may spend and must keep; see `plan_microbatch` for the meaning of each."""

    spare_slots: int = 1
    num_nodes: int = 1
    within_node: bool = False
    epsilon: float = 0.01
    min_chunk: int = 1
    skip_below: float = 0.03
    instance_cost: int = 0
    tile: int = 1
    fan_out: int | None = None
    search_nodes: int | None = None
    strategy: str = "best"
    near: bool = False

    def __post_init__(self) -> None:
        known: dict[str, Any] = {name: inputs.integer(name, getattr(self, name), *r) for name, r in _INTEGERS.items()}
        for name, high in (("epsilon", 1), ("skip_below", 1e6)):
            known[name] = inputs.number(name, getattr(self, name), 0, high, f"a fraction from 0 to {high:g}")
        if self.fan_out is not None:
            remedy = "the most clones a rank pushes, or None for no limit"
            known["fan_out"] = inputs.integer("fan_out", self.fan_out, 1, remedy=remedy)
        if self.search_nodes is not None:
            remedy = "nodes of the search, or None for as many as its time allows"
            known["search_nodes"] = inputs.integer("search_nodes", self.search_nodes, 0, remedy=remedy)
        for name in ("within_node", "near"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} is {getattr(self, name)!r}: give True or False")
        for name, value in known.items():
            object.__setattr__(self, name, value)
        if self.strategy not in STRATEGIES:
            raise ValueError(f"strategy is {self.strategy!r}: choose one of {', '.join(STRATEGIES)}")

    @property
    def epsilon_ppm(self) -> int:
        return round(self.epsilon * PPM)

    @property
    def skip_below_ppm(self) -> int:
        return round(self.skip_below * PPM)

    def nodes(self, num_experts: int) -> int:
        """Most nodes of a search among so many experts."""
        return _SEARCHED // num_experts if self.search_nodes is None else self.search_nodes

    def on_nodes(self, num_nodes: int) -> MicrobatchOptions:
        """The same for so many NVLink domains."""
        return replace(self, num_nodes=num_nodes)

    def shape(self, num_ranks: int, num_experts: int) -> Any:
        """The core's view, which checks the rest. ValueError names what is wrong."""
        num_ranks = inputs.integer("num_ranks", num_ranks, 1)
        num_experts = inputs.integer("num_experts", num_experts, 1)
        return _core.MicrobatchShape(
            num_ranks=num_ranks,
            num_experts=num_experts,
            spare_slots=self.spare_slots,
            num_nodes=self.num_nodes,
            within_node=self.within_node,
            near=self.near,
            epsilon_ppm=self.epsilon_ppm,
            # No rank has more than all tokens, ranks times the mean: more than that is said by that.
            skip_below_ppm=min(self.skip_below_ppm, num_ranks * PPM),
            min_chunk=self.min_chunk,
            instance_cost=self.instance_cost,
            tile=self.tile,
            fan_out=self.fan_out or 0,
            search_nodes=self.nodes(num_experts),
            strategy=self.strategy,
        )


@dataclass(frozen=True)
class RankPart:
    """What one rank has to do of a plan. Columns are those of a map over physical slots: each rank's owner slots, E / R
    of them, then its spare slots.

    * `redirects` int64 [n, 3], (expert, first, step): of the rank's tokens for the expert, in order, those from number
      `first` on go to a column that is `step` further than that of the tokens before. By expert, then by first.
    * `pushes` int64 [m, 5], (expert, owner, rank, slot, nth): clones of experts of this rank and those that lie on it,
      in the order that all ranks use; `nth`: how many clones of its owner's experts come before it.
    """

    rank: int
    redirects: np.ndarray
    pushes: np.ndarray


@dataclass(frozen=True)
class MicrobatchPlan:
    """Where clones go and what each takes.

    * `slot_expert` int32 [R, S]: logical expert cloned to spare slot S of rank R, -1 for an empty slot.
    * `slot_tokens` int64 [R, S]: tokens of the group that this clone computes; its owner computes the rest.
    * `counts` int64 [R, E], `owner` int32 [E]: what was planned for.
    * `target`: cost in tokens that the planner aimed at, per rank.
    * `part`: what the rank that planned has to do, where it said who it is (`plan_of_rank`).
    """

    slot_expert: np.ndarray
    slot_tokens: np.ndarray
    counts: np.ndarray
    owner: np.ndarray
    options: MicrobatchOptions
    target: int = 0
    part: RankPart | None = field(default=None, repr=False, compare=False)
    _shape: Any = field(default=None, repr=False, compare=False)

    @property
    def num_copies(self) -> int:
        """Clones in the plan: weights that have to be pushed."""
        return int((self.slot_expert >= 0).sum())

    @property
    def num_crossings(self) -> int:
        """Weights that have to cross from node to node: of each expert one for every other node that holds a clone."""
        per_node = len(self.counts) // self.options.num_nodes
        ranks, slots = np.nonzero(self.slot_expert >= 0)
        experts, nodes = self.slot_expert[ranks, slots], ranks // per_node
        away = self.owner[experts] // per_node != nodes
        return len(set(zip(experts[away].tolist(), nodes[away].tolist(), strict=True)))

    @property
    def is_empty(self) -> bool:
        return self.num_copies == 0

    def tokens_of_ranks(self, balanced: bool = True) -> np.ndarray:
        """int64 [R]: tokens each rank computes, with the plan or (balanced=False) without."""
        total = self.counts.sum(axis=0)
        load = np.bincount(self.owner, weights=total, minlength=len(self.counts)).astype(np.int64)
        if balanced:
            used = self.slot_expert >= 0
            load += np.where(used, self.slot_tokens, 0).sum(axis=1)
            np.subtract.at(load, self.owner[self.slot_expert[used]], self.slot_tokens[used])
        return load

    def imbalance(self, balanced: bool = True) -> float:
        """(max - mean) / mean of tokens over ranks; 0 when there are none."""
        return ratio(self.tokens_of_ranks(balanced))

    def bound(self, search: bool = False) -> float:
        """Imbalance no plan under these options can beat: whole tokens, the tokens that spare slots can hold, and
        domains when confined to nodes; below 5 ms up to EP256 with 1,024 experts, 8 ms at EP512 with 512. search: where
        a plan with one spare slot misses its target, a search of all choices of clones proves what it can of the rest,
        in some seconds."""
        num_nodes = self.options.num_nodes if self.options.within_node else 1
        total, ranks = self.counts.sum(axis=0), len(self.counts) // num_nodes
        reached, mean, most = self.tokens_of_ranks(), total.sum() / len(self.counts), 0
        for node in range(num_nodes):
            mine = self.owner // ranks == node
            load, owner = total[mine], self.owner[mine] - node * ranks
            best = _core.clones_fit(load, owner, ranks, self.options.spare_slots)
            if search and self.options.spare_slots == 1 and not self.is_empty:
                allowed = bounds.mean(load, ranks)
                allowed += allowed * self.options.epsilon_ppm // PPM
                here = int(reached[node * ranks : (node + 1) * ranks].max())
                if here > max(best, allowed):
                    best = OneCloneSearch(load, owner, ranks).least(max(best, allowed), here)
            most = max(most, best)
        return float(most / mean) - 1 if mean else 0.0

    def share_of_source(self, source: int) -> np.ndarray:
        """int64 [R, S]: how many of `source`'s tokens go to the clone in each slot; the rest go to the owner.

        Local clones first, then clones and sources of one node, then the rest in rank order. Summed over
        sources this is `slot_tokens`.
        """
        source = inputs.integer("source", source, 0, len(self.counts) - 1, "a rank")
        return _core.share_of_source(
            self._core_shape(), self.counts, self.owner, self.slot_expert, self.slot_tokens, source
        )

    def part_of_rank(self, rank: int, columns: Any) -> RankPart:
        """What `rank` has to do. columns: integers [E], of each expert's owner in a map over physical slots; numpy, CPU
        tensor or list. ValueError for a rank that does not exist, for columns that are not those of owner slots of
        their expert's rank, and where experts do not divide among the ranks."""
        rank = inputs.integer("rank", rank, 0, len(self.counts) - 1)
        given = (self.counts, self.owner, _columns(columns, len(self.owner)), self.slot_expert, self.slot_tokens)
        return RankPart(rank, *_core.part_of_rank(self._core_shape(), *given, rank))

    def _core_shape(self) -> Any:
        return self._shape or self.options.shape(*self.counts.shape)


def _columns(given: Any, num_experts: int) -> np.ndarray:
    """int64 [E]; an array of that type as it is, for a layer waits for its plan."""
    if type(given) is np.ndarray and given.dtype == np.int64 and given.flags.c_contiguous:
        columns = given
    else:
        columns = inputs.array("columns", given, "give integers, the column of each expert's owner")
        if columns.dtype.kind not in "iu":
            raise ValueError(f"columns is of type {columns.dtype}: give integers, the column of each expert's owner")
        if columns.dtype.kind == "u":
            columns = np.minimum(columns, np.uint64(2**63 - 1))  # no column is that large; none becomes negative
        columns = np.ascontiguousarray(columns, dtype=np.int64)
    if columns.shape != (num_experts,):
        raise ValueError(f"columns has shape {columns.shape}: give the column of each of the {num_experts} experts")
    return columns


def imbalance_ratio(load: Any) -> float:
    """(max - mean) / mean of a vector of loads; 0 for none at all. ValueError: a negative load, or one not finite."""
    array = inputs.array("load", load, "give a vector of numbers >= 0")
    if array.ndim != 1 or array.dtype.kind not in "iuf":
        raise ValueError(f"load is {array.dtype} {array.shape}: give a vector of numbers >= 0")
    if array.dtype.kind == "f":  # whose own type may hold neither their sum nor their mean
        array = array.astype(np.float64)
    bad = ~(np.isfinite(array) & (array >= 0))
    if bad.any():
        raise ValueError(f"{inputs.entry('load', bad, array)}: give finite numbers >= 0")
    return ratio(array)


def ratio(load: np.ndarray) -> float:
    """`imbalance_ratio` of loads that are known to be good."""
    most = float(np.max(load)) if len(load) else 0.0
    if not most:
        return 0.0
    if not _SAFE_LOADS[0] <= most * len(load) <= _SAFE_LOADS[1]:  # else the sum overflows, or the mean underflows
        return 1 / float(np.mean(load / most)) - 1
    return most / float(np.mean(load)) - 1


class MicrobatchPlanner:
    """A planner for micro-batches of one shape; keeps its scratch memory. Not for two threads at once.

    owner int32 [num_experts]: the rank of each expert; may be replaced between two plans.
    """

    def __init__(self, num_ranks: int, num_experts: int, owner: Any = None, **options: Any) -> None:
        self.options = MicrobatchOptions(**options)
        self._shape = self.options.shape(num_ranks, num_experts)
        self._core = _core.MicrobatchPlanner(self._shape)
        self._dims = (num_ranks, num_experts)
        self.owner = default_owner(num_experts, num_ranks) if owner is None else owner

    @property
    def owner(self) -> np.ndarray:
        return self._owner

    @owner.setter
    def owner(self, given: Any) -> None:
        ranks, experts = self._dims
        if not (type(given) is np.ndarray and given.dtype == np.int32 and given.flags.c_contiguous):
            remedy = f"the rank of each of the {experts} experts"
            given = inputs.integers("owner", given, (experts,), 0, ranks - 1, remedy, np.int32)
        if given.shape != (experts,):
            raise ValueError(f"owner has shape {given.shape}: give the rank of each of the {experts} experts")
        self._owner = given.copy()

    def plan(self, counts: Any) -> MicrobatchPlan:
        """counts: integers [R, E], numpy or CPU tensor. Returns the plan; raises ValueError for a bad count."""
        counts = self._checked(counts, self._dims)
        expert, tokens, target = self._core.plan(counts, self._owner)
        return self._made(expert, tokens, target, counts)

    def plan_of_rank(self, counts: Any, rank: int, columns: Any) -> MicrobatchPlan:
        """The plan with its `part` for one rank, in one call of the core: below 50 us up to EP64 with 256 experts.

        counts: as for `plan`. columns: integers [E], of each expert's owner in a map over physical slots, as for
        `MicrobatchPlan.part_of_rank`, which also says what is a ValueError."""
        counts, rank = self._checked(counts, self._dims), inputs.integer("rank", rank, 0, self._dims[0] - 1)
        columns = _columns(columns, self._dims[1])
        expert, tokens, target, redirects, pushes = self._core.plan_of_rank(counts, self._owner, columns, rank)
        return self._made(expert, tokens, target, counts, RankPart(rank, redirects, pushes))

    def plan_layers(self, counts: Any) -> list[MicrobatchPlan]:
        """A plan for each of counts' layers, integers [L, R, E], in one call. ValueError for a bad count."""
        counts = inputs.array("counts", counts, "give integers [layers, ranks, experts]")
        counts = self._checked(counts, (*counts.shape[:1], *self._dims))
        plans = zip(*self._core.plan(counts, self._owner), counts, strict=True)
        return [self._made(*plan) for plan in plans]

    def _checked(self, counts: Any, shape: tuple[int, ...]) -> np.ndarray:
        if (
            type(counts) is np.ndarray
            and counts.dtype == np.int64
            and counts.shape == shape
            and counts.flags.c_contiguous
        ):
            return counts.copy()  # a plan keeps them, and callers count the next micro-batch into the same memory
        names = "[layers, ranks, experts]" if len(shape) == 3 else "[ranks, experts]"
        return inputs.integers("counts", counts, shape, 0, MAX_TOKENS - 1, f"tokens {names}").copy()

    def _made(
        self, expert: np.ndarray, tokens: np.ndarray, target: int, counts: np.ndarray, part: RankPart | None = None
    ) -> MicrobatchPlan:
        # What MicrobatchPlan(...) does, without the 2 us that a frozen dataclass takes to set its fields.
        plan = object.__new__(MicrobatchPlan)
        plan.__dict__.update(
            slot_expert=expert,
            slot_tokens=tokens,
            counts=counts,
            owner=self._owner,
            options=self.options,
            target=target,
            part=part,
            _shape=self._shape,
        )
        return plan


def plan_microbatch(
    counts: Any, owner: Any = None, spare_slots: int = 1, num_nodes: int = 1, **options: Any
) -> MicrobatchPlan:
    """Clones and quotas that level one micro-batch of one layer. Pure: equal input, equal plan, on any rank.

    * `counts`: integers [R, E], tokens of source rank r routed to logical expert e (known to all ranks).
    * `owner`: rank of each expert [E]; default contiguous. `spare_slots`: slots for clones on every rank.
    * `num_nodes`: NVLink domains, ranks in consecutive blocks; sources prefer clones of their own.
      `within_node`: clones only on ranks of the owner's domain. `near`: with strategy "best", on ranks of other domains
      only where those do not level the ranks, and then of few (`num_crossings`), unless only clones on any rank reach
      the target. For micro-batches of few tokens: those of a hot expert cross in place of its weights.
    * `epsilon`: how far above the mean a rank may end, as a fraction. 0 levels to the token, with at most R - 1 clones.
    * `min_chunk`: tokens, the least worth a clone. `skip_below`: imbalance under which the plan is empty.
    * `instance_cost`, `tile`: an expert with n > 0 tokens costs instance_cost + n rounded up to tiles, in tokens; costs
      are levelled, and clones take whole tiles where they do not take a whole expert.
    * `fan_out`: most clones that one rank pushes.
    * `search_nodes`: most work of the search that follows where constructions nearly level with one spare slot; 0 for
      none. None: 65,536 divided by the experts, some 0.3 ms of a host's core. Not with `within_node`, `fan_out`,
      `min_chunk`, `instance_cost` and `tile`.
    * `strategy`: "best" of the two constructions, or one: "alias", "best_fit".
    """
    counts = inputs.array("counts", counts, "give integers [ranks, experts]")
    if counts.ndim != 2:
        raise ValueError(f"counts has shape {counts.shape}: give [ranks, experts]")
    num_ranks, num_experts = counts.shape
    planner = MicrobatchPlanner(num_ranks, num_experts, owner, spare_slots=spare_slots, num_nodes=num_nodes, **options)
    return planner.plan(counts)
