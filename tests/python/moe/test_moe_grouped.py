"""Grouped GEMM with experts that received nothing: every result against fp64, over memory full of NaN."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hybrid_ep.moe import grouped, grouped_mm, pad_groups, padding, row_alignment
from hybrid_ep.moe.backends import BACKENDS, Groups, LoopBackend, TorchBackend
from hybrid_ep.moe.probing import PAD_ROWS, examine

K, F = 32, 48
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}  # of the largest value: two roundings
COUNTS = [(0, 0, 5, 3), (7, 0, 0, 1), (3, 5, 0, 0), (0, 7, 0, 1), (0, 0, 0, 0), (8, 16, 8, 16), (1, 1, 1, 1)]


@pytest.fixture(autouse=True)
def _fresh_memory_is_nan():
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory and torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


def offsets_of(counts):
    return torch.tensor(list(itertools.accumulate(counts)), dtype=torch.int32)


def problem(counts, tail, dtype, seed=0, transposed=False):
    """x, w, grad with NaN behind the last group."""
    torch.manual_seed(seed)
    rows = sum(counts) + tail
    x, grad = torch.randn(rows, K), torch.randn(rows, F)
    w = torch.randn(len(counts), F, K).transpose(1, 2) if transposed else torch.randn(len(counts), K, F)
    x[sum(counts) :] = grad[sum(counts) :] = float("nan")
    return x.to(dtype), w.to(dtype), grad.to(dtype)


def expected(x, w, grad, counts):
    """(out, dx, dw) in fp64: a product per expert, zeros for the rest."""
    x, w, grad = x.double(), w.double(), grad.double()
    out, dx = torch.zeros(x.shape[0], F).double(), torch.zeros_like(x)
    dw, start = torch.zeros_like(w), 0
    for e, count in enumerate(counts):
        rows = slice(start, start := start + count)
        out[rows], dx[rows], dw[e] = x[rows] @ w[e], grad[rows] @ w[e].T, x[rows].T @ grad[rows]
    return out, dx, dw


def run(x, w, grad, offsets, **options):
    x, w = x.clone().requires_grad_(), w.clone().requires_grad_()
    out = grouped_mm(x, w, offsets, **options)
    out.backward(grad)
    return out.detach(), x.grad, w.grad


def check(got, want, dtype, counts):
    for name, a, b in zip(("out", "dx", "dw"), got, want, strict=True):
        assert a.dtype == dtype and a.shape == b.shape and not a.isnan().any(), name
        assert (a.double() - b).abs().max() <= TOLERANCE[dtype] * b.abs().max() if b.numel() else True, name
    assert (got[0][sum(counts) :] == 0).all() and (got[1][sum(counts) :] == 0).all()
    assert all((got[2][e] == 0).all() for e, count in enumerate(counts) if count == 0)


@pytest.mark.parametrize("backend", ["torch", "loop"])
@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("tail", [0, 5])
def test_exact_for_every_position_of_empty_experts(backend, dtype, tail):
    for counts, transposed in itertools.product(COUNTS, (False, True)):
        if sum(counts) + tail:
            x, w, grad = problem(counts, tail, dtype, transposed=transposed)
            offsets = offsets_of(counts)
            check(run(x, w, grad, offsets, backend=backend), expected(x, w, grad, counts), dtype, counts)


@given(st.lists(st.sampled_from([0, 0, 1, 2, 8, 9, 16]), min_size=1, max_size=9), st.integers(0, 9))
def test_exact_for_any_counts(counts, tail):
    x, w, grad = problem(counts, tail, torch.float32)
    check(run(x, w, grad, offsets_of(counts).long()), expected(x, w, grad, counts), torch.float32, counts)


@pytest.mark.parametrize("backend", ["torch", "loop"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_several_stacks_give_the_bits_of_one(backend, dtype):
    """Weights in two or three tensors, each part without rows in turn, rows behind the last: as if they were joined."""
    cases = [*COUNTS, (0, 0, 0, 9), (9, 0, 0, 0)]
    for counts, tail, cuts in itertools.product(cases, (0, 5), ([3], [1, 2], [2])):
        if not sum(counts) + tail:
            continue
        x, w, grad = problem(counts, tail, dtype, transposed=True)
        offsets = offsets_of(counts)
        want = run(x, w, grad, offsets, backend=backend, tail=tail > 0)
        parts = [part.clone().requires_grad_() for part in w.tensor_split(cuts)]
        x.requires_grad_()
        first_rows = [sum(counts[:cut]) for cut in (0, *cuts)]
        out = grouped_mm(x, parts, offsets, backend=backend, tail=tail > 0, first_rows=first_rows)
        out.backward(grad)
        got = out.detach(), x.grad, torch.cat([part.grad for part in parts])
        check(got, expected(x.detach(), w, grad, counts), dtype, counts)
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True)), (counts, tail, cuts)
        place = torch.full_like(got[0], float("nan"))
        with torch.no_grad():
            stored = grouped_mm(x, parts, offsets, backend=backend, tail=tail > 0, first_rows=first_rows, out=place)
            unsaid = grouped_mm(x, parts, offsets, backend=backend, tail=tail > 0)
        assert stored is place and torch.equal(stored, got[0]), (counts, tail, cuts)
        assert torch.equal(unsaid, got[0]), (counts, tail, cuts)


@pytest.mark.parametrize("backend", ["torch", "loop", "auto"])
@pytest.mark.parametrize("counts, tail", [((3, 0, 4, 1), 2), ((0, 0, 0, 0), 4), ((8, 0, 0, 0), 0)])
def test_a_given_place_is_what_is_returned_and_differentiated(backend, counts, tail):
    x, w, grad = problem(counts, tail, torch.float32)
    offsets = offsets_of(counts)
    whole = torch.full((len(x) + 7, F), float("nan"))
    for place in (torch.full((len(x), F), float("nan")), whole[3 : 3 + len(x)]):  # memory of its own, and a part
        got = run(x, w, grad, offsets, backend=backend, out=place)
        check(got, expected(x, w, grad, counts), torch.float32, counts)
        assert got[0].data_ptr() == place.data_ptr()
    assert whole[:3].isnan().all() and whole[3 + len(x) :].isnan().all()


@pytest.mark.parametrize(
    "place, said",
    [
        (torch.empty(8, F + 1), rf"out is torch.float32 \(8, {F + 1}\)"),
        (torch.empty(8, F).half(), "out is torch.float16"),
        (torch.empty(F, 8).t(), "strided"),
        (torch.empty(8, F, requires_grad=True), "part of a graph"),
        ("x", "shares memory with x"),
        (5, "out=5 is no tensor"),
        (torch.empty(9, F, requires_grad=True).mul(1)[:8], "slice of what is"),
        (torch.inference_mode()(torch.empty)(8, F), "inference mode"),
    ],
)
def test_a_place_that_does_not_fit_is_named(place, said):
    x = torch.randn(8, F)
    with pytest.raises(ValueError, match=said):
        grouped_mm(x, torch.randn(3, F, F), torch.tensor([2, 4, 8]), out=x.view(8, F) if place == "x" else place)


@pytest.mark.parametrize(
    "first_rows, said",
    [
        ((0,), "each of the 2 stacks"),
        ((1, 4), "0, then ascending"),
        ((0, 9), "at most the 8 rows"),
        ((0, 3), "must be where"),
    ],
)
def test_first_rows_that_do_not_fit_are_named(first_rows, said):
    with pytest.raises(ValueError, match=said):
        grouped_mm(
            torch.randn(8, K), torch.randn(3, K, F).tensor_split([2]), torch.tensor([2, 4, 8]), first_rows=first_rows
        )


@pytest.mark.parametrize("backend", ["torch", "loop", "auto"])
def test_no_rows_at_all_and_a_gradient_that_is_one_number(backend):
    x, w = torch.randn(0, K, requires_grad=True), torch.randn(3, K, F, requires_grad=True)
    out = grouped_mm(x, w, torch.zeros(3, dtype=torch.int32), backend=backend)
    out.sum().backward()
    assert out.shape == (0, F) and x.grad.shape == (0, K) and w.grad.shape == w.shape and (w.grad == 0).all()
    x = torch.randn(8, K, requires_grad=True)
    grouped_mm(x, w, torch.tensor([0, 8, 8]), backend=backend, tail=False).sum().backward()
    torch.testing.assert_close(x.grad, w[1].sum(1).expand(8, K).detach())


def test_shapes_that_torch_refuses_go_to_the_loop_and_only_when_asked_for_auto(caplog):
    x, w, offsets = torch.randn(6, 10), torch.randn(2, 10, 7), torch.tensor([6, 6])
    with caplog.at_level("WARNING", "hybrid_ep.moe"):
        torch.testing.assert_close(grouped_mm(x, w, offsets), x @ w[0])
        grouped_mm(x, w, offsets)
    assert [r.getMessage().count("multiples of 16 bytes") for r in caplog.records] == [1]
    with pytest.raises(ValueError, match="multiples of 16 bytes"):
        grouped_mm(x, w, offsets, backend="torch")


@pytest.mark.parametrize(
    "change, said",
    [
        ({"offsets": torch.tensor([4, 2, 8])}, r"offsets=\[4, 2, 8\] must ascend"),
        ({"offsets": torch.tensor([2, 4, 9])}, "at most the 8 rows"),
        ({"offsets": torch.tensor([2, 4, 6]), "tail": False}, "tail=False says"),
        ({"offsets": torch.tensor([2, 4])}, "E=3"),
        ({"offsets": torch.tensor([2.0, 4.0, 8.0])}, "int32 or int64"),
        ({"w": torch.randn(3, F, K)}, r"w.transpose\(1, 2\)"),
        ({"w": torch.randn(3, K, F).half()}, "must be the same"),
        ({"w": torch.randint(9, (3, K, F))}, "both must be one of"),
        ({"backend": "cutlass"}, "backend='cutlass' is unknown"),
        ({"backend": "te"}, "Transformer Engine"),
        ({"x": None}, r"x is NoneType None; give a tensor: rows \[N, K\]"),
        ({"w": None}, "w is NoneType None; give a tensor"),
        ({"w": [torch.randn(3, K, F), 3]}, r"w\[1\] is int 3; give a tensor"),
        ({"offsets": [2, 2, 6]}, r"offsets is list \[2, 2, 6\]; give a tensor"),
        ({"arriving": 3}, r"arriving=3 must have under_way\(\)"),
        ({"first_rows": [0, None]}, r"first_rows=\[0, None\] must be integers"),
        ({"first_rows": 3}, "first_rows=3 must be integers"),
    ],
)
def test_bad_input_is_named(change, said):
    good = {"x": torch.randn(8, K), "w": torch.randn(3, K, F), "offsets": torch.tensor([2, 4, 8])}
    with pytest.raises(ValueError, match=said):
        grouped_mm(**(good | change))


# ---- the probe, on machines with each of the known bugs


def empty_groups(groups, of):
    """Which groups of each stack have no rows, of all stacks or of some."""
    found = (torch.diff(groups.ends, prepend=groups.ends.new_zeros(1)) == 0).split(groups.sizes)
    return found if of is None else found[of.start : of.stop]


class StaleAccumulator(LoopBackend):
    """An empty group's gradient is what the tile before it left, as on one GPU with torch 2.9."""

    name = "stale"

    @staticmethod
    def wgrad(x, g, groups, of=None):
        made = LoopBackend.wgrad(x, g, groups, of)
        for out, empty in zip(made, empty_groups(groups, of), strict=True):
            out[empty] = 7.0
        return made


