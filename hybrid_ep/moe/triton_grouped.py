"""Grouped GEMM by Triton: experts of several stacks in one launch, counts on the device, the result where one asks.

torch's grouped GEMM takes one stack and makes its own result. Here a program finds its group by the ends on the
device, so that no host reads where a stack's rows begin, and stores to memory that it is given, such as
buffer.empty()'s. Grids depend on shapes only: both kernels capture in a CUDA graph.

An element is one sum over the inner dimension in steps of BK (or BR rows), fp32, rounded once: its bits do not depend
on the group's length, on what else is in the batch, or on how the experts are spread over stacks.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from hybrid_ep.moe.triton_rounding import LAUNCH, round_to

MAX_STACKS = 4  # of one launch: pointers are arguments
MAX_GROUPS = 1024  # a program holds all ends in registers
# 128 x 256 sums in 8 warps (two warpgroups on Hopper); four stages of both tiles are 192 KiB of shared memory.
ROWS_TILE = {"BM": 128, "BN": 256, "BK": 64}
WEIGHTS_TILE = {"BM": 128, "BN": 256, "BR": 64}
OPTIONS = {**LAUNCH, "num_warps": 8, "num_stages": 4}
BAND_TILES = 8  # row tiles that walk the columns together, so that what they read of a weight is still in L2


@triton.jit
def in_bands(tile, height, width, BAND: tl.constexpr):
    """(row, column) of a tile of height x width, counted down the columns of one band of rows after the other."""
    band = tile // (BAND * width) * BAND
    rows = tl.minimum(height - band, BAND)
    return band + tile % (BAND * width) % rows, tile % (BAND * width) // rows


@triton.jit
def tiles_of(ends_ptr, from_group, past_group, GROUPS: tl.constexpr, BM: tl.constexpr):
    """(starts, ends, tiles of BM rows, tiles through) of the groups before past_group; those before from_group count
    no tile."""
    groups = tl.arange(0, GROUPS)
    known = groups < past_group
    ends = tl.load(ends_ptr + groups, mask=known, other=0)
    starts = tl.load(ends_ptr + groups - 1, mask=known & (groups > 0), other=0)
    heights = tl.where(known & (groups >= from_group), (ends - starts + BM - 1) // BM, 0)
    return starts, ends, heights, tl.cumsum(heights)


@triton.jit
def find_tile(tile, starts, ends, heights, through, columns, GROUPS: tl.constexpr, BAND: tl.constexpr):
    """(group, its first row, the end of its rows, row and column of the tile in it): see `tiles_of`."""
    group = tl.sum((through <= tile // columns).to(tl.int32))
    mine = tl.arange(0, GROUPS) == group
    start, end = tl.sum(tl.where(mine, starts, 0)), tl.sum(tl.where(mine, ends, 0))
    height = tl.sum(tl.where(mine, heights, 0))
    within = tile - (tl.sum(tl.where(mine, through, 0)) - height) * columns
    down, across = in_bands(within, height, columns, BAND)
    return group, start, end, down, across


@triton.jit
def _from(first, its_ptr, its_step, group, weight, expert, step):
    """(weights, expert among them, elements between experts) of a group: the stack's from its first group on."""
    beyond = group >= first
    weight, step = tl.where(beyond, its_ptr, weight), tl.where(beyond, its_step, step)
    return weight, tl.where(beyond, group - first, expert), step


