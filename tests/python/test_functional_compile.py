"""Callers that compile: hybrid_ep.functional inside torch.compile gives what eager gives, forward and backward."""

from __future__ import annotations

import gc
import subprocess
import sys

import pytest
import torch
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.testing import CompileCounterWithBackend

from hybrid_ep import functional as F
from hybrid_ep.runtime import names
from hybrid_ep.testing import VirtualWorld

H, E, K = 16, 4, 3


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def buffer():
    return VirtualWorld(1, 1).buffers(H, 16, E, timeout_s=60)[0]


def inputs(rank=0, tokens=5, experts=E):
    """x, topk_idx with dropped and doubled choices, weights, a routing map and its probs."""
    g = torch.Generator().manual_seed(7 + rank)
    idx = torch.randint(-1, experts, (tokens, K), generator=g)
    probs = torch.rand(tokens, experts, generator=g) * (torch.rand(tokens, experts, generator=g) < 0.5)
    return torch.randn(tokens, H, generator=g), idx, torch.rand(tokens, K, generator=g), probs


def permuted(buffer, x, idx, weights, probs, **options):
    """A layer of elementwise experts: products alone, which every backend rounds alike."""
    rows, w, _, counts, handle = F.dispatch_with_permute(
        buffer, x, topk_idx=idx, topk_weights=weights, pad_multiple=4, **options
    )
    out, _ = F.combine_with_unpermute(buffer, rows * w[:, None], handle)
    return out, counts


def dense(buffer, x, idx, weights, probs, **options):
    """By routing map; the weights come back through combine too."""
    rows, w, _, counts, handle = F.dispatch_with_permute(
        buffer, x, routing_map=probs > 0, probs=probs, pad_multiple=4, **options
    )
    out, back = F.combine_with_unpermute(buffer, rows * 2, handle, w * 3)
    return out, counts, back


def unpermuted(buffer, x, idx, weights, probs):
    rows, w, _, handle = F.dispatch(buffer, x, topk_idx=idx, topk_weights=weights)
    return F.combine(buffer, rows * w.sum(1, keepdim=True), handle)[0], w


def twice(buffer, x, idx, weights, probs):
    """A second dispatch on the handle of the first, and weights nobody differentiates."""
    rows, w, _, counts, handle = F.dispatch_with_permute(buffer, x, topk_idx=idx, topk_weights=weights, pad_multiple=4)
    again, *_ = F.dispatch_with_permute(buffer, x * 2, handle=handle)
    return F.combine_with_unpermute(buffer, rows * again, handle)[0], counts


def run(layer, buffer, arguments, **options):
    """Results and gradients of x, weights and probs."""
    x, idx, weights, probs = (a.clone() for a in arguments)
    leaves = [a.requires_grad_() for a in (x, weights, probs)]
    results = layer(buffer, x, idx, weights, probs, **options)
    loss = sum((r * torch.arange(r.numel()).view_as(r)).sum() for r in results if r.requires_grad)
    return [r.detach() for r in results] + list(torch.autograd.grad(loss, leaves, allow_unused=True))


def same(got, want):
    assert len(got) == len(want)
    for a, b in zip(got, want, strict=True):
        assert (a is None) == (b is None) and (a is None or torch.equal(a, b))


CASES = {
    "permuted": (permuted, {}),
    "static": (permuted, {"num_permuted_tokens": 32, "non_blocking": True}),
    "fp8": (permuted, {"dispatch_dtype": "mxfp8"}),
    "dense": (dense, {}),
    "unpermuted": (unpermuted, {}),
    "twice": (twice, {}),
}


@pytest.mark.parametrize("case", CASES)
def test_callers_compiled_equals_eager(buffer, case):
    """In one graph, to the bit; aot_eager traces forward and backward as inductor's front half does."""
    layer, options = CASES[case]
    if "dispatch_dtype" in options:
        buffer = VirtualWorld(1, 1).buffers(32, 16, E, timeout_s=60)[0]
    arguments = inputs()
    if "dispatch_dtype" in options:
        arguments = (torch.randn(5, 32), *arguments[1:])
    want = run(layer, buffer, arguments, **options)
    same(run(torch.compile(layer, backend="aot_eager", fullgraph=True), buffer, arguments, **options), want)


def test_callers_compiled_without_aot(buffer):
    counter = CompileCounterWithBackend("eager")
    layer = torch.compile(permuted, backend=counter, fullgraph=True)
    for tokens in (5, 9, 1, 0):  # 0 and 1 are specialised by torch; a number between is not
        arguments = inputs(tokens=tokens)
        same(run(layer, buffer, arguments), run(permuted, buffer, arguments))
    assert counter.frame_count <= 4
    ops = [n.target for graph in counter.graphs for n in graph.graph.nodes if "hybrid_ep" in str(n.target)]
    assert len(ops) == 2 * len(counter.graphs)  # one node an operator


