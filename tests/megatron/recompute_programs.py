"""What the ranks of the recompute tests do: train one small GPT with handles reused, exchanged again, and without
recompute."""

import copy
import gc
from types import SimpleNamespace
from unittest import mock

import pytest
import rank_programs
import torch
from megatron.core import parallel_state
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.transformer_layer import TransformerLayer
from slow_programs import Job, difference, initialize
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

import hybrid_ep
import megatron_patches
from hybrid_ep import functional
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


def train(ep, mode, options, balance="off", before=None, **wanted):
    """((losses, logical state), calls of one layer and micro-batch, job). before(job) sees the job before it trains.
    wanted: more that apply() is told."""
    megatron_patches.apply(timeout_s=60.0, recompute=mode, buffer_class=Counting, balance=balance, **wanted)
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


def same_training(ep, pp, after, combines, balance="off", config=None, wanted=None, **model):
    """Bit for bit what no recompute gives, with the exchanges that are left. combines: of a layer and micro-batch.
    config: of Megatron, with recompute and without. wanted: of apply()."""
    initialize(ep, pp)
    config, wanted = config or {}, wanted or {}
    recomputed = {**model, "after": {**config, **after}}
    plain, once, _ = train(ep, "reuse", {**model, "after": config}, balance, **wanted)
    assert once == {"routed": 1, "by_handle": 1, "combined": 2}
    repeated, twice, _ = train(ep, "repeat", recomputed, balance, **wanted)
    assert twice == {"routed": 2, "by_handle": 1, "combined": 3}
    reused, calls, _ = train(ep, "reuse", recomputed, balance, **wanted)
    assert calls == {"routed": 1, "by_handle": 2, "combined": combines}, calls
    assert difference(plain, repeated) is None and difference(plain, reused) is None
    return True


CAPACITY = {"moe_expert_capacity_factor": 1.0, "moe_token_drop_policy": "probs"}


def same_training_of_shapes(ep, after, combines):
    """What a dispatch is told besides its routing: rows of a capacity, of padding and of a budget, a quantised payload,
    experts in stacks."""
    for config, wanted in (
        (CAPACITY, {}),
        ({**CAPACITY, "moe_pad_expert_input_to_capacity": True}, {}),
        ({}, {"dispatch_dtype": "mxfp8"}),
        ({}, {"grouped_gemm": True}),
        ({"moe_expert_rank_capacity_factor": 4.0}, {"grouped_gemm": True}),  # which skip rows behind the last expert's
    ):
        same_training(ep, 1, after, combines, config=config, wanted=wanted)
        parallel_state.destroy_model_parallel()
    return True


def hooks_are_given_sums(ep):
    """What a forward hook is given in the second run are sums, whichever module or all it hangs on; without one they
    are left out, and so they are in a class of Megatron's name that is not Megatron's."""
    initialize(ep)
    seen = []

    def look(module, _, output):
        if isinstance(module, (MoELayer, TransformerLayer)):
            seen.append(bool(output[0].isfinite().all()))

    def layers(job):
        return [layer.register_forward_hook(look) for layer in job.model.decoder.layers]

    def experts(job):
        return [layer.register_forward_hook(look) for layer in moe_layers(job.model)]

    def anywhere(_):
        return [torch.nn.modules.module.register_module_forward_hook(look)]

    for register in (layers, experts, anywhere):
        handles = []

        def hang(job, register=register, handles=handles):
            handles.extend(register(job))

        _, calls, _ = train(ep, "reuse", {"after": full()}, before=hang)
        for handle in handles:
            handle.remove()
        assert calls == {"routed": 1, "by_handle": 2, "combined": 3}, (register.__name__, calls)
        assert seen and all(seen), register.__name__
        seen.clear()
    own = type("MoELayer", (MoELayer,), {"__module__": "elsewhere"})
    for cls, plain in ((MoELayer, True), (own, False)):
        module = cls.__new__(cls)
        torch.nn.Module.__init__(module)
        assert recompute._is_plain(module, "MoELayer") == plain
    return True


