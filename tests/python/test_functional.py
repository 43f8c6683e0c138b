"""The autograd operators: gradients against a model that never communicates, gradcheck, activation
checkpointing."""

from __future__ import annotations

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from hybrid_ep import functional as F
from hybrid_ep.testing import VirtualWorld

H, EXPERTS_PER_RANK, K = 16, 2, 3


def world_and_buffers(shape=(2, 2)):
    world = VirtualWorld(*shape)
    return world, world.buffers(H, 16, EXPERTS_PER_RANK, timeout_s=60)


def routing(rank: int, num_experts: int):
    """With dropped and duplicated choices."""
    g = torch.Generator().manual_seed(100 + rank)
    idx = torch.randint(-1, num_experts, (4 + rank, K), generator=g)
    weights = torch.rand(4 + rank, K, generator=g)
    return torch.randn(4 + rank, H, generator=g), idx, weights, torch.randn(4 + rank, H, generator=g)


def expert(e: int, x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x * (1 + 0.1 * e)) + 0.01 * e


def dense_moe(x, idx, weights, num_experts):
    """The same layer on one rank: every expert on every token."""
    out = torch.zeros_like(x)
    for e in range(num_experts):
        weight = (weights * (idx == e)).sum(1, keepdim=True)
        out = out + weight * expert(e, x)
    return out


def moe(buffer, x, idx, weights, probs=None, pad=4):
    """The layer through dispatch, experts, combine."""
    first = buffer.rank * EXPERTS_PER_RANK
    route = {"topk_idx": idx, "topk_weights": weights} if probs is None else {"routing_map": probs > 0, "probs": probs}
    rows, w, _, counts, handle = F.dispatch_with_permute(
        buffer, x, pad_multiple=pad, num_of_experts_per_rank=EXPERTS_PER_RANK, **route
    )
    parts = torch.split(rows, counts.tolist())
    out = torch.cat([expert(first + e, part) for e, part in enumerate(parts)]) * w[:, None]
    return F.combine_with_unpermute(buffer, out, handle)[0]


@pytest.mark.parametrize("recompute", [None, False, True])
@pytest.mark.parametrize("dense_routing", [False, True])
def test_layer_and_gradients_equal_those_of_one_rank(recompute, dense_routing):
    """recompute: use_reentrant of torch.utils.checkpoint, None without it. Ranks run their backwards at the
    same time."""
    world, buffers = world_and_buffers()

    def work(rank, _):
        x, idx, weights, grad = routing(rank, 8)
        x.requires_grad_()
        if dense_routing:
            leaf = torch.zeros(idx.shape[0], 9).scatter_add_(1, idx + 1, weights)[:, 1:].contiguous()
            leaf.requires_grad_()

            def forward(x, w):
                return moe(buffers[rank], x, None, None, probs=w)
        else:
            leaf = weights.requires_grad_()

            def forward(x, w):
                return moe(buffers[rank], x, idx, w)

        out = forward(x, leaf) if recompute is None else checkpoint(forward, x, leaf, use_reentrant=recompute)
        if recompute is True:  # the re-entrant kind knows backward() only
            out.backward(grad)
            got = x.grad, leaf.grad
        else:
            got = torch.autograd.grad(out, (x, leaf), grad)
        if dense_routing:
            want = sum(leaf[:, e : e + 1] * expert(e, x) for e in range(8))
        else:
            want = dense_moe(x, idx, leaf, 8)
        want_grads = torch.autograd.grad(want, (x, leaf), grad)
        torch.testing.assert_close(out, want)
        for g, w in zip(got, want_grads, strict=True):
            if dense_routing and g.shape == leaf.shape:
                w = w * (leaf > 0)
            elif g.shape == leaf.shape:
                w = w * (idx >= 0)
            torch.testing.assert_close(g, w)
            assert g.abs().sum() > 0

    world.run(work)


