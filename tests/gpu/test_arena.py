"""Results in registered memory: rows land there over the links, and a block is used again when all that read it is
done, on whatever stream."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from examples import Example, check, expected, make_inputs, same
from gpu_world import GpuWorld

from hybrid_ep import _core
from hybrid_ep.runtime import validation
from hybrid_ep.runtime.handle_kinds import DISPATCHED

EX = Example(1, 1, 4, (64,), 2, 256, pad_multiple=8, seed=3)
ROOM = 9  # results: torch's allocator takes small ones as 1 MiB, and an arena has 10 MiB at least


def dispatcher(**options):
    """(buffer of a rank alone, its stream, call): call(seed) is a dispatch of that example, with the rows it gives."""
    world = GpuWorld(1, 1, 4, skew=0, **options)
    buffer, stream = world.raw[0], world.streams[0]

    def call(seed: int = 3, **more):
        ex = dataclasses.replace(EX, seed=seed)
        mine, want = make_inputs(ex, 0), expected(ex).permuted[0][0]
        given = {"hidden": mine.hidden, "topk_idx": mine.topk_idx, "topk_weights": mine.topk_weights}
        with torch.cuda.stream(stream):
            rows = buffer.dispatch_with_permute(
                **{k: v.cuda() for k, v in given.items()}, num_of_experts=4, pad_multiple=8, **more
            )[0]
        return rows, want

    return buffer, stream, call


def copied(*seeds: int, lands: bool = True) -> int:
    """Rows that deliver stores of these examples: all, or, where rows land, those of a token's further experts."""
    routes = [expected(dataclasses.replace(EX, seed=seed)).plan.routes[0] for seed in seeds]
    return sum(int(pairs.sum()) - lands * int(pairs.any(dim=1).sum()) for pairs in routes)


def on(stream, rows: torch.Tensor) -> torch.Tensor:
    with torch.cuda.stream(stream):
        return rows.cpu()


@pytest.mark.parametrize("shape, apart, arena_mib", [((1, 3), 3, None), ((1, 3), 3, 0), ((2, 2), None, None)])
def test_rows_land_and_deliver_copies_what_it_must(shape, apart, arena_mib):
    """The rows of a token's further experts on this rank; all rows where there is no arena."""
    num_ranks = shape[0] * shape[1]
    ex = Example(*shape, 3, tuple((37 * r + 10) % 50 for r in range(num_ranks)), 4, 64, scale_columns=1, seed=9)
    want = expected(ex)
    world = GpuWorld(*shape, 3, num_blocks_permute=apart, arena_mib=arena_mib)
    assert all(buffer._session.shape.arena_apart == (arena_mib != 0) for buffer in world.raw)
    world.run(lambda rank, buffer: check(buffer, rank, ex, want))

    def once(rank, buffer):
        mine = want.inputs[rank]
        buffer.reset_traffic()
        buffer.dispatch_with_permute(
            hidden=mine.hidden, scaling_factor=mine.scale, num_of_experts=ex.world.num_experts, **mine.routing()
        )
        return buffer.traffic()["copied_rows"]

    for rank, stored in enumerate(world.run(once)):
        here = torch.cat(want.plan.routes)[:, 3 * rank : 3 * rank + 3]
        pairs, tokens = int(here.sum()), int(here.any(dim=1).sum())
        assert stored == (pairs if arena_mib == 0 else pairs - tokens)
    world.close()


@pytest.mark.parametrize("shape, apart", [((1, 3), 3), ((1, 3), None), ((2, 2), None)])
def test_sums_read_single_rows_where_experts_put_them(shape, apart):
    """Of tokens with one expert on a rank; of the others that rank forms partial rows. The same bits as of partials."""
    num_ranks = shape[0] * shape[1]
    ex = Example(*shape, 3, tuple((37 * r + 10) % 50 for r in range(num_ranks)), 3, 64, seed=9)
    want = expected(ex)
    world = GpuWorld(*shape, 3, num_blocks_permute=apart, num_blocks_unpermute=apart)

    def body(rank, buffer):
        mine, outs, formed = want.inputs[rank], [], []
        rows, *_, handle = buffer.dispatch_with_permute(
            hidden=mine.hidden, num_of_experts=ex.world.num_experts, **mine.routing()
        )
        returned = want.returned[rank].to(rows.device)
        buffer.combine_with_unpermute(hidden=returned, handle=handle)  # it has grown then
        in_place = world.raw[rank].empty(*returned.shape, returned.dtype).copy_(returned)
        for outputs in (returned, in_place):
            buffer.reset_traffic()
            outs.append(buffer.combine_with_unpermute(hidden=outputs, handle=handle)[0].cpu())
            formed.append(buffer.traffic()["partial_rows"])
        return outs, formed

    for rank, (outs, formed) in enumerate(world.run(body)):
        pairs = torch.cat(want.plan.routes)[:, 3 * rank : 3 * rank + 3].sum(dim=1)
        assert formed == [int((pairs > 0).sum()), int((pairs > 1).sum())]
        assert torch.equal(*outs)
    world.close()


