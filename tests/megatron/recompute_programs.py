"""What the ranks of the recompute tests do: train one small GPT with handles reused, exchanged again, and without
recompute."""

import gc
from unittest import mock

import pytest
import torch
from megatron.core.transformer.moe.moe_layer import MoELayer
from slow_programs import Job, difference, initialize

import hybrid_ep
import megatron_patches
from megatron_patches import recompute, settings
from recipes.model import moe_layers

MICRO_BATCHES, STEPS = 4, 2


class Counting(hybrid_ep.HybridEPBuffer):
    """Counts what is exchanged: calls that route, calls that go by a handle, combines."""

    calls = {"routed": 0, "by_handle": 0, "combined": 0}

    def dispatch_with_permute(self, *, handle=None, **keywords):
        Counting.calls["routed" if handle is None else "by_handle"] += 1
        return super().dispatch_with_permute(handle=handle, **keywords)

    def combine_with_unpermute(self, **keywords):
        Counting.calls["combined"] += 1
        return super().combine_with_unpermute(**keywords)


def train(ep, mode, options, balance="off", before=None):
    """((losses, logical state), calls of one layer and micro-batch, job). before(job) sees the job before it trains."""
    megatron_patches.apply(timeout_s=60.0, recompute=mode, buffer_class=Counting, balance=balance)
    try:
        job = Job(ep, **options)
        if before is not None:
            before(job)
        Counting.calls.update(dict.fromkeys(Counting.calls, 0))
        losses = [job.train_step(MICRO_BATCHES) for _ in range(STEPS)]
        times = len(moe_layers(job.model)) * MICRO_BATCHES * STEPS
        assert not recompute._stack()
        return (losses, job.logical()), {name: calls / times for name, calls in Counting.calls.items()}, job
    finally:
        megatron_patches.revert()


def full(method="uniform", layers=1):
    return {"recompute_granularity": "full", "recompute_method": method, "recompute_num_layers": layers}


MODULES = {"recompute_granularity": "selective", "recompute_modules": ["moe"]}


def same_training(ep, pp, after, combines, balance="off", **model):
    """Bit for bit what no recompute gives, with the exchanges that are left. combines: of a layer and micro-batch."""
    initialize(ep, pp)
    plain, once, _ = train(ep, "reuse", model, balance)
    assert once == {"routed": 1, "by_handle": 1, "combined": 2}
    repeated, twice, _ = train(ep, "repeat", {**model, "after": after}, balance)
    assert twice == {"routed": 2, "by_handle": 1, "combined": 3}
    reused, calls, _ = train(ep, "reuse", {**model, "after": after}, balance)
    assert calls == {"routed": 1, "by_handle": 2, "combined": combines}, calls
    assert difference(plain, repeated) is None and difference(plain, reused) is None
    return True


def multi_token_prediction(ep, after):
    """A layer that predicts further tokens ends in a norm, which reads the sums of its MoE layer: these are summed."""
    return same_training(ep, 1, after, 2 + 1 / 3, mtp_layers=1)  # of three MoE layers one is such a layer


def broken(ep):
    """What is wrong in the pairing, in the router or about who reads a result is no silent difference."""
    initialize(ep)
    with pytest.raises(RuntimeError, match="chose other experts"):
        train(ep, "reuse", {"after": MODULES}, before=_random_router)
    train(ep, "repeat", {"after": MODULES}, before=_random_router)

    class Shared(recompute.Replayed):
        everyone: list = []  # micro-batches and layers mixed up, as a queue in the wrong order would

        def __init__(self, function):
            super().__init__(function)
            self.kept = self.everyone

    with mock.patch.object(recompute, "Replayed", Shared), pytest.raises(RuntimeError, match="other (order|experts)"):
        train(ep, "reuse", {"after": full()})
    with mock.patch.object(recompute, "dispatched", _never_read), pytest.raises(RuntimeError, match="other experts"):
        train(ep, "reuse", {"after": full(layers=2)})  # sums that the next layer reads: its router meets NaN
    return True


