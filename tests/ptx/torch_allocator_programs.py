"""What the arena of a GPU does with torch's own allocator. Run by torch_allocator.run; the engine whose arena is
lent is a host's, which is memory like another here."""

from __future__ import annotations

import contextlib
import ctypes
import json
import sys
import threading
import warnings

import torch

from hybrid_ep import _core
from hybrid_ep.runtime.device_arena import DeviceArena
from hybrid_ep.testing import VirtualWorld

MIB, ROOM = 1 << 20, 16
SHIM = ctypes.CDLL(None)
SHIM.hep_shim_bytes.restype = ctypes.c_ulonglong


class Arena:
    """Of an engine, and 4 MiB of another's in the place of small memory of this process."""

    def __init__(self, room: int = ROOM, streams: int = 1):
        world = VirtualWorld(1, 1)
        buffers = [world.buffers(16, 1, 2, executor="host", arena_mib=mib)[0] for mib in (room, 4)]
        self.buffers, (self.engine, self.beside) = buffers, (buffer._session.engine for buffer in buffers)
        _core.cuda.offer_small_memory = self.beside.offer_arena
        self.arena = DeviceArena(self.engine, room * MIB, torch.device("cuda", 0), streams)

    def at(self, x: torch.Tensor | None) -> int | None:
        """Its offset in KiB, or None for what lies elsewhere, -1 for nothing."""
        if x is None:
            return -1
        begin = min((span.start for span in self.arena._spans.values()), default=0)
        inside = any(x.data_ptr() in span for span in self.arena._spans.values())
        return (x.data_ptr() - begin) // 1024 if inside else None

    def take(self, mib: int) -> torch.Tensor | None:
        return self.arena.empty(mib, MIB)


def made(mib: int) -> torch.Tensor:
    """By torch, with nobody's help."""
    return torch.empty(mib * MIB, dtype=torch.uint8, device="cuda")


@contextlib.contextmanager
def captured():
    """The graph that the block is captured into."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.Stream(), capture_error_mode="thread_local"):
        yield graph


def blocks():
    """(offsets of nine blocks of 2 MiB, of one more when the fourth has gone, whether the arena is lent to torch)."""
    a = Arena()
    held = [a.take(2) for _ in range(9)]
    offsets = [a.at(x) for x in held]
    held[3] = None
    again = a.at(a.take(2))
    return offsets, again, a.engine.arena_bytes_lent == ROOM * MIB


def other_streams():
    """(that another stream finds no room; the offset of a block, and of the next while a stream that it was recorded on
    is still at work, and when it is not)."""
    a = Arena()
    first, other = a.take(2), torch.cuda.Stream()
    with torch.cuda.stream(other):
        elsewhere = a.at(a.take(2))
    offset = a.at(first)
    first.record_stream(other)
    SHIM.hep_shim_late(1)
    del first
    second = a.take(2)
    beside = a.at(second)
    SHIM.hep_shim_late(0)
    torch.empty(1, dtype=torch.uint8, device="cuda")  # torch looks at its events
    return elsewhere, offset, beside, a.at(a.take(2))


def two_streams():
    """What three streams find in an arena for two, offsets in MiB from the first's on; whose block comes back."""
    a, found = Arena(64, streams=2), {}
    streams = [torch.cuda.current_stream(), torch.cuda.Stream(), torch.cuda.Stream()]
    held = [[], [], []]
    for which, stream in enumerate(streams):
        with torch.cuda.stream(stream):
            held[which] = [a.take(mib) for mib in (28, 1, 2, 40)]
    first = held[0][0].data_ptr()

    def offset(x):
        return None if x is None else (x.data_ptr() - first) // MIB

    found["each"] = [[offset(x) for x in of_stream] for of_stream in held]
    held[0][0].record_stream(streams[1])
    SHIM.hep_shim_late(1)
    held[0][0] = held[1][0] = None
    found["while the other is at work"] = offset(a.take(28))
    with torch.cuda.stream(streams[1]):
        back = a.take(28)
        found["the other's own"] = offset(back)
        held[1] = back = None
        placed = a.arena.placing(lambda: made(20), 20 * MIB)
        found["by an operation"] = offset(placed)
    SHIM.hep_shim_late(0)
    torch.empty(1, dtype=torch.uint8, device="cuda")
    found["later"] = offset(a.take(28))
    found["lent"] = a.engine.arena_bytes_lent // MIB
    held = placed = None
    with captured() as graph:
        x = a.take(40)
        found["a graph, larger than a part"] = x is not None
    found["to it alone"] = a.engine.arena_bytes_lent // MIB
    del x
    graph.reset()
    return found


