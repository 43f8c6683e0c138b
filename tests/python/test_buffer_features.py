"""What goes beyond one call: handles, growth, budgets, capacity, disagreement, life and death of a buffer."""

from __future__ import annotations

import inspect
import threading
import warnings

import pytest
import torch
from examples import Example, check, expected, make_inputs

from hybrid_ep import CapacityError, HybridEPBuffer, reference
from hybrid_ep.errors import BufferFailedError, ReentrantCallError
from hybrid_ep.runtime.handle_kinds import OVERFLOW_FLAG
from hybrid_ep.testing import VirtualWorld

EX = Example(2, 2, 2, (6, 9, 12, 3), 3, seed=5, exact=True)


def world_and_buffers(ex: Example = EX, max_tokens: int = 16, **options):
    world = VirtualWorld(ex.num_nodes, ex.num_local_ranks)
    return world, world.buffers(ex.hidden, max_tokens, ex.num_local_experts, timeout_s=30, **options)


def test_signatures_are_those_of_deep_ep():
    def names(f):
        return [p.name for p in inspect.signature(f).parameters.values()][1:]

    assert names(HybridEPBuffer.__init__)[:15] == [
        "group",
        "hidden_dim",
        "max_num_of_tokens_per_rank",
        "num_local_experts",
        "use_fp8",
        "num_sms_dispatch_api",
        "num_sms_combine_api",
        "num_sms_preprocessing_api",
        "num_blocks_permute",
        "num_blocks_unpermute",
        "load_cached_kernels",
        "use_shared_buffer",
        "enable_custom_allgather",
        "num_of_hybrid_ep_ranks_per_nvlink_domain",
        "use_mnnvl",
    ]
    assert names(HybridEPBuffer.dispatch) == [
        "hidden",
        "scaling_factor",
        "topk_idx",
        "topk_weights",
        "num_of_experts",
        "probs",
        "routing_map",
        "num_dispatched_tokens_tensor",
        "num_dispatched_tokens",
        "handle",
        "num_of_tokens_per_rank",
        "num_sms",
    ]
    assert names(HybridEPBuffer.combine)[:3] == ["hidden", "probs", "handle"]
    assert names(HybridEPBuffer.dispatch_with_permute) == [
        "hidden",
        "topk_idx",
        "topk_weights",
        "num_of_experts_per_rank",
        "num_of_experts",
        "use_fp8",
        "routing_map",
        "probs",
        "scaling_factor",
        "num_permuted_tokens",
        "pad_multiple",
        "num_of_tokens_per_rank",
        "handle",
        "non_blocking",
        "fuse_permute_dispatch",
        "num_dispatched_tokens",
        "use_host_meta",
        "pad_empty_experts",
        "num_sms",
        "path",
    ]
    assert names(HybridEPBuffer.combine_with_unpermute)[:6] == [
        "hidden",
        "probs",
        "handle",
        "pad_multiple",
        "fuse_unpermute_combine",
        "num_dispatched_tokens",
    ]
    assert names(HybridEPBuffer.update_template_config) == [
        "hidden_dim",
        "num_of_tokens_per_rank",
        "num_local_experts",
        "pad_multiple",
        "use_fp8",
        "fuse_permute_dispatch",
        "kwargs",
    ]
    for verb in (HybridEPBuffer.dispatch_with_permute, HybridEPBuffer.combine_with_unpermute):
        kinds = {p.kind for p in list(inspect.signature(verb).parameters.values())[1:]}
        assert kinds == {inspect.Parameter.KEYWORD_ONLY}


def test_handles_outlive_later_calls_growth_and_the_buffer():
    world, buffers = world_and_buffers(max_tokens=1)
    want = expected(EX)
    bigger = Example(2, 2, 3, (60, 9, 50, 3), 6, 64, "fp32", seed=6)

    def work(rank, _):
        mine = want.inputs[rank]
        *_, handle = buffers[rank].dispatch_with_permute(hidden=mine.hidden, **mine.routing())
        check(buffers[rank], rank, bigger)  # grows tokens, experts, topk, row bytes
        for _ in range(2):
            out, probs = buffers[rank].combine_with_unpermute(
                hidden=want.returned[rank], probs=want.returned_probs[rank], handle=handle
            )
            assert torch.equal(out, want.combined[rank][0]) and torch.equal(probs, want.combined[rank][1])
        buffers[rank].destroy()
        return handle

    expected(bigger)
    handles = world.run(work)
    others = world.buffers(16, 1, 2, timeout_s=30)

    def elsewhere(rank, _):
        out, _ = others[rank].combine_with_unpermute(hidden=want.returned[rank], handle=[*handles[rank]])
        assert torch.equal(out, want.combined[rank][0])

    world.run(elsewhere)


