"""Callers of ElasticBuffer under activation checkpointing: handles whose tensors they save and put back in the
backward, as NeMo Automodel does, and dispatches that a recomputed forward repeats by the first one's handle, as
DeepSpeed does."""

from __future__ import annotations

import pytest
import torch
from callers import check_layer, experts_of_choices, experts_of_groups, layer_inputs
from torch.utils.checkpoint import checkpoint

import hybrid_ep
from hybrid_ep.testing import VirtualWorld

TOKENS, LOCAL, TOPK, HIDDEN = (6, 1, 3, 9), 2, 3, 16
EXPERTS = 4 * LOCAL
SAVED = (
    "topk_idx",
    "psum_num_recv_tokens_per_scaleup_rank",
    "psum_num_recv_tokens_per_expert",
    "recv_src_metadata",
    "dst_buffer_slot_idx",
    "token_metadata_at_forward",
    "channel_linked_list",
    "num_unaligned_recv_tokens_per_expert",
)


@pytest.fixture(params=[2, 4], ids=["2x2", "1x4"])
def world(request, monkeypatch):
    monkeypatch.setenv("HYBRID_EP_RANKS_PER_NODE", str(request.param))
    monkeypatch.setenv("HYBRID_EP_TIMEOUT_S", "60")
    hybrid_ep.compat.install_as_deep_ep()
    yield VirtualWorld(4 // request.param, request.param)
    hybrid_ep.compat.uninstall()


class Kept:
    """A handle whose tensors lie with autograd between a forward and its backward."""

    def __init__(self, ctx, handle):
        self.handle, self.names = handle, [n for n in SAVED if getattr(handle, n, None) is not None]
        ctx.save_for_backward(*(getattr(handle, n) for n in self.names))

    def restored(self, ctx):
        for name, tensor in zip(self.names, ctx.saved_tensors, strict=True):
            setattr(self.handle, name, tensor)
        return self.handle


class Dispatch(torch.autograd.Function):
    """first: the handle of a dispatch that is repeated, or None."""

    @staticmethod
    def forward(ctx, buffer, x, idx, weights, expanded, first):
        routing = {"handle": first} if first else {"topk_idx": idx, "num_experts": EXPERTS}
        rows, recv_idx, recv_weights, handle, _ = buffer.dispatch(
            x, **routing, topk_weights=weights.float(), do_expand=expanded, num_max_tokens_per_rank=max(TOKENS)
        )
        ctx.buffer, ctx.kept = buffer, Kept(ctx, handle)
        return rows, recv_idx, recv_weights, handle

    @staticmethod
    def backward(ctx, grad, _idx, grad_weights, _handle):
        handle = ctx.kept.restored(ctx)
        x, weights, _ = ctx.buffer.combine(grad.contiguous(), handle, topk_weights=grad_weights.contiguous())
        return None, x, None, weights, None, None


class Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx, buffer, rows, handle):
        ctx.buffer, ctx.kept = buffer, Kept(ctx, handle)
        return buffer.combine(rows.contiguous(), handle=handle)[0]

    @staticmethod
    def backward(ctx, grad):
        handle = ctx.kept.restored(ctx)
        rows = ctx.buffer.dispatch(
            grad.contiguous(), handle=handle, num_sms=handle.num_sms, do_expand=handle.do_expand
        )[0]
        return None, rows, None


@pytest.mark.parametrize("expanded", [False, True])
@pytest.mark.parametrize("reentrant", [None, False, True], ids=["kept", "non-reentrant", "reentrant"])
def test_handles_that_are_saved_restored_and_repeated(world, expanded, reentrant):
    import deep_ep

    def work(rank, group):
        buffer = deep_ep.ElasticBuffer(
            group, num_max_tokens_per_rank=max(TOKENS), hidden=HIDDEN, num_topk=TOPK, explicitly_destroy=True
        )
        handles = []

        def layer(x, idx, weights):
            again = torch._C._current_graph_task_id() != -1 and reentrant is False
            rows, recv_idx, recv_weights, handle = Dispatch.apply(
                buffer, x, idx, weights, expanded, handles[-1] if again else None
            )
            handles.append(handle)
            if not expanded:
                return Combine.apply(buffer, experts_of_choices(rows, recv_idx, recv_weights, rank * LOCAL), handle)
            ends = handle.psum_num_recv_tokens_per_expert
            counts = torch.diff(ends, prepend=ends.new_zeros(1))
            scaled = rows * recv_weights.reshape(-1, 1)
            return Combine.apply(buffer, experts_of_groups(scaled, counts, rank * LOCAL), handle)

        def checkpointed(*given):
            return layer(*given) if reentrant is None else checkpoint(layer, *given, use_reentrant=reentrant)

        for step in range(2):
            x, idx, weights = layer_inputs(10 * step + rank, TOKENS[rank - step], EXPERTS, TOPK, HIDDEN)
            check_layer(checkpointed, x, idx, weights)
        buffer.destroy()
        return len(handles)

    assert set(world.run(work)) == {2 if reentrant is None else 4}
