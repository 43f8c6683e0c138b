"""torch's selective activation checkpointing around our operators: what they make for themselves is not counted among
the operations that the recomputed forward must repeat."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from hybrid_ep import functional, recording
from hybrid_ep.moe import grouped_mm, probing
from hybrid_ep.testing import VirtualWorld

aten = torch.ops.aten
HIDDEN, EXPERTS, TOPK = 1024, 4, 2


def saving(*operations):
    """What checkpoint() takes as context_fn: results of these are kept, all else is made again."""
    return {"use_reentrant": False, "context_fn": lambda: create_selective_checkpoint_contexts(list(operations))}


class Log(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.seen.append(function)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("in_flight", [1, 8])
def test_the_arena_may_be_fuller_when_a_forward_is_run_again(in_flight):
    """Eight micro-batches whose first layer is kept: rows that had room in the forward have none when it runs again."""
    tokens = 512
    (buffer,) = VirtualWorld(1, 1).buffers(HIDDEN, tokens, EXPERTS, timeout_s=20)
    random = torch.Generator().manual_seed(0)
    chosen = torch.stack([torch.randperm(EXPERTS, generator=random)[:TOPK] for _ in range(tokens)])
    weights = torch.rand(tokens, TOPK, generator=random)

    def layer(x):
        rows, probs, _, _, handle = functional.dispatch_with_permute(
            buffer, x, topk_idx=chosen, topk_weights=weights, num_of_experts=EXPERTS
        )
        outputs = torch.sin(rows) * probs[:, None]
        return torch.sin(x + functional.combine_with_unpermute(buffer, outputs, handle)[0])

    inputs = [torch.randn(tokens, HIDDEN, generator=random).requires_grad_() for _ in range(in_flight)]
    outs = [checkpoint(layer, layer(x), **saving(aten.mm.default)) for x in inputs]
    for x, out in zip(inputs, outs, strict=True):
        out.sum().backward()
        found, x.grad = x.grad, None
        layer(layer(x)).sum().backward()
        assert torch.equal(found, x.grad)
    copied = buffer.traffic()["copied_rows"]
    assert (copied > 0) == (in_flight > 1), "the arena is as full in either run: the test says nothing"


def test_a_forward_that_goes_by_its_handle_when_it_is_run_again():
    (buffer,) = VirtualWorld(1, 1).buffers(64, 16, EXPERTS, timeout_s=20)
    x, probs = torch.randn(6, 64).requires_grad_(), torch.rand(6, EXPERTS).requires_grad_()
    chosen, handles = torch.rand(6, EXPERTS) < 0.5, []

    class Dispatch(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, probs):
            known = {"handle": handles[0]} if handles else {"routing_map": chosen}
            rows, weights, _, _, handle = buffer.dispatch_with_permute(hidden=x, probs=probs, **known)
            handles.append(handle)
            ctx.handle = handle
            return rows, weights

        @staticmethod
        def backward(ctx, grad, grad_weights):
            return buffer.combine_with_unpermute(hidden=grad, probs=grad_weights, handle=ctx.handle)

    def layer(x, probs):
        rows, weights = Dispatch.apply(x, probs)
        return torch.tanh(rows) * weights[:, None]

    checkpoint(layer, x, probs, **saving(aten.mm.default)).sum().backward()
    assert len(handles) == 2
    found = x.grad, probs.grad
    x.grad = probs.grad = None
    handles.clear()
    layer(x, probs).sum().backward()
    assert all(map(torch.equal, found, (x.grad, probs.grad)))


@pytest.fixture
def unprobed(monkeypatch):
    monkeypatch.setattr(probing, "_known", {})


@pytest.mark.parametrize("saved", [aten.max.default, aten._grouped_mm.default, aten.mm.default, aten.abs.default])
def test_a_probe_in_the_first_forward_is_no_part_of_it(unprobed, saved):
    """The layer has operations of the probe's, too, whose kept results would be the probe's."""
    x, w = torch.randn(6, 16).requires_grad_(), (torch.randn(4, 16, 16) / 4).requires_grad_()
    v, ends = torch.randn(16, 16).requires_grad_(), torch.tensor([1, 1, 4, 6])

    def layer(x, w, v):
        rows = torch.tanh(grouped_mm(x, w, ends))
        return (rows / rows.detach().abs().max()) @ v

    out = checkpoint(layer, x, w, v, **saving(saved)).square().sum()
    assert probing._known, "nothing was probed: the test says nothing"
    found = torch.autograd.grad(out, (x, w, v))
    assert all(map(torch.equal, found, torch.autograd.grad(layer(x, w, v).square().sum(), (x, w, v))))


@pytest.mark.parametrize("place", [False, True])
@pytest.mark.parametrize("cut", [4, 2])
@pytest.mark.parametrize("rows", [6, 9])
def test_a_kept_product_stays_as_it_was_made(rows, cut, place):
    """With rows behind the last group and without any; weights in one stack and in two; with a place for the result."""
    x, w = torch.randn(rows, 16).requires_grad_(), torch.randn(4, 16, 16).requires_grad_()
    ends = torch.tensor([1, 1, 4, 6])

    def layer(x, w):
        out = torch.empty(rows, 16) if place else None
        return torch.tanh(grouped_mm(x, w.split(cut), ends, backend="torch", out=out)).square()

    out = checkpoint(layer, x, w, **saving(aten._grouped_mm.default))
    found = torch.autograd.grad(out.sum(), (x, w))
    assert not out[6:].any()
    assert all(map(torch.equal, found, torch.autograd.grad(layer(x, w).sum(), (x, w))))


def test_other_modes_still_see_what_it_does_not():
    with Log() as outside, create_selective_checkpoint_contexts([aten.mm.default])[0], Log() as inside:
        assert recording.recorded()
        with recording.unrecorded():
            assert not recording.recorded()
            torch.zeros(1)
        assert recording.recorded()
        torch.ones(1)
    for log in (outside, inside):
        assert len(log.seen) == 2
    with Log():
        assert not recording.recorded()
    assert not recording.recorded()
