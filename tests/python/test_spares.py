"""SpareSlots: weights of clones arrive whole in the slots of their holders, gradients at home, summed in the plan's
order."""

from __future__ import annotations

import functools
import multiprocessing
import os
import signal
import sys
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybrid_ep.balance import MicrobatchOptions
from hybrid_ep.balance.owners import Owners
from hybrid_ep.errors import BootstrapError, BufferFailedError, DeadlineError
from hybrid_ep.spares import SpareSlots
from hybrid_ep.testing import VirtualWorld

pytestmark = pytest.mark.balance

SHAPES = [(3, 8), (16,), (4, 40)]


def drawn(shape, *seed: int, dtype=torch.float32) -> torch.Tensor:
    """Numbers whose sums depend on their order."""
    random = np.random.default_rng(seed)
    return torch.from_numpy(random.standard_normal(shape) * 10.0 ** random.integers(-4, 4, shape)).to(dtype)


def random_plan(random, num_ranks: int, spare: int, owners: Owners, per_node: int | None = None) -> torch.Tensor:
    """per_node: clones lie on the nodes, of so many ranks, of their owners; else anywhere."""
    full, per_node = random.choice([0.0, 0.4, 1.0]), per_node or num_ranks
    near = [owners.experts_of(rank) for rank in range(num_ranks)]
    of_node = [sum(near[n : n + per_node], ()) for n in range(0, num_ranks, per_node)]
    chosen = np.stack([random.choice(of_node[rank // per_node], spare) for rank in range(num_ranks)])
    return torch.from_numpy(np.where(random.random(chosen.shape) < full, chosen, -1).astype(np.int32))


def owners_of(random, num_ranks: int, owned: int) -> Owners:
    owners = Owners(num_ranks * owned, num_ranks)
    if random.random() < 0.5:
        owners.assign(random.permutation(num_ranks * owned))
    return owners


def make(group, spare: int, owned: int, dtype=torch.float32, **options) -> SpareSlots:
    how = {"timeout_s": 20, "shapes": SHAPES, "executor": "host"} | options
    return SpareSlots(group, spare_slots=spare, num_owners=owned, dtype=dtype, **how)


def train(
    slots: SpareSlots,
    rank: int,
    seed: int,
    num_ranks: int,
    spare: int,
    owned: int,
    dtype,
    device: str = "cpu",
    idle=lambda: None,
    per_node: int | None = None,
    within_node: bool = True,
) -> int:
    """Several layers over the same slots, forward and backward; returns the clones seen.

    device: where tensors lie. idle: called behind every operation; on a GPU it returns when the rank's stream is.
    per_node: ranks of a node, where there are several, on which clones stay with within_node."""
    random, clones = np.random.default_rng(seed), 0
    several = [owners_of(random, num_ranks, owned) for _ in range(2)]
    stays = per_node if within_node else None
    layers = [(random_plan(random, num_ranks, spare, owners, stays), owners) for owners in several * 2]
    weight = lambda layer, e, n: drawn(SHAPES[n], seed, layer, e, n, dtype=dtype)  # noqa: E731
    gradient = lambda layer, r, s, n: drawn(SHAPES[n], seed, layer, 7, r, s, n)  # noqa: E731
    order = list(range(len(layers)))
    for layer in order + order[::-1]:  # each is pushed again in the backward
        plan, owners = layers[layer]
        mine = owners.experts_of(rank)
        weights = [[weight(layer, e, n).to(device) for n in range(len(SHAPES))] for e in mine]
        slots.push(plan.to(device), weights, owners)
        idle()
        slots.wait()
        idle()
        for s, e in enumerate(plan[rank].tolist()):
            for n in range(len(SHAPES)):
                assert e < 0 or torch.equal(slots.weights[n][s].cpu(), weight(layer, e, n)), (layer, s, n)
            clones += e >= 0
    for layer in order[::-1]:
        plan, owners = layers[layer]
        mine = owners.experts_of(rank)
        for n, stack in enumerate(slots.gradients):
            for s in range(spare):
                stack[s].copy_(gradient(layer, rank, s, n))
        sums = [[drawn(SHAPES[n], seed, layer, e, n, 5) for n in range(len(SHAPES))] for e in mine]
        on_device = [[x.to(device, copy=True) for x in one] for one in sums]
        holders = {e: [(r, s) for (r, s), found in np.ndenumerate(plan.numpy()) if found == e] for e in mine}
        local = per_node or num_ranks
        behind = [(rank // local + 1 + n) % (num_ranks // local) for n in range(num_ranks // local)]

        def summed(x, e, n, layer=layer, holders=holders, behind=behind, local=local):
            for node in behind:
                made = [gradient(layer, r, s, n) for r, s in holders[e] if r // local == node]
                x = x + functools.reduce(torch.add, made) if made else x.clone()
            return x

        wanted = [[summed(x, e, n) for n, x in enumerate(one)] for e, one in zip(mine, sums, strict=True)]
        slots.collect(plan.to(device), on_device, owners)
        idle()
        pairs = zip(on_device, wanted, strict=True)
        assert all(torch.equal(x.cpu(), y) for a, b in pairs for x, y in zip(a, b, strict=True))
    return clones


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    num_ranks=st.integers(1, 5),
    spare=st.integers(1, 3),
    owned=st.integers(1, 3),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    executor=st.sampled_from(["host", "host", "host_checked_lanes4"]),
    blocks=st.integers(1, 3),
)
def test_any_plan_gives_owners_weights_and_sums_in_the_plans_order(
    seed, num_ranks, spare, owned, dtype, executor, blocks
):
    def work(rank, group):
        slots = make(group, spare, owned, dtype, executor=executor, num_blocks=blocks)
        train(slots, rank, seed, num_ranks, spare, owned, dtype)
        slots.destroy()

    VirtualWorld(1, num_ranks).run(work)


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    num_nodes=st.integers(2, 3),
    per_node=st.integers(1, 3),
    spare=st.integers(1, 3),
    owned=st.integers(1, 3),
    executor=st.sampled_from(["host", "host", "host_checked_lanes4"]),
    within_node=st.booleans(),
)
def test_plans_of_several_nodes_give_owners_weights_and_sums_in_their_order(
    seed, num_nodes, per_node, spare, owned, executor, within_node
):
    dtype, ranks = torch.bfloat16, num_nodes * per_node

    def work(rank, group):
        declared = {"num_of_hybrid_ep_ranks_per_nvlink_domain": per_node, "clones_within_node": within_node}
        slots = make(group, spare, owned, dtype, executor=executor, **declared)
        rings = slots.memory_report().regions["spare_channel_rings"]
        assert rings == (0 if within_node else 4 * (num_nodes - 1) * per_node * 64 * 32 * 1024)
        clones = train(slots, rank, seed, ranks, spare, owned, dtype, per_node=per_node, within_node=within_node)
        slots.destroy()
        return clones

    VirtualWorld(num_nodes, per_node).run(work)


def test_slots_without_gradients_have_no_memory_for_them_and_collect_nothing():
    plan = torch.tensor([[1], [0]], dtype=torch.int32)

    def work(rank, group):
        both, slots = make(group, 1, 1), make(group, 1, 1, gradients=False)
        weights = [[torch.full(shape, float(rank)) for shape in SHAPES]]
        slots.push(plan, weights)
        slots.wait()
        assert all((stack == 1 - rank).all() for stack in slots.weights) and slots.gradients == ()
        with pytest.raises(ValueError, match="made with gradients=False"):
            slots.collect(plan, [[x.clone() for x in weights[0]]])
        regions = slots.memory_report().regions, both.memory_report().regions
        assert regions[0]["spare_gradients"] == 0 < regions[1]["spare_gradients"]
        assert regions[0]["spare_weights"] == regions[1]["spare_weights"]
        both.destroy()
        slots.destroy()

    VirtualWorld(1, 2).run(work)


def test_a_clone_on_another_node_is_refused_by_all_and_slots_stay_usable():
    def work(rank, group):
        slots = make(group, 2, 1, num_of_hybrid_ep_ranks_per_nvlink_domain=2, clones_within_node=True)
        weights = [[torch.full(shape, float(rank)) for shape in SHAPES]]
        moved = Owners(4, 4)
        moved.assign([2, 3, 0, 1])
        near = torch.tensor([[1, -1], [0, -1], [-1, 3], [-1, 2]], dtype=torch.int32)
        far = torch.tensor([[1, -1], [0, -1], [-1, 3], [-1, 1]], dtype=torch.int32)
        with pytest.raises(ValueError, match=r"slot 1 of rank 3, on node 1, to expert 1 of rank 1, on node 0"):
            slots.push(far, weights)
        with pytest.raises(ValueError, match="within_node=True"):
            slots.collect(far, [[x.clone() for x in weights[0]]])
        with pytest.raises(ValueError, match=r"slot 1 of rank 2, on node 1, to expert 3 of rank 1, on node 0"):
            slots.push(torch.tensor([[-1, -1], [-1, -1], [-1, 3], [0, -1]], dtype=torch.int32), weights, moved)
        with pytest.raises(ValueError, match="plan names experts 0 to 4"):
            slots.push(near.clamp(0) + near.eq(3), weights)
        slots.push(near, weights)
        slots.wait()
        return float(slots.weights[1][rank // 2].mean())

    assert VirtualWorld(2, 2).run(work) == [1.0, 0.0, 3.0, 2.0]


def test_where_no_host_reads_the_plan_a_clone_on_another_node_is_an_empty_slot(monkeypatch):
    monkeypatch.setattr("hybrid_ep.runtime.spares.require_within", lambda *_: None)

    def work(rank, group):
        slots = make(group, 1, 1, num_of_hybrid_ep_ranks_per_nvlink_domain=2, clones_within_node=True)
        weights = [[torch.full(shape, 1.0 + rank) for shape in SHAPES]]
        plan = torch.tensor([[2], [0], [3], [1]], dtype=torch.int32)  # ranks 0 and 3 hold experts of the other node
        slots.push(plan, weights)
        slots.wait()
        for stack in slots.gradients:
            stack.fill_(1.0)
        slots.collect(plan, weights)
        return float(slots.weights[1].mean()), float(weights[0][1].mean())

    assert VirtualWorld(2, 2).run(work) == [(0.0, 2.0), (1.0, 2.0), (4.0, 3.0), (0.0, 5.0)]


def test_a_plan_of_the_kernels_is_pushed_as_it_lies():
    world = VirtualWorld(1, 4)
    buffers = world.buffers(16, 64, 3, clones=MicrobatchOptions(spare_slots=1), executor="host")

    def work(rank, group):
        slots = make(group, 1, 2)
        idx = torch.zeros(40, 1, dtype=torch.int64)  # all to one expert
        routed = buffers[rank].plan_clones(topk_idx=idx)
        weights = [[torch.full(shape, 50.0 + 10 * rank + e) for shape in SHAPES] for e in range(2)]
        slots.push(routed.plan, weights)
        slots.wait()
        held = routed.plan.slot_expert[rank, 0].item()
        assert held < 0 or all((stack[0] == 50.0 + 10 * (held // 2) + held % 2).all() for stack in slots.weights)
        return held

    assert sum(held == 0 for held in world.run(work)) == 3


@pytest.mark.parametrize("device, capturing, kept", [("cuda", False, 2), ("cuda", True, 0), ("cpu", False, 0)])
def test_wait_keeps_the_plan_for_the_stream_it_is_called_on(monkeypatch, device, capturing, kept):
    """Else the allocator could give its memory away behind push's stream, before this one has read it."""
    plan, session = mock.Mock(), mock.MagicMock(why_closed="", capturing=capturing)
    session.options.device = torch.device(device)
    session.__enter__.return_value = session
    session.__exit__.return_value = False
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"stream of {device}")
    slots = SpareSlots.__new__(SpareSlots)
    slots._session, slots._pushed = session, (plan, plan, "table")
    slots.wait()
    session.engine.await_weights.assert_called_once_with(plan, plan, None, 1)
    assert plan.record_stream.mock_calls == kept * [mock.call("stream of cuda")]


def test_slots_outlive_their_object_and_are_counted():
    def work(rank, group):
        slots = make(group, 2, 1)
        report, kept = slots.memory_report(), slots.weights[2]
        assert report.regions["spare_weights"] >= 2 * 4 * sum(int(np.prod(s)) for s in SHAPES)
        assert report.regions["spare_gradients"] == report.regions["spare_weights"]
        slots.destroy()
        kept.fill_(3.0)
        with pytest.raises(BufferFailedError, match="destroyed"):
            slots.wait()
        return float(kept.sum())

    assert VirtualWorld(1, 2).run(work) == [3.0 * 2 * 160] * 2


def test_a_forked_child_that_drops_slots_leaves_their_engine_alone():
    """A destructor there would give back what is the parent's, on a GPU with calls that a child must not make."""
    slots = VirtualWorld(1, 1).run(lambda _, group: make(group, 1, 2))[0]
    engine = slots._session.engine
    child = os.fork()
    if child == 0:
        held = sys.getrefcount(engine)
        del slots.weights, slots.gradients
        slots = None
        os._exit(held - sys.getrefcount(engine))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    slots.destroy()


def test_bad_arguments_are_refused_by_name():
    def work(rank, group):
        slots = make(group, 1, 1)
        plan = torch.full((1, 1), -1, dtype=torch.int32)
        good = [[torch.zeros(shape) for shape in SHAPES]]
        negative = torch._neg_view(torch.ones(SHAPES[0]))
        for call, match in (
            (lambda: slots.wait(), "wait: no push"),
            (lambda: slots.wait_collect(), r"wait_collect: no collection.*start_collect\("),
            (lambda: slots.push(plan.long(), good), "plan is"),
            (lambda: slots.push(plan + 9, good), "plan names experts 8 to 8"),
            (lambda: slots.push(plan, []), "weights has"),
            (lambda: slots.push(plan, [[x.double() for x in good[0]]]), r"weights\[0\]\[0\] is"),
            (lambda: slots.push(plan, [[torch.zeros(25)[1:].view(3, 8), *good[0][1:]]]), r"weights\[0\]\[0\] is not"),
            (lambda: slots.collect(plan, [[x.bfloat16() for x in good[0]]]), r"sums\[0\]\[0\] is"),
            (lambda: slots.push(plan, good, Owners(4, 2)), "owners are of 2 ranks"),
            (lambda: slots.push(plan, good, 3), "owners=3 must be hybrid_ep.balance.owners.Owners"),
            (
                lambda: slots.push(plan, None),
                "weights is NoneType None, no matrices by expert; give 3 of each of the 1",
            ),
            (lambda: slots.push(plan, [None]), "weights is list .*, no matrices by expert"),
            (lambda: slots.collect(plan, None), "sums is NoneType None"),
            (lambda: slots.push(plan, [[negative, *good[0][1:]]]), r"weights\[0\]\[0\] is .*resolve_neg"),
            (lambda: slots.collect(plan, [[negative, *good[0][1:]]]), r"sums\[0\]\[0\] is .*resolve_neg"),
        ):
            with pytest.raises(ValueError, match=match):
                call()
        slots.push(plan, good)
        with pytest.raises(ValueError, match=r"push: .*wait\(\) first"):
            slots.push(plan, good)
        slots.wait()
        slots.start_collect(plan, good)
        for call in (slots.start_collect, slots.collect):
            with pytest.raises(ValueError, match=r"start_collect: .*wait_collect\(\)"):
                call(plan, good)
        slots.wait_collect()
        slots.collect(plan, good)

    world = VirtualWorld(1, 1)
    world.run(work)
    for options, match in (
        ({"shapes": [(3,)]}, "shapes has"),
        ({"shapes": []}, "shapes has 0"),
        ({"shapes": 3}, "shapes=3"),
        ({"shapes": [(8, 8), (-8, -8)]}, r"shapes\[1\]\[0\]=-8 must be an integer of at least 1"),
        ({"shapes": [(8, 0)]}, r"shapes\[0\]\[1\]=0"),
        ({"shapes": [(8.9, 8)]}, r"shapes\[0\]\[0\]=8.9"),
        ({"shapes": [("a",)]}, r"shapes\[0\]\[0\]='a'"),
        ({"dtype": torch.int8}, "dtype is"),
        ({"num_blocks": 0}, "num_blocks"),
    ):
        with pytest.raises(ValueError, match=match):
            make(VirtualWorld(1, 1).groups[0], 1, 1, **options)
    with pytest.raises(ValueError, match="spare_slots"):
        make(VirtualWorld(1, 1).groups[0], 0, 1)


def test_a_node_that_fails_to_set_up_ends_the_others(monkeypatch):
    def full(*_):
        raise MemoryError("no room")

    def work(rank, group):
        if rank == 2:
            monkeypatch.setattr(group, "segments", type("Full", (), {"create": full, "unlink": lambda *_: None})())
        wanted = MemoryError if rank == 2 else BootstrapError
        with pytest.raises(wanted, match="no room") as failed:
            make(group, 3, 1, num_of_hybrid_ep_ranks_per_nvlink_domain=2)
        if rank == 2:
            size = 8 * sum(int(np.prod(s)) for s in SHAPES)
            assert f"lower spare_slots=3: by shapes, each has {size} bytes" in str(failed.value)
            assert "max_num_of_tokens" not in str(failed.value) and "arena" not in str(failed.value)
        else:
            assert failed.value.missing in ((2,), (2, 3)), failed.value

    VirtualWorld(2, 2).run(work)


def test_ranks_that_differ_are_refused_by_all():
    def differ(rank, group):
        with pytest.raises(ValueError, match="spares"):
            make(group, 1 + rank, 1)

    VirtualWorld(1, 2).run(differ)


def test_a_rank_that_does_not_come_is_named():
    def work(rank, group):
        slots = make(group, 1, 1, timeout_s=1.0)
        weights = [[torch.zeros(shape) for shape in SHAPES]]
        if rank == 1:
            return
        slots.push(torch.tensor([[1], [-1]], dtype=torch.int32), weights)  # rank 0 holds a clone of rank 1's
        with pytest.raises(DeadlineError, match="rank 1") as late:
            slots.wait()
        assert late.value.site == "clone_weights" and late.value.peer == 1
        with pytest.raises(BufferFailedError):
            slots.push(torch.tensor([[1], [-1]], dtype=torch.int32), weights)

    VirtualWorld(1, 2).run(work)


def test_a_rank_that_does_not_come_is_named_by_its_number_in_the_group():
    def work(rank, group):
        slots = make(group, 1, 1, timeout_s=1.0, num_of_hybrid_ep_ranks_per_nvlink_domain=2)
        weights = [[torch.zeros(shape) for shape in SHAPES]]
        plan = torch.tensor([[1], [-1], [3], [-1]], dtype=torch.int32)
        if rank == 3:
            return
        slots.push(plan, weights)
        if rank < 2:  # the other node goes on
            slots.wait()
            return
        with pytest.raises(DeadlineError, match=r"^rank 2 \(node 1\) .* from rank 3 \(node 1\)") as late:
            slots.wait()
        said = late.value
        assert (said.rank, said.node, said.peer, said.peer_node, said.site) == (2, 1, 3, 1, "clone_weights")
        with pytest.raises(BufferFailedError, match="from rank 3"):
            slots.wait()

    VirtualWorld(2, 2).run(work)


def _process(rank: int, store: str, said) -> None:
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=3)
    slots = make(dist.group.WORLD, 1, 1, timeout_s=5.0)
    plan = torch.tensor([[2], [-1], [-1]], dtype=torch.int32)
    weights = [[torch.full(shape, float(rank)) for shape in SHAPES]]
    slots.push(plan, weights)
    slots.wait()
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        slots.push(plan, weights)
        slots.wait()
    except DeadlineError as error:
        said.put((rank, float(slots.weights[0].sum()), error.site, error.peer))
        said.close()
        said.join_thread()
    os._exit(0)


def test_a_process_that_is_killed_ends_the_wait_of_who_holds_its_clone(tmp_path):
    spawn = multiprocessing.get_context("spawn")
    said = spawn.Queue()
    ranks = [spawn.Process(target=_process, args=(r, str(tmp_path / "store"), said)) for r in range(3)]
    for one in ranks:
        one.start()
    for one in ranks:
        one.join(120)
    assert ranks[2].exitcode == -signal.SIGKILL
    assert said.get(timeout=10) == (0, 2.0 * 24, "clone_weights", 2)


def test_a_plan_that_is_the_negative_of_its_memory_is_read_with_its_sign():
    def work(rank, group):
        slots = make(group, 1, 1)
        slots.push(torch._neg_view(torch.tensor([[1], [1]], dtype=torch.int32)), [[torch.ones(s) for s in SHAPES]])
        slots.wait()
        return float(slots.weights[0].sum())

    assert VirtualWorld(1, 2).run(work) == [0.0, 0.0], "the plan says -1: all slots are empty"
