"""A queueing network of chunks: the SMs' roles and copy engines, the NVLink port and the NIC of one rank.

A chain is a chunk's way through servers. Ranks are taken as alike, so a chunk that this rank sends stands for the
one that arrives from its peer. A server serves one chunk at a time, the role that had least of it first. A hop that
streams lets the next one begin as soon as itself (rows follow one another), and the next cannot end before it."""

from __future__ import annotations

import heapq
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple


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

    __slots__ = "free_at", "name", "queues", "scheduled", "served"

    def __init__(self, name: tuple[str, int]) -> None:
        self.name, self.free_at, self.scheduled = name, 0.0, False
        self.served: dict[str, float] = defaultdict(float)
        # Of roles that wait, (time, number, chain, hop, floor) as they came, which is in the order of their numbers.
        self.queues: dict[str, deque[tuple[float, int, int, int, float]]] = {}

    def push(self, role: str, item: tuple[float, int, int, int, float]) -> None:
        if role in self.queues:
            self.queues[role].append(item)
        else:
            self.queues[role] = deque((item,))

    def pop(self) -> tuple[float, int, int, int, float]:
        if len(self.queues) == 1:
            (role,) = self.queues
        else:
            role = min(self.queues, key=lambda r: (self.served[r], self.queues[r][0][1]))
        queue = self.queues[role]
        item = queue.popleft()
        if not queue:
            del self.queues[role]
        return item


def run(chains: Sequence[Chain]) -> Timeline:
    """Serve all chains, all ready at 0 or when their last gate opens. ValueError when a gate never opens."""
    line = Timeline()
    servers: dict[tuple[str, int], _Server] = {}
    # (time, number, server, chain that comes to it or -1 where it is free again, hop, floor)
    events: list[tuple[float, int, _Server, int, int, float]] = []
    order = 0
    missing: dict[tuple, int] = defaultdict(int)
    opened: dict[tuple, float] = {}
    held: dict[tuple, list[int]] = defaultdict(list)  # at the gates that they wait for
    closed = [0] * len(chains)  # gates that a chain still waits for
    counts_at = [len(chain.hops) - 1 if chain.gate_at < 0 else chain.gate_at for chain in chains]
    spans, busy = line.spans, line.busy
    for chain in chains:
        if chain.gate is not None:
            missing[chain.gate] += 1
    started = 0

    def arrive(time: float, index: int, at: int, floor: float) -> None:
        nonlocal order
        name = chains[index].hops[at].server
        server = servers.get(name)
        if server is None:
            server = servers[name] = _Server(name)
        heapq.heappush(events, (time, order, server, index, at, floor))
        order += 1

    for index, chain in enumerate(chains):
        waits_for = [gate for gate in set(chain.after) if missing.get(gate)]
        closed[index] = len(waits_for)
        for gate in waits_for:
            held[gate].append(index)
        if not waits_for:
            arrive(0.0, index, 0, 0.0)
    while events:
        now, _, server, index, at, floor = heapq.heappop(events)
        if index >= 0:
            server.push(chains[index].hops[at].role, (now, order, index, at, floor))
        else:
            server.scheduled = False
        order += 1
        if server.scheduled or not server.queues:
            continue
        if server.free_at > now:
            server.scheduled = True
            heapq.heappush(events, (server.free_at, order, server, -1, 0, 0.0))
            order += 1
            continue
        _, _, index, at, floor = server.pop()
        chain = chains[index]
        hop = chain.hops[at]
        started += 1
        server.served[hop.role] += hop.work
        server.free_at = now + hop.work
        end = max(now + hop.work, floor)
        if hop.work:
            spans.append(Span(hop.server, hop.role, chain.label, now, hop.work))
            busy[hop.server] += hop.work
        if server.queues:
            server.scheduled = True
            heapq.heappush(events, (server.free_at, order, server, -1, 0, 0.0))
            order += 1
        end += hop.latency
        if at + 1 < len(chain.hops):
            arrive(now + hop.latency if hop.streams else end, index, at + 1, end)
        else:
            line.end = max(line.end, end)
        if chain.gate is None or at != counts_at[index]:
            continue
        opened[chain.gate] = max(opened.get(chain.gate, 0.0), end)
        missing[chain.gate] -= 1
        for waiter in held.pop(chain.gate, ()) if not missing[chain.gate] else ():
            closed[waiter] -= 1
            if not closed[waiter]:
                arrive(max(opened[gate] for gate in chains[waiter].after if gate in opened), waiter, 0, 0.0)
    if started != sum(len(c.hops) for c in chains):
        raise ValueError(f"{sum(count > 0 for count in closed)} chains wait for gates that never open")
    return line
