"""Weights that travel between GPUs: what the host's tests ask for, out of registered device memory; and that every wait
between streams is there, since the work of one of them is late."""

from __future__ import annotations

import functools
import threading
import time
from unittest import mock

import pytest
import torch
from hypothesis import given
from travelling import SHAPES, cases, check_layer, expert, others, own_weights, read, used_in_training

from hybrid_ep.errors import BootstrapError, BufferFailedError, DeadlineError
from hybrid_ep.testing import VirtualWorld
from hybrid_ep.weights import ExpertStore, WeightLayout, WeightPrefetcher, device_memory
from hybrid_ep.weights import layout as places

SECOND = 2_000_000_000  # cycles, about


def on_gpu(num_ranks, work, **options):
    """[work(rank, group)] of all ranks at once, each on its stream."""
    world = VirtualWorld(1, num_ranks)
    world.on_device()
    return world.run(work, **options)


def store_of(group, layout, timeout_s=30):
    return ExpertStore(group, layout, timeout_s=timeout_s, executor="cuda")


@given(cases())
def test_any_order_of_layers_reads_the_weights_of_its_version(case):
    layout, num_buffers, slice_bytes, steps = case

    def work(rank, group):
        prefetcher = WeightPrefetcher(store_of(group, layout), num_buffers=num_buffers, slice_bytes=slice_bytes)
        for version, uses in enumerate(steps):
            prefetcher.publish(own_weights(layout, rank, version, "cuda"))
            for layer, backward, training in uses:
                check_layer(prefetcher, layer, version)
                prefetcher.release(layer, backward=backward, training=training)
        prefetcher.close()
        return True

    assert all(on_gpu(layout.num_ranks, work))


@pytest.mark.parametrize("num_buffers, pulls", [(2, 10), (6, 6)])
def test_a_step_pulls_each_layer_ahead_and_turns_without_a_pull(num_buffers, pulls):
    layout = WeightLayout(5, 2, 6, SHAPES, torch.bfloat16, 3)  # kept copies of which E/R is no multiple

    def work(rank, group):
        prefetcher = WeightPrefetcher(store_of(group, layout), num_buffers=num_buffers)
        prefetcher.publish(own_weights(layout, rank, 0, "cuda"))
        used_in_training(prefetcher, 0, 6)
        found = prefetcher.statistics
        prefetcher.close()
        return found.pulls, found.missed, found.hits + found.late

    assert on_gpu(2, work) == [(pulls, 0, 12)] * 2


def gradient(rank, step, micro, layer, n, number):
    return expert(step + micro, layer, n, number) / 3 ** (1 + rank)  # the order of a sum shows in its last bits


def brought_home(layout, rank, group, executor, steps=2):
    """What the owners have after each step, by layer and matrix, on the host."""
    store, found = ExpertStore(group, layout, timeout_s=30, executor=executor), []
    store.open_gradients()
    where = store.memory.device
    order = layout.order(rank)[layout.own(rank) :]
    for step in range(steps):
        for micro in (0, 1):
            for layer in range(layout.num_layers - micro):  # one is touched once only
                stacks = [torch.stack([gradient(rank, step, micro, layer, n, e) for e in order]) for n in (0, 1)]
                half = len(order) // 2
                store.add_gradients(layer, [[part.to(where) for part in (s[:half], s[half:])] for s in stacks])
        home = {
            (layer, n): torch.full((layout.own(rank), *SHAPES[n]), 0.1, device=where)
            for layer in range(layout.num_layers)
            for n in (0, 1)
        }
        store.bring_home(lambda layer, n, parts, home=home: [home[layer, n].add_(part) for part in parts])
        found.append({which: total.cpu() for which, total in home.items()})
    store.wait(places.TAKEN, steps, "gradients are still taken home by")  # nobody's memory goes under a reader
    store.close()
    return found


