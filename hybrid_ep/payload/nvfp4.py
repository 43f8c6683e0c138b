"""NVFP4: e2m1 elements, two a byte, with an e4m3 scale for every 16 and an fp32 scale a token.

A block's scale alone would lose what is smaller than 6 * 2^-9, so a second one brings a token's largest block to the
top of e4m3. A row of H elements is H / 2 bytes of payload (the first element in the low half) and H / 16 + 4 bytes of
scales: the blocks', then the token's fp32. 0.5625 bytes a value and 4 a token. Zeros, padding rows among them, are
zero bytes; a block with a NaN or an infinity comes back as NaN."""

from __future__ import annotations

import torch

BLOCK, E2M1_MAX, E4M3_MAX = 16, 6.0, 448.0
_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_NAN = 0x7F  # of e4m3
_TOKEN_BYTES = 4


def quantize(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x [T, H], floating, H a multiple of 32 -> (uint8 [T, H / 2], uint8 [T, H / 16 + 4]). To nearest, ties to even."""
    blocks = x.float().unflatten(1, (-1, BLOCK))
    good = blocks.isfinite().all(2)
    blocks = blocks.masked_fill(~good[..., None], 0.0)
    largest = blocks.abs().amax(2)
    token = largest.amax(1) / (E2M1_MAX * E4M3_MAX)
    token_divisor = torch.where(token > 0, token, torch.ones_like(token))
    scales = (largest / E2M1_MAX / token_divisor[:, None]).to(torch.float8_e4m3fn)
    factor = scales.float() * token_divisor[:, None]
    scaled = blocks / torch.where(factor > 0, factor, torch.ones_like(factor))[..., None]
    codes = _codes(scaled.masked_fill((factor == 0)[..., None], 0.0)).flatten(1)
    payload = codes[:, ::2] | codes[:, 1::2] << 4
    said = scales.view(torch.uint8).masked_fill(~good, _NAN)
    return payload, torch.cat([said, token.contiguous().view(torch.uint8).view(-1, _TOKEN_BYTES)], 1)


def dequantize(payload: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The inverse: products in fp32, rounded once."""
    blocks, token = block_scales(scales).float(), token_scales(scales)[:, None]
    codes = torch.stack([payload & 15, payload >> 4], 2).flatten(1)
    values = torch.tensor((*_VALUES, *(-v for v in _VALUES)), device=payload.device, dtype=torch.float32)[codes.long()]
    factor = blocks * torch.where(token > 0, token, torch.ones_like(token))
    return rounded((values.unflatten(1, (-1, BLOCK)) * factor[..., None]).flatten(1), dtype)


def rounded(products: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """fp32 [P, H] in a dtype. What was finite in fp16 stays so, though few bits may have rounded it beyond."""
    if dtype == torch.float16:
        most = torch.finfo(dtype).max
        products = products.clamp(-most, most)
    return products.to(dtype)


def block_scales(scales: torch.Tensor) -> torch.Tensor:
    """float8_e4m3fn [T, H / 16]: what a GEMM of fp4 multiplies blocks by; scale_tiles.swizzle orders them for it."""
    return scales[:, :-_TOKEN_BYTES].contiguous().view(torch.float8_e4m3fn)


def token_scales(scales: torch.Tensor) -> torch.Tensor:
    """fp32 [T]: what remains to be multiplied onto the rows of the GEMM's result. 0 for a token of zeros."""
    # In memory of its own, where fp32 may begin: contiguous() leaves a single row where it lies.
    last = scales[:, -_TOKEN_BYTES:].clone(memory_format=torch.contiguous_format)
    return last.view(torch.float32)[:, 0]


def _codes(x: torch.Tensor) -> torch.Tensor:
    """e2m1 bits of x, saturating. Between two neighbours the even code wins a tie."""
    middles = torch.tensor(
        [(a + b) / 2 for a, b in zip(_VALUES, _VALUES[1:], strict=False)], dtype=torch.float32, device=x.device
    )
    middles[1::2] = torch.nextafter(middles[1::2], torch.zeros_like(middles[1::2]))  # their upper neighbour is even
    return torch.bucketize(x.abs(), middles).to(torch.uint8) | (x.signbit() & (x != 0)).to(torch.uint8) << 3
