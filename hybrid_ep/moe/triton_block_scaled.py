"""Grouped GEMM of e4m3 values with a scale a block, by Triton: `block_scaled` is what it computes.

Tensor cores of Hopper take fp8 operands only with the inner dimension contiguous, so that a product is two steps:

    rows       x [N, K] -> e4m3 [N, K'] and scales [K' / 128, N]
    weights    w [E_i, K, F] of every stack, any strides -> e4m3 [E, F, K'] and scales [E, F' / 128, K' / 128]; for the
               gradient of x, which takes w transposed, [E, K, F'] of the same squares
    columns    x, g [N, C] -> e4m3 [C, P] and scales [P / 128, C]: transposed, every group at a multiple of 128 of P

' is the next multiple of 128: the inner dimension is filled with zeros, so that products have no rest. Several stacks
are quantised into one, which the product sees. P is what the worst counts need. Grids depend on shapes only, groups are
found by the ends on the device: nothing waits for the host, all of it captures in a CUDA graph.

A product adds the 128 of a block in the tensor core and the blocks in fp32, scaled: longer sums would
keep the tensor core's 14 bits on Hopper. Its bits depend neither on a group's length nor on how experts are spread.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from hybrid_ep.moe.block_scaled import BLOCK
from hybrid_ep.moe.triton_grouped import BAND_TILES, find_tile, programs, tiles_of
from hybrid_ep.moe.triton_rounding import LAUNCH, e4m3_bits, round_to

MAX_GROUPS = 1024  # a program holds all ends in registers
# A tile of sums and one of a block's sum: 128 x 128 fp32 each in 8 warps. A stage is 32 KiB of shared memory.
# BN divides BLOCK, so that a tile has one scale of a weight a step.
TILE = {"BM": 128, "BN": 128}
OPTIONS = {**LAUNCH, "num_warps": 8, "num_stages": 4}
QUANTISING = {**LAUNCH, "num_warps": 8}
ROWS = 64  # of a program that quantises rows
COLUMNS = 64  # of one that quantises columns


@triton.jit
def _scale_of(amax_bits):
    """The scale of a block, of the bits of its largest magnitude, whose order is the numbers' with NaN above all."""
    scale = tl.maximum(tl.div_rn(amax_bits.to(tl.float32, bitcast=True), 448.0), 1.1754943508222875e-38)
    scale = tl.where(amax_bits == 0, 1.0, scale)
    return tl.where(amax_bits >= 0x7F800000, float("nan"), scale)


@triton.jit
def _magnitude(x):
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _quantise_rows_kernel(
    x_ptr, ends_ptr, q_ptr, scales_ptr, num_rows, from_group, past_group, k, filled, BM: tl.constexpr, BK: tl.constexpr
):
    """Rows of the groups from_group .. past_group; other rows may stay as they are."""
    row = tl.program_id(0) * BM
    begin = tl.load(ends_ptr + from_group - 1, mask=from_group > 0, other=0)
    if (row < tl.load(ends_ptr + past_group - 1)) & (row + BM > begin):
        at_row, at_k = row + tl.arange(0, BM), tl.program_id(1) * BK + tl.arange(0, BK)
        known = at_row < num_rows
        offset = at_row.to(tl.int64)[:, None] * k + at_k[None, :]
        x = tl.load(x_ptr + offset, mask=known[:, None] & (at_k < k)[None, :], other=0.0).to(tl.float32)
        scale = _scale_of(tl.max(_magnitude(x), 1))
        q = e4m3_bits(x * tl.div_rn(1.0, scale)[:, None])
        tl.store(q_ptr + at_row.to(tl.int64)[:, None] * filled + at_k[None, :], q, mask=known[:, None])
        tl.store(scales_ptr + tl.program_id(1).to(tl.int64) * num_rows + at_row, scale, mask=known)


