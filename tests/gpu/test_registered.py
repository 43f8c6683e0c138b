"""buffer.registered(): what torch makes in it lies in the arena, where combine reads it; what does not fit lies beside
the arena, and nobody takes that for the arena."""

from __future__ import annotations

import contextlib
import threading

import pytest
import torch
from examples import Example, expected
from gpu_world import GpuWorld

from hybrid_ep.moe import grouped_mm, probing

HIDDEN, EXPERTS, MIB = 1024, 2, 1 << 20
EX = Example(1, 2, EXPERTS, (700, 500), 1, HIDDEN, exact=True, seed=4)  # rows of more than 1 MiB on either rank
SHAPE = (600, HIDDEN)


def alone(**options):
    """(buffer of a rank alone, its stream): 16 MiB of arena, which torch has."""
    world = GpuWorld(1, 1, 2, skew=0, **{"arena_mib": 16, **options})
    buffer, stream = world.raw[0], world.streams[0]
    with torch.cuda.stream(stream):
        buffer.empty(1, HIDDEN)
    return buffer, stream


def is_in_arena(buffer, x: torch.Tensor) -> bool:
    return x.data_ptr() in buffer._session.results._arena._span


def test_sums_read_what_an_operation_stored_where_it_chose(request, monkeypatch):
    """torch's grouped GEMM takes no place for its result. The same bits as of an ordinary tensor."""
    if request.config.getoption("--ptx-machine"):  # which has no memory for what the probe makes on the device
        monkeypatch.setattr(probing, "probe", lambda *_: probing.Probe("torch", "", "", "none", "", False))
    world, want = GpuWorld(1, 2, EXPERTS), expected(EX)
    weights = torch.stack([n * torch.eye(HIDDEN, dtype=torch.bfloat16) for n in (1, 2)])

    def body(rank, buffer):
        stream, raw, mine = world.streams[rank], world.raw[rank], want.inputs[rank]
        rows, *_, counts, handle = buffer.dispatch_with_permute(
            hidden=mine.hidden, num_of_experts=EX.world.num_experts, **mine.routing()
        )
        given, ends = rows.cuda(), counts.cumsum(0).to(torch.int32).cuda()
        w, sums, formed = weights.cuda(), [], []
        buffer.combine_with_unpermute(hidden=given, handle=handle)  # it has grown then
        for registers in (False, True):
            with torch.cuda.stream(stream):
                if registers:
                    with raw.registered(*given.shape, given.dtype) as in_arena:
                        assert in_arena
                        out = grouped_mm(given, w, ends, backend="torch", tail=False)
                else:
                    out = grouped_mm(given, w, ends, backend="torch", tail=False)
                assert is_in_arena(raw, out) == registers
            stream.synchronize()
            buffer.reset_traffic()
            sums.append(buffer.combine_with_unpermute(hidden=out, handle=handle)[0].cpu())
            formed.append(buffer.traffic()["partial_rows"])
        assert torch.equal(*sums) and formed[0] > 0 and formed[1] == 0  # a token has one expert
        return sums[0].abs().sum().item()

    assert all(total > 0 for total in world.run(body))
    world.close()


def test_what_does_not_fit_lies_beside_and_results_stay_in_the_arena():
    buffer, stream = alone()
    with torch.cuda.stream(stream):
        with buffer.registered(*SHAPE) as in_arena:
            out = torch.zeros(SHAPE, dtype=torch.bfloat16, device="cuda")
            small, large = (torch.zeros(n, dtype=torch.uint8, device="cuda") for n in (1000, 32 * MIB))
        assert in_arena and is_in_arena(buffer, out)
        assert not is_in_arena(buffer, small) and not is_in_arena(buffer, large)
        out += 1
        del large  # 32 MiB of the pool are free now, more than the arena has
        later = [buffer.empty(*SHAPE) for _ in range(9)]
        assert all(is_in_arena(buffer, rows) for rows in later)
        assert not is_in_arena(buffer, torch.zeros(SHAPE, dtype=torch.bfloat16, device="cuda")), "behind the context"
        with buffer.registered(4 * SHAPE[0], HIDDEN) as in_arena:
            full = torch.zeros(4 * SHAPE[0], HIDDEN, dtype=torch.bfloat16, device="cuda")
        assert not in_arena and not is_in_arena(buffer, full)
        arena = buffer._session.results._arena
        assert arena._made(64 * MIB, arena._pool) is None, "nothing is offered beside the arena any more"
        assert out.float().mean().item() == 1 and small.sum().item() == 0
        del later
        with buffer.registered(4 * SHAPE[0], HIDDEN) as in_arena:
            assert in_arena
    buffer.destroy()
    assert out.float().mean().item() == 1


