"""Layers with exact balancing whose passes do not go from their beginning to their end: gradients of some inputs alone,
errors in a backward, models that are dropped. What is computed next is what it would be without.

Two ranks are threads, whose layers are those of `exact_layers`."""

import functools
import gc
import threading
import weakref

import exact_layers
import pytest
import torch
from torch.utils.checkpoint import checkpoint

from hybrid_ep.moe import grouped
from hybrid_ep.testing import VirtualWorld
from megatron_patches import balance_kernels, buffers, settings

pytestmark = pytest.mark.version_free
NUM_LAYERS, RANKS = 3, 2


class Layers(exact_layers.Layers):
    def __init__(self, group):
        super().__init__(group, NUM_LAYERS)
        self.put(1)

    def step(self):
        """Everything that a backward makes."""
        self.clear()
        self.forward().backward(self.gradient)
        assert sum(manager.last_plan.num_copies for manager in self.managers) > 0
        return [self.hidden.grad.clone(), *(x.clone() for p in self.parameters.values() for x in (p.grad, p.main_grad))]

    def clear(self):
        for tensor in (self.hidden, *self.probs, *self.parameters.values()):
            tensor.grad = None
        for parameter in self.parameters.values():
            parameter.main_grad.zero_()


def same(a, b):
    return all(map(torch.equal, a, b))


@pytest.fixture
def ranks(monkeypatch):
    """ranks(work, push): [work(layers)] of both ranks."""
    monkeypatch.setattr(buffers, "num_nodes", lambda group, wanted: 1)
    wanted = {"balance": "exact", "grouped_gemm": True, "ranks_per_node": RANKS, "balance_epsilon": 0.0}
    before = settings.configure(settings.Settings.of(**wanted))
    try:
        yield lambda work: VirtualWorld(1, RANKS).run(lambda rank, group: work(Layers(group)))
    finally:
        settings.configure(before)
        buffers.release()
        balance_kernels.release()


def test_gradients_of_an_input_alone_leave_parameters_as_they_are(ranks):
    def work(layers):
        want = layers.step()
        layers.clear()
        (hidden,) = torch.autograd.grad(layers.forward(), [layers.hidden], layers.gradient)
        assert torch.equal(hidden, want[0])
        assert all(p.grad is None and not p.main_grad.any() for p in layers.parameters.values())
        return same(layers.step(), want)

    assert ranks(work) == [True] * RANKS


@pytest.mark.parametrize("at", [0, 1, 2, 3])
def test_a_backward_that_an_error_ends_is_followed_by_others(ranks, monkeypatch, at):
    """Where weight gradients of the last layer are made: of either product the slots' or the owners'."""
    here, inner = threading.local(), grouped._weight_gradients

    def fails(*arguments):
        here.left = getattr(here, "left", -1) - 1
        if here.left == -1:
            raise ArithmeticError("planted")
        return inner(*arguments)

    monkeypatch.setattr(grouped, "_weight_gradients", fails)

    def work(layers):
        want = layers.step()
        here.left = at + 1
        with pytest.raises(ArithmeticError, match="planted"):
            layers.forward().backward(layers.gradient)
        here.left = -1
        return same(layers.step(), want) and same(layers.step(), want)

    assert ranks(work) == [True] * RANKS


@pytest.mark.parametrize("in_backward", [False, True])
def test_a_push_that_an_error_ends_is_made_again(ranks, monkeypatch, in_backward):
    here, inner = threading.local(), balance_kernels.KernelCloneExperts.start_push

    def fails(self, *arguments):
        if getattr(here, "fails", False):
            raise MemoryError("planted")
        return inner(self, *arguments)

    monkeypatch.setattr(balance_kernels.KernelCloneExperts, "start_push", fails)

    def work(layers):
        want = layers.step()
        layers.clear()
        out = layers.forward() if in_backward else None
        here.fails = True
        with pytest.raises(MemoryError, match="planted"):
            out.backward(layers.gradient, retain_graph=True) if in_backward else layers.forward()
        here.fails = False
        return same(layers.step(), want)

    assert ranks(work) == [True] * RANKS


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_experts_that_run_again_without_their_dispatch_are_refused(ranks, use_reentrant):
    """By then the slots may be another micro-batch's, and the latest plan another's."""

    def work(layers):
        want = layers.step()
        alone = [expert.forward for expert in layers.experts]
        for expert, forward in zip(layers.experts, alone, strict=True):
            again = functools.partial(checkpoint, forward, use_reentrant=use_reentrant)
            setattr(expert, "forward", again)  # noqa: B010 - as checkpoint_wrapper does
        with pytest.raises(RuntimeError, match="checkpoint the whole MoE layer, not its experts alone"):
            layers.forward().backward(layers.gradient)
        for expert, forward in zip(layers.experts, alone, strict=True):
            setattr(expert, "forward", forward)  # noqa: B010
        return same(layers.step(), want)

    assert ranks(work) == [True] * RANKS


def test_a_model_that_is_dropped_is_freed(ranks):
    def work(layers):
        layers.step()
        layers.forward()  # nobody goes back
        return [weakref.ref(x) for x in (*layers.managers, *layers.parameters.values())]

    found = [ref for of_rank in ranks(work) for ref in of_rank]
    for _ in range(4):
        gc.collect()
    assert not [ref() for ref in found if ref() is not None]
