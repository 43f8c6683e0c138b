"""An arena in memory of its own, as GPUs have it: rows land there, sums read there, and it outlives its buffer."""

from __future__ import annotations

from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from examples import Example, check, expected

from hybrid_ep import HybridEPBuffer, _core
from hybrid_ep.runtime import devices
from hybrid_ep.runtime.session import Session
from hybrid_ep.runtime.topology import Topology
from hybrid_ep.testing import VirtualWorld


@pytest.fixture
def apart(monkeypatch):
    """The host's executors have their arenas as GPUs do."""

    def choose(session):
        own = session.meet.view.segments
        return devices.Memory(own, session.options.executor, own)

    monkeypatch.setattr(Session, "_choose_memory", choose)


def example(nodes: int, ranks: int, **more) -> Example:
    return Example(nodes, ranks, 3, tuple((17 * r + 9) % 40 for r in range(nodes * ranks)), 4, 64, seed=9, **more)


@pytest.mark.parametrize("executor", ["host", "host_checked"])
@pytest.mark.parametrize("landing", [None, "first", "all"])
@pytest.mark.parametrize("shape", [(1, 1), (1, 4), (2, 2), (3, 1)])
def test_all_verbs_have_the_bits_of_an_arena_in_the_segment(apart, shape, landing, executor):
    ex = example(*shape, scale_columns=1, pad_multiple=4)
    want = expected(ex)
    world = VirtualWorld(*shape)
    buffers = world.buffers(64, 40, 3, executor=executor, landing=landing, timeout_s=30)
    world.run(lambda rank, _: check(buffers[rank], rank, ex, want))
    for buffer in buffers:
        assert buffer._session.shape.arena_apart
        if landing == "all":
            assert buffer.traffic()["copied_rows"] == 0
        buffer.destroy()


@pytest.mark.parametrize("shape", [(1, 3), (2, 2)])
def test_rows_lie_there_and_sums_read_them_where_they_lie(apart, shape):
    ex = example(*shape)
    want = expected(ex)
    world = VirtualWorld(*shape)
    buffers = world.buffers(64, 40, 3, executor="host", timeout_s=30)

    def once(rank, _):
        buffer, mine = buffers[rank], want.inputs[rank]
        rows, *_, handle = buffer.dispatch_with_permute(
            hidden=mine.hidden, num_of_experts=ex.world.num_experts, **mine.routing()
        )
        lent = buffer._session.engine.arena_bytes_lent
        assert lent >= rows.nbytes
        formed = buffer.combine_with_unpermute(hidden=rows.clone(), handle=handle)[0]
        partials = buffer.traffic()["partial_rows"]
        read = buffer.combine_with_unpermute(hidden=rows, handle=handle)[0]
        assert torch.equal(formed, read)
        assert partials > 0 and buffer.traffic()["partial_rows"] == partials  # none of the second
        return rows, rows.clone()

    kept = world.run(once)
    for buffer in buffers:
        buffer.destroy()
    for rows, copy in kept:  # their memory goes with them
        assert torch.equal(rows, copy)
        rows.fill_(1)


def test_results_live_on_when_the_buffer_grows(apart):
    world = VirtualWorld(1, 2)
    buffers = world.buffers(64, 8, 2, executor="host", timeout_s=30)

    def grow(rank, _):
        idx = torch.arange(8)[:, None] % 4
        first, *_ = buffers[rank].dispatch(torch.full((8, 64), 3.0).bfloat16(), topk_idx=idx, num_of_experts=4)
        session = buffers[rank]._session
        lent, generation = session.engine.arena_bytes_lent, session._generation
        more = idx.repeat(64, 1)
        second, *_ = buffers[rank].dispatch(torch.full((512, 64), 5.0).bfloat16(), topk_idx=more, num_of_experts=4)
        assert (first == 3).all() and (second == 5).all()
        assert lent >= first.nbytes and session._generation == generation + 1

    world.run(grow)


def test_a_report_counts_it_once_and_maps_it_in_the_node(apart):
    world = VirtualWorld(2, 2)
    buffer = world.buffers(64, 40, 3, executor="host", timeout_s=30)[0]
    shape, report = buffer._session.shape, buffer.memory_report()
    arena = report.regions["arena"]
    assert arena > 0 and report.total_bytes == shape.segment_bytes + arena
    assert sum(report.regions.values()) + report.padding_bytes == report.total_bytes
    assert report.mapped_bytes == 4 * shape.segment_bytes + 2 * arena


