"""A queueing network of chunks: the SMs' roles and copy engines, the NVLink port and the NIC of one rank.

A chain is a chunk's way through servers. Ranks are taken as alike, so a chunk that this rank sends stands for the
one that arrives from its peer. A server serves one chunk at a time, the role that had least of it first. A hop that
streams lets the next one begin as soon as itself (rows follow one another), and the next cannot end before it."""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple


class Hop(NamedTuple):
    """server: its name, (kind, index). work, latency: microseconds. streams: the next hop begins with this one."""

    server: tuple[str, int]
    role: str
    work: float
    streams: bool = False
    latency: float = 0.0


@dataclass
class Chain:
    """One chunk's hops. `gate`: an event that the end of hop `gate_at` counts down. `after`: the gates that must be
    open before it begins; one that no chain counts down is open."""

    label: str
    hops: Sequence[Hop]
    gate: tuple | None = None
    after: Sequence[tuple] = ()
    gate_at: int = -1


class Span(NamedTuple):
    """Server `server` worked for `role` on chunk `label` from start, for `work` (both in microseconds)."""

    server: tuple[str, int]
    role: str
    label: str
    start: float
    work: float


@dataclass
class Timeline:
    """What happened: makespan in microseconds, every span, busy time by server."""

    end: float = 0.0
    spans: list[Span] = field(default_factory=list)
    busy: dict[tuple[str, int], float] = field(default_factory=lambda: defaultdict(float))

    def busy_of(self, kind: str) -> float:
        """Of the busiest server of that kind."""
        return max((t for (k, _), t in self.busy.items() if k == kind), default=0.0)


class _Server:
    """One at a time; of those that wait, the role served least so far, then the first come."""

    def __init__(self) -> None:
        self.free_at = 0.0
        self.scheduled = False
        self.served: dict[str, float] = defaultdict(float)
        self.queues: dict[str, list] = defaultdict(list)

    def pop(self) -> tuple[Any, ...]:
        role = min((r for r, q in self.queues.items() if q), key=lambda r: (self.served[r], self.queues[r][0][:2]))
        return heapq.heappop(self.queues[role])

    @property
    def waiting(self) -> bool:
        return any(self.queues.values())


def run(chains: Sequence[Chain]) -> Timeline:
    """Serve all chains, all ready at 0 or when their last gate opens. ValueError when a gate never opens."""
    line = Timeline()
    servers: dict[Any, _Server] = defaultdict(_Server)
    events: list[tuple[float, int, str, Any]] = []
    order = 0
    missing: dict[tuple, int] = defaultdict(int)
    opened: dict[tuple, float] = {}
    held: dict[tuple, list[int]] = defaultdict(list)  # at the gates that they wait for
    closed = [0] * len(chains)  # gates that a chain still waits for
    counts_at = [len(chain.hops) - 1 if chain.gate_at < 0 else chain.gate_at for chain in chains]
    for chain in chains:
        if chain.gate is not None:
            missing[chain.gate] += 1
    started = 0
    for index, chain in enumerate(chains):
        waits_for = [gate for gate in set(chain.after) if missing.get(gate)]
        closed[index] = len(waits_for)
        for gate in waits_for:
            held[gate].append(index)
        if not waits_for:
            heapq.heappush(events, (0.0, order, "ready", (index, 0, 0.0)))
            order += 1
    while events:
        now, _, what, item = heapq.heappop(events)
        if what == "ready":
            index, at, floor = item
            name = chains[index].hops[at].server
            server = servers[name]
            heapq.heappush(server.queues[chains[index].hops[at].role], (now, order, index, at, floor))
        else:
            name = item
            server = servers[name]
            server.scheduled = False
        order += 1
        if server.scheduled or not server.waiting:
            continue
        if server.free_at > now:
            server.scheduled = True
            heapq.heappush(events, (server.free_at, order, "free", name))
            order += 1
            continue
        _, _, index, at, floor = server.pop()
        chain, hop = chains[index], chains[index].hops[at]
        started += 1
        server.served[hop.role] += hop.work
        server.free_at = now + hop.work
        end = max(now + hop.work, floor)
        if hop.work:
            line.spans.append(Span(hop.server, hop.role, chain.label, now, hop.work))
            line.busy[hop.server] += hop.work
        if server.waiting:
            server.scheduled = True
            heapq.heappush(events, (server.free_at, order, "free", name))
            order += 1
        end += hop.latency
        if at + 1 < len(chain.hops):
            begin = now + hop.latency if hop.streams else end
            heapq.heappush(events, (begin, order, "ready", (index, at + 1, end)))
            order += 1
        else:
            line.end = max(line.end, end)
        if chain.gate is None or at != counts_at[index]:
            continue
        opened[chain.gate] = max(opened.get(chain.gate, 0.0), end)
        missing[chain.gate] -= 1
        for waiter in held.pop(chain.gate, ()) if not missing[chain.gate] else ():
            closed[waiter] -= 1
            if not closed[waiter]:
                begin = max(opened[gate] for gate in chains[waiter].after if gate in opened)
                heapq.heappush(events, (begin, order, "ready", (waiter, 0, 0.0)))
                order += 1
    if started != sum(len(c.hops) for c in chains):
        raise ValueError(f"{sum(count > 0 for count in closed)} chains wait for gates that never open")
    return line