class NeverWritten(LoopBackend):
    """Neither tails nor gradients of empty groups are written."""

    name = "never"
    mm = TorchBackend.mm  # which writes no tail

    @staticmethod
    def wgrad(x, g, groups, of=None):
        made = LoopBackend.wgrad(x, g, groups, of)
        for out, empty in zip(made, empty_groups(groups, of), strict=True):
            out[empty] = float("nan")
        return made


class SpoilsNeighbours(LoopBackend):
    """An empty group makes the kernel lose its place: all gradients are wrong."""

    name = "spoils"

    @staticmethod
    def wgrad(x, g, groups, of=None):
        out = LoopBackend.wgrad(x, g, groups, of)
        lost = (torch.diff(groups.ends, prepend=groups.ends.new_zeros(1)) == 0).any()
        return [dw + 1 for dw in out] if lost else out


class Raises(LoopBackend):
    name = "raises"

    @staticmethod
    def wgrad(x, g, groups, of=None):
        raise RuntimeError("CUTLASS cannot handle delta=0\nat some line")


class AlwaysWrong(LoopBackend):
    name = "wrong"

    @staticmethod
    def mm(x, stacks, groups, out=None, of=None):
        return LoopBackend.mm(x, stacks, groups, out, of).mul_(1.5)


BROKEN = {
    StaleAccumulator: "zero_empty_wgrad",
    NeverWritten: "zero_empty_wgrad",
    SpoilsNeighbours: "pad_empty",
    Raises: "unusable",
    AlwaysWrong: "unusable",
}


