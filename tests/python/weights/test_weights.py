"""Weights that travel: every rank reads every expert of the version that computes, whatever the order of the layers."""

from __future__ import annotations

import itertools
import threading
import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from travelling import SHAPES, cases, check_layer, expert, own_weights, used_in_training

from hybrid_ep.errors import BufferFailedError, DeadlineError
from hybrid_ep.testing import VirtualWorld
from hybrid_ep.weights import ExpertStore, WeightLayout, WeightPrefetcher
from hybrid_ep.weights import layout as places


@given(cases())
def test_any_order_of_layers_reads_the_weights_of_its_version(case):
    layout, num_buffers, slice_bytes, steps = case

    def run(rank, group):
        store = ExpertStore(group, layout, timeout_s=30)
        prefetcher = WeightPrefetcher(store, num_buffers=num_buffers, slice_bytes=slice_bytes)
        for version, uses in enumerate(steps):
            prefetcher.publish(own_weights(layout, rank, version))
            for layer, backward, training in uses:
                check_layer(prefetcher, layer, version)
                prefetcher.release(layer, backward=backward, training=training)
        prefetcher.close()
        return True

    assert all(VirtualWorld(1, layout.num_ranks).run(run))


@pytest.mark.parametrize("num_buffers, pulls", [(2, 2 + 2 * 4), (3, 3 + 2 * 3), (6, 6)])
def test_a_step_pulls_each_layer_ahead_and_turns_without_a_pull(num_buffers, pulls):
    """Two micro-batches a version: of six layers two turn in place; with room for all each is pulled once."""
    layout = WeightLayout(4, 2, 6, SHAPES, torch.float32, 2)

    def run(rank, group):
        prefetcher = WeightPrefetcher(ExpertStore(group, layout, timeout_s=30), num_buffers=num_buffers)
        prefetcher.publish(own_weights(layout, rank, 0))
        used_in_training(prefetcher, 0, 6)
        of_one = prefetcher.statistics.pulls
        used_in_training(prefetcher, 0, 6)
        found = prefetcher.statistics
        prefetcher.close()
        return of_one, found.pulls, found.missed, found.hits + found.late, found.pulled_bytes

    for of_one, of_two, missed, found, pulled in VirtualWorld(1, 2).run(run):
        assert (of_one, missed, found) == (pulls, 0, 24)
        assert of_two - of_one == (0 if num_buffers == 6 else pulls - num_buffers)
        assert pulled == of_two * 2 * sum(a * b * 4 for a, b in SHAPES), "the two experts that a rank lacks"


def test_evaluation_goes_round_without_a_miss():
    layout = WeightLayout(4, 2, 5, SHAPES, torch.float32, 2)

    def run(rank, group):
        prefetcher = WeightPrefetcher(ExpertStore(group, layout, timeout_s=30))
        prefetcher.publish(own_weights(layout, rank, 0))
        for layer in (*range(5), *range(5)):
            check_layer(prefetcher, layer, 0)
            prefetcher.release(layer, training=False)
        with pytest.raises(RuntimeError, match="no memory for gradients: call open_gradients"):
            prefetcher.store.add_gradients(0, [[torch.zeros(2, *shape)] for shape in SHAPES])
        prefetcher.close()
        return prefetcher.statistics.missed

    assert VirtualWorld(1, 2).run(run) == [0, 0]


def test_slices_come_from_each_owner_in_turn_and_from_the_next_rank_first():
    layout = WeightLayout(8, 4, 1, ((4, 8),), torch.float32, 2)

    def run(rank, group):
        prefetcher = WeightPrefetcher(ExpertStore(group, layout, timeout_s=30), slice_bytes=128)
        prefetcher.close()
        return layout.pieces_by_layer(rank, 0, prefetcher.slice_bytes)

    for rank, pieces in enumerate(VirtualWorld(1, 4).run(run)):
        others = [(rank + i) % 4 for i in (1, 2, 3)]
        assert [source for source, *_ in pieces] == others * 2 and {size for *_, size in pieces} == {128}


