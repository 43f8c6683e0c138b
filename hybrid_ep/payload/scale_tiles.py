"""Quantisation scales in the order that block-scaled GEMMs of Blackwell read them: tiles of 128 rows x 4 scales.

A dispatch leaves a row's scales side by side, [P, S]. cuBLAS and CUTLASS (Sm1xxBlockScaledConfig) want them in tiles of
512 bytes, of which the scale of row r and block c in a tile lies at::

    (r % 32) * 16 + (r // 32) * 4 + c          r in 0..127, c in 0..3

and the tiles in row-major order: all tiles of the first 128 rows, then those of the next. Rows and blocks that a tile
has beyond the matrix are zero. The formula is that of "1D Block Scaling Factors Layout" in the cuBLAS documentation
(https://docs.nvidia.com/cuda/cublas/#d-block-scaling-factors-layout), where it is written for scales of one byte; it is
the same for mxfp8 (blocks of 32) and nvfp4 (blocks of 16). Each expert of a grouped GEMM is a matrix of its own, so its
rows begin a tile."""

from __future__ import annotations

import torch

ROWS, BLOCKS = 128, 4
TILE_BYTES = ROWS * BLOCKS


def swizzle(scales: torch.Tensor, rows_per_expert: torch.Tensor | None = None) -> torch.Tensor:
    """scales [P, S], one byte each -> uint8 [row tiles, ceil(S / 4), 512], contiguous, in the GEMM's order.

    rows_per_expert: int [E] whose sum is at most P, the expert-major groups as they lie in scales; each is padded to
    whole tiles here, and rows after the last group (a static budget's tail) are left out. The sizes are read on the
    host. None: the groups are multiples of 128 rows already (dispatch_with_permute(pad_multiple=128)); then this is
    one copy without the host. The tile row of expert e is tile_starts()[e]. For nvfp4 give block_scales(scales).

    ValueError when scales are not two-dimensional bytes, or when the groups do not fit them."""
    if scales.dim() != 2 or scales.element_size() != 1:
        raise ValueError(
            f"scales is {tuple(scales.shape)} of {scales.dtype}; give [rows, blocks] of one byte each "
            "(mxfp8's e8m0 or nvfp4's e4m3)"
        )
    scales = scales.view(torch.uint8)
    if rows_per_expert is not None:
        scales = _pad_groups(scales, rows_per_expert)
    elif scales.shape[0] % ROWS:
        raise ValueError(
            f"scales has {scales.shape[0]} rows, not a multiple of {ROWS}; permute with "
            f"pad_multiple={ROWS}, or give rows_per_expert"
        )
    scales = torch.nn.functional.pad(scales, (0, -scales.shape[1] % BLOCKS))
    tiles = scales.unflatten(0, (-1, ROWS // 32, 32)).unflatten(3, (-1, BLOCKS))  # [tile, r // 32, r % 32, tile, c]
    return tiles.permute(0, 3, 2, 1, 4).reshape(tiles.shape[0], tiles.shape[3], TILE_BYTES)


def unswizzle(tiles: torch.Tensor, num_blocks: int) -> torch.Tensor:
    """The inverse: uint8 [row tiles, ceil(num_blocks / 4), 512] -> [128 * row tiles, num_blocks]."""
    parts = tiles.unflatten(2, (32, ROWS // 32, BLOCKS))  # [tile, tile, r % 32, r // 32, c]
    rows = parts.permute(0, 3, 2, 1, 4).reshape(ROWS * tiles.shape[0], BLOCKS * tiles.shape[1])
    return rows[:, :num_blocks].contiguous()


def tile_starts(rows_per_expert: torch.Tensor) -> torch.Tensor:
    """int64 [E + 1]: the first row tile of every expert, and the number of row tiles."""
    tiles = (rows_per_expert.long() + ROWS - 1) // ROWS
    return torch.cat([tiles.new_zeros(1), tiles.cumsum(0)])


def _pad_groups(scales: torch.Tensor, rows_per_expert: torch.Tensor) -> torch.Tensor:
    rows = rows_per_expert.to(scales.device, torch.int64)
    total, most = int(rows.sum()), scales.shape[0]
    if total > most or (rows.numel() and int(rows.min()) < 0):
        raise ValueError(f"rows_per_expert={rows.tolist()} must be 0 or more and at most scales' {most} rows together")
    starts = tile_starts(rows)
    begins = rows.cumsum(0) - rows
    shift = (ROWS * starts[:-1] - begins).repeat_interleave(rows)
    out = scales.new_zeros(ROWS * int(starts[-1]), scales.shape[1])
    out[torch.arange(total, device=scales.device, dtype=torch.int64) + shift] = scales[:total]
    return out
