"""Layers with exact balancing whose forward of one micro-batch takes turns with another's backward, on two streams a
rank and in Megatron's own order: what they make is what passes make that follow each other.

Megatron's schedule runs nodes; these are its nodes and its order of them. On the PTX machine kernels of all streams run
interleaved; torch's own operations there wait for their stream, so that only kernels meet each other."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import pytest
import torch

if not torch.cuda.is_available():  # before Megatron is imported, which takes longest of all that is collected here
    pytest.skip("no CUDA device, or a torch without CUDA", allow_module_level=True)
pytest.importorskip("megatron.core")
import exact_layers
import test_exact_layer

from hybrid_ep.testing import VirtualWorld
from megatron_patches import settings

pytestmark = pytest.mark.balance

schedule = pytest.importorskip(
    "megatron.core.models.common.model_chunk_schedule_plan", reason="a release whose schedule lies elsewhere"
)
nodes = pytest.importorskip("megatron.core.models.common.utils")

NUM_LAYERS, MICRO_BATCHES = 3, 4
LayerPlan = schedule.TransformerLayerSchedulePlan
# What a node asks of a configuration; as of a dense layer, so that it frees no input.
NODE_CONFIG = SimpleNamespace(moe_ncclep_zero_copy=False, ep_overlap_early_attn_memory_release=False)


class Layers(exact_layers.Layers):
    """Micro-batches have inputs and routing of their own, for several are in flight."""

    def __init__(self, group, takes_turns):
        super().__init__(group, NUM_LAYERS, "cuda", takes_turns=takes_turns)
        self.batches, self.plans = [], []
        for seed in range(MICRO_BATCHES):
            self.put(seed)
            probs = [p.detach().clone().requires_grad_() for p in self.probs]
            hidden = self.hidden.detach().clone().requires_grad_()
            self.batches.append((hidden, [m.clone() for m in self.maps], probs, self.gradient.clone()))

    def found(self):
        """Of a step: gradients of inputs and probabilities, and of weights, those of clones in fp32."""
        of_batches = [x.grad for hidden, _, probs, _ in self.batches for x in (hidden, *probs)]
        made = [x for p in self.parameters.values() for x in (p.grad, p.main_grad)]
        return [x.float().cpu() for x in of_batches + made]

    def nodes(self, batch, layer, streams, event):
        """One layer's pieces of a micro-batch, as Megatron cuts a transformer layer."""
        _, maps, probs, _ = self.batches[batch]
        manager, experts, state = self.managers[layer], self.experts[layer], SimpleNamespace()
        compute, communication = streams

        def before(node, x):
            state.residual = node.detach(x)
            return x * 1, probs[layer] * 1

        def dispatch(node, x, p):
            manager.setup_metadata(maps[layer], p)
            rows = manager.dispatch(x)
            self.plans.append(manager.last_plan)
            state.probs = node.detach(manager.dispatched_probs)
            return rows

        def compute_experts(node, rows):
            manager.dispatched_probs = state.probs
            rows, row_probs = manager.get_permuted_hidden_states_by_experts(rows)
            return experts(rows, manager.get_number_of_tokens_per_expert(), row_probs)[0]

        def combine(node, outputs):
            return state.residual + manager.combine(outputs)

        def node(stream, function):
            return nodes.TransformerLayerNode(stream, event, state, None, function, extra_args={"config": NODE_CONFIG})

        return SimpleNamespace(
            pre_dispatch_computation=node(compute, before),
            moe_dispatch=node(communication, dispatch),
            mlp=node(compute, compute_experts),
            moe_combine=node(communication, combine),
            mtp_post_process=schedule.NoopScheduleNode(),
            config=NODE_CONFIG,
            get_low_precision_context=contextlib.nullcontext,
        )

    def one_after_the_other(self, streams):
        for batch, (hidden, _, _, gradient) in enumerate(self.batches):
            event = torch.cuda.Event()
            layers = [self.nodes(batch, n, streams, event) for n in range(NUM_LAYERS)]
            source, grad = hidden * 1, gradient
            x = source
            event.record(torch.cuda.current_stream())
            for layer in layers:
                x, _ = LayerPlan.run(layer, None, f_input=x)
            event.wait(torch.cuda.current_stream())
            event.record(torch.cuda.current_stream())
            for layer in reversed(layers):
                _, grad = LayerPlan.run(None, layer, b_grad=grad)
            event.wait(torch.cuda.current_stream())
            source.backward(grad)

    def in_turns(self, streams):
        """The forward of each micro-batch with the backward of the one before it."""
        here, before = torch.cuda.current_stream(), None
        for batch in range(MICRO_BATCHES + 1):
            now = None
            if batch < MICRO_BATCHES:
                event = torch.cuda.Event()
                now = SimpleNamespace(
                    layers=[self.nodes(batch, n, streams, event) for n in range(NUM_LAYERS)],
                    source=self.batches[batch][0] * 1,
                    event=event,
                )
                event.record(here)
            x, grad = (now and now.source), (before and self.batches[batch - 1][3])
            if before is not None:
                before.event.record(here)
            for n in range(NUM_LAYERS):
                forward = now.layers[n] if now else None
                backward = before.layers[NUM_LAYERS - 1 - n] if before else None
                x, grad = LayerPlan.run(forward, backward, f_input=x, b_grad=grad)
            for one in (now, before):
                if one is not None:
                    one.event.wait(here)
            if before is not None:
                before.source.backward(grad)
            before = now


@pytest.fixture
def ran(request, monkeypatch):
    """ran(takes_turns): what a step of two ranks makes, and how many clones its plans have."""
    test_exact_layer.prepare(request, monkeypatch)

    def run(takes_turns):
        wanted = {"balance": "exact", "grouped_gemm": True, "ranks_per_node": 2, "balance_epsilon": 0.0}
        before = settings.configure(settings.Settings.of(**wanted))
        world = VirtualWorld(1, 2)
        world.on_device()
        beside = [world.more_streams() for _ in range(3)]  # communication; pushes of either direction

        def work(rank, group):
            layers = Layers(group, takes_turns)
            for manager in layers.managers:
                manager.clones.forward_bank.spares._stream = beside[1][rank]
                manager.clones.backward_bank.spares._stream = beside[2 if takes_turns else 1][rank]
            world.streams[rank].synchronize()
            streams = world.streams[rank], beside[0][rank]
            (layers.in_turns if takes_turns else layers.one_after_the_other)(streams)
            for stream in (*streams, beside[1][rank], beside[2][rank]):
                stream.synchronize()
            return layers.found(), sum(plan.num_copies for plan in layers.plans)

        try:
            return world.run(work)
        finally:
            settings.configure(before)
            test_exact_layer.buffers.release()

    return run


def test_passes_that_take_turns_on_two_streams_make_what_others_make(ran):
    for (found, clones), (want, as_many) in zip(ran(True), ran(False), strict=True):
        assert clones == as_many > 0
        assert all(map(torch.equal, found, want))