@pytest.mark.parametrize("arena_streams", [1, 2])
def test_rows_land_and_outputs_are_read_in_place_where_exchange_and_experts_have_a_stream_each(arena_streams):
    """With room for two streams; of one the exchange's has it all, and partial sums are formed. The same bits."""
    ex = Example(1, 2, 3, (40, 25), 3, 64, seed=9)
    want = expected(ex)
    world = GpuWorld(1, 2, 3, skew=0, comm_stream="own", arena_streams=arena_streams)

    def body(rank, buffer):
        mine, raw = want.inputs[rank], world.raw[rank]
        call = {"hidden": mine.hidden, "num_of_experts": ex.world.num_experts, **mine.routing()}
        rows, *_, handle = buffer.dispatch_with_permute(**call)
        returned = want.returned[rank].to(rows.device)
        plain = buffer.combine_with_unpermute(hidden=returned, handle=handle)[0].cpu()  # it has grown then
        raw.reset_traffic()
        buffer.dispatch_with_permute(**call)
        copied = raw.traffic()["copied_rows"]
        with torch.cuda.stream(world.streams[rank]):
            outputs = raw.empty(*returned.shape, returned.dtype).copy_(returned)
        out = buffer.combine_with_unpermute(hidden=outputs, handle=handle)[0].cpu()
        assert torch.equal(out, plain)
        return copied, raw.traffic()["partial_rows"]

    for rank, (stored, formed) in enumerate(world.run(body)):
        here = torch.cat(want.plan.routes)[:, 3 * rank : 3 * rank + 3].sum(dim=1)
        assert stored == int((here - 1).clamp(min=0).sum()), "a token's further experts"
        assert formed == int((here > (1 if arena_streams == 2 else 0)).sum())
    world.close()


STATIC = {"non_blocking": True, "num_permuted_tokens": 160}
GRAPHS_SAY_WHO_THEY_ARE = hasattr(torch.cuda.CUDAGraph, "get_currently_capturing_graph")


def captured(buffer, stream, *seeds):
    """(graph, its inputs, its results) of a dispatch for each seed, whose results but the last go as soon as their sums
    are there: [sums, the last result]."""
    graph, inputs = torch.cuda.CUDAGraph(), [make_inputs(dataclasses.replace(EX, seed=seed), 0) for seed in seeds]
    given = [{k: getattr(one, k).cuda() for k in ("hidden", "topk_idx", "topk_weights")} for one in inputs]
    torch.cuda.synchronize()
    sums, places = [], []
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        for one in given:
            rows = buffer.dispatch_with_permute(**one, num_of_experts=4, pad_multiple=8, **STATIC)[0]
            places.append(rows.data_ptr())
            sums.append(rows.float().sum(dim=1))
            if one is not given[-1]:
                del rows
    return graph, given, sums, rows, places


def test_static_results_land_and_those_of_a_graph_where_it_finds_room():
    """A graph takes at least 20 MiB of an arena, which has 10 here."""
    buffer, stream, call = dispatcher()
    call()
    rows, want = call(5, **STATIC)
    same("static", on(stream, rows)[: len(want)], want)
    landed = copied(3, 5)
    assert buffer.traffic()["copied_rows"] == landed
    del rows
    stream.synchronize()
    graph, *kept, replayed, _ = captured(buffer, stream, 3)
    later = [call(seed)[0] for seed in range(ROOM)]  # in all of it
    landed += copied(*range(ROOM))
    assert buffer.traffic()["copied_rows"] == landed
    with torch.cuda.stream(stream):
        graph.replay()
    same("replayed", on(stream, replayed)[: len(expected(EX).permuted[0][0])], expected(EX).permuted[0][0])
    assert buffer.traffic()["copied_rows"] == landed + copied(3, lands=False)
    for seed, rows in enumerate(later):
        want = call(seed)[1]
        same(f"result {seed}", on(stream, rows)[: len(want)], want)
    assert kept  # what the graph reads


