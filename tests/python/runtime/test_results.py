"""Large host results come from memory used before, but never from memory that anything still refers to."""

from __future__ import annotations

import gc
import sys
import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hybrid_ep.runtime.results import ResultPool, size_class
from hybrid_ep.testing import VirtualWorld

MIB = 1 << 20


def address_of(x: torch.Tensor) -> int:
    return x.untyped_storage().data_ptr()


@given(st.integers(1, 1 << 40))
def test_a_size_class_wastes_at_most_an_eighth(num_bytes):
    rounded = size_class(num_bytes)
    assert num_bytes <= rounded <= num_bytes + max(num_bytes // 8, 64)
    assert size_class(rounded) == rounded


def test_dropped_memory_serves_the_next_result_of_about_its_size():
    pool = ResultPool(64 * MIB)
    first = pool.empty(4096, 1024)
    where = address_of(first)
    assert first.shape == (4096, 1024) and first.is_contiguous() and first.dtype == torch.uint8
    del first
    assert pool.idle_bytes >= 4 * MIB
    second = pool.empty(4000, 1024)
    assert address_of(second) == where and pool.idle_bytes == 0


@pytest.mark.parametrize(
    "keep",
    [
        lambda x: x,
        lambda x: x[5:7],
        lambda x: x.view(torch.bfloat16),
        lambda x: x.numpy(),
        lambda x: x.untyped_storage(),
        lambda x: torch.utils.dlpack.to_dlpack(x),
        lambda x: memoryview(x.numpy()),
    ],
    ids=["tensor", "slice", "view", "numpy", "storage", "dlpack", "memoryview"],
)
def test_memory_in_use_is_never_handed_out(keep):
    pool = ResultPool(64 * MIB)
    result = pool.empty(4096, 1024)
    kept, where = keep(result), address_of(result)
    del result
    gc.collect()
    assert pool.idle_bytes == 0
    others = [pool.empty(4096, 1024) for _ in range(3)]
    assert where not in {address_of(x) for x in others}
    del kept, others
    gc.collect()
    assert pool.idle_bytes >= 4 * 4 * MIB
    assert where in [address_of(x) for x in [pool.empty(4096, 1024) for _ in range(4)]]  # free again


def test_what_autograd_saved_stays():
    pool = ResultPool(64 * MIB)
    x = pool.empty(1024, 4096).view(torch.float32).fill_(3.0)
    weight = torch.ones(1024, requires_grad=True)
    y = (x * weight).sum()
    del x
    pool.empty(1024, 4096).fill_(255)
    y.backward()
    assert torch.equal(weight.grad, torch.full((1024,), 3.0 * 1024))


def test_a_storage_freed_or_shared_by_its_user_is_forgotten():
    pool = ResultPool(64 * MIB)
    freed, shared = pool.empty(4096, 1024), pool.empty(4096, 1024)
    freed.untyped_storage().resize_(0)
    assert freed.untyped_storage().nbytes() == 0  # an ordinary, resizable storage
    shared.share_memory_()
    where = address_of(shared)
    del freed, shared
    assert all(address_of(pool.empty(4096, 1024)) != where for _ in range(3))


def test_idle_memory_is_bounded_and_can_be_refused():
    pool = ResultPool(10 * MIB)
    many = [pool.empty(4096, 1024) for _ in range(8)]
    del many
    kept = pool.empty(8192, 1024)
    assert pool.idle_bytes <= 10 * MIB
    del kept
    none = ResultPool(0)
    none.empty(4096, 1024)
    assert none.idle_bytes == 0


def test_a_buffer_reuses_only_results_that_were_dropped():
    tokens, hidden, experts = 512, 1024, 4
    buffer = VirtualWorld(1, 1).buffers(hidden, tokens, experts, timeout_s=30)[0]
    x = torch.arange(tokens * hidden, dtype=torch.float32).reshape(tokens, hidden)
    idx = torch.arange(tokens * 2).reshape(tokens, 2) % experts

    def dispatch(rows):
        return buffer.dispatch_with_permute(hidden=rows, topk_idx=idx, num_of_experts=experts)[0]

    first = dispatch(x)
    before, where = first.clone(), address_of(first)
    second = dispatch(x + 1)
    assert address_of(second) != where and torch.equal(first, before)
    assert torch.equal(second, first + 1)
    del first
    assert address_of(dispatch(x + 2)) == where
    buffer.destroy()
    assert torch.equal(second, before + 1)


# ---- results in registered memory
def dispatcher(arena_mib, tokens=512, hidden=1024, experts=4):
    """(buffer, x, dispatch(x) -> rows [2 * tokens, hidden]) of one rank."""
    buffer = VirtualWorld(1, 1).buffers(hidden, tokens, experts, timeout_s=30, arena_mib=arena_mib)[0]
    x = torch.arange(tokens * hidden, dtype=torch.float32).reshape(tokens, hidden)
    idx = torch.arange(tokens * 2).reshape(tokens, 2) % experts
    return buffer, x, lambda rows: buffer.dispatch_with_permute(hidden=rows, topk_idx=idx, num_of_experts=experts)[0]


def lent(buffer) -> int:
    return buffer._session.engine.arena_bytes_lent


def test_by_default_the_arena_has_room_for_results_or_is_not_there():
    options = dispatcher(arena_mib=None)[0]._session.options
    shape = {"max_tokens": 8192, "max_topk": 8, "row_bytes": 2 * 7168, "scale_bytes": 0}
    assert options.arena_bytes(shape) == 1 << 30  # one result takes 896 MiB
    assert options.arena_bytes(shape | {"max_tokens": 16384}) == 0
    assert options.arena_bytes(shape | {"max_tokens": 1024}) == 5 * 1024 * 8 * 14336 // 2


def test_a_result_without_room_is_the_same_and_counted():
    outcomes = []
    for arena_mib in (0, 3, 4, 9):  # a result takes 4 MiB
        buffer, x, dispatch = dispatcher(arena_mib)
        kept = [dispatch(x + i) for i in range(3)]
        assert buffer.memory_report().regions["arena"] == arena_mib << 20
        outcomes.append((kept, lent(buffer), buffer.traffic()["copied_rows"]))
    assert [(in_arena, copied) for _, in_arena, copied in outcomes] == [
        (0, 3 * 1024),
        (0, 3 * 1024),
        (4 * MIB, 2 * 1024),
        (8 * MIB, 1024),
    ]
    for kept, *_ in outcomes[1:]:
        assert all(torch.equal(a, b) for a, b in zip(kept, outcomes[0][0], strict=True))


def test_rows_for_outputs_without_room_give_the_same_sums_and_are_counted():
    outcomes = []
    for arena_mib in (4, 9):  # the dispatched rows take 4 MiB, and so do the outputs
        buffer = VirtualWorld(1, 1).buffers(2048, 512, 4, timeout_s=30, arena_mib=arena_mib)[0]
        idx = torch.arange(1024).reshape(512, 2) % 4
        x = torch.randn(512, 2048, generator=torch.Generator().manual_seed(5)).bfloat16()
        rows, *_, handle = buffer.dispatch_with_permute(hidden=x, topk_idx=idx, num_of_experts=4)
        outputs = torch.mul(rows, 1.5, out=buffer.empty(*rows.shape, rows.dtype))
        sums = buffer.combine_with_unpermute(hidden=outputs, handle=handle)[0]
        outcomes.append((lent(buffer), buffer.traffic()["partial_rows"], sums))
    (one, formed, sums), (both, in_place, same) = outcomes
    assert (one, both) == (4 * MIB, 8 * MIB) and (formed, in_place) == (512, 0)
    assert torch.equal(sums, same) and torch.equal(sums, (1.5 * x) * 2)


@pytest.mark.parametrize(
    "arguments, said",
    [
        ((-1, 4), "rows=-1"),
        ((2.5, 4), "rows=2.5"),
        ((2, 0), "columns=0"),
        ((2, 4, "bf16"), "dtype='bf16'"),
        ((2, 4, torch.int64), "dtype=torch.int64"),
        ((1 << 40, 1 << 30), "rows"),
    ],
)
def test_rows_for_outputs_that_cannot_be_are_named(arguments, said):
    buffer = VirtualWorld(1, 1).buffers(64, 8, 2, timeout_s=30)[0]
    with pytest.raises(ValueError, match=said):
        buffer.empty(*arguments)
    assert buffer.empty(0, 4).shape == (0, 4)


@pytest.mark.parametrize(
    "keep",
    [
        lambda x: x[5:7],
        lambda x: x.view(torch.uint8),
        lambda x: x.numpy(),
        lambda x: x.untyped_storage(),
        lambda x: torch.utils.dlpack.to_dlpack(x),
        lambda x: memoryview(x.numpy()),
        lambda x: (x * torch.ones(1024, requires_grad=True)).sum(),
    ],
    ids=["slice", "view", "numpy", "storage", "dlpack", "memoryview", "autograd"],
)
def test_a_block_of_the_arena_is_lent_as_long_as_anything_refers_to_it(keep):
    buffer, x, dispatch = dispatcher(arena_mib=9)
    kept = keep(dispatch(x))
    gc.collect()
    assert lent(buffer) == 4 * MIB
    others = [dispatch(x + 1), dispatch(x + 2)]
    assert lent(buffer) == 8 * MIB and address_of(others[0]) != address_of(others[1])
    del kept, others
    gc.collect()
    assert lent(buffer) == 0


def test_a_result_outlives_growth_and_its_buffer():
    buffer, x, dispatch = dispatcher(arena_mib=None)
    first, before = dispatch(x), dispatch(x).clone()
    wide = torch.zeros(2000, 2048)
    buffer.dispatch_with_permute(hidden=wide, topk_idx=torch.zeros(2000, 2, dtype=torch.int64), num_of_experts=4)
    second = dispatch(x)
    buffer.destroy()
    del buffer, dispatch
    gc.collect()
    assert torch.equal(first, before) and torch.equal(second, before)


def test_threads_never_get_the_same_memory():
    """A backward takes memory for a gradient while another thread calls the buffer."""
    pool, wrong, interval = ResultPool(64 * MIB), [], sys.getswitchinterval()

    def take(mine: int) -> None:
        for _ in range(400):
            x = pool.empty(1, MIB)
            x[0, ::4096] = mine
            if (x[0, ::4096] != mine).any():
                wrong.append(mine)
            del x

    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=take, args=(n,)) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    finally:
        sys.setswitchinterval(interval)
    assert not wrong


@given(st.lists(st.tuples(st.integers(1, 400 << 10), st.integers(0, 5)), max_size=60))
def test_blocks_of_the_arena_never_overlap_and_all_come_back(steps):
    engine, lent_out = OWNER._session.engine, []
    for num_bytes, drop in steps:
        if drop < len(lent_out):
            del lent_out[drop]
        if (block := engine.take(num_bytes)) is not None:
            lent_out.append(torch.frombuffer(block, dtype=torch.uint8))
        del block
        spans = sorted((b.data_ptr(), b.numel()) for b in lent_out)
        assert all(at + size <= after for (at, size), (after, _) in zip(spans, spans[1:], strict=False))
        assert all(at % 128 == 0 for at, _ in spans)
        assert engine.arena_bytes_lent == sum(-(-b.numel() // 128) * 128 for b in lent_out)
        gap = engine.arena_gap
        assert gap <= (1 << 20) - engine.arena_bytes_lent and engine.take(gap + 1) is None
        assert not gap or engine.take(gap) is not None
    lent_out.clear()
    assert engine.arena_bytes_lent == 0 and engine.take(1 << 20) is not None  # in one piece again


OWNER = dispatcher(arena_mib=1)[0]
