"""What the ranks of the tests of partial CUDA graphs do: train a small GPT whose layers a stand-in replays.

Megatron's own capture and replay run (TransformerLayer._te_cuda_graph_capture and _te_cuda_graph_replay); the stand-in
takes the place of Transformer Engine's graphed callable, and leaves behind what one leaves: the captured function's
tensors, in memory that the graph's next replay overwrites. What its Python did to the dispatcher stays of the first
time alone, which stands for the capture.
"""

import contextlib
import copy
import weakref
from unittest import mock

import torch
import torch.distributed as dist
from megatron.core.transformer import cuda_graphs
from megatron.core.transformer.enums import CudaGraphModule
from megatron.core.transformer.module import GraphableMegatronModule
from megatron.core.transformer.transformer_layer import TransformerLayer
from slow_programs import STEPS, Job, difference, initialize, shuffled

import megatron_patches
from megatron_patches.balance import SlowManager
from recipes.model import moe_layers

MICRO_BATCHES = 3
PARTS = {
    "preprocess": ["attn", "moe_router", "moe_preprocess"],
    "router": ["attn", "moe_router"],
    "attention": ["attn"],
}


class InPlace(torch.autograd.Function):
    """A tensor, in the graph's memory."""

    @staticmethod
    def forward(ctx, made, place):
        place.copy_(made)
        return place.detach()

    @staticmethod
    def backward(ctx, gradient):
        return gradient.clone(), None  # gradients that a replay gives lie in its memory too


class Graphed:
    """One captured graph of a layer. captured: layers whose functions ran before. replays: of all graphs."""

    captured = weakref.WeakSet()
    replays = 0

    def __init__(self, layer):
        self.layer, self.places = layer, None

    def __call__(self, *arguments, is_first_microbatch, **keywords):
        Graphed.replays += 1
        dispatcher = self.layer.mlp.token_dispatcher
        owners = (dispatcher, dispatcher._comm_manager)
        before = [copy.copy(vars(owner)) for owner in owners]
        cuda_graphs._set_capture_start()
        try:
            made = self.layer._te_cuda_graph_capture(*arguments, **keywords)
        finally:
            cuda_graphs._set_capture_end()
        for owner, attributes in zip(owners, before, strict=True) if self.layer in Graphed.captured else ():
            vars(owner).clear()
            vars(owner).update(attributes)
        Graphed.captured.add(self.layer)
        if self.places is None:
            self.places = [torch.empty_like(x, requires_grad=False) for x in made]
        return tuple(InPlace.apply(x, place) for x, place in zip(made, self.places, strict=True))


@contextlib.contextmanager
def graphs_of(layers, in_flight):
    """Their forwards are replays, a graph a micro-batch in flight. On a GPU they are after some eager steps."""
    for layer in layers:
        layer.cuda_graphs = [Graphed(layer) for _ in range(in_flight)]
    arguments = GraphableMegatronModule._get_te_cuda_graph_replay_args
    with mock.patch.object(TransformerLayer, "_get_te_cuda_graph_replay_args", arguments):  # Megatron's asks for TE
        yield


def train(ep, parts, moved=None, in_flight=1, attributes=None, **wanted):
    """(losses, logical state) of a job. parts: what of a layer is graphed, None for nothing. moved: where experts go
    after each step. attributes: those of the dispatcher that survive a replay, in place of its own."""
    options = {"balance_interval": 1, "layer_updates_per_iter": 2} if moved else {}
    megatron_patches.apply(timeout_s=60.0, **wanted, **options)
    try:
        modules = {"cuda_graph_modules": [CudaGraphModule[name] for name in PARTS[parts]]} if parts else {}
        job = Job(ep, after={"cuda_graph_impl": "transformer_engine" if parts else "none", **modules})
        layers = [layer for layer in job.model.decoder.layers if layer.is_moe_layer]
        assert len(layers) == len(moe_layers(job.model)) > 0
        if moved:
            job.migrator.plan_with = moved
        for layer in layers if attributes is not None else ():
            layer.mlp.token_dispatcher.cudagraph_attrs = attributes
        Graphed.replays = 0
        with graphs_of(layers, in_flight) if parts else contextlib.nullcontext():
            losses = [job.train_step(MICRO_BATCHES) for _ in range(STEPS)]
        assert Graphed.replays == (STEPS * MICRO_BATCHES * len(layers) if parts else 0)
        plans = [layer.mlp.token_dispatcher._comm_manager.last_plan for layer in layers]
        assert all(isinstance(layer.mlp.token_dispatcher._comm_manager, SlowManager) or not moved for layer in layers)
        return (losses, job.logical()), [plan for plan in plans if plan is not None and not plan.is_empty]
    finally:
        megatron_patches.revert()


def same_training(ep, pp, wanted, parts):
    """The bits of a training without graphs."""
    initialize(ep, pp)
    moves = wanted.get("balance") in ("slow", "both")
    plain, _ = train(ep, None, shuffled(1) if moves else None, **wanted)
    for part in parts:
        graphed, plans = train(ep, part, shuffled(1) if moves else None, in_flight=MICRO_BATCHES, **wanted)
        assert difference(plain, graphed) is None, (part, difference(plain, graphed))
        everyone = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, len(plans))
        assert any(everyone) == (wanted.get("balance") in ("exact", "both")), "nothing was cloned"
    return True


def broken(ep):
    """A dispatcher whose map does not survive a replay must be noticed: the one that is there is of no micro-batch."""
    initialize(ep)
    try:
        train(ep, "preprocess", attributes=["_comm_manager.token_probs"], balance="exact")
    except ValueError as error:  # the map over physical slots that the micro-batch before left behind
        return "routing_map has 10 columns" in str(error)
    return False


def watchers(tmp_path):
    """What is said where load statistics or guards are asked for of a router in a graph; of attention's they work."""
    initialize(1)
    said = []
    for wanted in ({"load_stats": f"{tmp_path}/loads.jsonl", "load_stats_range": (1, 2)}, {"router_guard": "warn"}):
        said.append(message(wanted, "preprocess"))
        assert message(wanted, "attention") is None, message(wanted, "attention")
    return said


def message(wanted, parts):
    try:
        train(1, parts, **wanted)
    except ValueError as error:
        return str(error)
    return None