@pytest.mark.parametrize("options", [{}, {"num_permuted_tokens": 32, "non_blocking": True}], ids=["routed", "static"])
def test_callers_compiled_by_inductor(buffer, options):
    arguments = inputs()
    want = run(permuted, buffer, arguments, **options)
    got = run(torch.compile(permuted, backend="inductor", fullgraph=True), buffer, arguments, **options)
    for a, b in zip(got, want, strict=True):  # inductor contracts products and sums
        assert (a is None) == (b is None) and (a is None or torch.allclose(a, b, rtol=1e-5, atol=1e-5))


def test_callers_compiled_on_two_nodes():
    """Ranks of different numbers of tokens, 0 among them, each with a graph of its own."""
    world = VirtualWorld(2, 1)
    buffers = world.buffers(H, 16, E // 2, timeout_s=120)
    arguments = [inputs(0, 0), inputs(1, 6)]
    want = world.run(lambda rank, _: run(permuted, buffers[rank], arguments[rank]))
    # One after the other: torch compiles one function at a time, and a rank that waits for another's tokens holds none.
    layers = [torch.compile(permuted, backend="aot_eager", fullgraph=True) for _ in buffers]
    got = world.run(lambda rank, _: run(layers[rank], buffers[rank], arguments[rank]))
    for a, b in zip(got, want, strict=True):
        same(a, b)


def graphs_of(function, *arguments):
    """The forward graphs that a compiler would be given."""
    seen = []

    def keep(graph, _):
        seen.append(graph)
        return graph

    backend = aot_autograd(fw_compiler=keep, bw_compiler=lambda graph, _: graph)
    torch.compile(function, backend=backend, fullgraph=True)(*arguments)
    return seen


def count(graph, op):
    """Calls of an operator of ours, ordered or not."""
    op = getattr(torch.ops.hybrid_ep, op).default
    return sum(n.target is op or op in n.args for n in graph.graph.nodes)


def test_callers_compiled_calls_stay(buffer):
    """Nothing merges equal calls and nothing drops unused ones: other ranks make them too."""
    x, idx, weights, _ = inputs()

    def wasteful(x):
        for _ in range(2):
            out = F.dispatch_with_permute(buffer, x, topk_idx=idx, topk_weights=weights, num_permuted_tokens=32)
        F.dispatch_with_permute(buffer, x, topk_idx=idx, topk_weights=weights)
        return out[0]

    (graph,) = graphs_of(wasteful, x.requires_grad_())
    assert count(graph, "dispatch") == 2 and count(graph, "dispatch_unsized") == 1


def test_callers_handles_cross_between_compiled_and_eager(buffer):
    x, idx, weights, _ = inputs()

    def first(x):
        rows, _, _, _, handle = F.dispatch_with_permute(buffer, x, topk_idx=idx, topk_weights=weights)
        return rows * 2, handle

    def second(rows, handle):
        return F.combine_with_unpermute(buffer, rows, handle)[0]

    compiled = [torch.compile(f, backend="aot_eager", fullgraph=True) for f in (first, second)]
    want = second(*first(x))
    rows, handle = compiled[0](x)
    assert isinstance(handle, names.Handle) and handle.num_tokens == 5 and handle.overflow.tolist() == [0]
    assert torch.equal(second(rows, handle), want) and torch.equal(compiled[1](rows, handle), want)
    rows, eager = first(x)  # a buffer's own handle is no part of a graph: the graph breaks around the operator
    assert torch.equal(torch.compile(second, backend="eager")(rows, eager), want)
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported):
        compiled[1](rows, eager)


def test_callers_handles_do_not_leak(buffer):
    gc.collect()
    before, arguments = names.num_alive(), inputs()
    layer = torch.compile(permuted, backend="aot_eager", fullgraph=True)
    x = arguments[0].requires_grad_()
    for _ in range(3):
        out, _ = layer(buffer, x, *arguments[1:])
        assert names.num_alive() == before + 1, "the graph keeps the handle for its backward, and no other"
        out.sum().backward()
    del out
    gc.collect()
    assert names.num_alive() == before
    layer(buffer, x.detach(), *arguments[1:])
    assert names.num_alive() == before  # nobody needs it


def test_callers_handle_tensors():
    before, thing = names.num_alive(), object()
    tensor = names.as_tensor(thing)
    view = tensor.detach().view(1)
    del tensor
    assert names.from_tensor(view) is thing and names.num_alive() == before + 1
    copy = view.clone()
    del view
    assert names.num_alive() == before
    for wrong in (copy, torch.zeros(2, dtype=torch.int64), torch.zeros(1)):
        with pytest.raises(ValueError, match="stands for no handle"):
            names.from_tensor(wrong)


def test_callers_buffer_that_is_gone():
    buffer = VirtualWorld(1, 1).buffers(H, 16, E, timeout_s=60)[0]
    assert names.named(buffer.compile_name) is buffer
    name = buffer.compile_name
    del buffer
    gc.collect()
    with pytest.raises(ValueError, match="garbage collected"):
        names.named(name)


def test_callers_who_do_not_compile_do_not_import_the_compiler():
    program = "import hybrid_ep.functional, sys; assert 'torch._dynamo' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)
