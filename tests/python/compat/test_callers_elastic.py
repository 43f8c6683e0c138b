"""deep_ep.ElasticBuffer against plain torch.distributed and against hybrid_ep.reference, bit for bit."""

from __future__ import annotations

import inspect

import pytest
import torch
from callers import Oracle, gather_rows, integers, routing
from world import RankError

from hybrid_ep import compat, reference
from hybrid_ep.compat import elastic, over_hybrid
from hybrid_ep.compat.elastic import ElasticBuffer, EPHandle
from hybrid_ep.compat.events import EventHandle, EventOverlap
from hybrid_ep.testing import VirtualWorld

LOCAL, HIDDEN, TOPK = 3, 32, 4
MOST = 12  # tokens of a rank


def up(n, multiple):
    return -(-n // multiple) * multiple


class Expanded:
    """What an expanded dispatch has to give, from what its rank receives: rows by expert, then source, then token."""

    def __init__(self, oracle, alignment):
        self.choices = oracle.local_idx()
        self.counts = oracle.rows_per_expert()
        self.begins = [sum(up(n, alignment) for n in self.counts[:e]) for e in range(len(self.counts))]
        self.num_rows = sum(up(n, alignment) for n in self.counts)
        self.slots = torch.full_like(self.choices, -1)  # [M, K]: row of the result
        seen = [0] * len(self.counts)
        for token, choices in enumerate(self.choices.tolist()):
            for k, e in enumerate(choices):
                if e >= 0:
                    self.slots[token, k] = self.begins[e] + seen[e]
                    seen[e] += 1

    def rows(self, received):
        """received [M, ..] where they are to lie; zero elsewhere."""
        out = received.new_zeros(self.num_rows, *received.shape[1:])
        for token, slots in enumerate(self.slots.tolist()):
            for slot in slots:
                if slot >= 0:
                    out[slot] = received[token]
        return out

    def values(self, weights):
        """[rows] of weights [M, K]."""
        out = weights.new_zeros(self.num_rows)
        there = self.slots >= 0
        out[self.slots[there]] = weights[there]
        return out


def check_compact(ctx, buffer, oracle, x, idx, weights, nodes):
    size = buffer.num_ranks
    rows, recv_idx, recv_weights, handle, event = buffer.dispatch(
        x, topk_idx=idx, topk_weights=weights, num_experts=LOCAL * size, expert_alignment=4
    )
    assert torch.equal(rows, oracle.dispatch(x)) and torch.equal(recv_idx, oracle.local_idx())
    assert torch.equal(recv_weights, oracle.local_weights(weights)) and event.event is None
    counts = oracle.rows_per_expert()
    assert handle.num_recv_tokens_per_expert_list == [up(n, 4) for n in counts]
    assert handle.num_unaligned_recv_tokens_per_expert.tolist() == counts
    assert handle.psum_num_recv_tokens_per_expert.tolist() == [sum(up(n, 4) for n in counts[: e + 1]) for e in range(3)]
    numbers = oracle.dispatch(torch.arange(len(x))[:, None] + ctx.rank * MOST)[:, 0].int()
    metadata = handle.recv_src_metadata
    assert metadata.shape == (len(rows), TOPK + 2) and torch.equal(metadata[:, 0], numbers)
    assert (metadata[:, 2:] == -1).all() and metadata.dtype == torch.int32
    per_rank = [int((numbers // MOST == source).sum()) for source in range(size)]
    per_local = [sum(per_rank[rail :: size // nodes]) for rail in range(size // nodes)]
    psum = [sum(per_local[: rail + 1]) for rail in range(size // nodes)]
    assert handle.psum_num_recv_tokens_per_scaleup_rank.tolist() == psum and handle.num_recv_tokens == len(rows)

    y = integers(200 + ctx.rank, len(rows), HIDDEN, x.dtype)
    grads = integers(300 + ctx.rank, len(rows) * TOPK, 1, torch.float32).view(-1, TOPK)
    bias = [integers(400 + ctx.rank + i, len(x), HIDDEN, x.dtype) for i in range(2)]
    out, out_weights, _ = buffer.combine(y, handle, topk_weights=grads)
    assert torch.equal(out.double(), oracle.combine(y))
    assert torch.equal(out_weights.double(), oracle.combine(grads * (recv_idx >= 0)))
    for added in (bias[0], tuple(bias)):
        want = oracle.combine(y) + (sum(b.double() for b in added) if isinstance(added, tuple) else added.double())
        assert torch.equal(buffer.combine(y, handle, bias=added)[0].double(), want)
    again = buffer.dispatch(out, handle=handle)
    assert torch.equal(again[0], oracle.dispatch(out)) and torch.equal(again[1], recv_idx) and again[2] is None
    assert again[3] is handle
    again = buffer.dispatch(x, handle=handle, topk_weights=weights + 1)
    assert torch.equal(again[2], oracle.local_weights(weights + 1))


def check_expanded(ctx, buffer, oracle, x, idx, weights, alignment):
    size = buffer.num_ranks
    want = Expanded(oracle, alignment)
    routed = {"topk_idx": idx, "topk_weights": weights, "num_experts": LOCAL * size, "expert_alignment": alignment}
    rows, recv_idx, recv_weights, handle, _ = buffer.dispatch(x, **routed, do_expand=True)
    received = oracle.dispatch(x)
    assert recv_idx is None and handle.do_expand and torch.equal(rows, want.rows(received))
    assert torch.equal(recv_weights, want.values(oracle.dispatch(weights)))
    ends = [b + n for b, n in zip(want.begins, want.counts, strict=True)]
    assert handle.psum_num_recv_tokens_per_expert.tolist() == ends
    assert handle.num_recv_tokens_per_expert_list == [up(n, alignment) for n in want.counts]
    assert (handle.num_recv_tokens, handle.num_expanded_tokens) == (len(received), want.num_rows)
    assert torch.equal(handle.recv_src_metadata[:, 2:], want.slots.int())
    numbers = oracle.dispatch(torch.arange(len(x))[:, None] + ctx.rank * MOST)[:, 0].int()
    assert torch.equal(handle.recv_src_metadata[:, 0], numbers)

    y = integers(500 + ctx.rank, len(rows), HIDDEN, x.dtype)
    grads = integers(600 + ctx.rank, len(rows), 1, torch.float32)[:, 0]
    there = want.slots >= 0
    received_y = (y.double()[want.slots.clamp(min=0)] * there[..., None]).sum(1).to(x.dtype)
    out, out_weights, _ = buffer.combine(y, handle, topk_weights=grads)
    assert torch.equal(out.double(), oracle.combine(received_y))
    assert torch.equal(out_weights.double(), oracle.combine(grads[want.slots.clamp(min=0)] * there))
    again = buffer.dispatch(out, handle=handle, do_expand=True, topk_weights=weights + 1)
    assert torch.equal(again[0], want.rows(oracle.dispatch(out))) and again[1] is None
    assert torch.equal(again[2], want.values(oracle.dispatch(weights + 1)))
    assert buffer.dispatch(out, handle=handle, do_expand=True)[2] is None

    # Without a wait for counts: room for the worst case, the same rows, zeros behind them.
    still, _, still_weights, static, _ = buffer.dispatch(x, **routed, do_expand=True, do_cpu_sync=False)
    most = up(size * MOST * min(TOPK, LOCAL) + (alignment - 1) * LOCAL, alignment)
    assert len(still) == len(still_weights) == most == static.num_expanded_tokens
    assert torch.equal(still[: len(rows)], rows) and (still[len(rows) :] == 0).all()
    assert torch.equal(still_weights[: len(rows)], recv_weights) and (still_weights[len(rows) :] == 0).all()
    assert static.psum_num_recv_tokens_per_expert.tolist() == ends and static.num_recv_tokens_per_expert_list == []
    wide = torch.cat([y, y.new_full((most - len(y), HIDDEN), float("nan"))])
    assert torch.equal(buffer.combine(wide, static)[0].double(), oracle.combine(received_y))
    assert torch.equal(buffer.dispatch(out, handle=static, do_expand=True)[0][: len(rows)], again[0])
    assert torch.equal(static.recv_src_metadata, handle.recv_src_metadata)  # which a host has at hand


def _compare(ctx, size, nodes, dtype):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HYBRID_EP_RANKS_PER_NODE", str(size // nodes))
        patch.setenv("HYBRID_EP_TIMEOUT_S", "30")
        group = ctx.group(size)
        buffer = ElasticBuffer(group, num_max_tokens_per_rank=MOST, hidden=HIDDEN, num_gpu_timeout_secs=30)
        assert buffer.get_logical_domain_size() == (nodes, size // nodes) == buffer.get_physical_domain_size()
        before = torch.get_default_dtype()
        torch.set_default_dtype(dtype)  # as DeepEP's own tests do
        try:
            for step, tokens in enumerate(((7, 0, 12, 5)[ctx.rank], (3, 9, 1, 0)[ctx.rank], 0)):
                idx, weights = routing(10 * step + ctx.rank, tokens, LOCAL * size, TOPK)
                x = integers(100 + 10 * step + ctx.rank, tokens, HIDDEN, dtype)
                oracle = Oracle(group, idx, LOCAL)
                check_compact(ctx, buffer, oracle, x, idx, weights, nodes)
                check_expanded(ctx, buffer, oracle, x, idx, weights, (1, 4, 128)[step])
        finally:
            torch.set_default_dtype(before)
        for _ in range(3):
            buffer.barrier()
        buffer.destroy()
        assert not buffer.runtime.is_available()


@pytest.mark.parametrize(
    ("size", "nodes", "dtype"), [(4, 1, torch.bfloat16), (4, 2, torch.bfloat16), (2, 1, torch.float32)]
)
def test_plain_collectives_say_the_same(world, size, nodes, dtype):
    world.run(_compare, size, nodes, dtype, ranks=range(size))


@pytest.fixture
def two_by_two(monkeypatch):
    """(world, a buffer of each of its four ranks, seen as two nodes; one that sums once)."""
    monkeypatch.setenv("HYBRID_EP_RANKS_PER_NODE", "2")
    world = VirtualWorld(2, 2)
    sizes = {"num_max_tokens_per_rank": MOST, "hidden": HIDDEN, "num_gpu_timeout_secs": 30}

    def make(rank, group):
        return ElasticBuffer(group, **sizes), ElasticBuffer(group, **sizes, allow_multiple_reduction=False)

    return world, world.run(make)


@pytest.mark.parametrize("once", [False, True])
@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e9])
def test_sums_are_those_of_the_reference(two_by_two, once, scale):
    """Not only integers: any bf16 value is summed in the reference's order, and rounded where it says."""
    world, buffers = two_by_two
    shape = reference.World(2, 2, LOCAL)
    torch.manual_seed(1)
    x = [torch.randn(n, HIDDEN).bfloat16() for n in (5, 8, 0, 3)]
    idx = [routing(r, len(x[r]), 4 * LOCAL, TOPK)[0] for r in range(4)]
    plan = reference.plan_world(shape, [reference.densify(shape, topk_idx=i)[0] for i in idx])
    want_rows = [rows for rows, *_ in reference.dispatch_world(plan, x, permute=True)]
    y = [(scale * torch.randn(rows.shape)).bfloat16() for rows in want_rows]
    want = [out for out, _ in reference.combine_world(plan, y, permuted=True, fp32_partials=once)]

    def work(rank, _):
        buffer = buffers[rank][once]
        rows, _, _, handle, _ = buffer.dispatch(x[rank], idx[rank], num_experts=4 * LOCAL, do_expand=True)
        assert torch.equal(rows, want_rows[rank])
        return buffer.combine(y[rank], handle)[0]

    assert all(torch.equal(a, b) for a, b in zip(world.run(work), want, strict=True))


def test_scales_travel_in_rows_or_columns(two_by_two):
    world, buffers = two_by_two
    idx = [routing(r, 6, 4 * LOCAL, TOPK)[0] for r in range(4)]
    x = [integers(r, 6, HIDDEN, torch.float32).to(torch.float8_e4m3fn) for r in range(4)]
    scales = [(torch.arange(18.0).view(3, 6) + 100 * r).t() for r in range(4)]  # columns lie side by side

    def work(rank, _):
        buffer, routed = buffers[rank][0], {"topk_idx": idx[rank], "num_experts": 4 * LOCAL}
        (rows, got), recv_idx, weights, handle, event = buffer.dispatch(
            (x[rank], scales[rank]), **routed, previous_event=buffer.capture(), async_with_compute_stream=True
        )
        with event(release_handle=True):
            assert event.event is not None
        assert event.event is None and weights is None
        (_, again), *_ = buffer.dispatch((x[rank], scales[rank]), handle=handle, use_tma_aligned_col_major_sf=True)
        assert again.stride() == (1, up(len(rows), 4)) and torch.equal(again, got)
        (wide, spread), _, _, expanded, _ = buffer.dispatch((x[rank], scales[rank]), **routed, do_expand=True)
        slots = expanded.recv_src_metadata[:, 2:]
        for k in range(TOPK):
            there = slots[:, k] >= 0
            assert torch.equal(spread[slots[there, k].long()], got[there])
            assert torch.equal(wide.view(torch.uint8)[slots[there, k].long()], rows.view(torch.uint8)[there])
        (_, more), *_ = buffer.dispatch((x[rank], scales[rank]), handle=expanded, do_expand=True)
        assert torch.equal(more, spread)
        sources = handle.recv_src_metadata[:, 0]
        return got[:, 0].tolist() == [float(number % MOST + 100 * (number // MOST)) for number in sources]

    assert world.run(work) == [True] * 4


def test_statistics_are_added_once_a_routing(two_by_two):
    world, buffers = two_by_two
    idx = [routing(r, 6, 4 * LOCAL, TOPK)[0] for r in range(4)]

    def work(rank, _):
        seen = torch.ones(LOCAL, dtype=torch.int32)
        x = integers(rank, 6, HIDDEN)
        routed = {"topk_idx": idx[rank], "num_experts": 4 * LOCAL, "cumulative_local_expert_recv_stats": seen}
        _, _, _, handle, _ = buffers[rank][0].dispatch(x, **routed)
        buffers[rank][0].dispatch(x, handle=handle, cumulative_local_expert_recv_stats=seen)
        buffers[rank][0].dispatch(x, **routed, do_expand=True)
        assert torch.equal(seen, 1 + 2 * handle.num_unaligned_recv_tokens_per_expert)

    world.run(work)


def test_a_handle_is_the_callers_or_a_copy():
    world = VirtualWorld(1, 2)
    idx, x = torch.tensor([[0, 1], [2, -1]]), integers(0, 2, HIDDEN)

    def work(rank, group):
        buffer = ElasticBuffer(group, num_max_tokens_per_rank=2, hidden=HIDDEN)
        copied = buffer.dispatch(x, idx, num_experts=4)[3]
        assert torch.equal(copied.topk_idx, idx) and copied.topk_idx.data_ptr() != idx.data_ptr()
        assert buffer.dispatch(x, idx, num_experts=4, do_handle_copy=False)[3].topk_idx.data_ptr() == idx.data_ptr()
        assert copied.num_sms == buffer.get_theoretical_num_sms(4, 2) >= 1

    world.run(work)


def test_what_nobody_has_waited_for_is_not_known(monkeypatch):
    """As on a GPU, whose plans of such calls hold limits."""
    monkeypatch.setattr(elastic, "BlockingPlan", EPHandle)
    world = VirtualWorld(1, 2)

    def work(rank, group):
        buffer = ElasticBuffer(group, num_max_tokens_per_rank=2, hidden=HIDDEN)
        handle = buffer.dispatch(integers(0, 2, HIDDEN), IDX, num_experts=4, do_expand=True, do_cpu_sync=False)[3]
        for name in ("recv_src_metadata", "psum_num_recv_tokens_per_scaleup_rank", "dst_buffer_slot_idx"):
            with pytest.raises(NotImplementedError, match=f"{name} is not known .* do_cpu_sync=True"):
                getattr(handle, name)

    world.run(work)


IDX = torch.tensor([[0, 1], [2, -1]])
BAD = {
    "no routing": (lambda b, x, h: b.dispatch(x), ValueError, "topk_idx or num_experts is None"),
    "odd experts": (lambda b, x, h: b.dispatch(x, IDX, num_experts=5), ValueError, "num_experts=5"),
    "an expert twice": (lambda b, x, h: b.dispatch(x, IDX * 0, num_experts=4), ValueError, "twice in row 0"),
    "too many tokens": (
        lambda b, x, h: b.dispatch(x, IDX, num_experts=4, num_max_tokens_per_rank=1), ValueError,
        "num_max_tokens_per_rank=1 but x has 2 rows",
    ),
    "static and compact": (
        lambda b, x, h: b.dispatch(x, IDX, num_experts=4, do_cpu_sync=False), NotImplementedError, "do_expand=True"
    ),
    "handle and topk_idx": (lambda b, x, h: b.dispatch(x, IDX, handle=h), ValueError, "handle and topk_idx"),
    "and sync": (lambda b, x, h: b.dispatch(x, handle=h, do_cpu_sync=True), ValueError, "handle and do_cpu_sync"),
    "another layout": (lambda b, x, h: b.dispatch(x, handle=h, do_expand=True), ValueError, "do_expand=True but"),
    "other experts": (lambda b, x, h: b.dispatch(x, handle=h, num_experts=8), ValueError, "num_experts=8"),
    "a foreign handle": (lambda b, x, h: b.dispatch(x, handle=(x,)), ValueError, "handle is tuple"),
    "its combine": (lambda b, x, h: b.combine(x, (x,)), ValueError, "handle is tuple"),
    "bias": (lambda b, x, h: b.combine(x[:1], h, bias=x[:, :1]), ValueError, "give one tensor of shape"),
    "no bias": (lambda b, x, h: b.combine(x[:1], h, bias=()), ValueError, "an empty tuple"),
    "weights": (lambda b, x, h: b.combine(x[:1], h, topk_weights=torch.ones(7, 2)), ValueError, "topk_weights"),
    "nvfp4": (lambda b, x, h: b.dispatch((x, x, x), IDX, num_experts=4), NotImplementedError, "NVFP4"),
    "no tensor": (lambda b, x, h: b.dispatch(3, IDX, num_experts=4), ValueError, "x is int 3"),
    "an event of something else": (lambda b, x, h: b.dispatch(x, previous_event=3), ValueError, "previous_event"),
    "negative sms": (lambda b, x, h: b.dispatch(x, IDX, num_experts=4, num_sms=-1), ValueError, "num_sms=-1"),
    "engram": (lambda b, x, h: b.engram_fetch(x), NotImplementedError, "dispatch and combine are served"),
    "streams": (lambda b, x, h: b.get_comm_stream(), RuntimeError, "CPU"),
}  # fmt: skip


def test_what_is_not_served_says_what_to_use():
    world = VirtualWorld(1, 2)
    x = integers(0, 2, HIDDEN)

    def work(rank, group):
        for options, kind, text in (
            ({"num_cpu_bytes": 1}, NotImplementedError, "Engram"),
            ({"hidden": 8}, ValueError, "num_max_tokens_per_rank=0"),
        ):
            with pytest.raises(kind, match=text):
                ElasticBuffer(group, **options)
        buffer = ElasticBuffer(group, num_bytes=0, num_max_tokens_per_rank=2)
        handle = buffer.dispatch(x, IDX, num_experts=4)[3]
        for name, (call, kind, text) in BAD.items():
            with pytest.raises(kind) as raised:
                call(buffer, x, handle)
            assert text in str(raised.value), name
        rows, *_ = buffer.dispatch(x, handle=handle)
        return torch.equal(buffer.combine(rows, handle)[0].float(), x.float())

    assert world.run(work) == [True, True]


NOT_SERVED = (
    "engram_write", "engram_fetch", "get_engram_storage_size_hint",
    "pp_set_config", "pp_send", "pp_recv", "get_pp_buffer_size_hint",
    "create_agrs_session", "destroy_agrs_session", "agrs_new_session", "agrs_set_config", "agrs_get_inplace_tensor",
    "all_gather", "get_agrs_num_max_session_bytes", "get_agrs_buffer_size_hint",
)  # fmt: skip


@pytest.mark.parametrize("name", NOT_SERVED)
def test_what_is_not_served_needs_no_buffer_to_say_so(name):
    """Callers ask for sizes of the class, to construct a buffer from them."""
    with pytest.raises(NotImplementedError, match="dispatch and combine are served; not Engram"):
        getattr(ElasticBuffer, name)(1, dtype=torch.bfloat16)


def test_size_hints_grow_with_what_they_are_for():
    world = VirtualWorld(1, 2)
    hint = ElasticBuffer.get_buffer_size_hint
    one, two = (hint(group, 64, 1024) for group in world.groups)
    assert one == two and one % (2 << 20) == 0 and one >= 2 * 64 * 2 * 1024
    assert hint(world.groups[0], 4096, 1024) > one and hint(world.groups[0], 64, 65536) > one
    assert hint(world.groups[0], 64, 1024, 32) == one > hint(world.groups[0], 64, 1024, 2) - 1


def test_a_rank_without_tokens_may_count_its_own(two_by_two):
    """Callers that give the rows of x as num_max_tokens_per_rank, as Megatron-LM does, give 0 where there are none."""
    world, buffers = two_by_two
    tokens = (2, 0, 3, 0)
    hint = ElasticBuffer.get_buffer_size_hint
    assert hint(world.groups[0], 0, HIDDEN) == hint(world.groups[0], 1, HIDDEN) > 0

    def work(rank, _):
        idx, x = routing(rank, tokens[rank], 4 * LOCAL, TOPK)[0], integers(rank, tokens[rank], HIDDEN)
        for expand in (False, True):
            rows, *_, handle, _ = buffers[rank][0].dispatch(
                x, idx, num_experts=4 * LOCAL, num_max_tokens_per_rank=tokens[rank], do_expand=expand
            )
            again = buffers[rank][0].dispatch(x, handle=handle, do_expand=expand, num_max_tokens_per_rank=0)[0]
            assert torch.equal(rows, again) and handle.num_max_tokens_per_rank == (tokens[rank] or MOST)
            assert len(buffers[rank][0].combine(rows, handle)[0]) == tokens[rank]
        if tokens[rank]:
            with pytest.raises(ValueError, match=f"num_max_tokens_per_rank=0 but x has {tokens[rank]} rows"):
                buffers[rank][0].dispatch(x, idx, num_experts=4 * LOCAL, num_max_tokens_per_rank=0)

    world.run(work)


def test_events_release_and_call_back():
    said = []
    event = EventOverlap(EventHandle())
    event.register_hook_after_wait(lambda: said.append("waited"))
    with pytest.raises(RuntimeError, match="a hook already"):
        event.register_hook_after_wait(lambda: None)
    event.current_stream_wait()
    event.current_stream_wait(release_handle=True)
    assert said == ["waited"] and event.event is None
    with event:  # without an event there is nothing to wait for
        pass


@pytest.mark.parametrize("what", ["choices", "numbers", "slots"])
def test_a_planted_error_shows(world, what, monkeypatch):
    """The comparisons above are of use only if a wrong column, number or slot fails them."""
    with pytest.raises(RankError, match="AssertionError"):
        world.run(_planted, what, ranks=range(4))


def _planted(ctx, what):
    with pytest.MonkeyPatch.context() as patch:
        if what == "choices":
            real = over_hybrid.local_choices
            patch.setattr(over_hybrid, "local_choices", lambda *a: real(*a).roll(1, 1))
        elif what == "numbers":
            patch.setattr(ElasticBuffer, "_most_tokens", lambda *_: MOST + 1)
        else:
            real_metadata = EPHandle.recv_src_metadata.func
            patch.setattr(EPHandle, "recv_src_metadata", property(lambda h: real_metadata(h).roll(1, 0)))
        _compare(ctx, 4, 1, torch.bfloat16)


# Signatures, as facts: deepseek-ai/DeepEP, branch main, commit dd758ca (2026-07-14), version 2.1.0.
REQUIRED = inspect.Parameter.empty
_ON_STREAMS = {
    "previous_event": None, "previous_event_before_epilogue": None, "async_with_compute_stream": False,
    "allocate_on_comm_stream": False,
}  # fmt: skip
UPSTREAM = {
    "__init__": {
        "group": REQUIRED, "num_bytes": None, "num_cpu_bytes": 0, "num_max_tokens_per_rank": 0, "hidden": 0,
        "num_topk": 0, "use_fp8_dispatch": False, "deterministic": False, "allow_hybrid_mode": True,
        "allow_multiple_reduction": True, "prefer_overlap_with_compute": True, "sl_idx": 3, "num_allocated_qps": 0,
        "num_cpu_timeout_secs": 300, "num_gpu_timeout_secs": 100, "explicitly_destroy": False,
    },
    "get_buffer_size_hint": {
        "group": REQUIRED, "num_max_tokens_per_rank": REQUIRED, "hidden": REQUIRED, "num_topk": 0,
        "use_fp8_dispatch": False, "allow_hybrid_mode": True, "allow_multiple_reduction": True,
    },
    "get_theoretical_num_sms": {
        "num_experts": REQUIRED, "num_topk": REQUIRED, "num_scaleout_topk": 0, "rdma_gbs": 0, "nvlink_gbs": 0,
        "sm_read_gbs": 200, "sm_write_gbs": 50,
    },
    "get_theoretical_num_qps": {"num_sms": REQUIRED},
    "barrier": {"use_comm_stream": True, "with_cpu_sync": False, "sequential": True},
    "capture": {}, "destroy": {}, "get_comm_stream": {}, "get_physical_domain_size": {}, "get_logical_domain_size": {},
    "dispatch": {
        "x": REQUIRED, "topk_idx": None, "topk_weights": None, "cumulative_local_expert_recv_stats": None,
        "num_experts": None, "num_max_tokens_per_rank": None, "expert_alignment": None, "num_sms": 0, "num_qps": 0,
        **_ON_STREAMS, "handle": None, "do_handle_copy": True, "do_cpu_sync": None, "do_expand": False,
        "do_zero_padding": False, "use_tma_aligned_col_major_sf": False,
    },
    "combine": {
        "x": REQUIRED, "handle": REQUIRED, "topk_weights": None, "bias": None, "num_sms": 0, "num_qps": 0,
        **_ON_STREAMS,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", UPSTREAM)
def test_signatures_are_upstreams(name):
    parameters = dict(inspect.signature(getattr(ElasticBuffer, name)).parameters)
    parameters.pop("self", None)
    assert {n: p.default for n, p in parameters.items()} == UPSTREAM[name]
    assert list(parameters) == list(UPSTREAM[name])


def test_served_under_every_name():
    module = compat.install_as_deep_ep()
    try:
        import deep_ep.buffers.elastic
        from deep_ep.utils.event import EventOverlap as served

        assert module.ElasticBuffer is ElasticBuffer is deep_ep.buffers.elastic.ElasticBuffer
        assert module.EPHandle is EPHandle and served is EventOverlap
    finally:
        compat.uninstall()


def test_gathered_rows_are_those_of_all_ranks(world):
    """Of the oracle, which tells nothing of hybrid_ep: every rank's rows, in order."""
    world.run(_gathered, ranks=range(2))


def _gathered(ctx):
    rows = gather_rows(torch.full((ctx.rank, 2), ctx.rank), ctx.group(2))
    assert [len(r) for r in rows] == [0, 1] and rows[1].tolist() == [[1, 1]]
