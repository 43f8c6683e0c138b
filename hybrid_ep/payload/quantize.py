"""Payloads of few bits for dispatch: blocks of a row share a scale, and the scales travel with the token.

======  ========  =============================================  =====  =============
format  elements  scale                                          block  bytes a value
======  ========  =============================================  =====  =============
fp8     e4m3      fp32, amax / 448                                 128  1.031
mxfp8   e4m3      e8m0, the power of two at or above amax / 448     32  1.031
nvfp4   e2m1      e4m3, and fp32 a token; see nvfp4.py              16  0.5625
======  ========  =============================================  =====  =============

mxfp8 is the OCP microscaling format (MX v1.0); its scale rounds up, so that nothing saturates. Values of bf16
and fp32 above 3.2e38 may come back as infinity, those of fp16 do not. A block of zeros has
scale 0 (fp8) or 2^-127 (mxfp8) and comes back as zeros, as do padding rows, whose bytes are all zero."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hybrid_ep.payload import nvfp4

E4M3_MAX = 448.0
_E8M0_BIAS = 127


@dataclass(frozen=True)
class Format:
    """A payload of few bits: elements that share a scale, and the scales' dtype."""

    name: str
    block: int  # elements that share a scale
    scale_dtype: torch.dtype


FORMATS = {f.name: f for f in (Format("fp8", 128, torch.float32), Format("mxfp8", 32, torch.uint8))}
NVFP4 = Format("nvfp4", 16, torch.uint8)
CHOICES = ("bf16", *FORMATS)  # bf16: the payload travels as it is


def format_of(dispatch_dtype: str | None, hidden: int) -> Format | None:
    """The format that a name means for rows of `hidden` elements; None for None and "bf16". ValueError otherwise."""
    if dispatch_dtype is None or dispatch_dtype == "bf16":
        return None
    if dispatch_dtype == NVFP4.name:
        if hidden % 32:
            raise ValueError(
                "dispatch_dtype='nvfp4' packs rows of whole 16-byte units, which "
                f"hidden={hidden} does not give; pad hidden to a multiple of 32, or use 'bf16'"
            )
        return NVFP4
    if dispatch_dtype not in FORMATS:
        raise ValueError(f"dispatch_dtype={dispatch_dtype!r} must be one of {', '.join(CHOICES)}, nvfp4, or None")
    found = FORMATS[dispatch_dtype]
    if hidden % found.block:
        raise ValueError(
            f"dispatch_dtype={dispatch_dtype!r} scales blocks of {found.block} elements, which do not "
            f"divide hidden={hidden}; pad hidden to a multiple of {found.block}, or use 'bf16'"
        )
    return found


def quantize(x: torch.Tensor, fmt: Format) -> tuple[torch.Tensor, torch.Tensor]:
    """x [T, H], floating -> (float8_e4m3fn [T, H], scales [T, H / block] of fmt.scale_dtype).

    Rounds to nearest, ties to even; no value is clipped. A block with a NaN or an infinity comes back as NaN. nvfp4:
    as nvfp4.quantize."""
    if fmt is NVFP4:
        return nvfp4.quantize(x)
    blocks = x.float().unflatten(1, (-1, fmt.block))
    wanted = blocks.abs().amax(2) / E4M3_MAX
    if fmt.name == "fp8":
        scales, divisor = wanted, torch.where(wanted > 0, wanted, torch.ones_like(wanted))
    else:
        mantissa, exponent = torch.frexp(wanted)  # wanted = mantissa * 2^exponent, mantissa in [0.5, 1)
        exponent = exponent - (mantissa == 0.5).int()  # a power of two is its own ceiling
        biased = (exponent + _E8M0_BIAS).clamp(0, 254).masked_fill(wanted == 0, 0).masked_fill(~wanted.isfinite(), 255)
        scales, divisor = biased.to(torch.uint8), _e8m0(biased)
    return (blocks / divisor[..., None]).flatten(1).to(torch.float8_e4m3fn), scales


def dequantize(payload: torch.Tensor, scales: torch.Tensor, fmt: Format, dtype: torch.dtype) -> torch.Tensor:
    """(float8_e4m3fn [P, H], scales [P, H / block]) -> dtype [P, H]: the product in fp32, rounded once."""
    if fmt is NVFP4:
        return nvfp4.dequantize(payload, scales, dtype)
    factors = scales if fmt.name == "fp8" else _e8m0(scales)
    return nvfp4.rounded((payload.float().unflatten(1, (-1, fmt.block)) * factors[..., None]).flatten(1), dtype)


def _e8m0(biased: torch.Tensor) -> torch.Tensor:
    """2^(biased - 127), exactly, as fp32; 255 is NaN."""
    powers = torch.ldexp(torch.ones_like(biased, dtype=torch.float32), biased.int() - _E8M0_BIAS)
    return powers.masked_fill(biased == 255, float("nan"))