def test_handle_maps_say_where_the_rows_are():
    world, buffers = world_and_buffers()
    want = expected(EX)
    dense = want.plan.ranks

    def work(rank, _):
        mine, node = want.inputs[rank], rank // 2
        *_, handle = buffers[rank].dispatch(mine.hidden, None, num_of_experts=8, **mine.routing())
        slots, needed, remote = (t.cpu() for t in handle[:3])
        first = 0
        for source in (s for s in range(4) if s % 2 == rank % 2):
            for t in range(EX.tokens[source]):
                for local in range(2):
                    to = dense[node * 2 + local]
                    hit = ((to.source == source) & (to.token == t)).nonzero().flatten().tolist()
                    assert slots[first + t, local] == (hit[0] if hit else -1)
                assert needed[first + t] == (slots[first + t] >= 0).any()
            first += EX.tokens[source]
        assert slots.shape == (first, 2) and needed.shape == (first,)
        other = 1 - node
        routed = want.plan.routes[rank][:, 4 * other : 4 * other + 4].any(1, keepdim=True)
        assert torch.equal(remote, routed)

    world.run(work)


def test_tokens_are_any_layout_and_alignment():
    world, buffers = world_and_buffers()
    want = expected(EX)

    def work(rank, _):
        mine = want.inputs[rank]
        wide = torch.zeros(mine.hidden.shape[0], 35, dtype=torch.bfloat16)
        wide[:, 3:35:2] = mine.hidden
        shifted = torch.zeros(mine.hidden.numel() + 1, dtype=torch.bfloat16)[1:].view_as(mine.hidden).copy_(mine.hidden)
        for hidden in (wide[:, 3:35:2], shifted, mine.hidden.clone().requires_grad_()):
            rows, _, _, _, _ = buffers[rank].dispatch_with_permute(
                hidden=hidden, topk_idx=mine.topk_idx.t().contiguous().t(), topk_weights=mine.topk_weights
            )
            assert torch.equal(rows, want.permuted[rank][0]) and not rows.requires_grad

    world.run(work)


def test_new_weights_through_a_handle():
    world, buffers = world_and_buffers()
    want = expected(EX)

    def work(rank, _):
        mine = want.inputs[rank]
        *_, handle = buffers[rank].dispatch_with_permute(hidden=mine.hidden, topk_idx=mine.topk_idx)
        by_topk = buffers[rank].dispatch_with_permute(
            hidden=mine.hidden, handle=handle, topk_idx=mine.topk_idx, topk_weights=mine.topk_weights
        )
        by_probs = buffers[rank].dispatch_with_permute(hidden=mine.hidden, handle=handle, probs=want.weights[rank])
        assert torch.equal(by_topk[1], want.permuted[rank][1]) and torch.equal(by_probs[1], want.permuted[rank][1])

    world.run(work)


def test_extra_rows_are_zero_and_ignored():
    world, buffers = world_and_buffers()
    want = expected(EX)

    def work(rank, _):
        mine, n = want.inputs[rank], want.permuted[rank][0].shape[0]
        rows, weights, _, _, handle = buffers[rank].dispatch_with_permute(
            hidden=mine.hidden, num_permuted_tokens=torch.tensor(n + 40), **mine.routing()
        )
        assert rows.shape[0] == n + 40 and not rows[n:].any() and not weights[n:].any()
        assert torch.equal(rows[:n], want.permuted[rank][0]) and int(handle[OVERFLOW_FLAG]) == 0
        padding = torch.full((40, EX.hidden), float("nan"), dtype=torch.bfloat16)
        out, _ = buffers[rank].combine_with_unpermute(hidden=torch.cat([want.returned[rank], padding]), handle=handle)
        assert torch.equal(out, want.combined[rank][0])

    world.run(work)


