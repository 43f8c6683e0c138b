"""Megatron's layers with exact balancing and static rows, forward and backward captured as one CUDA graph: what replays
with other tokens and other routing give is what the layers give of them without a graph.

The layers are those of `exact_layers`. On the PTX machine the grouped GEMM and the activation (Triton, on a GPU) are
torch's operations on the machine's tensors."""

from __future__ import annotations

import threading

import pytest
import torch

if not torch.cuda.is_available():  # before Megatron is imported, which takes longest of all that is collected here
    pytest.skip("no CUDA device, or a torch without CUDA", allow_module_level=True)
pytest.importorskip("megatron.core")

import exact_layers

from hybrid_ep.moe import activations, backends, padding, probing
from hybrid_ep.testing import VirtualWorld
from megatron_patches import balance, buffers, settings

pytestmark = pytest.mark.balance

NUM_LAYERS = 2
SEEDS = range(4)


class OnTheMachine(backends.TritonBackend):
    """What the Triton kernels do, by operations of torch's that leave counts on the device."""

    @staticmethod
    def mm(x, stacks, groups, out=None, of=None):
        # Of a turn its own stacks are read alone: others may be on their way.
        read = [w if of is None or i in of else torch.zeros_like(w) for i, w in enumerate(stacks)]
        weights = torch.cat([*read, stacks[0].new_zeros(1, *stacks[0].shape[1:])])  # of rows behind all experts
        expert = torch.bucketize(torch.arange(len(x), device=x.device, dtype=torch.int32), groups.ends, right=True)
        made = (x[:, None] @ weights[expert])[:, 0]
        if of is None or out is None:
            return made if out is None else out.copy_(made)
        past = groups.past_group(of)
        asked = expert >= groups.first_group(of)
        if past < len(groups.ends):
            asked &= expert < past
        return torch.where(asked[:, None], made, out, out=out)

    @staticmethod
    def wgrad(x, g, groups, of=None):
        row = torch.arange(len(x), device=x.device, dtype=torch.int32)[:, None]
        starts = torch.nn.functional.pad(groups.ends[:-1], (1, 0))
        outs = [
            x.masked_fill((row < start) | (row >= end), 0).t() @ g.masked_fill(row >= groups.ends[-1], 0)
            for start, end in zip(starts.unbind(), groups.ends.unbind(), strict=True)
        ]
        made = [torch.stack(part) for part in _split(outs, groups.sizes)]
        return made if of is None else made[of.start : of.stop]


def _split(outs, sizes):
    outs = iter(outs)
    return [[next(outs) for _ in range(size)] for size in sizes]


class Layers(exact_layers.Layers):
    def __init__(self, group):
        super().__init__(group, NUM_LAYERS, "cuda", "full_iteration")

    def step(self) -> dict[str, torch.Tensor]:
        """Forward and backward; main gradients of experts are those of this step alone."""
        for parameter in self.parameters.values():
            parameter.main_grad.zero_()
        x = self.forward()
        plans = torch.stack([manager.last_plan.clones.slot_expert for manager in self.managers])
        mine = {"hidden": self.hidden, **{f"probs {n}": p for n, p in enumerate(self.probs)}, **self.parameters}
        found = dict(zip(mine, torch.autograd.grad(x, list(mine.values()), self.gradient), strict=True))
        found |= {f"{name}, of clones": p.main_grad.clone() for name, p in self.parameters.items()}
        return {"out": x.detach(), "plans": plans, **found}


def prepare(request, monkeypatch):
    """CUDA's executor on one node; on the PTX machine torch's operations in the places of Triton's kernels."""
    if request.config.getoption("--ptx-machine"):
        monkeypatch.setitem(backends.BACKENDS, "triton", OnTheMachine())
        monkeypatch.setattr(activations, "_fused", lambda h, prob: False)
        monkeypatch.setattr(padding, "_kernels", lambda x: None)
        monkeypatch.setattr(probing, "probe", lambda *_: probing.Probe("triton", "", "", "none", "", False))
    monkeypatch.setenv("HYBRID_EP_EXECUTOR", "cuda")
    monkeypatch.setattr(buffers, "num_nodes", lambda group, wanted: 1)


@pytest.fixture
def captured(request, monkeypatch):
    """captured(num_ranks): eager and replayed results are compared, for four micro-batches on every rank; the plans."""
    prepare(request, monkeypatch)

    def run(num_ranks, beside=False):
        wanted = {"balance": "exact", "static_rows": "drop", "grouped_gemm": True, "ranks_per_node": num_ranks}
        before = settings.configure(settings.Settings.of(**wanted))
        world = VirtualWorld(1, num_ranks)
        world.on_device()
        try:
            return compare(world, world.more_streams() if beside else None)
        finally:
            settings.configure(before)
            buffers.release()

    return run


def compare(world, beside):
    """beside: streams of the ranks for pushes and collections, as where each has a GPU of its own."""
    meet, one_at_a_time = threading.Barrier(world.size), threading.Lock()

    def work(rank, group):
        stream, layers, eager = world.streams[rank], Layers(group), []
        for manager in layers.managers:
            manager.clones.spares._stream = None if beside is None else beside[rank]
        for seed in (0, *SEEDS):  # the first makes room
            layers.put(seed)
            stream.synchronize()
            meet.wait(60)
            found = layers.step()
            stream.synchronize()
            eager.append({name: tensor.cpu() for name, tensor in found.items()})
        meet.wait(60)
        graph = torch.cuda.CUDAGraph()
        with one_at_a_time, torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            found = layers.step()
        different = set()
        for seed in (*SEEDS, 0):
            layers.put(seed)
            stream.synchronize()
            meet.wait(60)
            graph.replay()
            stream.synchronize()
            different |= {name for name, want in eager[1 + seed].items() if not torch.equal(found[name].cpu(), want)}
            meet.wait(60)
        counted = [manager.static.micro_batches for manager in layers.managers]
        assert counted == [2 * len(SEEDS) + 2] * NUM_LAYERS, "replays are counted, too"
        return different, [one["plans"].tolist() for one in eager[1:]]

    return world.run(work)


@pytest.mark.parametrize("num_ranks, beside", [(2, False), (3, False), (2, True)])
def test_replays_with_other_routing_give_what_the_layers_give_of_it(captured, num_ranks, beside):
    for different, plans in captured(num_ranks, beside):
        assert not different
        assert len({str(plan) for plan in plans}) > len(SEEDS) // 2, "replays had the capture's plan to go by"


def test_a_graph_that_goes_by_the_plan_of_its_capture_is_noticed(captured, monkeypatch):
    plan = balance.ExactManager._planned_by_kernels

    def known_when_captured(self, hidden, routing_map, probs, known):
        made = self.last_plan if torch.cuda.is_current_stream_capturing() else known
        return plan(self, hidden, routing_map, probs, made)

    monkeypatch.setattr(balance.ExactManager, "_planned_by_kernels", known_when_captured)
    assert all("plans" in different and "out" in different for different, _ in captured(2))
