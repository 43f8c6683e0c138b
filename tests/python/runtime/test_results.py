"""Large host results come from memory used before, but never from memory that anything still refers to."""

from __future__ import annotations

import gc

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


@pytest.mark.parametrize("keep", [
    lambda x: x, lambda x: x[5:7], lambda x: x.view(torch.bfloat16), lambda x: x.numpy(), lambda x: x.untyped_storage(),
    lambda x: torch.utils.dlpack.to_dlpack(x), lambda x: memoryview(x.numpy())],
    ids=["tensor", "slice", "view", "numpy", "storage", "dlpack", "memoryview"])
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