def test_where_it_changes_nothing():
    buffer, stream = alone()
    with torch.cuda.stream(stream):
        with buffer.registered(8, HIDDEN) as in_arena:
            assert not in_arena and not is_in_arena(buffer, torch.empty(8, HIDDEN, device="cuda"))
        with torch.cuda.stream(torch.cuda.Stream()), buffer.registered(*SHAPE) as in_arena:
            assert not in_arena
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            with buffer.registered(*SHAPE) as in_arena:
                assert not in_arena
        with pytest.raises(ValueError, match="dtype=torch.uint8"):
            buffer.registered(*SHAPE, torch.uint8)
        with pytest.raises(ValueError, match="rows=-1"):
            buffer.registered(-1, HIDDEN)
    none, stream = alone(arena_mib=0)
    with torch.cuda.stream(stream), none.registered(*SHAPE) as in_arena:
        assert not in_arena


def test_calls_within_it_find_no_room_of_their_own():
    """torch's pools serve one thread at a time, and no thread twice."""
    buffer, stream = alone()
    found = []

    def elsewhere():
        with torch.cuda.stream(stream):
            found.append(is_in_arena(buffer, buffer.empty(*SHAPE)))
            with buffer.registered(*SHAPE) as in_arena:
                found.append(in_arena)

    with torch.cuda.stream(stream):
        with contextlib.suppress(ZeroDivisionError), buffer.registered(*SHAPE):
            thread = threading.Thread(target=elsewhere)
            thread.start()
            thread.join(60)
            with buffer.registered(*SHAPE) as in_arena:
                assert not in_arena
            assert is_in_arena(buffer, buffer.empty(*SHAPE)), "torch made it"
            raise ZeroDivisionError
        assert found == [False, False]
        assert is_in_arena(buffer, buffer.empty(*SHAPE))
        with buffer.registered(*SHAPE) as in_arena:
            assert in_arena


def test_another_pool_around_it_is_not_taken_for_the_arena():
    """torch serves the innermost or, before 2.15, the outermost. Either way the arena serves again behind it."""
    world = GpuWorld(1, 1, 2, skew=0, arena_mib=16)
    buffer, stream = world.raw[0], world.streams[0]
    with torch.cuda.stream(stream):
        with torch.cuda.use_mem_pool(torch.cuda.MemPool()):
            first = buffer.empty(*SHAPE)
            lies = is_in_arena(buffer, first)
            with buffer.registered(*SHAPE) as in_arena:
                made = torch.zeros(SHAPE, dtype=torch.bfloat16, device="cuda")
            assert in_arena == is_in_arena(buffer, made) == lies
        assert is_in_arena(buffer, buffer.empty(*SHAPE))
        with buffer.registered(*SHAPE) as in_arena:
            assert in_arena


class Last(torch.nn.Module):
    """In the place of Transformer Engine's last product."""

    def forward(self, rows: torch.Tensor, counts: object) -> torch.Tensor:
        if counts == "wrong":
            raise ZeroDivisionError
        return rows + rows


def test_outputs_of_megatrons_own_experts():
    """Of TEGroupedMLP, which runs `linear_fc2` last; also behind a forward that raised."""
    pytest.importorskip("megatron.core")
    from megatron_patches import buffers, own_outputs

    buffer, stream = alone()
    experts = torch.nn.Module()
    experts.linear_fc2, experts.config = Last(), None
    own_outputs.place(experts)
    rows, found = torch.zeros(SHAPE, dtype=torch.bfloat16, device="cuda"), []
    try:
        with torch.cuda.stream(stream):
            for serves, counts in ((True, None), (True, "wrong"), (True, None), (False, None)):
                buffers.serve(buffer if serves else None, HIDDEN, torch.bfloat16)
                with contextlib.suppress(ZeroDivisionError):
                    found.append(is_in_arena(buffer, experts.linear_fc2(rows, counts)))
                assert not is_in_arena(buffer, rows + rows)
    finally:
        buffers.serve(None)
    assert found == [True, True, False]