@triton.jit
def _quantise_weights_kernel(
    w_ptr, q_ptr, scales_ptr, num_rows, inner, filled, apart, step_row, step_inner, BK: tl.constexpr
):
    """A square of [E, num_rows, inner], which is `apart` elements from expert to expert."""
    expert, down, across = tl.program_id(2), tl.program_id(1), tl.program_id(0)
    at_row, at_inner = down * BK + tl.arange(0, BK), across * BK + tl.arange(0, BK)
    known = (at_row < num_rows)[:, None]
    w_at = w_ptr + expert.to(tl.int64) * apart
    offset = at_row.to(tl.int64)[:, None] * step_row + at_inner.to(tl.int64)[None, :] * step_inner
    w = tl.load(w_at + offset, mask=known & (at_inner < inner)[None, :], other=0.0).to(tl.float32)
    scale = _scale_of(tl.max(tl.max(_magnitude(w), 1), 0))
    q = e4m3_bits(w * tl.div_rn(1.0, scale))
    q_at = q_ptr + expert.to(tl.int64) * num_rows * filled
    tl.store(q_at + at_row[:, None] * filled + at_inner[None, :], q, mask=known)
    tl.store(scales_ptr + (expert * tl.num_programs(1) + down) * tl.num_programs(0) + across, scale)