@pytest.mark.parametrize("permute", [False, True])
def test_a_combine_for_its_backward_alone_exchanges_nothing(permute):
    """Its result is NaN, its gradient that of a combine; what it cannot be given is named."""
    world, buffers = world_and_buffers()

    def work(rank, _):
        x, idx, weights, grad = routing(rank, 8)
        names = ("dispatch_with_permute", "combine_with_unpermute") if permute else ("dispatch", "combine")
        verb, combine = (getattr(F, name) for name in names)
        rows, *_, handle = verb(buffers[rank], x, topk_idx=idx, topk_weights=weights, num_of_experts=8)
        results = []
        for backward_only in (False, True):
            leaf = rows.detach().clone().requires_grad_()
            before = buffers[rank].traffic()
            out, probs = combine(buffers[rank], leaf, handle, backward_only=backward_only)
            assert (buffers[rank].traffic() == before) == backward_only and probs is None
            out.backward(grad)
            results.append((out.detach(), leaf.grad))
        (sums, first), (nothing, second) = results
        assert nothing.shape == sums.shape and nothing.dtype == sums.dtype and nothing.isnan().all()
        assert torch.equal(first, second)
        for wrong, name in ({"async_finish": True}, "async_finish"), ({"probs": torch.ones(1)}, "probs"):
            with pytest.raises(ValueError, match=f"backward_only=True with {name}"):
                combine(buffers[rank], leaf, handle, backward_only=True, **wrong)

    world.run(work)


@pytest.mark.parametrize("permute", [False, True])
def test_each_is_the_adjoint_of_the_other(permute):
    """<dispatch(x, w), (y, v)> over all ranks equals <(x, w), combine(y, v)>: exact integers, so equal."""
    world, buffers = world_and_buffers()

    def work(rank, _):
        x, idx, weights, _ = routing(rank, 8)
        x, weights = (x * 4).round().requires_grad_(), (weights * 8).round().requires_grad_()
        f, back = (F.dispatch_with_permute, F.combine_with_unpermute) if permute else (F.dispatch, F.combine)
        rows, w, *_, handle = f(buffers[rank], x, topk_idx=idx, topk_weights=weights)
        g = torch.Generator().manual_seed(rank)
        y = torch.randint(-3, 4, rows.shape, generator=g).float()
        v = torch.randint(-3, 4, w.shape, generator=g).float()
        gx, gw = torch.autograd.grad((rows, w), (x, weights), (y, v), retain_graph=True)
        again = torch.autograd.grad((rows, w), (x, weights), (y, v))  # a handle is used as often as needed
        assert torch.equal(gx, again[0]) and torch.equal(gw, again[1])
        tokens, probs = back(buffers[rank], y.requires_grad_(), handle, v.requires_grad_())
        gy, gv = torch.autograd.grad((tokens, probs), (y, v), (x.detach(), torch.ones_like(probs)))
        assert torch.equal(gy, rows.detach())
        assert gv.shape == v.shape
        return (((rows * y).sum() + (w * v).sum()).item(), ((x * gx).sum() + (weights * gw).sum()).item())

    results = world.run(work)
    left, right = sum(r[0] for r in results), sum(r[1] for r in results)
    assert left == right and left != 0


def test_gradcheck_on_one_rank():
    """Finite differences, in fp32 on a piecewise linear operator: exact up to rounding."""
    world, buffers = world_and_buffers((1, 1))
    idx = torch.tensor([[0, 1, -1], [1, 1, 0], [-1, -1, -1]])
    x, w = torch.randn(3, H).requires_grad_(), torch.rand(3, K).requires_grad_()

    def layer(x, w):
        rows, weights, _, _, handle = F.dispatch_with_permute(
            buffers[0], x, topk_idx=idx, topk_weights=w, pad_multiple=4
        )
        return F.combine_with_unpermute(buffers[0], rows * 2, handle, weights)

    assert torch.autograd.gradcheck(layer, (x, w), eps=1e-2, atol=1e-2, rtol=1e-2, nondet_tol=0.0)


def test_only_one_output_used():
    world, buffers = world_and_buffers((1, 1))
    x, w = torch.randn(3, H).requires_grad_(), torch.rand(3, 1).requires_grad_()
    idx = torch.tensor([[0], [1], [-1]])
    rows, weights, *_ = F.dispatch_with_permute(buffers[0], x, topk_idx=idx, topk_weights=w)
    weights.sum().backward(retain_graph=True)
    assert w.grad.flatten().tolist() == [1, 1, 0] and (x.grad is None or not x.grad.any())
    x.grad = w.grad = None
    rows.sum().backward()
    assert x.grad[:, 0].tolist() == [1, 1, 0] and (w.grad is None or not w.grad.any())