def test_results_of_a_graph_land_in_blocks_of_its_own():
    """Two dispatches. Results that are made and held between replays stay as they are. (That torch gives the second the
    block of the first shows in tests/ptx/test_torch_allocator.py: a graph of the PTX machine keeps its tensors.)"""
    buffer, stream, call = dispatcher(arena_mib=64)
    call()
    stream.synchronize()
    graph, given, sums, last, places = captured(buffer, stream, 3, 4)
    counted = buffer.traffic()["copied_rows"]
    held = [(seed, *call(seed)) for seed in range(8)]
    assert buffer.traffic()["copied_rows"] == counted + copied(*range(8))
    for seeds in ((3, 4), (7, 5), (6, 9)):
        with torch.cuda.stream(stream):
            for one, seed in zip(given, seeds, strict=True):
                mine = make_inputs(dataclasses.replace(EX, seed=seed), 0)
                for name, to in one.items():
                    to.copy_(getattr(mine, name))
            counted = buffer.traffic()["copied_rows"]
            graph.replay()
        stream.synchronize()
        wanted = [expected(dataclasses.replace(EX, seed=seed)).permuted[0][0] for seed in seeds]
        same("the last result", last.cpu()[: len(wanted[1])], wanted[1])
        for got, want in zip(sums, wanted, strict=True):
            assert torch.equal(got.cpu()[: len(want)], want.float().sum(dim=1))
        now = buffer.traffic()["copied_rows"] - counted
        assert now == copied(*seeds, lands=GRAPHS_SAY_WHO_THEY_ARE)
        assert all(abs(rows.data_ptr() - at) >= rows.nbytes for _, rows, _ in held for at in places)
        for seed, rows, want in held:
            same(f"held, of {seed}", on(stream, rows), want)


def test_a_graph_that_only_combines_has_no_memory_of_other_results():
    """Its replays would write where they lie. Somebody holds one of them when the capture asks, so the arena stays
    theirs. No call before it knew of the capture."""
    buffer, stream, call = dispatcher(arena_mib=16)
    call()
    with torch.cuda.stream(stream):
        eager = buffer.empty(8, 256)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            captured = buffer.empty(8, 256)
        again = buffer.empty(8, 256)
    begin = min(eager.data_ptr(), again.data_ptr())
    assert abs(eager.data_ptr() - again.data_ptr()) < 16 << 20, "both in the arena, of 16 MiB"
    assert abs(captured.data_ptr() - begin) >= 16 << 20
    buffer.destroy()


def test_a_block_is_lent_as_long_as_anything_refers_to_it_and_no_room_means_a_copy():
    buffer, stream, call = dispatcher()
    held = [call(seed) for seed in range(ROOM)]
    landed = copied(*range(ROOM))
    assert buffer.traffic()["copied_rows"] == landed
    last, want = call(ROOM)
    assert buffer.traffic()["copied_rows"] == landed + copied(ROOM, lands=False)
    same("copied", on(stream, last), want)
    part, address = held[4][0][3:5], held[4][0].data_ptr()
    del held[4]
    assert call(20)[0].data_ptr() != address  # copied, for the part still has the block
    before = buffer.traffic()["copied_rows"]
    del part
    rows, want = call(21)
    assert rows.data_ptr() == address and buffer.traffic()["copied_rows"] == before + copied(21)
    same("in the block", on(stream, rows), want)
    for rows, want in held:
        same("held", on(stream, rows), want)


def test_results_outlive_their_buffer():
    buffer, stream, call = dispatcher()
    rows, want = call()
    buffer.destroy()
    del buffer
    same("rows", on(stream, rows), want)


def test_a_block_is_not_written_again_while_another_stream_reads_it():
    """The reader is a dispatch of other buffers whose second rank comes late. Until then its kernel waits, and the next
    result of the first buffer must lie elsewhere."""
    buffer, stream, call = dispatcher()
    others = GpuWorld(1, 2, 2, skew=0)
    want = expected(dataclasses.replace(EX, seed=1)).permuted[0][0]
    chosen = torch.arange(len(want))[:, None] % 4  # one expert a token, two experts on each rank

    def plan(rank, reader):
        mine = slice(None) if rank == 0 else slice(0)  # all tokens are the first rank's
        return reader.dispatch(want[mine], topk_idx=chosen[mine], num_of_experts=4)[-1]

    def read(rank: int, rows: torch.Tensor, out: torch.Tensor) -> None:
        """The launch alone: where torch's operations wait for their stream, a view of the result would."""
        session = others.raw[rank]._session
        with torch.cuda.stream(others.streams[rank]), session:
            plan = validation.handle(handles[rank], DISPATCHED, session.topology)
            launch = session.launch("dispatch", (1, 0))
            session.engine.dispatch(
                plan.core, _core.DispatchRequest(x=rows, out_x=out, row_bytes=2 * 256, launch=launch)
            )

    handles, nothing = others.run(plan), want[:0].cuda()
    parts = [want[chosen[:, 0] // 2 == rank] for rank in range(2)]
    received = [torch.empty_like(part, device="cuda") for part in parts]
    first, _ = call(1)
    address = first.data_ptr()
    stream.synchronize()
    read(0, first, received[0])
    first.record_stream(others.streams[0])
    del first
    second, want_second = call(2)
    assert second.data_ptr() != address
    read(1, nothing, received[1])
    for rank in range(2):
        same(f"rank {rank}", on(others.streams[rank], received[rank]), parts[rank])
    same("second", on(stream, second), want_second)
    assert address in {rows.data_ptr() for rows, _ in [call(3) for _ in range(2)]}  # now it may be written
    others.close()
