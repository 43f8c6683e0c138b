"""Weights to clones and their gradients home, of all ranks of a world in one process: messages are matched
by their order between two ranks, as torch.distributed does, and no tensor is written before its step."""

import contextlib
import functools
import itertools
from collections import defaultdict, deque
from unittest import mock

import numpy as np
import parity_world
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_dispatcher import Program

from hybrid_ep.balance.relays import relays
from megatron_patches import balance_push, balance_relay
from megatron_patches.balance_relay import Rails, Straight


class Step:
    def __init__(self):
        self.sent, self.awaited = [], []

    def send(self, tensor, rank):
        if tensor.numel():
            self.sent.append((tensor, rank))

    def receive(self, tensor, rank):
        if tensor.numel():
            self.awaited.append((tensor, rank))


def run(walks):
    """Drives every rank's steps together. Returns the elements that each rank sent to each other."""
    moved = defaultdict(int)
    for steps in itertools.zip_longest(*walks):
        assert None not in steps, "ranks have different numbers of steps"
        under_way = defaultdict(deque)
        for rank, step in enumerate(steps):
            for tensor, to in step.sent:
                assert to != rank
                under_way[rank, to].append(tensor.clone())
                moved[rank, to] += tensor.numel()
        for rank, step in enumerate(steps):
            for tensor, source in step.awaited:
                assert under_way[source, rank], "awaited, and nobody sends it"
                message = under_way[source, rank].popleft()
                assert message.shape == tensor.shape
                tensor.copy_(message)
        assert not any(under_way.values()), "sent, and nobody waits for it"
    return moved


@st.composite
def worlds(draw):
    """(slot_expert, owner, width, sizes of matrices)."""
    nodes, width, slots = draw(st.integers(1, 4)), draw(st.integers(1, 4)), draw(st.integers(1, 3))
    ranks, experts = nodes * width, draw(st.integers(1, 8))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    owner = rng.integers(0, ranks, experts)
    slot_expert = rng.integers(-1, experts, (ranks, slots))
    for rank in range(ranks):
        slot_expert[rank, owner[slot_expert[rank]] == rank] = -1
    return slot_expert, owner, width, draw(st.lists(st.integers(1, 700), min_size=1, max_size=3))


def ways_of(num_ranks, width, straight):
    return [Straight(rank, Step) if straight else Rails(rank, width, Step) for rank in range(num_ranks)]


def weight(expert, n, size):
    return torch.arange(size, dtype=torch.float32) + 1000 * expert + 100_000 * n


def pushed(slot_expert, owner, width, sizes, straight=False):
    """(slots of all ranks, [rank][n] [S, size], elements sent)."""
    ranks, num_slots = slot_expert.shape
    found = [[torch.full((num_slots, size), -1.0) for size in sizes] for _ in range(ranks)]
    rounds = relays(slot_expert, owner, width)

    def own(rank):
        def of(expert, n):
            assert owner[expert] == rank
            return weight(expert, n, sizes[n])

        return of

    moved = run(
        [
            way.push(rounds, sizes, own(rank), lambda slot, n, rank=rank: found[rank][n][slot])
            for rank, way in enumerate(ways_of(ranks, width, straight))
        ]
    )
    return found, moved


@given(worlds(), st.booleans())
def test_clones_get_their_experts_and_nothing_else_is_written(world, straight):
    slot_expert, owner, width, sizes = world
    found, _ = pushed(*world, straight)
    for (rank, slot), expert in np.ndenumerate(slot_expert):
        for n, size in enumerate(sizes):
            wanted = torch.full((size,), -1.0) if expert < 0 else weight(expert, n, size)
            assert torch.equal(found[rank][n][slot], wanted)


