"""Roundings that are the same on every machine that runs Triton: fp32 to bf16, and products before sums.

fp32 to bf16 to the nearest, ties to even: Triton's own cast is cvt.rn on GPUs from compute capability 8.0 on, which is
this very rounding, but its interpreter cuts the low half off: results there are biased towards zero by up to a whole
unit in the last place. Integer arithmetic says the same everywhere, so that what the interpreter tests is what a GPU
computes.
"""

from __future__ import annotations

import triton
import triton.language as tl

# Of every launch with arithmetic. A product that is added is rounded first, as torch does it: by default Triton fuses
# the two up to 3.9 and does not from 3.10 on.
LAUNCH = {"enable_fp_fusion": False}


@triton.jit
def round_to(x, dtype: tl.constexpr):
    """x fp32 -> dtype (bf16, fp16 or fp32); NaN stays NaN, what is beyond the largest value becomes infinite."""
    if dtype == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        quiet_nan = (bits >> 16) | 0x40
        return tl.where(x != x, quiet_nan, nearest).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    return x.to(dtype)


@triton.jit
def e4m3_bits(x):
    """x fp32, at most 448 in magnitude or NaN -> uint8, the bits of e4m3: to the nearest, ties to even.

    Triton's interpreter errs in its own cast below 2^-9, and GPUs and it agree on this."""
    bits = x.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - (
        120 << 3
    )  # exponents are biased by 127, and by 7
    # Below 2^-6 a unit is 2^-9, which is fp32's at 2^14: a sum with that is rounded to it.
    small = (magnitude.to(tl.float32, bitcast=True) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    rounded = tl.where(magnitude < 0x3C800000, small, normal)
    rounded = tl.where(magnitude > 0x7F800000, 0x7F, rounded)
    return (rounded | ((bits >> 24) & 0x80)).to(tl.uint8)