def test_copies_that_are_kept_are_pulled_once_a_version():
    layout = WeightLayout(5, 2, 3, SHAPES, torch.float32, 4)  # held divides nothing

    def run(rank, group):
        prefetcher = WeightPrefetcher(ExpertStore(group, layout, timeout_s=30))
        for version in range(2):
            prefetcher.publish(own_weights(layout, rank, version))
            for _ in range(2):
                used_in_training(prefetcher, version, 3)
        prefetcher.close()
        return prefetcher.statistics.pulled_bytes, prefetcher.statistics.pulls

    one = sum(a * b * 4 for a, b in SHAPES)
    for rank, (pulled, pulls) in enumerate(VirtualWorld(1, 2).run(run)):
        assert pulled == pulls * one + 2 * 3 * layout.kept(rank) * one


@given(st.integers(1, 4), st.integers(0, 6), st.integers(1, 3), st.integers(1, 3))
def test_gradients_come_home_once_in_the_order_of_the_ranks(num_ranks, more, num_layers, steps):
    layout = WeightLayout(num_ranks + more, num_ranks, num_layers, SHAPES, torch.float32, num_ranks + more)

    def gradient(rank, step, micro, layer, n, number):
        return expert(step + micro, layer, n, number) / 3 ** (1 + rank)  # the order of a sum shows in its last bits

    def run(rank, group):
        store, found = ExpertStore(group, layout, timeout_s=30), []
        assert not store.takes_gradients
        store.open_gradients()
        store.open_gradients()  # nothing
        assert store.takes_gradients
        for step in range(steps):
            for micro in range(2):
                for layer in range(num_layers - (micro == 1 and num_layers > 1)):
                    order = range(layout.first(rank + 1), layout.first(rank) + layout.num_experts)
                    grads = [
                        [torch.stack([gradient(rank, step, micro, layer, n, e % layout.num_experts) for e in order])]
                        if order
                        else []
                        for n in range(2)
                    ]
                    store.add_gradients(layer, grads)
            home = {
                (layer, n): torch.zeros(layout.own(rank), *SHAPES[n]) for layer in range(num_layers) for n in (0, 1)
            }
            store.bring_home(lambda layer, n, parts, home=home: [home[layer, n].add_(part) for part in parts])
            found.append(home)
        return found

    for rank, found in enumerate(VirtualWorld(1, num_ranks).run(run)):
        for step, home in enumerate(found):
            for (layer, n), total in home.items():
                for i, one in enumerate(total):
                    wanted, number = torch.zeros(SHAPES[n]), layout.first(rank) + i
                    for other in set(range(num_ranks)) - {rank}:
                        parts = [gradient(other, step, micro, layer, n, number) for micro in (0, 1)]
                        wanted += parts[0] + parts[1] if layer < num_layers - (num_layers > 1) else parts[0]
                    assert torch.equal(one, wanted)


COUNTERS = {"published": places.PUBLISHED, "read": places.READ, "given": places.GIVEN, "taken": places.TAKEN}


def two_ranks(rank, group, late, ignored):
    """Two versions and the gradients of two steps, on a rank that is late, and its peer; whether all was right.

    ignored: the counter that is not waited for."""
    layout = WeightLayout(4, 2, 5, SHAPES, torch.float32, 2)
    store = ExpertStore(group, layout, timeout_s=30)
    store.open_gradients()
    prefetcher = WeightPrefetcher(store)
    wait, right, ran = store.wait, [], threading.Event()
    store.wait = lambda counter, *given: None if counter == ignored and ran.is_set() else wait(counter, *given)
    write = store._own
    for version in range(2):
        if rank == late and version:

            def slowly(layer, n):
                time.sleep(0.05)
                return write(layer, n)

            store._own = slowly  # the other one is through with its own, and reads
        prefetcher.publish(own_weights(layout, rank, version))
        ran.set()  # the first version is there for everybody, whatever is ignored
        if rank == late:
            time.sleep(0.3)
        for layer in (4, 0, 3):  # not what was prefetched
            try:
                check_layer(prefetcher, layer, version)
            except AssertionError:
                right.append(False)
            prefetcher.release(layer)
    for step in range(1, 3):
        if rank == late:
            time.sleep(0.3)
        for layer in range(5):
            store.add_gradients(layer, [[torch.full((2, *shape), float(step))] for shape in SHAPES])
        took = []

        def take(layer, n, parts, step=step, took=took):
            if rank == late and not took:
                time.sleep(0.3)
            took.append(bool((parts[0] == step).all()))

        store.bring_home(take)
        right += took
    wait(places.TAKEN, 2, "gradients are still taken home by")  # nobody's memory goes under a reader
    prefetcher.close()
    return all(right)


