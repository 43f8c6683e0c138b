"""Weights instead of tokens on a virtual clock: every rank a compute stream and a copy engine, every memory a server.

    copy engine   takes the slices of the next layer, of each owner in turn, those first whose owner's memory is free: a
                  memory serves one reader at a time, the first come first. Weights that are not sliced are pulled owner
                  by owner, in the order of the ranks. It may begin when the layer two before is through
    compute       a layer begins when its weights are there, and runs slower while the rank's own engine copies
    tokens        the other way: layers of all ranks end together, then the exchange

So contention, head-of-line blocking and bubbles are what comes out, and the trace shows them. What a layer takes by
itself is `dwdp.compute_us`'s. Ranks vary: by the tokens they are given, and by the noise of every layer."""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from hybrid_ep.hardware.clusters import Cluster
from hybrid_ep.perf import dwdp
from hybrid_ep.perf.models import MoeModel
from hybrid_ep.perf.trace import TrackSpan

# Published: what computes takes 1.18 to 1.19 times as long while copy engines move weights (power, memory).
SLOWED = 1.19
SLICES = 16  # of an owner's share of a layer, where weights are sliced; more make no difference that shows
_MOST_SPANS = 100_000


@dataclass(frozen=True)
class Job:
    """What every rank does: iterations of `layers` layers each.

    tokens: int [iterations, ranks], of a rank's micro-batch. sequence: tokens of one sequence, for attention; 0: the
    micro-batch is one. cv: of the time of a layer on a rank, drawn for each. slices: of an owner's share of a layer; 1:
    it is pulled whole. seed: of the noise. group: consecutive ranks that hold all experts among them and pull from one
    another alone, as many experts of each; by default all. Copies from other groups are there: a forward brings
    none."""

    model: MoeModel
    cluster: Cluster
    tokens: np.ndarray
    layers: int
    dtype: str = "nvfp4"
    sequence: int = 0
    cv: float = dwdp.SYNC_CV
    slices: int = SLICES
    seed: int = 1
    rates: dwdp.Rates = dwdp.PUBLISHED_RATES
    group: int | None = None

    def __post_init__(self) -> None:
        ranks = self.tokens.shape[1] if self.tokens.ndim == 2 else 0
        if ranks < 2 or self.model.experts % ranks or self.tokens.min() < 1:
            raise ValueError(
                f"tokens of shape {self.tokens.shape} must be [iterations, ranks], all at least 1, the ranks at least "
                f"2 and a divisor of the {self.model.experts} experts"
            )
        if self.group is not None and (self.group < 2 or ranks % self.group):
            raise ValueError(f"group={self.group} must be at least 2 and divide the {ranks} ranks")
        if min(self.layers, self.slices) < 1 or self.cv < 0:
            raise ValueError(
                f"layers={self.layers} and slices={self.slices} must be at least 1, cv={self.cv} at least 0"
            )

    @property
    def ranks(self) -> int:
        return int(self.tokens.shape[1])

    def compute_us(self, experts: int) -> np.ndarray:
        """float [iterations, layers, ranks]: each layer on each rank, with its noise."""
        alone = np.vectorize(lambda tokens: self._layer_us(int(tokens), experts))(self.tokens)
        noise = np.random.default_rng(self.seed).normal(1.0, self.cv, (len(self.tokens), self.layers, self.ranks))
        return alone[:, None, :] * np.maximum(noise, 0.1)

    def _layer_us(self, tokens: int, experts: int) -> float:
        whole = dwdp.compute_us(self.model, self.cluster, tokens, experts, self.dtype, self.rates)
        if not self.sequence or self.sequence >= tokens:
            return sum(whole)
        of_one = self.model.attention_flops / 2 / (self.rates.attention_tflops * 1e6)
        return sum(whole) - tokens * (tokens - self.sequence) * of_one

    def others(self, rank: int) -> list[int]:
        """Whom a rank pulls from: the members of its group, from the next one on."""
        size = self.group or self.ranks
        begin = rank - rank % size
        return [begin + (rank - begin + step) % size for step in range(1, size)]

    @property
    def prefetch_us(self) -> float:
        """Of a layer, with nobody in the way."""
        size = self.group or self.ranks
        return dwdp.weight_bytes(self.model, size, self.dtype) / (self.rates.copy_gb_per_s * 1e3)


@dataclass(frozen=True)
class Found:
    """Microseconds of an iteration, mean over ranks and iterations: iteration_us = compute_us + exchange_us (tokens) +
    waited_us (for the slowest, or for weights: the bubbles). blocked_us: engines that stood before a memory in use."""

    iteration_us: float
    compute_us: float
    exchange_us: float
    waited_us: float
    blocked_us: float = 0.0
    spans: tuple[TrackSpan, ...] = field(default=(), repr=False)