def test_a_budget_that_is_too_small_raises_on_every_rank_alike():
    world, buffers = world_and_buffers()
    want = expected(EX)
    need = [p.num_permuted_rows for p in want.plan.ranks]

    def work(rank, _):
        mine = want.inputs[rank]
        buffers[rank].dispatch_with_permute(
            hidden=mine.hidden, num_permuted_tokens=need[rank] - (rank == 2), **mine.routing()
        )

    errors = world.run(work, return_errors=True)
    assert all(isinstance(e, CapacityError) for e in errors) and len({str(e) for e in errors}) == 1
    assert "on rank 2 (1 row" in str(errors[0])
    world.run(lambda rank, _: check(buffers[rank], rank, EX))


def test_overflow_drop_flags_and_counts():
    world, buffers = world_and_buffers(overflow="drop")
    want = expected(EX)
    budgets = [4, 0, 8, 100]
    plan = reference.plan_world(EX.world, want.plan.routes, 1, budgets)
    rows = reference.dispatch_world(plan, [i.hidden for i in want.inputs], want.weights, None, True, budgets)
    sums = reference.combine_world(plan, [r for r, _, _ in rows], [w for _, w, _ in rows])

    def work(rank, _):
        mine = want.inputs[rank]
        got = buffers[rank].dispatch_with_permute(
            hidden=mine.hidden, num_permuted_tokens=budgets[rank], **mine.routing()
        )
        assert torch.equal(got[0], rows[rank][0]) and torch.equal(got[1], rows[rank][1])
        assert int(got[-1][-1]) == plan.ranks[rank].overflow == (rank != 3)
        assert got[-1][-2].plan.num_dropped == plan.ranks[rank].num_dropped
        out, probs = buffers[rank].combine_with_unpermute(hidden=got[0], probs=got[1], handle=got[-1])
        assert torch.equal(out, sums[rank][0]) and torch.equal(probs, sums[rank][1])

    world.run(work)


def test_capacity_factor_bounds_memory_and_raises_or_drops():
    ex = Example(1, 4, 2, (10, 10, 10, 10), 2, skew="one_rank", exact=True)
    want, routes = expected(ex), expected(ex).plan.routes
    _, whole = world_and_buffers(ex, 10)
    world, buffers = world_and_buffers(ex, 10, capacity_factor=2)
    assert buffers[0].memory_report().total_bytes < whole[0].memory_report().total_bytes

    def blocking(rank, _):
        mine = want.inputs[rank]
        return buffers[rank].dispatch_with_permute(hidden=mine.hidden, **mine.routing())

    errors = world.run(blocking, return_errors=True)
    assert all(isinstance(e, CapacityError) and "capacity_factor=2" in str(e) for e in errors)
    assert errors[0].rows == (40, 0, 0, 0) and len({str(e) for e in errors}) == 1

    plan = reference.plan_world(ex.world, routes, 1, None, recv_capacity=20)
    rows = reference.dispatch_world(plan, [i.hidden for i in want.inputs], want.weights, None, True)
    sums = reference.combine_world(plan, [r for r, _, _ in rows], [w for _, w, _ in rows])
    world, buffers = world_and_buffers(ex, 10, capacity_factor=2, overflow="drop")
    got = world.run(blocking)
    for rank in range(4):
        assert torch.equal(got[rank][0], rows[rank][0]) and torch.equal(got[rank][1], rows[rank][1])
        assert int(got[rank][-1][-1]) == int(plan.ranks[rank].overflow) == int(rank == 0)
    back = world.run(
        lambda rank, _: buffers[rank].combine_with_unpermute(
            hidden=got[rank][0], probs=got[rank][1], handle=got[rank][-1]
        )
    )
    for rank in range(4):
        assert torch.equal(back[rank][0], sums[rank][0]) and torch.equal(back[rank][1], sums[rank][1])


