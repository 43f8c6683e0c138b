"""What the ranks do in the tests of weights that travel: the layers of the balancer's tests, in whole numbers."""

import argparse
import os
import signal
import time

import pytest
import slow_programs
import torch
import torch.distributed as dist
from balance_programs import Layers, batch, equal, train
from megatron.core import parallel_state
from rank_programs import EXPERTS, initialize, make_dispatcher
from torch.utils._python_dispatch import TorchDispatchMode

import megatron_patches
from hybrid_ep.errors import BufferFailedError, DeadlineError
from hybrid_ep.weights import ExpertStore
from megatron_patches import weights
from recipes.model import moe_layers

ASKED = {"ranks_per_node": 1, "grouped_gemm": True, "move": "weights"}


def bit_equality(ep):
    """Weights against tokens: whatever is kept, buffered or recomputed, with gradients of autograd or in main_grad."""
    groups = initialize(ep)
    megatron_patches.apply(ranks_per_node=1, grouped_gemm=True)
    tokens, _ = train(groups, ep)
    assert all(torch.equal(4 * x, (4 * x).round()) for x in tokens) and len({float(x.sum()) for x in tokens}) > 9
    own = EXPERTS // ep
    groups_of_two = [(None, 2, {"group": 2})] if ep == 4 else []
    for kept, num_buffers, options in (
        *groups_of_two,
        (own, 2, {}),
        (min(own + 1, EXPERTS), 3, {"main_grad": True}),
        (EXPERTS, 2, {}),
        (min(own + 1, EXPERTS), 2, {"recompute": True}),
    ):
        asked = {"local_experts": kept, "weight_group": options.pop("group", None)}
        megatron_patches.apply(**ASKED, **asked, weight_buffers=num_buffers)
        found, _ = train(groups, ep, at_end=weights.bring_home, **options)
        assert equal(found, tokens), (kept, num_buffers, options)
        megatron_patches.revert()
    return True


def mutants(ep):
    """Broken movers that the comparison must notice; returns those it missed."""
    groups = initialize(ep)
    megatron_patches.apply(ranks_per_node=1, grouped_gemm=True)
    tokens, _ = train(groups, ep)
    add, travelled, again = weights._add, weights.Travelled, weights.FetchAgain
    backward, forward = travelled.backward, weights.GroupWeights.changed

    def doubled(owner, parts):
        add(owner, parts)
        add(owner, parts)

    def one_less(owner, parts):
        add(owner, parts[1:])

    def lost(ctx, *stacks):
        return backward(ctx, *(torch.zeros_like(stack) for stack in stacks))

    def other_order(ctx, *stacks):
        return backward(ctx, *(stack.flip(0) for stack in stacks))

    missed = []
    for name, owner, attribute, broken in (
        ("doubled", weights, "_add", doubled),
        ("a rank forgotten", weights, "_add", one_less),
        ("gradients lost", travelled, "backward", staticmethod(lost)),
        ("other experts' gradients", travelled, "backward", staticmethod(other_order)),
        ("not fetched again", again, "backward", staticmethod(lambda ctx, gradient: (None, gradient))),
        ("not published anew", weights.GroupWeights, "changed", lambda self: None),
    ):
        megatron_patches.apply(**ASKED, timeout_s=5.0)
        before = owner.__dict__[attribute]
        setattr(owner, attribute, broken)
        try:
            differs = not equal(train(groups, ep, at_end=weights.bring_home)[0], tokens)
        except (RuntimeError, DeadlineError, BufferFailedError):
            differs = True
        setattr(owner, attribute, before)
        megatron_patches.revert()
        found = torch.tensor([float(differs)])
        dist.all_reduce(found)
        if not found.item():
            missed.append(name)
    assert backward is travelled.backward and forward is weights.GroupWeights.changed
    megatron_patches.apply(**ASKED)
    assert equal(train(groups, ep, at_end=weights.bring_home)[0], tokens)
    megatron_patches.revert()
    return missed


