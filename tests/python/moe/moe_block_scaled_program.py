"""Run with TRITON_INTERPRET=1 in a process of its own: the kernels of products in fp8 against `block_scaled`, bit for
bit, and with faults planted in them.

The interpreter adds the products of a block in fp32, in NumPy's order: values whose sums fp32 holds exactly make this
the reference's sum. Not a test of a GPU."""

from __future__ import annotations

import importlib.util
import itertools
import os
import tempfile
from pathlib import Path

import torch
import triton
import triton.language as tl

from hybrid_ep.moe import block_scaled, triton_block_scaled
from hybrid_ep.moe.triton_rounding import e4m3_bits

assert os.environ.get("TRITON_INTERPRET") == "1"
torch.set_deterministic_debug_mode("warn")  # torch fills fresh memory with NaN: what nobody writes is seen
assert torch.empty(3, dtype=torch.float8_e4m3fn, device="cpu").float().isnan().all()


@triton.jit
def _cast_kernel(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + at, e4m3_bits(tl.load(x_ptr + at, mask=at < n, other=0)), mask=at < n)


@triton.jit
def _fma_kernel(a_ptr, out_ptr):
    a = tl.load(a_ptr + tl.arange(0, 2))
    tl.store(out_ptr + tl.arange(0, 2), tl.fma(a, a, -1.0 - 0.0 * a))


def round_as_the_interpreter():
    """Interpreters of some releases of Triton round an fma's product, too. Then so does this program's reference."""
    a, out = torch.full((2,), 1 + 2.0**-12), torch.empty(2)
    _fma_kernel[(1,)](a, out)
    if not torch.equal(out, block_scaled.fused(a, a, torch.full((2,), -1.0))):
        block_scaled.fused = lambda a, b, c: a * b + c


def check_rounding():
    """Every bf16 pattern, and every pattern of what e4m3 keeps with low bits that make a tie, or just none."""
    every = torch.arange(1 << 16, dtype=torch.int32) << 16
    kept = torch.arange(1 << 12, dtype=torch.int32) << 20
    low = torch.tensor([0x80000, 0x7FFFF, 0x80001, 0xFFFFF], dtype=torch.int32)
    x = torch.cat([every, (kept[:, None] | low).flatten()]).view(torch.float32)
    x = x[(x.abs() <= 448) | x.isnan()]
    out = torch.empty(x.numel(), dtype=torch.uint8)
    _cast_kernel[(triton.cdiv(x.numel(), 8192),)](x, out, x.numel(), BLOCK=8192)
    want, nan = x.to(torch.float8_e4m3fn).view(torch.uint8), x.isnan()
    assert torch.equal(out[~nan], want[~nan]) and (out[nan] & 0x7F == 0x7F).all()
    print(f"rounding: {x.numel()} patterns")


