"""Groups of ranks that hold all experts among them: copies come into a group once a version, layers out of it alone,
and whoever is late or early, the bits are those of one group of all ranks."""

from __future__ import annotations

import dataclasses
import itertools
import threading
import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from travelling import SHAPES, check_layer, expert, layouts, others, own_weights, read, used_in_training

from hybrid_ep.errors import DeadlineError
from hybrid_ep.testing import VirtualWorld
from hybrid_ep.weights import ExpertStore, WeightLayout, WeightPrefetcher
from hybrid_ep.weights import layout as places

FOUR = WeightLayout(8, 4, 5, SHAPES, torch.float32, 4, 2)  # two groups of two ranks
ONE_EXPERT = sum(a * b * 4 for a, b in SHAPES)


def make(group, layout, timeout_s=30, **options):
    return WeightPrefetcher(ExpertStore(group, layout, timeout_s=timeout_s), **options)


# ---- who holds what


@given(layouts(most_ranks=8, most_layers=1))
def test_the_members_of_a_group_hold_every_expert_in_even_shares(layout):
    for rank in range(layout.num_ranks):
        order, own = list(layout.order(rank)), layout.own(rank)
        assert sorted(order) == list(range(layout.num_experts))
        assert order[:own] == list(range(layout.first(rank), layout.first(rank + 1)))
        for part in (order[own : layout.held], order[layout.held :]):
            assert part == sorted(part, key=lambda e: (e - layout.first(rank)) % layout.num_experts)
    for begin in range(0, layout.num_ranks, layout.group_size):
        members = layout.members(begin)
        holders = [layout.holder(begin, number) for number in range(layout.num_experts)]
        shares = [holders.count(member) for member in members]
        assert sum(shares) == layout.num_experts and max(shares) - min(shares) <= 1
        assert all(number in layout.order(holder)[: layout.held] for number, holder in enumerate(holders))


@given(layouts(most_ranks=8, most_layers=1))
def test_reads_are_of_the_experts_that_are_wanted_from_those_who_have_them(layout):
    readers = {rank: set() for rank in range(layout.num_ranks)}
    for rank in range(layout.num_ranks):
        order, own = layout.order(rank), layout.own(rank)
        for runs, wanted, by_layer in (
            (layout.read_once(rank), order[own : layout.held], False),
            (layout.read_by_layer(rank), order[layout.held :], True),
        ):
            found = []
            for run in runs:
                assert run.at == len(found) and run.source != rank
                assert run.source in layout.members(rank) or not by_layer
                begin = layout.own(run.source) if run.kept else 0
                end = layout.held if run.kept else layout.own(run.source)
                assert begin + run.index + run.count <= end
                found += layout.order(run.source)[begin + run.index :][: run.count]
                readers[run.source].add(rank)
            assert found == list(wanted)
    assert [layout.readers(rank) for rank in readers] == [sorted(found) for found in readers.values()]


@pytest.mark.parametrize("num_ranks, group_size", [(4, 2), (8, 2), (8, 4), (6, 3)])
def test_members_copy_from_different_owners_and_every_owner_is_read_once_a_group(num_ranks, group_size):
    held = 4 * num_ranks // group_size
    layout = WeightLayout(4 * num_ranks, num_ranks, 1, SHAPES, torch.float32, held, group_size)
    for begin in range(0, num_ranks, group_size):
        owners = [run.source for rank in layout.members(begin) for run in layout.read_once(rank)]
        assert sorted(owners) == sorted(set(range(num_ranks)) - set(layout.members(begin)))