@pytest.mark.parametrize("backend", BROKEN, ids=lambda b: b.name)
def test_probe_finds_the_smallest_exact_remedy(backend, monkeypatch):
    found = examine(backend, torch.device("cpu"), torch.float32)
    assert found.remedy == BROKEN[backend]
    assert found.remedy in str(found) and backend.name in str(found)
    monkeypatch.setitem(BACKENDS, backend.name, backend)
    for counts in COUNTS:
        x, w, grad = problem(counts, 5, torch.float32)
        if found.remedy == "unusable":
            with pytest.raises(ValueError, match="cannot multiply"):
                grouped_mm(x, w, offsets_of(counts), backend=backend.name)
        else:
            got = run(x, w, grad, offsets_of(counts), backend=backend.name)
            check(got, expected(x, w, grad, counts), torch.float32, counts)


@pytest.mark.parametrize("backend", [b for b, remedy in BROKEN.items() if remedy != "unusable"], ids=lambda b: b.name)
def test_without_its_remedy_each_of_them_is_wrong(backend):
    counts = (7, 0, 0, 1)
    x, w, grad = problem(counts, 5, torch.float32)
    (got,) = grouped._weight_gradients(x, grad, Groups(offsets_of(counts), (4,)), (backend, "none"))
    assert not torch.allclose(got.double(), expected(x, w, grad, counts)[2])