def summable(*shape: int) -> torch.Tensor:
    """Values of all mantissas, within a factor of eight: in e4m3 multiples of 4, whose 128 products make 21 bits. Every
    block of columns has a size of its own, of weights every square, and some blocks are zeros."""
    values = (torch.rand(*shape) * 7 + 1) * (torch.randint(0, 2, shape) * 2 - 1)
    for dim in range(1, len(shape)):
        powers = torch.randint(-3, 3, (-(-shape[dim] // 128),))
        powers[0] = 3  # what is read behind a row, the beginning of the next, is larger than its rest
        size = torch.ldexp(torch.ones(1), powers).repeat_interleave(128)[: shape[dim]]
        values *= size.view(-1, *[1] * (len(shape) - 1 - dim))
    if shape[-1] > 128:
        values[..., -5:, 128:] = 0
    return values


NOTHING = 7.0  # what stands where nobody is to write


def room_for(rows: torch.Tensor) -> torch.Tensor:
    """With room behind the last row: what a planted fault stores there is nobody's memory."""
    return torch.full((len(rows) + 128, rows.shape[1]), NOTHING, dtype=rows.dtype)[: len(rows)]


def right(kernels, problem, parts: tuple[str, ...] = ("rows", "turns", "dx", "dw", "dw in turns")) -> bool:
    """Whether products and gradients of some groups, with NaN behind the last, are the reference's. parts: which."""
    torch.manual_seed(2)
    dtype, cuts, counts, k, f = problem
    num_rows, real, experts = sum(counts) + 20, sum(counts), len(counts)
    x, g = (summable(num_rows + 128, n)[:num_rows] for n in (k, f))
    x[real:] = g[real:] = float("nan")
    x, g = x.to(dtype), g.to(dtype)
    stored = summable(experts, f, k).to(dtype)  # as torch.nn.Linear has it
    # Each in memory of its own: what a planted fault reads behind it is wrong, and is there.
    stacks = [torch.cat([w, stored])[: len(w)].transpose(1, 2) for w in stored.tensor_split(list(cuts))]
    ends = torch.tensor(list(itertools.accumulate(counts)), dtype=torch.int32)
    firsts = [0, *itertools.accumulate(len(w) for w in stacks)]
    want, want_dx = torch.full((num_rows, f), NOTHING, dtype=dtype), torch.full_like(x, NOTHING)
    want_dw, start = torch.zeros(experts, k, f, dtype=dtype), 0
    for e, count in enumerate(counts):
        rows = slice(start, start := start + count)
        want[rows] = block_scaled.rows_times_matrix(x[rows], stored[e].t())
        want_dx[rows] = block_scaled.rows_times_matrix(g[rows], stored[e])
        want_dw[e] = block_scaled.matrix_gradient(x[rows], g[rows])
    pairs = []
    if "rows" in parts:
        pairs.append((room_for(want), want))
        kernels.rows_times_stacks(x, stacks, ends, pairs[-1][0])
    if "turns" in parts:
        cut = firsts[1]
        pairs.append((room_for(want), want))
        for groups, some in (((cut, cut), []), ((cut, experts), stacks[1:]), ((0, cut), stacks[:1])):
            kernels.rows_times_stacks(x, some, ends, pairs[-1][0], groups)
    if "dx" in parts:
        pairs.append((room_for(want_dx), want_dx))
        kernels.rows_times_stacks(g, [w.transpose(1, 2) for w in stacks], ends, pairs[-1][0])
    made = [torch.full((len(w), k, f), float("nan"), dtype=dtype) for w in stacks]
    if "dw" in parts:
        kernels.weight_gradients(x, g, ends, list(zip(firsts, made, strict=False)), (0, experts))
        pairs.append((torch.cat(made), want_dw))
    if "dw in turns" in parts:
        for n, dw in enumerate(made):
            dw.fill_(float("nan"))
            kernels.weight_gradients(x, g, ends, [(firsts[n], dw)], (firsts[n], firsts[n + 1]))
        pairs.append((torch.cat(made), want_dw))
    return all(torch.equal(a, b) for a, b in pairs)


def check_values():
    """What quantising stores, of all values there are, NaN, infinities and the smallest among them, and of usual ones.
    The smallest as fp32: the interpreter widens them wrongly from bf16."""
    every = (torch.arange(1 << 16, dtype=torch.int32) << 16).view(torch.float32)
    every = torch.cat([every, torch.randn(1 << 12), torch.randn(128) * 1e-40])
    for x in (every.view(128, 545), torch.randn(130, 16).bfloat16()):
        ends = torch.tensor([0, len(x)], dtype=torch.int32)
        q, scales = triton_block_scaled.quantise_rows(x, ends, (0, 2))
        turned, column_scales = triton_block_scaled.quantise_columns(x, ends, (1, 2))
        w, w_scales = triton_block_scaled.quantise_weights([x[None], x.flip(0)[None]])
        squares = w_scales.repeat_interleave(128, 1)[:, : x.shape[1]]
        for values, scale, want in (
            (q, scales.t(), block_scaled.quantise(x)),
            (turned, column_scales.t(), block_scaled.quantise(x.t())),
            (w[0], squares[0], block_scaled.quantise(x.t(), 128)),
            (w[1], squares[1], block_scaled.quantise(x.flip(0).t(), 128)),
        ):
            theirs = want.values.flatten(1)
            values, scale = values[:, : theirs.shape[1]].view(torch.uint8), scale[:, : want.scales.shape[1]]
            nan = theirs.float().isnan()
            assert torch.equal(values[~nan], theirs.view(torch.uint8)[~nan]) and (values[nan] & 0x7F == 0x7F).all()
            assert torch.equal(scale.nan_to_num(-1), want.scales.nan_to_num(-1))


# Of the kernels, each of which the part of a problem that is named must notice.
FAULTS = {
    "a row's scale is that of the block before": ("rows", "x_scale_at += num_rows", "x_scale_at += 0"),
    "a weight's scale is that of the block before": ("rows", "w_scale_at += 1", "w_scale_at += 0"),
    "all columns take the first square's scale": ("rows", " + column // BK) * (k // BK)", ") * (k // BK)"),
    "an expert has the weights of the one before": ("rows", "group - from_group\n", "tl.maximum(group - 1, 0)\n"),
    "blocks are added without scales": ("rows", "tl.dot(a, b), scale[:, None], total", "tl.dot(a, b), 1.0, total"),
    "a row behind its group is stored": ("rows", "in_rows, in_f = at_row < end - row", "in_rows, in_f = at_row < BM"),
    "a turn quantises no row of its own": ("turns", "(row + BM > begin)", "(row > begin)"),
    "the rest of K is not zeros": ("rows", "known[:, None] & (at_k < k)[None, :]", "known[:, None]"),
    "a weight's rest of K is not zeros": ("rows", "known & (at_inner < inner)[None, :]", "known"),
    "a square's scale is its smallest row's": ("rows", "tl.max(tl.max(_mag", "tl.min(tl.max(_mag"),
    "blocks of a group are counted from row 0": ("dw", "starts + (block - through + blocks) * BK", "block * BK"),
    "rows behind the group enter its gradient": ("dw", "(at_row < end - row)[:, None] & in_columns", "in_columns"),
    "the block that is not full is forgotten": (
        "dw",
        "past_group, GROUPS, BK)\n",
        "past_group, GROUPS, BK)\n    blocks = (ends - starts) // BK\n    through = tl.cumsum(blocks)\n",
    ),
    "a gradient's blocks are counted from its row": (
        "dw",
        "_, _, blocks, _ = tiles_of(ends_ptr, 0, num_groups, GROUPS, BK)\n"
        "    begin = tl.sum(tl.where(groups < first + expert, blocks, 0))",
        "starts, _, blocks, _ = tiles_of(ends_ptr, 0, num_groups, GROUPS, BK)\n"
        "    begin = tl.sum(tl.where(groups == first + expert, starts // BK, 0))",
    ),
    "a gradient's scale stays the first block's": ("dw", "g_scale_at += f", "g_scale_at += 0"),
    "a turn's gradient begins at the first group": ("dw in turns", "groups < first + expert", "groups < expert"),
}


def check_products():
    several = torch.float32, (2,), (5, 0, 140), 200, 136
    assert right(triton_block_scaled, several)
    assert right(triton_block_scaled, (torch.float16, (), (3, 129, 0), 128, 16), ("rows", "dw"))
    assert right(triton_block_scaled, (torch.bfloat16, (), (130,), 300, 136), ("rows", "dx", "dw"))
    text = Path(triton_block_scaled.__file__).read_text()
    for fault, (part, is_there, planted) in FAULTS.items():
        assert text.count(is_there) == 1, fault
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "faulty.py"
            path.write_text(text.replace(is_there, planted))
            spec = importlib.util.spec_from_file_location("faulty", path)
            faulty = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(faulty)
            assert not right(faulty, several, (part,)), fault


if __name__ == "__main__":
    round_as_the_interpreter()
    for check in (check_rounding, check_values, check_products):
        check()
        print(check.__name__, "ok")