@pytest.mark.parametrize("num_ranks, num_experts, group_size", [(2, 5, 2), (3, 7, 3), (4, 4, 4), (4, 7, 2)])
def test_gradients_come_home_with_the_bits_of_the_host(num_ranks, num_experts, group_size):
    held = -(-num_experts // group_size)
    layout = WeightLayout(num_experts, num_ranks, 3, SHAPES, torch.float32, held, group_size)
    found = on_gpu(num_ranks, lambda rank, group: brought_home(layout, rank, group, "cuda"))
    wanted = VirtualWorld(1, num_ranks).run(lambda rank, group: brought_home(layout, rank, group, "host"))
    for mine, hosts in zip(found, wanted, strict=True):
        for one, other in zip(mine, hosts, strict=True):
            assert one.keys() == other.keys() and all(torch.equal(one[which], other[which]) for which in one)


# ---- every wait between streams


def asleep(seconds, streams):
    for stream in streams:
        with torch.cuda.stream(stream):
            torch.cuda._sleep(int(seconds * SECOND))


def told_apart(turn, layer, n):
    """Every element of a gradient: another number wherever a staging buffer is used again."""
    return float(turn * 100 + layer * 10 + n + 1)


TWO = WeightLayout(4, 2, 3, SHAPES, torch.float32, 2)
GROUPS = WeightLayout(8, 4, 3, SHAPES, torch.float32, 4, 2)  # of two ranks


def train_late(rank, group, late, seconds, layout=TWO):
    """Two versions, each read forward, and then gradients that go home twice, issued without a wait of the host but for
    the other ranks' counters. Rank 1's streams sleep where `late` says. Whether everything was right."""
    store = store_of(group, layout)
    store.open_gradients()
    # With a buffer for each layer no pull of this version, hence not READ, is behind the use of one; and the first
    # layer is used last, whose copies of the next version come first.
    order, num_buffers = ((2, 1, 0), 3) if late == "the last use" else ((0, 1, 2), 2)
    prefetcher = WeightPrefetcher(store, num_buffers=num_buffers)
    compute, memory = torch.cuda.current_stream(), store.memory
    weights = [own_weights(layout, rank, version, "cuda") for version in range(3)]
    sums = {turn: [[torch.zeros(2, *s, device="cuda") for s in SHAPES] for _ in range(3)] for turn in (1, 2)}
    seen, keep = [], memory.keeping.pull

    def sleep(before, streams):
        if before == late and rank == 1:
            asleep(seconds, streams)

    def kept(sources, work):
        if store.version == 2:  # of three
            sleep("copies", memory.keeping.streams)
        return keep(sources, work)

    memory.keeping.pull = kept

    def add(layer, n, parts):
        if turn == 1 and layer == n == 0:
            sleep("a sum", [compute])
        for part in parts:
            sums[turn][layer][n].add_(part)

    for version in range(3):
        if version == 1:
            sleep("writes", [compute])
        prefetcher.publish(weights[version])
        for layer in order if version < 2 else ():
            there = prefetcher.acquire(layer)
            if version == 1 and layer == 0:
                sleep("a use", [compute])
                sleep("a pull", memory.pulls.streams)
            if version == 1 and layer == order[-1]:
                sleep("the last use", [compute])
            seen.append((layer, version, read(there)))
            prefetcher.release(layer, training=False)
    for turn in (1, 2):
        if turn == 2:
            sleep("sums", [compute])
        for layer in range(3):
            given = [
                torch.full((layout.num_experts - 2, *shape), told_apart(turn, layer, n), device="cuda")
                for n, shape in enumerate(SHAPES)
            ]
            store.add_gradients(layer, [[part] for part in given])
        if turn == 1:
            sleep("the way home", memory.homeward.streams)
        store.bring_home(add)
    store.wait(places.TAKEN, 2, "gradients are still taken home by")
    compute.synchronize()
    prefetcher.close()
    right = [
        all(map(torch.equal, stack.cpu(), wanted))
        for layer, version, stacks in seen
        for stack, wanted in zip(stacks, others(layout, rank, layer, version), strict=True)
    ]
    right += [
        bool((total == (layout.num_ranks - 1) * told_apart(turn, layer, n)).all())
        for turn, layers in sums.items()
        for layer, totals in enumerate(layers)
        for n, total in enumerate(totals)
    ]
    return all(right)


JOIN, TELL = device_memory.StreamMarks.join, device_memory.DeviceRegistered.tell


def told_at_once(counter):
    """A counter that does not wait for what is before it."""

    def tell(self, which, value, stream=None):
        TELL(self, which, value, torch.cuda.Stream() if which == counter else stream)

    return mock.patch.object(device_memory.DeviceRegistered, "tell", tell)


def without_joins(of_copies):
    """No stream waits for marks: none that copies, or none that computes."""

    def join(self, stream=None):
        if (stream is not None) != of_copies:
            JOIN(self, stream)

    return mock.patch.object(device_memory.StreamMarks, "join", join)


def uses_of_copies_forgotten():
    """A release marks the use of the buffer, and not that of the copies that are kept."""
    release = WeightPrefetcher.release

    def forgets(self, layer, **how):
        known = self.store.kept_marks
        self.store.kept_marks = [self.store.memory.marks() for _ in known]
        release(self, layer, **how)
        self.store.kept_marks = known

    return mock.patch.object(WeightPrefetcher, "release", forgets)


# Which wait is left out -> before what a stream that is late must show it, and how to leave it out.
WAITS = {
    "of a pull, for the last use of its buffer": ("a use", lambda: without_joins(True)),
    "of a pull home, for the last sum out of its buffer": ("a sum", lambda: without_joins(True)),
    "of a layer, for its pull": ("a pull", lambda: without_joins(False)),
    "of a sum, for its pull": ("the way home", lambda: without_joins(False)),
    "of PUBLISHED, for the writes": ("writes", lambda: told_at_once(places.PUBLISHED)),
    "of READ, for the pulls": ("a pull", lambda: told_at_once(places.READ)),
    "of GIVEN, for the sums": ("sums", lambda: told_at_once(places.GIVEN)),
    "of TAKEN, for the pulls": ("the way home", lambda: told_at_once(places.TAKEN)),
}
# The same where groups hold all experts.
GROUP_WAITS = {
    "of KEPT, for the copies": ("copies", lambda: told_at_once(places.KEPT)),
    "of READ, for the copies": ("copies", lambda: told_at_once(places.READ)),
    "of a layer, for its copies": ("copies", lambda: without_joins(False)),
    "of copies, for the last use of those before": ("the last use", uses_of_copies_forgotten),
}
LATE = [(late, TWO) for late, _ in WAITS.values()] + [(late, GROUPS) for late, _ in GROUP_WAITS.values()]


@pytest.mark.parametrize("late, layout", sorted(set(LATE), key=str))
def test_whatever_is_late_is_waited_for(late, layout):
    def work(rank, group):
        return train_late(rank, group, late, 0.1, layout)

    assert on_gpu(layout.num_ranks, work) == [True] * layout.num_ranks


@pytest.mark.parametrize("left_out", [*WAITS, *GROUP_WAITS])
def test_each_of_the_waits_is_needed(left_out):
    """On a machine whose hosts are slow, streams must be late for longer."""
    late, without = (WAITS | GROUP_WAITS)[left_out]
    layout = TWO if left_out in WAITS else GROUPS

    def work(rank, group, seconds):
        return train_late(rank, group, late, seconds, layout)

    with without():
        found = (on_gpu(layout.num_ranks, functools.partial(work, seconds=seconds)) for seconds in (0.1, 0.4, 1.6))
        assert not all(all(ranks) for ranks in found)


def test_a_layer_may_be_used_on_several_streams_and_gradients_added_on_others():
    """Streams of a rank that know nothing of each other; those that added are waited for, those that read, too."""
    layout = WeightLayout(4, 2, 3, SHAPES, torch.float32, 3)

    def work(rank, group):
        store = store_of(group, layout)
        store.open_gradients()
        prefetcher, seen = WeightPrefetcher(store), []
        sides = [torch.cuda.Stream() for _ in range(2)]
        for version in range(2):
            prefetcher.publish(own_weights(layout, rank, version, "cuda"))
            for layer in range(3):
                for side in sides:
                    with torch.cuda.stream(side):
                        there = prefetcher.acquire(layer)
                        asleep(0.01, [side])
                        seen.append((layer, version, read(there)))
                        ones = [[torch.ones(2, *shape, device="cuda")] for shape in SHAPES]
                        store.add_gradients(layer, ones)
                        prefetcher.release(layer)
            found = []
            store.bring_home(lambda layer, n, parts, found=found: found.extend(part.clone() for part in parts))
            assert all(bool((part == 2).all()) for part in found) and len(found) == 6
        for layer, version, stacks in seen:
            for stack, wanted in zip(stacks, others(layout, rank, layer, version), strict=True):
                assert all(map(torch.equal, stack.cpu(), wanted))
        store.wait(places.TAKEN, 2, "gradients are still taken home by")
        prefetcher.close()
        return True

    assert on_gpu(2, work) == [True, True]


# ---- who is late, and what is refused


def test_a_rank_that_stops_is_named_and_the_store_refused():
    layout = WeightLayout(4, 2, 2, SHAPES, torch.float32, 2)

    def work(rank, group):
        store = store_of(group, layout)
        store.open_gradients()
        prefetcher = WeightPrefetcher(store)
        prefetcher.publish(own_weights(layout, rank, 0, "cuda"))
        for layer in range(2):
            check_layer(prefetcher, layer, 0)
            store.add_gradients(layer, [[torch.ones(2, *shape, device="cuda")] for shape in SHAPES])
            prefetcher.release(layer)
        if rank == 1:
            time.sleep(4)  # its memory stays
            return None
        store.timeout_s = 1.0
        with pytest.raises(DeadlineError, match="gradients come late from rank 1: rank 0 waited") as failed:
            store.bring_home(lambda layer, n, parts: None)
        assert (failed.value.rank, failed.value.peer, failed.value.expected, failed.value.seen) == (0, 1, 1, 0)
        with pytest.raises(BufferFailedError, match="rank 1"):
            prefetcher.acquire(0)
        prefetcher.close()
        return prefetcher._thread.is_alive()

    assert on_gpu(2, work)[0] is False
    assert torch.ones(1000, device="cuda").sum().item() == 1000  # no sticky error


def test_an_owner_that_does_not_publish_is_named():
    layout = WeightLayout(4, 2, 1, SHAPES, torch.float32, 2)

    def work(rank, group):
        store = store_of(group, layout)
        if rank == 1:
            time.sleep(2)
            return None
        store.timeout_s = 0.5
        prefetcher = WeightPrefetcher(store)
        prefetcher.publish(own_weights(layout, rank, 0, "cuda"))
        with pytest.raises(DeadlineError, match="not published by rank 1: rank 0 waited") as failed:
            prefetcher.acquire(0)
        prefetcher.close()
        return failed.value.peer

    assert on_gpu(2, work)[0] == 1


def test_an_owner_that_publishes_late_is_waited_for():
    layout = WeightLayout(6, 3, 2, SHAPES, torch.bfloat16, 3)
    there = threading.Barrier(3)

    def work(rank, group):
        prefetcher = WeightPrefetcher(store_of(group, layout))
        there.wait(60)
        if rank == 1:
            time.sleep(0.5)
        for version in range(2):
            prefetcher.publish(own_weights(layout, rank, version, "cuda"))
            for layer in (1, 0):
                check_layer(prefetcher, layer, version)
                prefetcher.release(layer)
        prefetcher.close()
        return prefetcher.statistics.waited_s

    waited = on_gpu(3, work)
    assert waited[0] > 0.1 and waited[2] > 0.1, waited


def test_a_close_ends_a_wait():
    layout = WeightLayout(2, 2, 1, SHAPES, torch.float32, 1)

    def work(rank, group):
        store = store_of(group, layout, timeout_s=60)
        if rank == 1:
            return 0.0
        prefetcher = WeightPrefetcher(store)
        prefetcher.publish(own_weights(layout, rank, 0, "cuda"))
        started = time.monotonic()
        threading.Timer(0.2, prefetcher.close).start()
        with pytest.raises(BufferFailedError, match="closed"):
            prefetcher.acquire(0)
        prefetcher.close()  # once more
        return time.monotonic() - started

    assert on_gpu(2, work)[0] < 20


def test_weights_that_changed_are_reported_when_the_device_has_compared():
    layout = WeightLayout(4, 1, 2, SHAPES, torch.bfloat16, 4)

    def work(rank, group):
        store = store_of(group, layout)
        weights = own_weights(layout, rank, 0, "cuda")
        store.publish(weights)
        store.check_unchanged(0, weights[0])
        weights[1][1][2] += 1
        with pytest.raises(RuntimeError, match="layer 1 on rank 0 have changed"):  # by the latter at the latest
            [call() for call in (lambda: store.check_unchanged(1, weights[1]), lambda: store.publish(weights))]
        store.publish(weights)
        store.check_unchanged(1, weights[1])
        store.close()

    on_gpu(1, work)


def test_wrong_uses_say_what_is_right():
    layout = WeightLayout(4, 2, 1, SHAPES, torch.float32, 2)

    def work(rank, group):
        with pytest.raises(ValueError, match="NVSHMEM's heap is not; give 'cuda'"):
            ExpertStore(group, layout, timeout_s=5, executor="cuda_nvshmem")
        with pytest.raises(ValueError, match="executor must be the same on every rank, but is 'cuda' on ranks .0."):
            ExpertStore(group, layout, timeout_s=5, executor=("cuda", "host")[rank])
        store = store_of(group, layout)
        with pytest.raises(ValueError, match="weights lie on cpu, .* memory is on cuda:0: give them there"):
            store.publish(own_weights(layout, rank, 0))
        store.publish(own_weights(layout, rank, 0, "cuda"))
        with pytest.raises(RuntimeError, match="call open_gradients"):
            store.add_gradients(0, [[torch.ones(2, *shape, device="cuda")] for shape in SHAPES])
        store.open_gradients()
        with pytest.raises(ValueError, match="gradients lie on cpu"):
            store.add_gradients(0, [[torch.ones(2, *shape)] for shape in SHAPES])
        with pytest.raises(ValueError, match="has 1 experts; give the 2 that are not"):
            store.add_gradients(0, [[torch.ones(1, *shape, device="cuda")] for shape in SHAPES])
        host = ExpertStore(group, layout, timeout_s=5, executor="host")
        with pytest.raises(ValueError, match="weights lie on cuda:0, .* memory is on cpu"):
            host.publish(own_weights(layout, rank, 0, "cuda"))
        store.close()

    on_gpu(2, work)


def test_memory_that_is_not_there_says_what_it_was_for():
    layout = WeightLayout(4, 2, 1 << 20, ((1 << 14, 1 << 14),), torch.float32, 2)  # petabytes

    def work(rank, group):
        text = "own experts of 1048576 layers do not fit into the memory of cuda:0|does not fit on the device"
        with pytest.raises((MemoryError, BootstrapError), match=text):
            ExpertStore(group, layout, timeout_s=20, executor="cuda")
        return True

    assert on_gpu(2, work) == [True, True]
    assert torch.ones(1000, device="cuda").sum().item() == 1000