def test_the_installed_backends_are_usable_here():
    for backend, dtype in itertools.product((TorchBackend, LoopBackend), TOLERANCE):
        assert examine(backend, torch.device("cpu"), dtype).remedy == "none"
    assert examine(TorchBackend, torch.device("cpu"), torch.float32).tail_dirty


def test_probe_runs_once_and_leaves_torchs_switches_alone(monkeypatch, caplog):
    from hybrid_ep.moe import probe, probing

    torch.use_deterministic_algorithms(False)
    calls = []
    backend = type("Counted", (LoopBackend,), {"name": "counted"})
    monkeypatch.setitem(BACKENDS, "counted", backend)
    monkeypatch.setattr(probing, "examine", lambda *a: calls.append(a) or examine(*a))
    with caplog.at_level("INFO", "hybrid_ep.moe"):
        assert probe("cpu", torch.float32, "counted") is probe("cpu", torch.float32, "counted")
    assert len(calls) == 1 and sum("backend counted" in r.getMessage() for r in caplog.records) == 1
    assert not torch.are_deterministic_algorithms_enabled()


# ---- padding


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("multiple", [8, 16])
@pytest.mark.parametrize("empty_only", [True, False])
def test_zero_rows_do_not_change_a_bit(dtype, multiple, empty_only):
    for counts in COUNTS:  # counts of exactly 8 and 16 among them
        x, w, grad = problem(counts, 0, dtype)
        if not empty_only:  # a BLAS may pick another kernel for another number of rows: sums that are exact
            x, w, grad = ((t * 2).round().clamp(-3, 3) for t in (x, w, grad))
        offsets = offsets_of(counts)
        want = run(x, w, grad, offsets, backend="torch")
        padded = pad_groups(x, offsets, multiple, empty_only=empty_only)
        out, dx, dw = run(
            padded.rows,
            w,
            pad_groups(grad, offsets, multiple, empty_only=empty_only).rows,
            padded.offsets,
            backend="torch",
        )
        for a, b in ((out[padded.row_of], want[0]), (dx[padded.row_of], want[1]), (dw, want[2])):
            assert torch.equal(a, b)


def test_raising_counts_without_rows_gives_an_expert_its_neighbours_rows():
    counts, x_w_grad = (12, 0, 12), problem((12, 0, 12), 8, torch.float32)
    x, w, grad = (t.nan_to_num(0.0) for t in x_w_grad)  # even with zeros behind the groups
    want = expected(x, w, grad, counts)
    clamped = run(x, w, grad, offsets_of([max(c, 8) for c in counts]), backend="torch")
    for a, b in zip(clamped, want, strict=True):
        assert (a.double() - b).abs().max() > 0.5 * b.abs().max()
    assert (clamped[2][1] != 0).any()  # the expert without rows learns from somebody else's
    check(run(x, w, grad, offsets_of(counts)), want, torch.float32, counts)