@given(layouts(most_ranks=6))
def test_registered_memory_has_room_for_what_members_read_and_no_more(layout):
    whole = dataclasses.replace(layout, group_size=layout.num_ranks)
    more = layout.registered_bytes - whole.registered_bytes
    assert more == (layout.kept_bytes if layout.copies_are_read else 0)
    if layout.copies_are_read:
        spans = [(layout.own_at(layout.num_layers - 1, 1), layout.most_own * layout.expert_bytes(1))]
        for layer, n in itertools.product(range(layout.num_layers), range(2)):
            spans.append((layout.kept_at(layer, n), layout.most_kept * layout.expert_bytes(n)))
        ends = [at + size for at, size in spans]
        assert all(end <= at for end, (at, _) in zip(ends, spans[1:], strict=False))
        assert ends[-1] <= layout.registered_bytes and not any(at % 64 for at, _ in spans)


# ---- the bits of one group of all ranks


@st.composite
def programs(draw):
    """A layout, buffers, slices, and by version and rank the layers that it uses: any, in any order, or none."""
    layout = draw(layouts(most_ranks=6).filter(lambda layout: layout.num_ranks > 1))
    uses = st.lists(st.tuples(st.integers(0, layout.num_layers - 1), st.booleans(), st.booleans()), max_size=7)
    ranks = st.lists(uses, min_size=layout.num_ranks, max_size=layout.num_ranks)
    steps = draw(st.lists(ranks, min_size=1, max_size=3))
    return layout, draw(st.integers(2, 5)), draw(st.sampled_from([4, 20, 1 << 20])), steps


def by_expert(layout, rank, stack):
    """Experts that are not a rank's own, as it has them, in the order of their numbers."""
    order = layout.order(rank)[layout.own(rank) :]
    return stack[sorted(range(len(order)), key=order.__getitem__)]


def gradient(rank, version, layer, n, number):
    return expert(version, layer, n, number) / 3 ** (1 + rank)  # the order of a sum shows in its last bits


