"""What the ranks do in the tests of experts that are frozen, or whose parameters are replaced: the layers of the
balancer's tests, in whole numbers, against the same layers without balancing and with tokens that move."""

import pytest
import slow_programs
import torch
from balance_programs import Layers, batch, equal, integers, like_ddp
from rank_programs import initialize

import megatron_patches
from megatron_patches import weights

# With single experts and stacked ones, whoever pushes, and weights that travel.
ASKED = (
    {"balance": "exact", "spare_slots": 2},
    {"balance": "exact", "spare_slots": 2, "balance_push": "torch"},
    {"balance": "exact", "spare_slots": 2, "grouped_gemm": True},
    {"balance": "exact", "spare_slots": 1, "grouped_gemm": True, "balance_push": "torch"},
    {"move": "weights", "grouped_gemm": True},
)


def gradients(layers, micro_batches=2, inputs_first=False, inputs=True):
    """Of a step, by logical expert, and of its last input; in main_grad where there is one. inputs_first: gradients of
    inputs alone are asked for before each backward. inputs: they require gradients; else experts' alone are given."""
    for number in range(1, 1 + micro_batches):
        hidden, maps, probs = batch(number, torch.distributed.get_rank())
        out = layers.forward(hidden.requires_grad_(inputs), maps, probs.requires_grad_(inputs))
        loss = (out * integers(out.shape, number)).sum()
        if inputs_first:
            torch.autograd.grad(loss, [hidden, probs], retain_graph=True)
        loss.backward()
    weights.bring_home()

    def read(parameter):
        found = getattr(parameter, "main_grad", parameter.grad)
        return torch.zeros_like(parameter) if found is None else found

    return [*layers.everywhere(read), *([hidden.grad, probs.grad] if inputs else [])]


def differing(ep, prepare=lambda layers: None, **how):
    """Those of ASKED whose gradients are not those of off. prepare(layers): what is done to them before the step."""
    groups, found = initialize(ep), []
    for asked in ASKED:
        results = []
        for given in ({"grouped_gemm": asked.get("grouped_gemm", False)}, asked):
            megatron_patches.apply(ranks_per_node=ep, timeout_s=10.0, **given)
            layers = Layers(groups, ep)
            prepare(layers)
            # Without balancing a rank nothing of which asks for gradients takes no part in others' backward.
            results.append(gradients(layers, **how | ({} if given is asked else {"inputs": True})))
            megatron_patches.revert()
        wanted, got = results
        if not equal(wanted[: len(got)], got):
            found.append(asked)
    return found


def experts_of_one_rank(ep, frozen, inputs):
    """Rank 0's experts of so many layers are frozen, and those of the others are trained, by tokens of rank 0 as well;
    inputs: whose gradients are asked for."""

    def prepare(layers):
        for _, experts in layers.pairs[:frozen]:
            for parameter in experts.parameters():
                parameter.requires_grad_(torch.distributed.get_rank() > 0)

    return differing(ep, prepare, inputs=inputs)


def everywhere(ep):
    """Experts of all layers, or of the first alone, are frozen on all ranks, and then trained: (whether gradients are
    those of tokens that move; whether there was memory for gradients; how often weights were published) of each step,
    before and behind the thaw."""
    groups, found = initialize(ep), []
    for frozen in (2, 1):
        results, seen = [], []
        for given in ({"grouped_gemm": True}, {"move": "weights", "grouped_gemm": True}):
            megatron_patches.apply(ranks_per_node=ep, timeout_s=10.0, **given)
            layers, of_steps = Layers(groups, ep), []
            for step in range(4):
                for _, experts in layers.pairs[:frozen]:
                    for parameter in experts.parameters():
                        parameter.requires_grad_(step >= 2)
                of_steps.append([one.clone() for one in gradients(layers)])
                if "move" in given:
                    (group,) = weights.live()
                    store = group.prefetcher.store
                    seen.append((store.takes_gradients, store.version))
            results.append(of_steps)
            megatron_patches.revert()
        found.append(([equal(*steps) for steps in zip(*results, strict=True)], seen))
    return found


