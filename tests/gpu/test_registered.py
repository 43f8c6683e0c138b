"""buffer.registered(): what torch makes in a function that it calls lies in the arena, where combine reads it; without
room the function is called again, and nobody takes anything else for the arena."""

from __future__ import annotations

import contextlib
import functools
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
    return x.data_ptr() in next(iter(buffer._session.results._arena._spans.values()), ())


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
                product = functools.partial(grouped_mm, given, w, ends, backend="torch", tail=False)
                out = raw.registered(product, *given.shape, given.dtype) if registers else product()
                assert is_in_arena(raw, out) == registers
            stream.synchronize()
            buffer.reset_traffic()
            sums.append(buffer.combine_with_unpermute(hidden=out, handle=handle)[0].cpu())
            formed.append(buffer.traffic()["partial_rows"])
        assert torch.equal(*sums) and formed[0] > 0 and formed[1] == 0  # a token has one expert
        return sums[0].abs().sum().item()

    assert all(total > 0 for total in world.run(body))
    world.close()


class Made:
    """What an operation makes, in this order: torch's tensors of so many MiB, or less than one of so many bytes."""

    def __init__(self, *sizes: int):
        self.sizes, self.calls, self.made = sizes, 0, []

    def __call__(self):
        self.calls, self.made = self.calls + 1, []
        for size in self.sizes:
            num_bytes = size * MIB if size < 1000 else size
            self.made.append(torch.zeros(num_bytes, dtype=torch.uint8, device="cuda"))
        return self.made[0]


def put(buffer, made: Made, mib: int = 2) -> list[bool]:
    """Which of them lie in the arena, of which room for so many MiB was asked."""
    assert buffer.registered(made, mib * MIB // 2048, 1024) is made.made[0]
    return [is_in_arena(buffer, x) for x in made.made]


def test_what_needs_more_room_than_there_is_is_called_again():
    buffer, stream = alone()
    with torch.cuda.stream(stream):
        assert put(buffer, fits := Made(2, 1000)) == [True, False] and fits.calls == 1
        assert put(buffer, more := Made(2, 4)) == [True, True] and more.calls == 1
        assert put(buffer, large := Made(2, 32)) == [False, False] and large.calls == 2
        del large
        later = [buffer.empty(*SHAPE) for _ in range(4)]
        assert all(is_in_arena(buffer, rows) for rows in later)
        assert not is_in_arena(buffer, Made(2)()), "behind the call"
        arena = buffer._session.results._arena
        assert arena._made(64 * MIB, arena._pool) is None, "nothing is offered beside the arena any more"
        assert put(buffer, full := Made(12), 12) == [False] and full.calls == 1
        del later, fits, more
        assert put(buffer, Made(12), 12) == [True]
    kept = Made(2)
    with torch.cuda.stream(stream):
        put(buffer, kept)
        kept.made[0] += 1
    buffer.destroy()
    assert kept.made[0].float().mean().item() == 1


def test_where_it_only_calls():
    buffer, stream = alone()
    with torch.cuda.stream(stream):
        assert put(buffer, Made(1), 1) == [False], "as small as torch's small ones"
        with torch.cuda.stream(torch.cuda.Stream()):
            assert put(buffer, Made(2)) == [False]
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            assert put(buffer, Made(2)) == [False]
        with pytest.raises(ValueError, match="dtype=torch.uint8"):
            buffer.registered(Made(2), *SHAPE, torch.uint8)
        with pytest.raises(ValueError, match="rows=-1"):
            buffer.registered(Made(2), -1, HIDDEN)
    none, stream = alone(arena_mib=0)
    made = Made(2)
    with torch.cuda.stream(stream):
        assert none.registered(made, *SHAPE) is made.made[0]


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt, RuntimeError])
def test_an_error_leaves_it(error):
    def fails():
        raise error("not of the arena")

    buffer, stream = alone()
    with torch.cuda.stream(stream):
        with pytest.raises(error, match="not of the arena"):
            buffer.registered(fails, *SHAPE)
        assert not is_in_arena(buffer, Made(2)()) and is_in_arena(buffer, buffer.empty(*SHAPE))
        assert put(buffer, Made(2)) == [True]


def test_calls_within_it_find_no_room_of_their_own():
    """torch's pools serve one thread at a time, and no thread twice."""
    (buffer, stream), (other, _) = alone(), alone()
    found = {}
    other._session.results._arena._spans.clear()

    def elsewhere():
        with torch.cuda.stream(stream):
            found["thread"] = is_in_arena(buffer, buffer.empty(*SHAPE)), put(buffer, Made(2))

    def inside():
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join(60)
        made = buffer.empty(*SHAPE)
        found["inner"] = is_in_arena(buffer, made), put(buffer, Made(2))
        found["other"] = is_in_arena(other, other.empty(*SHAPE))
        return made

    with torch.cuda.stream(stream):
        buffer.registered(inside, *SHAPE)
        assert found == {"thread": (False, [False]), "inner": (True, [True]), "other": False}, "torch made it"
        assert is_in_arena(buffer, buffer.empty(*SHAPE)) and put(buffer, Made(2)) == [True]


def test_another_pool_around_it_is_not_taken_for_the_arena():
    """torch serves the innermost or, in older versions, the outermost. Either way the arena serves again behind it."""
    world = GpuWorld(1, 1, 2, skew=0, arena_mib=16)
    buffer, stream = world.raw[0], world.streams[0]
    with torch.cuda.stream(stream):
        pool = torch.cuda.MemPool()
        with torch.cuda.use_mem_pool(pool):
            lies = is_in_arena(buffer, buffer.empty(*SHAPE))
            assert put(buffer, Made(2)) == [lies]
        assert is_in_arena(buffer, buffer.empty(*SHAPE)) and put(buffer, Made(2)) == [True]


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