def two_streams_behind_a_graph():
    """(MiB of the parts, [whether the graph has its block, (which stream waits, for which)]) where a graph has taken 24
    of 64 MiB and the second stream comes first."""
    a = Arena(64, streams=2)
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    waits, wait = [], torch.cuda.Stream.wait_stream
    for stream in streams:
        with torch.cuda.stream(stream):
            a.take(2)

    def waiting(self, other):
        waits.append((streams.index(self), streams.index(other)))
        wait(self, other)

    with captured() as graph:
        x = a.take(24)
    torch.cuda.Stream.wait_stream = waiting
    try:
        for stream in reversed(streams):
            with torch.cuda.stream(stream):
                a.take(2)
    finally:
        torch.cuda.Stream.wait_stream = wait
    parts = [len(a.arena._spans[stream]) // MIB for stream in streams]
    ends = [x is not None, sorted(waits)]
    del x
    graph.reset()
    return parts, ends


def segments_that_are_not_made():
    """[(what is warned of, MiB lent, whether a pool is kept)] where torch makes none for the second stream, and none
    for either."""
    found, filled = [], DeviceArena._filled
    for refused in ((1,), (0, 1)):
        calls = []

        def some(self, room, stream, small=False, calls=calls, refused=refused):
            calls.append(stream)
            if len(calls) - 1 in refused:
                raise RuntimeError("not of mine")
            return filled(self, room, stream, small)

        a = Arena(64, streams=2)
        DeviceArena._filled = some
        try:
            with warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always")
                for stream in (torch.cuda.Stream(), torch.cuda.Stream()):
                    with torch.cuda.stream(stream):
                        a.take(2), a.take(2)
        finally:
            DeviceArena._filled = filled
        texts = [str(one.message).split("torch's")[0] + str(one.message).rpartition(")")[2] for one in said]
        found.append((texts, a.engine.arena_bytes_lent // MIB, a.arena._pool is not None))
    return found


def outlives_the_engine():
    a = Arena()
    x = a.take(2)
    for buffer in a.buffers:
        buffer.destroy()
    a.engine = None
    ctypes.memset(x.data_ptr(), 7, 2 * MIB)
    return True


def placing():
    """Where things lie that torch makes in the call, how often it is called, and what calls in it find."""
    a, found = Arena(64), {}
    a.take(1)

    def elsewhere():
        found["thread"] = [a.at(a.take(2)), a.at(made(2)), a.at(a.arena.placing(lambda: made(2), 2 * MIB))]

    def call(*sizes):
        calls.append([])
        for mib in sizes:
            calls[-1].append(made(mib) if mib else torch.empty(1000, dtype=torch.uint8, device="cuda"))
        return calls[-1][0]

    def lie(mib, *sizes):
        calls.clear()
        assert a.arena.placing(lambda: call(*sizes), mib * MIB) is calls[-1][0]
        return [len(calls), *(a.at(x) is not None for x in calls[-1])]

    def inside():
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        found["inner"] = [a.at(a.take(2)), a.at(a.arena.placing(lambda: made(2), 2 * MIB)) is not None]
        return made(2)

    calls = []
    found["fits"], found["and small"], found["and large"] = lie(4, 4), lie(4, 4, 0, 0), lie(4, 4, 12)
    a.arena.placing(inside, 2 * MIB)
    calls.clear()
    held = a.take(40)
    found["too much"] = [lie(12, 12, 12, 12) for _ in range(3)]
    del held
    calls.clear()
    found["behind"] = [a.at(made(2)), [a.at(a.take(mib)) for mib in (2, 4, 9, 12, 60)]]
    found["small or larger than all"] = [lie(1, 1), lie(65, 65)]
    for error in (ZeroDivisionError, KeyboardInterrupt):
        with contextlib.suppress(error):
            a.arena.placing(lambda error=error: (_ for _ in ()).throw(error), 4 * MIB)
    found["after errors"] = [a.at(made(2)), lie(4, 4)]
    with captured():
        found["in a graph"] = lie(4, 4)
    return found


def within_another_pool():
    """[whether a block, a fill and what torch makes while it lends lie in the arena], all with a pool of the caller's
    around; torch's newer allocators serve the innermost pool, its older ones the outermost."""
    a, fresh = Arena(), Arena()
    a.take(1)
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        inside = [arena.at(arena.take(2)) not in (None, -1) for arena in (a, fresh)]
        inside.append(a.at(a.arena.placing(lambda: made(2), 2 * MIB)) is not None)
    behind = [arena.at(arena.take(2)) not in (None, -1) for arena in (a, fresh)]
    return inside, behind


def dropped_while_a_graph_is_captured():
    """(bytes lent in the capture, when the next arena is made): torch ends the process where a pool goes there."""
    a = Arena()
    a.take(2)
    with torch.cuda.graph(torch.cuda.CUDAGraph(), stream=torch.cuda.Stream()):
        a.arena = None
        inside = a.engine.arena_bytes_lent
    Arena()
    return inside, a.engine.arena_bytes_lent


def of_graphs():
    """Offsets are in MiB, of the first block of each graph."""
    a, found = Arena(64), {}
    found["eager"] = a.engine.arena_bytes_lent // MIB if a.take(2) is not None else 0

    def offsets(*blocks):
        return [(x.data_ptr() - first) // MIB if x is not None else None for x in blocks]

    with captured() as graph:
        blocks = [a.take(3), a.take(3)]
        first = blocks[0].data_ptr()
        found["in turn"] = offsets(*blocks)
        del blocks[0]
        blocks.append(a.take(3))
        found["reused"] = offsets(blocks[1])
        blocks[1].record_stream(torch.cuda.Stream())
        del blocks[1]
        blocks += [a.take(3), a.take(12), a.take(40)]
        found["behind another stream, large, too large"] = offsets(*blocks[1:])
    found["lent"] = a.engine.arena_bytes_lent // MIB
    taken = [(x.data_ptr(), x.data_ptr() + x.numel()) for x in blocks if x is not None]
    del blocks
    torch.cuda.empty_cache()
    found["kept by the graph"] = a.engine.arena_bytes_lent // MIB
    eager = [x for x in (a.take(2) for _ in range(40)) if x is not None]
    found["eager behind it"] = len(eager)
    found["apart"] = all(x.data_ptr() >= end or x.data_ptr() + x.numel() <= at for x in eager for at, end in taken)
    with captured() as other:
        found["while others are held"] = a.take(2) is not None
    del eager
    torch.cuda.empty_cache()
    with captured() as third:
        found["another graph"] = a.take(2) is not None
    found["of two graphs"] = a.engine.arena_bytes_lent // MIB
    for one in (graph, other, third):
        one.reset()
    a.arena = None
    Arena()
    torch.cuda.empty_cache()
    found["at the end"] = a.engine.arena_bytes_lent // MIB
    return found


def a_graph_behind_one_that_is_gone():
    """(MiB lent to the second alone): the first one's pool goes, and not while the second is captured."""
    a = Arena(64)
    with captured() as graph:
        x = a.take(3)
    del x
    graph.reset()
    with captured():
        y = a.take(12)
    Arena()
    torch.cuda.empty_cache()
    return a.engine.arena_bytes_lent // MIB if y is not None else None


def refused_with_expandable_segments():
    """(whether each attempt made small memory, too, what the allocator was told, the first block's offset), of an
    allocator that makes no pool as long as its segments are expandable, in the words of torch 2.9."""
    told, attempts, filled = [], [], DeviceArena._filled

    def refused(self, room, stream, small=False):
        attempts.append(small)
        if not small:
            raise RuntimeError("torch.cuda.MemPool doesn't currently support expandable_segments.")
        return filled(self, room, stream, small)

    change = torch.cuda.memory._set_allocator_settings
    torch.cuda.memory._set_allocator_settings, DeviceArena._filled = told.append, refused
    try:
        a = Arena()
        return attempts, told, a.at(a.take(2))
    finally:
        torch.cuda.memory._set_allocator_settings, DeviceArena._filled = change, filled


PROGRAMS = (
    blocks,
    other_streams,
    two_streams,
    two_streams_behind_a_graph,
    segments_that_are_not_made,
    outlives_the_engine,
    placing,
    within_another_pool,
    dropped_while_a_graph_is_captured,
    of_graphs,
    a_graph_behind_one_that_is_gone,
    refused_with_expandable_segments,
)

if __name__ == "__main__":
    torch.cuda.init()
    names = sys.argv[1:] or [program.__name__ for program in PROGRAMS]
    print(json.dumps({program.__name__: program() for program in PROGRAMS if program.__name__ in names}))
