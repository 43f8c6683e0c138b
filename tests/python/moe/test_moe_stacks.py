"""Grouped GEMM over several stacks: who multiplies on a GPU, what is read by the host, remedies a stack.

Without a GPU: tensors of a GPU that hold nothing (torch's FakeTensorMode), on which a read by the host raises."""

from __future__ import annotations

import importlib.util
import itertools
import types

import pytest
import torch
from test_moe_grouped import (
    COUNTS,
    NeverWritten,
    SpoilsNeighbours,
    StaleAccumulator,
    check,
    expected,
    offsets_of,
    problem,
)
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from hybrid_ep.moe import grouped, grouped_mm, padding, probing
from hybrid_ep.moe.backends import BACKENDS, Groups, TorchBackend, TritonBackend
from hybrid_ep.moe.precisions import PRECISIONS

HAS_TRITON = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")


@pytest.mark.parametrize("backend", [StaleAccumulator, NeverWritten, SpoilsNeighbours], ids=lambda b: b.name)
def test_every_remedy_works_on_several_stacks(backend, monkeypatch):
    monkeypatch.setitem(BACKENDS, backend.name, backend)
    for counts, cuts, known in itertools.product(COUNTS, ([3], [1, 2], [2, 2]), (True, False)):
        x, w, grad = problem(counts, 5, torch.float32, transposed=True)
        x.requires_grad_()
        parts = [part.clone().requires_grad_() for part in w.tensor_split(cuts)]
        first_rows = [sum(counts[:cut]) for cut in (0, *cuts)] if known else None
        out = grouped_mm(x, parts, offsets_of(counts), backend=backend.name, first_rows=first_rows)
        out.backward(grad)
        got = out.detach(), x.grad, torch.cat([part.grad for part in parts])
        check(got, expected(x.detach(), w, grad, counts), torch.float32, counts)


@pytest.fixture
def on_hopper(monkeypatch):
    """A GPU's tensors without one; kernels are noted instead of launched."""
    launched = []
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(padding, "_kernels", lambda x: None)
    monkeypatch.setattr(
        probing, "probe", lambda device, dtype, name, _: probing.Probe(name, "a GPU", str(dtype), "none", "", False)
    )
    if importlib.util.find_spec("triton"):
        from hybrid_ep.moe import triton_grouped

        for kernel in ("rows_times_stacks", "weight_gradient"):
            monkeypatch.setattr(triton_grouped, kernel, lambda *_, kernel=kernel: launched.append(kernel))
    with FakeTensorMode(allow_non_fake_inputs=False):
        yield launched


def gpu_problem(dtype=torch.bfloat16, stacks=2):
    x = torch.empty(32, 64, dtype=dtype, device="cuda", requires_grad=True)
    parts = [torch.empty(2, 48, 64, dtype=dtype, device="cuda", requires_grad=True) for _ in range(stacks)]
    return x, parts, torch.empty(2 * stacks, dtype=torch.int64, device="cuda")


def backward_of(x, parts, offsets, precision="params"):
    """(gradient of the rows, of each stack), called as autograd would: its engine needs a device."""
    stacks, machine = [w.transpose(1, 2) for w in parts], (PRECISIONS[precision]["triton"], "none")
    ctx = types.SimpleNamespace(
        saved_tensors=(offsets.int(), *stacks, x),
        facts=((2, 2), None, machine, True),
        needs_input_grad=(False, True, *[False] * 4, *[True] * len(stacks)),
        wishes=grouped._Wishes(),
        like=(x.shape, x.dtype, x.device),
    )
    with torch.no_grad():
        _, dx, *_, first, second = grouped._GroupedMM.backward(ctx, x.new_empty(32, 48))
    return dx, [first, second]


def chosen(backend="auto", dtype=torch.bfloat16, stacks=2, first_rows=None, stores=False, beside=False):
    x, parts, _ = gpu_problem(dtype, stacks)
    return choose(backend, x, [w.transpose(1, 2) for w in parts], first_rows, stores, beside)


def choose(backend, x, stacks, first_rows=None, stores=False, beside=False, precision="params"):
    sizes = tuple(w.shape[0] for w in stacks)
    ends = torch.empty(sum(sizes), dtype=torch.int32, device="cuda")
    return grouped._choose(backend, x, stacks, Groups(ends, sizes, first_rows), stores, beside, precision)[0].name


@HAS_TRITON
def test_triton_multiplies_where_torch_would_wait_or_copy(on_hopper):
    assert chosen(stacks=1) == "torch" and chosen(first_rows=(0, 7)) == "torch"
    assert chosen() == "triton" and chosen(stacks=1, stores=True) == "triton"
    assert chosen(first_rows=(0, 7), beside=True) == "triton", "torch's kernel would take the SMs of those beside it"
    assert chosen(stacks=1, dtype=torch.float16) == "triton", "torch's kernels for GPUs take bf16"
    assert chosen(stacks=1, dtype=torch.float32) == "loop"
    assert chosen(stacks=5) == "torch", "pointers to four stacks are arguments"


@HAS_TRITON
def test_what_triton_cannot_do_is_named(on_hopper, monkeypatch):
    for options, said in (
        ({"stacks": 5}, "at most 4 stacks, not 5"),
        ({"dtype": torch.float32}, "bfloat16 or float16 rows, not torch.float32"),
    ):
        with pytest.raises(ValueError, match=said):
            chosen("triton", **options)
    x, parts, _ = gpu_problem()
    with pytest.raises(ValueError, match="different strides"):
        choose("triton", x, [parts[0].transpose(1, 2), parts[1].transpose(1, 2).contiguous()])
    many = torch.empty(1025, 64, 48, dtype=x.dtype, device="cuda")
    with pytest.raises(ValueError, match="at most 1024 experts a rank, not 1025"):
        choose("triton", x, [many])
    wide = torch.empty(2, 1, 1, dtype=x.dtype, device="cuda").expand(2, 64, 48).as_strided((2, 64, 48), (1, 2**26, 1))
    with pytest.raises(ValueError, match="32 bits"):
        choose("triton", x, [wide])
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (12, 0))
    with pytest.raises(ValueError, match=r"compute capability 9\.x and 10\.x"):
        chosen("triton")


