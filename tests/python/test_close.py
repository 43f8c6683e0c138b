"""A buffer that is closed while a thread is in a call, and what is kept beyond modes that a caller may be in."""

import threading

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from hybrid_ep.balance.owners import Owners
from hybrid_ep.errors import BufferFailedError
from hybrid_ep.runtime import results
from hybrid_ep.spares import SpareSlots
from hybrid_ep.testing import VirtualWorld


def call(buffer, tokens=5):
    idx = torch.arange(tokens)[:, None] % 4
    return buffer.dispatch_with_permute(hidden=torch.ones(tokens, 64), topk_idx=idx, num_of_experts=4)


@pytest.mark.parametrize("tokens", [5, 500])
def test_a_call_under_way_ends_before_its_buffer_is_closed(tokens):
    """Also one in which the memory grows."""
    world = VirtualWorld(1, 2)
    buffers = world.buffers(64, 8, 2, timeout_s=20)
    inside, closed = threading.Event(), threading.Event()

    def close():
        assert inside.wait(20)
        while not buffers[0]._session._lock.locked():
            pass
        buffers[0].destroy()
        closed.set()

    def run(rank, group):
        call(buffers[rank])
        inside.set()
        if rank == 0:
            threading.Thread(target=close, daemon=True).start()
        else:
            closed.wait(20)
        got = len(call(buffers[rank], tokens)[0])
        if rank == 0:
            with pytest.raises(BufferFailedError, match="was destroyed"):
                call(buffers[0])
            assert buffers[0]._session.engine is None and not buffers[0].is_usable
        return got

    assert sum(world.run(run)) == 2 * tokens
    assert closed.is_set()


def test_an_evaluation_leaves_nothing_that_training_cannot_use():
    owners = Owners(4, 2)
    owners.assign([1, 0, 3, 2])
    with torch.inference_mode():
        owners.columns(0, torch.device("cpu"))
    probs = torch.rand(3, 4, requires_grad=True)
    torch.zeros_like(probs).index_copy(1, owners.columns(0, torch.device("cpu")), probs).sum().backward()
    assert probs.grad is not None

    def slots(rank, group):
        with torch.inference_mode():
            made = SpareSlots(group, spare_slots=1, num_owners=2, shapes=[(8, 8)], dtype=torch.float32)
        return [x.is_inference() for x in (*made.weights, *made.gradients)]

    assert VirtualWorld(1, 1).run(slots) == [[False, False]]


def test_memory_is_none_of_a_mode_that_has_none():
    buffer = VirtualWorld(1, 1).buffers(64, 8, 4, timeout_s=10, arena_mib=0)[0]
    results._nothing.cache_clear()  # as in a process that has made no result yet
    with FakeTensorMode(), pytest.raises(ValueError, match="FakeTensor now: call outside of such a mode"):
        buffer.empty(3, 8, torch.float16)
    assert type(buffer.empty(3, 8, torch.float16)) is torch.Tensor