@given(st.lists(st.integers(0, 9), min_size=1, max_size=6), st.integers(0, 4), st.integers(1, 5), st.booleans())
def test_padded_layout_is_what_it_says(counts, tail, multiple, empty_only):
    rows = torch.arange(1.0, sum(counts) + tail + 1)[:, None]
    padded = pad_groups(rows, offsets_of(counts), multiple, empty_only=empty_only)
    want, ends, at = [], [], 0
    for count in counts:
        size = count if empty_only and count else -(-max(count, 1) // multiple) * multiple
        want += (rows[at : at + count, 0].tolist() + [0.0] * size)[:size]
        at += count
        ends.append(len(want))
    want += rows[at:, 0].tolist()
    want += [0.0] * (rows.shape[0] + len(counts) * multiple - len(want))
    assert padded.rows[:, 0].tolist() == want and padded.offsets.tolist() == ends
    assert torch.equal(padded.rows[padded.row_of], rows)


def test_padding_is_differentiable_and_alignment_is_named():
    x = torch.randn(5, K, requires_grad=True)
    padded = pad_groups(x, torch.tensor([0, 3, 3]), 4)
    (padded.rows * 2).sum().backward()
    assert torch.equal(x.grad, torch.full_like(x, 2.0))
    assert [row_alignment(f) for f in ("bf16", "fp32", "fp8", "mxfp8")] == [1, 1, 16, 32]
    with pytest.raises(ValueError, match="format='int4'"):
        row_alignment("int4")
    with pytest.raises(ValueError, match="multiple=0"):
        pad_groups(x, torch.tensor([0, 3, 3]), 0)


@pytest.mark.parametrize(
    "change, said",
    [
        ({"offsets": torch.tensor([2, 9, 1])}, r"offsets=\[2, 9, 1\] must ascend from 0 to at most the 6 rows of rows"),
        ({"offsets": torch.tensor([2, 7])}, "at most the 6 rows"),
        ({"offsets": torch.tensor([-1, 2])}, r"offsets=\[-1, 2\]"),
        ({"offsets": torch.tensor([2.0, 4.0])}, "offsets torch.float32"),
        ({"offsets": torch.zeros(0, dtype=torch.int32)}, "E >= 1"),
        ({"offsets": [2, 4]}, r"offsets is list \[2, 4\]; give a tensor"),
        ({"offsets": torch.zeros(1, dtype=torch.int32, device="meta")}, "offsets on meta"),
        ({"rows": None}, "rows is NoneType None"),
        ({"rows": torch.zeros(6)}, r"rows \(6,\) must be"),
        ({"multiple": 2.5}, "multiple=2.5 must be an integer of at least 1"),
    ],
)
def test_groups_that_cannot_be_padded_are_named(change, said):
    good = {"rows": torch.arange(6.0)[:, None], "offsets": torch.tensor([2, 4]), "multiple": 4}
    with pytest.raises(ValueError, match=said):
        pad_groups(**(good | change))


def test_zeros_are_stored_not_multiplied():
    rows = torch.full((4, 3), float("nan"))
    assert torch.equal(padding.zero_tail_(rows, torch.tensor([1, 2]))[2:], torch.zeros(2, 3))
    per_group = torch.full((3, 2, 2), float("nan"))
    padding.zero_empty_groups_(per_group, torch.tensor([0, 2, 2]))
    assert (per_group[[0, 2]] == 0).all() and per_group[1].isnan().all()
    assert PAD_ROWS % row_alignment("fp8") == 0


@pytest.mark.parametrize(
    "strided",
    [
        lambda: torch.randn(2, 8, 16)[:, :, ::2],
        lambda: torch.randn(2, 8, 9)[:, :, :8],
        lambda: torch.randn(8, 8, 2).permute(2, 0, 1),
        lambda: torch.randn(2, 1, 8).expand(2, 8, 8),
        lambda: torch.randn(2, 8, 1).expand(2, 8, 8),
    ],
    ids=["every second", "odd rows", "experts last", "one row", "one column"],
)
def test_weights_of_any_strides(strided):
    w, x, ends = strided(), torch.randn(5, 8), torch.tensor([2, 5])
    want = torch.cat([x[:2] @ w[0], x[2:] @ w[1]])
    assert torch.allclose(grouped_mm(x, w, ends), want, atol=1e-6)
    with pytest.raises(ValueError, match="torch: strides .* are not those of matrices"):
        grouped_mm(x, w, ends, backend="torch")