def gradients_in_processes(ctx):
    # torch's checkpoint imports the compiler in its first call: seconds of CPU time in which the other ranks wait in a
    # dispatch. On a busy machine that was longer than the deadline, so all ranks have it before anybody waits.
    import torch._dynamo

    from hybrid_ep import HybridEPBuffer

    torch.distributed.barrier(ctx.group(4))
    with HybridEPBuffer(
        ctx.group(4), H, 16, EXPERTS_PER_RANK, timeout_s=50, num_of_hybrid_ep_ranks_per_nvlink_domain=2
    ) as buffer:
        x, idx, weights, grad = routing(ctx.rank, 8)
        x.requires_grad_(), weights.requires_grad_()
        for use_reentrant in (None, True, False):
            x.grad = weights.grad = None

            def forward(x, w):
                return moe(buffer, x, idx, w)

            out = (
                forward(x, weights)
                if use_reentrant is None
                else checkpoint(forward, x, weights, use_reentrant=use_reentrant)
            )
            out.backward(grad)
            want = torch.autograd.grad(dense_moe(x, idx, weights, 8), (x, weights), grad)
            torch.testing.assert_close(x.grad, want[0])
            torch.testing.assert_close(weights.grad, want[1])


def test_gradients_and_recompute_in_real_processes(world):
    world.run(gradients_in_processes, ranks=range(4))


def test_async_finish_gives_an_event_and_the_same_gradients():
    world, buffers = world_and_buffers()

    def layer(buffer, x, idx, weights, **order):
        rows, w, _, _, handle, *sent = F.dispatch_with_permute(
            buffer, x, topk_idx=idx, topk_weights=weights, num_of_experts_per_rank=EXPERTS_PER_RANK, **order
        )
        for event in sent:
            event.current_stream_wait()
        out = F.combine_with_unpermute(buffer, torch.tanh(rows) * w[:, None], handle, **order)
        for event in out[2:]:
            event.current_stream_wait()
        assert len(sent) == len(out[2:]) == int(bool(order))
        return out[0]

    def work(rank, _):
        x, idx, weights, grad = routing(rank, 8)
        got = []
        for order in ({}, {"async_finish": True}):
            leaves = x.clone().requires_grad_(), weights.clone().requires_grad_()
            out = layer(buffers[rank], leaves[0], idx, leaves[1], **order)
            got.append([out.detach(), *torch.autograd.grad(out, leaves, grad)])
        assert all(torch.equal(a, b) for a, b in zip(*got, strict=True))

        rows, *_, handle, sent = F.dispatch(
            buffers[rank], x, topk_idx=idx, topk_weights=weights, num_of_experts=8, async_finish=True
        )
        assert len(F.combine(buffers[rank], rows, handle, async_finish=True, previous_event=sent)) == 3
        wide = torch.zeros(2, 128)
        with pytest.raises(ValueError, match="async_finish=True, but dispatch_dtype='fp8'"):
            F.dispatch_with_permute(buffers[rank], wide, topk_idx=idx[:2], dispatch_dtype="fp8", async_finish=True)

    world.run(work)


def test_rows_and_handles_that_are_none_are_named():
    world, (buffer,) = world_and_buffers((1, 1))
    x, idx = torch.ones(2, H), torch.tensor([[0], [1]])
    for verb in (F.dispatch, F.dispatch_with_permute):
        for hidden, said in ((None, "hidden is NoneType None"), (x[0], r"hidden is a torch.float32 tensor of shape")):
            with pytest.raises(ValueError, match=said + ".*; give a tensor of 2 dimensions"):
                verb(buffer, hidden, topk_idx=idx)
    for dispatch, combine, length in (
        (F.dispatch, F.combine, 7),
        (F.dispatch_with_permute, F.combine_with_unpermute, 11),
    ):
        for hidden in (None, x[0]):
            for backward_only in (False, True):
                with pytest.raises(ValueError, match=r"hidden is .*\[rows of the dispatch, hidden\]"):
                    combine(buffer, hidden, (), backward_only=backward_only)
        for handle, said in (
            (None, "handle is NoneType None; give the handle tuple"),
            ((1, 2), f"handle has 2 elements; give the {length}-tuple"),
            ((None,) * length, "handle's number of tokens=None must be an integer"),
        ):
            with pytest.raises(ValueError, match=said):
                combine(buffer, x, handle, backward_only=True)
        rows, *_, handle = dispatch(buffer, x, topk_idx=idx)
        assert combine(buffer, rows, handle, backward_only=True)[0].isnan().all()


def test_async_finish_is_refused_inside_a_compiled_graph(monkeypatch):
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    with pytest.raises(ValueError, match="async_finish is given inside torch.compile"):
        F.combine(None, torch.zeros(1, H), (), async_finish=True)