def behind_ddp(ep):
    """The first matrices are frozen when they have a main_grad already, which must stay as it is."""

    def prepare(layers):
        like_ddp(layers.parameters(), [])
        for _, experts in layers.pairs:
            for name, parameter in experts.named_parameters():
                parameter.requires_grad_(not ("fc1" in name or name == "weight1"))

    return differing(ep, prepare)


def replaced(ep):
    """A layer loads with assign=True, and another is tied to it: both have other Parameter objects than when they were
    built."""

    def prepare(layers):
        (_, first), (_, second) = layers.pairs
        state = {name: value.sign() for name, value in first.state_dict().items() if torch.is_tensor(value)}
        first.load_state_dict(state, assign=True, strict=False)
        for path, parameter in first.named_parameters():
            module, _, name = path.rpartition(".")
            setattr(second.get_submodule(module), name, parameter)

    return differing(ep, prepare)


def of_inputs_alone(ep):
    """Gradients that torch.autograd.grad makes of inputs are none of the parameters'."""
    return differing(ep, inputs_first=True)


def converted(ep):
    """What layers that were converted behind their building say, and whether they work when they are converted back."""
    groups, said = initialize(ep), []
    for grouped, push in ((False, "kernels"), (False, "torch"), (True, "torch")):
        megatron_patches.apply(
            ranks_per_node=ep, timeout_s=10.0, balance="exact", grouped_gemm=grouped, balance_push=push
        )
        layers = Layers(groups, ep)
        clean = gradients(layers)
        for parameter in layers.parameters():
            parameter.grad = None
        for dtype in (torch.bfloat16, torch.float32):
            for _, experts in layers.pairs:
                experts.to(dtype)
            if dtype == torch.bfloat16:
                with pytest.raises(ValueError, match="params_dtype") as raised:
                    gradients(layers)
                said.append(str(raised.value))
        assert equal(gradients(layers), clean)
        megatron_patches.revert()
    return said


def changed_unseen(ep):
    """What a forward says of weights that travel, and that a step of one's own has changed."""
    groups = initialize(ep)
    megatron_patches.apply(ranks_per_node=ep, timeout_s=10.0, move="weights", grouped_gemm=True)
    layers = Layers(groups, ep)
    hidden, maps, probs = batch(1, torch.distributed.get_rank())
    layers.forward(hidden, maps, probs)
    for parameter in layers.parameters():
        parameter.data += 1
    with pytest.raises(RuntimeError, match="have changed since they were published") as raised:
        layers.forward(hidden, maps, probs)
    weights.changed()
    layers.forward(hidden, maps, probs)
    megatron_patches.revert()
    return str(raised.value)


def slow(ep, frozen):
    """What two training steps with slow balancing say where experts are frozen: "some" of rank 0, or "all" first
    matrices, whose move changes no bit."""
    slow_programs.initialize(ep)
    put = slow_programs.set_weights_by_name

    def put_and_freeze(model, config):
        put(model, config)
        for name, parameter in model.named_parameters():
            some = torch.distributed.get_rank() == 0 and "experts.0." in name
            if some if frozen == "some" else "experts" in name and "fc1" in name:
                parameter.requires_grad_(False)

    slow_programs.set_weights_by_name = put_and_freeze
    try:
        how = {"distributed": False, "steps": 2}
        forced = {"plan_with": slow_programs.shuffled(1)} if frozen == "all" else {}
        moved = slow_programs.train(ep, "slow", **forced, **how)
        return slow_programs.difference(slow_programs.train(ep, **how), moved)
    except ValueError as error:
        return str(error)
    finally:
        slow_programs.set_weights_by_name = put
        megatron_patches.revert()