def tokens_move(job: Job) -> Found:
    """Layers of all ranks end together: each waits for the slowest, then for the exchange of the fullest rank."""
    compute = job.compute_us(job.model.experts // job.ranks)
    a_token = dwdp.token_bytes(job.model, job.ranks, job.dtype) / (job.cluster.gpu.nvlink_rate * 1e3)
    exchange = job.tokens.max(axis=1)[:, None] * a_token
    spans, now = [], 0.0
    for iteration, layer in itertools.product(range(len(compute)), range(job.layers)):
        slowest = float(compute[iteration, layer].max())
        moved = float(exchange[iteration, 0])
        for rank, time in enumerate(compute[iteration, layer]):
            what = {"layer": layer, "iteration": iteration}
            spans.append(TrackSpan(f"rank {rank}", "compute", f"layer {layer}", now, float(time), what))
            if slowest > time:
                wait = slowest - float(time)
                spans.append(
                    TrackSpan(f"rank {rank}", "compute", "waits for the slowest", now + float(time), wait, what)
                )
            spans.append(TrackSpan(f"rank {rank}", "compute", "exchange", now + slowest, moved, what))
        now += slowest + moved
    count, mean = len(compute), float(compute.mean()) * job.layers
    moved = float(exchange.mean()) * job.layers
    return Found(now / count, mean, moved, now / count - mean - moved, 0.0, tuple(spans[:_MOST_SPANS]))


def weights_move(job: Job) -> Found:
    """Ranks run on their own; only memories that several engines read bind them."""
    world = _World(job)
    while world.events:
        now, _, what, rank, token = heapq.heappop(world.events)
        if what == "copied":
            world.copied(now, rank)
        elif world.ranks[rank].token == token:  # else its end has moved
            world.computed(now, rank)
    stuck = [rank for rank, state in enumerate(world.ranks) if state.layer < world.total]
    assert not stuck, f"ranks {stuck} never ended"
    ends = [state.ended for state in world.ranks]
    mean, count = sum(ends) / len(ends), len(job.tokens)
    waited = sum(state.waited for state in world.ranks) / len(ends)
    blocked = sum(state.blocked for state in world.ranks) / len(ends)
    return Found(mean / count, (mean - waited) / count, 0.0, waited / count, blocked / count, tuple(world.spans))


class _Rank:
    """layer: the one that computes or waits, of all iterations. left: its work in microseconds of a free machine, as of
    `since`; token: of its latest end. ready: layers whose weights are there. slices: to be asked for, of `pulled`."""

    def __init__(self) -> None:
        self.layer = self.ready = self.pulled = self.token = 0
        self.left = self.since = self.started = self.waited = self.blocked = self.ended = 0.0
        self.idle_since: float | None = 0.0  # of compute, which waits for weights
        self.slices: deque[tuple[int, float]] = deque()  # owner, microseconds
        self.copying: tuple[int, float] | None = None  # owner, since
        self.asked = 0.0


class _World:
    def __init__(self, job: Job) -> None:
        self.job, self.total = job, len(job.tokens) * job.layers
        self.compute = job.compute_us(job.model.experts).reshape(self.total, job.ranks)
        self.ranks = [_Rank() for _ in range(job.ranks)]
        self.readers: list[deque[int]] = [deque() for _ in range(job.ranks)]  # of a rank's memory; the first reads
        self.events: list[tuple[float, int, str, int, int]] = []
        self.spans: list[TrackSpan] = []
        self.order = itertools.count()
        for rank in range(job.ranks):
            self._pull(0.0, rank)

    def _push(self, at: float, what: str, rank: int, token: int = 0) -> None:
        heapq.heappush(self.events, (at, next(self.order), what, rank, token))

    def _span(self, rank: int, track: str, name: str, start: float, end: float) -> None:
        if len(self.spans) < _MOST_SPANS and end > start:
            self.spans.append(TrackSpan(f"rank {rank}", track, name, start, end - start, {}))

    # ---- the copy engine

    def _pull(self, now: float, rank: int) -> None:
        """The next slice, of the next layer where this one is through and a buffer is free."""
        state = self.ranks[rank]
        if state.copying is not None:
            return
        if not state.slices:
            if state.pulled >= self.total or state.pulled >= state.layer + 2:
                return
            state.pulled += 1
            state.slices.extend(self._slices(rank))
        if self.job.slices > 1:
            self._turn_to_a_free_owner(state)
        owner, _ = state.slices[0]
        state.copying, state.asked = (owner, -1.0), now
        self.readers[owner].append(rank)
        if len(self.readers[owner]) == 1:
            self._read(now, owner)

    def _turn_to_a_free_owner(self, state: _Rank) -> None:
        """Copies of a batch may pass one another: the next slice comes from the next owner whose memory is free."""
        for at, (owner, _) in enumerate(itertools.islice(state.slices, len(self.job.others(0)))):
            if not self.readers[owner]:
                state.slices.insert(0, state.slices[at])
                del state.slices[at + 1]
                return

    def _slices(self, rank: int) -> Iterator[tuple[int, float]]:
        """One of each owner in turn, from the next rank on."""
        job = self.job
        owners = job.others(rank)
        each = job.prefetch_us / len(owners) / job.slices
        for _ in range(job.slices):
            yield from ((owner, each) for owner in (owners if job.slices > 1 else sorted(owners)))

    def _read(self, now: float, owner: int) -> None:
        """The first of those who wait for a memory reads."""
        rank = self.readers[owner][0]
        state = self.ranks[rank]
        state.copying = owner, now
        state.blocked += now - state.asked
        self._span(rank, "copy engine", f"waits for rank {owner}'s memory", state.asked, now)
        self._speed(now, rank)
        self._push(now + state.slices[0][1], "copied", rank)

    def copied(self, now: float, rank: int) -> None:
        """A slice is here: its owner's memory is the next reader's."""
        state = self.ranks[rank]
        assert state.copying is not None
        owner, since = state.copying
        self._span(rank, "copy engine", f"layer {(state.pulled - 1) % self.job.layers} of rank {owner}", since, now)
        state.slices.popleft()
        self._settle(now, rank)
        state.copying = None
        self.readers[owner].popleft()
        if self.readers[owner]:
            self._read(now, owner)
        if not state.slices:
            state.ready += 1
            if state.idle_since is not None and state.ready > state.layer:
                self._begin(now, rank)
        self._pull(now, rank)
        self._speed(now, rank)

    # ---- compute

    def _begin(self, now: float, rank: int) -> None:
        state = self.ranks[rank]
        assert state.idle_since is not None
        state.waited += now - state.idle_since
        self._span(rank, "compute", "waits for weights", state.idle_since, now)
        state.idle_since = None
        state.left, state.since, state.started = float(self.compute[state.layer, rank]), now, now
        self._speed(now, rank)

    def _slowed(self, rank: int) -> float:
        copying = self.ranks[rank].copying
        return SLOWED if copying is not None and copying[1] >= 0 else 1.0

    def _settle(self, now: float, rank: int) -> None:
        """Count what was computed since the speed last changed."""
        state = self.ranks[rank]
        if state.idle_since is None:
            state.left -= (now - state.since) / self._slowed(rank)
            state.since = now

    def _speed(self, now: float, rank: int) -> None:
        """The end of the layer that computes, at the speed of now."""
        state = self.ranks[rank]
        if state.idle_since is None:
            if state.since < now:  # the engine stood still until now
                state.left -= now - state.since
                state.since = now
            state.token += 1
            self._push(now + max(0.0, state.left) * self._slowed(rank), "computed", rank, state.token)

    def computed(self, now: float, rank: int) -> None:
        """A layer is through: its buffer may be filled, and the next begins where its weights are."""
        state = self.ranks[rank]
        self._span(rank, "compute", f"layer {state.layer % self.job.layers}", state.started, now)
        state.layer += 1
        state.ended, state.idle_since = now, now
        state.token += 1
        if state.layer < self.total and state.ready > state.layer:
            self._begin(now, rank)
        self._pull(now, rank)


def lengths(
    mean: int, ranks: int, iterations: int, *, cv: float = 0.0, shortest: float = 1.0, seed: int = 1
) -> np.ndarray:
    """int [iterations, ranks] tokens. cv: normal around `mean`; shortest: uniform from that share of `mean` to it."""
    if cv and shortest != 1.0:
        raise ValueError(f"cv={cv} and shortest={shortest}: give one of them")
    if not 0 < shortest <= 1:
        raise ValueError(f"shortest={shortest} must be above 0 and at most 1")
    if not 0 <= cv < 1:
        raise ValueError(f"cv={cv} must be at least 0 and below 1")
    random = np.random.default_rng(seed)
    drawn: Sequence[float] | np.ndarray = random.uniform(shortest, 1.0, (iterations, ranks)) * mean
    if cv:
        drawn = random.normal(mean, cv * mean, (iterations, ranks))
    return np.maximum(np.asarray(drawn).round().astype(np.int64), 1)