def seen_and_brought(rank, group, layout, num_buffers, slice_bytes, steps):
    """What every use of a layer saw, and what came home in each step: as lists of tensors."""
    prefetcher = make(group, layout, num_buffers=num_buffers, slice_bytes=slice_bytes)
    store, seen, homes = prefetcher.store, [], []
    store.open_gradients()
    order = layout.order(rank)[layout.own(rank) :]
    for version, uses in enumerate(steps):
        prefetcher.publish(own_weights(layout, rank, version))
        for layer, backward, training in uses[rank]:
            there = prefetcher.acquire(layer)
            seen += [by_expert(layout, rank, stack) for stack in read(there)]
            if backward and order:
                cut = len(there.kept[0])
                stacks = [torch.stack([gradient(rank, version, layer, n, e) for e in order]) for n in (0, 1)]
                store.add_gradients(layer, [[stack[:cut], stack[cut:]] for stack in stacks])
            prefetcher.release(layer, backward=backward, training=training)
        if version % 2 == 0:  # the other ones are evaluations
            home = [[torch.zeros(layout.own(rank), *shape) for shape in SHAPES] for _ in range(layout.num_layers)]
            store.bring_home(lambda layer, n, parts, home=home: [home[layer][n].add_(part) for part in parts])
            homes += [total for layer in home for total in layer]
    if homes:
        store.wait(places.TAKEN, (len(steps) + 1) // 2, "gradients are still taken home by")
    prefetcher.close()
    return seen, homes


@given(programs())
def test_every_layer_and_every_gradient_has_the_bits_of_one_group(program):
    layout, *how = program
    found, wanted = (
        VirtualWorld(1, layout.num_ranks).run(lambda rank, group, lay=lay: seen_and_brought(rank, group, lay, *how))
        for lay in (layout, dataclasses.replace(layout, group_size=layout.num_ranks))
    )
    for rank, (ours, theirs) in enumerate(zip(found, wanted, strict=True)):
        for one, other in zip(ours, theirs, strict=True):
            assert len(one) == len(other) and all(map(torch.equal, one, other)), rank


# ---- what is read, and when


def counted_reads(store):
    """Pulls and looks at counters from now on: [(rank, bytes, of copies that are kept)], [(rank, counter)]."""
    pulled, looked = [], []
    pull, seen = store.memory.pulls.pull, store.shared.seen

    def pulls(sources, work):
        for buffer, pieces, _ in work:
            pulled.extend((source, size, buffer is store.kept) for source, _, _, size in pieces)
        return pull(sources, work)

    def sees(rank, counter, wanted):
        looked.append((rank, counter, wanted))
        return seen(rank, counter, wanted)

    store.memory.pulls.pull, store.shared.seen = pulls, sees
    return pulled, looked


@pytest.mark.parametrize("num_buffers", [2, 5])
@pytest.mark.parametrize("num_experts, num_ranks, group_size, held", [(8, 4, 2, 4), (11, 6, 3, 6), (7, 4, 2, 4)])
def test_no_read_leaves_the_group_but_once_a_step(num_experts, num_ranks, group_size, held, num_buffers):
    layout = WeightLayout(num_experts, num_ranks, 5, SHAPES, torch.float32, held, group_size)
    versions, micro_batches = 2, 3

    def run(rank, group):
        prefetcher = make(group, layout, num_buffers=num_buffers)
        pulled, looked = counted_reads(prefetcher.store)
        for version in range(versions):
            prefetcher.publish(own_weights(layout, rank, version))
            for _ in range(micro_batches):
                used_in_training(prefetcher, version, layout.num_layers)
        prefetcher.close()
        return pulled, looked, prefetcher.statistics

    for rank, (pulled, looked, found) in enumerate(VirtualWorld(1, num_ranks).run(run)):
        layers = [(source, size) for source, size, kept in pulled if not kept]
        copies = [size for _, size, kept in pulled if kept]
        assert {source for source, _ in layers} <= set(layout.members(rank)) - {rank}
        assert sum(size for _, size in layers) == found.pulls * layout.fetched * ONE_EXPERT
        assert sum(copies) == found.kept_bytes == versions * layout.num_layers * layout.kept(rank) * ONE_EXPERT
        assert found.pulls == (10 if num_buffers == 5 else versions * (2 + 3 * 2 * micro_batches))
        assert found.missed == 0
        outside = {(one, wanted) for one, counter, wanted in looked if one not in layout.members(rank)}
        counts = [(one, wanted) for one, counter, wanted in looked if counter == places.KEPT]
        assert {one for one, _ in counts} <= set(layout.members(rank)), "KEPT is for the group"
        assert outside and max(wanted for _, wanted in outside) <= versions


def test_with_buffers_for_all_layers_an_evaluation_reads_nothing_more():
    def run(rank, group):
        prefetcher = make(group, FOUR, num_buffers=FOUR.num_layers)
        prefetcher.publish(own_weights(FOUR, rank, 0))
        for _ in range(3):
            for layer in range(FOUR.num_layers):
                check_layer(prefetcher, layer, 0)
                prefetcher.release(layer, training=False)
        found = dataclasses.replace(prefetcher.statistics)
        prefetcher.close()
        return found.pulls, found.kept_bytes, found.missed

    assert VirtualWorld(1, 4).run(run) == [(5, 5 * 2 * ONE_EXPERT, 0)] * 4


# ---- early, late, and never


def test_ranks_that_fetch_nothing_serve_the_others_version_after_version():
    """One of them is slow to copy: it publishes anew when the copies of all layers are there, not before, for the owner
    writes over what they come from."""

    def run(rank, group):
        prefetcher = make(group, FOUR)
        if rank == 1:
            slow_copies(prefetcher.store, 0.1)
        for version in range(3):
            prefetcher.publish(own_weights(FOUR, rank, version))
            for layer in (4, 1, 0) if rank in (0, 3) else ():
                check_layer(prefetcher, layer, version)
                prefetcher.release(layer, training=False)
        prefetcher.close()
        return prefetcher.statistics.kept_bytes

    assert VirtualWorld(1, 4).run(run) == [3 * 5 * 2 * ONE_EXPERT] * 4


def slow_copies(store, seconds):
    """Pulls of kept copies take so long, each, from now on; every other pull does not."""
    pull = store.memory.keeping.pull

    def slowly(sources, work):
        if work[0][0] is store.kept:
            time.sleep(seconds)
        return pull(sources, work)

    store.memory.keeping.pull = slowly


@pytest.mark.parametrize("owner_is_late", [False, True])
def test_a_member_that_closes_early_has_its_copies_there_first(owner_is_late):
    def run(rank, group):
        prefetcher = make(group, FOUR, timeout_s=10)
        if rank == 1:
            slow_copies(prefetcher.store, 0.1)
        if rank == 3 and owner_is_late:
            time.sleep(1)
        prefetcher.publish(own_weights(FOUR, rank, 0))
        if rank == 1:
            prefetcher.close()
            return None
        for layer in reversed(range(5)):
            check_layer(prefetcher, layer, 0)
            prefetcher.release(layer, training=False)
        prefetcher.close()
        return True

    assert VirtualWorld(1, 4).run(run) == [True, None, True, True]


def test_a_layer_waits_for_its_own_copies_and_not_for_those_of_all_layers():
    def run(rank, group):
        prefetcher = make(group, FOUR)
        slow_copies(prefetcher.store, 0.2)
        prefetcher.publish(own_weights(FOUR, rank, 0))
        started = time.monotonic()
        check_layer(prefetcher, 0, 0)
        first = time.monotonic() - started
        prefetcher.release(0)
        for layer in range(1, 5):
            check_layer(prefetcher, layer, 0)
            prefetcher.release(layer)
        whole = time.monotonic() - started
        prefetcher.close()
        return first, whole

    for first, whole in VirtualWorld(1, 4).run(run):
        assert first < 0.6 and whole >= 0.9, (first, whole)


@pytest.mark.parametrize("absent", [1, 3])
def test_whoever_does_not_publish_is_named_in_and_out_of_its_group(absent):
    """Rank 0 does not read the memory of rank 3: rank 1 does, and is not named for being kept waiting by it."""

    def run(rank, group):
        prefetcher = make(group, FOUR, timeout_s=0.7)
        if rank == absent:
            time.sleep(2.5)
            prefetcher.close()
            return absent
        prefetcher.publish(own_weights(FOUR, rank, 0))
        with pytest.raises(DeadlineError, match=f"not published by rank {absent}: rank {rank} waited") as failed:
            prefetcher.acquire(0)
        prefetcher.close()
        return failed.value.peer

    assert VirtualWorld(1, 4).run(run) == [absent] * 4


def test_a_member_whose_copies_do_not_come_is_named():
    released = threading.Event()

    def run(rank, group):
        prefetcher = make(group, FOUR, timeout_s=0.7)
        if rank == 1:
            pull = prefetcher.store.memory.keeping.pull

            def stuck(sources, work):
                released.wait(30)
                return pull(sources, work)

            prefetcher.store.memory.keeping.pull = stuck
        prefetcher.publish(own_weights(FOUR, rank, 0))
        if rank in (2, 3):
            check_layer(prefetcher, 0, 0)
            prefetcher.release(0)
        elif rank == 0:
            with pytest.raises(DeadlineError, match="copies of others' experts are not there yet on rank 1") as failed:
                prefetcher.acquire(0)
            assert (failed.value.peer, failed.value.expected, failed.value.seen) == (1, 1, 0)
            released.set()
        else:
            released.wait(30)
        prefetcher.close()
        return True

    assert all(VirtualWorld(1, 4).run(run))


def test_a_member_that_still_reads_is_waited_for_and_named():
    """Rank 1 would write over copies that rank 0 reads. Its counterpart, whose memory rank 0 does not read, goes on."""
    done = threading.Barrier(3)

    def run(rank, group):
        prefetcher = make(group, FOUR, timeout_s=0.7)
        prefetcher.publish(own_weights(FOUR, rank, 0))
        for layer in range(5):
            check_layer(prefetcher, layer, 0)
            prefetcher.release(layer, training=False)
        if rank == 0:
            time.sleep(2.5)
            prefetcher.close()
            return None
        found = None
        try:
            prefetcher.publish(own_weights(FOUR, rank, 1))
        except DeadlineError as error:
            found = error.peer, "weights are still read by rank 0" in str(error)
        done.wait(30)
        prefetcher.close()
        return found

    assert VirtualWorld(1, 4).run(run) == [None, (0, True), (0, True), None]


# ---- faults that the values show


def told_too_soon(store):
    """KEPT before the copies are there, on one member of each group; the other one's are there soon."""
    if store.rank % 2 == 0:
        return
    tell, counter = store.memory.keeping.tell_behind, itertools.count(1)
    slow_copies(store, 0.1)
    slowly = store.memory.keeping.pull

    def pull(sources, work):
        if work[0][0] is store.kept:
            tell(store.shared, places.KEPT, next(counter))
        return slowly(sources, work)

    store.memory.keeping.pull = pull


def not_looked_at(store):
    """KEPT, by who reads the copies."""
    wait = store.wait
    store.wait = lambda counter, *how: None if counter == places.KEPT else wait(counter, *how)
    if store.rank % 2:
        slow_copies(store, 0.1)


def members_forgotten(store):
    """A holder that does not wait for its group to have read; it waits for those that copy from it."""
    store._readers = [rank for rank in store._readers if rank not in store.layout.members(store.rank)]


def copiers_forgotten(store):
    """An owner that waits for its group alone, and not for those that copy from it, which in one group are slow."""
    store._readers = [rank for rank in store._readers if rank in store.layout.members(store.rank)]
    if store.rank in store.layout.members(0):
        slow_copies(store, 0.15)


FAULTS = [told_too_soon, not_looked_at, members_forgotten, copiers_forgotten]


def right_everywhere(rank, group, fault, late):
    """Whether all that a rank read was right, by whether it lay among a member's copies: three versions, of which rank
    `late` reads the second slowly, and layers that were not guessed."""
    prefetcher = make(group, FOUR)
    if fault is not None:
        fault(prefetcher.store)
    from_copies = [run.kept for run in FOUR.read_by_layer(rank) for _ in range(run.count)]
    right = {True: [], False: []}
    for version in range(3):
        prefetcher.publish(own_weights(FOUR, rank, version))
        for layer in (4, 0, 3, 1):
            if rank == late and version:
                time.sleep(0.15)
            there = prefetcher.acquire(layer)
            for n, wanted in enumerate(others(FOUR, rank, layer, version)):
                kept = len(there.kept[n])
                right[False] += list(map(torch.equal, there.kept[n], wanted[:kept]))
                for copied, stack, one in zip(from_copies, there.fetched[n], wanted[kept:], strict=True):
                    right[copied].append(torch.equal(stack, one))
            prefetcher.release(layer, training=False)
    prefetcher.store.open_gradients()
    for layer in range(FOUR.num_layers):
        prefetcher.store.add_gradients(layer, [[torch.ones(6, *shape)] for shape in SHAPES])
    prefetcher.store.bring_home(lambda layer, n, parts: None)  # nobody's memory goes under a reader
    prefetcher.close()
    return all(right[True]), all(right[False])


def test_without_a_fault_everything_is_right():
    for late in (0, 3):
        found = VirtualWorld(1, 4).run(lambda rank, group, late=late: right_everywhere(rank, group, None, late))
        assert found == [(True, True)] * 4


@pytest.mark.parametrize("fault", FAULTS)
def test_each_of_the_waits_of_groups_is_needed(fault):
    """Copies that a member holds are wrong, or with the last one those that come from owners."""
    found = [
        right
        for late in (0, 1)
        for right in VirtualWorld(1, 4).run(lambda rank, group, late=late: right_everywhere(rank, group, fault, late))
    ]
    which = 1 if fault is copiers_forgotten else 0
    assert not all(right[which] for right in found), found