@triton.jit
def _rows_kernel(
    x_ptr,
    w0_ptr,
    w1_ptr,
    w2_ptr,
    w3_ptr,
    ends_ptr,
    out_ptr,
    from_group,
    num_groups,
    first1,
    first2,
    first3,
    k,
    f,
    step0,
    step1,
    step2,
    step3,
    step_k,
    step_f,
    STACKS: tl.constexpr,
    GROUPS: tl.constexpr,
    EVEN_K: tl.constexpr,
    BAND: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    """out[i] = x[i] @ w[e] for the rows i of the groups e in from_group .. num_groups. first1..3: the first group of
    stacks 1 to 3. step0..3: elements between experts of a stack; step_k, step_f: between elements of a matrix, the same
    in all stacks."""
    starts, ends, heights, through = tiles_of(ends_ptr, from_group, num_groups, GROUPS, BM)
    columns = (f + BN - 1) // BN
    for tile in range(tl.program_id(0), tl.sum(heights) * columns, tl.num_programs(0)):
        group, start, end, down, across = find_tile(tile, starts, ends, heights, through, columns, GROUPS, BAND)
        row, column = start + down * BM, across * BN
        weight, expert, step = w0_ptr, group, step0
        if STACKS > 1:
            weight, expert, step = _from(first1, w1_ptr, step1, group, weight, expert, step)
        if STACKS > 2:
            weight, expert, step = _from(first2, w2_ptr, step2, group, weight, expert, step)
        if STACKS > 3:
            weight, expert, step = _from(first3, w3_ptr, step3, group, weight, expert, step)
        # Scalars move along, offsets of 32 bits stay: pointers of 64 bits a value would spill.
        x_at, w_at = x_ptr + row.to(tl.int64) * k, weight + expert.to(tl.int64) * step
        at_row, at_f, at_k = tl.arange(0, BM), column + tl.arange(0, BN), tl.arange(0, BK)
        x_offset = at_row[:, None] * k + at_k[None, :]
        w_offset = at_k[:, None] * step_k + at_f[None, :] * step_f
        in_rows, in_f = (at_row < end - row)[:, None], (at_f < f)[None, :]
        total = tl.zeros((BM, BN), dtype=tl.float32)
        for done in range(0, k, BK):
            in_a, in_b = in_rows, in_f
            if not EVEN_K:
                in_a, in_b = in_rows & (at_k < k - done)[None, :], in_f & (at_k < k - done)[:, None]
            total = tl.dot(
                tl.load(x_at + x_offset, mask=in_a, other=0.0), tl.load(w_at + w_offset, mask=in_b, other=0.0), total
            )
            x_at += BK
            w_at += BK * step_k
        out_at = out_ptr + row.to(tl.int64) * f
        out_offset = at_row[:, None] * f + at_f[None, :]
        tl.store(out_at + out_offset, round_to(total, out_ptr.dtype.element_ty), mask=in_rows & in_f)


@triton.jit
def _weights_kernel(x_ptr, g_ptr, ends_ptr, out_ptr, first, k, f, BM: tl.constexpr, BN: tl.constexpr, BR: tl.constexpr):
    """out[e] = x_e^T @ g_e for the groups first + e of a stack; zeros for one without rows."""
    expert = tl.program_id(1)
    end = tl.load(ends_ptr + first + expert)
    start = tl.load(ends_ptr + first + expert - 1, mask=first + expert > 0, other=0)
    columns = (f + BN - 1) // BN
    at_k = tl.program_id(0) // columns * BM + tl.arange(0, BM)
    at_f = tl.program_id(0) % columns * BN + tl.arange(0, BN)
    at_row = tl.arange(0, BR)
    x_at, g_at = x_ptr + start.to(tl.int64) * k, g_ptr + start.to(tl.int64) * f
    x_offset, g_offset = at_row[:, None] * k + at_k[None, :], at_row[:, None] * f + at_f[None, :]
    in_k, in_f = at_k < k, at_f < f
    total = tl.zeros((BM, BN), dtype=tl.float32)
    for done in range(start, end, BR):
        in_rows = (at_row < end - done)[:, None]  # others may be NaN: zeros instead, on both sides
        a = tl.load(x_at + x_offset, mask=in_rows & in_k[None, :], other=0.0)
        b = tl.load(g_at + g_offset, mask=in_rows & in_f[None, :], other=0.0)
        total = tl.dot(tl.trans(a), b, total)
        x_at += BR * k
        g_at += BR * f
    out_at = out_ptr + expert.to(tl.int64) * k * f
    out_offset = at_k[:, None] * f + at_f[None, :]
    tl.store(out_at + out_offset, round_to(total, out_ptr.dtype.element_ty), mask=in_k[:, None] & in_f[None, :])


def rows_times_stacks(
    x: torch.Tensor,
    stacks: Sequence[torch.Tensor],
    offsets: torch.Tensor,
    out: torch.Tensor,
    groups: tuple[int, int] | None = None,
    **tile: int,
) -> None:
    """out[i] = x[i] @ w[e] for every row i of every group e; other rows of out stay as they are.

    x [N, K] and out [N, F] contiguous, stacks of [E_i, K, F] with the same steps inside a matrix, one dtype (bf16,
    fp16), at most MAX_STACKS; offsets int32 [sum of E_i]. groups: (first, past the last) of those that are computed,
    for one launch of several; others' weights are not read. tile: in place of ROWS_TILE's sizes."""
    sizes, (num_rows, k), f = {**ROWS_TILE, **tile}, x.shape, out.shape[1]
    begin, num_groups = groups or (0, offsets.numel())
    if begin == num_groups:
        return
    firsts, padded = [0, 0, 0, 0], [*stacks, *[stacks[0]] * (MAX_STACKS - len(stacks))]
    for i, stack in enumerate(stacks[:-1], 1):
        firsts[i] = firsts[i - 1] + stack.shape[0]
    # As many tiles as any counts can make: every group may end with a tile that is not full.
    most = (triton.cdiv(num_rows, sizes["BM"]) + min(num_groups - begin, num_rows)) * triton.cdiv(f, sizes["BN"])
    # In turns, kernels that bring weights run beside it: of programs that outlast their SMs' others, some would begin
    # when these end, each with its whole share of the tiles. A program a tile goes to the SM that is free.
    _rows_kernel[(min(most, programs(x.device)) if groups is None else max(most, 1),)](
        x,
        *padded,
        offsets,
        out,
        begin,
        num_groups,
        *firsts[1:],
        k,
        f,
        *(stack.stride(0) for stack in padded),
        stacks[0].stride(1),
        stacks[0].stride(2),
        STACKS=len(stacks),
        GROUPS=triton.next_power_of_2(num_groups),
        EVEN_K=k % sizes["BK"] == 0,
        BAND=BAND_TILES,
        **sizes,
        **OPTIONS,
    )


def weight_gradient(
    x: torch.Tensor, g: torch.Tensor, offsets: torch.Tensor, first: int, out: torch.Tensor, **tile: int
) -> None:
    """out[e] = x_e^T @ g_e, exact zeros for a group without rows, for groups first to first + E of offsets.

    x [N, K], g [N, F] and out [E, K, F] contiguous, one dtype (bf16, fp16). tile: in place of WEIGHTS_TILE's sizes."""
    sizes, (num_groups, k, f) = {**WEIGHTS_TILE, **tile}, out.shape
    grid = (triton.cdiv(k, sizes["BM"]) * triton.cdiv(f, sizes["BN"]), num_groups)
    _weights_kernel[grid](x, g, offsets, out, first, k, f, **sizes, **OPTIONS)


def programs(device: torch.device) -> int:
    """One a multiprocessor: shared memory holds one. Without a GPU (the interpreter) a few, so that each has several
    tiles."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 3
