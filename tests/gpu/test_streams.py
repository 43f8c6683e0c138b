"""Blocking calls poll for their counts and synchronise nothing; streams of buffers, and their events."""

from __future__ import annotations

import pytest
import torch
from examples import Example, expected, make_inputs, same
from gpu_world import GpuWorld, call_on_two_streams

from hybrid_ep import functional
from hybrid_ep.streams import EventOverlap

EX = Example(1, 1, 4, (64,), 2, 256, pad_multiple=8, seed=3)


def routed():
    mine = make_inputs(EX, 0)
    return dict(
        hidden=mine.hidden.cuda(),
        topk_idx=mine.topk_idx.cuda(),
        topk_weights=mine.topk_weights.cuda(),
        num_of_experts=4,
        pad_multiple=8,
    )


def test_a_blocking_call_synchronises_nothing():
    world = GpuWorld(1, 1, 4, skew=0)
    buffer, call = world.raw[0], routed()
    buffer.dispatch_with_permute(**call)  # makes room
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")  # torch's own synchronising calls
    try:
        rows, weights, _, padded, handle = buffer.dispatch_with_permute(**call)
        buffer.combine_with_unpermute(hidden=rows, probs=weights, handle=handle)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert padded.device.type == "cpu" and all(t.is_cuda for t in (*handle[:8], handle[10]))
    same("rows", rows.cpu(), expected(EX).permuted[0][0])
    world.close()


@pytest.mark.parametrize("comm_stream", [None, "own"])
def test_async_results_are_right_once_their_event_was_waited_for(comm_stream):
    world = GpuWorld(1, 1, 4, skew=0, comm_stream=comm_stream)
    buffer, call = world.raw[0], routed()
    buffer.dispatch_with_permute(**call)
    rows, *_, handle = buffer.dispatch_with_permute(**call)
    want = buffer.combine_with_unpermute(hidden=rows * 2, handle=handle)[0].cpu()
    for _ in range(20):
        call["hidden"] = call["hidden"] + 0  # a tensor that dies while the call reads it
        before = EventOverlap.here()
        rows, *_, handle, sent = buffer.dispatch_with_permute(**call, async_finish=True, previous_event=before)
        with sent:
            torch.cuda._sleep(1 << 20)  # the caller's own work
        out, _, back = buffer.combine_with_unpermute(hidden=rows * 2, handle=handle, async_finish=True)
        back.current_stream_wait()
        same("rows", rows.cpu(), expected(EX).permuted[0][0])
        same("tokens", out.cpu(), want)
    world.close()


def test_gradients_are_right_where_the_forward_overlapped(request):
    if request.config.getoption("--ptx-machine", default=False):
        pytest.skip("gradients that autograd makes are no CUDA tensors to the machine's stand-in")
    world = GpuWorld(1, 1, 4, skew=0, comm_stream="own")
    buffer, call = world.raw[0], routed()

    def layer(**order):
        hidden = call["hidden"].detach().clone().requires_grad_()
        rows, w, _, _, handle, *sent = functional.dispatch_with_permute(buffer, **call | {"hidden": hidden}, **order)
        if sent:
            torch.cuda._sleep(1 << 20)
            sent[0].current_stream_wait()
        out, _, *back = functional.combine_with_unpermute(buffer, rows * w[:, None].to(rows.dtype), handle, **order)
        if back:
            torch.cuda._sleep(1 << 20)
            back[0].current_stream_wait()
        out.backward(call["hidden"])
        return out.detach().cpu(), hidden.grad.cpu()

    want = layer()
    for _ in range(4):
        for name, tensor, right in zip(("tokens", "gradient"), layer(async_finish=True), want, strict=True):
            same(name, tensor, right)
    world.close()


def test_calls_of_one_buffer_on_two_streams_follow_each_other():
    call_on_two_streams(timeout_s=20)


def test_two_buffers_on_two_streams():
    world = GpuWorld(1, 2, 2, skew=0, comm_stream="own")
    other = world.world.buffers(16, 1, 2, executor="cuda", timeout_s=20, comm_stream="own")
    examples = [Example(1, 2, 2, (50, 31), 2, 128, seed=s) for s in (1, 2)]

    def work(rank, _):
        sent = []
        for buffer, ex in zip((world.raw[rank], other[rank]), examples, strict=True):
            mine = make_inputs(ex, rank)
            sent.append(
                buffer.dispatch_with_permute(
                    hidden=mine.hidden.cuda(),
                    topk_idx=mine.topk_idx.cuda(),
                    topk_weights=mine.topk_weights.cuda(),
                    num_of_experts=4,
                    async_finish=True,
                )
            )
        for s in sent:
            s[-1].current_stream_wait()
        return [s[0].cpu() for s in sent]

    results = world.run(work)
    for i, ex in enumerate(examples):
        for rank in range(2):
            same("rows", results[rank][i], expected(ex).permuted[rank][0])
    world.close()