def pairing():
    """Runs that are not like the first: none takes a handle of another dispatch, none is short of one in silence."""
    config, map_ = SimpleNamespace(moe_latent_size=1), torch.ones(1, 8, dtype=torch.bool)
    one, other = SimpleNamespace(config=config), SimpleNamespace(config=config)

    def dispatch(manager, found):
        first = recompute.first_run(manager)
        recompute.dispatched(manager, first, (len(found),), map_, None)
        found.append(None if first is None else first.handle[0])

    def run(*runs):
        """For each run of one function: the dispatches, by whose handles they go, or what was raised."""
        wanted, outcomes = iter(runs), []

        def function():
            found = []
            outcomes.append(found)
            for manager in next(wanted):
                if manager is None:
                    raise KeyError("as the function itself may")
                dispatch(manager, found)

        replayed = recompute.Replayed(function)
        for _ in runs:
            try:
                replayed()
            except (RuntimeError, KeyError) as error:
                outcomes[-1].append(type(error))
            assert not recompute._stack()
        return outcomes

    new, two = [None, None], [one, other]
    assert run(two, two, two, two) == [new, [0, 1], new, [0, 1]]
    assert run(two, [one], two, two) == [new, [0, RuntimeError], new, [0, 1]], "fewer dispatches than the first run"
    assert run(two, [], two) == [new, [RuntimeError], new]
    assert run(two, [other, one]) == [new, [RuntimeError]]
    assert run([one, None], two, two) == [[None, KeyError], new, [0, 1]], "tried again after an error"
    assert run(two, [one, None], two, two) == [new, [0, KeyError], new, [0, 1]]

    def early_stop():
        found = []

        def function(x):
            dispatch(one, found)
            y = x.sin()  # saves x: the last thing that a backward needs
            dispatch(other, found)
            return y

        x = torch.ones(2, requires_grad=True)
        y = checkpoint(recompute.Replayed(function), x, use_reentrant=False)
        for times in (1, 2):
            y.sum().backward(retain_graph=True)
            assert torch.equal(x.grad, times * torch.cos(torch.ones(2)))
        return found

    assert early_stop() == [None, None, 0, None], "ends a second run before its last dispatch; a third routes anew"
    with set_checkpoint_early_stop(False):
        assert early_stop() == [None, None, 0, 1, None, None]
    return True


def graphs_exchange_sums(ep):
    """A compiled combine is told nothing that its graphs refuse, whoever reads its sums."""
    groups = rank_programs.initialize(ep)
    megatron_patches.apply(timeout_s=60.0)
    dispatcher = rank_programs.make_dispatcher("ours", groups, ep)
    manager, told = dispatcher._comm_manager, []

    def combine(buffer, rows, handle, **keywords):
        told.append(keywords)
        return rows, None

    for compiling in (False, True):
        hidden, routing_map, probs = rank_programs.route(8, torch.distributed.get_rank())
        manager.setup_metadata(routing_map, probs)
        rows = manager.dispatch(hidden.view(8, -1))
        manager.output_is_read = False
        with (
            mock.patch.object(torch.compiler, "is_compiling", return_value=compiling),
            mock.patch.object(functional, "combine_with_unpermute", combine),
        ):
            manager.combine(rows)
    assert told == [{"backward_only": True}, {}]
    megatron_patches.revert()
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


def transformer_engine(ep, after):
    """Its checkpoint, which MoE layers take for fp8, is given the same function: same training, exchanged once. A
    stand-in with its arguments; only the layers' own configuration says fp8, so that no kernel is asked for it."""
    from megatron.core.transformer.moe import moe_layer

    seen = []

    def te_checkpoint(function, distribute, tracker, group, *arguments):
        seen.append(type(function).__name__)
        return checkpoint(function, *arguments, use_reentrant=True)

    def say_fp8(job):
        for layer in moe_layers(job.model):
            layer.config = copy.copy(layer.config)
            layer.config.fp8 = "e4m3"

    initialize(ep)
    with mock.patch.object(moe_layer, "te_checkpoint", te_checkpoint, create=True):
        plain, _, _ = train(ep, "reuse", {})
        assert not seen
        reused, calls, job = train(ep, "reuse", {"after": after}, before=say_fp8)
        assert calls == {"routed": 1, "by_handle": 2, "combined": 2}, calls
        assert seen == ["Replayed"] * len(moe_layers(job.model)) * MICRO_BATCHES * STEPS
        assert difference(plain, reused) is None
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
