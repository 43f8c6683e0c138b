"""Who holds the spare slots, and when weights are sent for: layers that share slots, in any order of forwards and
backwards. What a layer computes with is what was pushed for it; what is not needed is not pushed."""

import functools
import gc
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.checkpoint import checkpoint

from megatron_patches import balance_arriving
from megatron_patches.balance_arriving import Arriving, Bank, Homeward, Push, Refill, SlotUse

pytestmark = pytest.mark.version_free


class World:
    """Layers over one slot, which holds one number, or over one for each direction. log: pushes, and what the layers
    do."""

    def __init__(self, num_layers, waits_in_backward=True, takes_turns=False):
        self.use, self.log = SlotUse(), []
        self.banks = [Bank([torch.zeros(1)], use) for use in (self.use, *([SlotUse()] if takes_turns else []))]
        self.under_way = [None for _ in self.banks]
        self.homeward = self.fails = None
        self.layers = [Layer(self, waits_in_backward) for _ in range(num_layers)]

    def forward(self, layers, micro_batch, x=None):
        x = torch.ones(1, requires_grad=True) if x is None else x
        for layer in layers:
            x = layer(x, micro_batch)
        return x

    def pushes(self):
        return [said for said in self.log if said.startswith("push")]


class Layer:
    def __init__(self, world, waits_in_backward):
        self.world, self.use, self.number = world, world.use, world.use.next_number()
        self.forward_bank, self.backward_bank = world.banks[0], world.banks[-1]
        self.doubts, self.plans = 0, {}
        self.weights = SimpleNamespace(waits_in_backward=waits_in_backward)
        self.parameter = torch.nn.Parameter(torch.ones(1))

    def start_push(self, work, bank):
        which = self.world.banks.index(bank)
        assert self.world.under_way[which] is None, "a push before the one before has been waited for"
        self.world.log.append(f"push {work}")
        if self.world.fails == "begin":
            raise ArithmeticError("planted")
        self.world.under_way[which] = work
        bank.stacks[0].data.fill_(float("nan"))
        return SimpleNamespace(wait=lambda: self.arrived(work, which))

    def arrived(self, work, which):
        assert self.world.under_way[which] == work
        self.world.under_way[which] = None
        if self.world.fails == "end":
            raise ArithmeticError("planted")
        self.world.banks[which].stacks[0].data.fill_(work)

    def start_home(self, work, gradients):
        assert self.world.homeward is None, "gradients before those before them have been waited for"
        self.world.log.append(f"home {work}")
        self.world.homeward = work
        return Homeward(self.came_home, [self.parameter], {self.parameter: gradients[0]})

    def came_home(self):
        assert self.world.homeward is not None
        self.world.homeward = None

    def __call__(self, x, micro_batch):
        self.dispatch(micro_batch)
        return self.experts(x)

    def dispatch(self, micro_batch):
        """A micro-batch that comes again has the plan that it had."""
        work = 10 * self.number + micro_batch
        replayed = work in self.plans
        self.push = Arriving(self, work, self.plans.setdefault(work, object()), replayed)

    def experts(self, x):
        arriving = self.push
        (stack,) = Push.apply(arriving, None, self.parameter)
        return Refill.apply(arriving, Product.apply(x, stack, arriving))


class Product(torch.autograd.Function):
    """The rows of clones: reads the slot in both directions."""

    @staticmethod
    def forward(ctx, x, stack, arriving):
        ctx.arriving = arriving
        ctx.save_for_backward(x)
        arriving.wait()
        assert stack.item() == arriving.work, "computed with another's weights"
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        _ = ctx.saved_tensors
        ctx.arriving.wait()
        held = ctx.arriving.clones.backward_bank.stacks[0].item()
        assert held == ctx.arriving.work, f"{held} in the backward of {ctx.arriving.work}"
        ctx.arriving.clones.world.log.append(f"use {ctx.arriving.work}")
        if not ctx.arriving.clones.weights.waits_in_backward:
            return grad, grad.clone(), None
        ctx.arriving.gradient(0, grad.clone())
        return grad, None, None