@pytest.mark.parametrize("ignored", [None, *COUNTERS])
def test_each_of_the_waits_is_needed(ignored):
    """What a rank reads is wrong without any of them, where one rank is late; that is, these checks can fail."""

    def run(rank, group, late):
        return two_ranks(rank, group, late, COUNTERS.get(ignored, -1))

    found = [VirtualWorld(1, 2).run(lambda rank, group, late=late: run(rank, group, late)) for late in (0, 1)]
    assert all(all(ranks) for ranks in found) is (ignored is None), (ignored, found)


def test_a_refused_store_is_refused_on_all_ranks_and_the_next_one_is_made():
    """Whatever a rank gives that it cannot begin with: the group stays in step."""
    layout = WeightLayout(2, 2, 1, SHAPES, torch.float32, 1)

    def run(rank, group):
        said = []
        for changed in ({"timeout_s": -1}, {"timeout_s": "a"}, {"layout": None}, {}):
            wanted = {"layout": layout, "timeout_s": 10, **(changed if rank == 1 else {})}
            try:
                ExpertStore(group, **wanted).close()
                said.append("made")
            except ValueError as error:
                said.append(str(error))
        return said

    for said in VirtualWorld(1, 2).run(run):
        *refused, last = said
        assert last == "made" and all(name in text for name, text in zip(("-1", "'a'", "layout"), refused, strict=True))


def test_an_owner_that_does_not_publish_is_named_and_the_store_refused():
    layout = WeightLayout(4, 2, 1, SHAPES, torch.float32, 2)

    def run(rank, group):
        store = ExpertStore(group, layout, timeout_s=0.5)
        if rank == 1:
            time.sleep(1.5)
            return None
        prefetcher = WeightPrefetcher(store)
        prefetcher.publish(own_weights(layout, rank, 0))
        with pytest.raises(DeadlineError, match="not published by rank 1: rank 0 waited") as failed:
            prefetcher.acquire(0)
        assert (failed.value.rank, failed.value.peer, failed.value.site) == (0, 1, "weights are not published by")
        with pytest.raises(BufferFailedError, match="rank 1"):
            prefetcher.acquire(0)
        prefetcher.close()
        return prefetcher._thread.is_alive()

    assert VirtualWorld(1, 2).run(run)[0] is False


def test_wrong_uses_say_what_is_right():
    layout = WeightLayout(4, 1, 3, SHAPES, torch.float32, 4)

    def run(rank, group):
        with pytest.raises(ValueError, match="num_ranks=2 must be the 1 ranks"):
            ExpertStore(group, WeightLayout(4, 2, 3, SHAPES, torch.float32, 2), timeout_s=5)
        store = ExpertStore(group, layout, timeout_s=5)
        for options, text in (
            ({"num_buffers": 1}, "num_buffers=1"),
            ({"num_buffers": 2.5}, "num_buffers=2.5 must be an integer"),
            ({"slice_bytes": 0}, "slice_bytes=0"),
            ({"slice_bytes": 10.5}, "slice_bytes=10.5 must be an integer"),
        ):
            with pytest.raises(ValueError, match=text):
                WeightPrefetcher(store, **options)
        prefetcher = WeightPrefetcher(store)
        with pytest.raises(RuntimeError, match="call publish before"):
            prefetcher.acquire(0)
        weights = own_weights(layout, rank, 0)
        with pytest.raises(ValueError, match="weights must be 3 layers"):
            prefetcher.publish(weights[:2])
        for bad, text in (
            (None, "weights is NoneType None; give 3 layers of a tensor for each of 2 matrices"),
            ([*weights[:2], None], "weights is list"),
            ([*weights[:2], [weights[2][0], None]], r"weights\[2\]\[1\] is NoneType None"),
            ([*weights[:2], [weights[2][0], weights[2][1].to_sparse()]], r"weights\[2\]\[1\] has layout"),
        ):
            with pytest.raises(ValueError, match=text):
                prefetcher.publish(bad)
        assert store.version == 0
        prefetcher.publish(weights)
        for layer in (3, -1, 1.0, None):
            with pytest.raises(ValueError, match=f"layer={layer} must be an integer from 0 to 2"):
                prefetcher.acquire(layer)
            with pytest.raises(ValueError, match=f"layer={layer} must be an integer from 0 to 2"):
                prefetcher.release(layer)
        prefetcher.acquire(0)
        prefetcher.acquire(2)
        with pytest.raises(RuntimeError, match="finds no buffer: layers .* more num_buffers"):
            prefetcher.acquire(1)
        with pytest.raises(RuntimeError, match="in use: release them"):
            prefetcher.publish(weights)
        prefetcher.release(0)
        with pytest.raises(RuntimeError, match="more often than acquired"):
            prefetcher.release(0)
        store.check_unchanged(0, weights[0])
        weights[0][1][2] += 1
        with pytest.raises(RuntimeError, match="layer 0 on rank 0 have changed"):
            store.check_unchanged(0, weights[0])
        prefetcher.close()

    VirtualWorld(1, 1).run(run)


