"""What may be a caller's tensor, and that neither its defaults nor its habits reach the core."""

from __future__ import annotations

import contextlib

import pytest
import torch
import torch.distributed as dist
from boundary import EXPERTS, HIDDEN, TOKENS, all_verbs, given, watched_run
from torch._subclasses.fake_tensor import FakeTensorMode

from hybrid_ep import HybridEPBuffer
from hybrid_ep.moe import combining
from hybrid_ep.payload.quantize import FORMATS, dequantize, quantize
from hybrid_ep.reference import World, combine_world, densify, dispatch_world, plan_world
from hybrid_ep.runtime.tensors import aligned, view
from hybrid_ep.testing import VirtualWorld

DEFAULTS = {
    "bfloat16": lambda: default_dtype(torch.bfloat16),
    "float16": lambda: default_dtype(torch.float16),
    "float64": lambda: default_dtype(torch.float64),
    "meta": lambda: torch.device("meta"),
}


@contextlib.contextmanager
def default_dtype(dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def same(got, want):
    assert len(got) == len(want)
    for a, b in zip(got, want, strict=True):
        assert (a.dtype, a.device, a.shape) == (b.dtype, b.device, b.shape)
        assert torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def plain(verb, call, arguments):
    return arguments


@pytest.mark.parametrize("beside", [False, True], ids=["host waits", "kernels run beside"])
@pytest.mark.parametrize("name", DEFAULTS)
def test_defaults_of_the_caller_change_no_bit(name, beside):
    want = watched_run(2, 1, plain, lambda b, mine: all_verbs(b, mine, beside))

    def under_default(buffer, mine):
        with DEFAULTS[name]() if name == "meta" else contextlib.nullcontext():  # a device context is of one thread
            return all_verbs(buffer, mine, beside)

    # A default dtype is of the process: set by two threads, the second would keep the first one's.
    with contextlib.nullcontext() if name == "meta" else DEFAULTS[name]():
        done = watched_run(2, 1, plain, under_default)
    for got, expected in zip(done, want, strict=True):
        same(got, expected)


@pytest.mark.parametrize("name", DEFAULTS)
def test_defaults_of_the_caller_do_not_reach_large_results(name):
    """Those come from the pool of storages, not from torch.empty."""
    with DEFAULTS[name]():
        world = VirtualWorld(1, 1)
        with world.buffers(1024, 512, EXPERTS, timeout_s=60)[0] as buffer:
            mine = given(0, tokens=512, hidden=1024)
            rows, _, _, handle = buffer.dispatch(mine.hidden, topk_idx=mine.idx, topk_weights=mine.weights)
            assert rows.device.type == "cpu" and torch.equal(rows, mine.hidden)
            assert torch.equal(buffer.combine(rows, handle=handle)[0], mine.hidden)


# ---- no memory of its own


class Wrapper(torch.Tensor):
    """A tensor around another one, as quantised and distributed tensors are."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, device=inner.device)

    def __init__(self, inner):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise AssertionError(f"{func} of a tensor that should have been refused")


class OnItsWay(Wrapper):
    def wait(self):
        return self.inner


def freed(x):
    x = x.clone()
    x.untyped_storage().resize_(0)
    return x


def distributed(x):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate

    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return DTensor.from_local(x, init_device_mesh("cpu", (1,)), [Replicate()])


def fake(x):
    with FakeTensorMode() as mode:
        return mode.from_tensor(x)


UNUSABLE = {
    "a wrapper": (Wrapper, "Wrapper"),
    "on its way": (OnItsWay, r"\.wait\(\)"),
    "freed": (freed, "freed"),
    "DTensor": (distributed, r"\.to_local\(\)"),
    "fake": (fake, "FakeTensor"),
    "an implied zero": (lambda x: torch._efficientzerotensor(x.shape, dtype=x.dtype), "clone"),
}


@pytest.fixture(scope="module")
def buffer():
    with VirtualWorld(1, 1).buffers(HIDDEN, TOKENS, EXPERTS, timeout_s=60)[0] as made:
        yield made
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.parametrize("kind", UNUSABLE)
def test_a_tensor_without_memory_is_refused_by_name(buffer, kind):
    make, remedy = UNUSABLE[kind]
    mine = given(0)
    by_idx = {"hidden": mine.hidden, "scaling_factor": mine.scale, "topk_idx": mine.idx, "topk_weights": mine.weights}
    by_map = {"hidden": mine.hidden, "routing_map": mine.route, "probs": mine.probs}
    for good in (by_idx, by_map):
        for name, x in good.items():
            with pytest.raises(ValueError, match=rf"^{name} is .*{remedy}"):
                buffer.dispatch(**good | {name: make(x)})
    rows, weights, _, handle = buffer.dispatch(**by_idx)
    for name, x in {"hidden": rows, "probs": weights}.items():
        with pytest.raises(ValueError, match=rf"^{name} is .*{remedy}"):
            buffer.combine(**{"hidden": rows, "probs": weights, "handle": handle} | {name: make(x)})
    for name, x in {"topk_idx": mine.idx, "topk_weights": mine.weights}.items():
        with pytest.raises(ValueError, match=rf"^{name} is .*{remedy}"):
            buffer.dispatch(
                mine.hidden, handle=handle, **{"topk_idx": mine.idx, "topk_weights": mine.weights} | {name: make(x)}
            )
    assert torch.equal(buffer.combine(rows, handle=handle)[0], mine.hidden)


def test_views_are_of_whole_tensors():
    x = torch.zeros(4, 6, dtype=torch.float32)
    assert view("x", x).num_bytes == 96 and view("x", x[1:]).num_bytes == 72 and view("x", None) is None
    assert view("x", x[:0]).num_bytes == 0
    for bad in (x.t(), x[:, :3], x[:1].expand(4, 6)):
        with pytest.raises(ValueError, match="^x of shape .*contiguous"):
            view("x", bad)
    shrunk = torch.zeros(4, 6, dtype=torch.float32)
    shrunk.untyped_storage().resize_(95)
    with pytest.raises(ValueError, match="^x of shape .*smaller"):
        view("x", shrunk)
    with pytest.raises(ValueError, match="meta"):
        view("x", x.to("meta"))


def test_signs_that_are_not_carried_out_yet_are():
    x = torch.arange(-8, 8, dtype=torch.float32)
    minus = torch._neg_view(x)
    assert minus.is_neg() and torch.equal(aligned(minus), -x) and not aligned(minus).is_neg()
    conjugate = torch.view_as_complex(x.view(-1, 2)).conj()
    assert not aligned(conjugate).is_conj() and aligned(conjugate.imag).tolist() == (-x.view(-1, 2)[:, 1]).tolist()


def test_a_negated_view_travels_negated(buffer):
    mine = given(0)
    rows, weights, _, handle = buffer.dispatch(
        torch._neg_view(mine.hidden), topk_idx=mine.idx, topk_weights=torch._neg_view(mine.weights)
    )
    assert torch.equal(rows, -mine.hidden)
    assert torch.equal(buffer.combine(torch._neg_view(rows), torch._neg_view(weights), handle)[0], mine.hidden)
    want = torch.zeros(TOKENS, EXPERTS, dtype=torch.float32).scatter_(1, mine.idx, mine.weights)
    assert torch.equal(weights, -want)


# ---- what sums in fp32 whatever the default


@pytest.mark.parametrize("name", ["bfloat16", "float16", "float64"])
def test_sums_of_rows_do_not_depend_on_the_default_dtype(name):
    rows = torch.randn(64, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float32)
    inverse = torch.arange(64).view(8, 8)
    want = combining.unpermute(rows, inverse)
    with DEFAULTS[name]():
        assert torch.equal(combining.unpermute(rows, inverse), want)


@pytest.mark.parametrize("name", DEFAULTS)
def test_the_reference_does_not_depend_on_the_caller_s_defaults(name):
    def reference():
        mine = [given(rank) for rank in range(4)]
        world = World(2, 2, EXPERTS // 4)
        routes, weights = zip(*(densify(world, m.idx, m.weights) for m in mine), strict=True)
        plan = plan_world(world, list(routes), 4)
        sent = dispatch_world(plan, [m.hidden for m in mine], list(weights), [m.scale for m in mine])
        back = combine_world(plan, [rows for rows, _, _ in sent], [w for _, w, _ in sent])
        return [x for rank in (*sent, *back) for x in rank]

    want = reference()
    with DEFAULTS[name]():
        got = reference()
    same(got, want)


# ---- row widths


@pytest.mark.parametrize(("hidden", "dtype"), [(12, torch.float32), (4, torch.float32), (2, torch.float64)])
def test_a_row_of_any_multiple_of_16_bytes(hidden, dtype):
    world = VirtualWorld(1, 1)
    with world.buffers(hidden, 8, EXPERTS, timeout_s=60)[0] as b:
        x = torch.arange(8 * hidden, dtype=dtype).view(8, hidden)
        rows, _, _, handle = b.dispatch(x, topk_idx=given(0).idx[:1].expand(8, -1))
        assert torch.equal(rows, x)
        if dtype == torch.float32:
            assert torch.equal(b.combine(rows, handle=handle)[0], x)
        with pytest.raises(ValueError, match="multiple of 8"):
            b.dispatch(x[:, :2].bfloat16(), topk_idx=given(0).idx[:1].expand(8, -1))
        b.update_template_config(hidden_dim=hidden + 2)
        assert torch.equal(b.dispatch(x, topk_idx=given(0).idx[:1].expand(8, -1))[0], x)


def test_an_odd_hidden_dim_is_refused_by_the_constructor():
    with pytest.raises(ValueError, match="hidden_dim=7 must be even"):
        HybridEPBuffer(VirtualWorld(1, 1).groups[0], 7, 8, EXPERTS)


@pytest.mark.parametrize(
    "x", [torch.ones(0, 8)[5:], torch.ones(4, 8)[4:], torch.ones(0, 8).as_strided((0, 8), (8, 1), 16)]
)
def test_an_empty_tensor_fills_no_memory_wherever_it_begins(x):
    assert view("x", aligned(x)).num_bytes == 0


@pytest.mark.parametrize("path", ["throughput", "latency"])
@pytest.mark.parametrize("form", ["one column by a transpose", "no row, of a reduction"])
def test_scales_of_any_strides_of_a_contiguous_tensor(path, form):
    """Of one column, as fp8 has with 128 elements, a dimension's stride means nothing, and view() minds it."""
    world = VirtualWorld(1, 2)
    buffers = world.buffers(128, 8, 2, latency_tokens=8)
    lines = {"num_permuted_tokens": 16, "non_blocking": True} if path == "latency" else {}

    def run(rank, group):
        tokens = 0 if rank == 0 and "no row" in form else 4
        hidden, scales = quantize(torch.full((tokens, 128), 3.0 + rank), FORMATS["fp8"])
        if tokens and "transpose" in form:
            scales = scales.new_empty(1, tokens).copy_(scales.t()).t()
            assert scales.stride() == (1, tokens) and scales.is_contiguous()
        elif not tokens:
            assert scales.stride(1) == 0
        given = {"hidden": hidden, "scaling_factor": scales, "topk_idx": torch.arange(4).expand(tokens, 4)[:, :2]}
        rows, _, arrived, counts, _ = buffers[rank].dispatch_with_permute(**given, path=path, **lines)
        num_rows = int(torch.as_tensor(counts).sum())
        return dequantize(rows[:num_rows], arrived[:num_rows], FORMATS["fp8"], torch.float32)

    first, second = world.run(run)
    expected = [3.0] * 4 + [4.0] * 4 if "transpose" in form else [4.0] * 4
    assert first[:, 0].tolist() == expected * 2 and (first == first[:, :1]).all() and len(second) == 0