def test_the_last_layer_finds_its_weights_and_others_are_sent_for_early():
    world = World(4)
    out = world.forward(world.layers, 1)
    assert world.log == ["push 1", "push 11", "push 21", "push 31"]
    world.log.clear()
    out.backward()
    assert world.log == [
        *("use 31", "home 31", "push 21", "use 21", "home 21"),
        *("push 11", "use 11", "home 11", "push 1", "use 1", "home 1"),
    ]
    assert all(layer.parameter.grad == 1 for layer in world.layers)
    assert world.use.push is None and world.use.collection is None
    del out
    for layer in world.layers:
        del layer.push
    gc.collect()
    assert world.use.holder is None, "kept alive by the slots"


def test_weights_are_there_before_a_backward_that_does_not_wait():
    world = World(3, waits_in_backward=False)
    out = world.forward(world.layers, 1)
    wait, there = Arriving.wait, []
    try:
        Arriving.wait = lambda self: there.append(self.work) or wait(self)
        out.backward()
    finally:
        Arriving.wait = wait
    assert len(world.pushes()) == 5 and {1, 11, 21} == set(there)


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_recomputed_layer_is_pushed_to_once_more_not_twice(reentrant):
    world, x = World(3), torch.ones(1, requires_grad=True)
    for layer in world.layers:
        x = checkpoint(layer, x, 1, use_reentrant=reentrant)
    world.log.clear()
    x.backward()
    # With the last layer's, whose first run the slots still hold, there is none at all to push.
    assert world.pushes() == ["push 11", "push 1"]
    assert all(layer.parameter.grad == 1 and not layer.doubts for layer in world.layers)


def test_the_same_plan_again_is_not_taken_for_a_recomputed_one():
    """Weights may have changed since."""
    world = World(1)
    for layer in world.layers:
        first = Arriving(layer, 1, plan := object())
        first.wait()
        second = Arriving(layer, 1, plan)
        second.wait()
    assert world.pushes() == ["push 1", "push 1"]


def test_an_evaluation_between_forward_and_backward():
    world = World(2)
    out = world.forward(world.layers, 1)
    with torch.no_grad():
        world.forward(world.layers, 2)
    out.backward()
    assert world.pushes() == ["push 1", "push 11", "push 2", "push 12", "push 11", "push 1"]
    assert not any(layer.doubts for layer in world.layers)


@pytest.mark.parametrize("where", ["begin", "end"])
def test_a_push_that_failed_is_made_again(where):
    world = World(2)
    out = world.forward(world.layers, 1)
    with torch.no_grad():
        world.forward(world.layers, 2)
    world.fails = where
    with pytest.raises(ArithmeticError, match="planted"):
        out.backward(retain_graph=True)
    world.fails = None
    out.backward()
    assert all(layer.parameter.grad == 1 for layer in world.layers)


def test_a_graph_that_is_kept_runs_backward_twice():
    world = World(3)
    out = world.forward(world.layers, 1)
    out.backward(retain_graph=True)
    out.backward()
    assert all(layer.parameter.grad == 2 for layer in world.layers)


def test_a_layer_whose_weights_came_early_for_nothing_sends_early_no_more():
    """Two virtual stages: behind the second one's backward comes another forward, not the first one's backward."""
    world = World(4)
    first, second = world.layers[:2], world.layers[2:]
    for step in range(3):
        world.log.clear()
        outs = world.forward(first, 1), world.forward(second, 1)
        outs[1].backward()
        again = world.forward(first, 2), world.forward(second, 2)
        outs[0].backward()
        again[1].backward()
        again[0].backward()
        assert world.pushes().count("push 11") == (3 if step == 0 else 2), world.log
    assert [layer.doubts > 0 for layer in world.layers] == [False, True, False, False]
    for _ in range(8):
        outs = world.forward(first, 1), world.forward(second, 1)
        outs[1].backward()
        outs[0].backward()
    assert not any(layer.doubts for layer in world.layers), "it would have been right"


