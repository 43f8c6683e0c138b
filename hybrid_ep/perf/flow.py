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


@dataclass(slots=True)
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

    __slots__ = "free_at", "queues", "served", "waiting"

    def __init__(self) -> None:
        self.free_at, self.waiting = 0.0, 0  # while any wait, an event says when it is free
        self.served: dict[str, float] = defaultdict(float)
        # Of each role, (number, chain, hop, floor) as they came, which is in the order of their numbers.
        self.queues: dict[str, deque[tuple[int, int, int, float]]] = {}

    def push(self, role: str, item: tuple[int, int, int, float]) -> None:
        self.waiting += 1
        if role in self.queues:
            self.queues[role].append(item)
        else:
            self.queues[role] = deque((item,))

    def pop(self) -> tuple[int, int, int, float]:
        self.waiting -= 1
        if len(self.queues) == 1:
            (queue,) = self.queues.values()
        else:
            waiting = ((self.served[role], queue[0][0], queue) for role, queue in self.queues.items() if queue)
            queue = min(waiting)[2]
        return queue.popleft()


def run(chains: Sequence[Chain]) -> Timeline:
    """Serve all chains, all ready at 0 or when their last gate opens. ValueError when a gate never opens."""
    line = Timeline()
    servers: dict[tuple[str, int], _Server] = defaultdict(_Server)
    # (time, number, server, chain that comes to it or -1 where it is free again, hop, floor)
    events: list[tuple[float, int, _Server, int, int, float]] = []
    order = 0
    missing: dict[tuple, int] = defaultdict(int)
    opened: dict[tuple, float] = {}
    held: dict[tuple, list[int]] = defaultdict(list)  # at the gates that they wait for
    closed = [0] * len(chains)  # gates that a chain still waits for
    ways = [chain.hops for chain in chains]
    last = [len(hops) - 1 for hops in ways]
    counts_at = [last[i] if chain.gate_at < 0 else chain.gate_at for i, chain in enumerate(chains)]
    spans, busy = line.spans, line.busy
    heappush, heappop, heappushpop = heapq.heappush, heapq.heappop, heapq.heappushpop
    for chain in chains:
        if chain.gate is not None:
            missing[chain.gate] += 1
    started = 0

    def begin(time: float, index: int) -> None:
        nonlocal order
        heappush(events, (time, order, servers[ways[index][0].server], index, 0, 0.0))
        order += 1

    for index, chain in enumerate(chains):
        waits_for = [gate for gate in set(chain.after) if missing.get(gate)]
        closed[index] = len(waits_for)
        for gate in waits_for:
            held[gate].append(index)
        if not waits_for:
            begin(0.0, index)
    event = heappop(events) if events else None
    while event is not None:
        now, _, server, index, at, floor = event
        if index < 0:
            _, index, at, floor = server.pop()
        elif server.waiting or server.free_at > now:
            if not server.waiting:
                heappush(events, (server.free_at, order + 1, server, -1, 0, 0.0))
            server.push(ways[index][at].role, (order, index, at, floor))
            order += 2
            event = heappop(events)
            continue
        name, role, work, streams, latency = ways[index][at]
        chain = chains[index]
        started += 1
        server.served[role] += work
        server.free_at = end = now + work
        if work:
            spans.append(Span(name, role, chain.label, now, work))
            busy[name] += work
        if server.waiting:
            heappush(events, (end, order, server, -1, 0, 0.0))
            order += 1
        end = max(end, floor) + latency
        if at < last[index]:
            following = servers[ways[index][at + 1].server]
            coming = (now + latency if streams else end, order, following, index, at + 1, end)
            order += 1
        else:
            coming = None
            line.end = max(line.end, end)
        if chain.gate is not None and at == counts_at[index]:
            opened[chain.gate] = max(opened.get(chain.gate, 0.0), end)
            missing[chain.gate] -= 1
            for waiter in held.pop(chain.gate, ()) if not missing[chain.gate] else ():
                closed[waiter] -= 1
                if not closed[waiter]:
                    begin(max(opened[gate] for gate in chains[waiter].after if gate in opened), waiter)
        if coming is not None:
            event = heappushpop(events, coming)
        else:
            event = heappop(events) if events else None
    if started != sum(map(len, ways)):
        raise ValueError(f"{sum(count > 0 for count in closed)} chains wait for gates that never open")
    return line