class Collectives(TorchDispatchMode):
    """Counts the collectives and messages of torch.distributed."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func.namespace == "c10d"
        return func(*args, **(kwargs or {}))


def no_collective(ep):
    """(collectives of a step's forwards and backwards, and of one all_reduce, layers that nobody had asked for)."""
    groups = initialize(ep)
    megatron_patches.apply(**ASKED)
    layers = Layers(groups, ep)
    counted = []
    for step in range(2):
        with Collectives() as seen:
            for micro in range(3):
                hidden, maps, probs = batch(3 * step + micro, groups.ep.rank())
                layers.forward(hidden.requires_grad_(), maps, probs).sum().backward()
        counted.append(seen.count)
        weights.bring_home()
    with Collectives() as seen:
        dist.all_reduce(torch.ones(1))
    missed = [group.prefetcher.statistics.missed for group in weights.live()]
    megatron_patches.revert()
    return counted, seen.count, missed


def gpt(ep, pp, tolerance, options):
    """A GPT under Megatron's DDP, three micro-batches of which two do not synchronise: losses and gradients of moving
    tokens; the same for an evaluation between two steps and after loading. Returns the worst difference."""
    slow_programs.initialize(ep, pp)
    found, losses = {}, {}
    for move in ("tokens", "weights"):
        found[move] = {}
        megatron_patches.apply(timeout_s=60.0, grouped_gemm=True, move=move)
        job = slow_programs.Job(ep, distributed=options.get("distributed", False), **options.get("job", {}))
        job.look = slow_programs.gradients_of(found[move])
        losses[move] = job.train_step(microbatches=3)
        losses[move] += evaluated(job) + job.train_step(microbatches=3)
        assert move == "tokens" or all(group.prefetcher.store.takes_gradients for group in weights.live())
        state = {name: value.clone() for name, value in job.model.state_dict().items() if torch.is_tensor(value)}
        job.model.load_state_dict({name: value * 0.5 for name, value in state.items()}, strict=False)
        losses[move] += evaluated(job)
        if move == "weights":
            moved = [group.prefetcher.statistics for group in weights.live()]
            assert all(one.pulls for one in moved) and len(moved) == 1, moved
            assert all(layer.token_dispatcher._comm_manager.layer.chosen for layer in moe_layers(job.model))
        megatron_patches.revert()
    worst = 0.0
    for name, gradient in found["tokens"].items():
        worst = max(worst, float((found["weights"][name] - gradient).norm() / gradient.norm().clamp(min=1e-12)))
    pairs = list(zip(losses["weights"], losses["tokens"], strict=True))
    assert worst <= tolerance and all(abs(a - b) <= tolerance * abs(b) for a, b in pairs), (worst, pairs)
    return worst


def evaluated(job):
    """The losses of two micro-batches without gradients; none where this stage does not end the model."""
    if not (parallel_state.is_pipeline_first_stage() and parallel_state.is_pipeline_last_stage()):
        return []
    job.net.eval()
    with torch.no_grad():
        return [float((lambda output, loss: loss(output)[0])(*job._forward(iter([i]), job.net))) for i in range(2)]


def evaluation_alone(ep):
    """Forwards without gradients register no memory for them. A training step behind them does, on all ranks."""
    groups = initialize(ep)
    megatron_patches.apply(**ASKED)
    layers = Layers(groups, ep)
    hidden, maps, probs = batch(1, groups.ep.rank())
    with torch.no_grad():
        alone = layers.forward(hidden, maps, probs)
    (group,) = weights.live()
    before = group.prefetcher.store.takes_gradients
    assert torch.equal(layers.forward(hidden.requires_grad_(), maps, probs), alone)
    after = group.prefetcher.store.takes_gradients
    megatron_patches.revert()
    return before, after


def stopped_backward(ep):
    """A backward that an error ends half-way keeps no buffer: weights change after it, and are read as ever. What it
    has brought counts until it is dropped: (layers that it came to, gradients of the next step equal to those of a
    clean one, the same where they were dropped, and where DDP zeroed them)."""
    groups = initialize(ep)
    megatron_patches.apply(**ASKED)
    layers = Layers(groups, ep)
    hidden, maps, probs = batch(1, groups.ep.rank())
    hidden.requires_grad_()
    backward = weights.Travelled.backward

    def step():
        for parameter in layers.parameters():
            parameter.grad = None
        layers.forward(hidden, maps, probs).sum().backward()
        weights.bring_home()
        return [parameter.grad.clone() for parameter in layers.parameters()]

    def stop():
        """The layers that the backward came to, whose second raises."""
        calls = []

        def stops(ctx, *gradients):
            calls.append(ctx.layer.number)
            if len(calls) == 2:
                raise ZeroDivisionError("a backward ends here")
            return backward(ctx, *gradients)

        weights.Travelled.backward = staticmethod(stops)
        with pytest.raises(ZeroDivisionError):
            layers.forward(hidden, maps, probs).sum().backward()
        weights.Travelled.backward = staticmethod(backward)
        return calls

    clean = step()
    calls = stop()
    weights.changed()  # what is published next needs all buffers
    kept = equal(step(), clean)
    stop()
    weights.drop_gradients()
    dropped = equal(step(), clean)
    stop()
    weights.zero_wrapper(lambda ddp: None)(None)
    by_ddp = equal(step(), clean)
    megatron_patches.revert()
    return calls, kept, dropped, by_ddp


def by_flags():
    """What the flags put in place, once they are parsed, and what is left when all is undone."""
    from megatron.core.distributed import DistributedDataParallel
    from megatron.training import arguments

    before = DistributedDataParallel.finish_grad_sync
    megatron_patches.apply(command_line=True)
    parser = arguments.add_megatron_arguments(argparse.ArgumentParser())
    flex = "--moe-token-dispatcher-type flex --moe-flex-dispatcher-backend hybridep --hybrid-ep"
    parser.parse_args([*flex.split(), "--hybrid-ep-grouped-gemm", "--hybrid-ep-move", "weights"])
    patched = [text for text in megatron_patches.status().patched if text.startswith("weights")]
    megatron_patches.revert()
    return patched, DistributedDataParallel.finish_grad_sync is before


def killed_owner(ep):
    """The last rank dies between its backward and the gradients' way home."""
    groups = initialize(ep)
    megatron_patches.apply(**ASKED, timeout_s=3.0)
    layers = Layers(groups, ep)
    hidden, maps, probs = batch(1, groups.ep.rank())
    layers.forward(hidden.requires_grad_(), maps, probs).sum().backward()
    dist.barrier()
    if groups.ep.rank() == ep - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    start = time.monotonic()
    with pytest.raises(DeadlineError, match=f"gradients come late from rank {ep - 1}"):
        weights.bring_home()
    assert time.monotonic() - start < 20
    with pytest.raises(BufferFailedError, match=f"rank {ep - 1}"):
        layers.forward(hidden, maps, probs)
    megatron_patches.revert()  # ends the threads, with nobody to answer
    raise AssertionError("ended cleanly")


def unpublished_owner(ep):
    """Rank 0 asks for weights that the last rank does not publish: the wait names it."""
    groups = initialize(ep)
    megatron_patches.apply(**ASKED, timeout_s=2.0)
    layers = Layers(groups, ep)
    if groups.ep.rank() == ep - 1:
        ExpertStore.publish = lambda self, stacks: time.sleep(6.0)
    hidden, maps, probs = batch(1, groups.ep.rank())
    caught = None
    try:
        layers.forward(hidden, maps, probs)
    except (DeadlineError, RuntimeError) as error:
        caught = error
    if groups.ep.rank() == 0:
        assert isinstance(caught, DeadlineError) and caught.peer == ep - 1, caught
        assert f"not published by rank {ep - 1}" in str(caught)
    dist.barrier()
    megatron_patches.revert()
    return True


def chosen_by_the_roofline(ep):
    """What "auto" chooses, in either direction, and that training goes on by it."""
    groups = initialize(ep)
    megatron_patches.apply(ranks_per_node=1, grouped_gemm=True)
    tokens, _ = train(groups, ep)
    answers = []
    choose = weights.weights_choice.dwdp.choose
    for move in ("tokens", "weights"):
        megatron_patches.apply(ranks_per_node=1, grouped_gemm=True, move="auto", weight_cluster="gb200_nvl72")
        honest = choose
        seen = []

        def fixed(*given, move=move, honest=honest, seen=seen, **options):
            seen.append(honest(*given, **options))
            return type(seen[0])(move, seen[0].tokens_us, seen[0].weights_us)

        weights.weights_choice.dwdp.choose = fixed
        found, _ = train(groups, ep, at_end=weights.bring_home)
        weights.weights_choice.dwdp.choose = choose
        assert equal(found, tokens), move
        answers.append([one.tokens_us > 0 and one.weights_us > 0 for one in seen])
        megatron_patches.revert()
    return answers


def chosen_for_training(ep):
    """What the roofline is asked when an evaluation is the first to run: a training step of all its micro-batches, with
    what the flags keep."""
    from megatron.core import num_microbatches_calculator as micro_batches

    groups = initialize(ep)
    asked = []
    choose = weights.weights_choice.dwdp.choose
    weights.weights_choice.dwdp.choose = lambda *given, **options: asked.append(options) or choose(*given, **options)
    names = ("training", "micro_batches", "held", "resident", "group")
    for known, more in ((False, {}), (True, {"local_experts": EXPERTS - 1, "weight_group": ep})):
        if known:
            micro_batches.init_num_microbatches_calculator(0, None, 12, 1, 2)
        move = {"move": "auto", "weight_cluster": "gb200_nvl72"}
        megatron_patches.apply(ranks_per_node=1, grouped_gemm=True, **move, **more)
        layers = Layers(groups, ep)
        for _, experts in layers.pairs:
            experts.eval()
        hidden, maps, probs = batch(1, groups.ep.rank())
        with torch.no_grad():
            layers.forward(hidden, maps, probs)
        megatron_patches.revert()
    micro_batches.unset_num_microbatches_calculator()
    weights.weights_choice.dwdp.choose = choose
    return [[options[name] for name in names] for options in asked]


def refusals(ep):
    """Unsupported combinations name their flag."""
    groups = initialize(ep)
    megatron_patches.apply(**ASKED)
    for options, flag in (
        ({"after": {"overlap_moe_expert_parallel_comm": True}}, "overlap-moe"),
        ({"after": {"moe_expert_rank_capacity_factor": 1.0}}, "rank-capacity-factor"),
        ({"after": {"fp8": "e4m3"}}, "fp8-format"),
    ):
        with pytest.raises(ValueError, match=flag):
            make_dispatcher("ours", groups, ep, **options)
    dispatcher = make_dispatcher("ours", groups, ep)
    with pytest.raises(ValueError, match="--hybrid-ep-grouped-gemm, not Linear"):
        dispatcher._comm_manager.attach(torch.nn.Linear(2, 2))
    with pytest.raises(RuntimeError, match="attach"):
        dispatcher._comm_manager.dispatch(torch.zeros(1, 4))
    for given, text in (
        ({"weight_group": ep + 1}, f"is {ep + 1}, and groups .* divide the {ep} .*: give one of 1, {ep}$"),
        ({"weight_group": 1, "local_experts": EXPERTS - 1}, f"give {EXPERTS} .* among the 1 that hold all"),
        ({"local_experts": 1}, f"give {EXPERTS // ep} .a rank's share among the {ep} that hold all. to {EXPERTS}"),
        ({"local_experts": EXPERTS + 1}, "local_experts"),
    ):
        megatron_patches.apply(**ASKED, **given)
        with pytest.raises(ValueError, match=text):
            make_dispatcher("ours", groups, ep)
    for bad, text in (
        ({"move": "weights", "grouped_gemm": True, "balance": "exact"}, "does not work with balance"),
        ({"move": "weights"}, "needs grouped_gemm"),
        ({"move": "magic"}, "move is 'magic'"),
        ({"move": "auto", "grouped_gemm": True}, "weight_cluster .* is None with move='auto'"),
        ({"move": "weights", "grouped_gemm": True, "weight_cluster": "gb200_nvl72"}, "only there"),
        ({"move": "auto", "grouped_gemm": True, "weight_cluster": "abacus"}, "use one of h100"),
        ({"local_experts": 3}, "local_experts without move"),
        ({"move": "weights", "grouped_gemm": True, "weight_buffers": 1}, "at least 2"),
        ({"move": "weights", "grouped_gemm": True, "async_finish": True}, "async_finish"),
        ({"move": "weights", "grouped_gemm": True, "dispatch_dtype": "fp8"}, "dispatch_dtype"),
    ):
        with pytest.raises(ValueError, match=text):
            megatron_patches.apply(**bad)
    megatron_patches.revert()
    return True


def refused_by_ddp(ep):
    """What DDP was told is refused behind the first backward: gradients would be reduced before they are home."""
    slow_programs.initialize(ep)
    megatron_patches.apply(timeout_s=60.0, grouped_gemm=True, move="weights")
    job = slow_programs.Job(ep, distributed=False)
    job.net.ddp_config.overlap_param_gather = True
    with pytest.raises(ValueError, match="--overlap-param-gather"):
        job.train_step()
    megatron_patches.revert()
    return True
