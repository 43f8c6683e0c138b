"""deep_ep.Buffer against plain torch.distributed and against hybrid_ep.reference, bit for bit."""

from __future__ import annotations

import gc

import pytest
import torch
from callers import Oracle, integers, routing
from world import RankError

from hybrid_ep import compat, reference
from hybrid_ep.compat import over_hybrid
from hybrid_ep.compat.buffer import Buffer, _keys
from hybrid_ep.compat.events import Config, EventHandle, EventOverlap
from hybrid_ep.testing import VirtualWorld

LOCAL, HIDDEN, TOPK = 2, 32, 3


def send(buffer, x, idx, weights=None, **options):
    """The two calls of a caller: layout, dispatch."""
    num_experts = LOCAL * buffer.group_size
    per_rank, per_node, per_expert, in_rank, _ = buffer.get_dispatch_layout(idx, num_experts)
    return buffer.dispatch(
        x,
        topk_idx=idx,
        topk_weights=weights,
        num_tokens_per_rank=per_rank,
        num_tokens_per_rdma_rank=per_node,
        is_token_in_rank=in_rank,
        num_tokens_per_expert=per_expert,
        **options,
    )


@pytest.fixture
def two_by_two(monkeypatch):
    """(world, a Buffer of each of its four ranks, seen as two nodes)."""
    monkeypatch.setenv("HYBRID_EP_RANKS_PER_NODE", "2")
    monkeypatch.setenv("HYBRID_EP_TIMEOUT_S", "30")
    world = VirtualWorld(2, 2)
    return world, world.run(lambda rank, group: Buffer(group, 1 << 20, 0))