@triton.jit
def _quantise_columns_kernel(
    x_ptr,
    ends_ptr,
    q_ptr,
    scales_ptr,
    from_group,
    past_group,
    columns,
    places,
    GROUPS: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    """A block of BK places of the groups from_group .. past_group, of BN columns; places behind a group's end are 0."""
    block, groups = tl.program_id(0), tl.arange(0, GROUPS)
    starts, ends, blocks, through = tiles_of(ends_ptr, 0, past_group, GROUPS, BK)
    group = tl.sum(((groups < past_group) & (through <= block)).to(tl.int32))
    if (group >= from_group) & (group < past_group):
        mine = groups == group
        end = tl.sum(tl.where(mine, ends, 0))
        row = tl.sum(tl.where(mine, starts + (block - through + blocks) * BK, 0))
        at_row, at_column = tl.arange(0, BK), tl.program_id(1) * BN + tl.arange(0, BN)
        in_columns = at_column < columns
        x_at = x_ptr + row.to(tl.int64) * columns
        offset = at_row[:, None] * columns + at_column[None, :]
        x = tl.load(x_at + offset, mask=(at_row < end - row)[:, None] & in_columns[None, :], other=0.0).to(tl.float32)
        scale = _scale_of(tl.max(_magnitude(x), 0))
        q = e4m3_bits(x * tl.div_rn(1.0, scale)[None, :])
        q_offset = at_column.to(tl.int64)[None, :] * places + block * BK + at_row[:, None]
        tl.store(q_ptr + q_offset, q, mask=in_columns[None, :])
        tl.store(scales_ptr + block.to(tl.int64) * columns + at_column, scale, mask=in_columns)


@triton.jit
def _rows_kernel(
    x_ptr,
    x_scales_ptr,
    w_ptr,
    w_scales_ptr,
    ends_ptr,
    out_ptr,
    num_rows,
    from_group,
    num_groups,
    k,
    f,
    GROUPS: tl.constexpr,
    BAND: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    """out[i] = x[i] @ w[e - from_group] for the rows i of the groups e in from_group .. num_groups. k: a multiple of
    BK."""
    starts, ends, heights, through = tiles_of(ends_ptr, from_group, num_groups, GROUPS, BM)
    columns = (f + BN - 1) // BN
    for tile in range(tl.program_id(0), tl.sum(heights) * columns, tl.num_programs(0)):
        group, start, end, down, across = find_tile(tile, starts, ends, heights, through, columns, GROUPS, BAND)
        row, column, expert = start + down * BM, across * BN, group - from_group
        x_at, w_at = x_ptr + row.to(tl.int64) * k, w_ptr + (expert.to(tl.int64) * f + column) * k
        x_scale_at = x_scales_ptr + row
        w_scale_at = w_scales_ptr + (expert * ((f + BK - 1) // BK) + column // BK) * (k // BK)
        at_row, at_f, at_k = tl.arange(0, BM), tl.arange(0, BN), tl.arange(0, BK)
        in_rows, in_f = at_row < end - row, at_f < f - column
        x_offset = at_row[:, None] * k + at_k[None, :]
        w_offset = at_k[:, None] + at_f[None, :] * k
        total = tl.zeros((BM, BN), dtype=tl.float32)
        for _ in range(0, k, BK):
            a = tl.load(x_at + x_offset, mask=in_rows[:, None], other=0.0)
            b = tl.load(w_at + w_offset, mask=in_f[None, :], other=0.0)
            scale = tl.load(x_scale_at + at_row, mask=in_rows, other=0.0) * tl.load(w_scale_at)
            total = tl.fma(tl.dot(a, b), scale[:, None], total)
            x_at += BK
            w_at += BK
            x_scale_at += num_rows
            w_scale_at += 1
        out_at = out_ptr + row.to(tl.int64) * f + column
        out_offset = at_row[:, None] * f + at_f[None, :]
        tl.store(out_at + out_offset, round_to(total, out_ptr.dtype.element_ty), mask=in_rows[:, None] & in_f[None, :])


@triton.jit
def _weights_kernel(
    x_ptr,
    x_scales_ptr,
    g_ptr,
    g_scales_ptr,
    ends_ptr,
    out_ptr,
    first,
    num_groups,
    k,
    f,
    places,
    GROUPS: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    """out[e] = x_e^T @ g_e for the groups first + e of a stack; zeros for one without rows. x [k, places] and
    g [f, places] as _quantise_columns_kernel lays them."""
    expert = tl.program_id(1)
    groups = tl.arange(0, GROUPS)
    _, _, blocks, _ = tiles_of(ends_ptr, 0, num_groups, GROUPS, BK)
    begin = tl.sum(tl.where(groups < first + expert, blocks, 0))
    num_blocks = tl.sum(tl.where(groups == first + expert, blocks, 0))
    columns = (f + BN - 1) // BN
    from_k, from_f = tl.program_id(0) // columns * BM, tl.program_id(0) % columns * BN
    at_k, at_f, at_row = tl.arange(0, BM), tl.arange(0, BN), tl.arange(0, BK)
    in_k, in_f = at_k < k - from_k, at_f < f - from_f
    # Scalars move along, offsets of 32 bits stay.
    x_at = x_ptr + from_k.to(tl.int64) * places + begin * BK
    g_at = g_ptr + from_f.to(tl.int64) * places + begin * BK
    x_offset = at_k[:, None] * places + at_row[None, :]
    g_offset = at_f[None, :] * places + at_row[:, None]
    x_scale_at = x_scales_ptr + begin.to(tl.int64) * k + from_k
    g_scale_at = g_scales_ptr + begin.to(tl.int64) * f + from_f
    total = tl.zeros((BM, BN), dtype=tl.float32)
    for _ in range(num_blocks):
        a = tl.load(x_at + x_offset, mask=in_k[:, None], other=0.0)
        b = tl.load(g_at + g_offset, mask=in_f[None, :], other=0.0)
        x_scale = tl.load(x_scale_at + at_k, mask=in_k, other=0.0)
        g_scale = tl.load(g_scale_at + at_f, mask=in_f, other=0.0)
        total = tl.fma(tl.dot(a, b), x_scale[:, None] * g_scale[None, :], total)
        x_at += BK
        g_at += BK
        x_scale_at += k
        g_scale_at += f
    out_at = out_ptr + expert.to(tl.int64) * k * f + from_k.to(tl.int64) * f + from_f
    out_offset = at_k[:, None] * f + at_f[None, :]
    tl.store(out_at + out_offset, round_to(total, out_ptr.dtype.element_ty), mask=in_k[:, None] & in_f[None, :])


def _filled(size: int) -> int:
    return triton.cdiv(size, BLOCK) * BLOCK


def quantise_rows(
    x: torch.Tensor, ends: torch.Tensor, groups: tuple[int, int], rows: int = ROWS
) -> tuple[torch.Tensor, torch.Tensor]:
    """x [N, K] contiguous -> (float8_e4m3fn [N, K'], fp32 [K' / 128, N]), of the rows of some groups (first, past the
    last); others' are undefined."""
    (num_rows, k), filled = x.shape, _filled(x.shape[1])
    q = torch.empty(num_rows, filled, dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty(filled // BLOCK, num_rows, dtype=torch.float32, device=x.device)
    grid = (triton.cdiv(num_rows, rows), filled // BLOCK)
    _quantise_rows_kernel[grid](
        x, ends, q.view(torch.uint8), scales, num_rows, *groups, k, filled, BM=rows, BK=BLOCK, **QUANTISING
    )
    return q, scales


def quantise_weights(stacks: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Stacks [E_i, K, F], any strides -> (float8_e4m3fn [E, F, K'], fp32 [E, F' / 128, K' / 128]), E the sum of E_i."""
    (_, k, f), experts = stacks[0].shape, sum(stack.shape[0] for stack in stacks)
    device, blocks = stacks[0].device, (triton.cdiv(k, BLOCK), triton.cdiv(f, BLOCK))
    q = torch.empty(experts, f, _filled(k), dtype=torch.float8_e4m3fn, device=device)
    scales = torch.empty(experts, blocks[1], blocks[0], dtype=torch.float32, device=device)
    first = 0
    for stack in stacks:
        here = slice(first, first := first + stack.shape[0])
        if stack.shape[0]:
            apart, step_k, step_f = stack.stride()
            into = q[here].view(torch.uint8), scales[here]
            grid = (*blocks, stack.shape[0])
            _quantise_weights_kernel[grid](
                stack, *into, f, k, q.shape[2], apart, step_f, step_k, BK=BLOCK, **QUANTISING
            )
    return q, scales


def quantise_columns(
    x: torch.Tensor, ends: torch.Tensor, groups: tuple[int, int], columns: int = COLUMNS
) -> tuple[torch.Tensor, torch.Tensor]:
    """x [N, C] contiguous -> (float8_e4m3fn [C, P], fp32 [P / 128, C]) of some groups (first, past the last): the rows
    of a group from a multiple of 128 on, zeros behind its last up to the next. The rest is undefined."""
    num_rows, width = x.shape
    blocks = num_rows // BLOCK + min(ends.numel(), num_rows)  # a group's rest is less than a block
    q = torch.empty(width, blocks * BLOCK, dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty(blocks, width, dtype=torch.float32, device=x.device)
    _quantise_columns_kernel[(blocks, triton.cdiv(width, columns))](
        x,
        ends,
        q.view(torch.uint8),
        scales,
        *groups,
        width,
        blocks * BLOCK,
        GROUPS=triton.next_power_of_2(groups[1]),
        BN=columns,
        BK=BLOCK,
        **QUANTISING,
    )
    return q, scales


def rows_times_stacks(
    x: torch.Tensor,
    stacks: Sequence[torch.Tensor],
    ends: torch.Tensor,
    out: torch.Tensor,
    groups: tuple[int, int] | None = None,
) -> None:
    """out[i] = x[i] @ w[e] for every row i of every group e; other rows of out stay as they are.

    x [N, K] and out [N, F] contiguous, of one floating dtype; ends int32 [all groups]. groups: (first, past the last)
    of those whose weights the stacks [E_i, K, F] are, for one launch of several; None: all."""
    num_rows, f = x.shape[0], out.shape[1]
    begin, past = groups or (0, ends.numel())
    if begin == past:
        return
    values, scales = quantise_rows(x, ends, (begin, past))
    weights, weight_scales = quantise_weights(stacks)
    # As many tiles as any counts can make, and the programs of triton_grouped.rows_times_stacks, for its reasons.
    most = (triton.cdiv(num_rows, TILE["BM"]) + min(past - begin, num_rows)) * triton.cdiv(f, TILE["BN"])
    _rows_kernel[(min(most, programs(x.device)) if groups is None else max(most, 1),)](
        values,
        scales,
        weights,
        weight_scales,
        ends,
        out,
        num_rows,
        begin,
        past,
        values.shape[1],
        f,
        GROUPS=triton.next_power_of_2(past),
        BAND=BAND_TILES,
        BK=BLOCK,
        **TILE,
        **OPTIONS,
    )


def weight_gradients(
    x: torch.Tensor,
    g: torch.Tensor,
    ends: torch.Tensor,
    into: Sequence[tuple[int, torch.Tensor]],
    groups: tuple[int, int],
) -> None:
    """out[e] = x_e^T @ g_e, exact zeros for a group without rows, for every (first group, out [E, K, F]) of `into`.

    x [N, K], g [N, F] and out contiguous, of one floating dtype; ends int32 [all groups]; groups: (first, past the
    last) of those of `into`."""
    if groups[0] == groups[1]:
        return
    past = groups[1]
    (values, scales), (gradients, gradient_scales) = (quantise_columns(rows, ends, groups) for rows in (x, g))
    for first, out in into:
        experts, k, f = out.shape
        if not experts:
            continue
        _weights_kernel[(triton.cdiv(k, TILE["BM"]) * triton.cdiv(f, TILE["BN"]), experts)](
            values,
            scales,
            gradients,
            gradient_scales,
            ends,
            out,
            first,
            past,
            k,
            f,
            values.shape[1],
            GROUPS=triton.next_power_of_2(past),
            BK=BLOCK,
            **TILE,
            **OPTIONS,
        )