def test_ranks_decide_alike_whatever_they_have_freed():
    """A pass that is given up with weights on their way to it: one rank has it still, another does not."""

    def run(kept):
        world = World(3)
        below = world.forward(world.layers[:2], 1)
        world.forward(world.layers[2:], 1, below.detach().requires_grad_()).backward()  # sends for layer 1
        kept.append((below, [layer.push for layer in world.layers]))
        if kept[0] is None:
            kept.clear()
            del below
            for layer in world.layers:
                del layer.push
            gc.collect()
            assert world.use.holder is None
        for micro_batch in (2, 3):
            world.forward(world.layers, micro_batch).backward()
        return world.log, [layer.doubts for layer in world.layers]

    assert run(["kept"]) == run([None])


@st.composite
def schedules(draw):
    """(layers of each stage, steps): a step is a stage's forward, its backward by number among those that are due, or
    an evaluation."""
    stages = draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
    steps = draw(
        st.lists(
            st.tuples(st.sampled_from(["forward", "forward", "backward", "evaluate"]), st.integers(0, 9)), max_size=14
        )
    )
    return stages, steps


def run(stages, steps, takes_turns):
    world, due, micro_batch, first = World(sum(stages), takes_turns=takes_turns), [], 0, 0
    of_stage = []
    for size in stages:
        of_stage.append(world.layers[first : first + size])
        first += size
    for what, number in steps:
        micro_batch = (micro_batch + 1) % 10
        layers = of_stage[number % len(stages)]
        if what == "forward":
            due.append(world.forward(layers, micro_batch))
        elif what == "evaluate":
            with torch.no_grad():
                world.forward(layers, micro_batch)
        elif due:
            due.pop(number % len(due)).backward()
    for out in reversed(due):
        out.backward()
    return world


@given(schedules(), st.booleans())
def test_any_order_computes_with_the_right_weights(schedule, takes_turns):
    run(*schedule, takes_turns)


def turns(num_layers, micro_batches, takes_turns, late):
    """Megatron's 1F1B overlap: of every layer, a backward of one micro-batch's experts and a forward of the next one's.
    late: the backward comes when the forward's weights are on their way, as it may on a GPU's other stream."""
    world, last = World(num_layers, takes_turns=takes_turns), []
    for micro_batch in range(micro_batches + 1):
        x, passes = torch.ones(1), []
        for number in range(num_layers):
            layer, backward = world.layers[number], last.pop() if last else None
            if backward is not None and not late:
                backward()
            if micro_batch < micro_batches:
                layer.dispatch(micro_batch)
            if backward is not None and late:
                backward()
            if micro_batch < micro_batches:
                x = layer.experts(x.detach().requires_grad_())
                passes.append(functools.partial(x.backward, torch.ones(1)))
        last = passes
    assert all(layer.parameter.grad == micro_batches for layer in world.layers)
    return world


@pytest.mark.parametrize("late", [False, True])
def test_passes_that_take_turns_take_nothing_from_each_other(late):
    """With slots of its own a backward finds what was sent early, whatever its forward neighbour has sent for."""
    world = turns(3, 4, True, late)
    assert not any(layer.doubts for layer in world.layers)
    # Forwards 12; of each backward the last layer's and, early, those of the layers before it.
    assert len(world.pushes()) == 12 + 12
    assert all(bank.use.push is None and bank.use.collection is None for bank in world.banks)


def test_one_bank_serves_turns_that_do_not_overlap_and_no_others():
    turns(3, 4, False, late=False)
    with pytest.raises(AssertionError, match="computed with another's weights"):
        turns(3, 4, False, late=True)


@pytest.mark.parametrize(
    "name, fault",
    [
        ("refill", lambda self: None),
        ("_send_for", lambda self, bank, fresh=False: None if bank.use.holder else _SEND_FOR(self, bank, fresh)),
        ("_send_early", lambda self: setattr(self.clones.backward_bank.use, "holder", self)),
    ],
    ids=["no refill", "whoever was first holds them", "said to hold what nobody sent"],
)
def test_faults_are_noticed(name, fault, monkeypatch):
    monkeypatch.setattr(Arriving, name, fault)

    def train():
        world = World(3)
        out = world.forward(world.layers, 1)
        with torch.no_grad():
            world.forward(world.layers, 2)
        out.backward()

    with pytest.raises(AssertionError):
        train()


_SEND_FOR = balance_arriving.Arriving._send_for
