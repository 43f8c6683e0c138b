"""Layers with exact balancing whose passes do not go from their beginning to their end: gradients of some inputs alone,
errors in a backward, models that are dropped. What is computed next is what it would be without.

Two ranks are threads; managers, experts and kernels are those of training on hosts, the router is two tensors."""

import gc
import threading
import weakref
from types import SimpleNamespace

import pytest
import torch

from hybrid_ep.moe import grouped
from hybrid_ep.testing import VirtualWorld
from megatron_patches import balance, balance_kernels, buffers, experts, settings

pytestmark = pytest.mark.version_free
H, F, OWNED, T, K, NUM_LAYERS, RANKS = 64, 32, 2, 40, 2, 3, 2


class Experts(experts.GroupedExperts):
    """Megatron's way to make them needs its process groups."""

    def __init__(self, group, config, number):
        torch.nn.Module.__init__(self)
        self.config, self.kind, self.num_local_experts = config, "swiglu", OWNED
        self.backend, self.ep_group = settings.current().experts.backend, group
        random = torch.Generator().manual_seed(100 * number + group.rank())
        for name, shape in (("weight1", (OWNED, 2 * F, H)), ("weight2", (OWNED, H, F))):
            weight = torch.randn(shape, generator=random).mul_(0.2).bfloat16()
            self.register_parameter(name, torch.nn.Parameter(weight))
            getattr(self, name).main_grad = torch.zeros(shape)


class Layers:
    """Of one rank. Experts of the first are hot."""

    def __init__(self, group):
        config = SimpleNamespace(
            num_moe_experts=OWNED * RANKS,
            moe_router_topk=K,
            hidden_size=H,
            params_dtype=torch.bfloat16,
            cuda_graph_impl="none",
            moe_expert_capacity_factor=None,
            moe_pad_expert_input_to_capacity=False,
            moe_apply_probs_on_input=False,
            fp8=None,
        )
        random = torch.Generator().manual_seed(group.rank())
        self.managers, self.experts, self.routed = [], [], []
        for number in range(NUM_LAYERS):
            self.managers.append(balance.ExactManager(group, OWNED, OWNED * RANKS, K, config))
            self.experts.append(Experts(group, config, number))
            self.managers[-1].attach(self.experts[-1])
            scores = torch.rand(T, OWNED * RANKS, generator=random)
            scores[:, :OWNED] += 0.7
            chosen = torch.zeros(scores.shape, dtype=torch.bool).scatter_(1, scores.topk(K).indices, True)
            self.routed.append((chosen, scores * chosen))
        self.hidden = torch.randn(T, H, generator=random).bfloat16().requires_grad_()
        self.gradient = torch.randn(T, H, generator=random).bfloat16()
        self.parameters = [p for one in self.experts for p in one.parameters()]

    def forward(self):
        x = self.hidden
        for manager, expert, (map_, probs) in zip(self.managers, self.experts, self.routed, strict=True):
            manager.setup_metadata(map_, probs)
            rows, row_probs = manager.get_permuted_hidden_states_by_experts(manager.dispatch(x))
            x = x + manager.combine(expert(rows, manager.get_number_of_tokens_per_expert(), row_probs)[0])
        return x

    def step(self):
        """Everything that a backward makes."""
        self.clear()
        self.forward().backward(self.gradient)
        assert sum(manager.last_plan.num_copies for manager in self.managers) > 0
        return [self.hidden.grad.clone(), *(x.clone() for p in self.parameters for x in (p.grad, p.main_grad))]

    def clear(self):
        for parameter in (self.hidden, *self.parameters):
            parameter.grad = None
        for parameter in self.parameters:
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
        assert all(p.grad is None and not p.main_grad.any() for p in layers.parameters)
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

    def fails(self, work):
        if getattr(here, "fails", False):
            raise MemoryError("planted")
        return inner(self, work)

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


def test_a_model_that_is_dropped_is_freed(ranks):
    def work(layers):
        layers.step()
        layers.forward()  # nobody goes back
        return [weakref.ref(x) for x in (*layers.managers, *layers.parameters)]

    found = [ref for of_rank in ranks(work) for ref in of_rank]
    for _ in range(4):
        gc.collect()
    assert not [ref() for ref in found if ref() is not None]
