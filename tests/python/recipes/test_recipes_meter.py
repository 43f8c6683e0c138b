"""The dispatch meter: it counts forward and backward time, rows of experts, and changes no number."""

import time

import pytest
import torch

from recipes.dispatch_meter import DispatchMeter, imbalance

FORWARD_S, BACKWARD_S, EXPERTS_S = 0.01, 0.03, 0.3


class _Slow(torch.autograd.Function):
    """Doubles its input, slowly both ways."""

    @staticmethod
    def forward(ctx, x):
        time.sleep(FORWARD_S)
        return 2 * x

    @staticmethod
    def backward(ctx, grad):
        time.sleep(BACKWARD_S)
        return 2 * grad


class _Dispatcher:
    """The six methods of a Megatron token dispatcher; only token_dispatch and token_combine take time."""

    def dispatch_preprocess(self, hidden, routing_map, probs):
        return hidden, probs

    def token_dispatch(self, hidden, probs):
        return _Slow.apply(hidden), probs

    def dispatch_postprocess(self, hidden, probs):
        return hidden, torch.tensor([3]), probs.sum(-1)

    def combine_preprocess(self, hidden):
        return hidden

    def token_combine(self, hidden):
        return _Slow.apply(_Slow.apply(hidden))

    def combine_postprocess(self, hidden):
        return hidden


class _Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.token_dispatcher = _Dispatcher()

    def forward(self, hidden, routing_map, probs):
        d = self.token_dispatcher
        hidden, probs = d.dispatch_preprocess(hidden, routing_map, probs)
        hidden, counts, probs = d.dispatch_postprocess(*d.token_dispatch(hidden, probs))
        assert counts.tolist() == [3]
        time.sleep(EXPERTS_S)  # nobody's dispatch time
        hidden = hidden * probs.unsqueeze(-1)
        return d.combine_postprocess(d.token_combine(d.combine_preprocess(hidden)))


def _inputs():
    torch.manual_seed(0)
    hidden, probs = torch.randn(3, 4, requires_grad=True), torch.rand(3, 2, requires_grad=True)
    return hidden, torch.tensor([[True, False], [True, True], [True, False]]), probs


def test_times_of_forward_and_backward_and_rows():
    layer = _Layer()
    meter = DispatchMeter([layer], num_experts=2)
    hidden, routing_map, probs = _inputs()
    layer(hidden, routing_map, probs).sum().backward()
    seconds, load = meter.take()
    # One slow step in dispatch, two in combine. Sleeping takes at least as long as asked;
    # with the experts' time in it, either would be longer still.
    once = FORWARD_S + BACKWARD_S
    assert once <= seconds["dispatch"] < EXPERTS_S
    assert 2 * once <= seconds["combine"] < EXPERTS_S
    assert load.tolist() == [[3, 1]]
    assert meter.take()[0] == {"dispatch": 0.0, "combine": 0.0}


def test_the_model_does_not_notice():
    plain, metered = _Layer(), _Layer()
    DispatchMeter([metered], num_experts=2)
    results = []
    for layer in (plain, metered):
        hidden, routing_map, probs = _inputs()
        out = layer(hidden, routing_map, probs)
        out.square().sum().backward()
        results.append((out.detach(), hidden.grad, probs.grad))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_evaluation_is_not_counted():
    layer = _Layer().eval()
    meter = DispatchMeter([layer], num_experts=2)
    layer(*_inputs())
    seconds, load = meter.take()
    assert seconds == {"dispatch": 0.0, "combine": 0.0} and load.sum() == 0


def test_imbalance():
    assert imbalance(torch.tensor([4, 4, 4, 4])).item() == 0
    assert imbalance(torch.tensor([[8, 0, 0, 0], [6, 4, 4, 2]])).tolist() == pytest.approx([3.0, 0.5])
    assert imbalance(torch.zeros(4)).item() == 0