def kept_no_longer_than_needed(ep):
    """Handles go with their second run, and with the graph of a forward that has none."""
    initialize(ep)
    most = []

    def count(job):
        most.append(_alive())
        job.net.train()
        with torch.no_grad():  # as who computes log-probabilities of a model in training mode
            job._forward(iter([0]), job.net)
        assert _alive() == 0

    honest = recompute.dispatched

    def counting(*arguments):
        result = honest(*arguments)
        most.append(_alive())
        return result

    with mock.patch.object(recompute, "dispatched", counting):
        train(ep, "reuse", {"after": full()}, before=count)
    assert max(most) == 2 and _alive() == 0  # two layers of the one micro-batch in flight
    return True


def _alive():
    gc.collect()
    return sum(isinstance(thing, recompute.Kept) for thing in gc.get_objects())


_honest = recompute.dispatched


def _never_read(manager, first, *rest):
    _honest(manager, first, *rest)
    return first is None


def _random_router(job):
    for layer in moe_layers(job.model):
        assert isinstance(layer, MoELayer)
        honest, generator = layer.router.forward, torch.Generator().manual_seed(3)

        def forward(x, *rest, honest=honest, generator=generator, **keywords):
            probs, chosen = honest(x, *rest, **keywords)
            order = torch.randperm(chosen.shape[0], generator=generator)
            return probs[order], chosen[order]

        layer.router.forward = forward


def transformer_engine(ep):
    """Its checkpoint, where Megatron has one, is given the same function; a stand-in with its arguments."""
    from megatron.core.transformer.moe import moe_layer
    from torch.utils.checkpoint import checkpoint

    seen = []

    def te_checkpoint(function, distribute, tracker, group, *arguments):
        seen.append(type(function).__name__)
        return checkpoint(function, *arguments, use_reentrant=True)

    initialize(ep)
    with mock.patch.object(moe_layer, "te_checkpoint", te_checkpoint, create=True):
        megatron_patches.apply(timeout_s=60.0, buffer_class=Counting)
        assert moe_layer.te_checkpoint is not te_checkpoint
        function, x = torch.sin, torch.ones(2, requires_grad=True)
        moe_layer.te_checkpoint(function, False, None, None, x).sum().backward()
        assert seen == ["Replayed"] and torch.equal(x.grad, torch.cos(torch.ones(2)))
        megatron_patches.revert()
        assert moe_layer.te_checkpoint is te_checkpoint
    return True


def fingerprints():
    """Any change of a map shows, and only changes do; the probabilities of a device that is not waited for are NaN."""
    generator = torch.Generator().manual_seed(0)
    for shape in ((0, 8), (1, 1), (7, 13), (64, 32), (300, 256)):
        chosen = torch.rand(shape, generator=generator) < 0.1
        found = {recompute.fingerprint(chosen).item()}
        assert recompute.fingerprint(chosen.t().contiguous().t()).item() in found
        others = []
        for place in torch.randperm(chosen.numel(), generator=generator)[:200].tolist():
            other = chosen.clone().view(-1)
            other[place] ^= True
            others.append(other.view(shape))
        rows = torch.randperm(shape[0], generator=generator)
        swaps = [chosen[rows], chosen.roll(1, 1)] if shape[0] > 2 else []
        maps = [other for other in [*others, *swaps] if not torch.equal(other, chosen)]
        found |= {recompute.fingerprint(other).item() for other in maps}
        assert len(found) == len(maps) + 1
    first = recompute.Kept(None, (), recompute.fingerprint(chosen), None)
    probs = torch.rand(chosen.shape)
    assert torch.equal(recompute.checked(first, chosen, probs, look=False), probs)
    assert recompute.checked(first, ~chosen, probs, look=False).isnan().all()
    with pytest.raises(RuntimeError, match="chose other experts"):
        recompute.checked(first, ~chosen, probs, look=True)
    with pytest.raises(ValueError, match="recompute is 'sometimes': choose one of reuse, repeat"):
        settings.Settings.of(recompute="sometimes")
    return True
