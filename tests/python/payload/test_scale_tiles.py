"""Scales for block-scaled GEMMs: every byte where the definition puts it, and nothing else."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hybrid_ep.payload import nvfp4, quantize, scale_tiles
from hybrid_ep.testing import VirtualWorld


def place(row: int, block: int, num_blocks: int) -> int:
    """The byte of one scale of a matrix, written out from cuBLAS's text."""
    tile = (row // 128) * ((num_blocks + 3) // 4) + block // 4
    outer, inner = row % 128, block % 4
    return tile * 512 + (outer % 32) * 16 + (outer // 32) * 4 + inner


def one_by_one(scales: torch.Tensor, rows_per_expert: list[int]) -> torch.Tensor:
    num_blocks, parts, first = scales.shape[1], [], 0
    for rows in rows_per_expert:
        part = [0] * ((rows + 127) // 128 * 128 * ((num_blocks + 3) // 4 * 4))
        for row in range(rows):
            for block in range(num_blocks):
                part[place(row, block, num_blocks)] = int(scales[first + row, block])
        parts += part
        first += rows
    return torch.tensor(parts, dtype=torch.uint8)


@given(
    rows=st.lists(st.sampled_from([0, 1, 5, 127, 128, 129, 200]), min_size=1, max_size=4),
    blocks=st.sampled_from([1, 3, 4, 7]),
    tail=st.integers(0, 3),
)
def test_every_scale_lies_where_the_definition_says(rows, blocks, tail):
    scales = torch.randint(1, 256, (sum(rows) + tail, blocks), dtype=torch.uint8)
    counts = torch.tensor(rows, dtype=torch.int32)
    tiles = scale_tiles.swizzle(scales, counts)
    assert torch.equal(tiles.flatten(), one_by_one(scales, rows))
    starts = scale_tiles.tile_starts(counts).tolist()
    assert starts[-1] == tiles.shape[0]
    back = scale_tiles.unswizzle(tiles, blocks)
    first = 0
    for start, n in zip(starts, rows, strict=False):
        assert torch.equal(back[128 * start : 128 * start + n], scales[first : first + n])
        first += n


def test_groups_that_are_whole_tiles_need_no_counts():
    scales = torch.randint(0, 256, (384, 6), dtype=torch.uint8)
    expected = scale_tiles.swizzle(scales, torch.tensor([256, 0, 128]))
    assert torch.equal(scale_tiles.swizzle(scales), expected)


@pytest.mark.parametrize(
    "scales, counts, words",
    [
        (torch.zeros(4, 4), None, "one byte each"),
        (torch.zeros(4, dtype=torch.uint8), None, "one byte each"),
        (torch.zeros(4, 4, dtype=torch.uint8), None, "pad_multiple=128"),
        (torch.zeros(4, 4, dtype=torch.uint8), torch.tensor([3, 2]), "at most scales' 4 rows"),
        (torch.zeros(4, 4, dtype=torch.uint8), torch.tensor([5, -2]), "must be 0 or more"),
    ],
)
def test_what_does_not_fit_is_refused(scales, counts, words):
    with pytest.raises(ValueError, match=words):
        scale_tiles.swizzle(scales, counts)


@pytest.mark.parametrize("fmt", [quantize.FORMATS["mxfp8"], quantize.NVFP4], ids=lambda f: f.name)
def test_from_a_dispatch_to_the_gemms_operand(fmt):
    """What an expert's GEMM would read gives back what was quantised, row for row."""
    world = VirtualWorld(1, 2)
    x = [torch.randn(20, 256) for _ in range(2)]
    idx = torch.stack([torch.randperm(4)[:2] for _ in range(20)])

    def rank(r, group):
        payload, scales = quantize.quantize(x[r], fmt)
        rows, _, scales, counts, _ = buffers[r].dispatch_with_permute(
            hidden=payload, scaling_factor=scales, topk_idx=idx, num_of_experts=4, pad_multiple=128
        )
        of_blocks = nvfp4.block_scales(scales).view(torch.uint8) if fmt is quantize.NVFP4 else scales
        tiles = scale_tiles.swizzle(of_blocks)
        assert torch.equal(tiles, scale_tiles.swizzle(of_blocks, counts))
        read = scale_tiles.unswizzle(tiles, of_blocks.shape[1])
        if fmt is quantize.NVFP4:
            read = torch.cat([read, scales[:, -4:]], 1)
        return [quantize.dequantize(rows, s, fmt, torch.float32) for s in (read, scales)]

    buffers = world.buffers(256, 20, 2, timeout_s=30)
    for got, expected in world.run(rank):
        assert got.shape[0] and torch.equal(got, expected)