@pytest.mark.parametrize(
    "what",
    [
        "hidden",
        "dtype",
        "pad_multiple",
        "pad_empty_experts",
        "num_of_experts",
        "routing",
        "weights",
        "scaling_factor",
        "verb",
    ],
)
def test_ranks_that_disagree_about_a_call_are_named(what):
    world, buffers = world_and_buffers()

    def work(rank, _):
        mine, odd = make_inputs(EX, rank), rank == 3
        arguments = {"hidden": mine.hidden, "pad_multiple": 4, "num_of_experts": 8, **mine.routing()}
        if odd:
            arguments.update(
                {
                    "hidden": {"hidden": torch.zeros(3, 32, dtype=torch.bfloat16)},
                    "dtype": {"hidden": mine.hidden.half()},
                    "pad_multiple": {"pad_multiple": 8},
                    "pad_empty_experts": {"pad_empty_experts": True},
                    "num_of_experts": {"num_of_experts": 16},
                    "routing": {
                        "topk_idx": None,
                        "topk_weights": None,
                        "num_of_experts": None,
                        "routing_map": torch.ones(len(mine.hidden), 8, dtype=torch.bool),
                        "probs": None,
                    },
                    "weights": {"topk_weights": None},
                    "scaling_factor": {"scaling_factor": torch.zeros(3, 2)},
                    "verb": {"non_blocking": True, "num_permuted_tokens": 16},
                }[what]
            )
        buffers[rank].dispatch_with_permute(**arguments)

    errors = world.run(work, return_errors=True)
    assert all(type(e) is ValueError for e in errors), errors
    assert len({str(e) for e in errors}) == 1
    assert "on ranks [3]" in str(errors[0]) and "on ranks [0, 1, 2]" in str(errors[0])
    assert what != "routing" or "routing must be the same" in str(errors[0])
    world.run(lambda rank, _: check(buffers[rank], rank, EX))


def test_template_config_makes_room_at_the_next_dispatch():
    world, buffers = world_and_buffers(max_tokens=4)
    before = buffers[0].memory_report().total_bytes
    config = buffers[1].update_template_config(
        num_of_tokens_per_rank=500, num_of_blocks_dispatch_api=1, pad_multiple=16
    )
    assert config.max_num_of_tokens_per_rank == 500 and config.pad_multiple == 16
    world.run(lambda rank, _: check(buffers[rank], rank, EX))
    sizes = {b.memory_report().total_bytes for b in buffers}
    assert len(sizes) == 1 and sizes.pop() > before + 400 * EX.hidden * 2


def test_deprecated_arguments_are_accepted_with_a_warning():
    world, buffers = world_and_buffers(Example(tokens=(5,)))
    hidden, idx = torch.ones(5, 16), torch.zeros(5, 1, dtype=torch.int64)
    with pytest.warns(DeprecationWarning, match="num_dispatched_tokens"):
        *_, handle = buffers[0].dispatch_with_permute(hidden=hidden, topk_idx=idx, num_dispatched_tokens=5)
    with pytest.warns(DeprecationWarning, match="num_dispatched_tokens"):
        buffers[0].combine_with_unpermute(hidden=hidden, handle=handle, num_dispatched_tokens=5)
    with pytest.warns(DeprecationWarning, match="use_host_meta"):
        rows, *_ = buffers[0].dispatch_with_permute(
            hidden=hidden, topk_idx=idx, use_host_meta=False, num_permuted_tokens=9
        )
    assert rows.shape[0] == 9
    with pytest.warns(DeprecationWarning, match="use_mnnvl"):
        HybridEPBuffer(world.groups[0], 16, 8, 2, use_mnnvl=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        buffers[0].dispatch(hidden, topk_idx=idx, num_dispatched_tokens=5)


def test_two_threads_at_once_are_refused():
    world, buffers = world_and_buffers()
    inside, errors = threading.Event(), []

    def second():
        inside.wait(10)
        mine = make_inputs(EX, 0)
        try:
            buffers[0].dispatch(mine.hidden, None, num_of_experts=8, **mine.routing())
        except ReentrantCallError as error:
            errors.append(error)

    thread = threading.Thread(target=second)
    thread.start()
    with buffers[0]._session:
        inside.set()
        thread.join()
    assert len(errors) == 1 and "another thread" in str(errors[0])
    world.run(lambda rank, _: check(buffers[rank], rank, EX))


def test_a_destroyed_buffer_says_so():
    _, buffers = world_and_buffers(Example(tokens=(5,)))
    with buffers[0] as buffer:
        pass
    buffer.destroy()
    for call in (buffer.memory_report, buffer.traffic, lambda: buffer.dispatch(torch.ones(1, 16))):
        with pytest.raises(BufferFailedError, match="destroyed"):
            call()


def test_private_segments_leave_no_names():
    world, _ = world_and_buffers()
    assert len(world.segments) == 0