@given(worlds())
def test_a_node_gets_an_expert_once_and_every_nic_a_stripe(world):
    slot_expert, owner, width, sizes = world
    _, moved = pushed(*world)
    pairs = {
        (owner[slot_expert[rank, slot]] // width, rank // width, slot_expert[rank, slot])
        for rank, slot in np.ndindex(slot_expert.shape)
        if slot_expert[rank, slot] >= 0 and owner[slot_expert[rank, slot]] // width != rank // width
    }
    across = {ends: count for ends, count in moved.items() if ends[0] // width != ends[1] // width}
    assert sum(across.values()) == len(pairs) * sum(sizes)
    assert all(source % width == to % width for source, to in across), "off the rail"
    grain = balance_relay._GRAIN
    for (source, to), count in across.items():
        here = sum(home == source // width and node == to // width for home, node, _ in pairs)
        assert count <= here * sum(-(-size // (width * grain)) * grain for size in sizes)


def gradients_of(rank, slot_expert, sizes):
    """[n] [S, size]: numbers whose sums show their order in the last bits."""
    rng = torch.Generator().manual_seed(rank)
    return [torch.randn(slot_expert.shape[1], size, generator=rng) for size in sizes]


@given(worlds())
def test_straight_every_clone_gets_its_expert_from_the_owner(world):
    slot_expert, owner, _, sizes = world
    _, moved = pushed(*world, straight=True)
    wanted = defaultdict(int)
    for (rank, _), expert in np.ndenumerate(slot_expert):
        if expert >= 0:
            wanted[int(owner[expert]), rank] += sum(sizes)
    assert moved == wanted


def collected(world, straight=False):
    """(expert, n) -> what add was called with, of all ranks and calls, on the owner."""
    slot_expert, owner, width, sizes = world
    rounds, found = relays(slot_expert, owner, width), {}
    given_, walks = [], []
    for rank, way in enumerate(ways_of(len(slot_expert), width, straight)):
        mine = gradients_of(rank, slot_expert, sizes)

        def add(expert, n, total, rank=rank):
            assert owner[expert] == rank
            found.setdefault((expert, n), []).append(total)

        given_.append(mine)
        walks.append(way.collect(rounds, sizes, lambda slot, n, mine=mine: mine[n][slot], add))
    run(walks)
    for rank, mine in enumerate(given_):
        assert all(map(torch.equal, mine, gradients_of(rank, slot_expert, sizes))), "a clone's gradient was written"
    return found


def summed(world):
    """The same by the rule: clones of a node in order, then nodes, the owner's first, as many as a relay has."""
    slot_expert, owner, width, sizes = world
    ranks, found = len(slot_expert), {}
    for expert, n in itertools.product(range(len(owner)), range(len(sizes))):
        of_nodes = []
        for away in range(ranks // width):
            node = (owner[expert] // width + away) % (ranks // width)
            of_node = [
                gradients_of(rank, slot_expert, sizes)[n][slot]
                for rank in range(node * width, (node + 1) * width)
                for slot in range(slot_expert.shape[1])
                if slot_expert[rank, slot] == expert
            ]
            of_nodes += [functools.reduce(torch.add, of_node)] if of_node else []
        most = width * slot_expert.shape[1]  # nodes of a relay
        for i in range(0, len(of_nodes), most):
            found.setdefault((expert, n), []).append(functools.reduce(torch.add, of_nodes[i : i + most]))
    return found


def same(found, wanted):
    return found.keys() == wanted.keys() and all(
        len(found[key]) == len(wanted[key]) and all(map(torch.equal, found[key], wanted[key])) for key in wanted
    )


@given(worlds())
def test_owners_get_the_sums_in_the_order_that_is_said_either_way(world):
    wanted = summed(world)
    assert same(collected(world), wanted) and same(collected(world, straight=True), wanted)


HOT = np.array([[0], [-1], [-1], [0], [0], [0], [0], [0], [0]]), np.array([1, 5]), 3, [300, 1]  # expert 0 everywhere


@pytest.mark.parametrize("broken", ["stripe of another rank", "another order", "a clone left out", "a node left out"])
def test_what_is_broken_is_noticed(monkeypatch, broken):
    """Mutants of the way home: the test above must fail with each."""
    assert same(collected(HOT), summed(HOT))
    if broken == "stripe of another rank":
        inner = Rails._stripe
        monkeypatch.setattr(Rails, "_stripe", lambda self, whole, rank: inner(self, whole, rank + 1))
    elif broken == "another order":
        monkeypatch.setattr(balance_relay, "_in_order", lambda parts: functools.reduce(torch.add, parts[::-1]))
    else:
        keep = slice(1, None) if broken == "a clone left out" else slice(-1, None)
        monkeypatch.setattr(balance_relay, "_in_order", lambda parts: torch.stack(parts[keep] or parts).sum(0))
    try:
        found = collected(HOT)
    except AssertionError:
        return
    assert not same(found, summed(HOT))


# ---- one step after the other


class Recorded:
    def __init__(self, number, log):
        self.number, self.log = number, log

    def start(self):
        self.log.append(f"start {self.number}")
        return self

    def follow(self):
        self.log.append(f"follow {self.number}")

    def wait(self):
        self.log.append(f"wait {self.number}")


def steps_of(log):
    for number in range(3):
        log.append(f"make {number}")
        yield Recorded(number, log)
    log.append("end")


def test_a_host_waits_for_a_step_before_it_makes_the_next():
    log = []
    steps = balance_push.Steps(steps_of(log), torch.device("cpu"))
    assert log == ["make 0", "start 0"]
    steps.wait()
    rest = ["wait 0", "make 1", "start 1", "wait 1", "make 2", "start 2", "wait 2", "end"]
    assert log == ["make 0", "start 0", *rest]
    steps.wait()
    assert log == ["make 0", "start 0", *rest]


def test_the_host_of_a_gpu_queues_all_steps_and_waits_at_the_end(monkeypatch):
    """Streams that only record: no GPU takes part."""
    log, side = [], mock.Mock(device="cuda:0")
    side.wait_stream.side_effect = lambda _: log.append("side waits")
    current = mock.Mock()
    current.wait_stream.side_effect = lambda _: log.append("current waits")
    monkeypatch.setattr(balance_push, "_side_stream", lambda _: side)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: current)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: contextlib.nullcontext())
    steps = balance_push.Steps(steps_of(log), torch.device("cuda"))
    queued = [f"{what} {number}" for number in range(3) for what in ("make", "start", "follow")]
    assert log == ["side waits", *queued, "end"]
    steps.wait()
    assert log[len(queued) + 2 :] == ["wait 0", "wait 1", "wait 2", "current waits"]


# ---- in training, on gloo ranks


def of_ranks(name, num_ranks, *arguments):
    return parity_world.run_world(Program(name, "relay_programs"), num_ranks, (num_ranks, *arguments), timeout_s=150)


@pytest.mark.version_free
@pytest.mark.parametrize("width, grouped, straight", [(2, True, False), (1, False, False), (2, True, True)])
def test_any_plan_gives_the_bits_of_off(width, grouped, straight):
    of_ranks("bit_equality", 4, width, grouped, straight)


@pytest.mark.version_free
def test_broken_relays_are_noticed():
    assert of_ranks("mutants", 4, 2)[0] == []


@pytest.mark.version_free
@pytest.mark.parametrize("step", (1, 2))
def test_a_rank_killed_in_a_relay_ends_the_wait_of_the_others(step):
    with pytest.raises(parity_world.WorldError) as failed:
        of_ranks("killed_in_a_relay", 4, 2, step)
    text = str(failed.value)
    assert "exit code -9" in text and "DeadlineError: weight push: rank" in text, text