def test_gradients_that_are_no_dense_tensors_are_refused_before_any_is_added():
    layout = WeightLayout(4, 2, 1, SHAPES, torch.float32, 2)

    def run(rank, group):
        store = ExpertStore(group, layout, timeout_s=20)
        store.open_gradients()
        ones = [[torch.ones(2, *shape)] for shape in layout.shapes]
        for bad, text in (
            (None, "gradients is NoneType None; give the stacks of each of 2 matrices"),
            ([ones[0], None], "gradients is list"),
            ([ones[0], [1]], r"gradients\[1\]\[0\] is int 1"),
            (
                [ones[0], [ones[1][0].to_sparse()]],
                r"gradients\[1\]\[0\] has layout torch.sparse_coo; give a dense tensor",
            ),
        ):
            with pytest.raises(ValueError, match=text):
                store.add_gradients(0, bad)
        store.add_gradients(0, ones)
        home = []
        store.bring_home(lambda layer, n, parts: home.append([part.clone() for part in parts]))
        store.close()
        return all(bool((part == 1).all()) for parts in home for part in parts) and len(home)

    assert VirtualWorld(1, 2).run(run) == [2, 2]


def test_weights_that_come_from_a_generator_are_published():
    layout = WeightLayout(2, 1, 2, [list(shape) for shape in SHAPES], torch.float32, 2)
    assert layout == WeightLayout(2, 1, 2, SHAPES, torch.float32, 2), "shapes are compared as tuples"

    def run(rank, group):
        store, weights = ExpertStore(group, layout, timeout_s=5), own_weights(layout, rank, 0)
        store.publish(iter(layer) for layer in weights)
        assert store.version == 1
        for layer, stacks in enumerate(weights):
            assert all(torch.equal(store._own(layer, n), stack) for n, stack in enumerate(stacks))
        store.close()

    VirtualWorld(1, 1).run(run)


def test_a_refused_gradient_adds_nothing():
    """Not what the step before left either, which a call without matrices would have sent again."""
    layout = WeightLayout(4, 2, 2, SHAPES, torch.float32, 2)
    wrong = [
        (0, [], r"gradients has 0 matrices; give the stacks of all 2"),
        (0, [[torch.ones(2, *shape)] for shape in (*SHAPES, SHAPES[0])], "gradients has 3 matrices"),
        (
            0,
            [[torch.ones(2, *SHAPES[0])], [torch.ones(2, 1, 1)]],
            r"gradients\[1\] has a stack \(2, 1, 1\); give \[exp",
        ),
        (0, [[torch.ones(2, *SHAPES[0])], [torch.ones(1, *SHAPES[1])]], r"gradients\[1\] has 1 experts; give the 2"),
        (-1, [[torch.ones(2, *shape)] for shape in SHAPES], "layer=-1 must be an integer from 0 to 1"),
        (2, [[torch.ones(2, *shape)] for shape in SHAPES], "layer=2 must be an integer from 0 to 1"),
    ]

    def run(rank, group):
        store, sums = ExpertStore(group, layout, timeout_s=30), []
        store.open_gradients()
        for step in range(2):
            for layer, gradients, text in wrong:
                with pytest.raises(ValueError, match=text):
                    store.add_gradients(layer, gradients)
            if step == 0:
                store.add_gradients(0, [[torch.full((2, *shape), 7.0)] for shape in SHAPES])
            store.bring_home(lambda layer, n, parts: sums.append(float(sum(part.sum() for part in parts))))
        store.close()
        return sums

    sums = [7.0 * 2 * a * b for a, b in SHAPES] + [0.0] * 6
    assert VirtualWorld(1, 2).run(run) == [sums] * 2