def test_an_engine_wants_an_arena_of_every_rank_of_the_node_or_none():
    sizes = {"num_nodes": 1, "num_local_ranks": 2, "num_experts": 2, "arena_bytes": 1 << 16}
    shape = _core.BufferShape(**sizes, arena_apart=True)
    segments = [_core.Segment.private(shape.segment_bytes) for _ in range(2)]
    arenas = [_core.Segment.private(1 << 16) for _ in range(2)]
    _core.Engine(0, shape, segments, 1, "host", 0, arenas)
    small = [arenas[0], _core.Segment.private(1 << 12)]
    for given, why in (([], "one per rank"), (arenas[:1], "one per rank"), (small, "smaller than the shape's")):
        with pytest.raises(ValueError, match=why):
            _core.Engine(0, shape, segments, 1, "host", 0, given)
    inside = _core.BufferShape(**sizes)
    whole = [_core.Segment.private(inside.segment_bytes) for _ in range(2)]
    with pytest.raises(ValueError, match="else none"):
        _core.Engine(0, inside, whole, 1, "host", 0, arenas)


# ---- who makes it on GPUs
def reach(*kinds: list[str], file=None) -> devices.Reach:
    everyone = list(range(len(kinds)))
    near = [[r for r in everyone if r // 2 == me // 2] for me in everyone]
    return devices.Reach(list(kinds), near, file or near, near)


@pytest.mark.parametrize(
    "found, kind",
    [
        (reach(*[["fabric", "file", "ipc"]] * 4), "fabric"),
        (reach(*[["file", "ipc"]] * 4), "file"),
        (reach(*[["file", "ipc"]] * 4, file=[[0], [1], [2, 3], [2, 3]]), "ipc"),  # two containers of a machine
        (reach(["file"], ["file"], ["ipc"], ["ipc"]), None),
    ],
)
def test_the_best_kind_that_ranks_of_every_node_share(found, kind):
    assert devices.kind_in_nodes(found, Topology(0, 4, 2)) == kind


def test_the_heap_of_nvshmem_has_its_arena_beside_it():
    meet, device = mock.Mock(), torch.device("cuda", 0)
    where = Topology(0, 4, 2)
    got = devices.memory(meet, where, "cuda", device, reach(*[["file"]] * 4))
    assert got.executor == "cuda_nvshmem" and got.arenas.kind == "file"
    assert devices.memory(meet, where, "cuda", device, reach(*[["file"]] * 4), wants_arena=False).arenas is None
    with pytest.warns(RuntimeWarning, match="copied once more.*arena_mib=0"):
        assert devices.memory(meet, where, "cuda", device, reach(["file"], ["ipc"], [], [])).arenas is None
    alone = devices.memory(meet, Topology(0, 2, 1), "cuda", device, reach([], []))
    assert alone.executor == "cuda_nvshmem" and alone.arenas.kind == "none"
    with mock.patch.object(devices, "probe", return_value=reach(*[["ipc"]] * 4)) as probe:
        assert devices.memory(meet, where, "cuda_nvshmem", device, None).arenas.kind == "ipc"
    probe.assert_called_once_with(meet, device)
    joined = SimpleNamespace(kinds=[["fabric"]] * 4, fabric=[list(range(4))] * 4, file=[[]] * 4, near=[[]] * 4)
    mapped = devices.memory(meet, where, "cuda", device, joined)
    assert mapped.executor == "cuda" and mapped.segments is not mapped.arenas and mapped.arenas.kind == "fabric"


def test_the_warning_points_at_who_made_the_buffer(monkeypatch):
    def choose(session):
        return devices.memory(session.meet, Topology(0, 4, 2), "cuda", torch.device("cpu"), reach([], [], [], []))

    monkeypatch.setattr(Session, "_choose_memory", choose)
    monkeypatch.setattr(devices.nvshmem, "heap", lambda: mock.Mock(start=mock.Mock(side_effect=RuntimeError("none"))))
    with pytest.warns(RuntimeWarning, match="copied once more") as warned, pytest.raises(Exception, match="none"):
        VirtualWorld(1, 1).run(lambda rank, group: HybridEPBuffer(group, 64, 8, 2, timeout_s=5))
    assert warned[0].filename == __file__


def test_a_buffer_that_ends_closes_both(monkeypatch):
    ended = []

    class Noting:
        def __init__(self, inner, name):
            self._inner, self._name = inner, name

        def __getattr__(self, what):
            return getattr(self._inner, what)

        def close(self, together):
            ended.append((self._name, together))

    def choose(session):
        own = session.meet.view.segments
        return devices.Memory(Noting(own, "segment"), "host", Noting(own, "arena"))

    monkeypatch.setattr(Session, "_choose_memory", choose)
    VirtualWorld(1, 1).buffers(64, 8, 2, timeout_s=5)[0].destroy()
    assert ended == [("arena", True), ("segment", True)]