def _compare(ctx, size, nodes, dtype):
    """On real processes: forward and backward of a routing, twice with different numbers of tokens."""
    group = ctx.group(size)
    buffer = Buffer(group, int(1e6), int(1e6))
    assert buffer.runtime.is_available() and buffer.runtime.get_num_rdma_ranks() == nodes
    for step, tokens in enumerate(((7, 0, 12, 5)[ctx.rank], (3, 9, 1, 0)[ctx.rank])):
        idx, weights = routing(10 * step + ctx.rank, tokens, LOCAL * size, TOPK)
        x = integers(100 + 10 * step + ctx.rank, tokens, HIDDEN, dtype)
        oracle = Oracle(group, idx, LOCAL)
        per_rank, per_node, per_expert, in_rank, event = buffer.get_dispatch_layout(idx, LOCAL * size)
        owners = [set((row[row >= 0] // LOCAL).tolist()) for row in idx]
        assert [row.nonzero().flatten().tolist() for row in in_rank] == [sorted(o) for o in owners]
        assert per_rank.tolist() == [sum(r in o for o in owners) for r in range(size)] and event.event is None
        assert per_expert.tolist() == [int((idx == e).sum()) for e in range(LOCAL * size)]
        local_ranks = size // nodes
        want = [sum(any(r // local_ranks == n for r in o) for o in owners) for n in range(nodes)]
        assert (per_node is None) if nodes == 1 else (per_node.tolist() == want)

        rows, recv_idx, recv_weights, counts, handle, _ = send(buffer, x, idx, weights, expert_alignment=4)
        assert torch.equal(rows, oracle.dispatch(x)) and torch.equal(recv_idx, oracle.local_idx())
        assert torch.equal(recv_weights, oracle.local_weights(weights))
        assert counts == [-(-n // 4) * 4 for n in oracle.rows_per_expert()]

        y = integers(200 + ctx.rank, len(rows), HIDDEN, dtype)
        grads = integers(300 + ctx.rank, len(rows) * TOPK, 1, torch.float32).view(-1, TOPK)
        out, out_weights, _ = buffer.combine(y, handle, topk_weights=grads)
        assert torch.equal(out.double(), oracle.combine(y))
        assert torch.equal(out_weights.double(), oracle.combine(grads * (recv_idx >= 0)))
        assert out_weights.dtype == torch.float32
        again = buffer.dispatch(out, handle=handle)
        assert torch.equal(again[0], oracle.dispatch(out)) and again[1:5] == (None,) * 4
        biased, *_ = buffer.combine(y, handle, bias=(x, x))
        assert torch.equal(biased.double(), oracle.combine(y) + 2 * x.double())
    buffer.destroy()
    buffer.destroy()
    assert not buffer.runtime.is_available()


@pytest.mark.parametrize(("size", "nodes"), [(4, 1), (4, 2)])
def test_plain_collectives_say_the_same(world, size, nodes, monkeypatch):
    world.run(_with_nodes, size, nodes, torch.bfloat16, ranks=range(size))


def _with_nodes(ctx, size, nodes, dtype):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HYBRID_EP_RANKS_PER_NODE", str(size // nodes))
        patch.setenv("HYBRID_EP_TIMEOUT_S", "30")
        _compare(ctx, size, nodes, dtype)


def test_sums_are_those_of_the_reference(two_by_two):
    """Not only integers: any bf16 value is summed in the reference's order."""
    world, buffers = two_by_two
    shape = reference.World(2, 2, LOCAL)
    torch.manual_seed(1)
    x = [torch.randn(n, HIDDEN).bfloat16() for n in (5, 8, 0, 3)]
    idx = [routing(r, len(x[r]), 8, TOPK)[0] for r in range(4)]
    plan = reference.plan_world(shape, [reference.densify(shape, topk_idx=i)[0] for i in idx])
    want_rows = [rows for rows, *_ in reference.dispatch_world(plan, x, permute=False)]
    y = [torch.randn(rows.shape).bfloat16() for rows in want_rows]
    want = [out for out, _ in reference.combine_world(plan, y, permuted=False)]

    def work(rank, _):
        rows, *_, handle, _ = send(buffers[rank], x[rank], idx[rank])
        assert torch.equal(rows, want_rows[rank])
        return buffers[rank].combine(y[rank], handle)[0]

    assert all(torch.equal(a, b) for a, b in zip(world.run(work), want, strict=True))


def test_scales_travel_and_events_are_what_callers_make_of_them(two_by_two):
    world, buffers = two_by_two
    idx = [routing(r, 6, 8, TOPK)[0] for r in range(4)]
    x = [integers(r, 6, HIDDEN, torch.float32).to(torch.float8_e4m3fn) for r in range(4)]
    scales = [torch.arange(12.0).view(6, 2) + 100 * r for r in range(4)]

    def work(rank, _):
        buffer, before = buffers[rank], EventOverlap(EventHandle())
        layout = buffer.get_dispatch_layout(
            idx[rank], 8, previous_event=before, async_finish=True, allocate_on_comm_stream=True
        )
        layout[4].current_stream_wait()
        (rows, got), _, weights, _, handle, event = send(
            buffer,
            (x[rank], scales[rank]),
            idx[rank],
            previous_event=layout[4],
            async_finish=True,
            allocate_on_comm_stream=True,
            config=Buffer.get_dispatch_config(4),
        )
        with event:
            pass
        later = EventOverlap(None)
        later.event = event.event
        later.current_stream_wait()
        assert weights is None and got.dtype == torch.float32
        cached = buffer.dispatch((x[rank], scales[rank]), handle=handle, previous_event=Buffer.capture())
        assert torch.equal(cached[0][1], got) and torch.equal(cached[0][0].view(torch.uint8), rows.view(torch.uint8))
        with pytest.raises(RuntimeError, match="async_finish"):
            cached[5].current_stream_wait()
        return got[:, 0].tolist()

    firsts = world.run(work)
    want = [
        [
            float(2 * t + 100 * s)
            for s in range(4)
            for t in range(6)
            if any(e // LOCAL == rank for e in idx[s][t].tolist() if e >= 0)
        ]
        for rank in range(4)
    ]
    assert firsts == want


def test_a_handle_survives_autograd_and_checkpointing_and_is_forgotten_after(two_by_two):
    """Callers put a handle's tensors through save_for_backward; activation checkpointing detaches them on the way and
    drops the originals, which the hooks here do too."""
    world, buffers = two_by_two

    class Round(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, buffer, idx):
            rows, *_, handle, _ = send(buffer, x, idx)
            ctx.save_for_backward(*handle)
            ctx.buffer = buffer
            return buffer.combine(rows, handle)[0]

        @staticmethod
        def backward(ctx, grad):
            handle = ctx.saved_tensors
            rows = ctx.buffer.dispatch(grad, handle=handle)[0]
            return ctx.buffer.combine(rows, handle)[0], None, None

    idx = [routing(r, 6, 8, TOPK)[0] for r in range(4)]
    owners = [torch.tensor([len(set((row[row >= 0] // LOCAL).tolist())) for row in i])[:, None] for i in idx]

    def work(rank, _):
        x = integers(rank, 6, HIDDEN, torch.float32).requires_grad_()
        with torch.autograd.graph.saved_tensors_hooks(torch.Tensor.detach, lambda kept: kept):
            out = Round.apply(x, buffers[rank], idx[rank])
        out.sum().backward()
        return torch.equal(x.grad, owners[rank].expand_as(x).float())

    assert all(world.run(work))
    gc.collect()
    assert not _keys

    def copied(rank, _):
        *_, handle, _ = send(buffers[rank], integers(rank, 6, HIDDEN), idx[rank])
        lost = (handle[0].clone(), *handle[1:])
        del handle
        with pytest.raises(ValueError, match="forgotten"):
            buffers[rank].combine(integers(rank, 6, HIDDEN), lost)

    world.run(copied)


def test_num_sms_of_the_class_and_of_a_call(two_by_two, monkeypatch):
    world, buffers = two_by_two
    seen: list = []
    real = type(buffers[0]._hybrid._session).blocks
    monkeypatch.setattr(
        type(buffers[0]._hybrid._session),
        "blocks",
        lambda self, op, num_sms, config: seen.append(num_sms) or real(self, op, num_sms, config),
    )
    monkeypatch.setattr(Buffer, "num_sms", 20)
    monkeypatch.setattr(Buffer, "_num_sms_was_set", False)
    idx = routing(0, 4, 8, TOPK)[0]

    def once(**options):
        world.run(lambda rank, _: send(buffers[rank], integers(0, 4, HIDDEN), idx, **options))
        values, seen[:] = set(seen), []
        return values

    assert Buffer.num_sms == 20 and once() == {None}
    assert once(config=Config(num_sms=3)) == {3}
    Buffer.set_num_sms(2)
    assert once() == {2} and Buffer.get_combine_config(7).num_sms == 2
    assert Config().get_nvl_buffer_size_hint(64, 4) == Config().get_rdma_buffer_size_hint(64, 4) == 0


IDX = torch.tensor([[0, 3], [2, -1]])
BAD = {
    "layout of another routing": (
        lambda b, x: b.dispatch(x, topk_idx=IDX, **_layout(b, torch.tensor([[0, 1], [2, -1]]))),
        ValueError,
        "is_token_in_rank is not",
    ),
    "no layout": (lambda b, x: b.dispatch(x, topk_idx=IDX), NotImplementedError, "get_dispatch_layout"),
    "no routing": (lambda b, x: b.dispatch(x, **_layout(b, IDX)), NotImplementedError, "topk_idx"),
    "an expert twice": (lambda b, x: b.get_dispatch_layout(torch.tensor([[1, 1]]), 4), ValueError, "twice in row 0"),
    "odd experts": (lambda b, x: b.get_dispatch_layout(IDX, 5), ValueError, "num_experts=5"),
    "handle and topk_idx": (lambda b, x: b.dispatch(x, handle=(1,), topk_idx=IDX), ValueError, "handle and topk_idx"),
    "a foreign handle": (lambda b, x: b.dispatch(x, handle=(x,) * 6), ValueError, "handle is not one"),
    "num_worst_tokens": (lambda b, x: b.dispatch(x, num_worst_tokens=8), NotImplementedError, "non_blocking=True"),
    "nvfp4": (lambda b, x: b.dispatch((x, x, x)), NotImplementedError, "NVFP4"),
    "fp16 scales": (lambda b, x: b.dispatch((x, x)), ValueError, "4 bytes"),
    "event of something else": (lambda b, x: b.dispatch(x, previous_event=3), ValueError, "previous_event"),
    "alignment 0": (lambda b, x: b.dispatch(x, expert_alignment=0), ValueError, "expert_alignment=0"),
    "config": (lambda b, x: b.dispatch(x, topk_idx=IDX, config=3, **_layout(b, IDX)), ValueError, "deep_ep.Config"),
    "low latency": (lambda b, x: b.low_latency_dispatch(x, IDX, 4, 4), NotImplementedError, "non_blocking=True"),
    "its sibling": (lambda b, x: b.low_latency_combine(x, IDX, x, ()), NotImplementedError, "low-latency"),
    "its masks": (lambda b, x: b.low_latency_clean_mask_buffer(), NotImplementedError, "low-latency"),
    "registered memory": (lambda b, x: b.get_local_buffer_tensor(x.dtype), NotImplementedError, "not handed out"),
    "streams": (lambda b, x: b.get_comm_stream(), RuntimeError, "CPU"),
    "num_sms": (lambda b, x: Buffer.set_num_sms(0), ValueError, "new_num_sms=0"),
    "runtime": (lambda b, x: b.runtime.intranode_dispatch, AttributeError, "methods of the buffer"),
}


def _layout(buffer, idx):
    names = ("num_tokens_per_rank", "num_tokens_per_rdma_rank", "num_tokens_per_expert", "is_token_in_rank")
    return dict(zip(names, buffer.get_dispatch_layout(idx, 4)[:4], strict=True))


def test_what_is_not_served_says_what_to_use():
    world = VirtualWorld(1, 2)
    x = integers(0, 2, HIDDEN)

    def work(rank, group):
        for options, text in (
            ({"comm": 3}, "torch.distributed"),
            ({"allow_nvlink_for_normal_mode": False}, "True"),
            ({"enable_shrink": True}, "enable_shrink=True: the low-latency calls.* leave it False"),
        ):
            with pytest.raises(NotImplementedError, match=text):
                Buffer(group, **options)
        buffer = Buffer(group, low_latency_mode=True, num_qps_per_rank=4, explicitly_destroy=True)
        for name, (call, kind, text) in BAD.items():
            with pytest.raises(kind) as raised:
                call(buffer, x)
            assert text in str(raised.value), name
        rows, *_, handle, _ = buffer.dispatch(x, topk_idx=IDX, **_layout(buffer, IDX))
        with pytest.raises(ValueError, match="topk_weights"):
            buffer.combine(rows, handle, topk_weights=torch.ones(len(rows), 3))
        with pytest.raises(ValueError, match="bias is a torch.bfloat16 tensor of shape .* give one tensor of shape"):
            buffer.combine(rows, handle, bias=x[:1])
        return torch.equal(buffer.combine(rows, handle)[0].float(), x.float() * torch.tensor([[2.0], [1.0]]))

    assert world.run(work) == [True, True]


def test_a_planted_error_shows(world):
    """The comparisons above are of use only if a wrong column fails them."""
    with pytest.raises(RankError, match="AssertionError"):
        world.run(_planted, ranks=range(4))


def _planted(ctx):
    real = over_hybrid.local_choices
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(over_hybrid, "local_choices", lambda *arguments: real(*arguments).roll(1, 1))
        _with_nodes(ctx, 4, 2, torch.bfloat16)


def test_served_under_every_name():
    module = compat.install_as_deep_ep()
    try:
        assert module.Buffer is Buffer and module.utils.EventOverlap is EventOverlap
    finally:
        compat.uninstall()