def test_memory_that_is_not_there_says_what_it_was_for(monkeypatch):
    """The cause is a full /dev/shm, which this machine's other tests need."""

    def full(*given):
        raise MemoryError("no room")

    def run(rank, group):
        store = ExpertStore(group, WeightLayout(4, 1, 3, SHAPES, torch.float32, 4), timeout_s=5)
        monkeypatch.setattr("hybrid_ep.weights.store.open_segments", full)
        with pytest.raises(MemoryError, match="MiB a rank for gradients of other .* 3 layers .* or move tokens"):
            store.open_gradients()

    VirtualWorld(1, 1).run(run)


@pytest.mark.parametrize(
    "change, text",
    [
        ({"num_ranks": 5}, "num_ranks=5 exceeds the 4"),
        ({"held": 1}, "held=1 must be from 2"),
        ({"group_size": 1}, r"held=2 must be from 4 \(a rank's share .* group of 1\) to 4"),
        ({"group_size": 0}, "group_size=0 must be an integer of at least 1"),
        ({"group_size": True}, "group_size=True must be an integer"),
        ({"group_size": 4}, "group_size=4 must divide the 2 ranks"),
        ({"num_ranks": 4, "group_size": 3}, "group_size=3 must divide the 4 ranks"),
        ({"held": 5}, "held=5 must be from 2 .* to 4"),
        ({"num_layers": 0}, "num_layers=0"),
        ({"held": 2.5}, "held=2.5 must be an integer"),
        ({"num_experts": 4.0}, "num_experts=4.0 must be an integer"),
        ({"num_layers": True}, "num_layers=True must be an integer"),
        ({"shapes": ((0, 3),)}, "without empty dimensions"),
        ({"shapes": ()}, r"shapes=\(\) lacks numbers"),
        ({"shapes": ((2, 3), ())}, "lacks numbers"),
        ({"shapes": (4, 8)}, r"shapes=\(4, 8\) must be tuples of integers"),
        ({"shapes": ((4.5, 8),)}, r"shapes\[0\]\[0\]=4.5 must be an integer"),
        ({"dtype": "x"}, "dtype='x' must be a torch.dtype"),
    ],
)
def test_layouts_that_cannot_be(change, text):
    given = {"num_experts": 4, "num_ranks": 2, "num_layers": 1, "shapes": SHAPES, "dtype": torch.float32, "held": 2}
    with pytest.raises(ValueError, match=text):
        WeightLayout(**given | change)


@given(st.integers(1, 6), st.integers(0, 20), st.integers(1, 3))
def test_registered_memory_does_not_overlap(num_ranks, more, num_layers):
    num_experts = num_ranks + more
    layout = WeightLayout(num_experts, num_ranks, num_layers, SHAPES, torch.bfloat16, num_experts)
    assert sum(map(layout.own, range(num_ranks))) == num_experts
    for rank in range(num_ranks):
        weights, gradients = [(0, 5 * places.COUNTER_BYTES)], []
        for layer, n in itertools.product(range(num_layers), range(2)):
            weights.append((layout.own_at(layer, n), layout.own(rank) * layout.expert_bytes(n)))
            others = num_experts - layout.own(rank)
            gradients.append((layout.gradient_at(layer, n), others * layout.expert_bytes(n, 4)))
        for spans, room in ((weights, layout.registered_bytes), (gradients, layout.gradient_bytes)):
            ends = [at + size for at, size in spans]
            assert all(end <= at for end, (at, _) in zip(ends, spans[1:], strict=False))
            assert ends[-1] <= room and not any(at % 64 for at, _ in spans)


def test_a_callback_that_fails_ends_the_store_and_says_so():
    layout = WeightLayout(4, 2, 1, SHAPES, torch.float32, 2)

    def run(rank, group):
        store = ExpertStore(group, layout, timeout_s=2)
        store.open_gradients()

        def add(layer, n, parts):
            if rank == 0:
                raise ArithmeticError("no room")

        if rank:
            store.bring_home(add)
            with pytest.raises(DeadlineError, match="from rank 0|by rank 0"):
                store.bring_home(add)
            return True
        with pytest.raises(ArithmeticError, match="no room"):
            store.bring_home(add)
        begin = time.monotonic()
        for call in (lambda: store.bring_home(add), lambda: store.add_gradients(0, [])):
            with pytest.raises(BufferFailedError, match="bring_home ended half-way: ArithmeticError: no room"):
                call()
        assert time.monotonic() - begin < 1, "it waits for nobody, itself least"
        return True

    assert all(VirtualWorld(1, 2).run(run))
