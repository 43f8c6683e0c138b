"""The calls that other projects make of deep_ep, in their order and with their arguments, written anew as facts.

Read at: torchtitan b5bcd76 (hybridep) and 0e25651 (deepep, before it moved to ElasticBuffer), NeMo Automodel 36044ad,
xtuner b934f46, Megatron-LM's branch dev d48bd6be (deepepv2). Megatron Bridge 067f987 and verl b178a3c reach deep_ep
only through Megatron-Core, whose own code test_callers_megatron.py runs. Every layer here has a known answer, forward
and backward: see callers.py."""

from __future__ import annotations

import importlib
import importlib.util

import pytest
import torch
from callers import check_layer, dense, experts_of_choices, experts_of_groups, layer_inputs

import hybrid_ep
from hybrid_ep.testing import VirtualWorld

TOKENS, LOCAL, TOPK, HIDDEN = (6, 1, 0, 9), 2, 3, 16
EXPERTS = 4 * LOCAL


@pytest.fixture(params=[2, 4], ids=["2x2", "1x4"])
def world(request, monkeypatch):
    monkeypatch.setenv("HYBRID_EP_RANKS_PER_NODE", str(request.param))
    monkeypatch.setenv("HYBRID_EP_TIMEOUT_S", "30")
    assert importlib.util.find_spec("deep_ep") is None
    hybrid_ep.compat.install_as_deep_ep()
    yield VirtualWorld(4 // request.param, request.param)
    hybrid_ep.compat.uninstall()
    assert importlib.util.find_spec("deep_ep") is None


def run(world, make_layer):
    """make_layer(rank, group) -> layer, on every rank, for two steps with different numbers of tokens."""

    def work(rank, group):
        layer = make_layer(rank, group)
        for step in range(2):
            check_layer(layer, *layer_inputs(10 * step + rank, TOKENS[rank - step], EXPERTS, TOPK, HIDDEN))

    world.run(work)


class DeepEPLayer(torch.autograd.Function):
    """layout, dispatch, experts, combine; backward: dispatch with the handle, experts, combine with weights."""

    @staticmethod
    def forward(ctx, x, idx, weights, call):
        recv, recv_idx, recv_weights, counts, handle = call.dispatch(x, idx, weights)
        assert counts == [int((recv_idx == e).sum()) for e in range(LOCAL)]
        ctx.call, ctx.tensors = call, (recv, recv_idx, recv_weights)
        ctx.save_for_backward(*handle)
        return call.combine(experts_of_choices(recv, recv_idx, recv_weights, call.first), handle)[0]

    @staticmethod
    def backward(ctx, grad):
        handle, (recv, recv_idx, recv_weights) = ctx.saved_tensors, ctx.tensors
        rows = ctx.call.dispatch_cached(grad.contiguous(), handle)
        scale = (recv_idx + 1 + ctx.call.first).masked_fill(recv_idx < 0, 0)
        grad_weights = scale * (rows * recv).sum(1, keepdim=True)
        grad_x = experts_of_choices(rows, recv_idx, recv_weights, ctx.call.first)
        out, out_weights = ctx.call.combine(grad_x, handle, grad_weights)
        return out, None, out_weights, None


class Caller:
    """What the three have in common; each overrides how it makes its buffer and its events."""

    is_async = True

    def __init__(self, rank, group):
        from deep_ep import Buffer

        self.rank, self.first, self.Buffer, self.buffer = rank, rank * LOCAL, Buffer, None
        self.group = group

    def options(self) -> dict:
        return {}

    def event(self):
        deep_ep = importlib.import_module("deep_ep")
        return deep_ep.EventOverlap(deep_ep.EventHandle()) if self.is_async else None

    def get_buffer(self, hidden_bytes):
        size = self.group.size()
        configs = (self.Buffer.get_dispatch_config(size), self.Buffer.get_combine_config(size))
        nvl = max(c.get_nvl_buffer_size_hint(hidden_bytes, size) for c in configs)
        rdma = max(c.get_rdma_buffer_size_hint(hidden_bytes, size) for c in configs)
        if (
            self.buffer is None
            or self.buffer.group != self.group
            or self.buffer.num_nvl_bytes < nvl
            or self.buffer.num_rdma_bytes < rdma
        ):
            self.buffer = self.Buffer(self.group, nvl, rdma, **self.options())
        return self.buffer

    def events(self, previous):
        return {"previous_event": previous, "async_finish": self.is_async, "allocate_on_comm_stream": self.is_async}

    def wait(self, event):
        if self.is_async:
            event.current_stream_wait()

    def dispatch(self, x, idx, weights):
        buffer = self.get_buffer(x.size(1) * max(x.element_size(), 2))
        per_rank, per_node, per_expert, in_rank, event = buffer.get_dispatch_layout(
            topk_idx=idx, num_experts=EXPERTS, **self.events(self.event())
        )
        *results, event = buffer.dispatch(
            x=x,
            topk_idx=idx,
            topk_weights=weights.float(),
            num_tokens_per_rank=per_rank,
            num_tokens_per_rdma_rank=per_node,
            is_token_in_rank=in_rank,
            num_tokens_per_expert=per_expert,
            **self.events(event),
        )
        self.wait(event)
        return results

    def dispatch_cached(self, grad, handle):
        nothing = dict.fromkeys(
            (
                "topk_idx",
                "topk_weights",
                "num_tokens_per_rank",
                "num_tokens_per_rdma_rank",
                "is_token_in_rank",
                "num_tokens_per_expert",
            )
        )
        rows, _, _, _, _, event = self.get_buffer(0).dispatch(
            x=grad, **nothing, handle=handle, **self.events(self.event())
        )
        self.wait(event)
        return rows

    def combine(self, x, handle, weights=None):
        out, out_weights, event = self.get_buffer(0).combine(
            x, handle, topk_weights=None if weights is None else weights.float(), **self.events(self.event())
        )
        self.wait(event)
        return out, out_weights


class Torchtitan(Caller):
    """0e25651: events always, keywords always, None for what a handle replaces."""


class Automodel(Caller):
    """Without events by default; asks is_sm90_compiled before it sizes; destroys at the end, and again."""

    is_async = False

    def options(self):
        assert self.Buffer.is_sm90_compiled()
        return {"explicitly_destroy": True}


class Xtuner(Caller):
    """One buffer, made for low latency, serves training; events from the compiled half; set_num_sms at import."""

    def event(self):
        from deep_ep import EventOverlap
        from deep_ep_cpp import EventHandle

        return EventOverlap(EventHandle())

    def options(self):
        hint = self.Buffer.get_low_latency_rdma_size_hint(128, HIDDEN, 4, EXPERTS)
        assert hint <= self.group.size() << 40
        return {"low_latency_mode": True, "num_qps_per_rank": max(LOCAL, self.Buffer.num_sms // 2)}


@pytest.mark.parametrize("project", [Torchtitan, Automodel, Xtuner])
def test_buffer_callers(world, project):
    callers = {}

    def make_layer(rank, group):
        call = callers[rank] = project(rank, group)
        return lambda x, idx, weights: DeepEPLayer.apply(x, idx, weights, call)

    run(world, make_layer)
    for call in callers.values():
        call.buffer.destroy()
        call.buffer.destroy()


def test_xtuner_virtual_experts(world):
    """Tensor parallelism folded into the experts: each physical expert has a virtual one on each of two ranks."""

    def work(rank, group):
        call = Xtuner(rank, group)
        physical = torch.tensor([[0, 3], [2, 1]])
        # Two expert-parallel ranks of two tensor-parallel ranks each; LOCAL experts on every rank.
        virtual = torch.cat([physical // LOCAL * 2 * LOCAL + tp * LOCAL + physical % LOCAL for tp in range(2)], 1)
        x = torch.full((2, HIDDEN), float(rank + 1))
        recv, recv_idx, _, counts, handle = call.dispatch(x, virtual, torch.ones(2, 4))
        assert sum(counts) == int((recv_idx >= 0).sum()) == 8 and len(counts) == LOCAL
        assert torch.equal(call.combine(recv, handle)[0], 4 * x)

    world.run(work)


class HybridLayer(torch.autograd.Function):
    """dispatch_with_permute, experts, combine_with_unpermute, as functions of their own in every project."""

    @staticmethod
    def forward(ctx, x, route, probs, make):
        ctx.buffer, ctx.options = make
        rows, row_probs, scales, counts, handle = ctx.buffer.dispatch_with_permute(
            hidden=x, routing_map=route, probs=probs, scaling_factor=None, num_of_experts_per_rank=LOCAL, **ctx.options
        )
        ctx.handle = handle
        assert scales is None and int(handle[10]) == 0 and int(handle[-1]) == 0
        ctx.mark_non_differentiable(counts)
        return rows, row_probs, counts, _Handle(handle)

    @staticmethod
    def backward(ctx, grad, grad_probs, *_):
        x, probs = ctx.buffer.combine_with_unpermute(
            hidden=grad.contiguous(), probs=grad_probs, handle=ctx.handle, pad_multiple=ctx.options["pad_multiple"]
        )
        return x, None, probs, None


class HybridCombine(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, make, handle):
        ctx.buffer, ctx.options, ctx.handle, ctx.rows = *make, handle.value, len(x)
        return ctx.buffer.combine_with_unpermute(
            hidden=x, handle=handle.value, pad_multiple=ctx.options["pad_multiple"]
        )[0]

    @staticmethod
    def backward(ctx, grad):
        rows, *_ = ctx.buffer.dispatch_with_permute(
            hidden=grad.contiguous(),
            scaling_factor=None,
            handle=ctx.handle,
            num_permuted_tokens=ctx.rows,
            pad_multiple=ctx.options["pad_multiple"],
        )
        return rows, None, None


class _Handle:
    """Opaque to autograd, as a handle is in torchtitan."""

    def __init__(self, value):
        self.value = value


TORCHTITAN = {
    "num_sms_dispatch_api": 16,
    "num_sms_combine_api": 16,
    "load_cached_kernels": True,
    "use_shared_buffer": True,
    "enable_custom_allgather": True,
}
AUTOMODEL = {"num_sms_dispatch_api": 24, "num_sms_combine_api": 24}


@pytest.mark.parametrize(
    ("construct", "indices"), [(TORCHTITAN, True), (AUTOMODEL, False)], ids=["torchtitan", "automodel"]
)
@pytest.mark.parametrize("static", [False, True], ids=["blocking", "static"])
def test_hybrid_callers(world, construct, indices, static):
    def make_layer(rank, group):
        from deep_ep import HybridEPBuffer
        from deep_ep.hybrid_ep_buffer import indices_to_map

        buffer = HybridEPBuffer(
            group=group,
            hidden_dim=HIDDEN,
            max_num_of_tokens_per_rank=max(TOKENS),
            num_local_experts=LOCAL,
            use_fp8=False,
            **construct,
        )
        has = buffer.configurer.buffer_config
        assert has.hidden_dim >= HIDDEN and has.max_num_of_tokens_per_rank >= max(TOKENS)
        assert has.num_of_experts_per_rank >= LOCAL and buffer.group == group
        budget = 4 * max(TOKENS) * LOCAL if static else None  # of a multiple of pad_multiple
        make = buffer, {"pad_multiple": 8, "num_permuted_tokens": budget, "non_blocking": static}

        def layer(x, idx, weights):
            route, probs = dense(idx, weights, EXPERTS)
            if indices:  # torchtitan's dispatch hands probabilities over without their graph and gathers the gradient
                assert all(
                    torch.equal(a, b)
                    for a, b in zip((route, probs), indices_to_map(idx, weights.float(), len(x), EXPERTS), strict=True)
                )
            rows, row_probs, counts, handle = HybridLayer.apply(x, route, probs, make)
            assert len(rows) == (budget if static else int(counts.sum())) and counts.dtype == torch.int64
            assert (counts % 8 == 0).all()
            return HybridCombine.apply(experts_of_groups(rows * row_probs[:, None], counts, rank * LOCAL), make, handle)

        return layer

    run(world, make_layer)


def test_unequal_counts_need_no_padding_but_may_have_it(world):
    """Bridge switches Megatron's padding of uneven inputs on: rows that go nowhere change nothing."""

    def work(rank, group):
        from deep_ep import HybridEPBuffer

        buffer = HybridEPBuffer(group, HIDDEN, 16, LOCAL)
        x, idx, weights = layer_inputs(rank, TOKENS[rank], EXPERTS, TOPK, HIDDEN)
        route, probs = dense(idx, weights.detach(), EXPERTS)
        pad = max(TOKENS) - len(x)
        wide = [torch.nn.functional.pad(t, (0, 0, 0, pad)) for t in (x.detach(), route, probs)]
        few = buffer.dispatch_with_permute(hidden=x.detach(), routing_map=route, probs=probs)
        many = buffer.dispatch_with_permute(hidden=wide[0], routing_map=wide[1], probs=wide[2])
        assert torch.equal(few[0], many[0]) and torch.equal(few[1], many[1]) and torch.equal(few[3], many[3])
        out = buffer.combine_with_unpermute(hidden=many[0], handle=many[4])[0]
        assert torch.equal(out[: len(x)], buffer.combine_with_unpermute(hidden=few[0], handle=few[4])[0])
        assert not out[len(x) :].any()

    world.run(work)


class ElasticLayer(torch.autograd.Function):
    """Megatron-LM's deepepv2: dispatch; backward: combine with the gradient of the weights."""

    @staticmethod
    def forward(ctx, x, idx, weights, call):
        recv, recv_idx, recv_weights, handle, event = call.buffer.dispatch(
            x,
            topk_idx=idx,
            topk_weights=weights,
            num_experts=EXPERTS,
            num_max_tokens_per_rank=len(x),
            expert_alignment=call.alignment,
            num_sms=call.num_sms,
            **call.events(),
        )
        call.wait(event)
        ctx.call, ctx.handle = call, handle
        counts = torch.tensor(handle.num_recv_tokens_per_expert_list)
        ctx.mark_non_differentiable(recv_idx, counts)
        return recv, recv_idx, recv_weights, counts, handle

    @staticmethod
    def backward(ctx, grad, _, grad_weights, *__):
        options = {"handle": ctx.handle, "topk_weights": grad_weights.float(), "num_sms": ctx.handle.num_sms}
        out, out_weights, event = ctx.call.buffer.combine(grad.contiguous(), **options, **ctx.call.events())
        ctx.call.wait(event)
        return out, None, out_weights, None


class ElasticCombine(torch.autograd.Function):
    """Its combine; backward: a dispatch by the handle."""

    @staticmethod
    def forward(ctx, x, call, handle):
        ctx.call, ctx.handle = call, handle
        out, weights, event = call.buffer.combine(x, handle=handle, num_sms=call.num_sms, **call.events())
        call.wait(event)
        assert weights is None
        return out

    @staticmethod
    def backward(ctx, grad):
        options = {"handle": ctx.handle, "num_sms": ctx.handle.num_sms}
        out, idx, weights, handle, event = ctx.call.buffer.dispatch(grad.contiguous(), **options, **ctx.call.events())
        ctx.call.wait(event)
        assert idx is not None and weights is None and handle is ctx.handle
        return out, None, None


class ElasticCaller:
    """The buffer of a rank, and how it is asked for: by this rank's own number of tokens."""

    def __init__(self, group, is_async, alignment, num_sms):
        self.group, self.is_async, self.alignment, self.num_sms = group, is_async, alignment, num_sms
        self.buffer = None

    def get_buffer(self, tokens):
        from deep_ep import ElasticBuffer

        shape = {"num_max_tokens_per_rank": tokens, "hidden": HIDDEN, "num_topk": TOPK}
        num_bytes = ElasticBuffer.get_buffer_size_hint(self.group, **shape)
        if (
            self.buffer is None
            or self.buffer.group != self.group
            or self.buffer.num_bytes < num_bytes
            or self.buffer.num_max_tokens_per_rank < tokens
        ):
            self.buffer = ElasticBuffer(self.group, num_bytes=num_bytes, **shape)

    def events(self):
        return {
            "previous_event": self.buffer.capture() if self.is_async else None,
            "async_with_compute_stream": self.is_async,
            "allocate_on_comm_stream": self.is_async,
        }

    def wait(self, event):
        if self.is_async:
            event.current_stream_wait()


@pytest.mark.parametrize(
    ("is_async", "alignment", "num_sms"), [(False, 1, 0), (True, 16, 24), (False, 128, 1)], ids=lambda x: str(x)
)
def test_megatrons_elastic_buffer(world, is_async, alignment, num_sms):
    """Ranks with different numbers of tokens, one with none, all of which outgrow their buffers in the second step."""

    def work(rank, group):
        call = ElasticCaller(group, is_async, alignment, num_sms)

        def layer(x, idx, weights):
            call.get_buffer(len(x))
            recv, recv_idx, recv_weights, counts, handle = ElasticLayer.apply(x, idx, weights, call)
            true = torch.stack([(recv_idx == e).sum() for e in range(LOCAL)])
            assert torch.equal(counts, (true + alignment - 1) // alignment * alignment)
            return ElasticCombine.apply(experts_of_choices(recv, recv_idx, recv_weights, rank * LOCAL), call, handle)

        buffers = []
        for step, tokens in enumerate((TOKENS[rank], TOKENS[rank] + 3, 0, TOKENS[rank] + 1)):
            check_layer(layer, *layer_inputs(10 * step + rank, tokens, EXPERTS, TOPK, HIDDEN))
            buffers.append(call.buffer)
        assert buffers[0] is not buffers[1] and buffers[1] is buffers[2] is buffers[3]

    world.run(work)