@HAS_TRITON
@pytest.mark.parametrize("place", [False, True])
def test_triton_reads_nothing_on_the_host(on_hopper, monkeypatch, place):
    monkeypatch.setattr(
        grouped.arguments, "out_memory", lambda *_: None
    )  # it compares addresses, of which these tensors have none
    x, parts, offsets = gpu_problem()
    out = torch.empty(32, 48, dtype=x.dtype, device="cuda") if place else None
    got = grouped_mm(x, [w.transpose(1, 2) for w in parts], offsets, out=out)
    assert got is out if place else got.shape == (32, 48)
    dx, dw = backward_of(x, parts, offsets)
    assert on_hopper == ["rows_times_stacks"] * 2 + ["weight_gradient"] * 2
    assert dx.shape == x.shape and all(made.shape == w.transpose(1, 2).shape for made, w in zip(dw, parts, strict=True))


@pytest.mark.skipif(TorchBackend.absence() is not None, reason="torch has no grouped GEMM")
def test_torch_reads_where_stacks_begin_unless_it_is_told(on_hopper, monkeypatch):
    monkeypatch.setattr(TorchBackend, "_product", lambda x, w, ends: x.new_empty(x.shape[0], w.shape[2]))
    x, parts, offsets = gpu_problem()
    turned = [w.transpose(1, 2) for w in parts]
    with pytest.raises(DataDependentOutputException):
        grouped_mm(x, turned, offsets, backend="torch")
    assert grouped_mm(x, turned, offsets, backend="torch", first_rows=(0, 8)).shape == (32, 48)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(ValueError, match="CUDA graph cannot capture; give first_rows"):
        grouped_mm(x, turned, offsets, backend="torch")


def test_triton_is_not_for_cpus():
    assert TritonBackend.absence() or "need a GPU" in TritonBackend.refusal(
        torch.device("cpu"), torch.bfloat16, (2, 32, 32)
    )


@HAS_TRITON
def test_triton_multiplies_in_fp8_where_it_runs(on_hopper, monkeypatch):
    x, parts, _ = gpu_problem(torch.float32, 5)
    assert choose("auto", x, [w.transpose(1, 2) for w in parts], precision="fp8") == "triton", "they become one stack"
    odd = torch.empty(2, 65, 47, dtype=x.dtype, device="cuda")
    assert choose("auto", torch.empty(32, 65, dtype=x.dtype, device="cuda"), [odd], precision="fp8") == "triton"
    many = torch.empty(1025, 64, 48, dtype=x.dtype, device="cuda")
    with pytest.raises(ValueError, match="at most 1024 experts a rank, not 1025"):
        choose("triton", x, [many], precision="fp8")
    wide, row = (torch.empty(*shape, dtype=x.dtype, device="cuda") for shape in ((1, 2**16, 2**15), (1, 2**16)))
    with pytest.raises(ValueError, match="offsets of 32 bits"):
        choose("triton", row, [wide], precision="fp8")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (12, 0))
    assert choose("auto", x, [parts[0].transpose(1, 2)], precision="fp8") == "loop"
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(ValueError, match="a CUDA graph cannot capture; give 'triton'"):
        choose("loop", x, [parts[0].transpose(1, 2)], precision="fp8")


@HAS_TRITON
@pytest.mark.parametrize("turns", [False, True])
def test_triton_in_fp8_reads_nothing_on_the_host(on_hopper, monkeypatch, turns):
    """All that a launch is given is made of shapes: the kernels alone are replaced."""
    from hybrid_ep.moe import triton_block_scaled

    launched = []

    class Noted:
        def __init__(self, name):
            self.name = name

        def __getitem__(self, grid):
            assert all(isinstance(n, int) and n > 0 for n in grid), (self.name, grid)
            return lambda *given, **options: launched.append(self.name)

    for name in ("rows", "weights", "quantise_rows", "quantise_weights", "quantise_columns"):
        monkeypatch.setattr(triton_block_scaled, f"_{name}_kernel", Noted(name))
    monkeypatch.setattr(triton_block_scaled, "programs", lambda device: 132)
    x, parts, offsets = gpu_problem()
    turned = [w.transpose(1, 2) for w in parts]
    if turns:
        groups = Groups(offsets.int(), (2, 2))
        for of in (range(1), range(1, 2)):
            PRECISIONS["fp8"]["triton"].mm(x, turned, groups, x.new_empty(32, 48), of)
            PRECISIONS["fp8"]["triton"].wgrad(x, x.new_empty(32, 48), groups, of)
        once = ["quantise_rows", "quantise_weights", "rows", "quantise_columns", "quantise_columns", "weights"]
        assert launched == once * 2
        return
    assert grouped_mm(x, turned, offsets, precision="fp8").shape == (32, 48)
    dx, dw = backward_of(x, parts, offsets, "fp8")
    assert launched == [
        *["quantise_rows", "quantise_weights", "quantise_weights", "rows"] * 2,
        *["quantise_columns", "quantise_columns", "weights", "weights"],
    ]
    assert dx.shape == x.shape and all(made.shape == w.transpose(1, 2).shape for made, w in zip(dw, parts, strict=True))
